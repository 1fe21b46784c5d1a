//! Clients that take no part in reservations: those of NBD and NVMe/TCP, and virtual machines.
//!
//! They cannot register, so a disk that others have reserved refuses their writes, and their reads
//! if the reservation is exclusive for reads. A request costs one atomic load as long as the
//! reservations stay as they are.

use super::{Access, NOBODY, Reservations};
use std::sync::Arc;

/// What they may do with a disk. Each thread has one of its own.
#[derive(Debug)]
pub(crate) struct Outsider {
    reservations: Arc<Reservations>,
    access: Access,
}

impl Outsider {
    /// For a disk with these reservations.
    pub(crate) fn of(reservations: Arc<Reservations>) -> Self {
        Self { reservations, access: Access::default() }
    }

    /// Whether a request may read, or write.
    pub(crate) fn may(&mut self, writes: bool) -> bool {
        self.access = self.reservations.access(NOBODY, self.access);
        if writes { self.access.writes } else { self.access.reads }
    }
}
