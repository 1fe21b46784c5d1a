//! Compacting a disk as a case: blocks of zeros are given back and other blocks move down. At every
//! instant the disk reads as before. When the command has succeeded, also after it was run again,
//! the file has its smallest length.

use crate::{
    command::Ended,
    disk::DiskCase,
    fault::OpKind,
    faulty::{FaultyCase, Reported},
    mutation::{Mutation, Phase},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{CompactOptions, Compacted, Disk, compact};
use diskwright_image::BlockState;
use diskwright_store::{Blocking, EngineKind};

/// Compacts a disk of a kind: half of its blocks hold zeros, and lie before the others.
#[derive(Debug, Clone)]
pub struct CompactCase(pub DiskCase);

impl CompactCase {
    /// The blocks of zeros: as many as there are windows, and none of them in a window.
    fn zero_blocks(&self) -> Vec<u64> {
        let block_sectors = u64::from(self.0.block_bytes.unwrap_or(0)) / 512;
        let is_watched = |block: &u64| self.0.windows.iter().any(|window| window.first / block_sectors == *block);
        (0..).filter(|block| !is_watched(block)).take(self.0.windows.len()).collect()
    }

    fn compact(&self, world: &World) -> Outcome<Compacted> {
        let open = self.0.open_options(world, false);
        let options = CompactOptions { open, ..CompactOptions::default() };
        compact(self.0.path(), &options, &mut |_, _| true).map_err(|error| error.to_string())
    }

    /// Whether the file has its smallest length. If not, says which length it has.
    fn is_small(&self, world: &World) -> Outcome {
        let disk = Disk::open(self.0.path(), &self.0.open_options(world, false)).map_err(|error| error.to_string())?;
        let layers = disk.layers();
        let image = &layers[0].image;
        let mut states = vec![BlockState::Absent; (self.0.size_bytes / image.info().block_bytes + 1) as usize];
        image.block_states(0, &mut states).map_err(|error| error.to_string())?;
        let is_placed = |state: &&BlockState| matches!(state, BlockState::Data { .. } | BlockState::Partial { .. });
        let blocks = states.iter().filter(is_placed).count() as u64;
        let found = layers[0].files_len_bytes().map_err(|error| error.to_string())?;
        let smallest = image.packed_len_bytes(blocks).map_err(|error| error.to_string())?;
        if Some(found) != smallest || blocks > self.0.windows.len() as u64 {
            return Err(format!("the file has {found} bytes with {blocks} blocks, and {smallest:?} are enough"));
        }
        Ok(())
    }

    fn carry_out(&self, world: &World) -> Outcome {
        world.phase(Some(Phase::Command));
        self.compact(world)?;
        world.phase(None);
        Ok(())
    }
}

impl Case for CompactCase {
    type Truth = Ended;

    fn name(&self) -> String {
        format!("compact {}", self.0.name)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.0.make(world)?;
        let failed = |error: diskwright_disk::DiskError| error.to_string();
        let disk = Disk::open(self.0.path(), &self.0.open_options(world, true)).map_err(failed)?;
        let block_bytes = u64::from(self.0.block_bytes.unwrap_or(0));
        let mut io = Blocking::open(&*disk, EngineKind::Sync).map_err(|error| error.to_string())?;
        for block in self.zero_blocks() {
            let zeros = vec![0; block_bytes as usize];
            io.write(block * block_bytes, &zeros, false).map_err(|error| error.to_string())?;
        }
        drop(io);
        disk.close().map_err(failed)?;
        drop(disk);
        self.0.fill_half(world)
    }

    fn run(&self, stage: &Stage<Ended>, _seed: u64) -> Outcome {
        stage.record(Ended::No);
        self.carry_out(&stage.world)?;
        stage.record(Ended::Well);
        Ok(())
    }

    fn judge(&self, world: &World, truth: &Ended, _seed: u64, depth: Depth) -> Outcome<u64> {
        let same = |when: &str| -> Outcome {
            let told = |error: String| format!("{when}: {error}");
            self.0.check(world, &self.0.path()).map_err(told)?;
            let shown = self.0.read_at(world, &self.0.path()).map_err(told)?;
            self.0.half_full_ledger().judge(&shown, false).map(drop).map_err(told)
        };
        same("after the cut")?;
        if *truth == Ended::Well {
            self.is_small(world)?;
        }
        if depth.resume {
            self.compact(world).map_err(|error| format!("compacting again: {error}"))?;
            same("after compacting again")?;
            self.is_small(world).map_err(|error| format!("after compacting again: {error}"))?;
        }
        Ok(0)
    }

    fn is_touched_by(&self, mutation: Mutation) -> bool {
        mutation == Mutation::Disordered(Phase::Command)
    }
}

impl FaultyCase for CompactCase {
    fn run_on(&self, stage: &Stage<Ended>, reported: &mut Reported) -> Outcome {
        stage.record(Ended::No);
        match self.carry_out(&stage.world) {
            Ok(()) => stage.record(Ended::Well),
            Err(error) => reported.errors.push(error),
        }
        Ok(())
    }

    /// A file that cannot be cut or punched is longer than it could be. What an open reads first is
    /// kept in two places.
    fn has_fallback(&self, op_kind: OpKind) -> bool {
        op_kind == OpKind::Read
    }
}

/// The disks that are compacted.
pub fn compactions() -> Vec<CompactCase> {
    let kinds = [
        "vhd dynamic 16K",
        "vhd differencing 16K",
        "vhdx dynamic 1M",
        "vhdx differencing 1M",
        "vhd dynamic 512K",
        "vmdk sparse 8K",
        "qcow2 64K",
        "qcow2 child 8K",
        "vdi child 64K",
    ];
    kinds.into_iter().map(|name| CompactCase(crate::disk::named(name))).collect()
}
