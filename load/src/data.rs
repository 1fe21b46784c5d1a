//! Contents that cannot be compressed, are fast to make, and can be checked without having been
//! kept.
//!
//! Each 4 KiB of a target is the output of a xoshiro256++ generator whose seed comes from the run's
//! seed and from where the 4 KiB begin. So any piece of any target can be made again from two
//! numbers; a block that went to the wrong place, or came from another disk, is told apart from the
//! right one; and no two sectors are alike, so nothing below can deduplicate.

use rand_xoshiro::{
    SplitMix64, Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};

/// The unit of which contents are made.
pub const SECTOR_BYTES: usize = 4096;

fn sector_rng(seed: u64, offset_bytes: u64) -> Xoshiro256PlusPlus {
    // SplitMix64 is a bijection of its state, so two offsets never share a seed; adding the run's
    // seed after one more mix keeps runs with neighbouring seeds apart.
    let mut mixed = SplitMix64::seed_from_u64(seed);
    Xoshiro256PlusPlus::seed_from_u64(mixed.next_u64() ^ (offset_bytes / SECTOR_BYTES as u64))
}

fn fill_sector(rng: &mut Xoshiro256PlusPlus, sector: &mut [u8]) {
    let mut words = sector.chunks_exact_mut(8);
    for word in &mut words {
        word.copy_from_slice(&rng.next_u64().to_le_bytes());
    }
    let rest = words.into_remainder();
    let last = rng.next_u64().to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Fills `buf` with what belongs at `offset_bytes`.
///
/// # Panics
/// When `offset_bytes` is no multiple of [`SECTOR_BYTES`], an error of the program.
pub fn fill(seed: u64, offset_bytes: u64, buf: &mut [u8]) {
    assert!(offset_bytes.is_multiple_of(SECTOR_BYTES as u64), "contents are made by whole sectors");
    for (index, sector) in buf.chunks_mut(SECTOR_BYTES).enumerate() {
        fill_sector(&mut sector_rng(seed, offset_bytes + (index * SECTOR_BYTES) as u64), sector);
    }
}

/// Where `buf` first differs from what belongs at `offset_bytes`, in bytes from its beginning.
///
/// # Panics
/// As [`fill`].
pub fn first_difference(seed: u64, offset_bytes: u64, buf: &[u8]) -> Option<usize> {
    let mut expected = [0; SECTOR_BYTES];
    assert!(offset_bytes.is_multiple_of(SECTOR_BYTES as u64), "contents are made by whole sectors");
    for (index, sector) in buf.chunks(SECTOR_BYTES).enumerate() {
        let start = index * SECTOR_BYTES;
        let expected = &mut expected[..sector.len()];
        fill_sector(&mut sector_rng(seed, offset_bytes + start as u64), expected);
        if sector != expected {
            return sector.iter().zip(&*expected).position(|(found, wanted)| found != wanted).map(|at| start + at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn contents_depend_on_seed_and_offset_alone() {
        let (mut whole, mut part) = (vec![0; 4 * SECTOR_BYTES], vec![0; SECTOR_BYTES + 512]);
        fill(7, 0, &mut whole);
        fill(7, 2 * SECTOR_BYTES as u64, &mut part);
        assert_eq!(&whole[2 * SECTOR_BYTES..3 * SECTOR_BYTES + 512], &part[..]);
        let mut other = vec![0; SECTOR_BYTES];
        fill(8, 0, &mut other);
        assert_ne!(&whole[..SECTOR_BYTES], &other[..]);
    }

    #[test]
    fn no_two_words_of_a_stretch_are_alike() {
        // A stand-in for "incompressible": 64-bit words of random data repeat with a chance of
        // about n^2 / 2^65.
        let mut buf = vec![0; 256 * SECTOR_BYTES];
        fill(1, 1 << 40, &mut buf);
        let words: HashSet<&[u8]> = buf.chunks(8).collect();
        assert_eq!(words.len(), buf.len() / 8);
        let ones: u64 = buf.iter().map(|byte| u64::from(byte.count_ones())).sum();
        let bits = buf.len() as u64 * 8;
        assert!(ones.abs_diff(bits / 2) < bits / 200, "{ones} ones in {bits} bits");
    }

    proptest! {
        #[test]
        fn the_first_wrong_byte_is_found(seed: u64, sector in 0_u64..1 << 40, len in 1_usize..3 * SECTOR_BYTES, at: prop::sample::Index) {
            let (offset_bytes, mut buf) = (sector * SECTOR_BYTES as u64, vec![0; len]);
            fill(seed, offset_bytes, &mut buf);
            prop_assert_eq!(first_difference(seed, offset_bytes, &buf), None);
            let wrong = at.index(len);
            buf[wrong] ^= 1;
            prop_assert_eq!(first_difference(seed, offset_bytes, &buf), Some(wrong));
        }
    }
}
