//! How much a worker answers before it lets others go on.
//!
//! Some disks take what is there as one batch and tell of its end once; virtual ones do (a virtio
//! disk here raised one interrupt for 32 requests). A worker that answers a batch in one go makes a
//! lockstep of it: the client takes all the answers, asks for everything again, and all the while
//! the disk has nothing to do. So a turn answers a few requests ([`Pace::answers`]), has them sent,
//! lets whoever waits for this very processor have it ([`Pace::end_turn`]), takes what is new, and
//! answers a few more: the disk works again while most of the batch is still on its way. From 4 KiB
//! reads at depth 32 on such a disk this made 1.4 times as many, at 1.3 times the worker's time.
//!
//! A client that was woken answers within microseconds. Where something else takes the processor
//! instead, and keeps it for a time slice, to let go of it is a loss: then everything is answered
//! in one go for a while, which gets longer each time.

use diskwright_store::SharedRing;
use std::{
    io, thread,
    time::{Duration, Instant},
};

/// Requests that are answered in a turn.
const FEW: usize = 4;

/// The same in a hurry. There is an end to it, for an answer may begin the next step of something
/// long.
const MANY: usize = 256;

/// A processor that comes back later than this was taken by somebody who does not answer us.
const PATIENCE: Duration = Duration::from_micros(200);

/// Turns without a pause after the first loss, and after many.
const PENALTY_TURNS: (u32, u32) = (64, 4096);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Turns that are still to go without a pause.
    hurried: u32,
    /// How many there were after the last loss, less what went well since.
    penalty: u32,
}

impl Pace {
    /// Begins a turn, and says how many requests are to be answered in it.
    pub(crate) fn answers(&mut self) -> usize {
        if self.hurried == 0 {
            return FEW;
        }
        self.hurried -= 1;
        MANY
    }

    /// Ends a turn: submits everything, and sleeps until something comes, unless there is more to
    /// answer.
    ///
    /// # Errors
    /// The ring itself has failed.
    pub(crate) fn end_turn(&mut self, ring: &SharedRing, has_more: bool) -> io::Result<()> {
        if !has_more {
            return ring.wait();
        }
        ring.go_on()?;
        let before = Instant::now();
        // The client was woken by what was sent, and often onto this processor.
        thread::yield_now();
        self.judge(before.elapsed());
        Ok(())
    }

    fn judge(&mut self, away: Duration) {
        if away > PATIENCE {
            self.penalty = self.penalty.saturating_mul(2).clamp(PENALTY_TURNS.0, PENALTY_TURNS.1);
            self.hurried = self.penalty;
        } else {
            self.penalty /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_micros(20);
    const LONG: Duration = Duration::from_millis(3);

    /// Turns until a few are answered again.
    fn hurried(pace: &mut Pace) -> u32 {
        (0..).take_while(|_| pace.answers() > FEW).count() as u32
    }

    #[test]
    fn a_few_are_answered_while_the_processor_comes_back_soon() {
        let mut pace = Pace::default();
        for _ in 0..1000 {
            assert_eq!(pace.answers(), FEW);
            pace.judge(SHORT);
        }
    }

    #[test]
    fn losses_are_paid_for_by_longer_and_longer_hurry_and_forgotten() {
        let mut pace = Pace::default();
        let lose = |pace: &mut Pace| {
            pace.judge(LONG);
            hurried(pace)
        };
        assert_eq!([64, 128, 256].map(|_| lose(&mut pace)), [64, 128, 256]);
        assert_eq!((0..10).map(|_| lose(&mut pace)).max(), Some(PENALTY_TURNS.1));
        (0..20).for_each(|_| pace.judge(SHORT));
        assert_eq!(lose(&mut pace), PENALTY_TURNS.0);
    }
}
