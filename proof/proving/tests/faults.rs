//! Every operation on the files below the disk fails, one after the other, with every kind of
//! fault: see `faulty`.

use diskwright_proving::{command, disk, disk::silence, faulty::at_every_operation, life};

fn fail_every_operation(names: &[&str]) {
    for name in names {
        let case = disk::named(name);
        match case.missing() {
            None => drop(at_every_operation(&case)),
            Some(what) => println!("skipped: faults of {name}: {what}"),
        }
    }
}

#[test]
fn raw_and_fixed() {
    fail_every_operation(&["raw", "raw, ending in a sector", "vhd fixed", "vhdx fixed 1M"]);
}

#[test]
fn vhd() {
    fail_every_operation(&["vhd dynamic 16K", "vhd dynamic 16K, copy of footer lost", "vhd differencing 16K"]);
}

#[test]
fn vhdx() {
    fail_every_operation(&["vhdx dynamic 1M", "vhdx differencing 1M", "vhdx differencing 2M, 4K sectors"]);
}

#[test]
fn over_nbd() {
    fail_every_operation(&["raw, over NBD", "vhd differencing 16K, over NBD", "vhdx dynamic 1M, over NBD"]);
}

#[test]
fn two_stores() {
    fail_every_operation(&["raw in three parts", "packed 16K, over a parent"]);
}

#[test]
fn disks_that_change_while_in_use() {
    fail_every_operation(&["raw, growing", "vhd dynamic 16K, with snapshots", "vhdx dynamic 1M, with snapshots"]);
    fail_every_operation(&["vhd dynamic 16K, frozen in use", "vhdx dynamic 1M, frozen in use"]);
    fail_every_operation(&["vhd differencing 16K, relinked", "vhdx differencing 1M, relinked"]);
}

#[test]
fn a_store_that_answers_late() {
    fail_every_operation(&["raw, late", "vhd dynamic 16K, late", "vhdx differencing 1M, late"]);
}

/// Every operation of a lane gets no answer: alone, and together with all later ones.
#[test]
fn a_store_that_never_answers() {
    for name in ["raw, late", "vhd dynamic 16K, late", "vhdx differencing 1M, late"] {
        let case = disk::named(name);
        match case.missing() {
            None => {
                let tally = case.hunt_silent().unwrap_or_else(|error| panic!("{name}: {error}"));
                let silence::Tally { operations, runs, late } = tally;
                assert!(runs > operations && late > operations, "{tally:?}");
                println!(
                    "faults: {name}, no answer: {runs} runs over {operations} operations of lanes, {late} operations ended after the queue was dropped"
                );
            }
            Some(what) => println!("skipped: stores that never answer, {name}: {what}"),
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

#[test]
fn freezing_and_going_back() {
    // One kind of each format: files and names are the same for all.
    for case in life::snapshots().iter().step_by(2).take(2) {
        at_every_operation(case);
    }
}
