//! Disks whose frozen images are merged while they are in use ([`Disk::merge`]).
//!
//! ```text
//!   Disk::snapshot several times ─▶ Disk::merge of a frozen image into an ancestor
//!                                     ├ while it copies another queue writes
//!                                     ├ it is stopped
//!                                     └ in one of its syncs the program is killed
//! ```
//!
//! A merge changes nothing that the disk shows, so no truth is recorded for it. After a cut at any
//! moment of it the disk's name must show what it showed before, and must be fit to be written.

use super::{
    Changes, DiskCase, DiskTruth,
    session::{Session, write_by_another},
};
use crate::{
    dice::Dice,
    ledger::Version,
    mutation::Phase,
    stage::{Outcome, Stage},
};
use diskwright_disk::{Disk, DiskError, KeptName, MergeOptions};
use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

/// Syncs of a merge, of which one is chosen.
const SYNCS: u64 = 40;

/// Which image is merged, and how.
pub(super) struct Merging {
    child: PathBuf,
    options: MergeOptions,
}

impl Merging {
    /// A random one, if the disk has two frozen images.
    pub(super) fn any(disk: &Disk, dice: &mut Dice) -> Option<Self> {
        let layers = disk.layers();
        let frozen = (layers.len() as u64).checked_sub(2).filter(|count| *count > 0)?;
        let from = 1 + dice.below(frozen);
        let into = from + 1 + dice.below(layers.len() as u64 - from - 1);
        let keep = if dice.percent(50) { KeptName::Childs } else { KeptName::Parents };
        let options = MergeOptions {
            into: Some(layers[into as usize].path.clone()),
            keep,
            no_reflink: dice.percent(50),
            ..MergeOptions::default()
        };
        Some(Self { child: layers[from as usize].path.clone(), options })
    }

    /// The upper frozen image into its parent.
    pub(super) fn upper(disk: &Disk) -> Option<Self> {
        let layers = disk.layers();
        let child = layers.get(1).filter(|_| layers.len() > 2)?.path.clone();
        Some(Self { child, options: MergeOptions { no_reflink: true, ..MergeOptions::default() } })
    }

    /// Merges. `goes_on` is called between the steps of the copy. If the merge of the target itself
    /// was interrupted, that one is finished instead.
    pub(super) fn carry_out(&self, disk: &Disk, goes_on: &mut dyn FnMut() -> bool) -> Outcome<bool> {
        match disk.merge(&self.child, &self.options, &mut |_, _| goes_on()) {
            Ok(_) => Ok(true),
            Err(DiskError::Stopped) => Ok(false),
            Err(DiskError::BadOptions { what, hint }) if hint.starts_with("finish that merge first") => {
                let target = what.split(':').next().unwrap_or_default().into();
                let options = MergeOptions { into: None, ..self.options.clone() };
                Self { child: target, options }.carry_out(disk, &mut || true)
            }
            Err(error) => Err(format!("a merge failed: {error}")),
        }
    }
}

impl DiskCase {
    /// Merges once if there is something to merge, and freezes the disk otherwise.
    pub(super) fn merge_or_freeze(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &mut DiskTruth,
    ) -> Outcome {
        let Some(merging) = Merging::upper(&session.disk) else {
            return self.freeze_once(stage, session, truth, &mut ());
        };
        stage.world.phase(Some(Phase::Merge));
        let merged = merging.carry_out(&session.disk, &mut || true);
        stage.world.phase(None);
        merged.map(drop)
    }

    /// Merges frozen images of the disk. Sometimes another queue writes meanwhile, sometimes the
    /// merge is stopped, and sometimes the program is killed during it.
    pub(super) fn play_merging<'a>(
        &'a self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'a>,
        truth: &mut DiskTruth,
        dice: &mut Dice,
        version: &mut Version,
    ) -> Outcome {
        if self.changes != Changes::MergedInUse {
            return Ok(());
        }
        let Some(merging) = Merging::any(&session.disk, dice) else {
            return self.play_freezing(stage, session, truth, dice, version);
        };
        let world = &stage.world;
        let disk = Arc::clone(&session.disk);
        match dice.below(10) {
            0..3 => {
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
                world.phase(Some(Phase::Merge));
                let merged = merging.carry_out(&disk, &mut || true);
                world.phase(None);
                world.set_hook(None);
                drop(disk);
                if *killed.lock().unwrap_or_else(PoisonError::into_inner) {
                    *session = self.after_kill(stage, truth)?;
                    return Ok(());
                }
                merged.map(drop)
            }
            3..6 => {
                let ranges: Vec<(u64, u64)> = (0..3).map(|_| self.some_range(dice, &disk, 40)).collect();
                let first_version = *version + 1;
                *version += ranges.len() as Version;
                // The writes may be visible from now on, whether they are acknowledged or not.
                let writes: Vec<_> = (first_version..)
                    .zip(&ranges)
                    .map(|(version, &(first, count))| truth.ledger.announce(first, count, version))
                    .collect();
                stage.record(truth.clone());
                session.has_written = true;
                let mut written = None;
                world.phase(Some(Phase::Merge));
                let merged = merging.carry_out(&disk, &mut || {
                    written.get_or_insert_with(|| write_by_another(&disk, first_version, &ranges));
                    true
                });
                world.phase(None);
                match written {
                    Some(result) => {
                        result.map_err(|error| format!("a write during a merge failed: {error}"))?;
                        writes.iter().for_each(|&write| truth.ledger.acknowledge(write, false));
                    }
                    None => truth.ledger.forget_unacknowledged(),
                }
                stage.record(truth.clone());
                merged.map(drop)
            }
            what => {
                let mut calls = if what < 8 { dice.below(3) } else { u64::MAX };
                world.phase(Some(Phase::Merge));
                let merged = merging.carry_out(&disk, &mut || {
                    calls = calls.saturating_sub(1);
                    calls > 0
                });
                world.phase(None);
                merged.map(drop)
            }
        }
    }

    /// Merges a frozen image of a disk that a crowd uses, or freezes it.
    pub(crate) fn merge_or_freeze_under(&self, world: &crate::world::World, disk: &Disk) -> Outcome {
        match Merging::upper(disk) {
            None => self.freeze(world, disk),
            Some(merging) => merging.carry_out(disk, &mut || true).map(drop),
        }
    }
}
