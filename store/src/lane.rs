//! A lane: how a store completes requests later, without a thread that waits.
//!
//! ```text
//!   Engine::read ─▶ Lane::start(op, loan)      queued, nothing is sent yet
//!   Engine::reap ─▶ Lane::drive()              sends, receives; completes loans
//!        │                    ▲
//!        └─ the ring polls Lane::descriptor() ─ readable: drive again
//! ```
//!
//! A store whose bytes are reached through a socket gives a lane. The engine lends the lane a piece
//! of the request's memory with every operation ([`Loan`]) and polls the lane's descriptor on its
//! ring.
//!
//! Several engines may use one lane, each on its own thread. Any of them may drive it: a loan that
//! is completed wakes the engine that lent it. An implementation keeps its state under a mutex of
//! its own, and never holds that mutex while it waits.
//!
//! **A lane that does not answer.** A lane must end every loan within a time that it chooses itself
//! (the NBD client: the `timeout` of the URI), because only the lane knows its peer. The engine
//! does not rely on that when it closes: [`Engine::finish`](crate::Engine::finish), and the
//! engine's drop, wait for lanes for a limited time only ([`Lane::patience`]). A loan that is still
//! out then is given up: its request ends with an error and a fresh buffer, and the memory that was
//! lent is leaked, so a late answer writes to memory that nobody uses.

pub use crate::part::Loan;

use crate::{engine::LANE_PATIENCE, store::Zeroing};
use std::{fmt, os::fd::BorrowedFd, time::Duration};

/// What a lane is asked to do. Payload is in the loan, and so is the length of reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneOp {
    /// Fill the loan from this offset of the store, in bytes.
    Read {
        /// First byte.
        offset_bytes: u64,
    },
    /// Store the loan at this offset.
    Write {
        /// First byte.
        offset_bytes: u64,
        /// Complete only when the bytes are durable.
        durable: bool,
    },
    /// Make a range read as zeros. The loan is empty.
    Zero {
        /// First byte.
        offset_bytes: u64,
        /// Length of the range.
        len_bytes: u64,
        /// Whether space may be given back.
        how: Zeroing,
    },
    /// Make everything durable that was completed before. The loan is empty.
    Sync,
}

/// See the module.
pub trait Lane: Send + Sync + fmt::Debug {
    /// Takes an operation in. Never blocks and sends nothing: [`Lane::drive`] follows. May complete
    /// the loan at once.
    fn start(&self, op: LaneOp, loan: Loan);

    /// Makes what progress is possible without blocking, and completes the loans that have ended.
    fn drive(&self);

    /// Is readable whenever [`Lane::drive`] would make progress or would find that a time is over.
    /// The same descriptor as long as the lane lives.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// What offsets and lengths must be multiples of: a power of two. Other transfers take the
    /// blocking methods of the store, in a thread of the pool.
    fn alignment_bytes(&self) -> u32 {
        1
    }

    /// How long an engine that closes waits for the loans that this lane has. The engine's own
    /// [patience](crate::Engine::set_patience) is the upper limit.
    fn patience(&self) -> Duration {
        LANE_PATIENCE
    }
}
