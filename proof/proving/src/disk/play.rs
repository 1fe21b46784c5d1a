//! Random sessions on a disk, and what its user may rely on at each step.

use super::{
    Changes, DiskCase, DiskTruth,
    session::{Session, write_by_another},
};
use crate::{
    contents::SECTOR_BYTES,
    dice::Dice,
    ledger::{Version, Window},
    mutation::Phase,
    stage::{Outcome, Stage},
};
use diskwright_disk::Disk;
use diskwright_store::sync::Mutex;
use std::sync::{Arc, PoisonError};

impl DiskCase {
    /// Runs random steps. Before each change, the new truth is recorded.
    pub(super) fn play(
        &self,
        stage: &Stage<DiskTruth>,
        dice: &mut Dice,
        truth: &mut DiskTruth,
        steps: u64,
        version: &mut Version,
    ) -> Outcome {
        let world = &stage.world;
        stage.record(truth.clone());
        world.phase(Some(Phase::Open));
        let mut session = self.open(world, true)?;
        world.phase(None);
        for _ in 0..steps {
            *version += 1;
            if self.changes == Changes::AbsorbedInUse && dice.percent(15) {
                self.play_absorbing(stage, &mut session, truth, dice, version)?;
                continue;
            }
            if self.changes == Changes::MergedInUse && dice.percent(14) {
                self.play_merging(stage, &mut session, truth, dice, version)?;
                continue;
            }
            if self.changes.freezes_in_use() && dice.percent(10) {
                self.play_freezing(stage, &mut session, truth, dice, version)?;
                continue;
            }
            if self.changes == Changes::CompactedInUse && dice.percent(10) {
                self.play_compaction(stage, &mut session, truth, dice)?;
                continue;
            }
            if self.changes != Changes::None && dice.percent(10) {
                self.play_change(stage, &mut session, truth, dice)?;
                continue;
            }
            if self.sweeps && dice.percent(8) {
                let all = (0, DiskCase::sectors_now(&session.disk));
                self.play_zero(stage, &mut session, truth, all, dice.percent(70), false)?;
                continue;
            }
            match if self.churns { churning(dice) } else { dice.below(100) } {
                0..46 => {
                    let (first, count) = self.some_range(dice, &session.disk, 40);
                    self.play_write(stage, &mut session, truth, (first, count), *version, dice.percent(12))?;
                }
                46..54 if !self.libvhdi_safe => {
                    let (first, count) = self.some_range(dice, &session.disk, 3000);
                    self.play_zero(stage, &mut session, truth, (first, count), dice.percent(50), dice.percent(12))?;
                }
                54..60 if !self.libvhdi_safe => {
                    // A whole window, which is mostly whole blocks.
                    let Window { first, count } = self.some_window(dice, &session.disk);
                    self.play_zero(stage, &mut session, truth, (first, count), dice.percent(50), false)?;
                }
                60..64 => {
                    let Window { first, count } = self.some_window(dice, &session.disk);
                    self.play_write(stage, &mut session, truth, (first, count), *version, false)?;
                }
                64..78 => self.play_flush(stage, &mut session, truth, dice, version)?,
                78..86 => {
                    let shown = session.read_windows()?;
                    truth.ledger.judge(&shown, false).map_err(|error| format!("without a cut, {error}"))?;
                }
                86..92 => {
                    self.play_close(stage, session, truth)?;
                    self.begin_session(stage, truth)?;
                    world.phase(Some(Phase::Open));
                    session = self.open(world, true)?;
                    world.phase(None);
                }
                92..95 => {
                    world.kill();
                    drop(session);
                    session = self.after_kill(stage, truth)?;
                }
                _ => {}
            }
        }
        let shown = session.read_windows()?;
        truth.ledger.judge(&shown, false).map_err(|error| format!("without a cut, {error}"))?;
        self.play_close(stage, session, truth)
    }

    fn begin_session(&self, stage: &Stage<DiskTruth>, truth: &mut DiskTruth) -> Outcome {
        let visible = {
            let mut reader = self.open(&stage.world, false)?;
            let shown = reader.read_windows()?;
            truth.ledger.judge(&shown, false).map_err(|error| format!("after reopening, {error}"))?
        };
        let start = self.session_start(&stage.world, visible)?;
        truth.session = Arc::new(if truth.ledger.is_durable() { start } else { start.without_identities() });
        stage.record(truth.clone());
        Ok(())
    }

    /// Opens the disk after a kill, and records what it shows.
    pub(super) fn after_kill<'a>(&'a self, stage: &Stage<DiskTruth>, truth: &mut DiskTruth) -> Outcome<Session<'a>> {
        let world = &stage.world;
        world.phase(None);
        let visible = {
            let mut reader = self.open(world, false)?;
            let shown = reader.read_windows()?;
            truth.ledger.judge(&shown, true).map_err(|error| format!("after a kill, {error}"))?
        };
        truth.ledger.reread(&visible);
        // What the killed session did to the file may still be lost, including its new identities.
        // Identities are judged from here on.
        truth.session = Arc::new(self.session_start(world, visible)?.without_identities());
        stage.record(truth.clone());
        world.phase(Some(Phase::Open));
        let session = self.open(world, true)?;
        world.phase(None);
        Ok(session)
    }

    /// A random window within the present size of the disk.
    pub(super) fn some_window(&self, dice: &mut Dice, disk: &Disk) -> Window {
        let end = Self::sectors_now(disk);
        let there = self.windows.iter().filter(|window| window.first < end).count();
        self.windows[dice.below(there as u64) as usize]
    }

    /// A random range of sectors within one window.
    pub(super) fn some_range(&self, dice: &mut Dice, disk: &Disk, most: u64) -> (u64, u64) {
        let unit = if self.libvhdi_safe { 8 } else { u64::from(self.sector_bytes) / SECTOR_BYTES };
        let window = self.some_window(dice, disk);
        let units = window.count / unit;
        let first = dice.below(units);
        // Mostly small ranges.
        let most = if dice.percent(70) { (most / 8).max(1) } else { most };
        let count = (1 + dice.below(most.div_ceil(unit))).min(units - first);
        (window.first + first * unit, count * unit)
    }

    fn play_write(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &mut DiskTruth,
        (first, count): (u64, u64),
        version: Version,
        durable: bool,
    ) -> Outcome {
        let write = truth.ledger.announce(first, count, version);
        stage.record(truth.clone());
        session.enter_phase(stage, durable);
        session.write(first, count, version, durable).map_err(|error| format!("a write failed: {error}"))?;
        stage.world.phase(None);
        truth.ledger.acknowledge(write, durable);
        if durable {
            stage.record(truth.clone());
        }
        Ok(())
    }

    fn play_zero(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &mut DiskTruth,
        (first, count): (u64, u64),
        discard: bool,
        durable: bool,
    ) -> Outcome {
        let write = truth.ledger.announce(first, count, 0);
        stage.record(truth.clone());
        session.enter_phase(stage, durable);
        session.zero(first, count, discard, durable).map_err(|error| format!("zeroing failed: {error}"))?;
        stage.world.phase(None);
        truth.ledger.acknowledge(write, durable);
        if durable {
            stage.record(truth.clone());
        }
        Ok(())
    }

    /// Flushes. Sometimes another queue writes during the flush, and sometimes the program is
    /// killed during it.
    fn play_flush<'a>(
        &'a self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'a>,
        truth: &mut DiskTruth,
        dice: &mut Dice,
        version: &mut Version,
    ) -> Outcome {
        let world = &stage.world;
        let mark = truth.ledger.mark();
        let what = dice.below(10);
        let at_sync = dice.below(3);
        let killed = Arc::new(Mutex::new(false));
        let mut shared = None;
        match what {
            0 => {
                let (world_again, killed, mut syncs) = (world.clone(), Arc::clone(&killed), 0);
                world.set_hook(Some(Box::new(move || {
                    if syncs == at_sync {
                        world_again.kill();
                        *killed.lock().unwrap_or_else(PoisonError::into_inner) = true;
                    }
                    syncs += 1;
                })));
            }
            1..4 if session.has_written => {
                let ranges: Vec<(u64, u64)> = (0..3).map(|_| self.some_range(dice, &session.disk, 40)).collect();
                let first_version = *version + 1;
                *version += ranges.len() as Version;
                // The writes may be visible from now on, whether they are acknowledged or not.
                let writes: Vec<_> = (first_version..)
                    .zip(&ranges)
                    .map(|(version, &(first, count))| truth.ledger.announce(first, count, version))
                    .collect();
                stage.record(truth.clone());
                let (disk, mut syncs) = (Arc::downgrade(&session.disk), 0);
                let results = Arc::new(Mutex::new(Vec::new()));
                shared = Some((writes, Arc::clone(&results)));
                world.set_hook(Some(Box::new(move || {
                    if syncs == at_sync
                        && let Some(disk) = disk.upgrade()
                    {
                        let result = write_by_another(&disk, first_version, &ranges);
                        results.lock().unwrap_or_else(PoisonError::into_inner).push(result);
                    }
                    syncs += 1;
                })));
            }
            _ => {}
        }
        world.phase(Some(Phase::Flush));
        let flushed = session.flush();
        world.set_hook(None);
        world.phase(None);
        if *killed.lock().unwrap_or_else(PoisonError::into_inner) {
            if flushed.is_ok() {
                return Err("a flush succeeded after its program had been killed".into());
            }
            let fresh = self.after_kill(stage, truth)?;
            *session = fresh;
            return Ok(());
        }
        flushed.map_err(|error| format!("a flush failed: {error}"))?;
        let mut done_by_another = false;
        if let Some((writes, results)) = shared {
            for result in results.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                result.map_err(|error| format!("a write during a flush failed: {error}"))?;
                writes.iter().for_each(|&write| truth.ledger.acknowledge(write, false));
                done_by_another = true;
            }
        }
        // Writes that were never sent must be removed from the ledger, so that they do not count as
        // failed writes.
        truth.ledger.flushed(mark);
        if !done_by_another {
            truth.ledger.forget_unacknowledged();
        }
        stage.record(truth.clone());
        Ok(())
    }

    fn play_close(&self, stage: &Stage<DiskTruth>, session: Session<'_>, truth: &mut DiskTruth) -> Outcome {
        stage.world.phase(Some(Phase::Close));
        // A session without changes flushes nothing: what a killed session left in the page cache
        // stays there.
        let has_written = session.has_written;
        session.close().map_err(|error| format!("close failed: {error}"))?;
        stage.world.phase(None);
        if has_written {
            truth.ledger.flushed(truth.ledger.mark());
        }
        stage.record(truth.clone());
        Ok(())
    }
}

/// The number of a step for sessions in which blocks are freed and reused: fewer small steps, and
/// few that end the session.
fn churning(dice: &mut Dice) -> u64 {
    match dice.below(100) {
        0..35 => 0,
        35..60 => 54,
        60..65 => 60,
        65..90 => 64,
        90..97 => 78,
        97 => 86,
        98 => 92,
        _ => 46,
    }
}
