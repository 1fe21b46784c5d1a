//! What a session keeps: its phase, its numbers, its tasks. No code that handles PDUs.

use super::{
    chap::Chap,
    shared::{Nexus, Shared},
    units::Units,
};
use crate::{
    net::{
        connection::Incoming,
        flights::{ClientRequest, Contents},
        protocol::ProtocolTypes,
    },
    reservations::{Claim, Counted, Reservations, Watch},
};
use diskwright_iscsi::{
    scsi::{
        Command, Sense,
        copy::CopyState,
        token::{Token, TokenState},
    },
    wire::{Counters, HEADER_BYTES, Header, Stage},
};
use diskwright_store::{IoBuf, SlotMap};
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// Commands that a session may have open, besides immediate ones.
pub(super) const WINDOW: u32 = 128;

/// Data of one PDU that the target takes.
pub(super) const SEGMENT_BYTES: usize = 256 << 10;

/// Data that come with a command.
pub(super) const FIRST_BURST_BYTES: u32 = 64 << 10;

/// Data of one sequence, and so of one R2T, at most.
pub(super) const BURST_BYTES: u32 = 1 << 20;

/// Data of one command at most.
pub(super) const TRANSFER_BYTES: u64 = 32 << 20;

/// Data of a PDU that is neither a command nor data of a write.
pub(super) const TEXT_BYTES_MAX: usize = 8 << 10;

/// Length of a parameter list at most.
pub(super) const PARAMETERS_BYTES_MAX: u32 = 8 << 10;

/// Bytes of a copy that are read and then written at once.
pub(super) const COPY_BYTES: u64 = 4 << 20;

/// The protocol iSCSI.
#[derive(Debug)]
pub(crate) enum Iscsi {}

impl ProtocolTypes for Iscsi {
    type Shared = Shared;
    type Session = Session;
    type Asked = Asked;
}

/// What a reply needs to know of its command: the index of its task.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(super) slot: u32,
}

/// How far a connection is.
#[derive(Debug)]
pub(super) enum Phase {
    Login(Box<Login>),
    Full { nexus: Arc<Nexus>, is_discovery: bool },
}

/// A login that is under way.
#[derive(Debug)]
pub(super) struct Login {
    /// The stage that the next request belongs to; `None` before the first.
    pub(super) stage: Option<Stage>,
    /// Text of a request that goes on.
    pub(super) text: Vec<u8>,
    pub(super) initiator: Option<String>,
    /// `None` before the first request.
    pub(super) is_discovery: Option<bool>,
    pub(super) chap: Chap,
    /// Whether the target has told its own values.
    pub(super) has_declared: bool,
}

impl Login {
    pub(super) fn new() -> Self {
        Self {
            stage: None,
            text: Vec::new(),
            initiator: None,
            is_discovery: None,
            chap: Chap::default(),
            has_declared: false,
        }
    }
}

/// What both sides have agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Agreed {
    pub(super) header_digest: bool,
    pub(super) data_digest: bool,
    /// Data of one PDU that the initiator takes.
    pub(super) segment_bytes: usize,
    /// Data of one sequence.
    pub(super) burst_bytes: u32,
    /// Whether data may come with a command, and how many.
    pub(super) immediate: bool,
    pub(super) first_burst_bytes: u32,
}

impl Default for Agreed {
    fn default() -> Self {
        Self {
            header_digest: false,
            data_digest: false,
            segment_bytes: 8 << 10,
            burst_bytes: 256 << 10,
            immediate: true,
            first_burst_bytes: FIRST_BURST_BYTES,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Session {
    pub(super) phase: Phase,
    pub(super) agreed: Agreed,
    pub(super) counters: Counters,
    pub(super) tasks: SlotMap<Task>,
    /// Tasks for which the client's share had no room.
    pub(super) waiting: VecDeque<u32>,
    /// A payload that is complete but for what follows its data.
    pub(super) trailing: Option<Trailing>,
    /// Task management that waits for the end of tasks.
    pub(super) managing: Vec<Managing>,
    pub(super) units: Units,
    /// Preemptions that are answered when requests of those shut out have ended.
    pub(super) draining: Vec<(ClientRequest<Asked>, Arc<Reservations>)>,
    /// How the last copies stand.
    pub(super) copies: VecDeque<CopyResult>,
    /// How the last commands about tokens have ended.
    pub(super) token_results: VecDeque<TokenResult>,
}

impl Session {
    pub(super) fn nexus(&self) -> Option<&Arc<Nexus>> {
        match &self.phase {
            Phase::Full { nexus, .. } => Some(nexus),
            Phase::Login(_) => None,
        }
    }

    /// The numbers for a response that has the next status number.
    pub(super) fn next_counters(&mut self) -> Counters {
        let counters = self.counters();
        self.counters.stat_sn = self.counters.stat_sn.wrapping_add(1);
        counters
    }

    /// The numbers for a PDU without a status. The window opens by the tasks that have ended.
    pub(super) fn counters(&mut self) -> Counters {
        let open = self.tasks.len().min(WINDOW as usize) as u32;
        let max = self.counters.expected_cmd_sn.wrapping_add(WINDOW - open).wrapping_sub(1);
        // It never goes back.
        if (max.wrapping_sub(self.counters.max_cmd_sn) as i32) > 0 {
            self.counters.max_cmd_sn = max;
        }
        self.counters
    }
}

/// A PDU whose header is in the window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pdu {
    pub(super) header: Header,
    pub(super) bytes: [u8; HEADER_BYTES],
    /// Length of the headers with their digest.
    pub(super) head_bytes: usize,
    /// Length of the data with padding and digest.
    pub(super) tail_bytes: usize,
}

/// Which part of a command the disk works on.
#[derive(Debug)]
pub(super) enum Step {
    /// Nothing yet, or the whole of it.
    Only,
    /// The read of a command that compares or changes what it finds. The claim is for those that
    /// write afterwards.
    Found(Option<Arc<Claim>>),
    /// The write after it.
    Changed(Arc<Claim>),
    /// The read before a write whose data end within a block, and their length.
    Partial(usize),
    /// A pattern that is written again and again: the pattern, and what is left.
    Pattern(Arc<IoBuf>, Range<u64>),
    /// A copy, of which a piece is being read or written.
    Copy(Box<Copying>),
}

/// A copy that is under way.
#[derive(Debug)]
pub(super) struct Copying {
    /// The initiator's number of it; `None` if it will not ask how the copy stands.
    pub(super) id: Option<u8>,
    pub(super) runs: Vec<CopyRun>,
    /// The run that is being copied, and how much of it is.
    pub(super) next: usize,
    pub(super) done_bytes: u64,
    /// Of all runs.
    pub(super) copied_bytes: u64,
    /// Whether the piece was read.
    pub(super) is_read: bool,
    /// The token that the data are of, or that is written.
    pub(super) token: Option<TokenRun>,
    /// The copy among the requests in flight of its disks.
    #[expect(dead_code, reason = "it is held")]
    pub(super) counted: Vec<Counted>,
}

/// A copy by a token.
#[derive(Debug)]
pub(super) struct TokenRun {
    /// The initiator's number of the command.
    pub(super) list_id: u32,
    /// Notices when the data change; `None` for zeros.
    pub(super) watch: Option<Arc<Watch>>,
    /// The initiator has to ask for more.
    pub(super) is_part: bool,
    pub(super) block_bytes: u32,
}

/// How a command about a token has ended, for RECEIVE ROD TOKEN INFORMATION.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenResult {
    pub(super) list_id: u32,
    /// The service action of the command.
    pub(super) action: u16,
    pub(super) state: TokenState,
    pub(super) blocks: u64,
    pub(super) token: Option<Token>,
}

/// [`CopyRun::source`] of zeros.
pub(super) const ZEROS: u32 = u32::MAX;

/// A range to be copied.
#[derive(Debug, Clone, Copy)]
pub(super) struct CopyRun {
    /// Exports; the source may be [`ZEROS`].
    pub(super) source: u32,
    pub(super) destination: u32,
    pub(super) from_bytes: u64,
    pub(super) to_bytes: u64,
    pub(super) len_bytes: u64,
}

impl CopyRun {
    /// The next piece after so many bytes are done: its offset in the run, and its length.
    pub(super) fn piece(&self, done_bytes: u64) -> (u64, u64) {
        let most_bytes = if self.source == ZEROS { u64::MAX } else { COPY_BYTES };
        let len_bytes = (self.len_bytes - done_bytes).min(most_bytes);
        let is_backwards = self.source == self.destination && self.to_bytes > self.from_bytes;
        let offset_bytes = if is_backwards { self.len_bytes - done_bytes - len_bytes } else { done_bytes };
        (offset_bytes, len_bytes)
    }
}

/// How a copy stands, for COPY STATUS.
#[derive(Debug, Clone, Copy)]
pub(super) struct CopyResult {
    pub(super) id: u8,
    pub(super) state: CopyState,
    /// Segments that are complete.
    pub(super) segments: u16,
    pub(super) copied_bytes: u64,
}

impl Step {
    /// The claim under which the write is made that follows.
    pub(super) fn claim(&self) -> Option<&Arc<Claim>> {
        match self {
            Self::Changed(claim) => Some(claim),
            _ => None,
        }
    }
}

/// A SCSI command that has not been answered.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) tag: u32,
    pub(super) lun: u64,
    /// The command, or why it is refused.
    pub(super) command: Result<Command, Sense>,
    /// What the initiator expects to receive and to send.
    pub(super) expects: Expected,
    /// Bytes of data that the command has.
    pub(super) has_bytes: u64,
    /// Number of the next Data-In or R2T.
    pub(super) data_sn: u32,
    /// Length of the buffers of a read.
    pub(super) piece_bytes: usize,
    /// The R2T that is outstanding: the number of the next Data-Out, and the offset of its end.
    pub(super) solicited: Option<(u32, usize)>,
    /// A payload for which an R2T was sent, while none of it is being received.
    pub(super) parked: Option<Incoming<Asked>>,
    /// Payload that is kept to be compared.
    pub(super) kept: Contents,
    pub(super) step: Step,
    /// Counts it among the initiator's requests, once it has begun.
    pub(super) counted: Option<Counted>,
}

/// Bytes of data that an initiator expects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Expected {
    pub(super) in_bytes: u32,
    pub(super) out_bytes: u32,
}

impl Expected {
    pub(super) fn bytes(self) -> u32 {
        self.in_bytes.max(self.out_bytes)
    }
}

/// What follows the data of a PDU: data that nobody wants, padding, and a digest.
#[derive(Debug)]
pub(super) struct Trailing {
    /// The payload; `None` while its data are being received.
    pub(super) incoming: Option<Incoming<Asked>>,
    pub(super) left_bytes: usize,
}

/// A task management request that waits.
#[derive(Debug)]
pub(super) struct Managing {
    pub(super) tag: u32,
    /// The outcome, when the tasks have ended.
    pub(super) outcome: u8,
    pub(super) tasks: Vec<u32>,
}
