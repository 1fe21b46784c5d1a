//! A lane: how a store completes requests asynchronously, without a thread that waits.
//!
//! ```text
//!   Engine::read ─▶ Lane::start(op, loan)      queued, nothing is sent yet
//!   Engine::reap ─▶ Lane::drive()              sends, receives; completes loans
//!        │                    ▲
//!        └─ the ring polls Lane::descriptor() ─ readable: drive again
//! ```
//!
//! A store whose bytes are reached through a socket has a lane. With each operation the engine
//! lends the lane a part of the request's memory ([`Loan`]). The engine's ring polls the lane's
//! descriptor.
//!
//! Several engines, each on its own thread, may share a lane. Any of them may drive it: completing
//! a loan wakes the engine that lent it. An implementation keeps its state under a mutex of its own
//! and never waits while it holds that mutex.
//!
//! **Timeouts.** Only the lane knows its peer, so a lane must end every loan within a time that it
//! chooses itself (the NBD client: the `timeout` of the URI). An engine that closes does not rely
//! on that: [`Engine::finish`](crate::Engine::finish) and the engine's drop wait for lanes for a
//! limited time ([`Lane::patience`]). A loan that is still out then is given up. Its request ends
//! with an error and a fresh buffer. The lent memory is leaked, so a late answer writes to memory
//! that no other code uses.

pub use crate::buffer::Loan;

use crate::range::Zeroing;
use std::{fmt, os::fd::BorrowedFd, time::Duration};

/// How long an engine that is closed waits for lanes by default.
pub(crate) const LANE_PATIENCE: Duration = Duration::from_secs(30);

/// An operation of a lane. The loan holds the payload, and so the length of reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneOp {
    /// Fill the loan from the store.
    Read {
        /// First byte.
        offset_bytes: u64,
    },
    /// Write the loan's bytes to the store.
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
        /// Whether the space may be freed.
        how: Zeroing,
    },
    /// Make every completed write durable. The loan is empty.
    Sync,
}

/// Asynchronous access to a store; see the module documentation.
pub trait Lane: Send + Sync + fmt::Debug {
    /// Queues an operation. Never blocks and sends nothing: the engine calls [`Lane::drive`] next.
    /// May complete the loan immediately.
    fn start(&self, op: LaneOp, loan: Loan);

    /// Makes progress without blocking, and completes the loans that have ended.
    fn drive(&self);

    /// A descriptor that is readable whenever [`Lane::drive`] would make progress or would find an
    /// expired timeout. It stays the same as long as the lane lives.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Required alignment of offsets and lengths: a power of two. Other transfers use the blocking
    /// methods of the store, in a thread of the pool.
    fn alignment_bytes(&self) -> u32 {
        1
    }

    /// How long an engine that closes waits for this lane's loans. The engine's own
    /// [patience](crate::Engine::set_patience) is the upper limit.
    fn patience(&self) -> Duration {
        LANE_PATIENCE
    }
}
