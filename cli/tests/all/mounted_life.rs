//! A mounted ext4 goes on while its disk is frozen, enlarged, merged, compacted and moved, in every
//! format that has snapshots. Afterwards fsck finds nothing, and each file holds what was written.
//! A guest does the same to a VHDX (`guest_life.rs`).

use crate::attaching::{Place, run_ok};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Files that are written between two operations, at least.
const WRITES_BETWEEN: u64 = 30;
const PATIENCE: Duration = Duration::from_secs(30);

/// Writes, replaces and removes files until it is stopped. Returns what each holds.
fn work(dir: &Path, stop: &AtomicBool, writes: &AtomicU64) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut held = BTreeMap::new();
    let mut number = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        let path = dir.join(format!("file{}", number % 40));
        if number % 5 == 4 {
            fs::remove_file(&path).ok();
            held.remove(&path);
            continue;
        }
        let contents = number.wrapping_mul(0x9e37_79b9).to_le_bytes().repeat((number % 17 * 3000 + 1) as usize);
        fs::write(&path, &contents).unwrap();
        if number.is_multiple_of(8) {
            fs::File::open(&path).unwrap().sync_all().unwrap();
        }
        held.insert(path, contents);
        writes.fetch_add(1, Ordering::Relaxed);
    }
    held
}

fn lives(format: &str, frozen: &str) {
    let Some(place) = Place::as_root(&["mkfs.ext4", "fsck.ext4", "fstrim"]) else { return };
    let disk = format!("disk.{format}");
    place.ok(&format!("create {disk} --size 256M"));
    let device = place.attach(&disk);
    run_ok("mkfs.ext4", &["-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-J", "size=4", &device]);
    let dir = place.dir("mnt");
    run_ok("mount", &[&device, &dir]);
    let operations = [
        format!("snapshot {disk} --name first"),
        format!("resize {disk} +64M"),
        format!("snapshot {disk} --name second"),
        format!("merge disk_second.{frozen}"),
        format!("snapshot {disk} --name third"),
        format!("merge {disk}"),
        format!("snapshot delete disk_first.{frozen}"),
        format!("compact {disk}"),
        format!("move {disk} moved.{format}"),
    ];
    let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    let held = thread::scope(|scope| {
        let worker = scope.spawn(|| work(Path::new(&dir), &stop, &writes));
        let goes_on = || {
            let (from, begun) = (writes.load(Ordering::Relaxed), Instant::now());
            while writes.load(Ordering::Relaxed) < from + WRITES_BETWEEN && !worker.is_finished() {
                assert!(begun.elapsed() < PATIENCE, "the file system does not go on");
                thread::sleep(Duration::from_millis(5));
            }
        };
        goes_on();
        // A failure must not leave the worker at work.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for operation in &operations {
                if operation.starts_with("compact") {
                    run_ok("fstrim", &[&dir]);
                }
                place.ok(operation);
                goes_on();
            }
        }));
        stop.store(true, Ordering::Relaxed);
        let held = worker.join().unwrap();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        held
    });
    run_ok("sync", &["-f", &dir]);
    fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    for (path, contents) in &held {
        assert!(fs::read(path).unwrap() == *contents, "{format}: {}", path.display());
    }
    run_ok("umount", &[&dir]);
    run_ok("fsck.ext4", &["-fn", &device]);
    place.ok(&format!("detach moved.{format}"));
    place.ok(&format!("check moved.{format}"));
    println!("{format}: {} files were written", writes.into_inner());
}

#[test]
fn a_file_system_on_a_vhd_goes_on() {
    lives("vhd", "avhd");
}

#[test]
fn a_file_system_on_a_vmdk_goes_on() {
    lives("vmdk", "vmdk");
}

#[test]
fn a_file_system_on_a_qcow2_goes_on() {
    lives("qcow2", "qcow2");
}

#[test]
fn a_file_system_on_a_vdi_goes_on() {
    lives("vdi", "vdi");
}
