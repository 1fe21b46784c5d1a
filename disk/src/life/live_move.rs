//! Moves a disk to another file while its clients go on: another format, type, folder or file
//! system.
//!
//! ```text
//!   phase    Open │ Tracked                             │ Closed            │ Settling │ Open
//!   writes        │ to the old disk, marked             │ wait              │ new disk │
//!   the copy      │ all data │ marked ranges, in rounds │ the rest, flush   │ old file │
//!                 │          │                          │ new name, durable │ removed  │
//!                    an error leaves the old disk in use ──────────────────┘└─ exchange
//! ```
//!
//! The module `movable` says why no write is lost.
//!
//! 1. The new image is made under its temporary name.
//! 2. All data are copied, then in rounds what clients wrote meanwhile, until little is left or the
//!    rounds no longer become shorter.
//! 3. Writes are held back for a few milliseconds and the rest is copied. If it is not done by
//!    then, writes go on for a moment and it is tried again; the moments in which they are held
//!    become longer and those between shorter. So the move ends also when clients write faster than
//!    the copy.
//! 4. Still without writes: the new disk is flushed and gets its name, durably. Then it takes the
//!    place of the old one, and writes go on. The old file was marked before (`move_plan.rs`).
//! 5. The old file is removed, durably. Until then flushes and FUA wait: a file that was left with
//!    its old name by a power cut has everything that was promised.
//!
//! Any error before the exchange, a stop by the user among them, leaves the old disk as it is and
//! removes the new file. After it nothing fails the move: what does not work is a warning.

use crate::{
    DiskError, Result,
    engine::device::{Disk, Origin},
    error,
    life::{
        movable::{Dirty, Movable, Phase, State},
        move_copy::{Control, Copier, Pace, Zeros, data_bytes},
        move_plan::{MoveOptions, MoveWatch, Moved, Plan},
    },
};
use diskwright_store::{BlockDevice, sync::thread};
use std::{
    path::Path,
    sync::{Arc, TryLockError},
    time::{Duration, Instant},
};

/// With at most this much left, writes are held back.
const LITTLE_BYTES: u64 = 1 << 20;
/// Marked ranges that are taken at once.
const BATCH_BYTES: u64 = 64 << 20;
/// The first time for which writes are held back, and the first time between.
const HOLD: Duration = Duration::from_millis(4);
const BREATH: Duration = Duration::from_millis(32);
/// How long idle queues may keep the old disk open before the move ends without them.
const PATIENCE: Duration = Duration::from_secs(5);

impl Movable {
    /// Moves the disk to the file `to` (or into the folder `to`) while queues are open and requests
    /// in flight. Afterwards [`Movable::disk`] is the new disk. Waits for requests in flight, so a
    /// thread with requests in flight must not call it.
    ///
    /// # Errors
    /// [`DiskError::Exists`]; [`DiskError::BadOptions`] for a disk without a file, open read-only,
    /// with children, or of a size that the new format cannot have; [`DiskError::File`] and
    /// [`DiskError::Image`] if the old disk cannot be read or the new one not be written, also for
    /// lack of space; [`DiskError::Stopped`]. The disk is where it was, and the new file is
    /// removed.
    pub fn move_to(&self, to: &Path, options: &MoveOptions, watch: &mut dyn MoveWatch) -> Result<Moved> {
        let _turn = match self.moving.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(DiskError::BadOptions {
                    what: "the disk is being moved already".into(),
                    hint: "try again when that has ended".into(),
                });
            }
        };
        let old = self.disk();
        let Some(origin) = &old.origin else {
            return Err(DiskError::BadOptions {
                what: "a disk without a file of its own cannot be moved".into(),
                hint: "open the disk by its path".into(),
            });
        };
        if old.geometry().read_only {
            return Err(DiskError::BadOptions {
                what: format!("{}: it is open read-only, so it cannot be moved", origin.file.display()),
                hint: "open it for writing, or end the program that has it open and move it then".into(),
            });
        }
        check_poison(&old, &origin.file)?;
        let plan = Plan::new(&old, &origin.file, &origin.options.files, to, options)?;
        if plan.is_copied {
            // Clients may have written since the move that was interrupted.
            return Err(plan.both_are_there());
        }
        let mut moved = plan.outcome(&old, data_bytes(&old)?);
        plan.check_room(&moved)?;
        plan.refuse_to_lose_snapshots(&old)?;
        if options.dry_run {
            return Ok(moved);
        }
        let new = plan.make(&old, &origin.options)?;
        let moving = Moving { state: &self.state, plan: &plan, old: &old, new: &new, origin };
        if let Err(error) = moving.run(&mut moved, watch) {
            // Also if a request was lost, the phase has changed.
            let _ = self.state.enter(Phase::Open);
            plan.discard();
            plan.unmark();
            return Err(error);
        }
        moving.finish(&mut moved);
        Ok(moved)
    }
}

/// Refuses a disk whose earlier flush has failed: the new disk would not know of it.
fn check_poison(disk: &Disk, path: &Path) -> Result<()> {
    let checked = disk.shared.check_poison(&disk.shared.chain());
    checked.map_err(|source| error::from_io("move it", path, source))
}

/// A move under way.
struct Moving<'a> {
    state: &'a State,
    plan: &'a Plan<'a>,
    old: &'a Arc<Disk>,
    new: &'a Arc<Disk>,
    origin: &'a Origin,
}

impl Moving<'_> {
    fn enter(&self, phase: Phase) -> Result<()> {
        let entered = self.state.enter(phase);
        entered.map_err(|source| error::from_io("wait for its requests", &self.plan.from, source))
    }

    /// Steps 2 to 4.
    fn run(&self, moved: &mut Moved, watch: &mut dyn MoveWatch) -> Result<()> {
        let dirty = Arc::new(Dirty::new(self.old.geometry().size_bytes));
        self.enter(Phase::Tracked(Arc::clone(&dirty)))?;
        let ended = || self.state.ended();
        let now = Instant::now();
        let mut copier = Copier::open(self.old, self.new, self.plan.to.clone(), self.origin.options.engine)?;
        let mut control = Control {
            watch,
            ended: &ended,
            total_bytes: moved.data_bytes,
            pace: Some(Pace::new(now, ended())),
            told_at: now,
        };
        control.tell(&copier)?;
        copier.copy_all(&mut control)?;
        self.catch_up(&dirty, &mut copier, &mut control)?;
        control.tell(&copier)?;
        self.plan.check_children(self.old)?;
        control.watch.new_disk_is_made(self.new.layers()[0].image.store().identity())?;
        // Whoever finds both files after a power cut knows that they are one disk.
        self.plan.mark_copied(self.new)?;
        // Clients wait for the copy from now on.
        control.pace = None;
        let began = self.hold_until_done(&dirty, &mut copier, &mut control, moved)?;
        // Nothing is written to either disk, and both have the same contents.
        copier.flush()?;
        moved.copied_bytes = copier.copied_bytes;
        drop(copier);
        // What a failed flush may have lost was copied as it is now.
        check_poison(self.old, &self.plan.from)?;
        self.plan.check_old_names()?;
        self.plan.give_name(self.new)?;
        let phase = if self.plan.keep_old { Phase::Open } else { Phase::Settling };
        if let Err(error) = self.state.exchange(self.new, phase) {
            moved.warnings.push(error.to_string());
        }
        moved.pause = moved.pause.max(began.elapsed());
        Ok(())
    }

    /// Copies what was marked, in rounds, until little is left or a round leaves hardly less than
    /// the one before.
    fn catch_up(&self, dirty: &Dirty, copier: &mut Copier<'_>, control: &mut Control<'_>) -> Result<()> {
        let mut before = u64::MAX;
        loop {
            copier.flush()?;
            let left_bytes = dirty.marked_bytes();
            if left_bytes <= LITTLE_BYTES || left_bytes > before / 4 * 3 {
                return Ok(());
            }
            before = left_bytes;
            control.total_bytes = copier.copied_bytes + left_bytes;
            let mut cursor = 0;
            loop {
                let ranges = dirty.take(&mut cursor, BATCH_BYTES);
                if ranges.is_empty() {
                    break;
                }
                // What was marked is in the disk after this.
                let waited = self.state.wait_for_grace();
                waited.map_err(|source| error::from_io("wait for its requests", &self.plan.from, source))?;
                for range in ranges {
                    copier.copy(range, Zeros::Discarded, control)?;
                }
            }
            copier.drain()?;
        }
    }

    /// Holds writes back until all marked ranges are copied. On return they are held since the time
    /// that is returned.
    fn hold_until_done(
        &self,
        dirty: &Arc<Dirty>,
        copier: &mut Copier<'_>,
        control: &mut Control<'_>,
        moved: &mut Moved,
    ) -> Result<Instant> {
        let (mut hold, mut breath) = (HOLD, BREATH);
        loop {
            let began = Instant::now();
            self.enter(Phase::Closed)?;
            if self.copy_for(hold, dirty, copier, control)? {
                return Ok(began);
            }
            self.enter(Phase::Tracked(Arc::clone(dirty)))?;
            moved.pause = moved.pause.max(began.elapsed());
            copier.flush()?;
            thread::sleep(breath);
            control.tell(copier)?;
            (hold, breath) = (hold.mul_f64(1.5), breath / 2);
        }
    }

    /// Copies marked ranges for about `time` while nothing is written. Returns whether none is
    /// left.
    fn copy_for(
        &self,
        time: Duration,
        dirty: &Dirty,
        copier: &mut Copier<'_>,
        control: &mut Control<'_>,
    ) -> Result<bool> {
        let (began, mut cursor) = (Instant::now(), 0);
        loop {
            let ranges = dirty.take(&mut cursor, LITTLE_BYTES / 4);
            if ranges.is_empty() {
                copier.drain()?;
                return Ok(true);
            }
            for range in ranges {
                copier.copy(range, Zeros::Discarded, control)?;
            }
            if began.elapsed() >= time {
                copier.drain()?;
                return Ok(false);
            }
        }
    }

    /// Step 5, and the end of the old disk. Nothing here fails the move.
    fn finish(&self, moved: &mut Moved) {
        let mut warn = |warning: String| moved.warnings.push(warning);
        if !self.plan.keep_old {
            if let Err(error) = self.plan.remove_old() {
                warn(format!(
                    "the disk has moved, but its old file may still be there: {error}; do not use it, as it gets no more writes"
                ));
            }
            if let Err(error) = self.state.enter(Phase::Open) {
                warn(error.to_string());
            }
        }
        let began = Instant::now();
        while self.old.shared.has_queues() && began.elapsed() < PATIENCE {
            self.state.wake_queues();
            thread::sleep(Duration::from_millis(1));
        }
        if self.old.shared.has_queues() {
            warn(format!(
                "{}: it is closed when the clients that have it open send their next request",
                self.plan.from.display()
            ));
        } else if self.plan.keep_old
            && let Err(error) = self.old.close()
        {
            warn(format!("the disk has moved, but its old file could not be closed cleanly: {error}"));
        }
        moved.old_is_kept = self.plan.keep_old;
    }
}
