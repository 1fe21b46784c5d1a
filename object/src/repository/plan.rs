//! What a push does with each chunk of a disk: what the disk's tables and its base know already is
//! not read.
//!
//! ```text
//!   unchanged since the base, and the base's chunk is still there ─▶ the base's chunk
//!   zeros by the tables of the disk                               ─▶ nothing
//!   everything else                                               ─▶ read
//! ```

use super::{
    manifest::{CHUNK_BYTES, Chunk, Manifest, chunk_bytes},
    session::Session,
};
use diskwright_store::{BlockDevice, Extent, ExtentKind};
use std::{collections::BTreeMap, io, ops::Range};

/// How much of a disk is asked for its extents at once.
const WINDOW_BYTES: u64 = 4 << 30;

/// What of a disk may differ from its base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// These ranges in bytes.
    Ranges(Vec<Range<u64>>),
    /// Everything. What the base has is not sent all the same.
    All,
    /// What the images above this depth of the chain hold. The base is the image at this depth.
    Above(u32),
}

/// What is to be done.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Chunks of the base.
    pub(super) kept: BTreeMap<u64, Chunk>,
    /// Chunks to read.
    pub(super) read: Vec<u64>,
}

/// A set of chunks of a disk.
struct ChunkSet(Vec<bool>);

impl ChunkSet {
    fn new(size_bytes: u64) -> Self {
        Self(vec![false; size_bytes.div_ceil(CHUNK_BYTES) as usize])
    }

    /// Adds the chunks that a range touches.
    fn add(&mut self, range: Range<u64>) {
        let len = self.0.len();
        let (first, end) = ((range.start / CHUNK_BYTES) as usize, range.end.div_ceil(CHUNK_BYTES) as usize);
        if let Some(chunks) = self.0.get_mut(first.min(len)..end.min(len)) {
            chunks.fill(true);
        }
    }
}

/// Plans the push of a disk.
///
/// # Errors
/// The extents of the disk cannot be read.
pub(super) fn plan(
    device: &dyn BlockDevice,
    base: Option<(&Manifest, &Changed)>,
    session: &Session<'_>,
) -> io::Result<Plan> {
    let size_bytes = device.geometry().size_bytes;
    let (mut data, mut changed) = (ChunkSet::new(size_bytes), ChunkSet::new(size_bytes));
    match base {
        Some((_, Changed::Ranges(ranges))) => ranges.iter().for_each(|range| changed.add(range.clone())),
        Some((_, Changed::All)) => changed.add(0..size_bytes),
        Some((_, Changed::Above(_))) | None => {}
    }
    let mut extents: Vec<Extent> = Vec::new();
    for start in (0..size_bytes).step_by(WINDOW_BYTES as usize) {
        extents.clear();
        device.extents(start, WINDOW_BYTES.min(size_bytes - start), &mut extents)?;
        for extent in &extents {
            let range = extent.offset_bytes..extent.offset_bytes.saturating_add(extent.len_bytes);
            if let Some((_, Changed::Above(depth))) = base
                && extent.kind != ExtentKind::Unallocated
                && extent.depth < *depth
            {
                changed.add(range.clone());
            }
            if !extent.kind.reads_as_zeros() {
                data.add(range);
            }
        }
    }
    let mut plan = Plan::default();
    for (number, (&has_data, &is_changed)) in (0..).zip(data.0.iter().zip(&changed.0)) {
        let of_base =
            base.filter(|(base, _)| !is_changed && base.chunk_bytes(number) == chunk_bytes(size_bytes, number));
        match of_base.map(|(base, _)| base.chunk(number)) {
            Some(None) => {}
            Some(Some(chunk)) => match session.find(&chunk.key.digest) {
                Some(there) => drop(plan.kept.insert(number, there)),
                None => plan.read.push(number),
            },
            None if has_data => plan.read.push(number),
            None => {}
        }
    }
    Ok(plan)
}
