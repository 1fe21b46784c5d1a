//! A lane of a [`World`]: a store that answers late, out of order, or never.
//!
//! ```text
//!   Engine ─▶ start ─▶ waiting ─┬─▶ carried out when it comes, or when it is answered (by a seed)
//!                               ├─▶ drive: some are answered, in any order; the others next time
//!                               └─▶ silent: never answered, until a test lets them go on (World::end_silence)
//! ```
//!
//! What is carried out passes through the store's own methods, so that history, faults and broken
//! rules are those of every other store. A sync that is carried out when it comes covers nothing
//! that came later, though it is answered later. One mutex guards what waits; nothing is carried
//! out under it, since a sync may call back ([`super::SyncHook`]).
//!
//! Tried and rejected: a thread that answers after a pause. Its order would be the machine's, which
//! no seed repeats.

use super::{World, WorldStore};
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

/// How long an engine that closes waits for what is never answered.
pub(super) const PATIENCE: Duration = Duration::from_millis(30);

/// What lanes ask offsets and lengths to be multiples of. Bytes that are not go to a thread of the
/// pool.
const ALIGNMENT_BYTES: u32 = 512;

/// A loan that waits for its answer, and how its operation ended if it was carried out already.
struct Waiting {
    op: LaneOp,
    loan: Loan,
    ended: Option<io::Result<()>>,
}

/// What waits, and a choice of what is next.
struct Queue {
    waiting: Vec<Waiting>,
    /// Writes that were answered too early, when that rule is broken.
    owed: Vec<(u64, Vec<u8>)>,
    dice: Dice,
}

/// See the module.
pub(super) struct LateLane {
    below: WorldStore,
    queue: Mutex<Queue>,
    /// One end is polled. A byte is in it while something waits.
    polled: UnixStream,
    bell: UnixStream,
}

/// A loan that is not answered, and who would carry it out.
pub(super) struct Silent {
    below: WorldStore,
    op: LaneOp,
    loan: Loan,
}

impl fmt::Debug for LateLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LateLane({:?})", self.below)
    }
}

impl LateLane {
    /// A lane of the file that `below` is, which must hold no lock.
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
        // Full is loud enough.
        let _ = (&self.bell).write(&[1]);
    }
}

/// Carries an operation out by the store's own methods.
fn carry_out(below: &WorldStore, op: LaneOp, loan: &mut Loan) -> io::Result<()> {
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
            let silent = Silent { below: self.below.unlocked(), op, loan };
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
            // Nobody is left to be told.
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

/// What becomes of operations that were never answered, when they are let go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Afterwards {
    /// They are carried out after all, and answered.
    CarriedOut,
    /// They are answered with an error.
    Failed,
    /// They are dropped.
    Forgotten,
}

impl World {
    /// Stores that are opened from now on have a lane that answers late, if there is a seed for it.
    pub fn answer_late(&self, seed: Option<u64>) {
        self.state().late = seed;
    }

    /// Operations that lanes were given since the last [`World::plan`].
    pub fn lane_operations(&self) -> u64 {
        self.state().lane_operations
    }

    /// Counts an operation of a lane, and says whether it is never answered.
    fn falls_silent(&self) -> bool {
        let mut state = self.state();
        state.lane_operations += 1;
        let number = state.lane_operations;
        let falls = state.fault.as_ref().is_some_and(|fault| fault.silences(number));
        state.struck += u64::from(falls);
        falls
    }

    /// Where the memory of the operations lies that were never answered: address and length.
    pub fn silent_memory(&self) -> Vec<std::ops::Range<*const u8>> {
        self.state().silent.iter().map(|silent| silent.loan.bytes().as_ptr_range()).collect()
    }

    /// Lets those go on that were never answered. Returns how many there were.
    pub fn end_silence(&self, afterwards: Afterwards) -> usize {
        let silent = std::mem::take(&mut self.state().silent);
        let count = silent.len();
        for Silent { below, op, mut loan } in silent {
            match afterwards {
                Afterwards::CarriedOut => {
                    let result = carry_out(&below, op, &mut loan);
                    loan.complete(result);
                }
                Afterwards::Failed => loan.complete(Err(io::Error::from_raw_os_error(5))),
                Afterwards::Forgotten => drop(loan),
            }
        }
        count
    }
}
