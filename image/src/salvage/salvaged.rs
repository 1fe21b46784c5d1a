//! What was found of an image: description, places of blocks, bitmaps, and the space between.

use super::{
    reading::read_what_can_be,
    table::{BlockTable, SalvagedBlock},
};
use crate::{DiskType, ImageInfo, SectorBitmap};
use diskwright_format::vhdx::BatGeometry;
use diskwright_store::Store;
use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// Most bytes of compressed data that are read for one block.
const PACKED_MAX_BYTES: u64 = 128 << 20;

/// Facts from the user, for structures that are lost. A fact from the file goes first.
#[derive(Debug, Clone, Copy, Default)]
pub struct SalvageHints {
    /// Virtual size in bytes.
    pub size_bytes: Option<u64>,
    /// Size of a payload block in bytes.
    pub block_bytes: Option<u32>,
    /// Whether it is a differencing image.
    pub is_child: Option<bool>,
}

/// Whether an image has a parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParentRecord {
    /// The image has no parent.
    Alone,
    /// It is a differencing image.
    Child,
    /// All records of it are lost. The image is read like a differencing one without its parent.
    Unknown,
}

impl ParentRecord {
    /// What is known without any record of the file.
    pub(crate) fn by_hints(hints: &SalvageHints) -> Self {
        match hints.is_child {
            Some(true) => Self::Child,
            Some(false) => Self::Alone,
            None => Self::Unknown,
        }
    }

    /// The type of the salvaged image.
    pub(crate) fn disk_type(self) -> DiskType {
        if self.may_have_parent() { DiskType::Differencing } else { DiskType::Dynamic }
    }

    /// Whether blocks without data may be those of a parent.
    pub fn may_have_parent(self) -> bool {
        self != Self::Alone
    }
}

/// Where the sector bitmaps of an image are.
#[derive(Debug, Clone)]
pub enum Bitmaps {
    /// No block has a bitmap.
    None,
    /// VHD: before the payload of each block.
    BeforePayload {
        /// Length of a bitmap in the file in bytes.
        len_bytes: u64,
    },
    /// VHDX with a parent: one bitmap block for each chunk.
    Chunks {
        /// The arithmetic of chunks.
        geometry: BatGeometry,
        /// Offset of a chunk's bitmap block; `None` if its entry is damaged. A chunk that is not
        /// listed has no bitmap block.
        places: BTreeMap<u64, Option<u64>>,
    },
}

/// Decompresses the payload of [`SalvagedBlock::Packed`].
pub trait Unpack: std::fmt::Debug + Send + Sync {
    /// The bytes of a block, at least as many as lie on the disk, from its compressed data.
    ///
    /// # Errors
    /// What was found in place of such data.
    fn unpack(&self, block: u64, packed: &[u8]) -> Result<Vec<u8>, String>;
}

/// What was found of an image.
#[derive(Debug, Clone)]
pub struct Salvaged {
    /// The description, as far as it is known.
    pub info: ImageInfo,
    /// The file, after a replay of its log in memory.
    pub store: Arc<dyn Store>,
    /// Length of the file in bytes. A log that was replayed in memory may make it longer.
    pub file_bytes: u64,
    /// Whether it is a differencing image.
    pub parent_record: ParentRecord,
    /// The place of each block, or why it is lost.
    pub table: BlockTable,
    /// Where the bitmaps are.
    pub bitmaps: Bitmaps,
    /// How compressed blocks are read; `None` if there are none.
    pub unpack: Option<Arc<dyn Unpack>>,
    /// Ranges of the file that hold no payload, sorted.
    pub tables: Vec<Range<u64>>,
    /// Offset of payload in the file: a multiple of this.
    pub payload_alignment_bytes: u64,
    /// Why the entries may be out of date: the log or the table itself was lost.
    pub doubts: Vec<String>,
    /// Whether sector bitmaps may be older than the blocks, so that sectors which they leave to the
    /// parent may be lost.
    pub doubts_bitmaps: bool,
}

impl Salvaged {
    /// Bytes of a block that lie on the disk.
    pub fn bytes_in_disk(&self, block: u64) -> u64 {
        let block_bytes = self.info.block_bytes;
        self.info.size_bytes.saturating_sub(block.saturating_mul(block_bytes)).min(block_bytes)
    }

    /// Bytes of the file that have space: what the time of a search is measured by. Holes and what
    /// a log claims do not count.
    pub fn stored_bytes(&self) -> u64 {
        let allocated_bytes = self.store.allocated_bytes().unwrap_or(self.file_bytes);
        allocated_bytes.min(self.file_bytes)
    }

    /// Bytes before a block's payload that belong to the block.
    pub fn lead_bytes(&self) -> u64 {
        match self.bitmaps {
            Bitmaps::BeforePayload { len_bytes } => len_bytes,
            _ => 0,
        }
    }

    /// The space of the file that neither a table nor a block with a valid entry occupies, in
    /// order. A block that was placed counts like one with a valid entry.
    pub fn gaps(&self) -> Vec<Range<u64>> {
        if self.table.is_linear() {
            return Vec::new();
        }
        let lead_bytes = self.lead_bytes();
        let mut taken = self.tables.clone();
        taken.extend(self.table.spaces(lead_bytes));
        if let Bitmaps::Chunks { places, .. } = &self.bitmaps {
            taken.extend(places.values().flatten().map(|&at| at..at.saturating_add(1 << 20)));
        }
        taken.sort_unstable_by_key(|range| range.start);
        let mut gaps = Vec::new();
        let mut end_bytes = 0;
        for range in taken {
            let start = range.start.min(self.file_bytes);
            if end_bytes < start {
                gaps.push(end_bytes..start);
            }
            end_bytes = end_bytes.max(range.end);
        }
        if end_bytes < self.file_bytes {
            gaps.push(end_bytes..self.file_bytes);
        }
        gaps
    }

    /// Whether a lost entry could have said that some sectors of a block are the parent's, and its
    /// bitmap with it: no bitmap block is known for the chunk of this block of a child.
    pub fn may_have_lost_its_bitmap(&self, block: u64) -> bool {
        match &self.bitmaps {
            Bitmaps::Chunks { geometry, places } => !places.contains_key(&geometry.chunk_of(block)),
            _ => false,
        }
    }

    /// Whether the file of a child has unused space for a block: in a VHDX before its last one, as
    /// its file grows ahead of use. A block that was allocated and holds zeros looks like that when
    /// its entry is wiped. (A VHD's block has a bitmap that is not zero.)
    pub fn has_spare_room(&self) -> bool {
        let end = match self.bitmaps {
            Bitmaps::BeforePayload { .. } => return false,
            Bitmaps::Chunks { .. } => self.table.places().map(|(_, offset_bytes)| offset_bytes).max().unwrap_or(0),
            Bitmaps::None => u64::MAX,
        };
        let alignment = self.payload_alignment_bytes;
        let room = |gap: &Range<u64>| gap.end.saturating_sub(gap.start.next_multiple_of(alignment));
        self.gaps().iter().any(|gap| gap.start < end && room(gap) >= self.info.block_bytes)
    }

    /// How a block that was found at this offset would have to be recorded. `None` if the tables
    /// that are left do not say which of its sectors are the parent's.
    pub fn held_at(&self, block: u64, payload_bytes: u64) -> Option<SalvagedBlock> {
        match &self.bitmaps {
            Bitmaps::None => Some(SalvagedBlock::Data(payload_bytes)),
            Bitmaps::BeforePayload { .. } => Some(SalvagedBlock::Partial(payload_bytes)),
            Bitmaps::Chunks { geometry, places } => match places.get(&geometry.chunk_of(block)) {
                // Without a bitmap block no block of the chunk has sectors of the parent.
                None => Some(SalvagedBlock::Data(payload_bytes)),
                Some(None) => None,
                Some(Some(_)) => {
                    let bitmap = read_bitmap(self, block, payload_bytes).ok()?;
                    // Only then it does not matter whether the lost entry named the bitmap.
                    bitmap.is_full().then_some(SalvagedBlock::Data(payload_bytes))
                }
            },
        }
    }
}

/// The bytes of a compressed block that lie on the disk.
pub(super) fn read_packed(
    salvaged: &Salvaged,
    block: u64,
    offset_bytes: u64,
    len_bytes: u64,
) -> Result<Vec<u8>, String> {
    let Some(unpack) = &salvaged.unpack else { return Err("compressed data".into()) };
    // Damaged entries cannot name more: a block does not grow much by compression.
    let most = salvaged.info.block_bytes.saturating_mul(64).clamp(1 << 20, PACKED_MAX_BYTES);
    let len_bytes = len_bytes.min(salvaged.file_bytes.saturating_sub(offset_bytes)).min(most);
    let mut packed = vec![0; len_bytes as usize];
    if !read_what_can_be(&*salvaged.store, offset_bytes, &mut packed).is_empty() {
        return Err("compressed data that cannot be read".into());
    }
    let bytes = unpack.unpack(block, &packed)?;
    let expected = salvaged.bytes_in_disk(block);
    if (bytes.len() as u64) < expected {
        return Err(format!("{} bytes after decompression", bytes.len()));
    }
    Ok(bytes)
}

/// The sector bitmap of a block whose payload is at `payload_bytes`. Without a parent a bitmap that
/// cannot be read counts as full: sectors that were never written hold zeros.
pub(super) fn read_bitmap(salvaged: &Salvaged, block: u64, payload_bytes: u64) -> Result<SectorBitmap, &'static str> {
    let info = &salvaged.info;
    let sectors = (info.block_bytes / u64::from(info.logical_sector_bytes)) as u32;
    let mut bitmap = SectorBitmap::empty(sectors, info.logical_sector_bytes);
    let (at_bytes, len, reverse) = match &salvaged.bitmaps {
        Bitmaps::None => return Err("its sector bitmap was not found"),
        Bitmaps::BeforePayload { len_bytes } => (payload_bytes - len_bytes, *len_bytes as usize, true),
        Bitmaps::Chunks { geometry, places } => {
            let place = places.get(&geometry.chunk_of(block)).copied().flatten();
            let (within_bytes, len_bytes) = geometry.bitmap_place(block);
            (place.ok_or("its sector bitmap was not found")? + within_bytes, len_bytes as usize, false)
        }
    };
    let mut bytes = vec![0; len];
    if !read_what_can_be(&*salvaged.store, at_bytes, &mut bytes).is_empty() {
        if info.disk_type == DiskType::Differencing {
            return Err("its sector bitmap cannot be read");
        }
        bytes.fill(0xff);
    }
    for (word, chunk) in bitmap.words.iter_mut().zip(bytes.chunks(8)) {
        let mut wide = [0; 8];
        for (to, from) in wide.iter_mut().zip(chunk) {
            *to = if reverse { from.reverse_bits() } else { *from };
        }
        *word = u64::from_le_bytes(wide);
    }
    if let (Some(last), surplus @ 1..) = (bitmap.words.last_mut(), sectors % 64) {
        *last &= (1 << surplus) - 1;
    }
    if salvaged.doubts_bitmaps && !bitmap.is_full() {
        return Err("its sector bitmap may be an old one");
    }
    // A block is allocated when one of its sectors is written. A bitmap without a bit over data was
    // lost: a copy of a failing disk has zeros where a sector could not be read.
    if bitmap.words.iter().all(|word| *word == 0) && has_data(salvaged, payload_bytes) {
        if info.disk_type == DiskType::Differencing {
            return Err("its sector bitmap is empty, and the block has data");
        }
        bitmap.words.fill(u64::MAX);
        if let (Some(last), surplus @ 1..) = (bitmap.words.last_mut(), sectors % 64) {
            *last &= (1 << surplus) - 1;
        }
    }
    Ok(bitmap)
}

/// Whether any byte of a block is not zero. What cannot be read counts as zeros.
fn has_data(salvaged: &Salvaged, payload_bytes: u64) -> bool {
    let mut bytes = vec![0; 64 << 10];
    (0..salvaged.info.block_bytes).step_by(bytes.len()).any(|done| {
        let part = (salvaged.info.block_bytes - done).min(64 << 10) as usize;
        read_what_can_be(&*salvaged.store, payload_bytes.saturating_add(done), &mut bytes[..part]);
        bytes[..part].iter().any(|byte| *byte != 0)
    })
}
