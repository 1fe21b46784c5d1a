//! Reservations of namespaces: what a command may do, and the commands that change that.
//!
//! iSCSI initiators of the same disk take part beside the hosts. A report shows them with ids that
//! are made from their names.

use super::{
    seats::host_id_of,
    state::{Asked, Nvme},
};
use crate::{
    net::{connection::Connection, core::Core, flights::ClientRequest},
    reservations::{Change, Kind, Refusal, Reservations, Seat},
};
use diskwright_nvme::wire::{
    Status,
    reservation::{Action, Lasting, Registrant, Report, Reserve, keys},
};
use std::sync::Arc;

/// The kind of a type in commands, which is the index plus 1.
fn kind_of(code: u8) -> Option<Kind> {
    Kind::ALL.get(usize::from(code).checked_sub(1)?).copied()
}

fn code_of(kind: Kind) -> u8 {
    Kind::ALL.iter().position(|one| *one == kind).map_or(0, |index| index as u8 + 1)
}

impl Core<Nvme> {
    /// Lets a command read or write, and counts it until it ends.
    pub(super) fn admit(
        &mut self,
        conn: &mut Connection<Nvme>,
        asked: &mut ClientRequest<Asked>,
        writes: bool,
    ) -> Result<(), Status> {
        let seat = conn.session.seats.at(asked.export as usize).ok_or(Status::INVALID_NAMESPACE)?;
        let counted = seat.count();
        if !seat.may(writes) {
            return Err(Status::RESERVATION_CONFLICT);
        }
        asked.own.counted = conn.session.counted.insert(counted);
        Ok(())
    }

    /// Carries out a command with its data: Reservation Register, Acquire or Release.
    pub(super) fn reserve(&mut self, conn: &mut Connection<Nvme>, asked: &ClientRequest<Asked>, data: &[u8]) {
        let Some(command) = Reserve::decode(asked.own.opcode, asked.own.dword_10) else {
            return self.finish(conn, asked, Status::INVALID_FIELD);
        };
        let Some(seat) = conn.session.seats.at(asked.export as usize) else {
            return self.finish(conn, asked, Status::INVALID_NAMESPACE);
        };
        // An initiator may have reserved the disk in the way of SPC-2, which knows no keys.
        let is_shut = seat.access().is_shut;
        let done = if is_shut { Err(Status::RESERVATION_CONFLICT) } else { carry_out(seat, &command, keys(data)) };
        tracing::info!(peer = %conn.peer, ?command, ok = done.is_ok(), "a change of reservations");
        let reservations = Arc::clone(seat.reservations());
        if done.is_ok() && command.action == Action::PreemptAndAbort && reservations.has_late_requests() {
            return conn.session.draining.push((*asked, reservations));
        }
        let status = done.err().unwrap_or(Status::SUCCESS);
        self.finish(conn, asked, status);
    }

    /// Answers preemptions for which no request of those shut out is in flight any more.
    pub(super) fn look_for_drained(&mut self, conn: &mut Connection<Nvme>) {
        for asked in Reservations::take_drained(&mut conn.session.draining) {
            self.finish(conn, &asked, Status::SUCCESS);
        }
    }
}

/// What Reservation Report tells.
pub(super) fn report(reservations: &Reservations) -> Report {
    let state = reservations.state();
    let registrants = state.registrations().iter().map(|one| Registrant {
        key: one.key,
        host: host_id_of(&one.participant),
        holds: state.holds(&one.participant),
    });
    Report {
        generation: state.generation(),
        kind: state.reservation().map_or(0, |there| code_of(there.kind)),
        lasts: state.lasts(),
        registrants: registrants.collect(),
    }
}

/// Makes the change that a command asks for. `current` and `other` are the keys in its data.
fn carry_out(seat: &Seat, command: &Reserve, (current, other): (u64, u64)) -> Result<(), Status> {
    let kind = kind_of(command.kind);
    let registered = seat.key();
    let reservations = seat.reservations();
    // Linux always asks for what lasts. Where nothing can, a report says that it does not.
    let lasts = match command.lasting {
        Lasting::Unchanged => reservations.state().lasts(),
        Lasting::No => false,
        Lasting::Yes => reservations.can_last(),
    };
    // A host that is preempted meanwhile has another key or none, and is refused.
    let expected = if command.ignores_key { registered } else { Some(current) };
    let change = match command.action {
        Action::Register if other == 0 => return Err(Status::INVALID_FIELD),
        Action::Register if registered == Some(other) => return Ok(()),
        Action::Register => Change::Register { expected: Some(0), key: other, lasts },
        Action::Replace if other == 0 => return Err(Status::INVALID_FIELD),
        Action::Replace | Action::Unregister => {
            let expected = Some(expected.filter(|_| registered.is_some()).ok_or(Status::RESERVATION_CONFLICT)?);
            let key = if command.action == Action::Replace { other } else { 0 };
            Change::Register { expected, key, lasts }
        }
        _ if command.ignores_key => return Err(Status::INVALID_FIELD),
        Action::Clear => Change::Clear { key: current },
        Action::Acquire => Change::Reserve { key: current, kind: kind.ok_or(Status::INVALID_FIELD)? },
        Action::Release => Change::Release { key: current, kind: kind.ok_or(Status::INVALID_FIELD)? },
        Action::Preempt | Action::PreemptAndAbort => {
            Change::Preempt { key: current, other, kind: kind.ok_or(Status::INVALID_FIELD)? }
        }
    };
    seat.change(&change).map_err(|refusal| match refusal {
        Refusal::Conflict => Status::RESERVATION_CONFLICT,
        Refusal::WrongRelease | Refusal::ZeroKey => Status::INVALID_FIELD,
        Refusal::TooMany => Status::NO_RESOURCES,
        Refusal::NotSaved => Status::INTERNAL,
    })
}
