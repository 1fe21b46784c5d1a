//! What a merge has to copy, and the space that this takes in the parent. Reads tables only.

use crate::{Disk, DiskError, Layer, Result, copying::copy::damage_of, engine::holes::next_known, error::from_io};
use diskwright_image::{BlockState, Image, ImageError};
use diskwright_store::{BlockDevice, ExtentKind};
use std::ops::Range;

/// Length of the pieces in which extents are read.
const PIECE_BYTES: u64 = 1 << 30;
/// Number of blocks whose states are read at once.
const STATES: u64 = 4096;

/// What an image holds itself.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Bytes that the child has and the parent gets.
    pub(super) data_bytes: u64,
    /// The ranges of the disk that have data, rounded out to the parent's blocks.
    pub(super) ranges: Vec<Range<u64>>,
}

impl Survey {
    /// Surveys one image, without its parents.
    ///
    /// # Errors
    /// [`DiskError::DamagedSource`] for a block whose place is not known; `Io`.
    pub(super) fn of(layer: &Layer, unit_bytes: u64) -> Result<Self> {
        let disk = Disk::from_layers(vec![layer.clone()], Vec::new())?;
        let layers = disk.layers();
        let size_bytes = disk.geometry().size_bytes;
        let (mut survey, mut extents, mut at) = (Self::default(), Vec::new(), 0);
        loop {
            at = next_known(&layers, at, size_bytes)?;
            if at == size_bytes {
                return Ok(survey);
            }
            let len_bytes = PIECE_BYTES.min(size_bytes - at);
            extents.clear();
            let read = disk.extents(at, len_bytes, &mut extents);
            read.map_err(|error| from_io("read its tables", &layer.path, error))?;
            for extent in &extents {
                let end_bytes = extent.offset_bytes + extent.len_bytes;
                match extent.kind {
                    ExtentKind::Data => {
                        survey.data_bytes += extent.len_bytes;
                        let start = extent.offset_bytes - extent.offset_bytes % unit_bytes;
                        survey.add(start..end_bytes.next_multiple_of(unit_bytes));
                    }
                    ExtentKind::Damaged => {
                        return Err(match damage_of(&disk, extent) {
                            DiskError::Image(error @ ImageError::Corrupt { .. }) => {
                                DiskError::DamagedSource { error, offset_bytes: extent.offset_bytes, end_bytes }
                            }
                            other => other,
                        });
                    }
                    _ => {}
                }
            }
            at += len_bytes;
        }
    }

    fn add(&mut self, range: Range<u64>) {
        match self.ranges.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => self.ranges.push(range),
        }
    }
}

/// The bytes of those `ranges` for which the image has no space yet. They may overlap.
///
/// # Errors
/// `Unsupported` if the image can take no data in one of them; errors of its tables.
pub(crate) fn missing_bytes(image: &dyn Image, mut ranges: Vec<Range<u64>>) -> Result<u64> {
    let block_bytes = image.info().block_bytes;
    ranges.sort_unstable_by_key(|range| range.start);
    let (mut next_block, mut missing_blocks) = (0, 0);
    let mut states = Vec::new();
    for range in ranges {
        let end_block = range.end.div_ceil(block_bytes);
        let mut block = (range.start / block_bytes).max(next_block);
        image.check_takes(block..end_block)?;
        while block < end_block {
            let count = STATES.min(end_block - block);
            states.clear();
            states.resize(count as usize, BlockState::Absent);
            image.block_states(block, &mut states)?;
            let is_missing = |state: &&BlockState| matches!(state, BlockState::Absent | BlockState::Zero);
            missing_blocks += states.iter().filter(is_missing).count() as u64;
            block += count;
        }
        next_block = next_block.max(end_block);
    }
    Ok(missing_blocks.saturating_mul(block_bytes))
}
