//! Reservations of logical units: the commands of SCSI for what `reservations` keeps.

use super::{
    replies::{Outcome, cut},
    state::{Asked, Iscsi},
};
use crate::{
    net::{connection::Connection, core::Core, flights::ClientRequest},
    reservations::{Change, Kind, Refusal, Reservations, Seat},
};
use diskwright_iscsi::scsi::{
    Sense,
    persistent::{self, ChangeList, Held, Registered, change, read},
    status,
};
use std::sync::Arc;

impl Core<Iscsi> {
    /// PERSISTENT RESERVE IN.
    pub(super) fn read_reservations(
        &self,
        conn: &Connection<Iscsi>,
        export: usize,
        action: u8,
        room_bytes: u32,
    ) -> Outcome {
        let Some(reservations) = conn.session.units.seat(export).map(Seat::reservations) else {
            return Outcome::Failed(Sense::NO_UNIT);
        };
        let state = reservations.state();
        let generation = state.generation();
        let kind = state.reservation().map(|reservation| code_of(reservation.kind));
        let page = match action {
            read::KEYS => persistent::keys(generation, state.registrations().iter().map(|one| one.key)),
            read::RESERVATION => {
                let held = state.reservation().map(|reservation| {
                    let is_of_all = reservation.kind.is_of_all();
                    let key = if is_of_all { None } else { state.key_of(&reservation.holder) };
                    Held { key: key.unwrap_or(0), kind: code_of(reservation.kind) }
                });
                persistent::reservation(generation, held)
            }
            read::CAPABILITIES => persistent::capabilities(reservations.can_last(), state.lasts()),
            _ => {
                let registered = state.registrations().iter().map(|one| Registered {
                    key: one.key,
                    holds: kind.filter(|_| state.holds(&one.participant)),
                    port: one.participant.clone(),
                });
                persistent::full_status(generation, registered)
            }
        };
        cut(page, room_bytes)
    }

    /// RESERVE(6) and RELEASE(6).
    pub(super) fn reserve_simply(&self, conn: &Connection<Iscsi>, export: usize, change: &Change) -> Outcome {
        match conn.session.units.seat(export).map(|seat| seat.change(change)) {
            Some(Ok(())) => Outcome::Good,
            Some(Err(refusal)) => refused(refusal),
            None => Outcome::Failed(Sense::NO_UNIT),
        }
    }

    /// PERSISTENT RESERVE OUT.
    pub(super) fn change_reservations(
        &mut self,
        conn: &mut Connection<Iscsi>,
        asked: &ClientRequest<Asked>,
        action: u8,
        (scope, kind): (u8, u8),
        list: &ChangeList,
    ) {
        let Some(seat) = conn.session.units.seat(asked.export as usize) else {
            return self.finish(conn, asked, Outcome::Failed(Sense::NO_UNIT));
        };
        let key = list.key;
        let wants_kind =
            matches!(action, change::RESERVE | change::RELEASE | change::PREEMPT | change::PREEMPT_AND_ABORT);
        let kind = match kind_of(kind).filter(|_| scope == 0) {
            Some(kind) => kind,
            None if wants_kind => return self.finish(conn, asked, Outcome::Failed(Sense::INVALID_FIELD)),
            None => Kind::WriteExclusive,
        };
        let register = |expected| Change::Register { expected, key: list.action_key, lasts: list.lasts };
        let change = match action {
            change::REGISTER => register(Some(key)),
            change::REGISTER_AND_IGNORE => register(None),
            change::RESERVE => Change::Reserve { key, kind },
            change::RELEASE => Change::Release { key, kind },
            change::CLEAR => Change::Clear { key },
            _ => Change::Preempt { key, other: list.action_key, kind },
        };
        let is_register = matches!(change, Change::Register { .. });
        if is_register && list.lasts && !seat.reservations().can_last() {
            return self.finish(conn, asked, Outcome::Failed(Sense::INVALID_PARAMETER));
        }
        let reservations = Arc::clone(seat.reservations());
        let done = seat.change(&change);
        tracing::info!(peer = %conn.peer, ?change, ok = done.is_ok(), "a change of reservations");
        match done {
            Err(refusal) => self.finish(conn, asked, refused(refusal)),
            Ok(()) if action == change::PREEMPT_AND_ABORT && reservations.has_late_requests() => {
                conn.session.draining.push((*asked, reservations));
            }
            Ok(()) => self.finish(conn, asked, Outcome::Good),
        }
    }

    /// Answers preemptions for which no request of those shut out is in flight any more.
    pub(super) fn look_for_drained(&mut self, conn: &mut Connection<Iscsi>) {
        for asked in Reservations::take_drained(&mut conn.session.draining) {
            self.finish(conn, &asked, Outcome::Good);
        }
    }
}

/// The code of a kind (SPC-4, table 66).
fn code_of(kind: Kind) -> u8 {
    let at = Kind::ALL.iter().position(|one| *one == kind).unwrap_or(0);
    persistent::TYPES[at]
}

fn kind_of(code: u8) -> Option<Kind> {
    persistent::TYPES.iter().position(|one| *one == code).map(|at| Kind::ALL[at])
}

fn refused(refusal: Refusal) -> Outcome {
    match refusal {
        Refusal::Conflict => Outcome::Status(status::RESERVATION_CONFLICT),
        Refusal::WrongRelease => Outcome::Failed(Sense::INVALID_RELEASE),
        Refusal::ZeroKey => Outcome::Failed(Sense::INVALID_PARAMETER),
        Refusal::TooMany => Outcome::Failed(Sense::NO_REGISTRATION),
        Refusal::NotSaved => Outcome::Failed(Sense::INTERNAL),
    }
}
