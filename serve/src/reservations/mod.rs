//! Persistent reservations of disks, for all protocols that have them.
//!
//! ```text
//!   session ─▶ Reservations::change ─▶ State (state.rs) ─▶ file (file.rs), if they shall last
//!   session ─▶ Access, from its cache while the version stays the same
//!   session ─▶ Claims (claims.rs)         bytes for one command, and the writes in flight
//!   session ─▶ Reservations::take_events      what another one has done to its registration
//! ```
//!
//! Clusters use reservations to keep a node that has failed from writing. A participant registers a
//! key; one that is registered may reserve the disk, and may remove the keys of others. A
//! participant is a text: the port of an initiator. It is the same when the participant comes
//! again.
//!
//! The reservations of a disk are one [`Reservations`], which the servers of the disk share. One
//! mutex guards it, and is held while a change is written to the file. Requests of data look only
//! at the version, an atomic number that grows with each change.

mod claims;
mod file;
mod seat;
mod state;

pub(crate) use claims::{Claim, ClaimedQueue, Claims, Noted, Watch};
pub use file::FileError;
pub(crate) use seat::{Counted, Seat};
pub(crate) use state::{Change, Event, Kind, Refusal, State};

use file::File;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

/// The participant that all clients are which take no part in reservations. None registers by this
/// name, because it is not a port's.
const NOBODY: &str = "";

/// The reservations of all disks of a process.
#[derive(Debug, Default)]
pub struct ReservationTable {
    /// Where those are kept that shall last.
    dir: Option<PathBuf>,
    /// Which writes of the disks are noted.
    noted: Mutex<Noted>,
    disks: Mutex<BTreeMap<String, Arc<Reservations>>>,
}

impl ReservationTable {
    /// Reservations that may last are kept in the folder `dir`, a file for each disk.
    pub fn kept_in(dir: &Path) -> Self {
        Self { dir: Some(dir.to_owned()), ..Self::default() }
    }

    /// Reads the reservations of a disk, which is exported by this name. Those of a disk that is
    /// known stay as they are.
    ///
    /// # Errors
    /// Its file cannot be read, or is damaged.
    pub fn load(&self, name: &str) -> Result<(), FileError> {
        let Some(dir) = &self.dir else { return Ok(()) };
        if self.lock().contains_key(name) {
            return Ok(());
        }
        let (file, state) = File::open(dir, name)?;
        let reservations = Arc::new(Reservations::new(state, Some(file)));
        self.lock().insert(name.to_owned(), reservations);
        Ok(())
    }

    /// The reservations of a disk.
    pub(crate) fn of(&self, name: &str) -> Arc<Reservations> {
        let reservations = Arc::clone(self.lock().entry(name.to_owned()).or_default());
        reservations.claims.note(*self.noted.lock().unwrap_or_else(PoisonError::into_inner));
        reservations
    }

    /// A door is about to be opened for which at least these writes must be noted. To be called
    /// before a door is open whose clients take no part in reservations.
    pub(crate) fn note(&self, noted: Noted) {
        let mut all = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        *all = noted.max(*all);
        self.lock().values().for_each(|reservations| reservations.claims.note(noted));
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Reservations>>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reservations of a disk.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    version: AtomicU64,
    inside: Mutex<Inside>,
    claims: Arc<Claims>,
}

#[derive(Debug, Default)]
struct Inside {
    state: State,
    file: Option<File>,
    events: BTreeMap<String, Vec<Event>>,
    /// How many sessions of each participant have requests in flight.
    in_flight: BTreeMap<String, Weak<AtomicU32>>,
}

/// What a participant may do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    /// Whether another one has reserved the disk in the way of SPC-2, which shuts out nearly all.
    pub(crate) is_shut: bool,
    /// The version of the reservations for which this is true.
    version: u64,
    /// Whether there is something to tell the participant.
    pub(crate) has_events: bool,
}

/// A version that no reservations have.
const NEVER: u64 = u64::MAX;

impl Default for Access {
    /// What must be looked up.
    fn default() -> Self {
        Self { reads: false, writes: false, is_shut: true, version: NEVER, has_events: false }
    }
}

impl Reservations {
    fn new(state: State, file: Option<File>) -> Self {
        let inside = Inside { state, file, ..Inside::default() };
        Self { inside: Mutex::new(inside), ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The claimed bytes of the disk.
    pub(crate) fn claims(&self) -> &Arc<Claims> {
        &self.claims
    }

    /// Whether reservations can last longer than the process.
    pub(crate) fn can_last(&self) -> bool {
        self.lock().file.is_some()
    }

    /// What the participant may do: `known` if that is still true.
    pub(crate) fn access(&self, participant: &str, known: Access) -> Access {
        if self.version.load(Ordering::SeqCst) == known.version {
            return known;
        }
        let inside = self.lock();
        let version = self.version.load(Ordering::SeqCst);
        let (reads, writes) = inside.state.allows(participant);
        let is_shut = inside.state.is_shut_for(participant);
        Access { reads, writes, is_shut, version, has_events: inside.events.contains_key(participant) }
    }

    /// Takes what is to be told to the participant.
    pub(crate) fn take_events(&self, participant: &str) -> Vec<Event> {
        let mut inside = self.lock();
        let events = inside.events.remove(participant).unwrap_or_default();
        if !events.is_empty() {
            self.version.fetch_add(1, Ordering::SeqCst);
        }
        events
    }

    /// Changes the reservations. A change that shall last is in the file when this returns.
    ///
    /// # Errors
    /// Why the change is refused; nothing has changed then.
    pub(crate) fn change(&self, participant: &str, change: &Change) -> Result<(), Refusal> {
        let mut inside = self.lock();
        let mut next = inside.state.clone();
        let events = next.change(participant, change)?;
        if next == inside.state {
            return Ok(());
        }
        if let Some(file) = &inside.file
            && (inside.state.lasts() || next.lasts())
            && let Err(error) = file.save(&next)
        {
            tracing::error!(%error, "a change of reservations is refused: it could not be saved");
            return Err(Refusal::NotSaved);
        }
        inside.state = next;
        for (participant, event) in events {
            inside.events.entry(participant).or_default().push(event);
        }
        self.version.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// The counter of a participant's sessions with requests in flight, which these keep.
    pub(crate) fn in_flight_of(&self, participant: &str) -> Arc<AtomicU32> {
        let mut inside = self.lock();
        inside.in_flight.retain(|_, counter| counter.strong_count() > 0);
        if let Some(counter) = inside.in_flight.get(participant).and_then(Weak::upgrade) {
            return counter;
        }
        let counter = Arc::default();
        inside.in_flight.insert(participant.to_owned(), Arc::downgrade(&counter));
        counter
    }

    /// Whether a request is in flight of a participant that may not write, or a write of a client
    /// that takes no part in reservations.
    pub(crate) fn has_late_requests(&self) -> bool {
        let inside = self.lock();
        if !inside.state.allows(NOBODY).1 && self.claims.have_outsiders_writes() {
            return true;
        }
        inside.in_flight.iter().any(|(participant, counter)| {
            let (_, writes) = inside.state.allows(participant);
            !writes && counter.upgrade().is_some_and(|counter| counter.load(Ordering::SeqCst) > 0)
        })
    }

    /// Takes the preemptions for which no request is waited for any more.
    pub(crate) fn take_drained<T>(draining: &mut Vec<(T, Arc<Self>)>) -> Vec<T> {
        let drained = draining.extract_if(.., |(_, reservations)| !reservations.has_late_requests());
        drained.map(|(preemption, _)| preemption).collect()
    }

    /// The reservations as they are.
    pub(crate) fn state(&self) -> State {
        self.lock().state.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::{BlockDevice, BlockQueue, IoBuf, MemoryStore, QueueOptions, RawDevice, Request};

    fn register(key: u64, lasts: bool) -> Change {
        Change::Register { expected: None, key, lasts }
    }

    #[test]
    fn access_is_looked_up_after_a_change() {
        let table = ReservationTable::default();
        let disk = table.of("d");
        let at_first = disk.access("a", Access::default());
        assert!(at_first.reads && at_first.writes && !at_first.has_events);
        assert_eq!(disk.access("a", at_first), at_first);
        disk.change("b", &register(2, false)).unwrap();
        disk.change("b", &Change::Reserve { key: 2, kind: Kind::ExclusiveAccess }).unwrap();
        let shut_out = disk.access("a", at_first);
        assert!(!shut_out.reads && !shut_out.writes);
        // Another door of the same disk has the same reservations.
        assert!(
            !table.of("d").access("a", Access::default()).reads && table.of("e").access("a", Access::default()).reads
        );
    }

    #[test]
    fn requests_of_those_shut_out_are_seen() {
        let disk = Reservations::default();
        let (a, b) = (disk.in_flight_of("a"), disk.in_flight_of("b"));
        a.fetch_add(1, Ordering::Relaxed);
        b.fetch_add(1, Ordering::Relaxed);
        assert!(!disk.has_late_requests());
        disk.change("b", &register(2, false)).unwrap();
        disk.change("b", &Change::Reserve { key: 2, kind: Kind::WriteExclusive }).unwrap();
        assert!(disk.has_late_requests());
        a.fetch_sub(1, Ordering::SeqCst);
        assert!(!disk.has_late_requests());
        assert!(Arc::ptr_eq(&a, &disk.in_flight_of("a")));
    }

    #[test]
    fn writes_of_those_who_cannot_register_are_seen() {
        let table = ReservationTable::default();
        let disk = table.of("d");
        table.note(Noted::Outsiders);
        let mut queue = memory_queue(disk.claims(), true);
        queue.push(Request::write(0, 512, IoBuf::new(512), 0)).unwrap();
        assert!(!disk.has_late_requests());
        disk.change("b", &register(2, false)).unwrap();
        disk.change("b", &Change::Reserve { key: 2, kind: Kind::WriteExclusive }).unwrap();
        assert!(disk.has_late_requests());
        queue.reap(1, &mut Vec::new()).unwrap();
        assert!(!disk.has_late_requests());
        // The requests of initiators are counted by initiator.
        let mut queue = memory_queue(disk.claims(), false);
        queue.push(Request::write(0, 512, IoBuf::new(512), 0)).unwrap();
        assert!(!disk.has_late_requests());
    }

    fn memory_queue(claims: &Arc<Claims>, is_outsiders: bool) -> ClaimedQueue {
        let store = MemoryStore::with_bytes("memory", vec![0; 4096]);
        let memory = RawDevice::new(Arc::new(store), true, 512).unwrap();
        let queue = memory.open_queue(&QueueOptions::default()).unwrap();
        ClaimedQueue::over(queue, Arc::clone(claims), None, is_outsiders)
    }

    #[test]
    fn what_others_do_is_told_once() {
        let disk = Reservations::default();
        disk.change("a", &register(1, false)).unwrap();
        disk.change("b", &register(2, false)).unwrap();
        disk.change("b", &Change::Clear { key: 2 }).unwrap();
        assert!(disk.access("a", Access::default()).has_events && !disk.access("b", Access::default()).has_events);
        assert_eq!(disk.take_events("a"), [Event::ReservationsPreempted]);
        assert!(!disk.access("a", Access::default()).has_events);
    }

    #[test]
    fn what_shall_last_is_there_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let open = || {
            let table = ReservationTable::kept_in(dir.path());
            table.load("a/../d").unwrap();
            table.of("a/../d")
        };
        let disk = open();
        assert!(disk.can_last());
        disk.change("a", &register(7, true)).unwrap();
        disk.change("a", &Change::Reserve { key: 7, kind: Kind::WriteExclusive }).unwrap();
        let (before, after) = (disk.state(), open().state());
        assert_eq!((before.registrations(), before.reservation()), (after.registrations(), after.reservation()));
        // The generation begins anew (SPC-4, 6.15.2).
        assert_eq!((before.generation(), after.generation()), (1, 0));
        assert!(!open().access("b", Access::default()).writes);
        // What shall not last is gone.
        open().change("a", &register(7, false)).unwrap();
        assert!(open().access("b", Access::default()).writes);
    }

    #[test]
    fn a_change_that_cannot_be_saved_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let table = ReservationTable::kept_in(&dir.path().join("d"));
        std::fs::create_dir(dir.path().join("d")).unwrap();
        table.load("x").unwrap();
        std::fs::remove_dir(dir.path().join("d")).unwrap();
        let disk = table.of("x");
        assert_eq!(disk.change("a", &register(7, true)), Err(Refusal::NotSaved));
        assert_eq!(disk.state(), State::default());
        disk.change("a", &register(7, false)).unwrap();
    }
}
