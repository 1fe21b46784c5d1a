//! Moves of a disk in use as cases: a client writes, flushes and discards while the disk goes to
//! another folder and format.
//!
//! ```text
//!   client   ── requests ───────────────────────────────────────────────▶ stops
//!   move           copy ─▶ rest ─▶ new name, durable ─▶ exchange ─▶ old name gone
//!   truth    the client's ledger, after each answer                  └─▶ has moved
//! ```
//!
//! At every instant the disk is there under its old name or the new one. If it is there under both,
//! each of them holds everything that the client was promised: whoever starts again with either
//! loses nothing. When the move has ended, only the new name is there.
//!
//! A seed does not reproduce the order of the threads. The history records the order that occurred.

use crate::{
    disk::DiskCase,
    ledger::Ledger,
    moving,
    mutation::Phase,
    player::{Player, Told},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{Disk, DiskError, Movable, MoveOptions, move_disk};
use diskwright_image::Format;
use diskwright_store::{
    FileSystem,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        thread,
    },
};
use std::{
    path::{Path, PathBuf},
    sync::PoisonError,
};

/// Answers that the client has got before the move begins, and that it gets after its end.
const ANSWERS: u64 = 6;
/// Answers of a client that has stopped.
const NO_MORE: u64 = u64::MAX / 2;

/// What the client may rely on.
#[derive(Debug, Clone)]
pub struct MoveTruth {
    ledger: Ledger,
    /// Whether the move has ended.
    has_moved: bool,
}

/// Moves a disk of a kind into an image of another format, while a client uses it.
#[derive(Debug, Clone)]
pub struct LiveMoveCase {
    /// The disk, with some contents.
    pub kind: DiskCase,
    /// The format that it gets.
    pub to: Format,
}

impl LiveMoveCase {
    fn new_path(&self) -> PathBuf {
        format!("/e/new.{}", self.to).into()
    }

    /// What the disk at `path` shows.
    fn reads(&self, world: &World, path: &Path, format: Format, ledger: &Ledger, after_cut: bool) -> Outcome {
        let kind = DiskCase { format, ..self.kind.clone() };
        kind.check(world, path)?;
        ledger.judge(&kind.read_at(world, path)?, after_cut).map(drop)
    }

    /// Judges each name under which the disk is there.
    fn judge_all(&self, world: &World, truth: &MoveTruth, after_cut: bool) -> Outcome {
        let mut found = 0;
        for (path, format, which) in
            [(self.kind.path(), self.kind.format, "the old disk"), (self.new_path(), self.to, "the new disk")]
        {
            if world.facts(&path).is_ok() {
                self.reads(world, &path, format, &truth.ledger, after_cut)
                    .map_err(|error| format!("{which}: {error}"))?;
                found += 1;
            }
        }
        if found > 0 { Ok(()) } else { Err("neither the old disk nor the new one is there".into()) }
    }

    /// The move has ended: of the disk only the new file is there.
    fn judge_end(&self, world: &World) -> Outcome {
        let mut found: Vec<PathBuf> = world.snapshot().names.into_keys().collect();
        // The new disk has all data of a parent, which stays.
        let is_other = |path: &PathBuf| path == Path::new(moving::OTHER) || path.file_stem() == Some("parent".as_ref());
        found.retain(|path| !is_other(path));
        if found == [self.new_path()] {
            Ok(())
        } else {
            Err(format!("after the move these files are there: {found:?}"))
        }
    }

    /// Moves what a cut has left, as who starts again would: nobody has the disk open.
    fn move_again(&self, world: &World, truth: &MoveTruth) -> Outcome {
        let (old, new) = (self.kind.path(), self.new_path());
        if world.facts(&old).is_err() {
            return Ok(());
        }
        let were_both = world.facts(&new).is_ok();
        let open = self.kind.open_options(world, false);
        match move_disk(&old, &new, &MoveOptions::default(), &open, &mut |_, _| true) {
            Ok(_) => {
                self.judge_end(world)?;
                self.judge_all(world, truth, true)
            }
            // What was not flushed is in the new file only. The user says which one counts.
            Err(DiskError::BadOptions { what, .. }) if were_both && what.contains("was interrupted") => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl Case for LiveMoveCase {
    type Truth = MoveTruth;

    fn name(&self) -> String {
        format!("move {} to {} in use", self.kind.name, self.to)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        moving::make_folder(world)?;
        self.kind.make(world)?;
        self.kind.fill_half(world)
    }

    fn run(&self, stage: &Stage<MoveTruth>, seed: u64) -> Outcome {
        let text = |error: DiskError| error.to_string();
        let movable =
            Movable::new(Disk::open(self.kind.path(), &self.kind.open_options(&stage.world, true)).map_err(text)?);
        let mut player = Player::with(self.kind.half_full_ledger(), seed);
        let truth = Mutex::new(MoveTruth { ledger: player.ledger().clone(), has_moved: false });
        let tell = |change: &dyn Fn(&mut MoveTruth)| {
            let mut truth = truth.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut truth);
            stage.record(truth.clone());
        };
        tell(&|_| {});
        let (answers, stops) = (AtomicU64::new(0), AtomicBool::new(false));
        stage.world.phase(Some(Phase::Command));
        let moved = thread::scope(|scope| {
            let client = scope.spawn(|| {
                let played = player.play(&movable, self.kind.engine(), &mut |told, ledger| {
                    tell(&|truth| truth.ledger = ledger.clone());
                    if let Told::After(count) = told {
                        answers.fetch_add(count, Ordering::SeqCst);
                    }
                    !stops.load(Ordering::SeqCst)
                });
                answers.store(NO_MORE, Ordering::SeqCst);
                played
            });
            let wait_for_more = || {
                let enough = NO_MORE.min(answers.load(Ordering::SeqCst) + ANSWERS);
                while answers.load(Ordering::SeqCst) < enough {
                    thread::yield_now();
                }
            };
            wait_for_more();
            let moved = movable.move_to(&self.new_path(), &MoveOptions::default(), &mut ());
            if moved.is_ok() {
                tell(&|truth| truth.has_moved = true);
                wait_for_more();
            }
            stops.store(true, Ordering::SeqCst);
            let played = client.join().map_err(|_| "the client panicked".to_owned())?;
            played.map_err(|error| format!("a request failed: {error}"))?;
            moved.map_err(text)
        })?;
        if !moved.warnings.is_empty() {
            return Err(format!("the move has warned: {:?}", moved.warnings));
        }
        stage.world.phase(Some(Phase::Close));
        movable.close().map_err(text)?;
        // And with it the locks of the files.
        drop(movable);
        stage.world.phase(None);
        let mut ledger = player.into_ledger();
        ledger.flushed(ledger.mark());
        let end = MoveTruth { ledger, has_moved: true };
        self.judge_end(&stage.world)?;
        self.judge_all(&stage.world, &end, false)?;
        stage.record(end);
        Ok(())
    }

    fn judge(&self, world: &World, truth: &MoveTruth, _seed: u64, depth: Depth) -> Outcome<u64> {
        self.judge_all(world, truth, true).map_err(|error| format!("after the cut: {error}"))?;
        if truth.has_moved {
            self.judge_end(world)?;
        } else if depth.resume {
            self.move_again(world, truth).map_err(|error| format!("the same move again: {error}"))?;
        }
        Ok(0)
    }
}

/// The moves that are tested.
pub fn live_moves() -> Vec<LiveMoveCase> {
    let of = |name: &str, to| LiveMoveCase { kind: crate::disk::named(name), to };
    vec![
        of("raw", Format::Vhdx),
        of("vhd dynamic 16K", Format::Qcow2),
        of("vhdx differencing 1M", Format::Vhdx),
        of("qcow2 64K", Format::Vhd),
        of("vmdk flat", Format::Vdi),
    ]
}
