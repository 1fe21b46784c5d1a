//! Several queues of one disk at the same time, as a case: power cuts with many requests in flight,
//! shared flushes, concurrent allocations.
//!
//! Each player ([`crate::player`]) owns some sectors in blocks that all players share, and records
//! its ledger whenever it changes. The truth at any moment is the set of all ledgers. For disks
//! that change while they are in use, another thread adds images on top, grows the disk or changes
//! its link to the parent meanwhile. A seed does not reproduce the order of the threads, but the
//! history records the order that occurred, and that history is cut and judged.

use crate::{
    disk::{Changes, DiskCase},
    ledger::{Ledger, Window},
    mutation::Phase,
    player::{Player, Told, share_out},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::Disk;
use diskwright_store::{
    BlockDevice, FileSystem,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
        thread,
    },
};
use std::sync::PoisonError;

/// Number of changes of a crowd's disk during a run.
const CHANGES: u64 = 2;

/// What the users of a crowd's disk may rely on.
#[derive(Debug, Clone)]
pub struct CrowdTruth {
    ledgers: Vec<Ledger>,
    /// Number of the image that is certainly the top.
    top: u32,
    /// The durable size in bytes.
    size_bytes: u64,
}

/// Several players on one disk.
#[derive(Debug, Clone)]
pub struct Crowd {
    /// The disk. Its windows are those of all players.
    pub disk: DiskCase,
    /// The windows of each player.
    pub windows: Vec<Vec<Window>>,
    /// Acknowledged requests after which a player stops.
    pub requests: u64,
}

impl Crowd {
    /// Four players on a kind of disk with blocks of `block_bytes`.
    pub fn on(kind: DiskCase, block_bytes: u32, requests: u64) -> Self {
        let windows = share_out(4, u64::from(block_bytes) / 512, &[0, 1], 2);
        let block_bytes = kind.block_bytes.map(|_| block_bytes);
        Self { disk: DiskCase { windows: windows.concat(), block_bytes, ..kind }, windows, requests }
    }

    fn judge_contents(&self, world: &World, truth: &CrowdTruth) -> Outcome<Vec<Ledger>> {
        let top = self.disk.top_of(world);
        if top < truth.top {
            return Err(format!("image {top} is the top, where {} should be", truth.top));
        }
        // An image that is not in the truth yet may be incomplete. Then the old chain counts.
        if top > truth.top
            && (self.disk.check(world, &self.disk.path_of(top)).is_err() || self.disk.open_disk(world, false).is_err())
        {
            world.remove(&self.disk.path_of(top)).map_err(|error| error.to_string())?;
        }
        for number in 0..=self.disk.top_of(world) {
            self.disk.check(world, &self.disk.path_of(number))?;
        }
        let disk = self.disk.open_disk(world, false)?;
        let size_bytes = disk.geometry().size_bytes;
        if size_bytes < truth.size_bytes {
            return Err(format!("the disk has {size_bytes} bytes, where it should have {}", truth.size_bytes));
        }
        let look = |(number, ledger): (usize, &Ledger)| {
            let mut player = Player::with(ledger.clone(), 0);
            player.look(&*disk, self.disk.engine(), true).map_err(|error| format!("player {number}: {error}"))?;
            Ok(player.into_ledger())
        };
        truth.ledgers.iter().enumerate().map(look).collect()
    }

    /// Changes the disk while the players use it, at times spread over their requests. `tell` is
    /// called before an image joins, and after the disk has grown.
    fn change(&self, world: &World, disk: &Disk, done: &AtomicU64, tell: &dyn Fn(u32, u64)) -> Outcome {
        let all = self.requests * self.windows.len() as u64;
        let mut top = self.disk.top_of(world);
        // Two snapshots come before the first merge.
        let changes = if self.disk.changes == Changes::MergedInUse { 2 * CHANGES } else { CHANGES };
        for turn in 1..=changes {
            while done.load(Ordering::SeqCst) < all * turn / (changes + 2) {
                thread::yield_now();
            }
            match self.disk.changes {
                Changes::None => {}
                Changes::Snapshots => {
                    top += 1;
                    let layer = self.disk.make_next_top(world, disk, top)?;
                    tell(top, 0);
                    disk.push_layer(layer).map_err(|error| format!("push_layer failed: {error}"))?;
                }
                Changes::FrozenInUse => self.disk.freeze(world, disk)?,
                Changes::AbsorbedInUse => self.disk.freeze_or_absorb(world, disk)?,
                Changes::MergedInUse => self.disk.merge_or_freeze_under(world, disk)?,
                Changes::CompactedInUse => DiskCase::compact_in_use(disk)?,
                Changes::Relinks => {
                    let number = u32::try_from(turn).map_err(|error| error.to_string())?;
                    self.disk.relink(disk, number)?;
                }
                Changes::Grows { .. } => {
                    let size_bytes = disk.geometry().size_bytes + (64 << 10);
                    disk.grow(size_bytes).map_err(|error| format!("grow failed: {error}"))?;
                    tell(top, size_bytes);
                }
            }
        }
        Ok(())
    }

    /// Runs the players until each has had its requests, then closes the disk.
    fn play(
        &self,
        world: &World,
        mut players: Vec<Player>,
        tell: &(dyn Fn(&CrowdTruth) + Sync),
    ) -> Outcome<CrowdTruth> {
        let ledgers = players.iter().map(|player| player.ledger().clone()).collect();
        world.phase(Some(Phase::Open));
        let disk = self.disk.open_disk(world, true)?;
        world.phase(None);
        let first = CrowdTruth { ledgers, top: self.disk.top_of(world), size_bytes: disk.geometry().size_bytes };
        tell(&first);
        let truth = Mutex::new(first);
        let change = |change: &dyn Fn(&mut CrowdTruth)| {
            let mut truth = truth.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut truth);
            tell(&truth);
        };
        let done = AtomicU64::new(0);
        let outcomes: Vec<Outcome> = thread::scope(|scope| {
            let mut threads: Vec<_> = players
                .iter_mut()
                .enumerate()
                .map(|(number, player)| {
                    let (disk, change, done) = (&disk, &change, &done);
                    scope.spawn(move || {
                        let mut left = self.requests;
                        let mut goes_on = |told: Told, ledger: &Ledger| {
                            if told != Told::After(0) {
                                change(&|truth| truth.ledgers[number] = ledger.clone());
                            }
                            if let Told::After(count) = told {
                                done.fetch_add(count.min(left), Ordering::SeqCst);
                                left = left.saturating_sub(count);
                            }
                            left > 0
                        };
                        let played = player.play(&**disk, self.disk.engine(), &mut goes_on);
                        // The thread that changes the disk must not wait for requests of a player
                        // that has stopped.
                        done.fetch_add(left, Ordering::SeqCst);
                        played.map_err(|error| error.to_string())
                    })
                })
                .collect();
            if self.disk.changes != Changes::None {
                let (disk, change, done) = (&disk, &change, &done);
                threads.push(scope.spawn(move || {
                    self.change(world, disk, done, &|top, size_bytes| {
                        change(&|truth| {
                            (truth.top, truth.size_bytes) = (truth.top.max(top), truth.size_bytes.max(size_bytes));
                        });
                    })
                }));
            }
            let ended =
                threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".into())));
            ended.collect()
        });
        outcomes.into_iter().collect::<Outcome<Vec<()>>>()?;
        for (number, player) in players.iter_mut().enumerate() {
            let shown = player.read_windows(&*disk, self.disk.engine())?;
            let judged = player.ledger().judge(&shown, false);
            judged.map_err(|error| format!("without any cut, player {number}: {error}"))?;
        }
        world.phase(Some(Phase::Close));
        disk.close().map_err(|error| format!("close failed: {error}"))?;
        world.phase(None);
        let mut truth = truth.into_inner().unwrap_or_else(PoisonError::into_inner);
        truth.ledgers = players.into_iter().map(Player::into_ledger).collect();
        for ledger in &mut truth.ledgers {
            ledger.flushed(ledger.mark());
        }
        tell(&truth);
        Ok(truth)
    }
}

impl Case for Crowd {
    type Truth = CrowdTruth;

    fn name(&self) -> String {
        format!("{}, {} queues", self.disk.name, self.windows.len())
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.disk.make(world)
    }

    fn run(&self, stage: &Stage<CrowdTruth>, seed: u64) -> Outcome {
        let player = |(number, windows): (u64, &Vec<Window>)| {
            Player::new(windows, |sector| self.disk.untouched(sector), seed << 8 | number)
        };
        let players = (0..).zip(&self.windows).map(player).collect();
        self.play(&stage.world, players, &|truth| stage.record(truth.clone())).map(drop)
    }

    fn judge(&self, world: &World, truth: &CrowdTruth, seed: u64, depth: Depth) -> Outcome<u64> {
        let ledgers = self.judge_contents(world, truth)?;
        if depth.resume {
            world.settle();
            let players = (0..).zip(ledgers).map(|(number, ledger)| Player::with(ledger, seed ^ number)).collect();
            let disk = DiskCase { broken_rule: None, ..self.disk.clone() };
            let briefly = Self { requests: 6, disk, ..self.clone() };
            let ended = briefly
                .play(world, players, &|_| {})
                .map_err(|error| format!("in the session after the cut: {error}"))?;
            self.judge_contents(world, &ended).map_err(|error| format!("after that session was closed: {error}"))?;
        }
        Ok(0)
    }
}

/// The crowds that are tested with power cuts.
pub fn crowds() -> Vec<Crowd> {
    let kind = crate::disk::named;
    vec![
        Crowd::on(kind("raw"), 64 << 10, 24),
        Crowd::on(kind("vhd dynamic 16K"), 64 << 10, 24),
        Crowd::on(kind("vhd differencing 16K"), 64 << 10, 24),
        Crowd::on(kind("vhdx dynamic 1M"), 1 << 20, 24),
        Crowd::on(kind("vhdx differencing 1M"), 1 << 20, 24),
        Crowd::on(kind("vmdk sparse 8K"), 64 << 10, 24),
        Crowd::on(kind("vmdk child 64K"), 64 << 10, 24),
        Crowd::on(kind("vdi dynamic 8K"), 64 << 10, 24),
        Crowd::on(kind("vdi child 64K"), 64 << 10, 24),
        Crowd::on(kind("raw, growing"), 32 << 10, 24),
        Crowd::on(kind("qcow2 64K"), 64 << 10, 24),
        Crowd::on(kind("qcow2 child 8K"), 64 << 10, 24),
        Crowd::on(kind("vhd dynamic 16K, with snapshots"), 64 << 10, 24),
        Crowd::on(kind("vhdx dynamic 1M, with snapshots"), 1 << 20, 24),
        Crowd::on(kind("vhd differencing 16K, relinked"), 64 << 10, 24),
        Crowd::on(kind("vhdx differencing 1M, relinked"), 1 << 20, 24),
        Crowd::on(kind("vhd dynamic 16K, merged in use"), 64 << 10, 24),
        Crowd::on(kind("vhdx differencing 1M, merged in use"), 1 << 20, 24),
        Crowd::on(kind("packed 16K, over a parent"), 64 << 10, 24),
        Crowd::on(kind("vhd dynamic 16K, late"), 64 << 10, 24),
    ]
}
