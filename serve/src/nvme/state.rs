//! What a session keeps: its phase, its queue, its payloads. No code that handles PDUs.

use super::{
    auth::Auth,
    controller::{Controller, Shared},
    seats::Seats,
};
use crate::{
    net::{
        connection::Incoming,
        flights::{ClientRequest, Contents},
        protocol::{ProtocolTypes, SessionEnd},
    },
    reservations::{Counted, Reservations},
};
use diskwright_nvme::wire::{
    Command, Digests, PduError, identify, log,
    reservation::{self, NoticeKind},
};
use diskwright_store::SlotMap;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use uuid::Uuid;

/// NVMe 1.4, as the property and the identify data tell it.
pub(super) const VERSION: u32 = 0x1_0400;

/// Data that a capsule may have.
pub(super) const CAPSULE_DATA_BYTES: usize = 8 << 10;

/// Data of one command at most. A power of 2, in pages of 4 KiB.
pub(super) const TRANSFER_EXPONENT: u8 = 8;
/// The same in bytes.
pub(super) const TRANSFER_BYTES: u64 = 4096 << TRANSFER_EXPONENT;

/// [`Asked::slot`] of a request that has none.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// Feature "asynchronous event configuration": notices of changed namespaces.
const NAMESPACE_NOTICES: u32 = identify::Controller::NAMESPACE_NOTICES;

/// Result of an event request: a notice that the namespaces have changed, and its log page.
const NAMESPACES_CHANGED: u64 = 2 | (log::CHANGED_NAMESPACES as u64) << 16;

/// Result of an event request: a notice about reservations, and its log page.
const RESERVATIONS_CHANGED: u64 = 6 | (log::RESERVATIONS as u64) << 16;

/// The protocol NVMe/TCP.
#[derive(Debug)]
pub(crate) enum Nvme {}

impl ProtocolTypes for Nvme {
    type Shared = Shared;
    type Session = Session;
    type Asked = Asked;
}

/// What a reply needs to know of its command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(super) cid: u16,
    pub(super) opcode: u8,
    /// Of a write: where its payload waits for data. Of a compare: where its payload is kept.
    pub(super) slot: u32,
    /// Where it is counted, or [`NO_SLOT`].
    pub(super) counted: u32,
    /// Dword 10 of a reservation command.
    pub(super) dword_10: u32,
}

/// How far a connection is.
#[derive(Debug)]
pub(super) enum Phase {
    /// ICReq is expected.
    Initialize,
    /// Connect is expected.
    Connect,
    Queue(Queue),
}

/// A connected queue.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) controller: Arc<Controller>,
    /// 0 is the admin queue.
    pub(super) id: u16,
    pub(super) entries: u16,
    /// The head of the submission queue; `None` without flow control.
    pub(super) head: Option<u16>,
    /// The time of the controller (see [`Controller::has_left`]).
    pub(super) time: u32,
    /// The authentication, if there must be one.
    pub(super) auth: Option<Auth>,
    /// Whether the host has proved who it is, or need not.
    pub(super) is_known: bool,
    /// What only an admin queue has.
    pub(super) admin: Option<Box<Admin>>,
}

#[derive(Debug)]
pub(crate) struct Session {
    pub(super) phase: Phase,
    pub(super) digests: Digests,
    /// Alignment of data in the PDUs that the host receives.
    pub(super) alignment_bytes: usize,
    /// Commands taken and not completed, without event requests.
    pub(super) commands: u32,
    /// Payloads for which an R2T was sent; the index is the R2T's tag. `None` while the payload is
    /// being received.
    pub(super) parked: SlotMap<Option<Incoming<Asked>>>,
    /// Payloads of compares whose reads are in flight.
    pub(super) comparing: SlotMap<Contents>,
    /// Commands for which the client's share had no room.
    pub(super) waiting: VecDeque<Command>,
    /// What the host may do with each namespace. Of no namespace before it is connected.
    pub(super) seats: Seats,
    /// The commands in flight that read or write.
    pub(super) counted: SlotMap<Counted>,
    /// Preemptions that wait for requests of those who were shut out.
    pub(super) draining: Vec<(ClientRequest<Asked>, Arc<Reservations>)>,
    /// A payload whose data digest is the next thing in the window.
    pub(super) checking: Option<Incoming<Asked>>,
}

impl Session {
    pub(super) fn queue(&self) -> Option<&Queue> {
        match &self.phase {
            Phase::Queue(queue) => Some(queue),
            Phase::Initialize | Phase::Connect => None,
        }
    }

    pub(super) fn queue_mut(&mut self) -> Option<&mut Queue> {
        match &mut self.phase {
            Phase::Queue(queue) => Some(queue),
            Phase::Initialize | Phase::Connect => None,
        }
    }
}

/// What an admin queue keeps.
#[derive(Debug)]
pub(super) struct Admin {
    /// Event requests that are outstanding.
    pub(super) events: Vec<u16>,
    /// Feature "asynchronous event configuration".
    pub(super) notices: u32,
    /// What the host knows of the namespaces: id, blocks, and what identifies the disk.
    pub(super) known: Option<Vec<(u32, u64, Uuid)>>,
    /// Namespaces that changed since the host read the log page.
    pub(super) changed: Vec<u32>,
    /// Whether the host was told of them.
    pub(super) told: bool,
    /// What others have done to the host's reservations, with the ids of the namespaces.
    pub(super) reservation_notices: VecDeque<(NoticeKind, u32)>,
    /// Number of these so far.
    pub(super) reservation_notices_total: u64,
    /// Whether the host was told of them.
    pub(super) reservations_told: bool,
    /// Feature "reservation notification mask", by the id of the namespace: notices not to give.
    pub(super) masked: BTreeMap<u32, u32>,
    /// When the last command came, by the worker's clock.
    traffic_ns: u64,
}

impl Admin {
    pub(super) fn new(now_ns: u64) -> Self {
        Self {
            events: Vec::new(),
            notices: 0,
            known: None,
            changed: Vec::new(),
            told: false,
            reservation_notices: VecDeque::new(),
            reservation_notices_total: 0,
            reservations_told: false,
            masked: BTreeMap::new(),
            traffic_ns: now_ns,
        }
    }

    /// The result of the next event request, if there is one and something is to be told.
    pub(super) fn next_event(&mut self) -> Option<(u64, u16)> {
        let namespaces = !self.changed.is_empty() && !self.told && self.notices & NAMESPACE_NOTICES != 0;
        let reservations = !self.reservation_notices.is_empty() && !self.reservations_told;
        let (told, result) = match (namespaces, reservations) {
            (true, _) => (&mut self.told, NAMESPACES_CHANGED),
            (false, true) => (&mut self.reservations_told, RESERVATIONS_CHANGED),
            (false, false) => return None,
        };
        let cid = self.events.pop()?;
        *told = true;
        Some((result, cid))
    }

    /// The log page of the oldest notice about reservations, which is removed unless the host
    /// retains it.
    pub(super) fn take_reservation_notice(&mut self, retains: bool) -> Vec<u8> {
        let waiting = self.reservation_notices.len();
        let number = self.reservation_notices_total.wrapping_sub(waiting as u64).wrapping_add(1);
        let notice = self.reservation_notices.front().copied();
        if !retains {
            self.reservation_notices.pop_front();
            self.reservations_told = false;
        }
        reservation::notification(number, notice, waiting.saturating_sub(1) as u8)
    }

    /// Ends the session of a host that sends nothing.
    pub(super) fn check_keep_alive(&mut self, controller: &Controller, now_ns: u64) -> Result<(), SessionEnd> {
        let limit_ms = controller.keep_alive_ms.load(Relaxed);
        if controller.take_traffic() || limit_ms == 0 {
            self.traffic_ns = now_ns;
        }
        if now_ns.saturating_sub(self.traffic_ns) > Duration::from_millis(limit_ms.into()).as_nanos() as u64 {
            let text = format!("the host sent nothing within its keep-alive time of {limit_ms} ms");
            return Err(SessionEnd::Broken(text));
        }
        Ok(())
    }
}

/// Why a PDU ends the session.
pub(super) enum PduEnd {
    /// The PDU is wrong; the host is told.
    Wrong(PduError),
    Session(SessionEnd),
}

impl From<PduError> for PduEnd {
    fn from(error: PduError) -> Self {
        Self::Wrong(error)
    }
}

impl From<SessionEnd> for PduEnd {
    fn from(end: SessionEnd) -> Self {
        Self::Session(end)
    }
}
