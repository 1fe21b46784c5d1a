//! A pool may promise more than it has: disks take slabs when they are written. It warns before it
//! is full; then a first write to a slab fails with ENOSPC, and nothing else does.

use super::{Pool, State, lock};
use diskwright_format::space::{slabs_of, superblock::MemberState};
use std::sync::atomic::Ordering;

/// It warns when less than one of this many slabs is free.
const SCARCE: u64 = 10;

/// The space of a pool, in bytes of copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Room {
    /// Bytes of slabs on the members that get new ones.
    pub all_bytes: u64,
    /// Of these, bytes that are free.
    pub free_bytes: u64,
    /// Bytes that the disks may still take.
    pub promised_bytes: u64,
}

impl Room {
    /// Whether the disks may take more than there is.
    pub fn is_overcommitted(&self) -> bool {
        self.promised_bytes > self.free_bytes
    }

    fn is_scarce(&self) -> bool {
        self.is_overcommitted() && self.free_bytes < self.all_bytes / SCARCE
    }
}

impl Pool {
    pub(super) fn room(&self, state: &State) -> Room {
        let mut room = Room::default();
        for member in self.live_members() {
            let row = state.superblock.member(member.number);
            if row.is_some_and(|row| row.state == MemberState::Active) {
                let free = state.free[usize::from(member.number)].free();
                room.all_bytes += u64::from(slabs_of(member.size_bytes, self.slab_shift)) << self.slab_shift;
                room.free_bytes += u64::from(free) << self.slab_shift;
            }
        }
        for file in self.all_files() {
            let slabs = file.len_bytes.load(Ordering::Acquire).div_ceil(self.slab_bytes());
            let left = slabs.saturating_sub(u64::from(file.mapped.load(Ordering::Relaxed)));
            let left_bytes = left.saturating_mul(self.slab_bytes()).saturating_mul(u64::from(file.copies));
            room.promised_bytes = room.promised_bytes.saturating_add(left_bytes);
        }
        room
    }

    /// The warning of a pool that is nearly full.
    pub(super) fn scarce(&self, room: Room) -> Option<String> {
        let mib = |bytes: u64| bytes >> 20;
        room.is_scarce().then(|| {
            let used = 100 - room.free_bytes * 100 / room.all_bytes.max(1);
            format!(
                "pool {}: {used} % of its space is used. {} MiB are free, and its disks may grow by {} MiB more. Add a \
                 member, or remove disks, before writes fail",
                self.name,
                mib(room.free_bytes),
                mib(room.promised_bytes)
            )
        })
    }

    /// Warns if the pool is nearly full; again when another hundredth of it is used.
    pub(super) fn warn_if_scarce(&self) {
        let room = self.room(&lock(&self.state));
        let free_percent = room.free_bytes * 100 / room.all_bytes.max(1);
        if let Some(warning) = self.scarce(room)
            && self.scarce_at.fetch_min(free_percent, Ordering::AcqRel) > free_percent
        {
            self.warn(warning);
        }
    }
}
