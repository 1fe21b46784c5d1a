//! The footer of a fixed disk whose growth was cut short.
//!
//! ```text
//!   disk of the old size │ footer │ zeros ...                     │ end of the file
//!                         ▲ still here                     ▲ the new footer was lost
//! ```
//!
//! A growth writes the new footer at the new end of the file, and clears the old one when that is
//! durable (`grow.rs`). A power cut in between may keep the new length and lose the bytes. Then the
//! file ends in zeros, and the last bytes before them are the old footer.
//!
//! It counts only if neither the end nor the beginning of the file is a footer, if it says that the
//! disk is fixed and ends exactly where it begins, and if nothing but zeros follows. A file that
//! was not copied completely ends within the disk: its guest could have stored such a footer there,
//! but only a smaller disk would be shown, with a remark.

use crate::{ImageError, Result};
use diskwright_format::vhd::{DiskKind, FOOTER_BYTES, Footer};
use diskwright_store::Store;

/// Bytes that are read at once.
const PIECE_BYTES: u64 = 1 << 20;
/// Most bytes that are searched where the file has no holes.
const SEARCH_MAX_BYTES: u64 = 256 << 20;

/// A footer, its bytes, and its offset in the file.
pub(super) type Found = (Footer, [u8; FOOTER_BYTES], u64);

/// The footer, if it is there.
///
/// # Errors
/// `Io`.
pub(super) fn find(store: &dyn Store, len_bytes: u64) -> Result<Option<Found>> {
    let Some(offset_bytes) = last_sector_with_data(store, len_bytes)? else { return Ok(None) };
    let mut bytes = [0; FOOTER_BYTES];
    read(store, &mut bytes, offset_bytes)?;
    let footer = Footer::parse(&bytes, offset_bytes).ok();
    let footer = footer.filter(|footer| footer.kind == DiskKind::Fixed && footer.current_size_bytes == offset_bytes);
    Ok(footer.map(|footer| (footer, bytes, offset_bytes)))
}

fn read(store: &dyn Store, bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
    store.read_at(bytes, offset_bytes).map_err(|error| ImageError::io("look for a footer", store, offset_bytes, error))
}

/// The end of the last range of the file that is no hole, by bisection.
fn data_end(store: &dyn Store, len_bytes: u64) -> Result<u64> {
    let next = |at: u64| {
        let io = |error| ImageError::io("look for the last data of the file", store, at, error);
        store.next_data(at).map_err(io)
    };
    let (mut known, mut none) = (0, len_bytes);
    let mut end = 0;
    while known < none {
        let middle = known.midpoint(none);
        match next(middle)? {
            Some(data) => {
                end = data.offset_bytes.saturating_add(data.len_bytes).min(len_bytes);
                known = end.max(middle + 1);
            }
            None => none = middle,
        }
    }
    Ok(end)
}

/// The offset of the last sector, at a multiple of 512, that is not all zeros.
fn last_sector_with_data(store: &dyn Store, len_bytes: u64) -> Result<Option<u64>> {
    const SECTOR: u64 = FOOTER_BYTES as u64;
    let mut end = data_end(store, len_bytes)?.next_multiple_of(SECTOR).min(len_bytes / SECTOR * SECTOR);
    let stop = end.saturating_sub(SEARCH_MAX_BYTES);
    let mut piece = vec![0; PIECE_BYTES as usize];
    while end > stop {
        let start = end.saturating_sub(PIECE_BYTES).max(stop);
        let piece = &mut piece[..(end - start) as usize];
        read(store, piece, start)?;
        if let Some(last) = piece.iter().rposition(|&byte| byte != 0) {
            return Ok(Some(start + last as u64 / SECTOR * SECTOR));
        }
        end = start;
    }
    Ok(None)
}
