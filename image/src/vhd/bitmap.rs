//! Sector bitmaps. In the file the first sector is the most significant bit of a byte; in memory
//! the least significant.

use super::layout::{Blocks, Piece};
use crate::{ImageError, Result, SectorBitmap};
use diskwright_format::vhd::SECTOR_BYTES;
use diskwright_store::Store;

/// Reads the bitmap of a block from the file.
pub(super) fn read(store: &dyn Store, blocks: &Blocks, piece: &Piece) -> Result<SectorBitmap> {
    let mut bytes = vec![0; blocks.bitmap_bytes as usize];
    read_bytes(store, piece, &mut bytes)?;
    Ok(from_file(&bytes, blocks.sectors))
}

/// The same, as it is in the file.
pub(super) fn read_bytes(store: &dyn Store, piece: &Piece, bytes: &mut [u8]) -> Result<()> {
    store
        .read_at(bytes, piece.bitmap_offset)
        .map_err(|e| ImageError::io("read a sector bitmap", store, piece.bitmap_offset, e))
}

/// Whether the first `sectors` bits in the bytes of the file are all set.
pub(super) fn is_full_in_file(bytes: &[u8], sectors: u32) -> bool {
    let whole = sectors as usize / 8;
    let rest = !(0xff_u8 >> (sectors % 8));
    bytes.len() >= whole
        && bytes[..whole].iter().all(|&byte| byte == 0xff)
        && (rest == 0 || bytes.get(whole).is_some_and(|byte| byte & rest == rest))
}

/// The bitmap of a block whose sectors all have data in this layer.
pub(super) fn full(blocks: &Blocks) -> SectorBitmap {
    let mut full = SectorBitmap::empty(blocks.sectors, SECTOR_BYTES as u32);
    set(&mut full, 0, blocks.sectors);
    full
}

/// A bitmap of `sectors` bits from the bytes of the file. Missing bytes count as zero.
pub(super) fn from_file(bytes: &[u8], sectors: u32) -> SectorBitmap {
    let mut bitmap = SectorBitmap::empty(sectors, SECTOR_BYTES as u32);
    for (word, chunk) in bitmap.words.iter_mut().zip(bytes.chunks(8)) {
        let mut reversed = [0; 8];
        for (to, from) in reversed.iter_mut().zip(chunk) {
            *to = from.reverse_bits();
        }
        *word = u64::from_le_bytes(reversed);
    }
    if let (Some(last), surplus @ 1..) = (bitmap.words.last_mut(), sectors % 64) {
        *last &= (1 << surplus) - 1;
    }
    bitmap
}

/// The `len` bytes of a bitmap in the file. Bits beyond the block are zero.
pub(super) fn to_file(bitmap: &SectorBitmap, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        bitmap.words.iter().flat_map(|word| word.to_le_bytes()).map(u8::reverse_bits).take(len).collect();
    bytes.resize(len, 0);
    bytes
}

/// Sets `count` bits from `first`, by whole words. Returns whether any of them was clear.
pub(super) fn set(bitmap: &mut SectorBitmap, first: u32, count: u32) -> bool {
    let end = first.saturating_add(count).min(bitmap.sectors);
    let mut changed = false;
    let mut at = first;
    while at < end {
        let stop = (at - at % 64).saturating_add(64).min(end);
        let mask = (u64::MAX >> (64 - (stop - at))) << (at % 64);
        let word = &mut bitmap.words[at as usize / 64];
        changed |= *word & mask != mask;
        *word |= mask;
        at = stop;
    }
    changed
}

/// Whether the first `sectors` bits are all set.
pub(super) fn is_full_to(bitmap: &SectorBitmap, sectors: u32) -> bool {
    let whole = sectors as usize / 64;
    let rest = sectors % 64;
    bitmap.words.iter().take(whole).all(|&word| word == u64::MAX)
        && (rest == 0 || bitmap.words.get(whole).is_some_and(|word| !word & ((1 << rest) - 1) == 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_sector_is_the_top_bit_of_the_first_byte() {
        let bitmap = from_file(&[0x80, 0x01, 0, 0, 0, 0, 0, 0, 0x40], 72);
        let set: Vec<_> = (0..72).filter(|&sector| bitmap.get(sector)).collect();
        assert_eq!(set, [0, 15, 65]);
    }

    proptest! {
        #[test]
        fn roundtrip_and_ranges(sectors in 1u32..300, runs in prop::collection::vec((0u32..310, 0u32..310), 0..5)) {
            let mut quick = SectorBitmap::empty(sectors, 512);
            let mut plain = quick.clone();
            for (first, count) in runs {
                let before = plain.count();
                plain.set(first, count);
                prop_assert_eq!(set(&mut quick, first, count), plain.count() != before);
                prop_assert_eq!(&quick, &plain);
            }
            let bytes = to_file(&quick, 64);
            for sector in 0..sectors {
                prop_assert_eq!(bytes[sector as usize / 8] >> (7 - sector % 8) & 1 == 1, quick.get(sector));
            }
            prop_assert_eq!(from_file(&bytes, sectors), quick.clone());
            for to in 0..=sectors {
                prop_assert_eq!(is_full_in_file(&bytes, to), is_full_to(&quick, to));
                prop_assert_eq!(is_full_to(&quick, to), (0..to).all(|sector| quick.get(sector)));
            }
        }
    }
}
