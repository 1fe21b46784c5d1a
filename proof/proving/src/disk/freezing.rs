//! Disks that are frozen while they are in use ([`Disk::snapshot`]): the disk keeps its name, which
//! leads to the new child afterwards.
//!
//! ```text
//!   truth recorded ─▶ Disk::snapshot ─▶ all earlier writes are durable
//!                        ├ between two of its steps another queue writes
//!                        └ in one of its syncs the program is killed
//! ```
//!
//! A cut before the new name is durable leaves the old top under the disk's name, a cut after it
//! the child. Both must show the same, so nothing but the disk's name is needed to judge it.

use super::{
    DiskCase, DiskTruth,
    session::{Session, write_by_another},
};
use crate::{
    dice::Dice,
    ledger::{Version, Window},
    mutation::Phase,
    stage::{Outcome, Stage},
    world::World,
};
use diskwright_disk::{Disk, SnapshotWatch};
use diskwright_store::FileSystem;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum number of images in a chain, so that chains stay short.
const LAYERS_MAX: usize = 7;

/// Syncs of a snapshot, of which one is chosen.
const SYNCS: u64 = 8;

/// Places between two steps of a snapshot, of which one is chosen.
const PLACES: u64 = 7;

/// Writes by another queue between two steps of a snapshot. (In a sync that would be wrong: the
/// thread that syncs may hold a lock of the image.)
struct ConcurrentWriter<'a> {
    disk: &'a Disk,
    first_version: Version,
    ranges: &'a [(u64, u64)],
    /// Places to pass before it writes.
    left: u64,
    result: Option<Outcome>,
}

impl ConcurrentWriter<'_> {
    fn pass(&mut self) {
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None if self.result.is_none() => {
                self.result = Some(write_by_another(self.disk, self.first_version, self.ranges));
            }
            None => {}
        }
    }
}

impl SnapshotWatch for ConcurrentWriter<'_> {
    fn goes_on(&mut self, _done: u64, _total: u64) -> bool {
        self.pass();
        true
    }

    fn child_is_made(&mut self, _identity: Option<(u64, u64)>) -> diskwright_disk::Result<()> {
        self.pass();
        Ok(())
    }

    fn quiesce(&mut self) {
        self.pass();
    }

    fn resume(&mut self) {
        self.pass();
    }
}

impl DiskCase {
    /// A name for a frozen image that is not taken.
    pub(crate) fn free_name(&self, world: &World) -> String {
        let extension = self.format.driver().frozen_extension;
        let is_free = |number: &u32| world.facts(format!("/d/disk_s{number}.{extension}").as_ref()).is_err();
        (1..).find(is_free).map_or_else(String::new, |number| format!("s{number}"))
    }

    /// Freezes the disk once.
    pub(super) fn freeze_once(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &mut DiskTruth,
        watch: &mut dyn SnapshotWatch,
    ) -> Outcome {
        let name = self.free_name(&stage.world);
        stage.record(truth.clone());
        let mark = truth.ledger.mark();
        session.has_written = true;
        stage.world.phase(Some(Phase::Snapshot));
        let frozen = session.disk.snapshot(&name, false, watch);
        stage.world.phase(None);
        let frozen = frozen.map_err(|error| format!("a snapshot failed: {error}"))?;
        // As after a flush: all writes to the former top are durable.
        truth.ledger.flushed(mark);
        stage.record(truth.clone());
        frozen.warnings.into_iter().next().map_or(Ok(()), Err)
    }

    /// Freezes the disk. Sometimes another queue writes between two steps of the snapshot, and
    /// sometimes the program is killed during it.
    pub(super) fn play_freezing<'a>(
        &'a self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'a>,
        truth: &mut DiskTruth,
        dice: &mut Dice,
        version: &mut Version,
    ) -> Outcome {
        if !self.changes.freezes_in_use() || session.disk.layers().len() >= LAYERS_MAX {
            return Ok(());
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
                let frozen = self.freeze_once(stage, session, truth, &mut ());
                world.set_hook(None);
                if *killed.lock().unwrap_or_else(PoisonError::into_inner) {
                    *session = self.after_kill(stage, truth)?;
                    return Ok(());
                }
                frozen
            }
            2..7 => {
                // A copy-up waits until the former top is at rest, and this thread is what brings
                // that about. So formats without sector bits get whole blocks.
                let layers = session.disk.layers();
                let tracks_sectors = layers[0].image.writer().is_some_and(|writer| writer.tracks_sectors());
                let some_range = |dice: &mut Dice| match self.some_window(dice, &session.disk) {
                    Window { first, count } if !tracks_sectors => (first, count),
                    _ => self.some_range(dice, &session.disk, 40),
                };
                let ranges: Vec<(u64, u64)> = (0..3).map(|_| some_range(dice)).collect();
                let first_version = *version + 1;
                *version += ranges.len() as Version;
                // The writes may be visible from now on, whether they are acknowledged or not.
                let writes: Vec<_> = (first_version..)
                    .zip(&ranges)
                    .map(|(version, &(first, count))| truth.ledger.announce(first, count, version))
                    .collect();
                let disk = Arc::clone(&session.disk);
                let left = dice.below(PLACES);
                let mut company = ConcurrentWriter { disk: &disk, first_version, ranges: &ranges, left, result: None };
                let frozen = self.freeze_once(stage, session, truth, &mut company);
                match company.result {
                    Some(result) => {
                        result.map_err(|error| format!("a write during a snapshot failed: {error}"))?;
                        writes.iter().for_each(|&write| truth.ledger.acknowledge(write, false));
                    }
                    None => truth.ledger.forget_unacknowledged(),
                }
                stage.record(truth.clone());
                frozen
            }
            _ => self.freeze_once(stage, session, truth, &mut ()),
        }
    }

    /// Freezes a disk that a crowd uses.
    pub(crate) fn freeze(&self, world: &World, disk: &Disk) -> Outcome {
        let frozen = disk.snapshot(&self.free_name(world), false, &mut ());
        frozen.map(drop).map_err(|error| format!("a snapshot failed: {error}"))
    }
}
