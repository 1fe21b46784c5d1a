//! The pace of moves between the tiers: how long to wait after each, so that those who work hardly
//! notice.
//!
//! ```text
//!   a counted request begins ─▶ a slot: when, and whether a slab is being moved
//!                     ends   ─▶ its latency, into the mean of quiet or of disturbed requests
//!   a move ends ─▶ disturbed ones take a quarter longer? ─ yes ─▶ pauses of twice the length
//!                                                        └ no  ─▶ an eighth shorter
//! ```
//!
//! A pause is a multiple of the time that the move took, up to a second. While nobody works there
//! are none. Latencies are measured only while somebody moves slabs. The numbers are estimates:
//! requests of several threads may change a mean at the same time, and a slot is used again after
//! [`SLOTS`] requests, though its request may not have ended.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Counted requests that are timed at once.
const SLOTS: u32 = 64;
/// How much a request counts in its mean: one part in this many.
const WEIGHT: u64 = 16;
/// Pauses are counted in eighths of the time that a move took.
const EIGHTHS: u32 = 8;
/// The first pause: three times as long as the move.
const FIRST: u32 = 3 * EIGHTHS;
/// The longest one.
const LONGEST: u32 = 64 * EIGHTHS;
/// No pause is longer, whatever the move took.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Without a request for this long nobody works.
const LATELY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Pace {
    origin: Instant,
    /// Who moves slabs now, or makes a pause.
    movers: AtomicU32,
    /// Moves under way.
    moves: AtomicU32,
    next_slot: AtomicU32,
    /// When the request began, nanoseconds; the lowest bit says whether a move was under way.
    slots: [AtomicU64; SLOTS as usize],
    /// Mean latencies; 0 if there are none.
    quiet_ns: AtomicU64,
    disturbed_ns: AtomicU64,
    /// Length of a pause.
    eighths: AtomicU32,
    /// When the last request began.
    last_ns: AtomicU64,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            origin: Instant::now(),
            movers: AtomicU32::new(0),
            moves: AtomicU32::new(0),
            next_slot: AtomicU32::new(0),
            slots: [const { AtomicU64::new(0) }; SLOTS as usize],
            quiet_ns: AtomicU64::new(0),
            disturbed_ns: AtomicU64::new(0),
            eighths: AtomicU32::new(FIRST),
            last_ns: AtomicU64::new(0),
        }
    }
}

/// Somebody who moves slabs. While there is one, latencies are measured.
pub(crate) struct Mover<'a>(&'a Pace);

impl Drop for Mover<'_> {
    fn drop(&mut self) {
        self.0.movers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A move under way.
pub(crate) struct MoveUnderWay<'a>(&'a Pace);

impl Drop for MoveUnderWay<'_> {
    fn drop(&mut self) {
        self.0.moves.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pace {
    pub(crate) fn mover(&self) -> Mover<'_> {
        self.movers.fetch_add(1, Ordering::Relaxed);
        Mover(self)
    }

    pub(crate) fn start_move(&self) -> MoveUnderWay<'_> {
        self.moves.fetch_add(1, Ordering::Relaxed);
        MoveUnderWay(self)
    }

    fn now_ns(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    fn is_disturbed(&self) -> bool {
        self.moves.load(Ordering::Relaxed) > 0
    }

    /// A counted request begins. Its slot, from 1; 0 if it is not timed.
    #[inline]
    pub(crate) fn begin(&self) -> u8 {
        if self.movers.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let slot = self.next_slot.fetch_add(1, Ordering::Relaxed) % SLOTS;
        let now_ns = self.now_ns();
        self.last_ns.store(now_ns, Ordering::Relaxed);
        self.slots[slot as usize].store(now_ns << 1 | u64::from(self.is_disturbed()), Ordering::Relaxed);
        slot as u8 + 1
    }

    /// The request of a slot has ended.
    #[inline]
    pub(crate) fn end(&self, slot: u8) {
        let Some(slot) = usize::from(slot).checked_sub(1).and_then(|slot| self.slots.get(slot)) else { return };
        let begun = slot.load(Ordering::Relaxed);
        self.note(self.now_ns().saturating_sub(begun >> 1), begun & 1 == 1 || self.is_disturbed());
    }

    fn note(&self, latency_ns: u64, is_disturbed: bool) {
        let mean = if is_disturbed { &self.disturbed_ns } else { &self.quiet_ns };
        let before = mean.load(Ordering::Relaxed);
        let after = if before == 0 { latency_ns } else { before - before / WEIGHT + latency_ns / WEIGHT };
        mean.store(after.max(1), Ordering::Relaxed);
    }

    /// Whether requests were timed both beside moves and without them.
    #[cfg(test)]
    pub(crate) fn knows_latencies(&self) -> bool {
        [&self.quiet_ns, &self.disturbed_ns].iter().all(|mean| mean.load(Ordering::Relaxed) > 0)
    }

    /// How long to wait after a move that took `took`.
    pub(crate) fn pause(&self, took: Duration) -> Duration {
        let last_ns = self.last_ns.load(Ordering::Relaxed);
        if last_ns == 0 || self.now_ns().saturating_sub(last_ns) > LATELY.as_nanos() as u64 {
            return Duration::ZERO;
        }
        self.pause_beside_others(took).min(PAUSE_MAX)
    }

    fn pause_beside_others(&self, took: Duration) -> Duration {
        let [quiet_ns, disturbed_ns] = [&self.quiet_ns, &self.disturbed_ns].map(|mean| mean.load(Ordering::Relaxed));
        let before = self.eighths.load(Ordering::Relaxed);
        let eighths = if quiet_ns == 0 || disturbed_ns == 0 {
            before
        } else if disturbed_ns / 5 > quiet_ns / 4 {
            (before * 2).min(LONGEST)
        } else {
            (before - before.div_ceil(EIGHTHS)).max(1)
        };
        self.eighths.store(eighths, Ordering::Relaxed);
        took * eighths / EIGHTHS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_long_while_others_wait_and_short_while_they_do_not() {
        let pace = Pace::default();
        let took = Duration::from_millis(8);
        assert_eq!(pace.pause(took), Duration::ZERO, "nobody works");
        assert_eq!(pace.pause_beside_others(took), 3 * took, "nothing is known");
        (0..100).for_each(|_| pace.note(1_000_000, false));
        (0..100).for_each(|_| pace.note(1_100_000, true));
        let last = (0..40).map(|_| pace.pause_beside_others(took)).last();
        assert_eq!(last, Some(took / 8));
        (0..100).for_each(|_| pace.note(3_000_000, true));
        let pauses: Vec<Duration> = (0..20).map(|_| pace.pause_beside_others(took)).collect();
        assert_eq!((pauses[0], pauses[19]), (took / 4, 64 * took));
        (0..100).for_each(|_| pace.note(1_000_000, true));
        assert!(pace.pause_beside_others(took) < 64 * took);
    }

    #[test]
    fn requests_are_timed_only_while_somebody_moves_slabs() {
        let pace = Pace::default();
        assert_eq!(pace.begin(), 0);
        pace.end(0);
        let mover = pace.mover();
        let quiet = pace.begin();
        std::thread::sleep(Duration::from_millis(2));
        pace.end(quiet);
        let disturbed = pace.begin();
        let moving = pace.start_move();
        pace.end(disturbed);
        assert_eq!(pace.pause(Duration::from_secs(9)), PAUSE_MAX);
        drop((moving, mover));
        let known = [&pace.quiet_ns, &pace.disturbed_ns].map(|mean| mean.load(Ordering::Relaxed));
        assert!(known[0] >= 2_000_000 && known[1] > 0 && known[1] < known[0], "{known:?}");
        assert_eq!((pace.begin(), pace.is_disturbed()), (0, false));
    }
}
