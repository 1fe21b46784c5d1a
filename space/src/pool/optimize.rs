//! What is used often moves to the fast members, and what is not moves away from them.
//!
//! ```text
//!   heat of all slabs ─▶ plan ─▶ up, the hottest first ─ no room ─▶ down, the coldest first
//!   a move: as for a member that is drained; it may stop after any slab
//! ```
//!
//! A tenth of the fast members is left free, so that new slabs find room there, or less if the
//! disks can grow by less. While others use the pool, it pauses after each slab, for as long as
//! their latency asks for (`pace.rs`).

use super::{FileState, Pool, drain::Moved, lock};
use crate::{
    error::{Result, SpaceError},
    plan::{Plan, SlabHeat, plan, share, share_after},
    slab_table::Slab,
};
use diskwright_format::space::{
    Copy,
    change::Tier,
    superblock::{Class, MemberState},
};
use std::{
    io,
    path::Path,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

/// One of this many slabs of the fast members is left free for new writes.
const RESERVE: u64 = 10;

/// How long [`Pool::tick`] moves slabs at once.
const ROUND: Duration = Duration::from_millis(200);

/// What an optimisation has done, or would do.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Optimized {
    /// Bytes of slabs that moved to the fast members, counted once.
    pub up_bytes: u64,
    /// Bytes of slabs that moved away from them.
    pub down_bytes: u64,
    /// Bytes that belong on the fast members and found no room there.
    pub left_bytes: u64,
    /// Share of the requests that the fast members would have served before, 0 to 1; `None` if
    /// nothing is known of requests.
    pub share_before: Option<f64>,
    /// The same for the new placement.
    pub share_after: Option<f64>,
}

impl Pool {
    /// Whether the pool has fast and slow members.
    pub fn is_tiered(&self) -> bool {
        let has = |class| self.holders().any(|member| member.class == class);
        has(Class::Ssd) && has(Class::Hdd)
    }

    fn is_fast(&self, copy: Copy) -> bool {
        self.member(copy.member).is_some_and(|member| member.class == Class::Ssd)
    }

    /// Numbers of the members of a class that get new slabs.
    pub(crate) fn active_of(&self, class: Class) -> Vec<u8> {
        let state = lock(&self.state);
        let is_active =
            |number: u8| state.superblock.member(number).is_some_and(|row| row.state == MemberState::Active);
        let members = self.holders().filter(|member| member.class == class).map(|member| member.number);
        members.filter(|&number| is_active(number)).collect()
    }

    /// How many copies the fast members may hold: all their slabs but the areas and the reserve for
    /// new slabs. That is no larger than what the disks may still take.
    pub(super) fn fast_room(&self, slabs: &[SlabHeat]) -> u64 {
        let fast = self.active_of(Class::Ssd);
        let state = lock(&self.state);
        let free: u64 = fast.iter().map(|&number| u64::from(state.free[usize::from(number)].free())).sum();
        drop(state);
        let used: u64 = slabs.iter().map(|slab| u64::from(slab.on_fast)).sum();
        let unmapped = |file: &Arc<FileState>| {
            let slabs = file.len_bytes.load(Ordering::Acquire).div_ceil(self.slab_bytes());
            let left = slabs.saturating_sub(u64::from(file.mapped.load(Ordering::Relaxed)));
            left.saturating_mul(u64::from(file.copies))
        };
        let files = self.all_files();
        let promised = files.iter().filter(|file| file.tier() != Tier::Slow).map(unmapped).fold(0, u64::saturating_add);
        (free + used).saturating_sub(((free + used) / RESERVE).min(promised))
    }

    /// The slabs about which there is something to decide: those that have heat, lie on a fast
    /// member, or belong there.
    pub(super) fn heats(&self) -> Vec<SlabHeat> {
        let fast_members = self.active_of(Class::Ssd).len() as u32;
        let mut files = self.all_files();
        files.sort_unstable_by_key(|file| file.number);
        let mut found = Vec::new();
        for file in files.into_iter().filter(|file| !self.is_log(file)) {
            let heats = file
                .table
                .mapped(0..1 << 32)
                .map(|(index, entry)| self.heat_of(&file, index, entry.load(), fast_members));
            found.extend(heats.filter(|slab| slab.heat > 0 || slab.on_fast > 0 || slab.tier == Tier::Fast));
        }
        found
    }

    pub(super) fn heat_of(&self, file: &FileState, index: u32, slab: Slab, fast_members: u32) -> SlabHeat {
        let copies = slab.copies();
        let held = copies.iter().flatten().count() as u32;
        SlabHeat {
            file: file.number,
            index,
            heat: file.heat.of(index),
            tier: file.tier(),
            copies: held.min(fast_members).max(1),
            on_fast: copies.iter().flatten().filter(|copy| self.is_fast(**copy)).count() as u32,
        }
    }

    /// Moves slabs to where they belong. With `only_tell` it only says what it would do.
    ///
    /// `progress` is called before each slab; it returns whether to go on. What has moved stays.
    ///
    /// # Errors
    /// [`SpaceError::Usage`] without fast and slow members; [`SpaceError::Stopped`];
    /// [`SpaceError::Io`].
    pub fn optimize(self: &Arc<Self>, only_tell: bool, progress: &mut dyn FnMut(Moved) -> bool) -> Result<Optimized> {
        self.require_writable()?;
        if !self.is_tiered() {
            let what = format!(
                "pool {}: its members are all of one class, so there is nothing to optimize; add a member with :ssd or \
                 :hdd",
                self.name
            );
            return Err(SpaceError::Usage { what });
        }
        self.load_heat();
        let slabs = self.heats();
        let found = plan(&slabs, self.fast_room(&slabs));
        let mut done = Optimized {
            share_before: share(&slabs, |_, slab| slab.is_fast()),
            share_after: share_after(&slabs, &found),
            ..Optimized::default()
        };
        if only_tell {
            done.up_bytes = (found.up.len() as u64) << self.slab_shift;
            done.down_bytes = (found.down.len() as u64) << self.slab_shift;
            return Ok(done);
        }
        let total = (found.up.len() + found.down.len()) as u64;
        let mut count = 0;
        let moved = self.carry_out(&slabs, &found, &mut done, &mut || {
            let goes_on = progress(Moved { done: count, total, slab_bytes: self.slab_bytes() });
            count += 1;
            goes_on
        });
        let goes_on = moved.map_err(|error| SpaceError::io("move a slab", Path::new(&self.name), error))?;
        self.commit_all().map_err(|error| SpaceError::io("record the moves", Path::new(&self.name), error))?;
        if !goes_on {
            return Err(SpaceError::Stopped { pool: self.name.clone(), done: count.saturating_sub(1), total });
        }
        progress(Moved { done: total, total, slab_bytes: self.slab_bytes() });
        if done.left_bytes > 0 {
            done.share_after = share(&self.heats(), |_, slab| slab.is_fast());
        }
        Ok(done)
    }

    /// A round of [`Pool::tick`]: moves the slabs that differ most from the plan.
    pub(crate) fn optimize_round(&self) {
        let slabs = self.heats();
        let found = plan(&slabs, self.fast_room(&slabs));
        let started = Instant::now();
        let moved = self.carry_out(&slabs, &found, &mut Optimized::default(), &mut || started.elapsed() < ROUND);
        if let Err(error) = moved {
            self.warn(format!("pool {}: a slab cannot be moved to another tier: {error}", self.name));
        }
    }

    /// Carries a plan out, until `goes_on` says no. Returns whether it has ended by itself.
    fn carry_out(
        &self,
        slabs: &[SlabHeat],
        plan: &Plan,
        done: &mut Optimized,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<bool> {
        let _mover = self.pace.mover();
        let mut down = plan.down.iter();
        for &at in &plan.up {
            loop {
                if !goes_on() {
                    return Ok(false);
                }
                if self.move_slab(&slabs[at], Class::Ssd)? {
                    done.up_bytes += self.slab_bytes();
                    break;
                }
                let Some(&cold) = down.next() else {
                    done.left_bytes += self.slab_bytes();
                    break;
                };
                if self.move_slab(&slabs[cold], Class::Hdd)? {
                    done.down_bytes += self.slab_bytes();
                }
            }
        }
        for &cold in down {
            if !goes_on() {
                return Ok(false);
            }
            if self.move_slab(&slabs[cold], Class::Hdd)? {
                done.down_bytes += self.slab_bytes();
            }
        }
        Ok(true)
    }

    /// Moves the copies of a slab to members of a class, as many as it can have there. `false` if
    /// there is no room.
    fn move_slab(&self, slab: &SlabHeat, class: Class) -> io::Result<bool> {
        let Some(file) = self.file(slab.file) else { return Ok(true) };
        let (begun, mut has_moved) = (Instant::now(), false);
        let most = self.active_of(class).len();
        loop {
            let copies = file.table.entry(slab.index).load().copies();
            let is_there = |copy: &Copy| self.is_fast(*copy) == (class == Class::Ssd);
            let there = copies.iter().flatten().filter(|copy| is_there(copy)).count();
            let Some(elsewhere) = copies.into_iter().flatten().find(|copy| !is_there(copy)) else { break };
            if there >= most {
                break;
            }
            let moving = self.pace.start_move();
            let moved = self.move_copy(&file, slab.index, Some(elsewhere.member), Some(class));
            drop(moving);
            match moved {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::StorageFull => return Ok(false),
                Err(error) => return Err(error),
            }
            // It was used by another mover, or is gone.
            if file.table.entry(slab.index).load().copies() == copies {
                break;
            }
            has_moved = true;
        }
        if has_moved {
            self.record_move(slab, class);
            thread::sleep(self.pace.pause(begun.elapsed()));
        }
        Ok(true)
    }
}
