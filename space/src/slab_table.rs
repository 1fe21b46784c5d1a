//! The map of one file: for each of its slabs the copies, and what is known about them.
//!
//! ```text
//!   entry    places   copy 0 (32 bits), copy 1 (32 bits)
//!            word     copy 2 (32 bits), state (2), stale copies (3), busy, unequal, sealing,
//!                     epoch in which the last write began or ended (8), holds (12), cached,
//!                     logged
//!
//!   hold ─▶ transfer ─▶ release          a transfer; many at the same time
//!   set_busy ─▶ no new holds, wait until there are none ─▶ change ─▶ clear_busy
//! ```
//!
//! A transfer needs no lock: one atomic operation holds a slab, one load finds its copies, and one
//! atomic operation releases it. Invariant: `places` and copy 2 change only while the slab is
//! unmapped, or busy without holds; so what a holder reads stays true until it releases.
//!
//! The table grows by leaves that never move; see [`Leaves`].

use crate::leaves::Leaves;
use diskwright_format::space::{COPIES_MAX, Copy, change::SlabState};
use std::sync::atomic::{AtomicU64, Ordering};

const STATE_SHIFT: u32 = 32;
const STATE: u64 = 3 << STATE_SHIFT;
const DIRTY: u64 = 1 << STATE_SHIFT;
const CLEAN: u64 = 2 << STATE_SHIFT;
const SEALED: u64 = 3 << STATE_SHIFT;
const STALE_SHIFT: u32 = 34;
const STALE: u64 = 7 << STALE_SHIFT;
const BUSY: u64 = 1 << 37;
const UNEQUAL: u64 = 1 << 38;
/// Somebody computes the checksums; cleared by whatever changes the slab meanwhile.
const SEALING: u64 = 1 << 39;
const EPOCH_SHIFT: u32 = 40;
const EPOCH: u64 = 0xff << EPOCH_SHIFT;
const HOLD: u64 = 1 << 48;
const HOLDS: u64 = 0xfff << 48;
/// Holds beyond this are refused; the transfer then takes the slow path. Far below the width of the
/// count, since a write adds up to three.
const HOLDS_MAX: u64 = 0xf00 << 48;
/// The checksums of the sealed slab are probably in the cache.
const CACHED: u64 = 1 << 60;
/// The log of the write-back cache names the slab: nothing may be written past it.
const LOGGED: u64 = 1 << 61;

/// A slab's entry; see the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    places: AtomicU64,
    word: AtomicU64,
}

/// What an entry says at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slab {
    places: u64,
    word: u64,
}

impl Slab {
    /// `None` for a slab that is not mapped: it reads as zeros.
    pub(crate) fn state(self) -> Option<SlabState> {
        match self.word & STATE {
            DIRTY => Some(SlabState::Dirty),
            CLEAN => Some(SlabState::Clean),
            SEALED => Some(SlabState::Sealed),
            _ => None,
        }
    }

    /// The copies, at their places; `None` for a place without one.
    pub(crate) fn copies(self) -> [Option<Copy>; COPIES_MAX] {
        [self.places as u32, (self.places >> 32) as u32, self.word as u32].map(Copy::from_bits)
    }

    /// The copies that are not stale.
    pub(crate) fn good_copies(self) -> impl Iterator<Item = Copy> {
        self.copies()
            .into_iter()
            .enumerate()
            .filter(move |(place, _)| !self.is_stale(*place))
            .filter_map(|(_, copy)| copy)
    }

    /// Whether the copy at a place is stale.
    pub(crate) fn is_stale(self, place: usize) -> bool {
        self.word >> (STALE_SHIFT as usize + place) & 1 == 1
    }

    /// One bit for each stale copy.
    pub(crate) fn stale(self) -> u8 {
        ((self.word & STALE) >> STALE_SHIFT) as u8
    }

    /// Whether the copies that are not stale may differ, so that only the first of them is read.
    pub(crate) fn is_unequal(self) -> bool {
        self.word & UNEQUAL != 0
    }

    pub(crate) fn is_sealed(self) -> bool {
        self.word & STATE == SEALED
    }

    /// Whether the checksums of the sealed slab are probably in the cache.
    pub(crate) fn is_cached(self) -> bool {
        self.word & (STATE | CACHED) == SEALED | CACHED
    }

    /// Whether [`Entry::begin_seal`] was called, and nothing has changed the slab since.
    pub(crate) fn is_sealing(self) -> bool {
        self.word & SEALING != 0
    }

    /// Whether the log of the write-back cache names the slab.
    #[inline]
    pub(crate) fn is_logged(self) -> bool {
        self.word & LOGGED != 0
    }

    /// Rounds since the last write, modulo 256.
    pub(crate) fn rounds_since_write(self, epoch: u8) -> u8 {
        epoch.wrapping_sub(((self.word & EPOCH) >> EPOCH_SHIFT) as u8)
    }

    pub(crate) fn is_busy(self) -> bool {
        self.word & BUSY != 0
    }

    pub(crate) fn is_held(self) -> bool {
        self.word & HOLDS != 0
    }

    /// The stale copies when those on `lost` members (one bit each) can no longer be written. At
    /// least one copy stays: without it, nothing would be left to tell what is stale.
    pub(crate) fn stale_without(self, lost: u64) -> u8 {
        let is_lost = |copy: Copy| lost >> copy.member & 1 == 1;
        let (mut stale, mut is_left) = (self.stale(), false);
        for (place, copy) in self.copies().into_iter().enumerate() {
            match copy {
                Some(copy) if is_lost(copy) => stale |= 1 << place,
                Some(_) => is_left |= !self.is_stale(place),
                None => {}
            }
        }
        if is_left { stale } else { self.stale() }
    }
}

impl Entry {
    pub(crate) fn load(&self) -> Slab {
        let word = self.word.load(Ordering::Acquire);
        Slab { places: self.places.load(Ordering::Acquire), word }
    }

    /// Holds a mapped slab `count` times, for reading. `None` while it is busy or not mapped.
    #[inline]
    pub(crate) fn hold_for_read(&self) -> Option<Slab> {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            if word & STATE == 0 || word & BUSY != 0 || word & HOLDS >= HOLDS_MAX {
                return None;
            }
            match self.word.compare_exchange_weak(word, word + HOLD, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(word) => return Some(Slab { places: self.places.load(Ordering::Acquire), word }),
                Err(other) => word = other,
            }
        }
    }

    /// Holds a dirty slab once for each copy, for writing, and notes the epoch. `None` while it is
    /// busy, unequal, logged or not dirty.
    #[inline]
    pub(crate) fn hold_for_write(&self, copies: u64, epoch: u8) -> Option<Slab> {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            if word & STATE != DIRTY || word & (BUSY | UNEQUAL | LOGGED) != 0 || word & HOLDS >= HOLDS_MAX {
                return None;
            }
            let held = (word & !EPOCH | u64::from(epoch) << EPOCH_SHIFT) + copies * HOLD;
            match self.word.compare_exchange_weak(word, held, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(word) => return Some(Slab { places: self.places.load(Ordering::Acquire), word }),
                Err(other) => word = other,
            }
        }
    }

    /// Ends `count` holds.
    #[inline]
    pub(crate) fn release(&self, count: u64) {
        self.word.fetch_sub(count * HOLD, Ordering::AcqRel);
    }

    /// Ends a hold of a write, and notes the epoch: a sync that began before does not cover it.
    #[inline]
    pub(crate) fn release_write(&self, epoch: u8) {
        self.update(|word| Some((word - HOLD) & !EPOCH | u64::from(epoch) << EPOCH_SHIFT));
    }

    /// Notes that a write to the busy slab has ended in `epoch`.
    pub(crate) fn written(&self, epoch: u8) {
        self.update(|word| Some(word & !EPOCH | u64::from(epoch) << EPOCH_SHIFT));
    }

    /// Changes the word atomically, unless `change` says `None`. Returns the word before.
    fn update(&self, change: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).ok()
    }

    /// Claims the slab, mapped or not: there will be no new holds. `false` if another one has it.
    pub(crate) fn set_busy(&self) -> bool {
        self.update(|word| (word & BUSY == 0).then_some(word | BUSY)).is_some()
    }

    pub(crate) fn clear_busy(&self) {
        self.word.fetch_and(!BUSY, Ordering::AcqRel);
    }

    /// Maps the slab to copies, none of which is stale. The slab is unmapped, or busy without
    /// holds.
    pub(crate) fn map(&self, state: SlabState, copies: [u32; COPIES_MAX]) {
        self.places.store(u64::from(copies[0]) | u64::from(copies[1]) << 32, Ordering::Release);
        let mapped = bits_of(state) | u64::from(copies[2]);
        self.update(|word| Some(word & (BUSY | EPOCH | HOLDS | LOGGED) | mapped));
    }

    /// The same in a replay, where nobody else uses the slab, and it is not mapped.
    #[inline]
    pub(crate) fn map_alone(&self, state: SlabState, copies: [u32; COPIES_MAX]) {
        self.places.store(u64::from(copies[0]) | u64::from(copies[1]) << 32, Ordering::Relaxed);
        self.word.store(bits_of(state) | u64::from(copies[2]), Ordering::Release);
    }

    /// Unmaps the slab, which is busy without holds.
    pub(crate) fn unmap(&self) {
        self.update(|word| Some(word & (BUSY | EPOCH | HOLDS)));
        self.places.store(0, Ordering::Release);
    }

    /// Sets the state of a mapped slab. A slab that becomes dirty loses its copies on `lost`
    /// members. Returns whether the slab is mapped.
    pub(crate) fn set_state(&self, state: SlabState, lost: u64) -> bool {
        let places = self.places.load(Ordering::Acquire);
        let changed = self.update(|word| match state {
            _ if word & STATE == 0 => None,
            SlabState::Clean => Some(word & !(STATE | UNEQUAL | SEALING | CACHED) | CLEAN),
            SlabState::Sealed => Some(word & !(STATE | UNEQUAL | SEALING) | SEALED),
            SlabState::Dirty => {
                let stale = Slab { places, word }.stale_without(lost);
                Some(word & !(STATE | STALE | SEALING | CACHED) | DIRTY | u64::from(stale) << STALE_SHIFT)
            }
        });
        changed.is_some()
    }

    pub(crate) fn set_stale(&self, mask: u8) {
        // A copy that is valid from now on may lack the record that is being written.
        self.update(|word| Some(word & !(STALE | SEALING) | u64::from(mask & 7) << STALE_SHIFT));
    }

    pub(crate) fn set_unequal(&self, unequal: bool) {
        self.update(|word| Some(if unequal { word | UNEQUAL } else { word & !UNEQUAL }));
    }

    /// Makes a dirty slab clean if it has no holds and its last write ended before the epoch that
    /// came before `epoch`: what was written a moment ago is soon written again.
    pub(crate) fn clean_if_idle(&self, epoch: u8) -> bool {
        self.update(|word| is_idle(word, epoch).then_some(word & !STATE | CLEAN)).is_some()
    }

    /// Notes that somebody computes the checksums of the clean slab. `None` if it is not clean, or
    /// busy.
    pub(crate) fn begin_seal(&self) -> Option<Slab> {
        let begun = |word: u64| word & STATE == CLEAN && word & (BUSY | UNEQUAL) == 0;
        let word = self.update(|word| begun(word).then_some(word | SEALING))?;
        Some(Slab { places: self.places.load(Ordering::Acquire), word })
    }

    /// Makes the slab sealed if nothing has changed it since [`Entry::begin_seal`].
    pub(crate) fn seal(&self) -> bool {
        let is_same = |word: u64| word & (STATE | SEALING | BUSY) == CLEAN | SEALING;
        self.update(|word| is_same(word).then_some(word & !(STATE | SEALING) | SEALED | CACHED)).is_some()
    }

    /// Notes that nobody computes checksums any more.
    pub(crate) fn end_seal(&self) {
        self.word.fetch_and(!SEALING, Ordering::AcqRel);
    }

    /// Notes whether the checksums of the slab are in the cache, if it is sealed.
    pub(crate) fn set_cached(&self, cached: bool) {
        let is_sealed = |word: u64| word & STATE == SEALED;
        self.update(|word| is_sealed(word).then_some(if cached { word | CACHED } else { word & !CACHED }));
    }

    /// Notes whether the log of the write-back cache names the slab.
    pub(crate) fn set_logged(&self, logged: bool) {
        self.update(|word| Some(if logged { word | LOGGED } else { word & !LOGGED }));
    }

    /// Whether [`Entry::clean_if_idle`] would do it now.
    pub(crate) fn is_idle(&self, epoch: u8) -> bool {
        is_idle(self.word.load(Ordering::Acquire), epoch)
    }
}

fn bits_of(state: SlabState) -> u64 {
    match state {
        SlabState::Dirty => DIRTY,
        SlabState::Clean => CLEAN,
        SlabState::Sealed => SEALED,
    }
}

fn is_idle(word: u64, epoch: u8) -> bool {
    let last = ((word & EPOCH) >> EPOCH_SHIFT) as u8;
    word & STATE == DIRTY && word & (BUSY | UNEQUAL | HOLDS) == 0 && last != epoch && last != epoch.wrapping_sub(1)
}

/// The entries of a file's slabs, by their index.
pub(crate) type SlabTable = Leaves<Entry>;

impl SlabTable {
    /// The mapped slabs of a range of indices, in order.
    pub(crate) fn mapped(&self, range: std::ops::Range<u64>) -> impl Iterator<Item = (u32, &Entry)> {
        self.existing(range).filter(|(_, entry)| entry.load().state().is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copies(members: [Option<u8>; 3]) -> [u32; 3] {
        members.map(|member| member.map_or(0, |member| Copy { member, slab: 7 }.to_bits()))
    }

    #[test]
    fn a_slab_is_held_only_while_it_is_mapped_and_not_busy() {
        let entry = Entry::default();
        assert!(entry.hold_for_read().is_none());
        entry.map(SlabState::Clean, copies([Some(1), Some(2), Some(3)]));
        assert!(entry.hold_for_write(3, 1).is_none(), "a clean slab must first become dirty");
        let held = entry.hold_for_read().unwrap();
        assert_eq!(held.good_copies().map(|copy| copy.member).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(entry.set_state(SlabState::Dirty, 0));
        entry.hold_for_write(3, 9).unwrap();
        assert!(entry.set_busy() && !entry.set_busy());
        assert!(entry.hold_for_read().is_none() && entry.hold_for_write(3, 9).is_none());
        assert!(entry.load().is_held());
        entry.release(4);
        assert!(!entry.load().is_held());
        entry.unmap();
        entry.clear_busy();
        assert_eq!(entry.load().state(), None);
        assert!(!entry.set_state(SlabState::Dirty, 0), "an unmapped slab has no state");
    }

    #[test]
    fn a_slab_is_clean_when_no_write_of_this_epoch_has_touched_it() {
        let entry = Entry::default();
        entry.map(SlabState::Dirty, copies([Some(1), None, None]));
        entry.hold_for_write(1, 5).unwrap();
        assert!(!entry.clean_if_idle(7), "a write is under way");
        entry.release_write(5);
        entry.hold_for_write(1, 5).unwrap();
        entry.release_write(9);
        assert!(!entry.is_idle(9) && !entry.is_idle(10) && entry.is_idle(11), "the end of a write counts");
        entry.written(5);
        assert!(!entry.clean_if_idle(5) && !entry.is_idle(6), "it was written a moment ago");
        entry.set_unequal(true);
        assert!(!entry.clean_if_idle(7));
        entry.set_unequal(false);
        assert!(entry.is_idle(7) && entry.clean_if_idle(7) && !entry.clean_if_idle(7));
        assert_eq!(entry.load().state(), Some(SlabState::Clean));
    }

    #[test]
    fn the_last_good_copy_never_becomes_stale() {
        let entry = Entry::default();
        entry.map(SlabState::Clean, copies([Some(1), Some(2), None]));
        entry.set_state(SlabState::Dirty, 1 << 1);
        assert_eq!(entry.load().stale(), 0b001);
        entry.set_state(SlabState::Dirty, 1 << 1 | 1 << 2);
        assert_eq!(entry.load().stale(), 0b001, "the copy on member 2 is the last one");
        entry.set_stale(0);
        assert_eq!(entry.load().good_copies().count(), 2);
    }

    #[test]
    fn entries_do_not_move_and_empty_leaves_are_not_allocated() {
        let table = SlabTable::default();
        assert!(table.get(0).is_none() && table.get(u32::MAX).is_none());
        let indices = [0, 1, 1023, 1024, 3 * 1024 - 1, 3 * 1024, 1 << 20, u32::MAX];
        for index in indices {
            table.entry(index).map(SlabState::Clean, copies([Some(1), None, None]));
        }
        assert_eq!(table.mapped(0..1 << 32).map(|(index, _)| index).collect::<Vec<_>>(), indices);
        assert_eq!(table.mapped(1..1024).count(), 2);
        assert!(table.get(5 << 20).is_none());
    }
}
