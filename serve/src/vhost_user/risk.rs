//! What a server's death costs a guest that lives on, and what the next server knows of it.
//!
//! ```text
//!   memory for requests in flight:  region of queue 0 | region of queue 1 ... | record (64 bytes)
//!                                                                               │
//!   a write to a new block completes ─▶ "at risk" ─▶ its used entry             │
//!   a flush succeeds ─▶ "safe"                                                  │
//!   killed; the front-end brings the memory to the next server ─▶ "at risk"? ◀──┘
//!                                                                └▶ every request fails
//! ```
//!
//! A completed write lies in a file. But the mapping of a new block lies in the server's memory
//! until a flush, and a server that is killed takes it along. A guest that is not told would see
//! older data, and its next flush would succeed. So the record, which outlives the server, says
//! whether completed requests are at risk ([`AtRisk`]). A server that finds a record of another
//! server with requests at risk fails the device: every request gets an I/O error until the machine
//! is reset. Then the front-end throws the memory away (QEMU does) and begins anew.
//!
//! The record is optional for a front-end. Without one a server only knows at which indexes it has
//! stopped the rings itself. A ring in the middle of its life that begins elsewhere was served by
//! another server, and what that one took along is unknown: the device fails too, unless the disk
//! has nothing that a death could undo.
//!
//! Invariants: "at risk" is stored before the used entry of the request is published. The state is
//! stored under the lock under which the disk was asked, so a worker that is late cannot overwrite
//! what another one has stored.
//!
//! Rejected: to write the mappings themselves to the memory and to replay them. Each format would
//! need a way to take over a block at a given place, against its own allocation after a crash: a
//! second log for five formats. A flush by the server whenever requests are at risk would make each
//! new block as slow as a flush.

use super::memory::Place;
use diskwright_store::{AtRisk, BlockDevice};
use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};
use uuid::Uuid;

/// Length of a record.
pub(crate) const RECORD_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"DWRISK\x00\x01";
const SERVER_AT: usize = 8;
const STATE_AT: usize = 24;

const SAFE: u16 = 0;
const AT_RISK: u16 = 1;
/// A server has found requests of a former one at risk.
const LOST: u16 = 2;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is known of the server that served a guest before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Former {
    /// Nothing: there is no record, or no server has written it.
    Unknown,
    /// It was this server.
    Ours,
    /// Another one, with nothing at risk when it ended.
    Safe,
    /// Another one, which took completed requests along.
    Lost,
}

/// The risk of a device, for as long as its server runs.
#[derive(Debug)]
pub(crate) struct Risk {
    disk: Arc<dyn BlockDevice>,
    /// Writes are dropped when the server ends, also by a flush.
    is_ephemeral: bool,
    server: Uuid,
    has_failed: AtomicBool,
    /// The index at which each ring was stopped, if it was served by this server and the device had
    /// not failed.
    stopped_at: Mutex<Vec<Option<u16>>>,
}

impl Risk {
    pub(crate) fn new(disk: Arc<dyn BlockDevice>, is_ephemeral: bool, rings: u16) -> Self {
        Self {
            disk,
            is_ephemeral,
            server: Uuid::new_v4(),
            has_failed: AtomicBool::new(false),
            stopped_at: Mutex::new(vec![None; rings.into()]),
        }
    }

    fn at_risk(&self) -> AtRisk {
        match self.is_ephemeral {
            true => AtRisk::Now,
            false => self.disk.at_risk(),
        }
    }

    /// Whether every request must fail.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    pub(crate) fn set_failed(&self, failed: bool) {
        self.has_failed.store(failed, Ordering::Release);
    }

    /// Remembers where a ring was stopped.
    pub(crate) fn stopped(&self, ring: usize, next: u16) {
        if !self.has_failed() {
            lock(&self.stopped_at)[ring] = Some(next);
        }
    }

    /// Whether completed requests of a ring that begins at `next` may be lost. `used` is the
    /// guest's index of used entries.
    pub(crate) fn is_lost(&self, former: Former, ring: usize, next: u16, used: u16) -> bool {
        match former {
            Former::Ours | Former::Safe => false,
            Former::Lost => true,
            Former::Unknown => {
                let is_new = next == 0 && used == 0;
                let is_ours = lock(&self.stopped_at)[ring] == Some(next);
                !is_new && !is_ours && self.at_risk() != AtRisk::Never
            }
        }
    }
}

/// The record at the end of the memory for requests in flight.
#[derive(Debug)]
pub(crate) struct RiskRecord {
    place: Place,
    /// Held while the disk is asked and the answer is stored.
    turn: Mutex<()>,
}

impl RiskRecord {
    /// The record in the [`RECORD_BYTES`] at this place.
    pub(crate) fn at(place: Place) -> Self {
        Self { place, turn: Mutex::default() }
    }

    fn state(&self) -> io::Result<u16> {
        self.place.memory.load_u16(self.place.at + STATE_AT)
    }

    fn set_state(&self, state: u16) -> io::Result<()> {
        self.place.memory.store_u16(self.place.at + STATE_AT, state)
    }

    fn server(&self) -> io::Result<Option<Uuid>> {
        let mut bytes = [0; STATE_AT];
        self.place.memory.copy_out(self.place.at, &mut bytes)?;
        let (magic, server) = bytes.split_at(SERVER_AT);
        Ok(Uuid::from_slice(server).ok().filter(|_| magic == MAGIC))
    }

    /// What the record says to a server with this risk.
    ///
    /// # Errors
    /// The memory could not be accessed, as in all functions here.
    pub(crate) fn former(&self, risk: &Risk) -> io::Result<Former> {
        Ok(match (self.server()?, self.state()?) {
            (None, _) => Former::Unknown,
            (Some(_), LOST) => Former::Lost,
            (Some(server), _) if server == risk.server => Former::Ours,
            (Some(_), SAFE) => Former::Safe,
            (Some(_), _) => Former::Lost,
        })
    }

    /// Makes the record that of this server.
    pub(crate) fn claim(&self, risk: &Risk, former: Former) -> io::Result<()> {
        let _turn = lock(&self.turn);
        if former == Former::Unknown {
            // The guest may have written by this server without a record.
            self.set_state(if risk.at_risk() == AtRisk::Now { AT_RISK } else { SAFE })?;
        }
        self.place.memory.copy_in(self.place.at + SERVER_AT, risk.server.as_bytes())?;
        self.place.memory.copy_in(self.place.at, &MAGIC)
    }

    /// Records for all later servers that completed requests are lost.
    pub(crate) fn set_lost(&self) -> io::Result<()> {
        let _turn = lock(&self.turn);
        self.set_state(LOST)?;
        self.place.memory.copy_in(self.place.at, &MAGIC)
    }

    /// Records whether requests are at risk now. To be called when requests have changed the disk,
    /// before the guest sees that they have completed, and with `flushed` after a flush.
    pub(crate) fn note(&self, risk: &Risk, flushed: bool) -> io::Result<()> {
        if !flushed && risk.at_risk() != AtRisk::Now {
            // What has completed is safe, whatever the record says of others.
            return Ok(());
        }
        let _turn = lock(&self.turn);
        if self.state()? == LOST {
            return Ok(());
        }
        self.set_state(if risk.at_risk() == AtRisk::Now { AT_RISK } else { SAFE })
    }

    /// Whether the record says that requests are at risk.
    pub(crate) fn says_at_risk(&self) -> io::Result<bool> {
        Ok(self.state()? == AT_RISK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::{BlockQueue, FileRange, Geometry, MappedMemory, QueueOptions};
    use rustix::fs::MemfdFlags;
    use std::os::fd::AsFd;

    #[derive(Debug)]
    struct Disk(Mutex<AtRisk>);

    impl BlockDevice for Disk {
        fn geometry(&self) -> Geometry {
            Geometry { size_bytes: 1 << 20, logical_sector_bytes: 512, physical_sector_bytes: 512, read_only: false }
        }

        fn open_queue(&self, _: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn at_risk(&self) -> AtRisk {
            *lock(&self.0)
        }
    }

    fn record() -> RiskRecord {
        let fd = rustix::fs::memfd_create("record", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        let range = FileRange { offset_bytes: 0, len_bytes: 4096 };
        RiskRecord::at(Place { memory: MappedMemory::of_memfd(fd.as_fd(), range, true).unwrap(), at: 128 })
    }

    #[test]
    fn the_next_server_knows_whether_completed_requests_were_at_risk() {
        let disk = Arc::new(Disk(Mutex::new(AtRisk::NotNow)));
        let server = || Risk::new(disk.clone(), false, 2);
        let (record, first) = (record(), server());
        assert_eq!(record.former(&first).unwrap(), Former::Unknown);
        record.claim(&first, Former::Unknown).unwrap();
        assert_eq!(record.former(&first).unwrap(), Former::Ours);
        assert_eq!(record.former(&server()).unwrap(), Former::Safe, "nothing was written");
        *lock(&disk.0) = AtRisk::Now;
        record.note(&first, false).unwrap();
        assert_eq!(record.former(&first).unwrap(), Former::Ours, "this server lives");
        assert_eq!(record.former(&server()).unwrap(), Former::Lost);
        *lock(&disk.0) = AtRisk::NotNow;
        record.note(&first, false).unwrap();
        assert_eq!(record.former(&server()).unwrap(), Former::Lost, "only a flush makes it safe");
        record.note(&first, true).unwrap();
        let second = server();
        assert_eq!(record.former(&second).unwrap(), Former::Safe);
        record.claim(&second, Former::Safe).unwrap();
        assert_eq!(record.former(&first).unwrap(), Former::Safe);
        record.set_lost().unwrap();
        record.note(&second, true).unwrap();
        for server in [&first, &second, &server()] {
            assert_eq!(record.former(server).unwrap(), Former::Lost, "for ever");
        }
    }

    #[test]
    fn without_a_record_only_rings_that_this_server_has_stopped_go_on() {
        let disk = Arc::new(Disk(Mutex::new(AtRisk::NotNow)));
        let risk = Risk::new(disk.clone(), false, 2);
        let is_lost = |ring, next, used| risk.is_lost(Former::Unknown, ring, next, used);
        assert!(!is_lost(0, 0, 0), "a ring that was never used");
        assert!(is_lost(0, 7, 7) && is_lost(1, 0, 3));
        risk.stopped(0, 7);
        assert!(!is_lost(0, 7, 7));
        assert!(is_lost(0, 8, 8) && is_lost(1, 7, 7));
        risk.set_failed(true);
        risk.stopped(1, 7);
        assert!(is_lost(1, 7, 7), "it was stopped after the device had failed");
        *lock(&disk.0) = AtRisk::Never;
        assert!(!is_lost(1, 7, 7), "a raw disk");
        assert!(risk.is_lost(Former::Lost, 0, 7, 7), "it is another disk than before");
        assert!(Risk::new(disk, true, 1).is_lost(Former::Unknown, 0, 7, 7), "an ephemeral disk");
    }
}
