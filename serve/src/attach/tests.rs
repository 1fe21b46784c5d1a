//! Processes that clear and attach at once. Threads stand for them: the lock is of a file that each
//! has opened for itself.

use super::*;
use std::{fs, os::unix::fs::MetadataExt, thread, time::Instant};

/// How long somebody may take to come to the lock.
const ARRIVAL: Duration = Duration::from_secs(20);

/// A registry with one image, and a record of it whose processes are gone.
fn orphan() -> (tempfile::TempDir, Registry, Home, Record) {
    let dir = tempfile::tempdir().unwrap();
    let registry = Registry::at(&dir.path().join("run")).unwrap();
    let image = dir.path().join("a.vhdx");
    fs::write(&image, b"").unwrap();
    let home = registry.home_of(&image).unwrap();
    home.make(&registry.lock().unwrap()).unwrap();
    let this = Process::this();
    let gone = Process { start_ticks: this.start_ticks + 1, ..this };
    let record = Record { supervisor: gone, lost: Some("the server is gone".into()), ..Record::new(image, 1) };
    home.write(&record).unwrap();
    (dir, registry, home, record)
}

/// Waits until somebody waits for the lock: the kernel's table shows him behind an arrow.
fn until_somebody_waits(dir: &Path) {
    let inode = fs::metadata(dir.join("run/lock")).unwrap().ino();
    let waits = |line: &str| line.contains("-> FLOCK") && line.contains(&format!(":{inode} "));
    let began = Instant::now();
    while !fs::read_to_string("/proc/locks").unwrap().lines().any(waits) {
        assert!(began.elapsed() < ARRIVAL, "nobody waits for the lock");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_folder_goes_while_nobody_else_claims_one() {
    let (dir, registry, home, record) = orphan();
    let lock = registry.lock().unwrap();
    thread::scope(|scope| {
        let clears = scope.spawn(|| registry.clear(&home));
        until_somebody_waits(dir.path());
        assert_eq!(home.read().unwrap(), Some(record), "it goes behind our back");
        drop(lock);
        clears.join().unwrap().unwrap();
    });
    assert_eq!(home.read().unwrap(), None);
    // Also where somebody has removed everything by hand.
    fs::remove_dir_all(dir.path().join("run")).unwrap();
    registry.clear(&home).unwrap();
}

#[test]
fn who_detaches_what_is_gone_leaves_what_was_attached_meanwhile() {
    let (dir, registry, home, old) = orphan();
    let lock = registry.lock().unwrap();
    let anew = Record { supervisor: Process::this(), lost: None, ..old.clone() };
    thread::scope(|scope| {
        let detaches = scope.spawn(|| detach(&registry, &old.file, Detach::default()));
        // He has seen the old record by now.
        until_somebody_waits(dir.path());
        home.remove(&lock).unwrap();
        home.make(&lock).unwrap();
        home.write(&anew).unwrap();
        drop(lock);
        // The new one has a supervisor, who is asked; here he does not listen.
        let error = detaches.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("speak with the supervisor"), "{error}");
    });
    assert_eq!(home.read().unwrap(), Some(anew), "what is attached is recorded");
}

#[test]
fn who_detaches_what_was_cleared_meanwhile_is_told_so() {
    let (dir, registry, home, old) = orphan();
    let lock = registry.lock().unwrap();
    thread::scope(|scope| {
        let detaches = scope.spawn(|| detach(&registry, &old.file, Detach::default()));
        until_somebody_waits(dir.path());
        home.remove(&lock).unwrap();
        drop(lock);
        assert!(matches!(detaches.join().unwrap(), Err(AttachError::NotAttached { .. })));
    });
}
