//! What a queue may use: the limits that the target tells, and the ids of I/O queues.

use std::sync::{Arc, Mutex, PoisonError};

/// What the target can do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Entries of a queue.
    pub(super) entries: u16,
    /// The longest data of a command.
    pub(super) transfer_bytes: u64,
    /// The longest data in a capsule.
    pub(super) capsule_bytes: u64,
    pub(super) has_write_zeroes: bool,
    /// Whether write zeroes can give the space back.
    pub(super) zeroes_deallocate: bool,
}

/// The ids of I/O queues that are not in use. The lock is held to take one or to give one back.
#[derive(Debug, Clone)]
pub(super) struct Ids(Arc<Mutex<Vec<u16>>>);

impl Ids {
    /// The ids from 1 on.
    pub(super) fn up_to(most: u16) -> Self {
        Self(Arc::new(Mutex::new((1..=most).rev().collect())))
    }

    /// An id, if one is free.
    pub(super) fn take(&self) -> Option<QueueId> {
        let number = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(QueueId { number, ids: self.clone() })
    }
}

/// The id of an I/O queue, which is given back when this is dropped.
#[derive(Debug)]
pub(super) struct QueueId {
    number: u16,
    ids: Ids,
}

impl QueueId {
    pub(super) fn number(&self) -> u16 {
        self.number
    }
}

impl Drop for QueueId {
    fn drop(&mut self) {
        // It is taken again last: the target may not have noticed yet that the connection has
        // ended.
        self.ids.0.lock().unwrap_or_else(PoisonError::into_inner).insert(0, self.number);
    }
}
