//! Other sizes as cases: a disk with a GPT becomes as small as it can be, gets its old size back,
//! and its last partition reaches the new end.
//!
//! ```text
//!   GPT │ partition 1 │ partition 2 ... half of the disk │ nothing, with stale data in it │ GPT
//! ```
//!
//! At every instant the disk has the old size or the new one, both partitions hold their data, and
//! one copy of the table is whole. The same commands finish what a cut has left: then both copies
//! are whole, and what came back reads as zeros.

use crate::{
    disk::DiskCase,
    fault::OpKind,
    faulty::{FaultyCase, Reported},
    mutation::{Mutation, Phase},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{Disk, NewSize, OpenOptions, ResizeOptions, layout, resize};
use diskwright_image::DiskType;
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{path::Path, sync::Arc};

const MARK_BYTES: usize = 4096;
const ENTRIES: usize = 128;
const ENTRY_BYTES: usize = 128;
const FIRST_BYTES: u64 = 64 << 10;
const SECOND_BYTES: u64 = 128 << 10;

/// Resizes a disk of a kind.
#[derive(Debug, Clone)]
pub struct ResizeCase {
    /// The kind of the disk.
    pub disk: DiskCase,
    /// Whether the disk also gets its old size back. A child may not if its parent is larger.
    pub grows: bool,
}

/// The sizes that the disk may have.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// The durable size in bytes.
    durable_bytes: u64,
    /// The size in bytes that the disk may have already.
    next_bytes: u64,
    /// Whether the disk is being made smaller, or was not made larger since.
    shrinks: bool,
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl ResizeCase {
    fn sector_bytes(&self) -> u64 {
        self.disk.sector_bytes.into()
    }

    fn array_sectors(&self) -> u64 {
        (ENTRIES * ENTRY_BYTES) as u64 / self.sector_bytes()
    }

    /// The smallest size of the disk.
    pub(crate) fn min_bytes(&self) -> u64 {
        self.disk.size_bytes / 2 + (self.array_sectors() + 1) * self.sector_bytes()
    }

    /// Offsets of data: in the partitions, and behind them.
    fn marks(&self) -> ([u64; 3], u64) {
        ([FIRST_BYTES, SECOND_BYTES, self.disk.size_bytes / 2 - MARK_BYTES as u64], self.disk.size_bytes / 4 * 3)
    }

    fn open(&self, world: &World, path: &Path, writable: bool) -> Outcome<(Arc<Disk>, Blocking)> {
        let disk = Disk::open(path, &self.disk.open_options(world, writable)).map_err(text)?;
        let io = Blocking::open(&*disk, EngineKind::Sync).map_err(text)?;
        Ok((disk, io))
    }

    /// Makes the table and the data.
    pub(crate) fn fill(&self, world: &World) -> Outcome {
        let (disk, mut io) = self.open(world, &self.disk.path(), true)?;
        let sector_bytes = self.sector_bytes();
        let last_lba = self.disk.size_bytes / sector_bytes - 1;
        let mut mbr = vec![0; sector_bytes as usize];
        mbr[450] = 0xee;
        mbr[454] = 1;
        mbr[458..462].copy_from_slice(&(last_lba as u32).to_le_bytes());
        mbr[510..512].copy_from_slice(&[0x55, 0xaa]);
        io.write(0, &mbr, false).map_err(text)?;
        let mut array = vec![0; ENTRIES * ENTRY_BYTES];
        let ends = [(FIRST_BYTES, SECOND_BYTES), (SECOND_BYTES, self.disk.size_bytes / 2)];
        for (entry, (start, end)) in array.chunks_mut(ENTRY_BYTES).zip(ends) {
            entry[..32].fill(7);
            entry[32..40].copy_from_slice(&(start / sector_bytes).to_le_bytes());
            entry[40..48].copy_from_slice(&(end / sector_bytes - 1).to_le_bytes());
        }
        let second_array = last_lba - self.array_sectors();
        for (my_lba, other_lba, array_lba) in [(1, last_lba, 2), (last_lba, 1, second_array)] {
            let mut header = vec![0; sector_bytes as usize];
            header[..16].copy_from_slice(b"EFI PART\0\0\x01\0\x5c\0\0\0");
            let fields = [(24, my_lba), (32, other_lba), (40, 2 + self.array_sectors()), (48, second_array - 1)];
            for (at, value) in fields.into_iter().chain([(72, array_lba)]) {
                header[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            header[80..84].copy_from_slice(&(ENTRIES as u32).to_le_bytes());
            header[84..88].copy_from_slice(&(ENTRY_BYTES as u32).to_le_bytes());
            header[88..92].copy_from_slice(&crc32fast::hash(&array).to_le_bytes());
            let crc = crc32fast::hash(&header[..92]);
            header[16..20].copy_from_slice(&crc.to_le_bytes());
            io.write(my_lba * sector_bytes, &header, false).map_err(text)?;
            io.write(array_lba * sector_bytes, &array, false).map_err(text)?;
        }
        let (marks, stale) = self.marks();
        for (at, byte) in marks.into_iter().chain([stale]).zip(1..) {
            io.write(at, &[byte; MARK_BYTES], false).map_err(text)?;
        }
        drop(io);
        disk.close().map_err(text)
    }

    fn resize(&self, world: &World, size: NewSize, grow_partition: Option<u32>) -> Outcome<u64> {
        let open = OpenOptions { engine: EngineKind::Sync, ..self.disk.open_options(world, true) };
        let options = ResizeOptions { size, grow_partition, open, dry_run: false };
        let resized = resize(self.disk.path(), &options, &mut |_, _| true).map_err(text)?;
        Ok(resized.new_bytes)
    }

    /// All changes. `record` is told the sizes before and after each.
    fn carry_out(&self, world: &World, record: &mut dyn FnMut(Sizes)) -> Outcome {
        let (full, least) = (self.disk.size_bytes, self.min_bytes());
        let mut change = |from, to, size, partition| {
            let shrinks = to < full;
            record(Sizes { durable_bytes: from, next_bytes: to, shrinks });
            self.resize(world, size, partition)?;
            record(Sizes { durable_bytes: to, next_bytes: to, shrinks });
            Outcome::Ok(())
        };
        change(full, least, NewSize::Minimum, None)?;
        if self.grows {
            change(least, full, NewSize::Bytes(full), None)?;
            change(full, full, NewSize::Present, Some(2))?;
        }
        Ok(())
    }

    /// Whether the copy of the table whose header is in this sector is whole.
    fn is_whole(&self, io: &mut Blocking, lba: u64) -> Outcome<bool> {
        let mut sector = vec![0; self.sector_bytes() as usize];
        io.read(lba * self.sector_bytes(), &mut sector).map_err(text)?;
        let number = |at: usize| u64::from_le_bytes(sector[at..at + 8].try_into().unwrap_or_default());
        let crc = |at: usize| u32::from_le_bytes(sector[at..at + 4].try_into().unwrap_or_default());
        let mut header = sector[..92].to_vec();
        header[16..20].fill(0);
        if sector[..8] != *b"EFI PART" || crc32fast::hash(&header) != crc(16) || number(24) != lba {
            return Ok(false);
        }
        let mut array = vec![0; ENTRIES * ENTRY_BYTES];
        io.read(number(72) * self.sector_bytes(), &mut array).map_err(text)?;
        Ok(crc32fast::hash(&array) == crc(88))
    }

    /// Judges what the files show. Returns the size of the disk.
    fn look(&self, world: &World, path: &Path) -> Outcome<u64> {
        self.disk.check(world, path)?;
        let (disk, mut io) = self.open(world, path, false)?;
        let size_bytes = disk.geometry().size_bytes;
        let mut found = [0; MARK_BYTES];
        for (at, byte) in self.marks().0.into_iter().zip(1..) {
            io.read(at, &mut found).map_err(text)?;
            if found != [byte; MARK_BYTES] {
                return Err(format!("byte {at} of a partition has changed to {}", found[0]));
            }
        }
        let last_lba = size_bytes / self.sector_bytes() - 1;
        if !self.is_whole(&mut io, 1)? && !self.is_whole(&mut io, last_lba)? {
            return Err("no copy of the table is whole".into());
        }
        Ok(size_bytes)
    }

    /// Judges a disk on which all is done that was asked for.
    pub(crate) fn look_finished(&self, world: &World, size_bytes: u64) -> Outcome {
        self.look_finished_at(world, &self.disk.path(), size_bytes)
    }

    /// The same of a copy at `path`.
    pub(crate) fn look_finished_at(&self, world: &World, path: &Path, size_bytes: u64) -> Outcome {
        if self.look(world, path)? != size_bytes {
            return Err(format!("the disk has not {size_bytes} bytes"));
        }
        let (disk, mut io) = self.open(world, path, false)?;
        let last_lba = size_bytes / self.sector_bytes() - 1;
        if !self.is_whole(&mut io, 1)? || !self.is_whole(&mut io, last_lba)? {
            return Err("a copy of the table is not whole".into());
        }
        let found = layout(&*disk, EngineKind::Sync).map_err(text)?;
        if let Some(problem) = found.problem {
            return Err(problem.to_string());
        }
        Ok(())
    }

    fn finish(&self, world: &World, shrinks: bool) -> Outcome {
        let (full, least) = (self.disk.size_bytes, self.min_bytes());
        if shrinks {
            self.resize(world, NewSize::Minimum, None)?;
            self.look_finished(world, least)?;
        }
        if !self.grows {
            return Ok(());
        }
        self.resize(world, NewSize::Bytes(full), Some(2))?;
        self.look_finished(world, full)?;
        let (_disk, mut io) = self.open(world, &self.disk.path(), false)?;
        let mut found = [1; MARK_BYTES];
        io.read(self.marks().1, &mut found).map_err(text)?;
        if found != [0; MARK_BYTES] {
            return Err(format!("what came back reads as {}, not as zeros", found[0]));
        }
        Ok(())
    }
}

impl Case for ResizeCase {
    type Truth = Sizes;

    fn name(&self) -> String {
        format!("resize {}", self.disk.name)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.disk.make(world)?;
        self.fill(world)
    }

    fn run(&self, stage: &Stage<Sizes>, _seed: u64) -> Outcome {
        stage.world.phase(Some(Phase::Command));
        self.carry_out(&stage.world, &mut |sizes| stage.record(sizes))?;
        stage.world.phase(None);
        Ok(())
    }

    fn judge(&self, world: &World, truth: &Sizes, _seed: u64, depth: Depth) -> Outcome<u64> {
        let size_bytes = self.look(world, &self.disk.path()).map_err(|error| format!("after the cut: {error}"))?;
        if size_bytes != truth.durable_bytes && size_bytes != truth.next_bytes {
            return Err(format!("the disk has {size_bytes} bytes, expected {truth:?}"));
        }
        if depth.resume {
            self.finish(world, truth.shrinks).map_err(|error| format!("the same commands again: {error}"))?;
        }
        Ok(0)
    }

    fn is_touched_by(&self, mutation: Mutation) -> bool {
        matches!(mutation, Mutation::NotDurable(Phase::Command) | Mutation::Disordered(Phase::Command))
    }
}

impl FaultyCase for ResizeCase {
    fn run_on(&self, stage: &Stage<Sizes>, reported: &mut Reported) -> Outcome {
        stage.world.phase(Some(Phase::Command));
        let result = self.carry_out(&stage.world, &mut |sizes| stage.record(sizes));
        reported.errors.extend(result.err());
        Ok(())
    }

    /// Both formats keep what an open reads first in two places, and a partition table that cannot
    /// be read does not keep a disk from growing.
    fn has_fallback(&self, op_kind: OpKind) -> bool {
        op_kind == OpKind::Read
    }
}

/// The resizes that are tested.
pub fn resizes() -> Vec<ResizeCase> {
    let kinds = [
        "raw",
        "vhd fixed",
        "vhd dynamic 16K",
        "vhd differencing 16K",
        "vhdx fixed 1M",
        "vhdx dynamic 1M",
        "vhdx differencing 1M",
        "vhdx dynamic 2M, 4K sectors",
        "qcow2 512",
        "qcow2 child 8K",
        "vdi dynamic 8K",
        "vdi fixed 1M",
        "vmdk sparse 8K",
        "vmdk cowd 512",
        "vmdk flat",
    ];
    let case = |name| {
        let disk = crate::disk::named(name);
        let grows = disk.disk_type != DiskType::Differencing;
        ResizeCase { disk, grows }
    };
    kinds.into_iter().map(case).collect()
}
