//! Help, manual, completions.

mod common;

use common::Workshop;

#[test]
fn help_names_every_command() {
    let shop = Workshop::new();
    let help = shop.ok("--help");
    for command in ["create", "info", "map", "check", "convert", "compare", "io", "completions", "man"] {
        assert!(help.lines().any(|line| line.trim_start().starts_with(command)), "{command} is not in the help");
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
    // A fixed disk of 127 GB is more than a test should ask a file system for.
    for line in examples.lines().filter_map(|line| line.trim().strip_prefix("diskwright ")).filter(|line| !line.contains("fixed")) {
        shop.ok(line);
        tried += 1;
    }
    assert!(tried >= 3, "{examples}");
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
    for line in ["info nowhere.vhdx", "info nowhere.vhdx --json", "map nowhere.vhdx --json", "io nowhere.vhdx -c flush --json"] {
        let ended = shop.run(line);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{line}");
        assert!(ended.stderr.starts_with("diskwright: ") && ended.stderr.contains("nowhere.vhdx"), "{line}: {}", ended.stderr);
        assert!(!ended.stderr.contains("os error"), "{}", ended.stderr);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    }
    let ended = shop.run("");
    assert_eq!(ended.code, Some(2));
    let version = shop.ok("--version");
    assert!(version.starts_with("diskwright "), "{version}");
}
