//! Tests: several processes clear up and attach at the same time. Threads take their place; each
//! opens the lock file for itself, as a process would.

use super::*;
use std::{fs, os::unix::fs::MetadataExt, thread, time::Instant};

/// How long a thread may take to wait for the lock.
const ARRIVAL: Duration = Duration::from_secs(20);

/// A registry with one image, and a record of that image whose processes have died.
fn orphan() -> (tempfile::TempDir, Registry, RecordDir, Record) {
    let dir = tempfile::tempdir().unwrap();
    let registry = Registry::at(&dir.path().join("run")).unwrap();
    let image = dir.path().join("a.vhdx");
    fs::write(&image, b"").unwrap();
    let home = registry.dir_of(&image).unwrap();
    home.make(&registry.lock().unwrap()).unwrap();
    let this = Process::this();
    let gone = Process { start_ticks: this.start_ticks + 1, ..this };
    let record = Record { supervisor: gone, lost: Some("the server is gone".into()), ..Record::new(image, 1) };
    home.write(&record).unwrap();
    (dir, registry, home, record)
}

/// Waits until a thread waits for the lock: /proc/locks shows a waiter with an arrow.
fn until_somebody_waits(dir: &Path) {
    let inode = fs::metadata(dir.join("run/lock")).unwrap().ino();
    let waits = |line: &str| line.contains("-> FLOCK") && line.contains(&format!(":{inode} "));
    let began = Instant::now();
    while !fs::read_to_string("/proc/locks").unwrap().lines().any(waits) {
        assert!(began.elapsed() < ARRIVAL, "no thread waits for the lock");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_folder_is_removed_only_under_the_lock() {
    let (dir, registry, home, record) = orphan();
    let lock = registry.lock().unwrap();
    thread::scope(|scope| {
        let clears = scope.spawn(|| registry.clear(&home));
        until_somebody_waits(dir.path());
        assert_eq!(home.read().unwrap(), Some(record), "the folder was removed without the lock");
        drop(lock);
        clears.join().unwrap().unwrap();
    });
    assert_eq!(home.read().unwrap(), None);
    // It also works if the user has removed the whole registry.
    fs::remove_dir_all(dir.path().join("run")).unwrap();
    registry.clear(&home).unwrap();
}

#[test]
fn detach_of_a_dead_record_keeps_a_newer_attachment() {
    let (dir, registry, home, old) = orphan();
    let lock = registry.lock().unwrap();
    let anew = Record { supervisor: Process::this(), lost: None, ..old.clone() };
    thread::scope(|scope| {
        let detaches = scope.spawn(|| detach(&registry, &old.file, DetachOptions::default()));
        // The thread has read the old record by now.
        until_somebody_waits(dir.path());
        home.remove(&lock).unwrap();
        home.make(&lock).unwrap();
        home.write(&anew).unwrap();
        drop(lock);
        // The new record has a live supervisor, so it is asked. Here it does not listen.
        let error = detaches.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("talk to the supervisor"), "{error}");
    });
    assert_eq!(home.read().unwrap(), Some(anew), "the new record was kept");
}

#[test]
fn detach_of_a_record_that_was_cleared_meanwhile_is_an_error() {
    let (dir, registry, home, old) = orphan();
    let lock = registry.lock().unwrap();
    thread::scope(|scope| {
        let detaches = scope.spawn(|| detach(&registry, &old.file, DetachOptions::default()));
        until_somebody_waits(dir.path());
        home.remove(&lock).unwrap();
        drop(lock);
        assert!(matches!(detaches.join().unwrap(), Err(AttachError::NotAttached { .. })));
    });
}
