//! The free slabs of a member, one bit each, and the search for the next one.
//!
//! The search goes on where the last one ended, so slabs that are taken together lie together.
//!
//! A slab that is given back still takes space in the member's file. Such slabs are known, and the
//! pool gives that space back later ([`FreeSlabs::take_stored`]).

/// Which slabs of a member are free.
#[derive(Debug, Default)]
pub(crate) struct FreeSlabs {
    /// One bit for each slab, set if it is free.
    words: Vec<u64>,
    slabs: u32,
    free: u32,
    /// Where the next search begins.
    next: u32,
    /// One bit for each slab that was given back and may take space, whether it is free or not;
    /// empty if there are none.
    stored: Vec<u64>,
    stored_count: u32,
    /// The word where the next search of these begins.
    stored_from: usize,
}

impl FreeSlabs {
    /// `slabs` slabs, all free.
    pub(crate) fn new(slabs: u32) -> Self {
        let mut words = vec![u64::MAX; slabs.div_ceil(64) as usize];
        if let Some(last) = words.last_mut()
            && !slabs.is_multiple_of(64)
        {
            *last = (1 << (slabs % 64)) - 1;
        }
        Self { words, slabs, free: slabs, next: 0, stored: Vec::new(), stored_count: 0, stored_from: 0 }
    }

    /// Number of free slabs.
    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    /// Takes any slab.
    pub(crate) fn take(&mut self) -> Option<u32> {
        if self.free == 0 {
            return None;
        }
        let (start, count) = ((self.next / 64) as usize, self.words.len());
        // The first word is looked at twice: its bits before `next` come last.
        for step in 0..=count {
            let place = (start + step) % count;
            let mut word = self.words[place];
            if step == 0 {
                word &= u64::MAX << (self.next % 64);
            }
            if word != 0 {
                let slab = place as u32 * 64 + word.trailing_zeros();
                self.take_this(slab);
                self.next = (slab + 1) % self.slabs;
                return Some(slab);
            }
        }
        None
    }

    /// Takes a certain slab. `false` if it is not free.
    pub(crate) fn take_this(&mut self, slab: u32) -> bool {
        let Some(word) = self.words.get_mut(slab as usize / 64) else { return false };
        let bit = 1 << (slab % 64);
        let was_free = *word & bit != 0;
        *word &= !bit;
        self.free -= u32::from(was_free);
        was_free
    }

    /// Takes certain slabs that follow one another. `false` if one of them is not free; the others
    /// are taken then too.
    pub(crate) fn take_these(&mut self, first: u32, count: u32) -> bool {
        let (mut at, Some(end)) = (first, first.checked_add(count).filter(|&end| end <= self.slabs)) else {
            return count == 0;
        };
        let mut taken = 0;
        while at < end {
            let within = (64 - at % 64).min(end - at);
            let bits = u64::MAX >> (64 - within) << (at % 64);
            let word = &mut self.words[at as usize / 64];
            taken += (*word & bits).count_ones();
            *word &= !bits;
            at += within;
        }
        self.free -= taken;
        taken == count
    }

    /// Takes `count` slabs that follow one another, the first ones that there are.
    pub(crate) fn take_run(&mut self, count: u32) -> Option<u32> {
        let is_free = |slab: u32| self.words[slab as usize / 64] >> (slab % 64) & 1 == 1;
        let (mut first, mut found) = (0, 0);
        for slab in 0..self.slabs {
            if found == count {
                break;
            }
            if is_free(slab) {
                found += 1;
            } else {
                (first, found) = (slab + 1, 0);
            }
        }
        if found < count || count == 0 {
            return None;
        }
        (first..first + count).for_each(|slab| {
            self.take_this(slab);
        });
        Some(first)
    }

    /// Takes a free slab that may still take space in the member's file. To be given back by
    /// [`FreeSlabs::give_back_empty`].
    pub(crate) fn take_stored(&mut self) -> Option<u32> {
        let count = self.stored.len();
        let places = (0..count).map(|step| (self.stored_from + step) % count);
        let (place, both) =
            places.map(|place| (place, self.stored[place] & self.words[place])).find(|(_, both)| *both != 0)?;
        self.stored_from = place;
        let slab = place as u32 * 64 + both.trailing_zeros();
        self.take_this(slab);
        Some(slab)
    }

    /// Gives a slab back that takes no space.
    pub(crate) fn give_back_empty(&mut self, slab: u32) {
        self.give_back(slab);
        let Some(word) = self.stored.get_mut(slab as usize / 64) else { return };
        *word &= !(1 << (slab % 64));
        self.stored_count -= 1;
        if self.stored_count == 0 {
            (self.stored, self.stored_from) = (Vec::new(), 0);
        }
    }

    /// Gives a slab back.
    pub(crate) fn give_back(&mut self, slab: u32) {
        if slab >= self.slabs {
            return;
        }
        if self.stored.is_empty() {
            self.stored = vec![0; self.words.len()];
        }
        let stored = &mut self.stored[slab as usize / 64];
        self.stored_count += u32::from(*stored >> (slab % 64) & 1 == 0);
        *stored |= 1 << (slab % 64);
        let word = &mut self.words[slab as usize / 64];
        let bit = 1 << (slab % 64);
        self.free += u32::from(*word & bit == 0);
        *word |= bit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_slab_is_taken_once() {
        for slabs in [0, 1, 63, 64, 65, 200] {
            let mut free = FreeSlabs::new(slabs);
            assert_eq!(free.free(), slabs);
            let taken: HashSet<u32> = std::iter::from_fn(|| free.take()).collect();
            assert_eq!((taken.len() as u32, free.free()), (slabs, 0));
            assert!(taken.iter().all(|&slab| slab < slabs));
        }
    }

    #[test]
    fn certain_slabs_are_taken_word_by_word() {
        let mut free = FreeSlabs::new(200);
        assert!(free.take_these(60, 10) && free.take_these(128, 64) && free.take_these(7, 0));
        assert_eq!(free.free(), 200 - 74);
        assert!(!free.take_these(69, 2), "slab 69 is taken");
        assert!(!free.take_this(70) && free.take_this(71));
        assert!(!free.take_these(199, 2) && !free.take_these(u32::MAX, 2), "beyond the end");
        assert_eq!((0..200).filter(|&slab| free.take_this(slab)).count(), 200 - 74 - 2);
    }

    #[test]
    fn a_run_is_the_first_that_is_long_enough() {
        let mut free = FreeSlabs::new(100);
        free.take_this(3);
        assert_eq!((free.take_run(3), free.take_run(10), free.take_run(0)), (Some(0), Some(4), None));
        assert_eq!((free.take_run(87), free.take_run(86), free.free()), (None, Some(14), 0));
    }

    #[test]
    fn a_slab_that_was_given_back_takes_space_until_it_is_given_back_empty() {
        let mut free = FreeSlabs::new(200);
        assert_eq!(free.take_stored(), None, "none was used");
        (0..150).for_each(|_| _ = free.take());
        [3, 140, 70].into_iter().for_each(|slab| free.give_back(slab));
        let stored: Vec<u32> = std::iter::from_fn(|| free.take_stored()).collect();
        assert_eq!((stored, free.free()), (vec![3, 70, 140], 50));
        [3, 70].into_iter().for_each(|slab| free.give_back_empty(slab));
        free.give_back(140);
        free.take_this(140);
        assert_eq!(free.take_stored(), None, "it is in use again");
        free.give_back(140);
        assert_eq!((free.take_stored(), free.take_stored()), (Some(140), None));
        free.give_back_empty(140);
        assert_eq!((free.free(), free.take_stored(), free.stored.len()), (53, None, 0));
    }

    #[test]
    fn the_search_goes_on_and_comes_back_to_what_was_given_back() {
        let mut free = FreeSlabs::new(130);
        assert_eq!((free.take(), free.take()), (Some(0), Some(1)));
        free.give_back(0);
        free.give_back(0);
        assert_eq!((free.free(), free.take()), (129, Some(2)));
        assert!(free.take_this(129) && !free.take_this(129) && !free.take_this(500));
        (3..129).for_each(|slab| assert_eq!(free.take(), Some(slab)));
        assert_eq!((free.take(), free.take()), (Some(0), None));
    }
}
