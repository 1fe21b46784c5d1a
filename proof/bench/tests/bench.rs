//! The bench as it is typed.

use std::{
    fs,
    process::{Command, Output},
};
use tempfile::TempDir;

/// A folder in which the bench runs.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Runs the bench with `words`, separated by blanks, to its end.
    fn run(&self, words: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_diskwright-bench"));
        // Attached disks are recorded here, apart from those of the machine.
        command.env("DISKWRIGHT_RUN_DIR", self.0.path().join("run"));
        command.args(words.split(' ')).current_dir(self.0.path()).output().expect("the bench starts")
    }

    /// Runs rows with `--json`; gives the document and the exit code.
    fn measure(&self, words: &str) -> (serde_json::Value, Option<i32>) {
        let output = self.run(&format!("{words} --json"));
        let document = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        (document, output.status.code())
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

/// Whether a promise is kept is for a quiet machine to say. That the exit code follows the document
/// holds on every machine.
fn code_of(document: &serde_json::Value) -> Option<i32> {
    Some(i32::from(document["rows"].as_array().unwrap().iter().any(|row| row["outcome"] == "fail")))
}

#[test]
fn the_help_names_every_row_and_shows_examples() {
    let output = Folder::new().run("--help");
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && help.contains("EXAMPLES\n  cargo run --release -p diskwright-bench"), "{help}");
    for row in ["workloads", "open-large", "nbd-io", "attach", "null", "agreement"] {
        assert!(help.contains(&format!("- {row}:")), "{row}: {help}");
    }
    assert_eq!(Folder::new().run("nonsense").status.code(), Some(2));
}

#[test]
fn a_row_that_needs_a_fresh_process_is_measured_and_saved() {
    let folder = Folder::new();
    let (document, code) = folder.measure("open-large --quick --rounds 1 --output result.json");
    assert_eq!(document["schema"], "diskwright.lab.acceptance/1");
    assert_eq!((&document["title"], &document["rows"][0]["row"]), (&"Bench".into(), &"open-large".into()));
    for row in document["rows"].as_array().unwrap() {
        for check in row["checks"].as_array().unwrap() {
            assert!(check["figure"].is_object(), "{row:#}");
        }
    }
    assert_eq!(code, code_of(&document));
    let saved: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.0.path().join("result.json")).unwrap()).unwrap();
    assert_eq!(saved["rows"], document["rows"]);
    assert_eq!(folder.names(), ["result.json"], "scratch files were left behind");
    // The program under test is inside; it reads the result.
    let report = folder.run("diskwright lab report result.json");
    let text = String::from_utf8(report.stdout).unwrap();
    assert!(report.status.success() && text.contains("Bench; result.json") && text.contains("open-large"), "{text}");
}

#[test]
fn the_child_that_reads_everywhere_tells_its_cost() {
    let folder = Folder::new();
    assert!(folder.run("diskwright create large.vhdx --size 64G --quiet").status.success());
    let output = folder.run("touch-child large.vhdx 16777216");
    let cost: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(cost["reads"], 256);
    assert_eq!(folder.run("touch-child large.vhdx much").status.code(), Some(2));
    assert_eq!(folder.run("touch-child missing.vhdx 16777216").status.code(), Some(1));
}

#[test]
fn a_row_of_the_generator_is_the_one_of_the_lab() {
    let folder = Folder::new();
    let output = folder.run("null --quick --cell 0.02 --rounds 1 --dir there");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{text}");
    assert!(text.contains("null: ") && text.contains("IOPS on one core"), "{text}");
    assert!(!text.contains("nothing was measured"), "{text}");
    assert_eq!(folder.names(), [""; 0], "the folder was made for the bench, and goes with it");
}

#[test]
fn the_program_under_test_starts_its_own_processes() {
    let missing = ["/dev/fuse", "/dev/loop-control"].into_iter().find(|device| fs::File::open(device).is_err());
    if let Some(device) = missing {
        println!("skipped: attaching by the bench's own executable (cannot open {device})");
        return;
    }
    let folder = Folder::new();
    let ok = |words: &str| {
        let output = folder.run(words);
        assert!(output.status.success(), "{words}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    ok("diskwright create disk.vhdx --size 8M --quiet");
    // A supervisor and a server are started, both from the bench's own command line.
    let device = ok("diskwright attach disk.vhdx --by loop");
    assert!(device.starts_with("/dev/loop"), "{device}");
    ok(&format!("diskwright detach {}", device.trim()));
    assert!(!ok("diskwright attached").contains("/dev/loop"));
}
