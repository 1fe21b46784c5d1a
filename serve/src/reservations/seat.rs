//! The seat of one participant at one disk: what it may do there, and its requests in flight.
//!
//! Clients of NBD and virtual machines cannot register. They share the seat of [`NOBODY`]: a disk
//! that others have reserved refuses their writes, and their reads if the reservation is exclusive
//! for reads.
//!
//! Each session has a seat of its own, so that a request costs one atomic load as long as the
//! reservations stay as they are.

use super::{Access, Change, Event, NOBODY, Refusal, Reservations};
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::SeqCst},
};

/// See the module.
#[derive(Debug)]
pub(crate) struct Seat {
    participant: Arc<str>,
    reservations: Arc<Reservations>,
    access: Access,
    /// The participant's requests in flight, those of its other sessions too.
    in_flight: Arc<AtomicU32>,
}

impl Seat {
    /// For a participant that can register.
    pub(crate) fn of(participant: &Arc<str>, reservations: Arc<Reservations>) -> Self {
        let in_flight = reservations.in_flight_of(participant);
        Self { participant: Arc::clone(participant), reservations, access: Access::default(), in_flight }
    }

    /// For a client that cannot.
    pub(crate) fn of_outsider(reservations: Arc<Reservations>) -> Self {
        Self { participant: NOBODY.into(), reservations, access: Access::default(), in_flight: Arc::default() }
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

    /// Takes what others have done to the participant's registration.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        if self.access().has_events { self.reservations.take_events(&self.participant) } else { Vec::new() }
    }

    /// Counts a request. It must be counted before [`Seat::may`] is asked: who preempts the
    /// participant changes the reservations before it looks at the count, so that one of the two
    /// sees the other.
    pub(crate) fn count(&self) -> Counted {
        self.in_flight.fetch_add(1, SeqCst);
        Counted(Arc::clone(&self.in_flight))
    }

    /// Whether a request of the participant is in flight.
    pub(crate) fn is_in_use(&self) -> bool {
        self.in_flight.load(SeqCst) > 0
    }
}

/// A request that is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Arc<AtomicU32>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}
