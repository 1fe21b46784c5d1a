//! A short session that uses every kind of request. Each of its operations on files fails once.

use super::{Backing, Changes, DiskCase, DiskTruth, Front, session::Session};
use crate::{
    contents::SECTOR_BYTES,
    fault::FaultKind,
    faulty::{FaultyCase, Reported},
    ledger::Window,
    mutation::Phase,
    stage::{Outcome, Stage},
};
use diskwright_image::Format;

impl FaultyCase for DiskCase {
    fn run_on(&self, stage: &Stage<DiskTruth>, reported: &mut Reported) -> Outcome {
        let world = &stage.world;
        // Nothing fails yet: this reads the disk as it was made.
        let fault = world.suspend();
        let mut truth = self.new_truth(world)?;
        stage.record(truth.clone());
        world.resume(fault);
        world.phase(Some(Phase::Open));
        let opened = self.open(world, true);
        world.phase(None);
        let mut session = match opened {
            Ok(session) => session,
            Err(error) => {
                reported.errors.push(error);
                return Ok(());
            }
        };
        let mut there = self.windows.iter().filter(|window| window.first * SECTOR_BYTES < self.size_at_first());
        let (first, last) = (self.windows[0], *there.next_back().unwrap_or(&self.windows[0]));
        let unit = (u64::from(self.sector_bytes) / SECTOR_BYTES).max(if self.libvhdi_safe { 8 } else { 1 });
        let small = |window: Window, at: u64| (window.first + at * unit, unit);
        let whole = |window: Window| (window.first, window.count);
        let mut steps: Vec<FaultyStep> = vec![
            FaultyStep::Write(small(first, 1), false),
            FaultyStep::Write(small(last, 0), false),
            FaultyStep::Flush,
            FaultyStep::Write(small(first, 3), true),
            FaultyStep::Write(whole(last), false),
            FaultyStep::Read,
            FaultyStep::Flush,
            FaultyStep::Zero(whole(first), true),
            FaultyStep::Zero(small(last, 1), false),
            FaultyStep::Flush,
            FaultyStep::Write(small(first, 2), false),
            FaultyStep::Read,
            FaultyStep::Flush,
            FaultyStep::Write(small(first, 2), false),
            FaultyStep::Flush,
        ];
        if self.changes != Changes::None {
            // After the first failure, the change is tried again. (A VHDX is slow here, and the
            // code of its snapshots is the same as a VHD's.)
            let times = if self.format == Format::Vhdx { 1 } else { 3 };
            let places: &[usize] = match self.changes {
                // Frozen early, then merged with what was written since.
                Changes::AbsorbedInUse => &[9, 9, 3][2 - times.min(2)..],
                // Two snapshots come before the first merge.
                Changes::MergedInUse => &[7, 7, 4],
                _ => &[7, 7, 4][3 - times..],
            };
            places.iter().for_each(|&at| steps.insert(at, FaultyStep::Change));
        }
        if let Some(both) = self.windows.get(1).filter(|_| matches!(self.backing, Backing::Parts(_))) {
            steps.splice(
                7..7,
                [FaultyStep::Write(whole(*both), false), FaultyStep::Flush, FaultyStep::Write(whole(*both), true)],
            );
        }
        for (version, step) in (1..).zip(steps) {
            if self.libvhdi_safe && matches!(step, FaultyStep::Zero(..)) {
                continue;
            }
            let mark = truth.ledger.mark();
            let announced = match step {
                FaultyStep::Write((first, count), _) => Some(truth.ledger.announce(first, count, version)),
                FaultyStep::Zero((first, count), _) => Some(truth.ledger.announce(first, count, 0)),
                FaultyStep::Flush | FaultyStep::Read | FaultyStep::Change => None,
            };
            stage.record(truth.clone());
            let (durable, outcome) = match step {
                FaultyStep::Write((first, count), durable) => (durable, session.write(first, count, version, durable)),
                FaultyStep::Zero((first, count), discard) => (false, session.zero(first, count, discard, false)),
                FaultyStep::Flush => (false, session.flush()),
                FaultyStep::Change => (false, self.change_once(stage, &mut session, &mut truth)),
                FaultyStep::Read => {
                    let shown = session.read_windows();
                    if let Ok(shown) = &shown {
                        truth.ledger.judge(shown, false).map_err(|error| format!("without a cut, {error}"))?;
                    }
                    (false, shown.map(drop))
                }
            };
            match (outcome, announced) {
                (Err(error), _) => {
                    if reported.errors.is_empty() {
                        self.judge_errno(stage, &error)?;
                    }
                    reported.errors.push(error);
                }
                (Ok(()), Some(write)) => truth.ledger.acknowledge(write, durable),
                (Ok(()), None) if matches!(step, FaultyStep::Flush) => truth.ledger.flushed(mark),
                (Ok(()), None) => {}
            }
            stage.record(truth.clone());
        }
        let mark = truth.ledger.mark();
        world.phase(Some(Phase::Close));
        match session.close() {
            Ok(()) => truth.ledger.flushed(mark),
            Err(error) => reported.errors.push(error),
        }
        world.phase(None);
        stage.record(truth);
        Ok(())
    }

    fn has_several_files(&self) -> bool {
        self.files_written() > 1
    }
}

impl DiskCase {
    fn change_once(&self, stage: &Stage<DiskTruth>, session: &mut Session<'_>, truth: &mut DiskTruth) -> Outcome {
        match self.changes {
            Changes::None => Ok(()),
            Changes::Snapshots => self.play_snapshot(stage, session, truth),
            Changes::FrozenInUse => self.freeze_once(stage, session, truth, &mut ()),
            Changes::AbsorbedInUse if self.has_snapshot(&session.disk) => {
                self.absorb_once(stage, session, truth, &mut |_, _| true).map(drop)
            }
            Changes::AbsorbedInUse => self.freeze_once(stage, session, truth, &mut ()),
            Changes::MergedInUse => self.merge_or_freeze(stage, session, truth),
            Changes::Relinks => self.play_relink(stage, session, truth),
            Changes::CompactedInUse => self.compact_once(stage, session, truth),
            Changes::Grows { .. } => self.play_growth(stage, session, truth, truth.changed.size_bytes + (256 << 10)),
        }
    }

    /// Over NBD, NVMe/TCP and iSCSI, the first error tells the kind of the failed operation in the
    /// protocol's own terms. (Later errors say that the disk is poisoned, or report the next
    /// failure.)
    fn judge_errno(&self, stage: &Stage<DiskTruth>, error: &str) -> Outcome {
        let (_, Some((kind, ..))) = stage.world.strikes() else { return Ok(()) };
        let is_full = matches!(kind, FaultKind::Full | FaultKind::Short);
        let names: &[&str] = match (self.front, is_full) {
            (Front::Nbd, false) => &["EIO"],
            (Front::Nbd, true) => &["ENOSPC"],
            (Front::Nvme, false) => &["write fault", "unrecovered read error"],
            (Front::Nvme, true) => &["capacity exceeded"],
            (Front::Iscsi, false) => &["write error", "unrecovered read error"],
            (Front::Iscsi, true) => &["no space left"],
            (Front::Queue | Front::VhostUser, _) => return Ok(()),
        };
        if names.iter().any(|name| error.contains(name)) {
            Ok(())
        } else {
            Err(format!("{kind:?} was not reported as {} by {:?}: {error}", names.join(" or "), self.front))
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum FaultyStep {
    Write((u64, u64), bool),
    Zero((u64, u64), bool),
    Flush,
    Read,
    /// An image is added, the disk grows, or its link changes.
    Change,
}
