//! Rebuilds a damaged dynamic header or the damaged footer of a fixed disk, where only one value is
//! possible. Reads only.
//!
//! Neither has a copy. But most of their bytes are constants, and the others follow from the rest
//! of the file, within a few choices:
//!
//! ```text
//!   header   block size: a power of two     entries: as found, or as many as the disk has blocks
//!            table: as found, or where a file begins its table
//!            parent: none in a dynamic disk, as found in a child
//!   footer   size: all bytes before it      geometry: that of the size      type: fixed
//! ```
//!
//! Every choice is made, and one is taken only if its checksum is the one that the damaged
//! structure still has: then the damage is in a byte that was replaced. If the damage is in the
//! checksum itself, all other bytes must be as they are without damage. With a rebuilt header all
//! blocks of the table must lie in the file, and none in another. Of several choices the one counts
//! that replaces the fewest bytes; if there are two such, nothing is rebuilt.

use super::footers::{ChosenFooter, Footers};
use crate::{ImageError, Result};
use diskwright_format::vhd::{
    BAT_UNUSED, Chs, DiskKind, DynamicHeader, FEATURE_RESERVED, FOOTER_BYTES, Footer, HEADER_BYTES, SECTOR_BYTES,
    bitmap_bytes,
};
use diskwright_store::Store;

const HEADER_CHECKSUM: std::ops::Range<usize> = 36..40;
const FOOTER_CHECKSUM: std::ops::Range<usize> = 64..68;

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap_or_default())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap_or_default())
}

/// The header that the file had, and its offset.
///
/// # Errors
/// `Io`.
pub(super) fn rebuilt_header(
    store: &dyn Store,
    chosen: &ChosenFooter,
    len_bytes: u64,
) -> Result<Option<(u64, [u8; HEADER_BYTES])>> {
    let footer = &chosen.found.footer;
    let at = footer.data_offset;
    let fits = at.checked_add(HEADER_BYTES as u64).is_some_and(|end| end <= len_bytes) && at >= FOOTER_BYTES as u64;
    if !fits {
        return Ok(None);
    }
    let is_child = footer.kind == DiskKind::Differencing;
    let mut found = [0; HEADER_BYTES];
    store.read_at(&mut found, at).map_err(|e| ImageError::io("read the dynamic disk header", store, at, e))?;
    let mut candidates: Vec<[u8; HEADER_BYTES]> = Vec::new();
    let end = at + HEADER_BYTES as u64;
    for shift in SECTOR_BYTES.trailing_zeros()..32 {
        let block_bytes = 1u32 << shift;
        let Ok(count) = u32::try_from(footer.size_bytes().div_ceil(u64::from(block_bytes))) else { continue };
        for max_table_entries in [count, u32_at(&found, 28)] {
            for table_offset in [u64_at(&found, 16), end, end.next_multiple_of(4096)] {
                let header = DynamicHeader {
                    table_offset,
                    max_table_entries,
                    block_bytes,
                    parent_id: uuid::Uuid::nil(),
                    parent_modified_seconds: 0,
                    parent_name: String::new(),
                    locators: Default::default(),
                };
                let bytes = with_link(&header, &found, is_child);
                let fits = if is_child {
                    // Which byte of a link is right, only the checksum says.
                    found[HEADER_CHECKSUM] == bytes[HEADER_CHECKSUM]
                } else {
                    fits_checksum(&found, &bytes, HEADER_CHECKSUM)
                };
                let is_new = fits && max_table_entries >= count && !candidates.contains(&bytes);
                if is_new && has_table(store, &header, count, len_bytes)? {
                    candidates.push(bytes);
                }
            }
        }
    }
    let replaced = |bytes: &[u8; HEADER_BYTES]| bytes.iter().zip(&found).filter(|(new, old)| new != old).count();
    let fewest = candidates.iter().map(replaced).min().unwrap_or(0);
    let mut simplest = candidates.iter().filter(|bytes| replaced(bytes) == fewest);
    Ok(match (simplest.next(), simplest.next()) {
        (Some(only), None) => Some((at, *only)),
        _ => None,
    })
}

/// The bytes of the header; that of a child keeps the link to its parent as it was found.
fn with_link(header: &DynamicHeader, found: &[u8; HEADER_BYTES], is_child: bool) -> [u8; HEADER_BYTES] {
    let mut bytes = header.to_bytes();
    if is_child {
        // The id and the time stamp, four reserved bytes, the name and the locators.
        for range in [40..60, 64..768] {
            bytes[range.clone()].copy_from_slice(&found[range]);
        }
        bytes[HEADER_CHECKSUM].fill(0);
        let sum = !bytes.iter().fold(0u32, |sum, &byte| sum.wrapping_add(u32::from(byte)));
        bytes[HEADER_CHECKSUM].copy_from_slice(&sum.to_be_bytes());
    }
    bytes
}

/// Whether the damaged bytes `found` have the checksum of `rebuilt`, or differ from it in nothing
/// but the checksum.
fn fits_checksum(found: &[u8], rebuilt: &[u8], checksum: std::ops::Range<usize>) -> bool {
    let (before, after) = (..checksum.start, checksum.end..);
    found[checksum.clone()] == rebuilt[checksum]
        || (found[before] == rebuilt[before] && found[after.clone()] == rebuilt[after])
}

/// Whether a table of such entries can be at that offset: the blocks of its first entries lie in
/// the file and do not overlap. A table elsewhere, or of other blocks, has other entries.
fn has_table(store: &dyn Store, header: &DynamicHeader, count: u32, len_bytes: u64) -> Result<bool> {
    let end = header.table_offset.checked_add(u64::from(count) * 4).filter(|&end| end <= len_bytes);
    if end.is_none() || !header.table_offset.is_multiple_of(SECTOR_BYTES) {
        return Ok(false);
    }
    let mut bytes = vec![0; (count as usize * 4).min(64 << 10)];
    let at = header.table_offset;
    store.read_at(&mut bytes, at).map_err(|e| ImageError::io("read the block allocation table", store, at, e))?;
    let piece_bytes = bitmap_bytes(header.block_bytes) + u64::from(header.block_bytes);
    let entries = bytes.chunks_exact(4).map(|entry| u32_at(entry, 0)).filter(|&entry| entry != BAT_UNUSED);
    let mut starts: Vec<u64> = entries.map(|entry| u64::from(entry) * SECTOR_BYTES).collect();
    starts.sort_unstable();
    let fits = |start: &u64| *start >= SECTOR_BYTES && start.saturating_add(piece_bytes) <= len_bytes;
    Ok(starts.iter().all(fits) && starts.windows(2).all(|pair| pair[1] - pair[0] >= piece_bytes))
}

/// The footer that a fixed disk had, and its offset.
///
/// # Errors
/// `Io`.
pub(super) fn rebuilt_fixed_footer(store: &dyn Store, footers: &Footers) -> Result<Option<(u64, [u8; FOOTER_BYTES])>> {
    let Some(at) = footers.len_bytes.checked_sub(FOOTER_BYTES as u64).filter(|at| at.is_multiple_of(SECTOR_BYTES))
    else {
        return Ok(None);
    };
    let mut found = [0; FOOTER_BYTES];
    store.read_at(&mut found, at).map_err(|e| ImageError::io("read the footer", store, at, e))?;
    // What cannot be known: who made the file and when, its identity, and its original size.
    let footer = Footer {
        features: FEATURE_RESERVED,
        data_offset: u64::MAX,
        created_seconds: u32_at(&found, 24),
        creator_app: [found[28], found[29], found[30], found[31]],
        creator_version: u32_at(&found, 32),
        creator_os: [found[36], found[37], found[38], found[39]],
        original_size_bytes: u64_at(&found, 40),
        current_size_bytes: at,
        geometry: Chs::from_size(at),
        kind: DiskKind::Fixed,
        unique_id: uuid::Uuid::from_slice(&found[68..84]).unwrap_or_default(),
        saved_state: false,
    };
    let rebuilt = footer.to_bytes();
    let is_whole = at > 0 && footer.size_bytes() == at;
    Ok((is_whole && fits_checksum(&found, &rebuilt, FOOTER_CHECKSUM)).then_some((at, rebuilt)))
}
