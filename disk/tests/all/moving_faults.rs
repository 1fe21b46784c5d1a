//! Moves of a disk in use on file systems that fail, are slow, or let no name be removed; and of a
//! disk whose own file has failed.

use crate::moving::{MIB, beside_clients, folder, made, names, open, open_with, plain};
use diskwright_disk::{Movable, MoveOptions, MoveWatch};
use diskwright_store::{
    BlockDevice, Blocking, EngineKind, FileSystem, Files, IoBuf, LocalFiles, OpenError, QueueOptions, Request,
    SharedRing, Store,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use std::{
    io,
    path::Path,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// A file system whose files with this in their names fail.
#[derive(Debug)]
struct Faulty {
    name: &'static str,
    /// Calls that still succeed.
    left: Arc<AtomicU64>,
    fault: io::ErrorKind,
    /// The folder was synced once: the next time the file has its name.
    has_its_name: AtomicBool,
    was_renamed: AtomicBool,
}

#[derive(Debug)]
struct FaultyStore {
    inner: Arc<dyn Store>,
    left: Arc<AtomicU64>,
    fault: io::ErrorKind,
}

fn count_down(left: &AtomicU64, fault: io::ErrorKind) -> io::Result<()> {
    match left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) {
        Ok(_) => Ok(()),
        Err(_) => Err(fault.into()),
    }
}

impl ForwardingStore for FaultyStore {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }
    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        count_down(&self.left, self.fault)?;
        self.inner.write_at(buf, offset_bytes)
    }
    fn sync_data(&self) -> io::Result<()> {
        count_down(&self.left, self.fault)?;
        self.inner.sync_data()
    }
    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        count_down(&self.left, self.fault)?;
        self.inner.set_len(len_bytes)
    }
}

impl Faulty {
    fn new(name: &'static str, left: &Arc<AtomicU64>, fault: io::ErrorKind) -> Self {
        let (has_its_name, was_renamed) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { name, left: Arc::clone(left), fault, has_its_name, was_renamed }
    }

    fn meets(&self, path: &Path) -> bool {
        path.file_name().is_some_and(|name| name.to_string_lossy().contains(self.name))
    }
    fn count(&self, path: &Path) -> io::Result<()> {
        if self.meets(path) { count_down(&self.left, self.fault) } else { Ok(()) }
    }
}

impl ForwardingFileSystem for Faulty {
    fn open(&self, path: &Path, options: &diskwright_store::OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        let inner = FileSystem::open(&LocalFiles, path, options)?;
        if !self.meets(path) {
            return Ok(inner);
        }
        Ok(Arc::new(FaultyStore { inner, left: Arc::clone(&self.left), fault: self.fault }))
    }
    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        self.count(to)?;
        self.was_renamed.fetch_or(self.meets(to), Ordering::SeqCst);
        FileSystem::rename(&LocalFiles, from, to, replace)
    }
    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        self.count(path)?;
        FileSystem::sync_directory_of(&LocalFiles, path)?;
        if self.meets(path) && path.exists() && self.has_its_name.swap(true, Ordering::SeqCst) {
            // Made, and renamed: from here on it is the disk.
            self.left.store(u64::MAX, Ordering::SeqCst);
        }
        Ok(())
    }
}

/// A destination that fails at its n-th write or sync, whatever n: no client sees an error, and the
/// disk stays where it was, until a destination lives long enough.
#[test]
fn no_fault_of_the_destination_reaches_a_client() {
    for (fault, to) in [(io::ErrorKind::Other, "new.vhd"), (io::ErrorKind::StorageFull, "new.vhdx")] {
        let (_dir, dir) = folder();
        let path = made(&dir, "vm.vhdx");
        let left = Arc::new(AtomicU64::new(0));
        let faulty = Arc::new(Faulty::new("new", &left, fault));
        let disk = open_with(&path, Files::new(faulty.clone()));
        Blocking::open(&disk, EngineKind::Auto).unwrap().write(40 * MIB, &vec![8; 1 << 20], true).unwrap();
        Blocking::open(&disk, EngineKind::Auto).unwrap().discard(40 * MIB, MIB).unwrap();
        beside_clients(&disk, |disk| {
            let mut failed = 0;
            for count in (0..24).chain((1..).map(|step| 24 * step * step)) {
                left.store(count, Ordering::SeqCst);
                faulty.has_its_name.store(false, Ordering::SeqCst);
                faulty.was_renamed.store(false, Ordering::SeqCst);
                let outcome = disk.move_to(&dir.join(to), &plain(), &mut ());
                if outcome.is_ok() {
                    break;
                }
                failed += 1;
                // After a failed sync of the folder a power cut may bring the new name back. Its
                // mark stays then.
                let mut left = names(&dir);
                left.retain(|name| name != ".vm.vhdx.moved" || !faulty.was_renamed.load(Ordering::SeqCst));
                assert_eq!((left, disk.disk().file()), (vec!["vm.vhdx".to_owned()], Some(&*path)));
            }
            assert!(failed >= 10, "{failed}");
        });
    }
}

/// A file system that lets no file with `name` be removed until it is told to.
#[derive(Debug, Default)]
struct Slow {
    is_held: Mutex<bool>,
    changed: Condvar,
    removals: AtomicU64,
}

impl ForwardingFileSystem for Slow {
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.removals.fetch_add(1, Ordering::SeqCst);
        let held = self.is_held.lock().unwrap();
        drop(self.changed.wait_while(held, |held| *held).unwrap());
        FileSystem::remove(&LocalFiles, path)
    }
}

/// A power cut may bring the old name back until its removal is durable. So until then nothing is
/// promised that only the new disk has; what promises nothing goes on.
#[test]
fn nothing_is_promised_before_the_old_name_is_gone() {
    let (_dir, dir) = folder();
    let path = made(&dir, "vm.vhdx");
    let slow = Arc::new(Slow { is_held: Mutex::new(true), ..Slow::default() });
    let files = Files::new(slow.clone());
    let disk = open_with(&path, files);
    for on_ring in [false, true] {
        let ring = if on_ring { SharedRing::new(64, None).ok() } else { None };
        *slow.is_held.lock().unwrap() = true;
        slow.removals.store(0, Ordering::SeqCst);
        let to = dir.join(format!("new-{on_ring}.vhdx"));
        let mut queue =
            disk.open_queue(&QueueOptions { depth: 8, ring: ring.as_ref(), ..QueueOptions::default() }).unwrap();
        let mut done = Vec::new();
        thread::scope(|scope| {
            let moving = scope.spawn(|| disk.move_to(&to, &plain(), &mut ()).unwrap());
            while slow.removals.load(Ordering::SeqCst) == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            let write = |tag, fua| Request { fua, ..Request::write(tag * 4096, 4096, IoBuf::new(4096), tag) };
            queue.push(write(1, false)).unwrap();
            queue.push(write(2, true)).unwrap();
            queue.push(Request::flush(3)).unwrap();
            queue.push(Request::discard(MIB, MIB, 4)).unwrap();
            let until = Instant::now() + Duration::from_millis(200);
            while Instant::now() < until {
                ring.iter().for_each(|ring| ring.wait_for(Duration::from_millis(10)).unwrap());
                queue.reap(0, &mut done).unwrap();
            }
            let mut tags: Vec<u64> = done.drain(..).map(|one| one.result.map(|()| one.tag).unwrap()).collect();
            tags.sort_unstable();
            assert_eq!(tags, [1, 4], "on a ring: {on_ring}");
            *slow.is_held.lock().unwrap() = false;
            slow.changed.notify_all();
            while queue.in_flight() > 0 {
                match &ring {
                    Some(ring) => ring.wait().unwrap(),
                    None => queue.reap(1, &mut done).unwrap(),
                }
                queue.reap(0, &mut done).unwrap();
            }
            assert_eq!(done.len(), 2);
            assert!(moving.join().unwrap().warnings.is_empty());
        });
    }
}

/// Makes the next flush of the disk fail.
fn poison(disk: &Movable, left: &AtomicU64) {
    let mut io = Blocking::open(disk, EngineKind::Auto).unwrap();
    io.write(0, &[5; 4096], false).unwrap();
    left.store(0, Ordering::SeqCst);
    io.flush().unwrap_err();
    left.store(u64::MAX, Ordering::SeqCst);
}

/// Poisons the disk when its copy is nearly complete.
struct Poisons<'a> {
    disk: &'a Movable,
    left: &'a AtomicU64,
}

impl MoveWatch for Poisons<'_> {
    fn new_disk_is_made(&mut self, _: Option<(u64, u64)>) -> diskwright_disk::Result<()> {
        poison(self.disk, self.left);
        Ok(())
    }
}

/// After a failed flush the kernel may have dropped what was written. A new disk would not know.
#[test]
fn a_disk_whose_flush_has_failed_does_not_move() {
    for before in [true, false] {
        let (_dir, dir) = folder();
        let path = made(&dir, "vm.vhdx");
        let left = Arc::new(AtomicU64::new(u64::MAX));
        let fault = io::ErrorKind::Other;
        let faulty = Faulty::new("vm", &left, fault);
        let disk = open_with(&path, Files::new(Arc::new(faulty)));
        let error = if before {
            poison(&disk, &left);
            disk.move_to(&dir.join("new.vhd"), &plain(), &mut ()).unwrap_err()
        } else {
            let mut poisons = Poisons { disk: &disk, left: &left };
            disk.move_to(&dir.join("new.vhd"), &plain(), &mut poisons).unwrap_err()
        };
        assert!(error.to_string().contains("an earlier flush of this disk failed"), "{error}");
        assert_eq!(names(&dir), ["vm.vhdx"]);
        assert_eq!(disk.disk().file(), Some(&*path));
    }
}

/// The old name would stay, on a disk that gets no more writes.
#[test]
fn a_disk_whose_name_cannot_be_removed_moves_only_if_it_is_kept() {
    let (_dir, dir) = folder();
    let (_other, other) = folder();
    let disk = open(&made(&dir, "vm.vhdx"));
    let chattr = |flag: &str| std::process::Command::new("chattr").arg(flag).arg(&dir).status();
    if !chattr("+i").is_ok_and(|status| status.success()) {
        println!("skipped: a folder that cannot be changed: no chattr here");
        return;
    }
    let refused = disk.move_to(&other.join("new.vhd"), &plain(), &mut ());
    let keep = MoveOptions { keep_old: true, ..plain() };
    let kept = disk.move_to(&other.join("new.vhd"), &keep, &mut ());
    chattr("-i").unwrap();
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("remove the old file from its folder"), "{error}");
    assert_eq!(kept.unwrap().to, other.join("new.vhd"));
    assert_eq!((names(&dir), names(&other)), (vec!["vm.vhdx".to_owned()], vec!["new.vhd".to_owned()]));
}
