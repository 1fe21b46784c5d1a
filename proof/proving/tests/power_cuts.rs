//! Power cuts in every flush interval: flushed data is there, every other sector shows old or new
//! data, and the disk can be used again. The number of states is set in `campaign`. Each test
//! prints what it has done.

use diskwright_proving::{
    applying,
    campaign::{Tally, Thoroughness, cut_one, power_cuts},
    command, compacting, connecting, crowd, disk, life, live_moving, merge, moving, repairing, resized_copies, sizes,
    space, tracking,
};

/// Number of shares of the states: each kind of disk has one, all creations together one, all
/// conversions two, all snapshots one, all clones and new links one each, all merges one, all moves
/// one, all moves in use one, all applications of exports one, all compactions one, all repairs
/// one, all tracked disks one, all resizes two, all spaces four, all crowds eight.
fn shares() -> u64 {
    disk::all().len() as u64 + 27
}

fn of_kind(name: &str) {
    let case = disk::named(name);
    match case.missing() {
        None => drop(power_cuts(&case, shares())),
        Some(what) => println!("skipped: power cuts of {name}: {what}"),
    }
}

macro_rules! kinds {
    ($($test:ident: $name:literal,)*) => {
        $(
            #[test]
            fn $test() {
                of_kind($name);
            }
        )*

        #[test]
        fn every_kind_has_a_test() {
            assert_eq!(disk::all().iter().map(|case| case.name).collect::<Vec<_>>(), [$($name),*]);
        }
    };
}

kinds! {
    raw: "raw",
    raw_ragged: "raw, ending in a sector",
    vhd_fixed: "vhd fixed",
    vhd_dynamic_16k: "vhd dynamic 16K",
    vhd_dynamic_churning: "vhd dynamic 16K, churning",
    vhd_dynamic_512k: "vhd dynamic 512K",
    vhd_dynamic_2m: "vhd dynamic 2M",
    vhd_dynamic_copy_lost: "vhd dynamic 16K, copy of footer lost",
    vhd_differencing_16k: "vhd differencing 16K",
    vhd_differencing_2m: "vhd differencing 2M",
    vhd_differencing_for_libvhdi: "vhd differencing 512K, for libvhdi",
    vhdx_fixed: "vhdx fixed 1M",
    vhdx_dynamic: "vhdx dynamic 1M",
    vhdx_dynamic_churning: "vhdx dynamic 1M, churning",
    vhdx_dynamic_of_many_pages: "vhdx dynamic 1M, 2 GiB",
    vhdx_dynamic_4k: "vhdx dynamic 2M, 4K sectors",
    vhdx_dynamic_32m: "vhdx dynamic 32M",
    vhdx_differencing: "vhdx differencing 1M",
    vhdx_differencing_churning: "vhdx differencing 1M, churning",
    vhdx_differencing_4k: "vhdx differencing 2M, 4K sectors",
    vhdx_differencing_for_libvhdi: "vhdx differencing 1M, for libvhdi",
    vmdk_flat: "vmdk flat",
    vmdk_sparse: "vmdk sparse 8K",
    vmdk_sparse_churning: "vmdk sparse 8K, churning",
    vmdk_child: "vmdk child 64K",
    qcow2_of_many_tables: "qcow2 512",
    qcow2: "qcow2 64K",
    qcow2_churning: "qcow2 4K, churning",
    qcow2_child: "qcow2 child 8K",
    vdi_fixed: "vdi fixed 1M",
    vdi_dynamic_1m_churning: "vdi dynamic 1M, churning",
    vdi_dynamic: "vdi dynamic 8K",
    vdi_dynamic_churning: "vdi dynamic 8K, churning",
    vdi_child: "vdi child 64K",
    raw_over_nbd: "raw, over NBD",
    vhd_differencing_over_nbd: "vhd differencing 16K, over NBD",
    vhdx_dynamic_over_nbd: "vhdx dynamic 1M, over NBD",
    vhdx_differencing_over_nbd: "vhdx differencing 1M, over NBD",
    raw_over_nvme: "raw, over NVMe",
    vhdx_dynamic_over_nvme: "vhdx dynamic 1M, over NVMe",
    vhdx_differencing_over_nvme: "vhdx differencing 1M, over NVMe",
    raw_over_iscsi: "raw, over iSCSI",
    vhdx_dynamic_over_iscsi: "vhdx dynamic 1M, over iSCSI",
    vhdx_differencing_over_iscsi: "vhdx differencing 1M, over iSCSI",
    raw_over_vhost_user: "raw, over vhost-user",
    vhd_differencing_over_vhost_user: "vhd differencing 16K, over vhost-user",
    vhdx_dynamic_over_vhost_user: "vhdx dynamic 1M, over vhost-user",
    vhdx_differencing_over_vhost_user: "vhdx differencing 1M, over vhost-user",
    raw_in_parts: "raw in three parts",
    raw_growing: "raw, growing",
    vhd_dynamic_growing: "vhd dynamic 16K, growing",
    vhdx_dynamic_growing: "vhdx dynamic 1M, growing",
    vmdk_flat_growing: "vmdk flat, growing",
    vmdk_sparse_growing: "vmdk sparse 8K, growing",
    vdi_dynamic_growing: "vdi dynamic 16K, growing",
    vdi_dynamic_with_snapshots: "vdi dynamic 16K, with snapshots",
    vdi_child_compacted_in_use: "vdi child 16K, compacted in use",
    vdi_child_relinked: "vdi child 16K, relinked",
    vhd_dynamic_with_snapshots: "vhd dynamic 16K, with snapshots",
    vhdx_dynamic_with_snapshots: "vhdx dynamic 1M, with snapshots",
    vhd_dynamic_frozen_in_use: "vhd dynamic 16K, frozen in use",
    vhdx_dynamic_frozen_in_use: "vhdx dynamic 1M, frozen in use",
    vhd_dynamic_compacted_in_use: "vhd dynamic 16K, compacted in use",
    vhd_differencing_compacted_in_use: "vhd differencing 16K, compacted in use",
    vhdx_dynamic_compacted_in_use: "vhdx dynamic 1M, compacted in use",
    vhdx_differencing_compacted_in_use: "vhdx differencing 1M, compacted in use",
    vhd_dynamic_absorbed_in_use: "vhd dynamic 16K, absorbed in use",
    vhdx_dynamic_absorbed_in_use: "vhdx dynamic 1M, absorbed in use",
    vmdk_sparse_absorbed_in_use: "vmdk sparse 8K, absorbed in use",
    vmdk_child_absorbed_in_use: "vmdk child 64K, absorbed in use",
    vmdk_child_merged_in_use: "vmdk child 64K, merged in use",
    vhd_dynamic_merged_in_use: "vhd dynamic 16K, merged in use",
    vhdx_differencing_merged_in_use: "vhdx differencing 1M, merged in use",
    vhd_differencing_relinked: "vhd differencing 16K, relinked",
    vhdx_differencing_relinked: "vhdx differencing 1M, relinked",
    qcow2_growing: "qcow2 512, growing",
    qcow2_with_snapshots: "qcow2 4K, with snapshots",
    qcow2_frozen_in_use: "qcow2 4K, frozen in use",
    vmdk_frozen_in_use: "vmdk sparse 8K, frozen in use",
    qcow2_absorbed_in_use: "qcow2 4K, absorbed in use",
    qcow2_merged_in_use: "qcow2 4K, merged in use",
    qcow2_compacted_in_use: "qcow2 4K, compacted in use",
    qcow2_child_compacted_in_use: "qcow2 child 8K, compacted in use",
    vmdk_child_relinked: "vmdk child 64K, relinked",
    packed: "packed 16K, over a parent",
    qcow2_with_an_internal_snapshot: "qcow2 4K, with an internal snapshot",
    qcow2_with_an_internal_snapshot_churning: "qcow2 16K, with an internal snapshot, churning",
    qcow2_with_subclusters: "qcow2 16K, with subclusters",
    qcow2_with_subclusters_churning: "qcow2 64K, with subclusters, churning",
    qcow2_with_a_data_file: "qcow2 4K, with a data file",
    vhd_dynamic_swept: "vhd dynamic 4K, swept",
    raw_late: "raw, late",
    vhd_dynamic_late: "vhd dynamic 16K, late",
    vhdx_differencing_late: "vhdx differencing 1M, late",
    vmdk_cowd: "vmdk cowd 512",
    vmdk_cowd_churning: "vmdk cowd 512, churning",
    vmdk_cowd_child: "vmdk cowd child 512",
    vmdk_cowd_growing: "vmdk cowd 512, growing",
    vmdk_in_two_extents: "vmdk in two extents 64K",
    vmdk_sparse_compacted_in_use: "vmdk sparse 8K, compacted in use",
    vmdk_cowd_child_compacted_in_use: "vmdk cowd child 512, compacted in use",
    vmdk_sparse_with_snapshots: "vmdk sparse 8K, with snapshots",
    vdi_dynamic_frozen_in_use: "vdi dynamic 16K, frozen in use",
    vdi_dynamic_absorbed_in_use: "vdi dynamic 16K, absorbed in use",
    vdi_dynamic_merged_in_use: "vdi dynamic 16K, merged in use",
    vdi_dynamic_4k_growing: "vdi dynamic 4K, growing",
    qcow2_with_subclusters_compacted_in_use: "qcow2 64K, with subclusters, compacted in use",
    vmdk_child_over_nbd: "vmdk child 64K, over NBD",
    qcow2_child_over_nbd: "qcow2 child 8K, over NBD",
    vdi_child_over_nbd: "vdi child 64K, over NBD",
    vmdk_child_late: "vmdk child 64K, late",
    qcow2_child_late: "qcow2 child 8K, late",
    vdi_child_late: "vdi child 64K, late",
}

/// What clients wrote to the parent of a killed merge is in the page cache only. In this history
/// the next session sees it and flushes, and then the power fails.
#[test]
fn a_killed_merge_in_use_is_durable_after_the_next_flush() {
    let case = disk::named("vhd dynamic 16K, absorbed in use");
    let thoroughness = Thoroughness { modes: 5, resume: true, opinions: 0 };
    cut_one(&case, 148, None, &mut Tally::default(), thoroughness).unwrap();
}

#[test]
fn creating() {
    let cases = command::creations();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn converting() {
    let cases = command::conversions();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn converting_to_other_sizes() {
    let cases = resized_copies::resized_copies();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn freezing_and_going_back() {
    let cases = life::snapshots();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn merging() {
    let cases = merge::merges();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn moving() {
    let cases = moving::moves();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn moving_in_use() {
    let cases = live_moving::live_moves();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn cloning() {
    let cases = life::clones();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn reconnecting() {
    let cases = connecting::reconnections();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn applying_exports() {
    let cases = applying::applications();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn compacting_and_going_on() {
    let cases = compacting::compactions();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn repairing_and_undoing() {
    let cases = repairing::repairs();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64);
    }
}

#[test]
fn tracking_changes() {
    let cases = tracking::tracked();
    let shares = shares() * cases.len() as u64;
    for case in &cases {
        power_cuts(case, shares);
    }
}

/// More writes than the budget has runs, and than the log has records.
#[test]
fn tracking_reports_at_most_1_gib_too_much_after_a_kill() {
    for writes in [10, 1500] {
        let excess_bytes = tracking::excess_after_a_kill(writes, 5).unwrap();
        assert!((1..=1 << 30).contains(&excess_bytes), "{writes} writes: {excess_bytes} bytes too much");
    }
}

#[test]
fn resizing() {
    let cases = sizes::resizes();
    for case in &cases {
        power_cuts(case, shares() * cases.len() as u64 / 2);
    }
}

#[test]
fn several_queues() {
    let cases = crowd::crowds();
    for case in &cases {
        match case.disk.missing() {
            None => drop(power_cuts(case, shares() * cases.len() as u64 / 8)),
            Some(what) => println!("skipped: power cuts of several queues on {}: {what}", case.disk.name),
        }
    }
}

#[test]
fn spaces() {
    for case in space::all() {
        power_cuts(&case, 3 * shares());
    }
}
