//! `kill -9` at each step of the commands that heal and follow disks: `kill_steps.rs` says how.

use crate::kill_steps::{
    K, MIB, Model, QCOW2, VHD, VHDX, VMDK, assert_can_be_written, assert_holds, assert_reads, chain, for_each,
    kill_at_steps, make, make_child, options, printed, write,
};
use diskwright_disk::{Disk, check};
use diskwright_image::Repair;
use diskwright_store::{Blocking, EngineKind};
use std::{fs, path::Path};

/// Damage that is repaired without loss: the footer at the end of a VHD, one header of a VHDX, a
/// cluster that no entry of a qcow2 names.
#[test]
fn repair() {
    for_each([VHD, VHDX, QCOW2], &|place, kind| {
        let file = make(place, kind, "disk");
        let mut model = Model::new();
        write(place, &file, &mut model, 1, &[(0, MIB), (2 * MIB, 100 * K)]);
        let mut bytes = fs::read(place.path(&file)).unwrap();
        match kind.extension {
            "vhd" => {
                let end = bytes.len();
                bytes[end - 400] ^= 0xff;
            }
            "vhdx" => bytes[0x10010] ^= 0xff,
            _ => leak_cluster(&mut bytes),
        }
        fs::write(place.path(&file), bytes).unwrap();
        let judge = |dir: &Path| {
            let path = dir.join(&file);
            let found = check(&path, &options(false)).unwrap();
            assert_reads(&path, &model);
            found.report.findings.iter().all(|found| found.repair == Repair::NotNeeded)
        };
        kill_at_steps(place, &format!("check {file} --repair"), &judge);
    });
}

/// Adds a cluster to a qcow2 that counts as used, and that nothing refers to.
fn leak_cluster(bytes: &mut Vec<u8>) {
    const CLUSTER_BYTES: usize = 64 * K;
    let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    // The header names the refcount table, and its first entry a block of 16-bit numbers.
    let block = number(number(48));
    let cluster = bytes.len().div_ceil(CLUSTER_BYTES);
    bytes.resize((cluster + 1) * CLUSTER_BYTES, 9);
    bytes[block + 2 * cluster..][..2].copy_from_slice(&[0, 1]);
}

/// Two parents of a chain have other names: each link is the old one or the new one.
#[test]
fn reconnect() {
    for_each([VHD, VHDX, VMDK], &|place, kind| {
        let [_, of_a, of_b, of_c] = chain(place, kind);
        let file = |name: &str| format!("{name}.{}", kind.extension);
        for (old, new) in [("base", "ground"), ("b", "upper")] {
            fs::rename(place.path(&file(old)), place.path(&file(new))).unwrap();
        }
        let judge = |dir: &Path| {
            let has_parents = Disk::open(dir.join(file("c")), &options(false)).is_ok();
            if has_parents {
                for (name, model) in [("a", &of_a), ("upper", &of_b), ("c", &of_c)] {
                    assert_holds(&dir.join(file(name)), model);
                }
                assert_can_be_written(&dir.join(file("c")));
            }
            has_parents
        };
        kill_at_steps(place, &format!("reconnect {} --search .", file("c")), &judge);
    });
}

/// An export is applied to a copy of its base: each part of it is old or new until all is new.
#[test]
fn apply() {
    for_each([VHD, VHDX, VMDK], &|place, kind| {
        let base = make(place, kind, "base");
        let mut model = Model::new();
        write(place, &base, &mut model, 1, &[(0, MIB), (2 * MIB, 100 * K)]);
        let before = model.clone();
        let child = make_child(place, kind, "child", &base);
        write(place, &child, &mut model, 2, &[(512 * K, MIB), (3 * MIB, 64 * K)]);
        place.shop.ok(&format!("diff {child} --export changes.dwdiff"));
        fs::remove_file(place.path(&child)).unwrap();
        let command = format!("diff --apply changes.dwdiff --onto {base}");
        let judge = |dir: &Path| {
            let disk = Disk::open(dir.join(&base), &options(false)).unwrap();
            let mut found = vec![0; 4 * MIB];
            Blocking::open(&*disk, EngineKind::Sync).unwrap().read(0, &mut found).unwrap();
            drop(disk);
            let is_of = |model: &Model, at: usize| found[at..at + K] == model[at..at + K];
            assert!((0..4 * MIB).step_by(K).all(|at| is_of(&before, at) || is_of(&model, at)), "neither old nor new");
            let said: serde_json::Value =
                serde_json::from_str(&printed(dir, &format!("{command} --dry-run --json"))).unwrap();
            let is_done = said["was_applied"] == true;
            if is_done {
                assert_holds(&dir.join(&base), &model);
            }
            is_done
        };
        kill_at_steps(place, &command, &judge);
    });
}

#[test]
fn rescue() {
    for_each([VHD, VHDX, QCOW2], &|place, kind| {
        let file = make(place, kind, "disk");
        let mut model = Model::new();
        write(place, &file, &mut model, 1, &[(0, MIB), (2 * MIB, 100 * K)]);
        let judge = |dir: &Path| {
            assert_holds(&dir.join(&file), &model);
            let is_there = dir.join("saved.vhdx").exists();
            if is_there {
                assert_holds(&dir.join("saved.vhdx"), &model);
            }
            is_there
        };
        kill_at_steps(place, &format!("rescue {file} saved.vhdx"), &judge);
    });
}

/// A disk has its point, or none: what is written after a kill is never missing in it.
#[test]
fn track_start() {
    for_each([VHD, VHDX, QCOW2, VMDK], &|place, kind| {
        let file = make(place, kind, "disk");
        let mut model = Model::new();
        write(place, &file, &mut model, 1, &[(0, MIB)]);
        let judge = |dir: &Path| {
            assert_reads(&dir.join(&file), &model);
            let disk = Disk::open(dir.join(&file), &options(true)).unwrap();
            let is_tracked = disk.points().is_ok_and(|points| points.iter().any(|point| point.name == "one"));
            if is_tracked {
                Blocking::open(&*disk, EngineKind::Sync).unwrap().write(0, &model[..K], true).unwrap();
                let changed = disk.changed_since("one").unwrap();
                assert!(changed.ranges().any(|range| range.contains(&0)), "{:?}", changed.everything());
            }
            disk.close().unwrap();
            is_tracked
        };
        kill_at_steps(place, &format!("track start {file} one"), &judge);
    });
}
