//! The place of each block of a damaged image, or why it is lost.

use crate::{ImageError, Result};
use diskwright_store::Store;
use std::{collections::BTreeMap, fmt, ops::Range};

/// Most blocks with space, and most runs of lost blocks, that are recorded: 8 TiB of payload in
/// blocks of 2 MiB.
pub const HELD_MAX: usize = 4 << 20;

/// What is known of a block that is neither absent nor lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SalvagedBlock {
    /// Reads as zeros, and hides the parent.
    Zero,
    /// The whole payload is at this offset of the file.
    Data(u64),
    /// The payload is at this offset; a sector bitmap says which sectors are in it.
    Partial(u64),
    /// The whole payload is in this range of the file, compressed ([`super::Unpack`]).
    Packed {
        /// Offset of the compressed data, with what stands before them.
        offset_bytes: u64,
        /// Their length in bytes. The last ones may belong to the data behind them.
        len_bytes: u64,
    },
}

impl SalvagedBlock {
    /// Offset of the payload in the file, if it lies there as it is on the disk.
    pub fn offset_bytes(self) -> Option<u64> {
        match self {
            Self::Zero | Self::Packed { .. } => None,
            Self::Data(offset_bytes) | Self::Partial(offset_bytes) => Some(offset_bytes),
        }
    }

    /// The range of the file that the payload occupies, `lead_bytes` before it included.
    pub(super) fn space(self, lead_bytes: u64, block_bytes: u64) -> Option<Range<u64>> {
        match self {
            Self::Zero => None,
            Self::Data(at) | Self::Partial(at) => Some(at.saturating_sub(lead_bytes)..at.saturating_add(block_bytes)),
            Self::Packed { offset_bytes, len_bytes } => Some(offset_bytes..offset_bytes.saturating_add(len_bytes)),
        }
    }
}

/// Why a block is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// The entry itself could not be read.
    Unreadable,
    /// The table that held the entry was not found.
    NoTable,
    /// The block lies beyond the end of the file.
    BeyondEnd,
    /// The entry points into a table of the file.
    InTables,
    /// Another entry points to the same space.
    Claimed,
    /// Two copies of the table name different places.
    Differs,
    /// The data at the place of the entry state that they are another block.
    Foreign,
    /// The entry has an undefined state, or bits that must be zero.
    Undefined,
    /// The entry says that the block has no space, but entries have been wiped or are out of date.
    Doubted,
    /// The parent of a differencing disk cannot be read.
    NoParent,
    /// Whether the disk has a parent is not known.
    MaybeParents,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unreadable => "the table entry cannot be read",
            Self::NoTable => "the block allocation table was not found",
            Self::BeyondEnd => "the block lies beyond the end of the file",
            Self::InTables => "the table entry points into the file's own tables",
            Self::Claimed => "two table entries point to the same space",
            Self::Differs => "the two copies of the table name different places",
            Self::Foreign => "the data at the entry's place are not those of the block",
            Self::Undefined => "the table entry has an undefined value",
            Self::Doubted => {
                "the table entry says that the block has no data, but the file has data that no entry names"
            }
            Self::NoParent => "the data are the parent's, which cannot be read",
            Self::MaybeParents => "the data may be a parent's: the records of whether the disk has a parent are lost",
        })
    }
}

/// The blocks of a disk.
#[derive(Debug, Clone)]
pub struct BlockTable {
    count: u64,
    /// A file without a table: its blocks follow each other up to this length.
    linear_bytes: Option<u64>,
    block_bytes: u64,
    held: BTreeMap<u64, SalvagedBlock>,
    /// First block of a run to the block after it, and why.
    lost: BTreeMap<u64, (u64, Fault)>,
    doubted: Option<Fault>,
}

impl BlockTable {
    /// A table of `count` blocks that are all absent.
    pub fn new(count: u64, block_bytes: u64) -> Self {
        Self { count, linear_bytes: None, block_bytes, held: BTreeMap::new(), lost: BTreeMap::new(), doubted: None }
    }

    /// The blocks of a file without a table: one after the other. The file has `file_bytes`.
    pub fn linear(count: u64, block_bytes: u64, file_bytes: u64) -> Self {
        Self { linear_bytes: Some(file_bytes), ..Self::new(count, block_bytes) }
    }

    /// Whether blocks follow each other without a table.
    pub fn is_linear(&self) -> bool {
        self.linear_bytes.is_some()
    }

    /// Number of blocks of the disk.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// What is recorded of a block; `Err` if it is lost, `Ok(None)` if it is absent.
    pub fn get(&self, block: u64) -> Result<Option<SalvagedBlock>, Fault> {
        if block >= self.count {
            return Ok(None);
        }
        if let Some(file_bytes) = self.linear_bytes {
            let offset_bytes = block * self.block_bytes;
            return if offset_bytes < file_bytes {
                Ok(Some(SalvagedBlock::Data(offset_bytes)))
            } else {
                Err(Fault::BeyondEnd)
            };
        }
        if let Some(&held) = self.held.get(&block) {
            return Ok(Some(held));
        }
        match self.lost.range(..=block).next_back() {
            Some((_, &(end, fault))) if block < end => Err(fault),
            _ => self.doubted.map_or(Ok(None), Err),
        }
    }

    /// If this block is lost: the block after the run of lost ones, and why.
    pub fn lost_run(&self, block: u64) -> Option<(u64, Fault)> {
        if self.is_linear() || block >= self.count || self.held.contains_key(&block) {
            return None;
        }
        if let Some((_, &(end, fault))) = self.lost.range(..=block).next_back()
            && block < end
        {
            return Some((end, fault));
        }
        let fault = self.doubted?;
        let held = self.held.range(block..).next().map(|(&block, _)| block);
        let lost = self.lost.range(block..).next().map(|(&block, _)| block);
        Some((held.into_iter().chain(lost).min().unwrap_or(self.count), fault))
    }

    /// Takes back [`BlockTable::hold`] for a block that was found by its contents.
    ///
    /// # Errors
    /// As [`BlockTable::lose`].
    pub fn unplace(&mut self, store: &dyn Store, block: u64) -> Result<()> {
        self.lose_held(store, block, Fault::Doubted)
    }

    /// First block at or after `block` that is not absent.
    pub fn next(&self, block: u64) -> Option<u64> {
        if self.linear_bytes.is_some() || self.doubted.is_some() || self.get(block).is_err() {
            return (block < self.count).then_some(block);
        }
        let held = self.held.range(block..).next().map(|(&block, _)| block);
        let lost = self.lost.range(block..).next().map(|(&block, _)| block);
        held.into_iter().chain(lost).min()
    }

    /// The ranges of the file that blocks occupy, `lead_bytes` before their payload included.
    pub(super) fn spaces(&self, lead_bytes: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        self.held.values().filter_map(move |held| held.space(lead_bytes, self.block_bytes))
    }

    /// The ranges of the file that blocks occupy.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.spaces(0)
    }

    /// Offsets of all payload that lies in the file as it is on the disk, by block.
    pub fn places(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.held.iter().filter_map(|(&block, held)| held.offset_bytes().map(|offset_bytes| (block, offset_bytes)))
    }

    /// Runs of lost blocks: first block, block after the run, why.
    pub fn lost(&self) -> impl Iterator<Item = (u64, u64, Fault)> + '_ {
        self.lost.iter().map(|(&start, &(end, fault))| (start, end, fault))
    }

    /// Number of lost blocks. Absent blocks that are doubted do not count.
    pub fn lost_blocks(&self) -> u64 {
        self.lost().map(|(start, end, _)| end - start).sum()
    }

    /// Records a block. It is not lost then.
    ///
    /// # Errors
    /// `Unsupported` for more than [`HELD_MAX`] blocks.
    pub fn hold(&mut self, store: &dyn Store, block: u64, held: SalvagedBlock) -> Result<()> {
        if self.held.len() >= HELD_MAX {
            return Err(too_many(store));
        }
        self.held.insert(block, held);
        let Some((&start, &(end, fault))) = self.lost.range(..=block).next_back().filter(|(_, run)| block < run.0)
        else {
            return Ok(());
        };
        self.lost.remove(&start);
        if start < block {
            self.lost.insert(start, (block, fault));
        }
        if block + 1 < end {
            self.lost.insert(block + 1, (end, fault));
        }
        Ok(())
    }

    /// Records blocks as lost, in ascending order of calls where possible.
    ///
    /// # Errors
    /// `Unsupported` for more than [`HELD_MAX`] runs.
    pub fn lose(&mut self, store: &dyn Store, first: u64, end: u64, fault: Fault) -> Result<()> {
        let end = end.min(self.count);
        if first >= end {
            return Ok(());
        }
        if let Some((_, run)) = self.lost.range_mut(..first).next_back()
            && run.0 == first
            && run.1 == fault
        {
            run.0 = end;
            return Ok(());
        }
        if self.lost.len() >= HELD_MAX {
            return Err(too_many(store));
        }
        self.lost.insert(first, (end, fault));
        Ok(())
    }

    /// Takes the record of blocks whose space another block claims too.
    pub(crate) fn lose_held(&mut self, store: &dyn Store, block: u64, fault: Fault) -> Result<()> {
        self.held.remove(&block);
        self.lose(store, block, block + 1, fault)
    }

    /// Absent blocks count as lost from now on.
    pub fn doubt_absent(&mut self, fault: Fault) {
        self.doubted = Some(fault);
    }
}

fn too_many(store: &dyn Store) -> ImageError {
    ImageError::Unsupported {
        path: store.name().to_owned(),
        what: format!("rescuing a table with more than {HELD_MAX} blocks"),
        hint: "if its tables are sound, copy it with `ConvertOptions::skip_damaged`".into(),
    }
}

/// Ranges without order as sorted ones that do not touch, for [`overlaps_one`].
pub(crate) fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges.into_iter().filter(|range| range.start < range.end) {
        match joined.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => joined.push(range),
        }
    }
    joined
}

/// Whether a range shares bytes with one of `ranges`, which are sorted and do not touch.
pub(crate) fn overlaps_one(ranges: &[Range<u64>], range: &Range<u64>) -> bool {
    let from = ranges.partition_point(|one| one.end <= range.start);
    ranges.get(from).is_some_and(|one| one.start < range.end)
}

/// Blocks whose space overlaps that of another one: each block with the fault. `pieces` are block,
/// start and end in the file.
pub(crate) fn overlapping(pieces: &mut [(u64, u64, u64)]) -> Vec<u64> {
    pieces.sort_unstable_by_key(|&(_, start, _)| start);
    let mut found = Vec::new();
    let mut reaching: Option<(u64, u64)> = None;
    for &(block, start, end) in pieces.iter() {
        if let Some((other, other_end)) = reaching
            && start < other_end
        {
            found.push(other);
            found.push(block);
        }
        if reaching.is_none_or(|(_, other_end)| end > other_end) {
            reaching = Some((block, end));
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}
