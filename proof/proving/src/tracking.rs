//! Change tracking as a case: after a power cut at any write of the image or of the file of its
//! points, every sector that differs from what it was at a point is reported as changed.
//!
//! A VHDX or a VMDK that crashed must still know its ranges; the others may say that everything has
//! changed.

use crate::{
    contents::SECTOR_BYTES,
    dice::Dice,
    disk::DiskCase,
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::Disk;
use diskwright_store::{Blocking, EngineKind};
use std::sync::Arc;

/// A disk of a kind with changes that are tracked.
#[derive(Debug, Clone)]
pub struct TrackCase(pub DiskCase);

/// What the windows held when a point was started.
#[derive(Debug, Clone)]
pub struct TrackTruth {
    points: Vec<(&'static str, Arc<Vec<Vec<u8>>>)>,
}

fn text_of(error: impl ToString) -> String {
    error.to_string()
}

impl TrackCase {
    fn open(&self, world: &World, writable: bool) -> Outcome<Arc<Disk>> {
        Disk::open(self.0.path(), &self.0.open_options(world, writable)).map_err(text_of)
    }

    fn read(&self, disk: &Disk) -> Outcome<Vec<Vec<u8>>> {
        let mut io = Blocking::open(disk, EngineKind::Sync).map_err(text_of)?;
        let read = |window: &crate::ledger::Window| {
            let mut bytes = vec![0; (window.count * SECTOR_BYTES) as usize];
            io.read(window.first * SECTOR_BYTES, &mut bytes).map_err(text_of).map(|()| bytes)
        };
        self.0.windows.iter().map(read).collect()
    }

    /// Some random changes of the windows.
    fn change(&self, disk: &Disk, dice: &mut Dice, steps: u64) -> Outcome {
        let mut io = Blocking::open(disk, EngineKind::Sync).map_err(text_of)?;
        for _ in 0..steps {
            let window = *dice.pick(&self.0.windows);
            let sectors = u64::from(self.0.sector_bytes) / SECTOR_BYTES;
            let first = window.first + dice.below(window.count / sectors) * sectors;
            let most = (window.first + window.count - first) / sectors;
            let count = (1 + dice.below(most.min(16))) * sectors;
            let (at, len) = (first * SECTOR_BYTES, count * SECTOR_BYTES);
            let done = match dice.below(10) {
                0 | 1 => io.write_zeroes(at, len),
                2 => io.discard(at, len),
                3 => io.flush(),
                _ => io.write(at, &vec![dice.below(255) as u8 + 1; len as usize], dice.percent(20)),
            };
            done.map_err(text_of)?;
        }
        Ok(())
    }

    /// Whether each sector that differs is reported since its point.
    fn judge_points(&self, world: &World, truth: &TrackTruth, when: &str) -> Outcome {
        let disk = self.open(world, false)?;
        let now = self.read(&disk)?;
        for (name, before) in &truth.points {
            let changed = disk.changed_since(name).map_err(|error| format!("{when}: {error}"))?;
            if self.0.format.driver().renews_contents_id
                && let Some(reason) = changed.everything()
            {
                return Err(format!("{when}: everything counts as changed since {name}: {reason}"));
            }
            let ranges: Vec<_> = changed.ranges().collect();
            for ((window, before), now) in self.0.windows.iter().zip(&**before).zip(&now) {
                let sectors = before.chunks(SECTOR_BYTES as usize).zip(now.chunks(SECTOR_BYTES as usize));
                for (sector, (before, now)) in (window.first..).zip(sectors) {
                    let at = sector * SECTOR_BYTES;
                    if before != now && !ranges.iter().any(|range| range.contains(&at)) {
                        return Err(format!("{when}: sector {sector} has changed since {name}, and is not reported"));
                    }
                }
            }
        }
        Ok(())
    }
}

impl Case for TrackCase {
    type Truth = TrackTruth;

    fn name(&self) -> String {
        format!("tracked {}", self.0.name)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.0.make(world)?;
        self.0.fill_half(world)?;
        let disk = self.open(world, true)?;
        disk.start_tracking("one").map_err(text_of)?;
        disk.close().map_err(text_of)
    }

    fn run(&self, stage: &Stage<TrackTruth>, seed: u64) -> Outcome {
        let mut dice = Dice::new(seed, 0x77ac);
        let world = &stage.world;
        let before = Arc::new(self.read(&*self.open(world, false)?)?);
        let mut truth = TrackTruth { points: vec![("one", before)] };
        stage.record(truth.clone());
        for (round, name) in [None, Some("two"), Some("three"), None].into_iter().enumerate() {
            let disk = self.open(world, true)?;
            self.change(&disk, &mut dice, 6)?;
            if let Some(name) = name {
                // What the new point is compared with is known before it is promised.
                let before = Arc::new(self.read(&disk)?);
                disk.start_tracking(name).map_err(text_of)?;
                truth.points.push((name, before));
                stage.record(truth.clone());
                self.change(&disk, &mut dice, 6)?;
            }
            if round == 2 {
                truth.points.retain(|(name, _)| *name != "two");
                stage.record(truth.clone());
                disk.stop_tracking("two").map_err(text_of)?;
                self.change(&disk, &mut dice, 3)?;
            }
            disk.close().map_err(text_of)?;
        }
        Ok(())
    }

    fn judge(&self, world: &World, truth: &TrackTruth, seed: u64, depth: Depth) -> Outcome<u64> {
        self.judge_points(world, truth, "after the cut")?;
        if depth.resume {
            let disk = self.open(world, true)?;
            self.change(&disk, &mut Dice::new(seed, 0x2e5), 6)?;
            disk.close().map_err(text_of)?;
            drop(disk);
            self.judge_points(world, truth, "after another session")?;
        }
        Ok(0)
    }
}

/// The disks whose changes are tracked.
pub fn tracked() -> Vec<TrackCase> {
    let kinds =
        ["vhd dynamic 16K", "vhdx dynamic 1M", "vhdx differencing 1M", "vmdk sparse 8K", "qcow2 64K", "vdi dynamic 8K"];
    kinds.into_iter().map(|name| TrackCase(crate::disk::named(name))).collect()
}

/// Writes 4 KiB at random places of a large disk, kills the process, and returns how many bytes
/// more are reported than the grains that were written have.
///
/// # Errors
/// A write is not reported, or something failed.
pub fn excess_after_a_kill(writes: u64, seed: u64) -> Outcome<u64> {
    let case = DiskCase { size_bytes: 64 << 30, windows: Vec::new(), ..crate::disk::named("vhdx dynamic 32M") };
    let (world, mut dice) = (World::default(), Dice::new(seed, 0x6113));
    case.make(&world)?;
    let tracked = TrackCase(case);
    let disk = tracked.open(&world, true)?;
    disk.start_tracking("one").map_err(text_of)?;
    let mut io = Blocking::open(&*disk, EngineKind::Sync).map_err(text_of)?;
    let mut places: Vec<u64> = (0..writes).map(|_| dice.below((64 << 30) / 4096) * 4096).collect();
    places.iter().try_for_each(|at| io.write(*at, &[1; 4096], false)).map_err(text_of)?;
    world.kill();
    drop(io);
    drop(disk);
    let changed = tracked.open(&world, false)?.changed_since("one").map_err(text_of)?;
    if let Some(reason) = changed.everything() {
        return Err(format!("everything counts as changed: {reason}"));
    }
    let ranges: Vec<_> = changed.ranges().collect();
    if let Some(missed) = places.iter().find(|at| !ranges.iter().any(|range| range.contains(at))) {
        return Err(format!("the write at {missed} is not reported"));
    }
    places.iter_mut().for_each(|at| *at /= changed.grain_bytes());
    places.sort_unstable();
    places.dedup();
    Ok(changed.bytes().saturating_sub(places.len() as u64 * changed.grain_bytes()))
}
