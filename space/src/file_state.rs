//! A file of a pool in memory: its length, its slabs, how often they are used, who has it open.

use crate::{heat::Heat, slab_table::SlabTable};
use diskwright_format::space::change::Tier;
use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering},
};

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is created in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewFile {
    /// Length in bytes.
    pub len_bytes: u64,
    /// Copies of each slab: 1 to 3.
    pub copies: u8,
    /// How many slabs that follow one another lie on different members, as far as there is room; 1
    /// to 63.
    pub columns: u8,
    /// Tier of its slabs.
    pub tier: Tier,
}

/// A file of a pool, in memory.
#[derive(Debug)]
pub(crate) struct FileState {
    pub(crate) number: u32,
    pub(crate) len_bytes: AtomicU64,
    pub(crate) copies: u8,
    pub(crate) columns: u8,
    tier: AtomicU8,
    pub(crate) table: SlabTable,
    pub(crate) heat: Heat,
    /// Where the next slab of a sequential writer would be, and how many were allocated last.
    pub(crate) ahead: Mutex<(u32, u32)>,
    pub(crate) openers: Mutex<Openers>,
    /// Slabs that are mapped.
    pub(crate) mapped: AtomicU32,
}

impl FileState {
    pub(crate) fn new(number: u32, new: NewFile) -> Self {
        Self {
            number,
            len_bytes: AtomicU64::new(new.len_bytes),
            copies: new.copies,
            columns: new.columns,
            tier: AtomicU8::new(new.tier.to_byte()),
            table: SlabTable::default(),
            heat: Heat::default(),
            ahead: Mutex::new((0, 0)),
            openers: Mutex::default(),
            mapped: AtomicU32::new(0),
        }
    }

    pub(crate) fn tier(&self) -> Tier {
        Tier::from_byte(self.tier.load(Ordering::Relaxed)).unwrap_or_default()
    }

    pub(crate) fn set_tier(&self, tier: Tier) {
        self.tier.store(tier.to_byte(), Ordering::Relaxed);
    }
}

/// Who has a file open.
#[derive(Debug, Default)]
pub(crate) struct Openers {
    /// Stores that have it open.
    pub(crate) stores: u32,
    /// Locks: an exclusive one counts as `u32::MAX`.
    pub(crate) locks: u32,
    /// It has no name any more, and goes when the last store is closed.
    pub(crate) is_unnamed: bool,
}
