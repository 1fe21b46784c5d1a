//! A member that fails while the pool is open.
//!
//! ```text
//!   error ─▶ failing: no transfer goes there any more, writes to its slabs take the slow path
//!         ─▶ superblock of the survivors: the member is lost (durable)
//!         ─▶ lost: writes go on without it, and are answered
//!         ─▶ journal: its copies of all dirty slabs are stale
//! ```
//!
//! What the superblock records is enough after a power cut: at the next open every copy of a dirty
//! slab on a lost member is stale, and a slab that was written since is dirty. So no write waits
//! for the journal here.
//!
//! If it had the only valid copy of a dirty slab, no flush succeeds any more: what the member had
//! not synced may be gone, and the slab may show older contents when it is back.
//!
//! The last member, and the last one with a journal, cannot be lost: their errors are errors of the
//! request.

use super::{Pool, lock};
use diskwright_format::space::{Copy, change::Change, superblock::MemberState};
use std::{io, sync::Arc, sync::atomic::Ordering};
use uuid::Uuid;

/// A new random number for the lineage.
pub(super) fn lineage_number() -> u64 {
    Uuid::new_v4().as_u64_pair().0
}

impl Pool {
    /// Goes on without a member, after `error`. Returns when the survivors have recorded that.
    ///
    /// # Errors
    /// `error`, if the pool cannot go on without the member.
    pub(crate) fn lose(&self, number: u8, error: &io::Error) -> io::Result<()> {
        let bit = 1_u64 << number;
        let mut state = lock(&self.state);
        if self.lost.load(Ordering::Acquire) & bit != 0 {
            return Ok(());
        }
        let others: Vec<u8> = self.live_members().map(|member| member.number).filter(|&one| one != number).collect();
        let has_journal = self.areas().iter().any(|(holder, _)| others.contains(holder));
        if !has_journal {
            return Err(io::Error::new(error.kind(), error.to_string()));
        }
        self.failing.fetch_or(bit, Ordering::AcqRel);
        let mut losing = vec![(number, error.to_string())];
        if self.is_writable {
            loop {
                let mut superblock = state.superblock.clone();
                for (number, _) in &losing {
                    if let Some(Some(member)) = superblock.members.get_mut(usize::from(*number)) {
                        member.state = MemberState::Lost;
                    }
                }
                superblock.advance(lineage_number());
                let mut written = 0;
                let mut failed = Vec::new();
                for member in self.live_members() {
                    match member.write_superblock(&superblock) {
                        Ok(()) => written += 1,
                        Err(error) => failed.push((member.number, error.to_string())),
                    }
                }
                for (number, _) in &failed {
                    self.failing.fetch_or(1 << number, Ordering::AcqRel);
                }
                state.superblock = superblock;
                if written == 0 {
                    let what = format!("pool {}: no member is left that can be written", self.name);
                    self.fail_journal(what.clone());
                    return Err(io::Error::other(what));
                }
                if failed.is_empty() {
                    break;
                }
                losing.extend(failed);
            }
        }
        let is_live = |copy: Copy| self.live_member(copy.member).is_some();
        let has_none = |&(file, index): &(u32, u32)| {
            let slab = self.file(file).and_then(|file| Some(file.table.get(index)?.load()));
            slab.is_some_and(|slab| !slab.good_copies().any(is_live))
        };
        if state.dirty.iter().any(has_none) {
            self.has_orphans.store(true, Ordering::Release);
        }
        for (number, why) in losing {
            self.lost.fetch_or(1 << number, Ordering::AcqRel);
            if self.is_writable {
                self.append(&mut state, &Change::Lost { member: number });
            }
            let path = self.member(number).map(|member| member.path.display().to_string()).unwrap_or_default();
            self.warn(format!(
                "pool {}: {path} failed ({why}); the pool goes on without it. Replace it: its copies are missing",
                self.name
            ));
        }
        Ok(())
    }

    /// Refuses flushes when a member is lost that had the only valid copy of slabs which were
    /// written lately: what it had not synced may be lost with it.
    pub(crate) fn require_copies_of_dirty(&self) -> io::Result<()> {
        if !self.has_orphans() {
            return Ok(());
        }
        let what = format!(
            "pool {}: a member failed that has the only copy of what was written lately, and the last writes may be lost",
            self.name
        );
        Err(io::Error::other(what))
    }

    /// Whether [`Pool::require_copies_of_dirty`] fails.
    #[inline]
    pub(crate) fn has_orphans(&self) -> bool {
        self.has_orphans.load(Ordering::Acquire)
    }

    /// Returns when the loss of every member that failed is recorded.
    pub(crate) fn wait_for_records(&self) -> io::Result<()> {
        loop {
            let unrecorded = self.unrecorded();
            if unrecorded == 0 {
                return Ok(());
            }
            let number = unrecorded.trailing_zeros() as u8;
            self.lose(number, &io::Error::other("it failed a moment ago"))?;
        }
    }

    /// Takes members that are missing at an open for lost, and lost ones that are there back.
    /// Returns the changes for the journal.
    pub(super) fn settle_members(&self, missing: u64, back: u64) -> Vec<Change<'static>> {
        let mut state = lock(&self.state);
        // One that is back may have failed again, when the journal was written.
        let (back, missing) = {
            let failed = self.failing.fetch_or(missing, Ordering::AcqRel);
            (back & !failed, missing | failed)
        };
        self.lost.fetch_or(missing, Ordering::AcqRel);
        let mut changes = Vec::new();
        for member in 0..64 {
            let bit = 1 << member;
            // A member that is back was lost, also if a power cut came before the journal said so.
            let was_lost = state.lost_in_map & bit != 0;
            if (missing | back) & bit != 0 && !was_lost {
                changes.push(Change::Lost { member });
            }
            if back & bit != 0 || was_lost && missing & bit == 0 {
                changes.push(Change::Back { member });
            }
        }
        let mut changed = false;
        for (number, member) in state.superblock.members.iter_mut().enumerate() {
            let Some(member) = member else { continue };
            let wanted = match member.state {
                MemberState::Active | MemberState::Leaving if missing >> number & 1 == 1 => MemberState::Lost,
                MemberState::Lost if back >> number & 1 == 1 => MemberState::Active,
                as_it_is => as_it_is,
            };
            changed |= wanted != member.state;
            member.state = wanted;
        }
        if changed {
            state.superblock.advance(lineage_number());
        }
        changes
    }

    /// Writes the superblock to all live members. A member that fails is lost.
    pub(super) fn write_superblocks(&self) -> io::Result<()> {
        let superblock = lock(&self.state).superblock.clone();
        let members: Vec<_> = self.live_members().map(Arc::clone).collect();
        for member in members {
            if let Err(error) = member.write_superblock(&superblock) {
                self.lose(member.number, &error)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{Bench, MIB};

    /// The journal is written before the members are settled, and may fail on one that is back.
    #[test]
    fn a_member_that_is_back_and_fails_again_stays_lost() {
        let (_bench, pool) = Bench::pool(&[8 * MIB; 3], 2, MIB);
        pool.lose(1, &io::Error::other("a test")).unwrap();
        pool.commit_all().unwrap();
        assert_eq!(pool.settle_members(0, 1 << 1), []);
        let state = lock(&pool.state);
        assert_eq!(state.superblock.member(1).map(|row| row.state), Some(MemberState::Lost));
        assert_eq!(state.lost_in_map, 1 << 1);
    }
}
