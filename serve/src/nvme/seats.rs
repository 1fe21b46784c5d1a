//! What a host may do with each namespace, and what it is told of its reservations.
//!
//! A host takes part in reservations by its host id, whichever of its controllers and queues a
//! command comes by. Each queue has seats of its own. A notice of what other hosts have done waits
//! for one controller of the host.

use crate::{
    net::{Export, exports::Exports},
    reservations::{Event, ReservationTable, Seat},
};
use diskwright_nvme::wire::reservation::NoticeKind;
use std::sync::Arc;
use uuid::Uuid;

/// What a participant's name begins with if it is a host.
const HOST: &str = "nvme:";

/// The host id of a participant. One that is no host has an id that is made from its name.
pub(super) fn host_id_of(participant: &str) -> [u8; 16] {
    let id = participant.strip_prefix(HOST).and_then(|id| Uuid::try_parse(id).ok());
    id.unwrap_or_else(|| Uuid::new_v5(&Uuid::NAMESPACE_OID, participant.as_bytes())).into_bytes()
}

/// The seats of a host at the namespaces, by the index of the export.
#[derive(Debug, Default)]
pub(super) struct Seats {
    participant: Arc<str>,
    /// With the names of the exports, because indexes are reused.
    seats: Vec<Option<(String, Seat)>>,
}

impl Seats {
    pub(super) fn of(host_id: [u8; 16], exports: &Exports, table: &ReservationTable) -> Self {
        let participant = format!("{HOST}{}", Uuid::from_bytes(host_id)).into();
        let mut seats = Self { participant, seats: Vec::new() };
        seats.look(exports, table);
        seats
    }

    /// Other exports are served from now on.
    pub(super) fn look(&mut self, exports: &Exports, table: &ReservationTable) {
        self.seats.resize_with(exports.indexes(), || None);
        for (index, seat) in self.seats.iter_mut().enumerate() {
            let export: Option<&Export> = exports.here(index);
            if seat.as_ref().map(|(name, _)| name) != export.map(|export| &export.name) {
                *seat = export.map(|export| (export.name.clone(), Seat::of(&self.participant, table.of(&export.name))));
            }
        }
    }

    pub(super) fn at(&mut self, export: usize) -> Option<&mut Seat> {
        self.seats.get_mut(export)?.as_mut().map(|(_, seat)| seat)
    }

    /// The ids of the namespaces.
    pub(super) fn ids(&self) -> Vec<u32> {
        let here = self.seats.iter().enumerate().filter(|(_, seat)| seat.is_some());
        here.map(|(index, _)| index as u32 + 1).collect()
    }

    /// Whether the host may read, or write.
    pub(super) fn may(&mut self, export: usize, writes: bool) -> bool {
        self.at(export).is_some_and(|seat| seat.may(writes))
    }

    /// Takes what others have done to the host's registrations, with the ids of the namespaces.
    pub(super) fn take_notices(&mut self) -> Vec<(NoticeKind, u32)> {
        let seats = self.seats.iter_mut().enumerate().filter_map(|(index, seat)| Some((index, seat.as_mut()?)));
        let notices = seats.flat_map(|(index, (_, seat))| {
            let kinds = seat.take_events().into_iter().map(|event| match event {
                Event::RegistrationPreempted => NoticeKind::RegistrationPreempted,
                Event::ReservationsReleased => NoticeKind::ReservationReleased,
                Event::ReservationsPreempted => NoticeKind::ReservationPreempted,
            });
            kinds.map(|kind| (kind, index as u32 + 1)).collect::<Vec<_>>()
        });
        notices.collect()
    }
}
