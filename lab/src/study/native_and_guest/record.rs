//! The saved result of the study, and figures computed from it.

use crate::{
    cells::{Cell, Cells},
    guest::GuestRecord,
    targets::Container,
};
use diskwright_load::{record::Head, workload::Workload};
use diskwright_stats::summary::median;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Schema of [`NativeAndGuestResult`].
pub const SCHEMA: &str = "diskwright.study.native-and-guest/1";

/// Subject of the cells on the host, the base of the ratios.
pub const NATIVE: &str = "native";
/// Subject of the cells in the guest.
pub const GUEST: &str = "guest";
/// The disk that completes every request at once.
pub const NULL: &str = "null";

/// Name of the figure in [`Cell::more`]: CPU time of the serving process per request of the guest,
/// nanoseconds; `None` on the host.
pub const SERVER_CPU_NS: &str = "server_cpu_ns_per_io";
/// Name of the figure in [`Cell::more`]: requests that reached the server per request of the
/// guest's generator; `None` on the host.
pub const SERVER_REQUESTS: &str = "server_requests_per_io";
/// Name of the figure in [`Cell::more`]: bytes of the requests that reached the server per byte of
/// the guest's generator; `None` on the host.
pub const SERVER_BYTES: &str = "server_bytes_per_byte";

/// The containers that are measured, besides the `null` disk.
pub const CONTAINERS: [Container; 3] = [Container::Raw, Container::VhdFixed, Container::VhdxDynamic];

/// The result of the study; a partial result has fewer rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct NativeAndGuestResult {
    /// When, where and by which program it was measured, and the conclusion.
    #[serde(flatten)]
    pub head: Head,
    /// Whether this is the quick study.
    pub quick: bool,
    /// Size of each disk, bytes.
    pub size_bytes: u64,
    /// Length of a cell, warm-up included, nanoseconds.
    pub cell_ns: u64,
    /// Requested rounds.
    pub rounds: usize,
    /// The guest.
    pub guest: GuestRecord,
    /// Each disk under each workload, on the host and in the guest: the part is the disk, the
    /// subject is [`NATIVE`] or [`GUEST`]. CPU time is that of the generator's process; on the host
    /// this contains the engine.
    pub cells: Vec<Cell>,
}

impl Cells for NativeAndGuestResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        Cow::from(&self.cells)
    }
}

/// A cell without rounds.
pub(super) fn cell(disk: &str, workload: &Workload, subject: &str) -> Cell {
    Cell::new(disk, &workload.name, subject, workload.queue_depth.into())
}

/// One disk under one workload, with the `null` disk under the same workload.
#[derive(Debug, Clone, Copy)]
pub struct Pair<'a> {
    /// The disk on the host.
    pub native: &'a Cell,
    /// The disk in the guest.
    pub guest: &'a Cell,
    /// The `null` disk on the host.
    pub null_native: &'a Cell,
    /// The `null` disk in the guest.
    pub null_guest: &'a Cell,
}

impl<'a> Pair<'a> {
    /// All disks but `null`, under all workloads.
    pub fn all(cells: &'a [Cell]) -> Vec<Self> {
        let find = |part: &str, like: &Cell, subject: &str| {
            let is_it = |cell: &&Cell| {
                (&*cell.part, &cell.load, cell.in_flight, &*cell.subject) == (part, &like.load, like.in_flight, subject)
            };
            cells.iter().find(is_it)
        };
        let natives = cells.iter().filter(|cell| cell.subject == NATIVE && cell.part != NULL);
        let pairs = natives.filter_map(|native| {
            Some(Self {
                native,
                guest: find(&native.part, native, GUEST)?,
                null_native: find(NULL, native, NATIVE)?,
                null_guest: find(NULL, native, GUEST)?,
            })
        });
        pairs.collect()
    }

    /// CPU time of the disk's engine per request on the host, nanoseconds: what the process used
    /// beyond the `null` disk. The median of the rounds.
    pub fn native_cpu_ns(&self) -> Option<f64> {
        beyond(&self.native.each(|round| round.cpu_ns_per_io), &self.null_native.each(|round| round.cpu_ns_per_io))
    }

    /// CPU time of the server per request in the guest, nanoseconds. The median of the rounds.
    pub fn server_cpu_ns(&self) -> Option<f64> {
        median(&self.guest.more(SERVER_CPU_NS)?)
    }

    /// CPU time of the disk's engine per request in the guest, nanoseconds: what the server used
    /// beyond the `null` disk. The median of the rounds.
    pub fn guest_cpu_ns(&self) -> Option<f64> {
        beyond(&self.guest.more(SERVER_CPU_NS)?, &self.null_guest.more(SERVER_CPU_NS)?)
    }

    /// Time that the way through the guest adds to a request at queue depth 1, nanoseconds: the
    /// difference of the mean latencies. `None` at other depths.
    pub fn added_ns(&self) -> Option<f64> {
        let mean = |cell: &Cell| cell.each(|round| round.mean_ns);
        (self.native.in_flight == 1).then(|| beyond(&mean(self.guest), &mean(self.native))).flatten()
    }
}

/// The median of the differences of each round.
fn beyond(of: &[f64], base: &[f64]) -> Option<f64> {
    median(&of.iter().zip(base).map(|(of, base)| of - base).collect::<Vec<_>>())
}
