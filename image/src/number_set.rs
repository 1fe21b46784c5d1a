//! A set of numbers that lie close together: free pieces of a file, clusters.
//!
//! ```text
//!   number ─▶ word (64 numbers) ─┬─ all of its bits set: in a run of full words
//!                                ├─ some:              a word with its bits
//!                                └─ none:              nothing
//! ```
//!
//! Long runs take the memory of one entry, and numbers between others that are missing take some
//! bits of a word. So a file whose every other cluster is free costs half a byte for each cluster,
//! where a tree of numbers would cost 12.

use std::{collections::BTreeMap, iter::Peekable, ops::Range};

const BITS: u64 = 64;

/// A set of numbers.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct NumberSet {
    /// Words with some of their bits, by index.
    words: BTreeMap<u64, u64>,
    /// Runs of words with all bits: the first index to the index after the last one.
    full: BTreeMap<u64, u64>,
}

impl NumberSet {
    pub fn is_empty(&self) -> bool {
        self.words.is_empty() && self.full.is_empty()
    }

    /// Number of entries in memory.
    pub fn entries(&self) -> usize {
        self.words.len() + self.full.len()
    }

    /// The run of full words that holds this word.
    fn full_run(&self, word: u64) -> Option<Range<u64>> {
        let (&start, &end) = self.full.range(..=word).next_back()?;
        (word < end).then_some(start..end)
    }

    pub fn contains(&self, number: u64) -> bool {
        let word = number / BITS;
        self.words.get(&word).is_some_and(|bits| bits >> (number % BITS) & 1 == 1) || self.full_run(word).is_some()
    }

    pub fn insert(&mut self, number: u64) {
        self.insert_bits(number / BITS, 1 << (number % BITS));
    }

    fn insert_bits(&mut self, word: u64, bits: u64) {
        if self.full_run(word).is_some() {
            return;
        }
        let known = self.words.entry(word).or_default();
        *known |= bits;
        if *known == u64::MAX {
            self.words.remove(&word);
            self.insert_full(word..word + 1);
        }
    }

    /// Adds full words that are in no run, and not among the other words.
    fn insert_full(&mut self, mut words: Range<u64>) {
        if let Some(end) = self.full.remove(&words.end) {
            words.end = end;
        }
        match self.full.range_mut(..words.start).next_back() {
            Some((_, end)) if *end == words.start => *end = words.end,
            _ => {
                self.full.insert(words.start, words.end);
            }
        }
    }

    /// Adds all numbers of a range that begins after the last number of the set.
    pub fn push(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (first, last) = (range.start / BITS, (range.end - 1) / BITS);
        let head = u64::MAX << (range.start % BITS);
        let tail = u64::MAX >> (BITS - 1 - (range.end - 1) % BITS);
        if first == last {
            return self.insert_bits(first, head & tail);
        }
        self.insert_bits(first, head);
        if first + 1 < last {
            self.insert_full(first + 1..last);
        }
        self.insert_bits(last, tail);
    }

    /// Removes a number. Returns whether it was there.
    pub fn remove(&mut self, number: u64) -> bool {
        let (word, bit) = (number / BITS, 1 << (number % BITS));
        if let Some(bits) = self.words.get_mut(&word) {
            let was_there = *bits & bit != 0;
            *bits &= !bit;
            if *bits == 0 {
                self.words.remove(&word);
            }
            return was_there;
        }
        let Some(run) = self.full_run(word) else { return false };
        self.full.remove(&run.start);
        for part in [run.start..word, word + 1..run.end] {
            if !part.is_empty() {
                self.full.insert(part.start, part.end);
            }
        }
        self.words.insert(word, !bit);
        true
    }

    pub fn first(&self) -> Option<u64> {
        let some = self.words.first_key_value().map(|(&word, &bits)| word * BITS + u64::from(bits.trailing_zeros()));
        let full = self.full.first_key_value().map(|(&word, _)| word * BITS);
        some.into_iter().chain(full).min()
    }

    /// The numbers, ascending, as runs that do not touch each other.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let some = self.words.iter().flat_map(|(&word, &bits)| runs_of_word(word, bits));
        let full = self.full.iter().map(|(&start, &end)| start * BITS..end.saturating_mul(BITS));
        let merged = merge(some.peekable(), full.peekable()).peekable();
        join(merged)
    }
}

fn runs_of_word(word: u64, bits: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let left = bits.checked_shr(at).filter(|&left| left != 0)?;
        let start = at + left.trailing_zeros();
        let end = start + (bits >> start).trailing_ones();
        at = end;
        Some(word * BITS + u64::from(start)..word * BITS + u64::from(end))
    })
}

/// Two lists of ranges as one, in the order of their starts.
fn merge<A, B>(mut one: Peekable<A>, mut other: Peekable<B>) -> impl Iterator<Item = Range<u64>>
where
    A: Iterator<Item = Range<u64>>,
    B: Iterator<Item = Range<u64>>,
{
    std::iter::from_fn(move || match (one.peek(), other.peek()) {
        (Some(first), Some(second)) if first.start > second.start => other.next(),
        (Some(_), _) => one.next(),
        (None, _) => other.next(),
    })
}

/// Joins ranges that touch each other.
fn join<I: Iterator<Item = Range<u64>>>(mut ranges: Peekable<I>) -> impl Iterator<Item = Range<u64>> {
    std::iter::from_fn(move || {
        let mut run = ranges.next()?;
        while let Some(next) = ranges.next_if(|next| next.start == run.end) {
            run.end = next.end;
        }
        Some(run)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn is_a_set(steps in proptest::collection::vec((0u64..700, 0u64..300, 0u8..8), 1..200)) {
            let (mut set, mut model) = (NumberSet::default(), BTreeSet::new());
            for (number, len, kind) in steps {
                match kind {
                    0..3 => {
                        set.insert(number);
                        model.insert(number);
                    }
                    3..6 => prop_assert_eq!(set.remove(number), model.remove(&number)),
                    6 => (number..number + len).for_each(|number| {
                        set.insert(number);
                        model.insert(number);
                    }),
                    _ => {
                        let start = model.last().map_or(0, |last| last + 1) + number % 70;
                        set.push(start..start + len);
                        model.extend(start..start + len);
                    }
                }
                prop_assert_eq!(set.first(), model.first().copied());
                prop_assert_eq!(set.contains(number), model.contains(&number));
                prop_assert_eq!(set.is_empty(), model.is_empty());
            }
            let runs: Vec<_> = set.runs().collect();
            prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
            prop_assert!(runs.into_iter().flatten().eq(model));
        }
    }

    #[test]
    fn long_runs_and_bits_take_little_memory() {
        let mut set = NumberSet::default();
        set.push(3..1 << 50);
        assert!(set.entries() < 4);
        assert!(set.runs().eq(std::iter::once(3..1 << 50)));
        let mut alternating = NumberSet::default();
        (0..64_000).step_by(2).for_each(|number| alternating.insert(number));
        assert_eq!(alternating.entries(), 1000);
        assert_eq!(alternating.runs().count(), 32_000);
    }
}
