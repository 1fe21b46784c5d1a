//! Disks that are merged into their parent while they are in use ([`Disk::absorb`]): the disk keeps
//! its name, which leads to the former parent's file afterwards.
//!
//! ```text
//!   truth recorded ─▶ Disk::absorb ─▶ the same contents, one image less
//!                        ├ between two batches another queue writes, or the merge is stopped
//!                        └ in one of its syncs the program is killed
//! ```
//!
//! A merge changes nothing that a user may rely on, and makes nothing durable that was not. So
//! after a cut the disk's name is enough to judge it. Then the merge is finished on a copy of the
//! files, while the disk is not in use, and the contents are judged again.

use super::{
    DiskCase, DiskTruth,
    session::{Session, write_by_another},
};
use crate::{
    dice::Dice,
    ledger::Version,
    mutation::Phase,
    stage::{Outcome, Stage},
    world::World,
};
use diskwright_disk::{AbsorbOptions, Disk, DiskError, KeptName, MergeOptions, merge};
use diskwright_store::FileSystem;
use std::sync::{Arc, Mutex, PoisonError};

/// Syncs of a merge, of which one is chosen.
const SYNCS: u64 = 24;

/// Places between two batches, of which one is chosen.
const PLACES: u64 = 4;

impl DiskCase {
    /// Whether the disk has a snapshot as its parent, which it can absorb.
    pub(super) fn has_snapshot(&self, disk: &Disk) -> bool {
        disk.layers().len() > 1 + usize::from(self.is_child())
    }

    /// Merges the disk once. Returns whether the merge ended, and was not stopped.
    pub(super) fn absorb_once(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &DiskTruth,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Outcome<bool> {
        let before = session.disk.layers().len();
        stage.record(truth.clone());
        session.has_written = true;
        stage.world.phase(Some(Phase::Absorb));
        let ended = session.disk.absorb(&AbsorbOptions::default(), progress);
        stage.world.phase(None);
        let (merged, warnings) = match ended {
            Ok(done) => (true, done.warnings),
            Err(DiskError::Stopped) => (false, Vec::new()),
            Err(error) => return Err(format!("a merge in use failed: {error}")),
        };
        let after = session.disk.layers().len();
        if after + usize::from(merged) != before {
            return Err(format!("the disk had {before} images, and has {after} (merged: {merged})"));
        }
        match warnings.is_empty() {
            true => Ok(merged),
            false => Err(format!("a merge in use has warned: {warnings:?}")),
        }
    }

    /// Merges the disk. Sometimes another queue writes between two batches, sometimes the merge is
    /// stopped, and sometimes the program is killed during it.
    pub(super) fn play_absorbing<'a>(
        &'a self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'a>,
        truth: &mut DiskTruth,
        dice: &mut Dice,
        version: &mut Version,
    ) -> Outcome {
        if !self.has_snapshot(&session.disk) {
            return self.play_freezing(stage, session, truth, dice, version);
        }
        let world = &stage.world;
        match dice.below(10) {
            0..2 => {
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
                let merged = self.absorb_once(stage, session, truth, &mut |_, _| true);
                world.set_hook(None);
                if *killed.lock().unwrap_or_else(PoisonError::into_inner) {
                    *session = self.after_kill(stage, truth)?;
                    return Ok(());
                }
                merged.map(drop)
            }
            2..8 => {
                let stops = dice.percent(30);
                let (place, mut places) = (dice.below(PLACES), 0);
                let ranges: Vec<(u64, u64)> = (0..3).map(|_| self.some_range(dice, &session.disk, 40)).collect();
                let first_version = *version + 1;
                *version += ranges.len() as Version;
                // The writes may be visible from now on, whether they are acknowledged or not.
                let writes: Vec<_> = (first_version..)
                    .zip(&ranges)
                    .map(|(version, &(first, count))| truth.ledger.announce(first, count, version))
                    .collect();
                let disk = Arc::clone(&session.disk);
                let mut written = None;
                let merged = self.absorb_once(stage, session, truth, &mut |_, _| {
                    if places == place {
                        written = Some(write_by_another(&disk, first_version, &ranges));
                    }
                    places += 1;
                    !(stops && places > place)
                });
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
            _ => self.absorb_once(stage, session, truth, &mut |_, _| true).map(drop),
        }
    }

    /// Finishes the merge on a copy of the files, while the disk is not in use.
    pub(super) fn judge_merge(&self, world: &World, truth: &DiskTruth) -> Outcome {
        if self.changes != super::Changes::AbsorbedInUse {
            return Ok(());
        }
        let copy = World::of(world.snapshot());
        if copy.facts(format!("/d/.disk.{}.new-child", self.format).as_ref()).is_ok() {
            // A snapshot was cut off, and left the disk two names: a merge takes one of them for
            // another child.
            return Ok(());
        }
        loop {
            let disk = self.open_disk(&copy, false)?;
            let has_snapshot = self.has_snapshot(&disk);
            let link = disk.layers()[0].image.parent_link();
            drop(disk);
            if !has_snapshot {
                return Ok(());
            }
            // The disk keeps its name by the mark that the merge in use has left. A link with two
            // identities of the parent says that this merge has begun.
            let is_marked = self.is_marked(&copy)?;
            if !is_marked && link.is_some_and(|link| link.linkage2.is_some()) {
                return Err("a merge in use has begun, and has left no mark".into());
            }
            let options = MergeOptions {
                keep: if is_marked { KeptName::Parents } else { KeptName::Childs },
                open: self.open_options(&copy, true),
                ..MergeOptions::default()
            };
            let merged = merge(self.path(), &options, &mut |_, _| true);
            merged.map_err(|error| format!("finishing the merge: {error}"))?;
            self.check(&copy, &self.path()).map_err(|error| format!("after finishing the merge: {error}"))?;
            let shown = self.read_at(&copy, &self.path())?;
            truth.ledger.judge(&shown, true).map_err(|error| format!("after finishing the merge: {error}"))?;
        }
    }

    /// Whether a merge in use has left a mark that names the file of the disk.
    fn is_marked(&self, world: &World) -> Outcome<bool> {
        let path = self.path();
        let (_, inode) = world.facts(&path).map_err(|error| error.to_string())?.identity;
        let mark = format!("/d/.{}.merging", path.file_name().unwrap_or_default().display());
        let Some(contents) = world.snapshot().file(mark.as_ref()).cloned() else { return Ok(false) };
        let mut bytes = vec![0; contents.len_bytes() as usize];
        contents.read(&mut bytes, 0);
        Ok(String::from_utf8_lossy(&bytes).ends_with(&format!("{inode:016x}\n")))
    }

    /// Merges a disk that a crowd uses, once it has a snapshot.
    pub(crate) fn freeze_or_absorb(&self, world: &World, disk: &Disk) -> Outcome {
        if !self.has_snapshot(disk) {
            return self.freeze(world, disk);
        }
        let absorbed = disk.absorb(&AbsorbOptions::default(), &mut |_, _| true);
        absorbed.map(drop).map_err(|error| format!("a merge in use failed: {error}"))
    }
}
