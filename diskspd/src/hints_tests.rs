use super::*;
use diskwright_lab::LabError;
use diskwright_load::LoadError;
use diskwright_load::warning::Warning;
use std::path::PathBuf;

fn bad(what: &str, hint: &str) -> String {
    LabError::BadOptions { what: what.into(), hint: hint.into() }.to_string()
}

/// Every message that `diskspd` can show and that has a hint, with a text that the hint must have.
fn sentences() -> Vec<(String, &'static str)> {
    let (target, load) = (|| "x.dat".to_owned(), || "phase \"timespan 1\", load 1".to_owned());
    vec![
        (Warning::Unallocated { target: target(), allocated: 0.0 }.to_string(), "-c"),
        (Warning::Zeros { target: target(), zero: 1.0 }.to_string(), "-c"),
        (Warning::Repeated { target: target(), repeated: 1.0 }.to_string(), "-c"),
        (Warning::ZeroPayload.to_string(), "-Zr"),
        (Warning::Memory { working_set_bytes: 1, memory_bytes: 2 }.to_string(), "-Su"),
        (Warning::DirectNotHonoured { targets: vec![target()] }.to_string(), "another file system"),
        (Warning::ShortCells { window_ns: 1 }.to_string(), "-d"),
        (Warning::DepthNotReached { load: load(), reached: 1.0, asked: 2.0 }.to_string(), "-o"),
        (Warning::RateNotKept { load: load(), share: 0.5, overdue: 1 }.to_string(), "-g"),
        (Warning::Polls { load: load() }.to_string(), "-t"),
        (
            LabError::NoSpaceToFill { target: target(), needed_bytes: 2, dir: PathBuf::from("/"), free_bytes: 1 }
                .to_string(),
            "-f",
        ),
        (LoadError::WorkingSet { target: target(), load: load(), end_bytes: 2, size_bytes: 1 }.to_string(), "-f"),
        (LoadError::BlockTooLarge { target: target(), load: load(), set_bytes: 1, block_bytes: 2 }.to_string(), "-b"),
        (
            LoadError::NotSectors { target: target(), load: load(), field: "block", bytes: 1, sector_bytes: 512 }
                .to_string(),
            "-b",
        ),
        (bad("a job", "use fewer threads, a smaller depth or smaller blocks"), "-o"),
        (bad("x.dat", "use a larger working set or fewer spots"), "-rd"),
    ]
}

#[test]
fn hints_name_diskspds_switches_and_no_option_of_lab_run() {
    for (sentence, switch) in sentences() {
        let replaced = with_diskspds_switches(&sentence);
        assert!(replaced.contains(switch), "{switch}: {replaced}");
        assert!(!replaced.replace("--destroy-data", "").contains("--"), "{replaced}");
    }
}

#[test]
fn an_option_that_diskspd_also_has_is_not_replaced() {
    let error = LabError::HoldsData { target: "x".into(), what: "data".into() }.to_string();
    assert_eq!(with_diskspds_switches(&error), error);
    assert!(error.contains("`PrepareOptions::destroy_data`"));
}
