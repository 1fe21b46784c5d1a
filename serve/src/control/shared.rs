//! What the threads of a control channel share. One mutex guards the state; another one in each
//! disk guards which operation changes it.

use super::{
    folder::Folder,
    host::{Host, HostedDisk},
    message::FileId,
};
use diskwright_disk::Disk;
use std::{
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// A disk, and the operation that changes it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) held: HostedDisk,
    pub(super) busy: Mutex<Option<&'static str>>,
}

impl Entry {
    /// The disk as it is now.
    pub(super) fn disk(&self) -> Arc<Disk> {
        self.held.disk.disk()
    }

    /// The identity of the file that is written now.
    pub(super) fn id(&self) -> Option<FileId> {
        id_of(&self.disk())
    }

    pub(super) fn busy_with(&self) -> Option<&'static str> {
        *lock(&self.busy)
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Connections that are open.
    pub(super) clients: usize,
    /// Clients whose request was taken and not answered.
    pub(super) answering: usize,
    /// Operations that change a disk now.
    pub(super) changing: usize,
    /// No operation may begin.
    pub(super) is_closing: bool,
    /// How the process has closed its disks.
    pub(super) ended: Option<Result<(), String>>,
}

/// What the threads of a channel share.
#[derive(Debug)]
pub(super) struct Shared {
    disks: Mutex<Vec<Arc<Entry>>>,
    pub(super) host: Host,
    pub(super) opened_at: Instant,
    pub(super) folder: Folder,
    pub(super) socket: PathBuf,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

impl Shared {
    pub(super) fn new(disks: Vec<HostedDisk>, host: Host, folder: Folder, socket: PathBuf) -> Self {
        let disks = disks.into_iter().map(|held| Arc::new(Entry { held, busy: Mutex::default() })).collect();
        Self {
            disks: Mutex::new(disks),
            host,
            opened_at: Instant::now(),
            folder,
            socket,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// The disks that the process has now.
    pub(super) fn disks(&self) -> Vec<Arc<Entry>> {
        lock(&self.disks).clone()
    }

    pub(super) fn add_disk(&self, held: HostedDisk) {
        lock(&self.disks).push(Arc::new(Entry { held, busy: Mutex::default() }));
    }

    /// Forgets a disk, unless it is the last one. Returns whether it is forgotten.
    ///
    /// One step under the lock, so that two removals at once cannot leave the process without disk.
    pub(super) fn forget_unless_last(&self, entry: &Arc<Entry>) -> bool {
        let mut disks = lock(&self.disks);
        let others = disks.iter().filter(|other| !Arc::ptr_eq(other, entry)).count();
        if others > 0 {
            disks.retain(|other| !Arc::ptr_eq(other, entry));
        }
        others > 0
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The identity of the file that is written now.
pub(super) fn id_of(disk: &Disk) -> Option<FileId> {
    disk.file()?;
    disk.layers().first()?.image.store().identity().map(Into::into)
}
