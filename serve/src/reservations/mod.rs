//! Persistent reservations of disks, for all protocols that have them.
//!
//! ```text
//!   session ─▶ Reservations::change ─▶ State (state.rs) ─▶ file (file.rs), if they shall last
//!   session ─▶ Access, from its cache while the version stays the same
//!   session ─▶ Claims (claims.rs)         bytes for one command, and the writes in flight
//!   session ─▶ Seat::take_events           what another one has done to its registration
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
    collections::{BTreeMap, VecDeque},
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
    participants: BTreeMap<String, Participant>,
}

/// What the seats of a participant share.
#[derive(Debug, Default)]
struct Participant {
    /// How many of its seats have requests in flight. The seats keep it.
    in_flight: Weak<AtomicU32>,
    /// What others did to its registration: the last ones.
    events: VecDeque<Event>,
    /// Number of events so far.
    total: u64,
    /// Number of events that a seat has taken. A new seat takes those that no seat has taken.
    taken: u64,
}

impl Participant {
    /// Events that are kept for a seat that does not take them.
    const EVENTS_MAX: usize = 64;

    fn tell(&mut self, event: Event) {
        if self.events.len() == Self::EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
        self.total += 1;
    }

    /// Whether it has no seat, and nothing to be told to the next one.
    fn is_idle(&self) -> bool {
        self.in_flight.strong_count() == 0 && self.taken == self.total
    }
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
    /// Number of events of the participant so far.
    events: u64,
}

/// A version that no reservations have.
const NEVER: u64 = u64::MAX;

impl Default for Access {
    /// What must be looked up.
    fn default() -> Self {
        Self { reads: false, writes: false, is_shut: true, version: NEVER, events: 0 }
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
        let events = inside.participants.get(participant).map_or(0, |participant| participant.total);
        Access { reads, writes, is_shut, version, events }
    }

    /// Takes the participant's events after the first `seen`, and brings `seen` up to date.
    fn take_events(&self, participant: &str, seen: &mut u64) -> Vec<Event> {
        let mut inside = self.lock();
        let Some(participant) = inside.participants.get_mut(participant) else { return Vec::new() };
        let new = participant.total.saturating_sub(*seen).min(participant.events.len() as u64) as usize;
        (*seen, participant.taken) = (participant.total, participant.total);
        participant.events.iter().skip(participant.events.len() - new).copied().collect()
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
            inside.participants.entry(participant).or_default().tell(event);
        }
        self.version.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// The counter of a participant's seats with requests in flight, for a new seat, and the number
    /// of events that it need not take.
    fn seat_of(&self, participant: &str) -> (Arc<AtomicU32>, u64) {
        let mut inside = self.lock();
        inside.participants.retain(|_, participant| !participant.is_idle());
        let participant = inside.participants.entry(participant.to_owned()).or_default();
        let counter = participant.in_flight.upgrade().unwrap_or_default();
        participant.in_flight = Arc::downgrade(&counter);
        (counter, participant.taken)
    }

    /// Whether a request is in flight of a participant that may not write, or a write of a client
    /// that takes no part in reservations.
    pub(crate) fn has_late_requests(&self) -> bool {
        let inside = self.lock();
        if !inside.state.allows(NOBODY).1 && self.claims.have_outsiders_writes() {
            return true;
        }
        inside.participants.iter().any(|(name, participant)| {
            let (_, writes) = inside.state.allows(name);
            !writes && participant.in_flight.upgrade().is_some_and(|counter| counter.load(Ordering::SeqCst) > 0)
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
        assert!(at_first.reads && at_first.writes);
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
        let ((a, _), (b, _)) = (disk.seat_of("a"), disk.seat_of("b"));
        a.fetch_add(1, Ordering::Relaxed);
        b.fetch_add(1, Ordering::Relaxed);
        assert!(!disk.has_late_requests());
        disk.change("b", &register(2, false)).unwrap();
        disk.change("b", &Change::Reserve { key: 2, kind: Kind::WriteExclusive }).unwrap();
        assert!(disk.has_late_requests());
        a.fetch_sub(1, Ordering::SeqCst);
        assert!(!disk.has_late_requests());
        assert!(Arc::ptr_eq(&a, &disk.seat_of("a").0));
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
    fn what_others_do_is_told_to_each_seat_once() {
        let disk = Arc::new(Reservations::default());
        let seat = |participant: &str| Seat::of(&participant.into(), Arc::clone(&disk));
        let (mut one, mut other, mut b) = (seat("a"), seat("a"), seat("b"));
        disk.change("a", &register(1, false)).unwrap();
        disk.change("b", &register(2, false)).unwrap();
        disk.change("b", &Change::Clear { key: 2 }).unwrap();
        let told = [Event::ReservationsPreempted];
        assert_eq!(one.take_events(), told);
        assert_eq!((one.take_events(), b.take_events()), (vec![], vec![]));
        assert_eq!(seat("a").take_events(), [], "another seat has taken it");
        assert_eq!(other.take_events(), told);
        assert_eq!(other.take_events(), []);
        drop((one, other));
        // What happens while a participant has no seat is told to the next one.
        disk.change("a", &register(1, false)).unwrap();
        disk.change("b", &register(2, false)).unwrap();
        for _ in 0..100 {
            disk.change("b", &Change::Clear { key: 2 }).unwrap();
            disk.change("a", &register(1, false)).unwrap();
            disk.change("b", &register(2, false)).unwrap();
        }
        let mut next = seat("a");
        assert_eq!(next.take_events(), vec![Event::ReservationsPreempted; Participant::EVENTS_MAX]);
        assert_eq!(next.take_events(), []);
        drop(next);
        drop(seat("c"));
        assert_eq!(disk.lock().participants.keys().collect::<Vec<_>>(), ["b", "c"], "a has nothing to be told");
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
