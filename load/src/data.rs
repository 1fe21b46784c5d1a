//! Pseudorandom contents that cannot be compressed, and that can be checked from a seed and an
//! offset.
//!
//! Each 4 KiB of a target is the output of a xoshiro256++ generator, seeded by the seed of the run
//! and the offset of the 4 KiB. Any part of a target can be computed again from these two numbers.
//! A block that was written to the wrong offset, or comes from another disk, differs from the
//! expected one. No two sectors are equal, so no layer below can deduplicate them.

use rand_xoshiro::{
    SplitMix64, Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};

/// The unit in which contents are generated.
pub const SECTOR_BYTES: usize = 4096;

fn sector_rng(seed: u64, offset_bytes: u64) -> Xoshiro256PlusPlus {
    // SplitMix64 is a bijection, so two offsets never share a seed. The seed of the run is mixed
    // once more, so that runs with consecutive seeds differ.
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

/// Fills `buf` with the contents for `offset_bytes`.
///
/// # Panics
/// When `offset_bytes` is not a multiple of [`SECTOR_BYTES`].
pub fn fill(seed: u64, offset_bytes: u64, buf: &mut [u8]) {
    assert!(offset_bytes.is_multiple_of(SECTOR_BYTES as u64), "the offset is not a multiple of a sector");
    for (index, sector) in buf.chunks_mut(SECTOR_BYTES).enumerate() {
        fill_sector(&mut sector_rng(seed, offset_bytes + (index * SECTOR_BYTES) as u64), sector);
    }
}

/// Index of the first byte of `buf` that differs from the contents for `offset_bytes`; `None`: no
/// byte differs.
///
/// # Panics
/// When `offset_bytes` is not a multiple of [`SECTOR_BYTES`].
pub fn first_difference(seed: u64, offset_bytes: u64, buf: &[u8]) -> Option<usize> {
    let mut expected = [0; SECTOR_BYTES];
    assert!(offset_bytes.is_multiple_of(SECTOR_BYTES as u64), "the offset is not a multiple of a sector");
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
    fn contents_depend_only_on_seed_and_offset() {
        let (mut whole, mut part) = (vec![0; 4 * SECTOR_BYTES], vec![0; SECTOR_BYTES + 512]);
        fill(7, 0, &mut whole);
        fill(7, 2 * SECTOR_BYTES as u64, &mut part);
        assert_eq!(&whole[2 * SECTOR_BYTES..3 * SECTOR_BYTES + 512], &part[..]);
        let mut other = vec![0; SECTOR_BYTES];
        fill(8, 0, &mut other);
        assert_ne!(&whole[..SECTOR_BYTES], &other[..]);
    }

    #[test]
    fn no_two_words_of_a_range_are_equal() {
        // A test for "incompressible": two of n random 64-bit words are equal with a probability of
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
