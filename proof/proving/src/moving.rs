//! Moving a disk that no process has open as a case: to another folder and format. At every instant
//! the disk is there and reads as before, under its old name or under the new one. The same move
//! then finishes what a cut has left.

use crate::{
    command::{Ended, run_command, run_faulty_command},
    disk::DiskCase,
    fault::OpKind,
    faulty::{FaultyCase, Reported},
    mutation::{Mutation, Phase},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{MoveOptions, move_disk};
use diskwright_image::Format;
use diskwright_store::{FileSystem, LockMode, OpenOptions};
use std::path::{Path, PathBuf};

/// Moves a disk of a kind into an image of another format.
#[derive(Debug, Clone)]
pub struct MoveCase {
    /// The disk, with some contents.
    pub kind: DiskCase,
    /// The format that it gets.
    pub to: Format,
}

impl MoveCase {
    fn new_path(&self) -> PathBuf {
        format!("/e/new.{}", self.to).into()
    }

    fn carry_out(&self, world: &World) -> Outcome {
        let open = self.kind.open_options(world, false);
        let moved = move_disk(self.kind.path(), self.new_path(), &MoveOptions::default(), &open, &mut |_, _| true);
        moved.map(drop).map_err(|error| error.to_string())
    }

    /// The disk at `path`, whose format this is, has the right contents.
    fn reads(&self, world: &World, path: &Path, format: Format) -> Outcome {
        let kind = DiskCase { format, ..self.kind.clone() };
        kind.check(world, path)?;
        let shown = kind.read_at(world, path)?;
        self.kind.half_full_ledger().judge(&shown, false).map(drop)
    }

    fn judge_all(&self, world: &World) -> Outcome {
        let (old, new) = (self.kind.path(), self.new_path());
        let (has_old, has_new) = (world.facts(&old).is_ok(), world.facts(&new).is_ok());
        if has_old {
            self.reads(world, &old, self.kind.format).map_err(|error| format!("the old disk: {error}"))?;
        }
        if has_new {
            self.reads(world, &new, self.to).map_err(|error| format!("the new disk: {error}"))?;
        }
        if has_old || has_new { Ok(()) } else { Err("neither the old disk nor the new one is there".into()) }
    }

    /// The move has ended: of the disk only the new file is there.
    fn judge_end(&self, world: &World) -> Outcome {
        let mut found: Vec<PathBuf> = world.snapshot().names.into_keys().collect();
        found.retain(|path| path != Path::new(OTHER));
        if found != [self.new_path()] {
            Err(format!("after the move these files are there: {found:?}"))
        } else {
            Ok(())
        }
    }
}

/// A file in the folder of the new disk: a [`World`] has no empty folders.
pub(crate) const OTHER: &str = "/e/other";

/// Makes the folder of the new disk.
pub(crate) fn make_folder(world: &World) -> Outcome {
    let options = OpenOptions { create_new: true, writable: true, lock: LockMode::None, ..OpenOptions::default() };
    world.open(OTHER.as_ref(), &options).map(drop).map_err(|error| error.to_string())
}

impl Case for MoveCase {
    type Truth = Ended;

    fn name(&self) -> String {
        format!("move {} to {}", self.kind.name, self.to)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        make_folder(world)?;
        self.kind.make(world)?;
        self.kind.fill_half(world)
    }

    fn run(&self, stage: &Stage<Ended>, _seed: u64) -> Outcome {
        run_command(stage, |world| self.carry_out(world))
    }

    fn judge(&self, world: &World, truth: &Ended, _seed: u64, depth: Depth) -> Outcome<u64> {
        self.judge_all(world).map_err(|error| format!("after the cut: {error}"))?;
        if *truth == Ended::Well {
            self.judge_end(world)?;
        }
        if depth.resume && world.facts(&self.kind.path()).is_ok() {
            self.carry_out(world).map_err(|error| format!("the same move again: {error}"))?;
            self.judge_all(world).map_err(|error| format!("after the same move again: {error}"))?;
            self.judge_end(world).map_err(|error| format!("after the same move again: {error}"))?;
        }
        Ok(0)
    }

    fn is_touched_by(&self, mutation: Mutation) -> bool {
        matches!(
            mutation,
            Mutation::NoDirectorySync | Mutation::Disordered(Phase::Command) | Mutation::NotDurable(Phase::Command)
        )
    }
}

impl FaultyCase for MoveCase {
    fn run_on(&self, stage: &Stage<Ended>, reported: &mut Reported) -> Outcome {
        run_faulty_command(stage, reported, |world| self.carry_out(world));
        Ok(())
    }

    /// What an open reads first is in two places.
    fn has_fallback(&self, op_kind: OpKind) -> bool {
        op_kind == OpKind::Read
    }
}

/// The moves that are tested.
pub fn moves() -> Vec<MoveCase> {
    let of = |name: &str, to| MoveCase { kind: crate::disk::named(name), to };
    vec![
        of("vhd dynamic 16K", Format::Vhdx),
        of("vhdx dynamic 1M", Format::Qcow2),
        of("qcow2 64K", Format::Vmdk),
        of("vmdk sparse 8K", Format::Vhd),
        of("vmdk flat", Format::Vhdx),
    ]
}
