//! Space of members' files that free slabs still take is given back to the file system.
//!
//! ```text
//!   a slab is free, durably ─▶ known ─▶ a round: taken again ─▶ a hole ─▶ free, without space
//! ```
//!
//! While the hole is made nobody else can take the slab. What was freed by a process that has ended
//! is not known; such slabs give their space back when they are used and freed again. Devices are
//! left alone: not all can discard, and others would be written.

use super::{Pool, lock};
use crate::member::Member;
use diskwright_format::space::Copy;
use diskwright_store::{FileRange, Zeroing};
use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

/// How long a round takes at most, over all members.
const ROUND: Duration = Duration::from_millis(100);

impl Pool {
    /// Whether free slabs are taken, to be given back soon.
    pub(crate) fn is_punching(&self) -> bool {
        self.punching.load(Ordering::Acquire) > 0
    }

    /// Gives space back for a while. Returns whether there is more to do.
    pub(super) fn punch_free(&self) -> bool {
        let started = Instant::now();
        for member in self.holders().filter(|member| member.is_file()) {
            loop {
                if started.elapsed() > ROUND {
                    return true;
                }
                let taken = {
                    let mut state = lock(&self.state);
                    let taken = state.free[usize::from(member.number)].take_stored();
                    // While the lock is held: who finds no free slab then sees it.
                    self.punching.fetch_add(u32::from(taken.is_some()), Ordering::AcqRel);
                    taken
                };
                let Some(slab) = taken else { break };
                let ok = self.punch(member, slab);
                let mut state = lock(&self.state);
                state.free[usize::from(member.number)].give_back_empty(slab);
                self.punching.fetch_sub(1, Ordering::AcqRel);
                drop(state);
                if !ok {
                    break;
                }
            }
        }
        false
    }

    fn punch(&self, member: &Member, slab: u32) -> bool {
        let offset_bytes = Copy { member: member.number, slab }.offset_bytes(self.slab_shift);
        let range = FileRange { offset_bytes, len_bytes: self.slab_bytes() };
        let made = member.store.zero_range(range, Zeroing::Deallocate);
        member.written();
        // It is free all the same.
        made.inspect_err(|error| tracing::debug!("pool {}: a hole in a member: {error}", self.name)).is_ok()
    }
}
