//! The life of a disk as cases: snapshot and revert, and clones. At every instant the disk's name
//! leads to a disk that reads as before. When a snapshot has succeeded, the name leads to a new
//! child, and the frozen image has its own. A clone is complete or not there. A command that has
//! failed leaves none.

use crate::{
    command::{Ended, judge_failure, run_command},
    disk::DiskCase,
    fault::OpKind,
    faulty::{FaultyCase, Reported},
    mutation::{Mutation, Phase},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{CreateRequest, Disk, FormerImage, OpenOptions, SnapshotOptions, clone_disk, revert, snapshot};
use diskwright_store::{EngineKind, FileSystem};
use std::path::PathBuf;

/// Freezes a disk of a kind with some contents, and then goes back to that snapshot.
#[derive(Debug, Clone)]
pub struct SnapshotCase(pub DiskCase);

/// How many images the chain of the disk has at least.
pub type Layers = usize;

impl SnapshotCase {
    fn options(world: &World, name: &str) -> SnapshotOptions {
        let open = OpenOptions { engine: EngineKind::Sync, files: world.files(), ..OpenOptions::default() };
        SnapshotOptions { name: name.into(), open, ..SnapshotOptions::default() }
    }

    /// Whether an image was frozen under this name. A second name of the disk is what an
    /// interrupted command has left.
    fn is_frozen(&self, world: &World, name: &str) -> bool {
        let path = self.0.path();
        let stem = path.file_stem().unwrap_or_default().display();
        let frozen = path.with_file_name(format!("{stem}_{name}.{}", self.0.format.driver().frozen_extension));
        let identity = |path| world.facts(path).ok().map(|facts| facts.identity);
        identity(&frozen).is_some_and(|frozen| Some(frozen) != identity(&path))
    }

    fn snapshot(&self, world: &World, name: &str) -> Outcome {
        snapshot(self.0.path(), &Self::options(world, name)).map(drop).map_err(|error| error.to_string())
    }

    fn revert(&self, world: &World, name: &str) -> Outcome {
        let done = revert(self.0.path(), None, FormerImage::Kept, &Self::options(world, name));
        done.map(drop).map_err(|error| error.to_string())
    }

    fn layers(&self, world: &World) -> Outcome<usize> {
        let disk = Disk::open(self.0.path(), &self.0.open_options(world, false)).map_err(|error| error.to_string())?;
        Ok(disk.layers().len())
    }

    /// Snapshot, then revert. `done` is told of each success.
    fn carry_out(&self, world: &World, done: &mut dyn FnMut(usize)) -> Outcome {
        let before = self.layers(world)?;
        done(before);
        self.snapshot(world, "one")?;
        done(before + 1);
        self.revert(world, "two")
    }
}

impl Case for SnapshotCase {
    type Truth = Layers;

    fn name(&self) -> String {
        format!("snapshot and revert {}", self.0.name)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.0.make(world)?;
        self.0.fill_half(world)
    }

    fn run(&self, stage: &Stage<Layers>, _seed: u64) -> Outcome {
        stage.record(1);
        stage.world.phase(Some(Phase::Command));
        self.carry_out(&stage.world, &mut |layers| stage.record(layers))?;
        stage.world.phase(None);
        Ok(())
    }

    fn judge(&self, world: &World, truth: &Layers, _seed: u64, depth: Depth) -> Outcome<u64> {
        let check = |when: &str| -> Outcome<usize> {
            let layers = self.layers(world).map_err(|error| format!("{when}: {error}"))?;
            let shown = self.0.read_at(world, &self.0.path()).map_err(|error| format!("{when}: {error}"))?;
            self.0.half_full_ledger().judge(&shown, false).map_err(|error| format!("{when}: {error}"))?;
            Ok(layers)
        };
        let mut layers = check("after the cut")?;
        if layers < *truth {
            return Err(format!("the chain has {layers} images, and a snapshot that was done makes it {truth}"));
        }
        if depth.resume {
            if !self.is_frozen(world, "one") {
                self.snapshot(world, "one").map_err(|error| format!("the same snapshot again: {error}"))?;
                layers += 1;
            } else if !self.is_frozen(world, "two") {
                self.revert(world, "two").map_err(|error| format!("the same revert again: {error}"))?;
            }
            if check("after the same command again")? != layers {
                return Err("the same command again has not frozen the disk".into());
            }
            self.snapshot(world, "again").map_err(|error| format!("a second snapshot: {error}"))?;
            if check("after a second snapshot")? != layers + 1 {
                return Err("the second snapshot is not in the chain".into());
            }
            let temporary = format!("/d/.{}.new-child", self.0.path().file_name().unwrap_or_default().display());
            if world.facts(&PathBuf::from(temporary)).is_ok() {
                return Err("the second snapshot has left the temporary file of the first".into());
            }
        }
        Ok(0)
    }

    fn is_touched_by(&self, mutation: Mutation) -> bool {
        matches!(mutation, Mutation::NoDirectorySync | Mutation::NotDurable(Phase::Command))
    }
}

impl FaultyCase for SnapshotCase {
    fn run_on(&self, stage: &Stage<Layers>, reported: &mut Reported) -> Outcome {
        stage.record(1);
        stage.world.phase(Some(Phase::Command));
        let result = self.carry_out(&stage.world, &mut |layers| stage.record(layers));
        reported.errors.extend(result.err());
        Ok(())
    }

    /// Both formats keep what an open reads first in two places.
    fn has_fallback(&self, op_kind: OpKind) -> bool {
        op_kind == OpKind::Read
    }
}

/// The snapshots that are tested.
pub fn snapshots() -> Vec<SnapshotCase> {
    let kinds = [
        "vhd dynamic 16K",
        "vhd differencing 16K",
        "vhdx dynamic 1M",
        "vhdx differencing 1M",
        "vhdx fixed 1M",
        "qcow2 64K",
        "qcow2 child 8K",
    ];
    kinds.into_iter().map(|name| SnapshotCase(crate::disk::named(name))).collect()
}

/// Makes two clones of a disk of a kind with some contents.
#[derive(Debug, Clone)]
pub struct CloneCase(pub DiskCase);

impl CloneCase {
    fn clones(&self) -> [PathBuf; 2] {
        ["one", "two"].map(|name| format!("/d/{name}.{}", self.0.format).into())
    }

    fn carry_out(&self, world: &World) -> Outcome {
        let request = CreateRequest { files: world.files(), ..CreateRequest::default() };
        let made = clone_disk(&self.0.path(), &self.clones(), &request, false, &mut |_, _| true);
        made.map(drop).map_err(|error| error.to_string())
    }

    /// The disk and each clone that is there read right. Returns whether all clones are there.
    fn judge_all(&self, world: &World) -> Outcome<bool> {
        let mut found = 0;
        for path in [self.0.path()].into_iter().chain(self.clones()) {
            if world.facts(&path).is_err() {
                continue;
            }
            self.0.check(world, &path)?;
            let shown = self.0.read_at(world, &path)?;
            let judged = self.0.half_full_ledger().judge(&shown, false);
            judged.map_err(|error| format!("{}: {error}", path.display()))?;
            found += 1;
        }
        Ok(found == 3)
    }
}

impl Case for CloneCase {
    type Truth = Ended;

    fn name(&self) -> String {
        format!("clone {}", self.0.name)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        if self.0.format.driver().child_records_time {
            world.keep_times();
        }
        self.0.make(world)?;
        self.0.fill_half(world)
    }

    fn run(&self, stage: &Stage<Ended>, _seed: u64) -> Outcome {
        run_command(stage, |world| self.carry_out(world))
    }

    fn judge(&self, world: &World, truth: &Ended, _seed: u64, depth: Depth) -> Outcome<u64> {
        let are_there = self.judge_all(world).map_err(|error| format!("after the cut: {error}"))?;
        if *truth == Ended::Well && !are_there {
            return Err("the clones were made, and one of them is missing".into());
        }
        if depth.resume {
            self.carry_out(world).map_err(|error| format!("the same command again: {error}"))?;
            if !self.judge_all(world).map_err(|error| format!("after the same command again: {error}"))? {
                return Err("the same command again has not made all clones".into());
            }
            for clone in self.clones() {
                self.0.fill_at(world, &clone, &[]).map_err(|error| format!("opening a clone for writing: {error}"))?;
            }
            if let Some(left) = world.snapshot().names.keys().find(|name| name.extension() == Some("partial".as_ref()))
            {
                return Err(format!("{} is there after the same command again", left.display()));
            }
        }
        Ok(0)
    }

    fn is_touched_by(&self, mutation: Mutation) -> bool {
        matches!(mutation, Mutation::NoDirectorySync | Mutation::NotDurable(Phase::Command))
    }
}

impl FaultyCase for CloneCase {
    fn run_on(&self, stage: &Stage<Ended>, reported: &mut Reported) -> Outcome {
        stage.record(Ended::No);
        let before = stage.world.snapshot();
        stage.world.phase(Some(Phase::Command));
        let result = self.carry_out(&stage.world);
        stage.record(judge_failure(&stage.world, reported, &before, result)?);
        Ok(())
    }

    /// What an open reads first is in two places.
    fn has_fallback(&self, op_kind: OpKind) -> bool {
        op_kind == OpKind::Read
    }
}

/// The clones that are tested.
pub fn clones() -> Vec<CloneCase> {
    let kinds = ["vhd dynamic 16K", "vhdx dynamic 1M", "qcow2 child 8K", "vmdk sparse 8K", "vdi dynamic 8K"];
    kinds.into_iter().map(|name| CloneCase(crate::disk::named(name))).collect()
}
