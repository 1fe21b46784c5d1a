//! Counts what the structures in the gaps of the file claim: that a piece of the file is a block.
//!
//! Memory is limited. Claims that are too many to count are not forgotten: their blocks are noted
//! in [`UncountedBlocks`], and such a block is not given to another piece.

use super::gaps::{UNIT_BYTES, each_window};
use crate::{Progress, Result};
use diskwright_image::salvage::Salvaged;
use diskwright_volume::{DiskEvidence, Sighting};
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

/// Most claims that are counted, and most pieces whose reason is kept.
const VOTES_MAX: usize = 1 << 20;
/// Bits of [`UncountedBlocks`]: 8 MiB.
const UNCOUNTED_BITS: u64 = 1 << 26;

pub(super) const CONTRADICTS: &str = "its structures contradict each other";
pub(super) const SEVERAL: &str = "several pieces claim the same place";
const OCCUPIED: &str = "the place that it claims has a valid table entry";
const TRUSTED: &str = "the table entry of the place that it claims says that there are no data, and it is trusted";

/// Where a piece of the file may belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Claim {
    pub(super) payload_bytes: u64,
    pub(super) block: u64,
}

/// Which blocks a piece may be.
pub(super) struct Blocks<'a> {
    /// Whether an entry that says "no data" is believed.
    pub(super) trust_absent: bool,
    /// Blocks that were placed by their contents: another piece that claims one is a rival.
    pub(super) ours: &'a HashSet<u64>,
}

impl Blocks<'_> {
    /// Why a piece cannot be this block.
    fn refuse(&self, salvaged: &Salvaged, block: u64) -> Option<&'static str> {
        match salvaged.table.get(block) {
            _ if self.ours.contains(&block) => None,
            Ok(Some(_)) => Some(OCCUPIED),
            Ok(None) if self.trust_absent => Some(TRUSTED),
            Ok(None) | Err(_) => None,
        }
    }
}

/// Blocks with claims that were not counted. May name further blocks, never fewer.
#[derive(Debug, Default)]
pub(super) struct UncountedBlocks(Vec<u64>);

impl UncountedBlocks {
    fn place(block: u64) -> (usize, u64) {
        let bit = block % UNCOUNTED_BITS;
        ((bit / 64) as usize, 1 << (bit % 64))
    }

    pub(super) fn add(&mut self, block: u64) {
        if self.0.is_empty() {
            self.0.resize((UNCOUNTED_BITS / 64) as usize, 0);
        }
        let (word, mask) = Self::place(block);
        self.0[word] |= mask;
    }

    pub(super) fn may_hold(&self, block: u64) -> bool {
        let (word, mask) = Self::place(block);
        self.0.get(word).is_some_and(|bits| bits & mask != 0)
    }
}

/// The counted claims, by block.
#[derive(Debug, Default)]
pub(super) struct Votes {
    pub(super) counted: HashMap<Claim, u32>,
    pub(super) uncounted: UncountedBlocks,
}

/// Counts what the structures in the gaps claim. `refused` gets the pieces that claim a block which
/// has a valid entry.
pub(super) fn count_votes(
    salvaged: &Salvaged,
    blocks: &Blocks<'_>,
    file_systems: &DiskEvidence,
    refused: &mut HashMap<u64, &'static str>,
    progress: &mut Progress<'_>,
) -> Result<Votes> {
    let mut votes = Votes::default();
    let block_bytes = salvaged.info.block_bytes;
    let phases = phases(salvaged);
    for gap in &salvaged.gaps() {
        for phase in &phases {
            let from = gap.start + (phase + UNIT_BYTES - gap.start % UNIT_BYTES) % UNIT_BYTES;
            each_window(salvaged, gap, from, progress, &mut |at, bytes| {
                file_systems.look(bytes, &mut |seen| {
                    let Sighting::At { within_bytes, disk_offset_bytes, weight, .. } = seen else { return };
                    let Some(claim) = claim_of(block_bytes, at, within_bytes, disk_offset_bytes) else { return };
                    if !fits(salvaged, gap, claim) {
                        return;
                    }
                    if let Some(why) = blocks.refuse(salvaged, claim.block) {
                        if refused.len() < VOTES_MAX {
                            refused.insert(claim.payload_bytes, why);
                        }
                        return;
                    }
                    if votes.counted.len() < VOTES_MAX || votes.counted.contains_key(&claim) {
                        let sum = votes.counted.entry(claim).or_default();
                        *sum = sum.saturating_add(weight);
                    } else {
                        votes.uncounted.add(claim.block);
                    }
                });
                true
            })?;
        }
    }
    Ok(votes)
}

/// Where a structure says that its payload block begins in the file, and which block it is.
fn claim_of(block_bytes: u64, at: u64, within_bytes: usize, disk_offset_bytes: u64) -> Option<Claim> {
    let payload_bytes = (at + within_bytes as u64).checked_sub(disk_offset_bytes % block_bytes)?;
    Some(Claim { payload_bytes, block: disk_offset_bytes / block_bytes })
}

/// Whether a piece at that place lies in the gap and is aligned.
fn fits(salvaged: &Salvaged, gap: &Range<u64>, claim: Claim) -> bool {
    let start = claim.payload_bytes.checked_sub(salvaged.lead_bytes());
    let end = claim.payload_bytes.checked_add(salvaged.bytes_in_disk(claim.block));
    claim.block < salvaged.table.count()
        && claim.payload_bytes.is_multiple_of(salvaged.payload_alignment_bytes)
        && start.is_some_and(|start| gap.start <= start)
        && end.is_some_and(|end| end <= gap.end)
}

/// Distances of payload from a multiple of [`UNIT_BYTES`] in the file: at most 8.
fn phases(salvaged: &Salvaged) -> Vec<u64> {
    let alignment = salvaged.payload_alignment_bytes.max(512);
    if alignment.is_multiple_of(UNIT_BYTES) {
        return vec![0];
    }
    let known: HashSet<u64> = salvaged.table.places().map(|(_, payload_bytes)| payload_bytes % UNIT_BYTES).collect();
    if known.is_empty() {
        return (0..UNIT_BYTES).step_by(alignment as usize).collect();
    }
    let mut phases: Vec<u64> = known.into_iter().collect();
    phases.sort_unstable();
    phases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_are_not_counted_are_remembered() {
        let mut uncounted = UncountedBlocks::default();
        assert!(!uncounted.may_hold(5));
        uncounted.add(5);
        uncounted.add(UNCOUNTED_BITS + 7);
        assert!(uncounted.may_hold(5) && uncounted.may_hold(7) && !uncounted.may_hold(6));
    }
}
