//! What a session knows of each logical unit: what the initiator is told next, and what it may do.
//!
//! *Unit attentions* are told instead of the result of the initiator's next command, which it then
//! sends again (SAM-5, 5.14). What it may do depends on reservations: it is looked up when they
//! have changed.

use crate::{
    net::exports::Exports,
    reservations::{Change, Event, ReservationTable, Seat},
};
use diskwright_iscsi::scsi::{Sense, command::Class};
use std::{collections::VecDeque, sync::Arc};

/// Attentions of one logical unit at most. Further ones are dropped; the first tells that the unit
/// must be looked at.
const ATTENTIONS_MAX: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Units {
    /// The initiator's port, by which it takes part in reservations.
    participant: Arc<str>,
    units: Vec<Option<Unit>>,
}

#[derive(Debug)]
struct Unit {
    name: String,
    /// The size that the initiator may know, in bytes.
    size_bytes: u64,
    pending: VecDeque<Sense>,
    seat: Seat,
}

impl Units {
    /// Those of a new session.
    pub(super) fn new(participant: String, exports: &Exports, table: &ReservationTable) -> Self {
        let mut units = Self { participant: participant.into(), units: Vec::new() };
        units.look(exports, table);
        for unit in units.units.iter_mut().flatten() {
            unit.pending = VecDeque::from([Sense::NEW_NEXUS]);
        }
        units
    }

    /// Compares the exports with what was known of them.
    pub(super) fn look(&mut self, exports: &Exports, table: &ReservationTable) {
        let is_first = self.units.is_empty();
        self.units.resize_with(exports.indexes().max(self.units.len()), || None);
        let mut has_changed = false;
        for (index, unit) in self.units.iter_mut().enumerate() {
            let now = exports.here(index);
            match (unit.as_mut(), now) {
                (Some(unit), Some(now)) if unit.name == now.name => {
                    let size_bytes = now.device.geometry().size_bytes;
                    if std::mem::replace(&mut unit.size_bytes, size_bytes) != size_bytes {
                        unit.add(Sense::CAPACITY_CHANGED);
                    }
                }
                (None, None) => {}
                _ => {
                    has_changed = true;
                    *unit = now.map(|now| Unit {
                        name: now.name.clone(),
                        size_bytes: now.device.geometry().size_bytes,
                        pending: VecDeque::new(),
                        seat: Seat::of(&self.participant, table.of(&now.name)),
                    });
                }
            }
        }
        if has_changed && !is_first {
            self.units.iter_mut().flatten().for_each(|unit| unit.add(Sense::UNITS_CHANGED));
        }
    }

    fn unit(&mut self, export: usize) -> Option<&mut Unit> {
        self.units.get_mut(export)?.as_mut()
    }

    /// Takes the next attention of a unit.
    pub(super) fn take(&mut self, export: usize) -> Option<Sense> {
        self.unit(export)?.pending.pop_front()
    }

    /// REPORT LUNS tells what the attention of changed units is about.
    pub(super) fn forget_units_changed(&mut self) {
        for unit in self.units.iter_mut().flatten() {
            unit.pending.retain(|attention| *attention != Sense::UNITS_CHANGED);
        }
    }

    /// Whether reservations let the initiator carry out a command of this class. What others have
    /// done to its registration becomes attentions.
    pub(super) fn allows(&mut self, export: usize, class: Class) -> bool {
        self.unit(export).is_none_or(|unit| unit.allows(class))
    }

    /// The initiator's seat at a unit.
    pub(super) fn seat(&self, export: usize) -> Option<&Seat> {
        self.units.get(export)?.as_ref().map(|unit| &unit.seat)
    }

    /// The session ends, and with it the initiator's reservations in the way of SPC-2.
    pub(super) fn end_simple_reservations(&self) {
        for unit in self.units.iter().flatten() {
            // There is none if it is refused.
            let _ = unit.seat.change(&Change::ReleaseSimply);
        }
    }

    /// A unit is reset.
    pub(super) fn reset(&mut self, export: usize) {
        if let Some(unit) = self.unit(export) {
            unit.add(Sense::UNIT_RESET);
            let _ = unit.seat.change(&Change::Reset);
        }
    }

    /// Whether requests of an earlier session of the initiator are in flight.
    pub(super) fn are_in_use(&self) -> bool {
        self.units.iter().flatten().any(|unit| unit.seat.is_in_use())
    }
}

impl Unit {
    fn add(&mut self, attention: Sense) {
        if self.pending.len() < ATTENTIONS_MAX && !self.pending.contains(&attention) {
            self.pending.push_back(attention);
        }
    }

    fn allows(&mut self, class: Class) -> bool {
        for event in self.seat.take_events() {
            self.add(match event {
                Event::ReservationsPreempted => Sense::RESERVATIONS_PREEMPTED,
                Event::ReservationsReleased => Sense::RESERVATIONS_RELEASED,
                Event::RegistrationPreempted => Sense::REGISTRATION_PREEMPTED,
            });
        }
        let access = self.seat.access();
        match class {
            Class::Always => true,
            Class::Free => !access.is_shut,
            Class::Reads => access.reads,
            Class::Writes => access.writes,
        }
    }
}
