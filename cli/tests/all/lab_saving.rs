//! What is measured and cannot be saved, and what is there already: results, reports and profiles
//! as files.

use crate::common::{Running, Workshop};
use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::fs::MetadataExt,
    process::Stdio,
};

const SHORT: &str = "--warm-up 0 --duration 100ms";

/// Starts a command and makes a folder of the name of its result as soon as it tells of `phase`.
/// Returns its exit code and what it printed.
fn taken_meanwhile(line: &str, phase: &str) -> (Option<i32>, String, String) {
    let shop = Workshop::new();
    let words: Vec<&str> = line.split(' ').collect();
    let mut child = Running::start(shop.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut said: Vec<String> = Vec::new();
    while !said.last().is_some_and(|line| line.contains(phase)) {
        said.push(lines.next().unwrap_or_else(|| panic!("`{line}` was never in the phase {phase}: {said:#?}")));
    }
    // It may just be saving what it has.
    while fs::create_dir(shop.path("r.json")).is_err() {
        let _ = fs::remove_file(shop.path("r.json"));
    }
    let mut printed = String::new();
    let reader = std::thread::spawn(move || lines.collect::<Vec<_>>());
    child.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    let code = child.wait().unwrap().code();
    said.extend(reader.join().unwrap());
    assert!(shop.path("r.json").is_dir(), "{line}");
    (code, printed, said.pop().unwrap())
}

#[test]
fn what_was_measured_is_shown_though_it_cannot_be_saved() {
    for (line, phase, code, shown) in [
        ("lab run null: --warm-up 0 --duration 2s -o r.json", "measuring", 1, "IOPS"),
        ("diskspd --save r.json -d2 -W0 -b4K null:64M", "measuring", 1, "total:"),
        ("lab compare --live null: null:1G --rounds 2 --warm-up 0 --duration 1s -o r.json", "compare", 2, "null:1G"),
        ("lab selftest --quick --cell 0.2 --rounds 1 -o r.json", "recording", 1, "IOPS on one core"),
        ("lab study zero-payload --quick --size 32M --rounds 1 --cell 0.2 -o r.json", "measure", 1, "64K random read"),
        (
            "lab sweep null: --vary queue-depth=1,2 --rounds 1 --warm-up 0 --duration 1s -o r.json",
            "sweep",
            1,
            "Unfinished: 1 of 2",
        ),
    ] {
        let (ended, printed, error) = taken_meanwhile(line, phase);
        assert_eq!(ended, Some(code), "{line}: {error}");
        assert!(printed.contains(shown) && !printed.contains("saved to"), "{line}: {printed}");
        assert!(error.contains("r.json: not a regular file; nothing was changed"), "{line}: {error}");
    }
}

#[test]
fn a_place_is_looked_at_before_anything_is_made() {
    let shop = Workshop::new();
    fs::write(shop.path("package.json"), "{\"name\": \"x\"}").unwrap();
    for line in [
        "lab sweep new.dat --create-size 8M --fill --vary queue-depth=1,2",
        "lab run new.dat --create-size 8M --fill -d 1s",
        "lab selftest --cell 3600",
        "lab study containers --cell 3600",
        "lab study queue-depth --cell 3600",
        "lab study access-paths --cell 3600",
        "lab study zero-payload --cell 3600",
        "lab study tiers --cell 3600",
    ] {
        let error = shop.fails(1, &format!("{line} -o package.json"));
        assert!(error.contains("package.json: file exists and is not a result; nothing was changed"), "{error}");
        let error = shop.fails(1, &format!("{line} -o nowhere/x.json"));
        assert!(error.contains("cannot write the result to nowhere/x.json: No such file"), "{error}");
    }
    assert_eq!(fs::read_dir(shop.path("")).unwrap().count(), 1);
    assert_eq!(fs::read_to_string(shop.path("package.json")).unwrap(), "{\"name\": \"x\"}");
    // A study that is given no name has nothing to do with this one.
    fs::write(shop.path("diskwright-study.json"), "mine").unwrap();
    let refused = shop.run("lab study zero-payload --dir package.json/x");
    assert!(refused.code != Some(0) && refused.stderr.contains("package.json"), "{refused:#?}");
    assert!(!refused.stderr.contains("diskwright-study.json"), "{refused:#?}");
}

#[test]
fn a_report_replaces_a_report_and_nothing_else() {
    let shop = Workshop::new();
    shop.ok(&format!("lab run null: {SHORT} -o x.json"));
    let others: [(&str, &[u8]); 4] = [
        ("disk.raw", &[0xab; 1 << 16]),
        ("notes.md", b"# Notes\n"),
        ("mine.csv", b"result,of,mine\n"),
        ("package.json", b"{\"name\": \"x\"}"),
    ];
    for (name, bytes) in others {
        fs::write(shop.path(name), bytes).unwrap();
        for form in ["html", "md", "csv", "json"] {
            let error = shop.fails(1, &format!("lab report x.json --as {form} -o {name}"));
            assert!(error.contains("file exists and is not a re") && error.contains("nothing was changed"), "{error}");
        }
        assert!(fs::read(shop.path(name)).unwrap() == bytes, "{name}");
    }
    for name in ["r.html", "r.md", "r.csv", "r.json"] {
        for _ in 0..2 {
            shop.ok(&format!("lab report x.json -o {name}"));
        }
    }
    // What was measured is not replaced by a page of something else.
    let error = shop.fails(1, "lab report x.json --as html -o r.json");
    assert!(error.contains("not a report"), "{error}");
}

#[test]
fn the_names_of_a_run_are_chosen_before_it() {
    let shop = Workshop::new();
    let line = format!("lab run null: {SHORT} -o x.json");
    // What is no file, and what cannot be read, is not ours.
    fs::create_dir(shop.path("x.toml")).unwrap();
    assert!(shop.ok(&line).contains("--profile x.run.toml"));
    let first = fs::metadata(shop.path("x.run.toml")).unwrap().ino();
    fs::hard_link(shop.path("x.run.toml"), shop.path("before.toml")).unwrap();
    shop.ok(&line);
    assert_ne!(fs::metadata(shop.path("x.run.toml")).unwrap().ino(), first, "it was written in place");
    fs::write(shop.path("x.run.toml"), "mine").unwrap();
    fs::remove_file(shop.path("x.json")).unwrap();
    let error = shop.fails(1, &line);
    assert!(error.contains("cannot be saved as x.toml or as x.run.toml; nothing was changed"), "{error}");
    assert!(!shop.path("x.json").exists(), "it was measured, and saved without a profile");
    assert_eq!(fs::read_to_string(shop.path("x.run.toml")).unwrap(), "mine");
}
