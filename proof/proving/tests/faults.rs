//! Every operation on the files below the disk fails, one after the other, with every kind of
//! fault: see `faulty`.

use diskwright_proving::{
    applying, command, compacting, connecting, disk, disk::silence, faulty::at_every_operation, life, merge, moving,
    repairing, resized_copies, sizes, space, stage::Case,
};

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
fn vmdk() {
    fail_every_operation(&["vmdk flat", "vmdk sparse 8K", "vmdk child 64K"]);
    fail_every_operation(&["vmdk cowd 512", "vmdk cowd child 512", "vmdk in two extents 64K"]);
}

#[test]
fn qcow2() {
    fail_every_operation(&["qcow2 512", "qcow2 64K", "qcow2 child 8K"]);
    fail_every_operation(&[
        "qcow2 4K, with an internal snapshot",
        "qcow2 4K, with a data file",
        "qcow2 16K, with subclusters",
    ]);
}

#[test]
fn vdi() {
    fail_every_operation(&["vdi fixed 1M", "vdi dynamic 8K", "vdi child 64K", "vdi child 16K, relinked"]);
    fail_every_operation(&["vdi dynamic 4K, growing"]);
}

#[test]
fn over_nbd() {
    fail_every_operation(&["raw, over NBD", "vhd differencing 16K, over NBD", "vhdx dynamic 1M, over NBD"]);
}

#[test]
fn over_nvme() {
    fail_every_operation(&["raw, over NVMe", "vhdx dynamic 1M, over NVMe"]);
}

#[test]
fn over_iscsi() {
    fail_every_operation(&["raw, over iSCSI", "vhdx dynamic 1M, over iSCSI"]);
}

#[test]
fn over_vhost_user() {
    fail_every_operation(&[
        "raw, over vhost-user",
        "vhd differencing 16K, over vhost-user",
        "vhdx dynamic 1M, over vhost-user",
    ]);
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
    fail_every_operation(&["vmdk child 64K, relinked", "vmdk flat, growing", "vmdk sparse 8K, growing"]);
    fail_every_operation(&["vhd dynamic 16K, compacted in use", "vhd differencing 16K, compacted in use"]);
    fail_every_operation(&["vhdx dynamic 1M, compacted in use", "vhdx differencing 1M, compacted in use"]);
}

#[test]
fn disks_that_are_merged_while_in_use() {
    fail_every_operation(&["vhd dynamic 16K, absorbed in use", "vhdx dynamic 1M, absorbed in use"]);
    fail_every_operation(&["vmdk sparse 8K, absorbed in use", "vmdk child 64K, absorbed in use"]);
}

#[test]
fn disks_whose_frozen_images_are_merged_in_use() {
    fail_every_operation(&["vhd dynamic 16K, merged in use", "vhdx differencing 1M, merged in use"]);
    fail_every_operation(&["vmdk child 64K, merged in use"]);
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
fn converting_to_other_sizes() {
    // One of each format.
    let cases = resized_copies::resized_copies();
    for number in [0, 2] {
        at_every_operation(&cases[number]);
    }
}

#[test]
fn merging() {
    // Each name kept once: two steps are two of these. By name, as the list may grow.
    let cases = merge::merges();
    for name in [
        "merge vhd differencing 16K, keeping the name",
        "merge vhdx differencing 1M",
        "merge qcow2 child 8K, keeping the name",
        "merge vmdk child 64K, in two files, keeping the name",
        "merge vmdk child 64K, in two files",
    ] {
        at_every_operation(cases.iter().find(|case| case.name() == name).expect("a merge of this name"));
    }
}

#[test]
fn moving() {
    // Into another format, and a disk in two files.
    let cases = moving::moves();
    for name in ["move vhd dynamic 16K to vhdx", "move vmdk flat to vhdx"] {
        at_every_operation(cases.iter().find(|case| case.name() == name).expect("a move of this name"));
    }
}

#[test]
fn cloning() {
    at_every_operation(&life::clones()[0]);
}

#[test]
fn reconnecting() {
    at_every_operation(&connecting::reconnections()[0]);
}

#[test]
fn applying_exports() {
    // One of each format, those with the fewest operations: the images below have their own tests.
    let cases = applying::applications();
    for number in [1, 4] {
        at_every_operation(&cases[number]);
    }
}

#[test]
fn freezing_and_going_back() {
    // One kind of each format: files and names are the same for all.
    for case in life::snapshots().iter().step_by(2).take(2) {
        at_every_operation(case);
    }
}

#[test]
fn compacting_a_disk() {
    // One of each format, a child and a disk without a parent.
    for case in compacting::compactions().iter().skip(1).take(2) {
        at_every_operation(case);
    }
}

#[test]
fn repairing_a_disk() {
    // One kind: the undo file and the order of writes are the same for all, and the small file of
    // this one is judged fastest. The power cuts have all kinds.
    at_every_operation(&repairing::repairs()[1]);
}

#[test]
fn resizing() {
    let kinds = ["raw", "vhd fixed", "vhd dynamic 16K", "vhdx dynamic 1M"];
    for mut case in sizes::resizes().into_iter().filter(|case| kinds.contains(&case.disk.name)) {
        // A fixed VHD has its footer only at its end. If it grows, and the sync fails and loses the
        // footer but not the new length, a power cut then leaves a file without a footer.
        case.grows &= case.disk.name != "vhd fixed";
        at_every_operation(&case);
    }
}

#[test]
fn spaces() {
    for case in space::all().iter().filter(|case| case.fate == space::Fate::Stay && !case.churns) {
        at_every_operation(case);
    }
}
