//! A lane of a [`World`]: a store that answers late, out of order, or never.
//!
//! ```text
//!   Engine ─▶ start ─▶ waiting ─┬─▶ carried out at once or when answered (chosen by the seed)
//!                               ├─▶ drive: some are answered, in any order; the others next time
//!                               └─▶ silent: never answered, until World::end_silence
//! ```
//!
//! Operations are carried out by the store's own methods, so history, faults and broken rules work
//! as for every other store. A sync that is carried out at once does not cover later writes, even
//! if it is answered after them. One mutex guards the waiting operations. No operation is carried
//! out under it, because a sync may call back ([`super::SyncHook`]).
//!
//! Tried and rejected: a thread that answers after a pause. A seed would not reproduce its order.

use super::{
    state::{Silent, World},
    store::WorldStore,
};
use crate::{dice::Dice, mutation::Mutation};
use diskwright_store::{FileRange, LaneOp, Loan, Store, lane::Lane};
use std::{
    fmt, io,
    io::{Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// How long an engine that closes waits for an operation that is never answered.
pub(super) const PATIENCE: Duration = Duration::from_millis(30);

/// Alignment of offsets and lengths that lanes require. Unaligned operations go to a thread of the
/// pool.
const ALIGNMENT_BYTES: u32 = 512;

/// An operation that waits for its answer, and its result if it was carried out already.
struct Waiting {
    op: LaneOp,
    loan: Loan,
    ended: Option<io::Result<()>>,
}

/// The waiting operations, and the random generator that chooses the next one.
struct Queue {
    waiting: Vec<Waiting>,
    /// Writes that were answered too early, if that rule is broken: offset and bytes.
    owed: Vec<(u64, Vec<u8>)>,
    dice: Dice,
}

pub(super) struct LateLane {
    below: WorldStore,
    queue: Mutex<Queue>,
    /// The end that the engine polls. It has a byte to read while operations wait.
    polled: UnixStream,
    bell: UnixStream,
}

impl fmt::Debug for LateLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LateLane({:?})", self.below)
    }
}

impl LateLane {
    /// A lane for the file of `below`, which must hold no lock.
    pub(super) fn new(below: WorldStore, seed: u64) -> io::Result<Self> {
        let (polled, bell) = UnixStream::pair()?;
        polled.set_nonblocking(true)?;
        bell.set_nonblocking(true)?;
        let stream = 0x1a7e ^ below.file as u64;
        let queue = Queue { waiting: Vec::new(), owed: Vec::new(), dice: Dice::new(seed, stream) };
        Ok(Self { below, queue: Mutex::new(queue), polled, bell })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        // If the socket is full, it is readable, which is enough.
        let _ = (&self.bell).write(&[1]);
    }
}

/// Carries out an operation by the store's own methods.
fn carry_out(below: &dyn Store, op: LaneOp, loan: &mut Loan) -> io::Result<()> {
    match op {
        LaneOp::Read { offset_bytes } => below.read_at(loan.bytes_mut(), offset_bytes),
        LaneOp::Write { offset_bytes, durable } => {
            below.write_at(loan.bytes(), offset_bytes)?;
            if durable { below.sync_data() } else { Ok(()) }
        }
        LaneOp::Zero { offset_bytes, len_bytes, how } => below.zero_range(FileRange { offset_bytes, len_bytes }, how),
        LaneOp::Sync => below.sync_data(),
    }
}

impl Lane for LateLane {
    fn start(&self, op: LaneOp, mut loan: Loan) {
        if self.below.world.falls_silent() {
            let silent = Silent { below: Box::new(self.below.unlocked()), op, loan };
            return self.below.world.state().silent.push(silent);
        }
        if let LaneOp::Write { offset_bytes, .. } = op
            && self.below.world.breaks(Mutation::AnsweredTooEarly)
        {
            self.queue().owed.push((offset_bytes, loan.bytes().to_vec()));
            return loan.complete(Ok(()));
        }
        let at_once = self.queue().dice.percent(50);
        let ended = at_once.then(|| carry_out(&self.below, op, &mut loan));
        self.queue().waiting.push(Waiting { op, loan, ended });
        self.ring();
    }

    fn drive(&self) {
        while (&self.polled).read(&mut [0; 64]).is_ok_and(|count| count > 0) {}
        let mut due = Vec::new();
        let left = {
            let mut queue = self.queue();
            let Queue { waiting, dice, .. } = &mut *queue;
            for _ in 0..dice.below(3).min(waiting.len() as u64) {
                let which = dice.below(waiting.len() as u64) as usize;
                due.push(waiting.swap_remove(which));
            }
            waiting.len()
        };
        for Waiting { op, mut loan, ended } in due {
            let result = ended.unwrap_or_else(|| carry_out(&self.below, op, &mut loan));
            loan.complete(result);
        }
        let owed = std::mem::take(&mut self.queue().owed);
        for (offset_bytes, bytes) in owed {
            // The operation was answered already, so the error cannot be reported.
            let _ = self.below.write_at(&bytes, offset_bytes);
        }
        if left > 0 {
            self.ring();
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.polled.as_fd()
    }

    fn alignment_bytes(&self) -> u32 {
        ALIGNMENT_BYTES
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }
}

/// What happens to operations without an answer when the silence ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Afterwards {
    /// They are carried out and answered.
    CarriedOut,
    /// They are answered with an error.
    Failed,
    /// They are dropped.
    Forgotten,
}

impl World {
    /// The memory of the operations without an answer.
    pub fn silent_memory(&self) -> Vec<std::ops::Range<*const u8>> {
        self.state().silent.iter().map(|silent| silent.loan.bytes().as_ptr_range()).collect()
    }

    /// Ends the silence. Returns the number of operations that had no answer.
    pub fn end_silence(&self, afterwards: Afterwards) -> usize {
        let silent = std::mem::take(&mut self.state().silent);
        let count = silent.len();
        for Silent { below, op, mut loan } in silent {
            match afterwards {
                Afterwards::CarriedOut => {
                    let result = carry_out(&*below, op, &mut loan);
                    loan.complete(result);
                }
                Afterwards::Failed => loan.complete(Err(io::Error::from_raw_os_error(5))),
                Afterwards::Forgotten => drop(loan),
            }
        }
        count
    }
}
