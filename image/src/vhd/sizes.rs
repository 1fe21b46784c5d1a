//! Which sizes a disk with blocks can get, and the refusal of others.

use super::layout::Blocks;
use crate::{ImageError, Result};
use diskwright_format::vhd::SECTOR_BYTES;
use diskwright_store::Store;

pub(super) fn refused(store: &dyn Store, size_bytes: u64, present_bytes: u64, hint: String) -> ImageError {
    ImageError::Unsupported {
        path: store.name().to_owned(),
        what: format!("a new size of {size_bytes} bytes for this open disk of {present_bytes} bytes"),
        hint,
    }
}

/// Number of blocks of a disk of `size_bytes`. Fails if the disk cannot have that size.
pub(super) fn check_smaller(store: &dyn Store, before: &Blocks, size_bytes: u64) -> Result<u64> {
    let hint = if size_bytes > before.size_bytes() {
        "the size must be at most the present one"
    } else if size_bytes == 0 || !size_bytes.is_multiple_of(SECTOR_BYTES) {
        "the size must be a multiple of 512 bytes above 0"
    } else if before.batmap.is_some() {
        "XenServer's batmap describes the blocks of the whole disk; convert it to a new disk of that size"
    } else if !before.header_offset_bytes.is_multiple_of(SECTOR_BYTES) {
        "its header does not lie at a multiple of 512; convert it to a new disk of that size"
    } else {
        return Ok(size_bytes.div_ceil(before.block_bytes));
    };
    Err(refused(store, size_bytes, before.size_bytes(), hint.into()))
}
