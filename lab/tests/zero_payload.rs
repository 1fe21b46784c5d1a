//! The study `zero-payload`, small. In a process of its own, as the kernel's account that it reads
//! is of the process.

use diskwright_lab::{
    LabError,
    progress::Step,
    study::{
        StudyOptions,
        zero_payload::{Payload, Test, ZeroPayloadOptions, ZeroPayloadResult, not_stored, run},
    },
};
use diskwright_load::{record::End, warning::Warning};
use std::time::Duration;

// One test, as another beside it would be in the account.
#[test]
fn a_small_study_finds_that_zeros_never_reach_the_store_and_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let options = ZeroPayloadOptions {
        study: StudyOptions {
            quick: true,
            dir: Some(home.path().to_owned()),
            rounds: Some(1),
            // A cell of 60 ms has had no request on a busy machine.
            cell: Some(Duration::from_millis(250)),
            output: Some(home.path().join("result.json")),
            ..StudyOptions::default()
        },
        size_bytes: Some(32 << 20),
    };
    let stopped = run(&options, &mut |_: Step<'_>| false);
    assert!(matches!(stopped, Err(LabError::Stopped)));
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "a stopped study leaves nothing");

    // The first of the four tests has a cell on each of the four disks.
    let report = run(&options, &mut |step: Step<'_>| step.phase != "measure" || step.done < 6).unwrap();
    assert!(report.stopped && report.result.head.end == End::Stopped);
    assert_eq!(report.result.cells.len(), 4, "one test with zeros, and with data, on two disks each");
    let verdict = &report.result.head.verdict;
    assert!(verdict.starts_with("Partial: "), "{verdict}");
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1, "only the result is left");

    let report = run(&options, &mut |_: Step<'_>| true).unwrap();
    let result = &report.result;
    assert!(!report.stopped && result.head.end == End::Complete);
    assert_eq!(result.cells.len(), 16);
    if result.head.warnings.iter().any(|warning| matches!(warning, Warning::DirectNotHonoured { .. })) {
        println!("skipped: what reaches the store (no O_DIRECT in {})", home.path().display());
    } else {
        for (payload, expected) in [(Payload::Zeros, 1.0), (Payload::Data, 0.0)] {
            let tests = Test::all(&result.cells, payload);
            assert_eq!(tests.len(), 4);
            for test in tests {
                let found = not_stored(test.dynamic).unwrap();
                assert!((found - expected).abs() < 0.1, "{}: {found} of {expected} never reached the store", test.name);
                assert!(not_stored(test.fixed).unwrap() < 0.1, "{}: {test:?}", test.name);
            }
        }
    }
    let said: Vec<bool> = result.disks.iter().map(|disk| !disk.warnings.is_empty()).collect();
    assert_eq!(said, [true, true, false, false], "{:?}", result.disks);
    assert!(result.disks[0].file_allocated_bytes < 8 << 20);
    let saved: ZeroPayloadResult =
        serde_json::from_slice(&std::fs::read(report.saved.as_ref().unwrap()).unwrap()).unwrap();
    assert_eq!(saved.cells.len(), 16);
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1, "only the result is left");
}
