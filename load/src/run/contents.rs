//! What is written.
//!
//! Small writes are made anew each time: a stretch of a pool of noise, from a random place in it,
//! every word of it combined with one more random word. That costs little more than a copy, and no
//! two writes have anything in common that a compressor or a deduplicator could find. In large ones
//! (more than [`RENEWED_BYTES`]) the noise of the buffer stays and one word in every 512 bytes is
//! new: nothing can deduplicate that, and where the noise comes again it is too far away for
//! compressors, which work on units of 128 KiB or less.
//!
//! Reads and writes have buffers of their own: what a read brought in is the target's data, and to
//! write that back would be to write repeated, perhaps compressible data without having been asked
//! to.
//!
//! Compressible data are zeros at the end of each 4 KiB, so that a compressor finds the same share
//! in whatever unit it works on. Duplicates are whole requests that repeat one of [`PATTERNS`]
//! patterns.

use crate::{
    data, job,
    run::random::{Chance, Random, below, random_for},
};
use rand_xoshiro::rand_core::Rng;
use std::sync::Arc;

/// How many different duplicates there are.
const PATTERNS: u64 = 8;
/// Writes up to this size are made anew each time.
const RENEWED_BYTES: usize = 32 << 10;
/// Distance of the words that make a larger write its own.
const STAMP_BYTES: usize = 512;
/// Words of a 4 KiB block.
const BLOCK_WORDS: usize = data::SECTOR_BYTES / 8;
/// Words of noise: 1 MiB, and one block more, so that a block can begin at any word.
const POOL_WORDS: usize = (1 << 17) + BLOCK_WORDS;

/// Makes what is written. Clones share the noise.
#[derive(Debug, Clone)]
pub(crate) struct Contents {
    noise: Arc<[u64]>,
    /// Of each 4 KiB, from its start, what is not zeros.
    noise_bytes: usize,
    duplicate: Chance,
}

impl Contents {
    pub(crate) fn new(contents: job::Contents, seed: u64) -> Self {
        let (compressible_percent, duplicate_percent) = match contents {
            job::Contents::Zero => (100.0, 0.0),
            job::Contents::Mixed { compressible_percent, duplicate_percent } => {
                (compressible_percent, duplicate_percent)
            }
            job::Contents::Incompressible | job::Contents::Verified => (0.0, 0.0),
        };
        // Whole words, for noise is made by the word.
        let noise_words = (BLOCK_WORDS as f64 * (1.0 - compressible_percent / 100.0)).round() as usize;
        let mut rng = random_for(seed, &[0x6e6f_6973]);
        let pool_words = if noise_words == 0 { 0 } else { POOL_WORDS };
        Self {
            noise: (0..pool_words).map(|_| rng.next_u64()).collect(),
            noise_bytes: noise_words * 8,
            duplicate: Chance::percent(duplicate_percent),
        }
    }

    /// Fills a buffer for the first time.
    pub(crate) fn fill(&self, buf: &mut [u8], rng: &mut Random) {
        buf.fill(0);
        self.renew(buf, rng);
    }

    /// Makes a write of `buf`, which was filled by [`Contents::fill`], one of a kind, or a
    /// duplicate.
    #[inline]
    pub(crate) fn prepare(&self, buf: &mut [u8], rng: &mut Random) {
        if self.noise_bytes == 0 {
            return;
        }
        if self.duplicate.draw(rng) {
            let pattern = below(rng, PATTERNS);
            // A generator that always begins alike.
            self.renew(buf, &mut random_for(pattern, &[]));
        } else if buf.len() <= RENEWED_BYTES {
            self.renew(buf, rng);
        } else {
            self.stamp(buf, rng);
        }
    }

    /// New noise for all that is not zeros.
    #[inline]
    fn renew(&self, buf: &mut [u8], rng: &mut Random) {
        for block in buf.chunks_mut(data::SECTOR_BYTES) {
            let noise_bytes = self.noise_bytes.min(block.len());
            if noise_bytes == 0 {
                return;
            }
            let start = below(rng, (POOL_WORDS - BLOCK_WORDS) as u64) as usize;
            let mask = rng.next_u64();
            let words = block[..noise_bytes].chunks_exact_mut(8);
            for (place, noise) in words.zip(&self.noise[start..start + BLOCK_WORDS]) {
                place.copy_from_slice(&(noise ^ mask).to_le_bytes());
            }
        }
    }

    /// A new word at the start of each 512 bytes of noise.
    fn stamp(&self, buf: &mut [u8], rng: &mut Random) {
        let mut word = rng.next_u64();
        for block in buf.chunks_mut(data::SECTOR_BYTES) {
            let noise_bytes = self.noise_bytes.min(block.len());
            for sector in block[..noise_bytes].chunks_mut(STAMP_BYTES) {
                if let Some(place) = sector.first_chunk_mut::<8>() {
                    *place = word.to_le_bytes();
                }
                // An odd step visits every number, so no two sectors of a request are alike.
                word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Contents as Asked;
    use std::collections::HashMap;

    /// What four slots write, a hundred times each.
    fn written(asked: Asked, len: usize) -> Vec<Vec<u8>> {
        let contents = Contents::new(asked, 5);
        let mut rng = random_for(9, &[]);
        let mut bufs = vec![vec![0; len]; 4];
        let mut all = Vec::new();
        for buf in &mut bufs {
            contents.fill(buf, &mut rng);
        }
        for turn in 0..400 {
            let buf = &mut bufs[turn % 4];
            contents.prepare(buf, &mut rng);
            all.push(buf.clone());
        }
        all
    }

    /// How often each piece of `unit` bytes occurs.
    fn repeats(all: &[Vec<u8>], unit: usize) -> HashMap<&[u8], usize> {
        let mut seen = HashMap::new();
        for piece in all.iter().flat_map(|block| block.chunks(unit)) {
            *seen.entry(piece).or_insert(0) += 1;
        }
        seen
    }

    #[test]
    fn incompressible_data_repeat_in_no_unit_and_hold_no_runs() {
        for (len, units) in [(4096, [8, 512, 4096]), (64 << 10, [512, 4096, 65536])] {
            let all = written(Asked::Incompressible, len);
            for unit in units {
                assert!(repeats(&all, unit).values().all(|count| *count == 1), "units of {unit} bytes repeat");
            }
            let zeros = all.iter().flatten().filter(|byte| **byte == 0).count();
            assert!(zeros < all.len() * len / 200, "{zeros} zeros");
        }
    }

    #[test]
    fn zero_is_zero() {
        assert!(written(Asked::Zero, 8192).iter().flatten().all(|byte| *byte == 0));
    }

    #[test]
    fn shares_of_zeros_and_of_duplicates_are_kept() {
        for len in [16 << 10, 64 << 10] {
            let all = written(Asked::Mixed { compressible_percent: 25.0, duplicate_percent: 40.0 }, len);
            for block in all.iter().flat_map(|write| write.chunks(4096)) {
                assert!(block[3072..].iter().all(|byte| *byte == 0));
                assert!(block[..3072].iter().filter(|byte| **byte == 0).count() < 100);
            }
            let whole = repeats(&all, len);
            let alone = whole.values().filter(|count| **count == 1).count();
            let repeated = all.len() - alone;
            assert_eq!(whole.len() - alone, PATTERNS as usize, "duplicates are of a small set");
            assert!((repeated as f64 / all.len() as f64 - 0.4).abs() < 0.15, "{repeated} of {}", all.len());
        }
    }
}
