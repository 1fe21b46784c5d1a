//! Help, manual, completions.

use crate::common::Workshop;

#[test]
fn help_names_every_command() {
    let shop = Workshop::new();
    let help = shop.ok("--help");
    for command in [
        "create",
        "info",
        "map",
        "check",
        "convert",
        "compare",
        "io",
        "lab study containers",
        "lab study queue-depth",
        "lab study raw-and-file",
        "lab study access-paths",
        "lab study native-and-guest",
        "lab study tiers",
        "lab run",
        "lab sweep",
        "lab compare",
        "lab profiles",
        "lab selftest",
        "completions",
        "man",
    ] {
        let word = command.split(" ").next().unwrap();
        assert!(help.lines().any(|line| line.trim_start().starts_with(word)), "{command} is not in the help");
        let own = shop.ok(&format!("{command} --help"));
        assert!(own.contains("EXAMPLES\n  "), "{command} shows no examples:\n{own}");
    }
}

#[test]
fn examples_are_valid_command_lines() {
    let shop = Workshop::new();
    let help = shop.ok("create --help");
    let examples = help.split("EXAMPLES").nth(1).unwrap();
    let mut tried = 0;
    std::fs::create_dir(shop.path("x")).unwrap();
    shop.ok("create golden.vhdx --size 40G");
    // A fixed disk of 127 GB is more than a test should ask a file system for, and its devices are
    // not those of the example.
    for line in examples
        .lines()
        .filter_map(|line| line.trim().strip_prefix("diskwright "))
        .filter(|line| !line.contains("fixed") && !line.contains("--device"))
    {
        shop.ok(line);
        tried += 1;
    }
    assert!(tried >= 3, "{examples}");
}

#[test]
fn no_name_in_a_warning_drives_the_terminal() {
    let shop = Workshop::new();
    shop.ok("create 'a\x1b[2Jb.vhd' --size 8M");
    shop.ok("create child.vhd --parent 'a\x1b[2Jb.vhd'");
    let parent = std::fs::File::options().write(true).open(shop.path("a\x1b[2Jb.vhd")).unwrap();
    parent.set_modified(std::time::SystemTime::now() - std::time::Duration::from_secs(3600)).unwrap();
    let ended = shop.run("info child.vhd");
    assert!(ended.stderr.contains("was last changed") && ended.stderr.contains("a\\u{1b}[2Jb.vhd"), "{ended:?}");
    assert!(!ended.stderr.contains('\x1b') && !ended.stdout.contains('\x1b'), "{ended:?}");
}

#[test]
fn completions_and_manual_are_made() {
    let shop = Workshop::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(shop.ok(&format!("completions {shell}")).contains("diskwright"), "{shell}");
    }
    shop.fails(2, "completions tcsh");
    assert!(shop.ok("man").starts_with(".ie"), "no troff");
    shop.ok("man pages");
    for page in ["diskwright.1", "diskwright-create.1", "diskwright-io.1"] {
        assert!(shop.path("pages").join(page).exists(), "{page} is missing");
    }
}

#[test]
fn errors_are_sentences_on_standard_error_and_nothing_else() {
    let shop = Workshop::new();
    for line in
        ["info nowhere.vhdx", "info nowhere.vhdx --json", "map nowhere.vhdx --json", "io nowhere.vhdx -c flush --json"]
    {
        let ended = shop.run(line);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{line}");
        assert!(
            ended.stderr.starts_with("diskwright: ") && ended.stderr.contains("nowhere.vhdx"),
            "{line}: {}",
            ended.stderr
        );
        assert!(!ended.stderr.contains("os error"), "{}", ended.stderr);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    }
    let ended = shop.run("");
    assert_eq!(ended.code, Some(2));
    let version = shop.ok("--version");
    assert!(version.starts_with("diskwright "), "{version}");
}

#[test]
fn a_study_that_cannot_be_is_refused_and_one_that_is_stopped_cleans_up() {
    use nix::{sys::signal, unistd::Pid};
    use std::{
        io::{BufRead, BufReader},
        process::Stdio,
    };
    let shop = Workshop::new();
    shop.fails(2, "lab study nonsense");
    shop.fails(2, "lab study containers --cell 0");
    shop.fails(2, "lab study containers --quick --rounds 0");
    std::fs::write(shop.path("file"), b"").unwrap();
    shop.fails(1, "lab study containers --quick --dir file");
    std::fs::remove_file(shop.path("file")).unwrap();
    // The promises against peers are a program of their own.
    shop.fails(2, "bench");
    let mut child = shop
        .command(&["lab", "study", "containers", "--quick", "--size", "32M"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.starts_with("diskwright: prepare"), "{line}");
    signal::kill(Pid::from_raw(child.id() as i32), signal::Signal::SIGINT).unwrap();
    let rest: Vec<String> = stderr.lines().map(Result::unwrap).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}");
    assert_eq!(std::fs::read_dir(shop.path("")).unwrap().count(), 0, "scratch files were left behind");
}
