//! Every operation below fails, one after the other, in every way that it can: see `faulty`.

use diskwright_proving::{command, disk, disk::silence, faulty::at_every_operation};

fn of_kinds(names: &[&str]) {
    for name in names {
        let case = disk::named(name);
        match case.missing() {
            None => drop(at_every_operation(&case)),
            Some(what) => println!("skipped: faults below {name}: {what}"),
        }
    }
}

#[test]
fn raw_and_fixed() {
    of_kinds(&["raw", "raw, ending in a sector", "vhd fixed", "vhdx fixed 1M"]);
}

#[test]
fn vhd() {
    of_kinds(&["vhd dynamic 16K", "vhd dynamic 16K, copy of footer lost", "vhd differencing 16K"]);
}

#[test]
fn vhdx() {
    of_kinds(&["vhdx dynamic 1M", "vhdx differencing 1M", "vhdx differencing 2M, 4K sectors"]);
}

#[test]
fn over_nbd() {
    of_kinds(&["raw, over NBD", "vhd differencing 16K, over NBD", "vhdx dynamic 1M, over NBD"]);
}

#[test]
fn two_stores() {
    of_kinds(&["raw in three parts", "packed 16K, over a parent"]);
}

#[test]
fn a_disk_that_changes() {
    of_kinds(&["raw, growing", "vhd dynamic 16K, with snapshots", "vhdx dynamic 1M, with snapshots"]);
}

#[test]
fn a_store_that_answers_late() {
    of_kinds(&["raw, late", "vhd dynamic 16K, late", "vhdx differencing 1M, late"]);
}

/// Every operation of a lane stays without an answer: alone, and with all that follow.
#[test]
fn a_store_that_never_answers() {
    for name in ["raw, late", "vhd dynamic 16K, late", "vhdx differencing 1M, late"] {
        let case = disk::named(name);
        match case.missing() {
            None => {
                let tally = case.hunt_in_silence().unwrap_or_else(|error| panic!("{name}: {error}"));
                let silence::Tally { operations, runs, late } = tally;
                assert!(runs > operations && late > operations, "{tally:?}");
                println!(
                    "faults: {name}, without an answer: {runs} runs, each of {operations} operations of lanes, {late} answers that came when the queue was gone"
                );
            }
            Some(what) => println!("skipped: silence below {name}: {what}"),
        }
    }
}

#[test]
fn creating() {
    for case in command::creations() {
        at_every_operation(&case);
    }
}

#[test]
fn converting() {
    for case in command::conversions() {
        at_every_operation(&case);
    }
}
