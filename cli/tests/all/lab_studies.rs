//! The studies and the selftest as they are typed, and as they are stopped: by `timeout`, by a
//! terminal that is closed.

use crate::common::{Running, Workshop, hears_hangups};
use nix::{sys::signal, unistd::Pid};
use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::Stdio,
};

/// What is in the folder, hidden or not.
fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Starts a study, waits until it says that it is in `phase`, and gives it with the rest of what it
/// will say.
fn study_in(shop: &Workshop, phase: &str, options: &[&str]) -> (Running, impl Iterator<Item = String> + use<>) {
    let line = [&["lab", "study", "containers", "--quick", "--size", "32M", "--chain-length", "1,2"], options].concat();
    let mut child = Running::start(shop.command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let wanted = format!("diskwright: {phase}");
    assert!(lines.any(|line| line.starts_with(&wanted)), "the study was never in the phase {phase}");
    (child, lines)
}

#[test]
fn a_study_ended_by_timeout_cleans_up() {
    // `timeout` sends its signal to the program, and at once again to the group that it is in.
    let shop = Workshop::new();
    for phase in ["prepare", "verify"] {
        let (mut child, rest) = study_in(&shop, phase, &[]);
        let pid = Pid::from_raw(child.id() as i32);
        signal::kill(pid, signal::Signal::SIGTERM).unwrap();
        signal::kill(pid, signal::Signal::SIGTERM).unwrap();
        let rest: Vec<String> = rest.collect();
        assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}");
        assert_eq!(names(&shop.path("")), [""; 0], "scratch files were left behind in {phase}");
        assert!(rest.last().unwrap().contains("stopped"), "{rest:?}");
    }
}

#[test]
fn a_size_that_is_rounded_up_is_told_before_anything_is_made() {
    let shop = Workshop::new();
    let line = ["lab", "study", "containers", "--quick", "--size", "33M"];
    let mut child = Running::start(shop.command(&line).stdout(Stdio::null()).stderr(Stdio::piped()));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let first = lines.next().unwrap();
    assert!(first.contains("each disk will have 64 MiB, not 33 MiB"), "{first}");
    assert!(lines.any(|line| line.starts_with("diskwright: prepare")));
    signal::kill(Pid::from_raw(child.id() as i32), signal::Signal::SIGTERM).unwrap();
    lines.for_each(drop);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn a_study_that_is_hung_up_while_it_measures_keeps_what_it_has_and_says_that_it_is_partial() {
    if !hears_hangups() {
        return;
    }
    let shop = Workshop::new();
    let options = ["--cell", "0.02", "--rounds", "3", "--output", "found.json"];
    let (child, rest) = study_in(&shop, "measure", &options);
    signal::kill(Pid::from_raw(child.id() as i32), signal::Signal::SIGHUP).unwrap();
    let rest: Vec<String> = rest.collect();
    let output = child.output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{rest:?}");
    assert_eq!(names(&shop.path("")), ["found.json"], "scratch files were left behind");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.starts_with("Partial, stopped: ") && printed.contains("saved to found.json"), "{printed}");
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(shop.path("found.json")).unwrap()).unwrap();
    assert_eq!(saved["end"]["kind"], "stopped");
    let compared = saved["cells"].as_array().unwrap().iter().filter(|cell| cell["part"] == "containers");
    assert!(saved["chain"].is_object() && compared.count() < 19 * 7, "{saved}");
    // What was kept can be shown.
    assert!(shop.ok("lab report found.json --as md").contains("partial"));
}

#[test]
fn the_selftest_runs_as_typed() {
    let shop = Workshop::new();
    let ended = shop.run("lab selftest --quick --cell 0.5 --rounds 1 --json --output self.json");
    let json: serde_json::Value = serde_json::from_str(&ended.stdout).expect("one JSON document");
    let rows: Vec<&str> = json["rows"].as_array().unwrap().iter().map(|row| row["row"].as_str().unwrap()).collect();
    assert_eq!(rows, ["generator", "generator-cpu", "recording", "null", "memory"]);
    // Whether promises are kept is for a quiet machine to say; that code and document agree is for
    // every machine.
    let failed = json["rows"].as_array().unwrap().iter().any(|row| row["outcome"] == "fail");
    assert_eq!(ended.code, Some(i32::from(failed)), "{ended:#?}");
    for row in json["rows"].as_array().unwrap() {
        for check in row["checks"].as_array().unwrap() {
            // fio may be missing, by name; nothing else may be.
            let why = check["why"].as_str().unwrap_or_default();
            assert!(check["figure"].is_object() || why.contains("fio is not installed"), "{row:#}");
        }
    }
    assert_eq!(names(&shop.path("")), ["self.json"], "scratch files were left behind");
    assert!(shop.ok("lab report self.json --as md").contains("null"));
}

#[test]
fn a_small_study_says_what_it_found_and_what_it_left_out() {
    let shop = Workshop::new();
    let printed = shop
        .ok("lab study containers --quick --size 32M --cell 0.01 --rounds 1 --chain-length 1,2 --output found.json");
    for part in [
        "Populated dynamic and differencing disks",
        "Not measured in the quick study",
        "OLTP database",
        "Writing into empty disks",
        "Block size, VHD dynamic",
        "Chains of differencing disks",
        "saved to found.json",
    ] {
        assert!(printed.contains(part), "{part} is missing in\n{printed}");
    }
    assert_eq!(names(&shop.path("")), ["found.json"]);
    shop.ok("lab report found.json -o page.html");
    let page = std::fs::read_to_string(shop.path("page.html")).unwrap();
    assert!(page.contains("Writing into empty disks") && page.contains("Block size, VHD dynamic"));
    let rows = shop.ok("lab report found.json --as csv");
    for experiment in ["containers", "chain", "expanding", "block size"] {
        assert!(rows.lines().any(|row| row.contains(&format!(",{experiment},"))), "{experiment}:\n{rows}");
    }
    // The same study twice is no difference worth an exit code.
    shop.ok("lab compare found.json found.json");
}
