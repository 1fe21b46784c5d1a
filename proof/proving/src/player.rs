//! A player: one queue of a block device with several requests in flight, and a ledger of what its
//! user may rely on.
//!
//! [`crate::disk`] runs one request after the other, so that a seed reproduces a run. A player runs
//! as fast as the device allows, concurrently with other players, until it is told to stop or the
//! device fails: by `kill -9`, by a fault, by a power cut. The players of one disk have windows of
//! their own, so each knows what its sectors may show, but they share blocks.
//!
//! ```text
//!   batch of disjoint writes, zeroes, discards ─▶ all announced ─▶ pushed ─▶ reaped: each is
//!     acknowledged or failed
//!   flush, alone ─▶ everything acknowledged before it is durable
//! ```

use crate::{
    contents::SECTOR_BYTES,
    dice::Dice,
    ledger::{Announced, Ledger, Version, Window, stamp},
    stage::Outcome,
};
use diskwright_store::{BlockDevice, BlockQueue, Blocking, EngineKind, IoBuf, Operation, QueueOptions, Request};
use std::io;

/// Maximum number of requests in a batch.
pub const DEPTH: usize = 8;
/// Maximum number of sectors of one request, except requests for a whole window.
const SECTORS_MAX: u64 = 64;

/// What a player reports together with its ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// Requests are about to be pushed.
    Before,
    /// This many requests have succeeded.
    After(u64),
}

/// A player, see the module.
#[derive(Debug)]
pub struct Player {
    windows: Vec<Window>,
    ledger: Ledger,
    dice: Dice,
    version: Version,
}

/// A planned request and its entry in the ledger.
struct Planned {
    operation: Operation,
    first: u64,
    count: u64,
    version: Version,
    fua: bool,
    announced: Option<Announced>,
}

impl Player {
    /// A player with these windows, whose sectors show `base` at the start.
    pub fn new(windows: &[Window], base: impl Fn(u64) -> Version, seed: u64) -> Self {
        let ledger = Ledger::new(windows, base);
        Self { windows: windows.to_vec(), ledger, dice: Dice::new(seed, 0x91a7), version: 0 }
    }

    /// A player that continues with a ledger. All writes of the ledger must be durable.
    pub fn with(ledger: Ledger, seed: u64) -> Self {
        let windows = ledger.windows().to_vec();
        // Far from the versions that other players have written.
        let version = (seed as Version | 1) << 12;
        Self { windows, ledger, dice: Dice::new(seed, 0x91a8), version }
    }

    /// Its ledger, after it has played.
    pub fn into_ledger(self) -> Ledger {
        self.ledger
    }

    /// What its user may rely on.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Plays until `goes_on` returns `false` or the device fails. `goes_on` is called before and
    /// after each change of the ledger.
    ///
    /// # Errors
    /// The first failure of the device. Writes that were not acknowledged by then may be visible or
    /// not.
    pub fn play(
        &mut self,
        device: &dyn BlockDevice,
        engine: EngineKind,
        goes_on: &mut dyn FnMut(Told, &Ledger) -> bool,
    ) -> io::Result<()> {
        let options = QueueOptions { depth: DEPTH, engine, ..QueueOptions::default() };
        let mut queue = device.open_queue(&options)?;
        while goes_on(Told::After(0), &self.ledger) {
            if self.dice.percent(15) {
                let mark = self.ledger.mark();
                let flush = Planned {
                    operation: Operation::Flush,
                    first: 0,
                    count: 0,
                    version: 0,
                    fua: false,
                    announced: None,
                };
                self.carry_out(&mut *queue, vec![flush])?;
                self.ledger.flushed(mark);
                goes_on(Told::After(1), &self.ledger);
            } else {
                let batch = self.batch();
                goes_on(Told::Before, &self.ledger);
                let done = self.carry_out(&mut *queue, batch)?;
                goes_on(Told::After(done), &self.ledger);
            }
        }
        Ok(())
    }

    /// Random requests that do not overlap, announced in the ledger.
    fn batch(&mut self) -> Vec<Planned> {
        let wanted = 1 + self.dice.below(DEPTH as u64);
        let mut batch: Vec<Planned> = Vec::new();
        for _ in 0..wanted {
            let window = *self.dice.pick(&self.windows);
            let what = self.dice.below(100);
            let (first, count) = if what < 8 {
                (window.first, window.count)
            } else {
                let most = if self.dice.percent(70) { 8 } else { SECTORS_MAX };
                let first = self.dice.below(window.count);
                (window.first + first, (1 + self.dice.below(most)).min(window.count - first))
            };
            if batch.iter().any(|other| first < other.first + other.count && other.first < first + count) {
                continue;
            }
            let operation = match what {
                0..3 | 8..12 => Operation::Discard,
                3..6 | 12..16 => Operation::WriteZeroes,
                _ => Operation::Write,
            };
            self.version += 1;
            let version = if operation == Operation::Write { self.version } else { 0 };
            let announced = Some(self.ledger.announce(first, count, version));
            batch.push(Planned { operation, first, count, version, fua: self.dice.percent(10), announced });
        }
        batch
    }

    /// Pushes all requests, waits for all, and acknowledges those that succeeded. Returns their
    /// number.
    fn carry_out(&mut self, queue: &mut dyn BlockQueue, batch: Vec<Planned>) -> io::Result<u64> {
        let mut outcome = Ok(());
        for (tag, planned) in (0..).zip(&batch) {
            let (offset_bytes, len_bytes) = (planned.first * SECTOR_BYTES, planned.count * SECTOR_BYTES);
            let request = match planned.operation {
                Operation::Write => {
                    let mut buf = IoBuf::new(len_bytes as usize);
                    stamp(&mut buf, planned.first, planned.version);
                    Request::write(offset_bytes, len_bytes as usize, buf, tag)
                }
                Operation::WriteZeroes => Request::write_zeroes(offset_bytes, len_bytes, tag),
                Operation::Discard => Request::discard(offset_bytes, len_bytes, tag),
                Operation::Flush | Operation::Read => Request::flush(tag),
            };
            if let Err(refused) = queue.push(Request { fua: planned.fua, ..request }) {
                outcome = Err(refused.reason);
                break;
            }
        }
        let (mut done, mut acknowledged) = (Vec::new(), 0);
        while queue.in_flight() > 0 {
            let reaped = queue.reap(1, &mut done);
            for completion in done.drain(..) {
                match (completion.result, &batch[completion.tag as usize]) {
                    (Ok(()), planned) => {
                        acknowledged += 1;
                        if let Some(announced) = planned.announced {
                            self.ledger.acknowledge(announced, planned.fua);
                        }
                    }
                    (Err(error), _) => outcome = outcome.and(Err(error)),
                }
            }
            reaped?;
        }
        outcome.map(|()| acknowledged)
    }

    /// Reads all windows.
    ///
    /// # Errors
    /// The error of the device.
    pub fn read_windows(&self, device: &dyn BlockDevice, engine: EngineKind) -> Outcome<Vec<Vec<u8>>> {
        let mut queue = Blocking::open(device, engine).map_err(|error| error.to_string())?;
        let window = |window: &Window| {
            let mut bytes = vec![0; (window.count * SECTOR_BYTES) as usize];
            let read = queue.read(window.first * SECTOR_BYTES, &mut bytes);
            read.map(|()| bytes).map_err(|error| format!("cannot read sector {}: {error}", window.first))
        };
        self.windows.iter().map(window).collect()
    }

    /// Compares the device's contents with the ledger. The contents found become the new durable
    /// state of the ledger.
    ///
    /// # Errors
    /// The first sector with contents that are not allowed.
    pub fn look(&mut self, device: &dyn BlockDevice, engine: EngineKind, after_cut: bool) -> Outcome {
        let shown = self.read_windows(device, engine)?;
        let versions = self.ledger.judge(&shown, after_cut)?;
        self.ledger = self.ledger.settled(versions);
        Ok(())
    }
}

/// Windows for `players` players in blocks of `block_sectors` sectors. They divide each of the
/// `shared` blocks among themselves, and each player has a whole block of its own from `own_from`
/// on.
pub fn share_out(players: u64, block_sectors: u64, shared: &[u64], own_from: u64) -> Vec<Vec<Window>> {
    let part = block_sectors / players;
    let windows = |player: u64| {
        let parts = shared.iter().map(|block| Window { first: block * block_sectors + player * part, count: part });
        let own = Window { first: (own_from + player) * block_sectors, count: block_sectors };
        parts.chain([own]).collect()
    };
    (0..players).map(windows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::{MemoryStore, RawDevice};
    use std::sync::Arc;

    #[test]
    fn written_data_is_accepted_and_a_lost_sector_is_detected() {
        let windows = &share_out(2, 256, &[0, 2], 4)[1];
        assert_eq!(windows[1], Window { first: 2 * 256 + 128, count: 128 });
        let device = RawDevice::new(Arc::new(MemoryStore::with_bytes("m", vec![0; 1 << 20])), true, 512).unwrap();
        let mut player = Player::new(windows, |_| 0, 1);
        let mut turns = 0;
        let engine = EngineKind::Sync;
        player
            .play(&device, engine, &mut |_, _| {
                turns += 1;
                turns < 200
            })
            .unwrap();
        player.look(&device, engine, false).unwrap();
        let written = player.read_windows(&device, engine).unwrap();
        let lost = written[2].chunks(512).position(|sector| sector.iter().any(|&byte| byte != 0)).unwrap() as u64;
        let mut queue = Blocking::open(&device, engine).unwrap();
        queue.write_zeroes((windows[2].first + lost) * SECTOR_BYTES, SECTOR_BYTES).unwrap();
        assert!(player.look(&device, engine, false).is_err());
    }
}
