//! What a session keeps: its phase, its queue, its payloads. No code that handles PDUs.

use super::{
    auth::Auth,
    controller::{Controller, Shared},
};
use crate::net::{
    connection::Incoming,
    flights::Contents,
    protocol::{ProtocolTypes, SessionEnd},
};
use diskwright_nvme::wire::{Command, Digests, PduError};
use diskwright_store::SlotMap;
use std::{
    collections::VecDeque,
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
    /// When the last command came, by the worker's clock.
    traffic_ns: u64,
}

impl Admin {
    pub(super) fn new(now_ns: u64) -> Self {
        Self { events: Vec::new(), notices: 0, known: None, changed: Vec::new(), told: false, traffic_ns: now_ns }
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
