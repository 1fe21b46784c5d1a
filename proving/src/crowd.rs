//! Several queues of one disk at the same time, as a case: power cuts while many requests are in flight, flushes that are answered together, allocations that race.
//!
//! Each player ([`crate::player`]) has sectors of its own in blocks that all share, and tells its ledger whenever that changes; the truth at any moment is all ledgers
//! of that moment. Their order is the machine's, which no seed repeats; but the history says what it was, and that is what is cut and judged.

use crate::{
    disk::DiskCase,
    ledger::{Ledger, Window},
    mutation::Phase,
    player::{Player, Told, share_out},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_store::{
    EngineKind,
    sync::{Mutex, thread},
};
use std::sync::PoisonError;

/// See the module.
#[derive(Debug, Clone)]
pub struct Crowd {
    /// The disk. Its windows are all players'.
    pub disk: DiskCase,
    /// What each player has.
    pub windows: Vec<Vec<Window>>,
    /// Requests that each player has acknowledged before it stops.
    pub requests: u64,
}

impl Crowd {
    /// Four players on a kind of disk, in blocks of `block_bytes`.
    pub fn on(kind: DiskCase, block_bytes: u32, requests: u64) -> Self {
        let windows = share_out(4, u64::from(block_bytes) / 512, &[0, 1], 2);
        let block_bytes = kind.block_bytes.map(|_| block_bytes);
        Self { disk: DiskCase { windows: windows.concat(), block_bytes, ..kind }, windows, requests }
    }

    fn look(&self, world: &World, ledgers: &[Ledger]) -> Outcome<Vec<Ledger>> {
        self.disk.check(world, &self.disk.path())?;
        let disk = self.disk.open_disk(world, false)?;
        let look = |(number, ledger): (usize, &Ledger)| {
            let mut player = Player::with(ledger.clone(), 0);
            player.look(&*disk, EngineKind::Sync, true).map_err(|error| format!("player {number}: {error}"))?;
            Ok(player.into_ledger())
        };
        ledgers.iter().enumerate().map(look).collect()
    }

    /// All play until each has had its requests; then the disk is closed.
    fn play(&self, world: &World, mut players: Vec<Player>, tell: &(dyn Fn(&[Ledger]) + Sync)) -> Outcome<Vec<Ledger>> {
        let ledgers = Mutex::new(players.iter().map(|player| player.ledger().clone()).collect::<Vec<_>>());
        let change = |number: Option<(usize, &Ledger)>| {
            let mut ledgers = ledgers.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((number, ledger)) = number {
                ledgers[number] = ledger.clone();
            }
            tell(&ledgers);
        };
        change(None);
        world.phase(Some(Phase::Open));
        let disk = self.disk.open_disk(world, true)?;
        world.phase(None);
        let outcomes: Vec<Outcome> = thread::scope(|scope| {
            let threads: Vec<_> = players
                .iter_mut()
                .enumerate()
                .map(|(number, player)| {
                    let (disk, change) = (&disk, &change);
                    scope.spawn(move || {
                        let mut left = self.requests;
                        let mut goes_on = |told: Told, ledger: &Ledger| {
                            if told != Told::After(0) {
                                change(Some((number, ledger)));
                            }
                            if let Told::After(done) = told {
                                left = left.saturating_sub(done);
                            }
                            left > 0
                        };
                        player.play(&**disk, EngineKind::Sync, &mut goes_on).map_err(|error| error.to_string())
                    })
                })
                .collect();
            let ended = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("it panicked".into())));
            ended.collect()
        });
        outcomes.into_iter().collect::<Outcome<Vec<()>>>()?;
        for (number, player) in players.iter_mut().enumerate() {
            let shown = player.read_windows(&*disk, EngineKind::Sync)?;
            let judged = player.ledger().judge(&shown, false);
            judged.map_err(|error| format!("without any cut, player {number}: {error}"))?;
        }
        world.phase(Some(Phase::Close));
        disk.close().map_err(|error| format!("it does not close: {error}"))?;
        world.phase(None);
        let mut ledgers: Vec<Ledger> = players.into_iter().map(Player::into_ledger).collect();
        for ledger in &mut ledgers {
            ledger.flushed(ledger.mark());
        }
        tell(&ledgers);
        Ok(ledgers)
    }
}

impl Case for Crowd {
    type Truth = Vec<Ledger>;

    fn name(&self) -> String {
        format!("{}, {} queues", self.disk.name, self.windows.len())
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.disk.make(world)
    }

    fn run(&self, stage: &Stage<Vec<Ledger>>, seed: u64) -> Outcome {
        let player = |(number, windows): (u64, &Vec<Window>)| {
            Player::new(windows, |sector| self.disk.untouched(sector), seed << 8 | number)
        };
        let players = (0..).zip(&self.windows).map(player).collect();
        self.play(&stage.world, players, &|ledgers| stage.tell(ledgers.to_vec())).map(drop)
    }

    fn judge(&self, world: &World, truth: &Vec<Ledger>, seed: u64, depth: Depth) -> Outcome<u64> {
        let ledgers = self.look(world, truth)?;
        if depth.go_on {
            world.settle();
            let players = (0..).zip(ledgers).map(|(number, ledger)| Player::with(ledger, seed ^ number)).collect();
            let disk = DiskCase { meddling: None, ..self.disk.clone() };
            let briefly = Self { requests: 6, disk, ..self.clone() };
            let ended =
                briefly.play(world, players, &|_| {}).map_err(|error| format!("going on after the cut: {error}"))?;
            self.look(world, &ended).map_err(|error| format!("after going on and closing: {error}"))?;
        }
        Ok(0)
    }
}

/// Crowds that are put through power cuts.
pub fn crowds() -> Vec<Crowd> {
    let kind = crate::disk::named;
    vec![
        Crowd::on(kind("raw"), 64 << 10, 24),
        Crowd::on(kind("vhd dynamic 16K"), 64 << 10, 24),
        Crowd::on(kind("vhd differencing 16K"), 64 << 10, 24),
        Crowd::on(kind("vhdx dynamic 1M"), 1 << 20, 24),
        Crowd::on(kind("vhdx differencing 1M"), 1 << 20, 24),
    ]
}
