//! Repairing a disk as a case: one copy of a structure is destroyed, a block without data has an
//! entry that leads beyond the end of the file, and space has leaked. At every instant everything
//! that could be read can be read, the undo gives back every byte of the damaged file, and another
//! repair ends with a sound disk.

use crate::{
    disk::DiskCase,
    fault::OpKind,
    faulty::{FaultyCase, Reported},
    mutation::{Mutation, Phase},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{RepairOptions, Repaired, repair, undo_repair};
use diskwright_image::{Format, Severity};
use diskwright_store::{FileSystem, OpenOptions, Store};
use std::{path::PathBuf, sync::Arc};

const MIB: u64 = 1 << 20;

/// Repairs a disk of a kind.
#[derive(Debug, Clone)]
pub struct RepairCase(pub DiskCase);

/// What the judge knows.
#[derive(Debug, Clone)]
pub struct RepairTruth {
    /// Whether the repair has succeeded.
    is_done: bool,
    /// The bytes of the damaged file.
    damaged: Arc<Vec<u8>>,
}

fn text_of(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl RepairCase {
    fn file(&self, world: &World, writable: bool) -> Outcome<Arc<dyn Store>> {
        world.open(&self.0.path(), &OpenOptions { writable, ..OpenOptions::default() }).map_err(text_of)
    }

    /// The bytes of the file, without an operation that can fail.
    fn bytes(&self, world: &World) -> Outcome<Vec<u8>> {
        let snapshot = world.snapshot();
        let contents = snapshot.file(&self.0.path()).ok_or("the file is missing")?;
        let mut bytes = vec![0; contents.len_bytes() as usize];
        contents.read(&mut bytes, 0);
        Ok(bytes)
    }

    /// Index of a block that holds nothing and is not watched.
    fn empty_block(&self) -> u64 {
        let block_sectors = u64::from(self.0.block_bytes.unwrap_or(0)) / 512;
        let is_watched = |block: &u64| self.0.windows.iter().any(|window| window.first / block_sectors == *block);
        (0..).find(|block| !is_watched(block)).unwrap_or(0)
    }

    fn damage(&self, world: &World) -> Outcome {
        let bytes = self.bytes(world)?;
        let file = self.file(world, true)?;
        let write = |bytes: &[u8], at: u64| file.write_at(bytes, at).map_err(text_of);
        match self.0.format {
            Format::Vhd => {
                let field = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
                let table = field(field(16) as usize + 16);
                let end = bytes.len() as u64 - 512;
                // Space between the last block and the footer, which moves to the new end.
                let mut tail = vec![0x5a; 64 << 10];
                tail.extend_from_slice(&bytes[end as usize..]);
                write(&tail, end)?;
                write(&[0xaa; 512], 0)?;
                write(&0x0fff_0000_u32.to_be_bytes(), table + 4 * self.empty_block())?;
            }
            _ => {
                write(&[0xaa; 64], (128 << 10) + 100)?;
                write(&[0xaa; 64], (192 << 10) + 100)?;
                write(&(1_u64 << 40 | 6).to_le_bytes(), 3 * MIB + 8 * self.empty_block())?;
                write(&vec![0x5a; 2 * MIB as usize], (bytes.len() as u64).next_multiple_of(MIB))?;
            }
        }
        file.sync_data().map_err(text_of)
    }

    fn options(&self, world: &World) -> RepairOptions {
        RepairOptions { open: self.0.open_options(world, false), accept_loss: true, ..RepairOptions::default() }
    }

    fn repair(&self, world: &World) -> Outcome<Repaired> {
        repair(self.0.path(), &self.options(world), &mut |_, _| true).map_err(text_of)
    }

    fn carry_out(&self, world: &World) -> Outcome {
        world.phase(Some(Phase::Command));
        self.repair(world)?;
        world.phase(None);
        Ok(())
    }

    /// Everything that the damaged disk shows.
    fn reads(&self, world: &World) -> Outcome {
        let shown = self.0.read_at(world, &self.0.path())?;
        self.0.half_full_ledger().judge(&shown, false).map(drop)
    }

    fn undo_file(&self) -> PathBuf {
        let mut name = self.0.path().into_os_string();
        name.push(".undo");
        name.into()
    }

    fn truth(&self, world: &World, is_done: bool, damaged: Option<&RepairTruth>) -> Outcome<RepairTruth> {
        let damaged = match damaged {
            Some(truth) => Arc::clone(&truth.damaged),
            None => Arc::new(self.bytes(world)?),
        };
        Ok(RepairTruth { is_done, damaged })
    }
}

impl Case for RepairCase {
    type Truth = RepairTruth;

    fn name(&self) -> String {
        format!("repair {}", self.0.name)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.0.make(world)?;
        self.0.fill_half(world)?;
        self.damage(world)
    }

    fn run(&self, stage: &Stage<RepairTruth>, _seed: u64) -> Outcome {
        let before = self.truth(&stage.world, false, None)?;
        stage.record(before.clone());
        self.carry_out(&stage.world)?;
        stage.record(self.truth(&stage.world, true, Some(&before))?);
        Ok(())
    }

    fn judge(&self, world: &World, truth: &RepairTruth, seed: u64, depth: Depth) -> Outcome<u64> {
        self.reads(world).map_err(|error| format!("after the cut: {error}"))?;
        let can_be_undone = world.facts(&self.undo_file()).is_ok();
        if truth.is_done {
            self.0.check(world, &self.0.path())?;
            if !can_be_undone {
                return Err("a repair without an undo file".into());
            }
        }
        if !can_be_undone && self.bytes(world)? != *truth.damaged {
            return Err("the file was changed without an undo file".into());
        }
        let undoes = can_be_undone && (seed + u64::from(depth.resume)).is_multiple_of(2);
        if undoes {
            // An undo file that was never complete may have no head.
            let undone = undo_repair(self.0.path(), &self.options(world)).map_err(text_of);
            if truth.is_done || undone.is_ok() {
                undone?;
            }
            if self.bytes(world)? != *truth.damaged {
                return Err("the undo has not given back the damaged file".into());
            }
        }
        if !truth.is_done || undoes {
            let done = self.repair(world).map_err(|error| format!("repairing again: {error}"))?;
            if done.after.worst() >= Some(Severity::Leak) {
                return Err(format!("repairing again leaves {:?}", done.after.findings));
            }
        }
        self.0.check(world, &self.0.path()).map_err(|error| format!("after repairing again: {error}"))?;
        self.reads(world).map_err(|error| format!("after repairing again: {error}"))?;
        Ok(0)
    }

    fn is_touched_by(&self, mutation: Mutation) -> bool {
        mutation == Mutation::Disordered(Phase::Command)
    }
}

impl FaultyCase for RepairCase {
    fn run_on(&self, stage: &Stage<RepairTruth>, reported: &mut Reported) -> Outcome {
        let before = self.truth(&stage.world, false, None)?;
        stage.record(before.clone());
        match self.carry_out(&stage.world) {
            Ok(()) => stage.record(self.truth(&stage.world, true, Some(&before))?),
            Err(error) => reported.errors.push(error),
        }
        Ok(())
    }

    /// Whether an undo file exists is asked in several ways.
    fn has_fallback(&self, op_kind: OpKind) -> bool {
        op_kind == OpKind::Read
    }
}

/// The disks that are repaired.
pub fn repairs() -> Vec<RepairCase> {
    let kinds = ["vhd dynamic 16K", "vhd differencing 16K", "vhdx dynamic 1M", "vhdx differencing 1M"];
    kinds.into_iter().map(|name| RepairCase(crate::disk::named(name))).collect()
}
