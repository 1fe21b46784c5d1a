//! Seeds of measured windows: one rule for sweeps, comparisons, studies and benchmarks.
//!
//! ```text
//!   seed of the experiment, cell, round ──▶ seed of the window ──▶ offsets of random requests,
//!                                                                  starts of sequential streams
//! ```
//!
//! A cell is a workload, for example 4K random reads at queue depth 8. What must hold:
//!
//! - **Cells of one round have different seeds.** Otherwise a deeper queue would read the blocks
//!   that a shallower one has just read, and a device or host with a cache would answer from the
//!   cache.
//! - **Rounds of one cell have different seeds**, for the same reason.
//! - **Targets of one cell and round have the same seed**, so that they are compared by the same
//!   requests.
//! - The same experiment with the same seed makes the same requests, also when it is resumed.

use crate::job::{Bytes, Job};
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng, SeedableRng},
};

/// Seed of the window that measures `cell` in `round`, for an experiment with this seed. The result
/// is below 2^53, so that TOML and every JSON parser can hold it.
pub fn of_window(seed: u64, cell: &str, round: usize) -> u64 {
    let mut mixed = SplitMix64::seed_from_u64(seed).next_u64();
    let mut mix = |word: u64| {
        mixed = SplitMix64::seed_from_u64(mixed ^ word).next_u64();
    };
    mix(cell.len() as u64);
    for piece in cell.as_bytes().chunks(8) {
        let mut word = [0; 8];
        word[..piece.len()].copy_from_slice(piece);
        mix(u64::from_le_bytes(word));
    }
    mix(round as u64);
    mixed >> 11
}

/// Draws the start of each sequential stream of `job` by the seed of the job. Otherwise short
/// windows would measure the first blocks of a target again and again. A load with a `stream_start`
/// keeps it. `size_bytes` is the size of the smallest target.
pub fn begin_streams(job: &mut Job, size_bytes: u64) {
    let mut places = SplitMix64::seed_from_u64(job.seed);
    for load in job.phases.iter_mut().flat_map(|phase| &mut phase.loads) {
        let place = places.next_u64();
        if !load.is_partly_sequential() || load.stream_start != Bytes(0) {
            continue;
        }
        let set_bytes = match load.working_set.0 {
            0 => size_bytes.saturating_sub(load.start.0),
            set_bytes => set_bytes,
        };
        let step_bytes = load.stride.map_or(load.block.largest_bytes(), |stride| stride.0).max(1);
        load.stream_start = Bytes(place % (set_bytes / step_bytes).max(1) * step_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Blocks, Load, SizeShare, Span};
    use std::collections::BTreeSet;

    #[test]
    fn cells_and_rounds_have_different_seeds_that_repeat() {
        let cells = ["", "queue-depth 1", "queue-depth 2", "queue-depth 2, threads 1", "queue-depth 2\0"];
        let seeds = |seed| cells.iter().flat_map(move |cell| (0..5).map(move |round| of_window(seed, cell, round)));
        let all: BTreeSet<u64> = seeds(1).chain(seeds(2)).collect();
        assert_eq!(all.len(), 2 * 5 * cells.len());
        assert!(seeds(1).eq(seeds(1)) && all.iter().all(|seed| *seed < 1 << 53));
    }

    #[test]
    fn streams_start_at_multiples_of_the_block_within_the_working_set() {
        let load = Load { random_percent: 0.0, block: Blocks::One(Bytes(8192)), ..Load::default() };
        let start = |load: &Load, seed: u64| {
            let mut job = Job { seed, ..Job::simple("x", load.clone(), Span::default(), Span::from_secs(1)) };
            begin_streams(&mut job, 1 << 20);
            job.validate().unwrap();
            job.phases[0].loads[0].stream_start.0
        };
        let starts: BTreeSet<u64> = (0..50).map(|seed| start(&load, seed)).collect();
        assert!(starts.len() > 20 && starts.iter().all(|start| start % 8192 == 0 && *start < 1 << 20), "{starts:?}");
        let small = Load { working_set: Bytes(16384), ..load.clone() };
        assert!((0..20).all(|seed| start(&small, seed) < 16384));
        // A load with a `stream_start` keeps it, and random requests have no stream.
        assert_eq!(start(&Load { stream_start: Bytes(4096), ..load.clone() }, 3), 4096);
        assert_eq!(start(&Load { random_percent: 100.0, ..load.clone() }, 3), 0);
        // One size of a mix may be sequential.
        let share = SizeShare { size: Bytes(8192), weight: 1.0, read_percent: None, random_percent: Some(0.0) };
        let mixed = Load { random_percent: 100.0, block: Blocks::Mix(vec![share]), ..load };
        assert!((0..20).any(|seed| start(&mixed, seed) > 0));
    }
}
