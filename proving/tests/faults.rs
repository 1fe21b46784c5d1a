//! Every operation below fails, one after the other, in every way that it can: see `faulty`.

use diskwright_proving::{command, disk, faulty::at_every_operation};

fn of_kinds(names: &[&str]) {
    for name in names {
        let case = disk::named(name);
        match case.front.missing() {
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
