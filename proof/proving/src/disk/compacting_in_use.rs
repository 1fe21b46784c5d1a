//! Disks that are compacted while they are in use ([`Disk::compact`]): the contents do not change.
//!
//! ```text
//!   truth recorded ─▶ Disk::compact ─▶ all earlier writes are durable
//!                        └ in one of its syncs the program is killed
//! ```
//!
//! Whenever the power fails, the disk reads as without the compaction. What is checked after each
//! cut and each close is the same as for other disks.

use super::{Changes, DiskCase, DiskTruth, session::Session};
use crate::{
    dice::Dice,
    mutation::Phase,
    stage::{Outcome, Stage},
};
use diskwright_disk::Disk;
use std::sync::{Arc, Mutex, PoisonError};

/// Syncs of a compaction, of which one is chosen.
const SYNCS: u64 = 12;

impl DiskCase {
    /// Compacts the disk once.
    pub(super) fn compact_once(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &mut DiskTruth,
    ) -> Outcome {
        stage.record(truth.clone());
        let mark = truth.ledger.mark();
        stage.world.phase(Some(Phase::Compact));
        let compacted = Self::compact_in_use(&session.disk);
        stage.world.phase(None);
        compacted?;
        // As after a flush.
        truth.ledger.flushed(mark);
        stage.record(truth.clone());
        Ok(())
    }

    /// Compacts the disk. Sometimes the program is killed during it.
    pub(super) fn play_compaction<'a>(
        &'a self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'a>,
        truth: &mut DiskTruth,
        dice: &mut Dice,
    ) -> Outcome {
        if self.changes != Changes::CompactedInUse {
            return Ok(());
        }
        if dice.percent(70) {
            return self.compact_once(stage, session, truth);
        }
        let world = &stage.world;
        let killed = Arc::new(Mutex::new(false));
        let (world_again, told) = (world.clone(), Arc::clone(&killed));
        let (at_sync, mut syncs) = (dice.below(SYNCS), 0);
        world.set_hook(Some(Box::new(move || {
            if syncs == at_sync {
                world_again.kill();
                *told.lock().unwrap_or_else(PoisonError::into_inner) = true;
            }
            syncs += 1;
        })));
        let compacted = self.compact_once(stage, session, truth);
        world.set_hook(None);
        if *killed.lock().unwrap_or_else(PoisonError::into_inner) {
            *session = self.after_kill(stage, truth)?;
            return Ok(());
        }
        compacted
    }

    /// Compacts a disk that others use too.
    ///
    /// # Errors
    /// What went wrong.
    pub(crate) fn compact_in_use(disk: &Disk) -> Outcome {
        let compacted = disk.compact(false, &mut |_, _| true);
        let compacted = compacted.map_err(|error| format!("a compaction failed: {error}"))?;
        compacted.warnings.into_iter().next().map_or(Ok(()), Err)
    }
}
