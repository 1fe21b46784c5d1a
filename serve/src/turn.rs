//! How many requests a worker answers before it lets the client and the disk go on.
//!
//! Some disks take all queued requests as one batch and signal their completion once. Virtual
//! disks do this: a virtio disk here raised one interrupt for 32 requests. If a worker answers the
//! whole batch at once, client and disk run in lockstep: the client takes all answers, sends all
//! new requests, and the disk is idle meanwhile.
//!
//! So a turn answers only a few requests ([`Pace::answers`]) and sends the answers. It then yields
//! the processor to a thread that waits for it ([`Pace::end_turn`]), takes new requests, and
//! answers a few more. The disk has work again while most of the batch is still unanswered. For
//! 4 KiB reads at depth 32 on such a disk this gave 1.4 times the reads, at 1.3 times the worker's
//! CPU time. How few is a constant of each door ([`Pace::answering`]): more answers in a turn save
//! CPU time, fewer keep the disk busier (docs/measurements.md, "Answers of a turn").
//!
//! A client that was woken sends new requests within microseconds. If another program takes the
//! processor instead and keeps it for a time slice, yielding costs more than it gains. The worker
//! then answers everything at once for a number of turns. That number doubles with each loss.

use diskwright_store::SharedRing;
use std::{
    io, thread,
    time::{Duration, Instant},
};

/// Requests that are answered in a turn without a pause. It is limited because an answer may start
/// the next step of a long operation.
const MANY: usize = 256;

/// A longer `yield_now` means that another program had the processor.
const PATIENCE: Duration = Duration::from_micros(200);

/// Turns without a pause: after the first loss, and at most.
const PENALTY_TURNS: (u32, u32) = (64, 4096);

/// Decides how many requests a turn answers. See the module.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Requests that are answered in a normal turn.
    few: usize,
    /// Turns left without a pause.
    hurried: u32,
    /// Length of the last run without pauses. Halved by each turn whose yield was short.
    penalty: u32,
}

impl Pace {
    /// Answers so many requests in a normal turn.
    pub(crate) fn answering(few: usize) -> Self {
        Self { few, hurried: 0, penalty: 0 }
    }

    /// Begins a turn. Returns how many requests to answer in it.
    pub(crate) fn answers(&mut self) -> usize {
        if self.hurried == 0 {
            return self.few;
        }
        self.hurried -= 1;
        MANY
    }

    /// Ends a turn: submits everything. If there is nothing more to answer (`has_more` is false),
    /// sleeps until a completion arrives.
    ///
    /// # Errors
    /// The ring failed.
    pub(crate) fn end_turn(&mut self, ring: &SharedRing, has_more: bool) -> io::Result<()> {
        if !has_more {
            return ring.wait();
        }
        ring.go_on()?;
        let before = Instant::now();
        // The answers have woken the client, often onto this processor: let it run.
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

    const FEW: usize = 4;
    const SHORT: Duration = Duration::from_micros(20);
    const LONG: Duration = Duration::from_millis(3);

    /// Turns until only a few are answered again.
    fn hurried(pace: &mut Pace) -> u32 {
        (0..).take_while(|_| pace.answers() > FEW).count() as u32
    }

    #[test]
    fn a_few_are_answered_while_yields_are_short() {
        let mut pace = Pace::answering(FEW);
        for _ in 0..1000 {
            assert_eq!(pace.answers(), FEW);
            pace.judge(SHORT);
        }
    }

    #[test]
    fn long_yields_lengthen_the_runs_without_pauses_and_are_forgotten() {
        let mut pace = Pace::answering(FEW);
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
