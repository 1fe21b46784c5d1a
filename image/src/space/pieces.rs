//! Free pieces of a file by length, the lowest one of a length first.
//!
//! Pieces of one length mostly lie at multiples of it, or at the same distance from these. So their
//! offsets are kept as a set of numbers, where long runs take no memory.

use crate::number_set::NumberSet;
use diskwright_store::FileRange;
use std::collections::{BTreeMap, btree_map::Entry};

/// Free pieces: their lengths, and where they begin relative to a multiple of it, both in bytes, to
/// the numbers of these multiples.
#[derive(Debug, Default)]
pub(super) struct Pieces(BTreeMap<(u64, u64), NumberSet>);

impl Pieces {
    pub(super) fn add(&mut self, offset_bytes: u64, len_bytes: u64) {
        let len_bytes = len_bytes.max(1);
        self.0.entry((len_bytes, offset_bytes % len_bytes)).or_default().insert(offset_bytes / len_bytes);
    }

    pub(super) fn remove(&mut self, offset_bytes: u64, len_bytes: u64) -> bool {
        let len_bytes = len_bytes.max(1);
        let key = (len_bytes, offset_bytes % len_bytes);
        let Some(numbers) = self.0.get_mut(&key) else { return false };
        let was_there = numbers.remove(offset_bytes / len_bytes);
        if numbers.is_empty() {
            self.0.remove(&key);
        }
        was_there
    }

    fn of_len(&self, len_bytes: u64) -> impl Iterator<Item = (u64, &NumberSet)> {
        self.0.range((len_bytes, 0)..=(len_bytes, u64::MAX)).map(|(&(_, phase_bytes), numbers)| (phase_bytes, numbers))
    }

    pub(super) fn first(&self, len_bytes: u64) -> Option<u64> {
        self.of_len(len_bytes)
            .filter_map(|(phase_bytes, numbers)| Some(numbers.first()? * len_bytes + phase_bytes))
            .min()
    }

    /// Takes the first piece of this length, if it begins below `limit_bytes`.
    pub(super) fn take_below(&mut self, len_bytes: u64, limit_bytes: u64) -> Option<u64> {
        let offset_bytes = self.first(len_bytes).filter(|&offset_bytes| offset_bytes < limit_bytes)?;
        self.remove(offset_bytes, len_bytes);
        Some(offset_bytes)
    }

    /// The lengths of pieces from `len_bytes` on.
    pub(super) fn lengths(&self, len_bytes: u64) -> Vec<u64> {
        let mut lengths: Vec<u64> = self.0.range((len_bytes, 0)..).map(|(&(len_bytes, _), _)| len_bytes).collect();
        lengths.dedup();
        lengths
    }

    /// Offset and length of the piece that ends at `end_bytes`.
    pub(super) fn ending_at(&self, end_bytes: u64) -> Option<(u64, u64)> {
        self.0.iter().find_map(|(&(len_bytes, phase_bytes), numbers)| {
            let offset_bytes = end_bytes.checked_sub(len_bytes)?;
            (offset_bytes % len_bytes == phase_bytes && numbers.contains(offset_bytes / len_bytes))
                .then_some((offset_bytes, len_bytes))
        })
    }

    /// The space of all pieces; adjacent ones of a length as one range.
    pub(super) fn ranges(&self) -> impl Iterator<Item = FileRange> {
        self.0.iter().flat_map(|(&(len_bytes, phase_bytes), numbers)| {
            numbers.runs().map(move |run| FileRange {
                offset_bytes: run.start * len_bytes + phase_bytes,
                len_bytes: (run.end - run.start) * len_bytes,
            })
        })
    }

    /// Pieces of `len_bytes` at these multiples of it.
    pub(super) fn of_numbers(numbers: NumberSet, len_bytes: u64) -> Self {
        Self(if numbers.is_empty() { BTreeMap::new() } else { BTreeMap::from([((len_bytes, 0), numbers)]) })
    }

    /// Adds the pieces of another list.
    pub(super) fn append(&mut self, other: Pieces) {
        for (key, numbers) in other.0 {
            match self.0.entry(key) {
                Entry::Vacant(place) => {
                    place.insert(numbers);
                }
                Entry::Occupied(known) => {
                    let known = known.into_mut();
                    numbers.runs().flatten().for_each(|number| known.insert(number));
                }
            }
        }
    }
}
