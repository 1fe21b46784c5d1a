//! The seat of one participant at one disk: what it may do there, and its requests in flight.
//!
//! Clients of NBD and virtual machines cannot register. They share the seat of [`NOBODY`]: a disk
//! that others have reserved refuses their writes, and their reads if the reservation is exclusive
//! for reads.
//!
//! Each session has a seat of its own, so that a request costs one atomic load as long as the
//! reservations stay as they are. Its requests in flight are counted without atomic operations:
//! what all seats of a participant share is the number of seats that have any.

use super::{Access, Change, Event, NOBODY, Refusal, Reservations};
use std::{
    cell::Cell,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
};

/// See the module.
#[derive(Debug)]
pub(crate) struct Seat {
    participant: Arc<str>,
    reservations: Arc<Reservations>,
    access: Access,
    /// Number of the participant's events that this seat has taken, or need not take.
    events_seen: u64,
    in_flight: Rc<InFlight>,
}

/// The requests in flight of a seat.
#[derive(Debug)]
struct InFlight {
    count: Cell<u32>,
    /// Number of the participant's seats that have requests in flight.
    seats: Arc<AtomicU32>,
}

impl InFlight {
    fn of(seats: Arc<AtomicU32>) -> Rc<Self> {
        Rc::new(Self { count: Cell::new(0), seats })
    }
}

impl Seat {
    /// For a participant that can register.
    pub(crate) fn of(participant: &Arc<str>, reservations: Arc<Reservations>) -> Self {
        let (seats, events_seen) = reservations.seat_of(participant);
        let (participant, access, in_flight) = (Arc::clone(participant), Access::default(), InFlight::of(seats));
        Self { participant, reservations, access, events_seen, in_flight }
    }

    /// For a client that cannot.
    pub(crate) fn of_outsider(reservations: Arc<Reservations>) -> Self {
        Self {
            participant: NOBODY.into(),
            reservations,
            access: Access::default(),
            events_seen: 0,
            in_flight: InFlight::of(Arc::default()),
        }
    }

    /// What the participant may do now.
    pub(crate) fn access(&mut self) -> Access {
        self.access = self.reservations.access(&self.participant, self.access);
        self.access
    }

    /// Whether a request may read, or write.
    pub(crate) fn may(&mut self, writes: bool) -> bool {
        let access = self.access();
        if writes { access.writes } else { access.reads }
    }

    pub(crate) fn reservations(&self) -> &Arc<Reservations> {
        &self.reservations
    }

    /// Makes a change as this participant.
    ///
    /// # Errors
    /// Why the change is refused; nothing has changed then.
    pub(crate) fn change(&self, change: &Change) -> Result<(), Refusal> {
        self.reservations.change(&self.participant, change)
    }

    /// The key that the participant has registered.
    pub(crate) fn key(&self) -> Option<u64> {
        self.reservations.state().key_of(&self.participant)
    }

    /// Takes what others have done to the participant's registration. Each seat takes it.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        if self.access().events == self.events_seen {
            return Vec::new();
        }
        self.reservations.take_events(&self.participant, &mut self.events_seen)
    }

    /// Counts a request. It must be counted before [`Seat::may`] is asked: who preempts the
    /// participant changes the reservations before it looks at the count, so that one of the two
    /// sees the other.
    pub(crate) fn count(&self) -> Counted {
        let count = self.in_flight.count.get();
        self.in_flight.count.set(count + 1);
        if count == 0 {
            self.in_flight.seats.fetch_add(1, SeqCst);
        }
        Counted(Rc::clone(&self.in_flight))
    }

    /// Whether a request of the participant is in flight.
    pub(crate) fn is_in_use(&self) -> bool {
        self.in_flight.seats.load(SeqCst) > 0
    }
}

/// A request that is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Rc<InFlight>);

impl Drop for Counted {
    fn drop(&mut self) {
        let left = self.0.count.get() - 1;
        self.0.count.set(left);
        if left == 0 {
            self.0.seats.fetch_sub(1, SeqCst);
        }
    }
}
