//! The saved result of the study, and figures computed from it.

use super::CLIENTS;
use crate::{
    cells::{Cell, Cells},
    targets::Container,
};
use diskwright_load::{figures::Figures, record::Head};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Schema of [`AccessPathsResult`].
pub const SCHEMA: &str = "diskwright.study.access-paths/2";

/// Name of the figure in [`Cell::more`]: CPU time of the server process per request, nanoseconds;
/// `None` for an access path without a server.
pub const SERVER_CPU_NS: &str = "server_cpu_ns_per_io";

/// An access path to a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AccessPath {
    /// The disk in the process of the load generator; the base of the ratios.
    InProcess,
    /// Our NBD server and our NBD client over a unix socket.
    Nbd,
    /// The same over TCP on loopback.
    NbdTcp,
    /// Our NVMe/TCP target and our host over TCP on loopback.
    NvmeTcp,
    /// Our iSCSI target and our initiator over TCP on loopback.
    Iscsi,
    /// A loop device on a FUSE file.
    Attach,
    /// A raw file in the process of the load generator.
    RawFile,
    /// The raw file, served by `qemu-nbd` to our NBD client.
    QemuNbd,
}

impl AccessPath {
    /// All access paths; the base of the ratios is the first.
    pub const ALL: [Self; 8] = [
        Self::InProcess,
        Self::Nbd,
        Self::NbdTcp,
        Self::NvmeTcp,
        Self::Iscsi,
        Self::Attach,
        Self::RawFile,
        Self::QemuNbd,
    ];

    /// Name in reports, and the subject of its cells.
    pub fn name(self) -> &'static str {
        match self {
            Self::InProcess => "in process",
            Self::Nbd => "NBD",
            Self::NbdTcp => "NBD, TCP",
            Self::NvmeTcp => "NVMe/TCP",
            Self::Iscsi => "iSCSI",
            Self::Attach => "attach",
            Self::RawFile => "raw file",
            Self::QemuNbd => "qemu-nbd, raw",
        }
    }

    /// Whether it reaches the raw file.
    pub fn is_raw(self) -> bool {
        matches!(self, Self::RawFile | Self::QemuNbd)
    }

    /// One sentence for the report.
    pub fn description(self) -> &'static str {
        match self {
            Self::InProcess => "The disk in the process of the load generator; writes go to an ephemeral child.",
            Self::Nbd => {
                "`diskwright serve --ephemeral` and the NBD client over a unix socket, one connection per client."
            }
            Self::NbdTcp => "The same over TCP on loopback, which has no delay of a network.",
            Self::NvmeTcp => {
                "`diskwright serve --nvme --ephemeral` and our host over TCP on loopback, one I/O queue per client. It stands for Fibre Channel too, which needs hardware."
            }
            Self::Iscsi => {
                "`diskwright serve --iscsi --ephemeral` and our initiator over TCP on loopback, one session per client."
            }
            Self::Attach => "`diskwright attach --ephemeral`: a loop device with direct I/O over a FUSE file.",
            Self::RawFile => "A raw file in the process of the load generator, overwritten in place.",
            Self::QemuNbd => {
                "`qemu-nbd -f raw --cache=none --aio=io_uring` and the NBD client over a unix socket; overwritten in place."
            }
        }
    }
}

/// The result of the study; a partial result has fewer rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct AccessPathsResult {
    /// When, where and by which program it was measured, and the conclusion.
    #[serde(flatten)]
    pub head: Head,
    /// Whether this is the quick study.
    pub quick: bool,
    /// Format and type of the disk.
    pub disk: Container,
    /// Size of the disk, bytes.
    pub size_bytes: u64,
    /// Length of a cell, warm-up included, nanoseconds.
    pub cell_ns: u64,
    /// Requested rounds.
    pub rounds: usize,
    /// All access paths, also those that were skipped.
    pub ways: Vec<AccessPathRecord>,
    /// Each access path at each load: the part is the load, the subject is the access path. CPU
    /// time is that of the load generator's process, which contains the client of NBD, NVMe/TCP or
    /// iSCSI.
    pub cells: Vec<Cell>,
}

impl AccessPathsResult {
    /// Whole rounds that were measured.
    pub fn rounds_measured(&self) -> usize {
        self.cells.iter().map(|cell| cell.rounds.len()).min().unwrap_or(0)
    }
}

impl Cells for AccessPathsResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        Cow::from(&self.cells)
    }
}

/// An access path, and whether it was skipped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct AccessPathRecord {
    /// The access path.
    pub way: AccessPath,
    /// Why it was skipped; `None` if it was measured.
    pub skipped: Option<String>,
}

/// A cell without rounds.
pub(crate) fn cell(load: &str, outstanding: u32, way: AccessPath) -> Cell {
    let title = format!("{load} load, {CLIENTS} clients with {outstanding} outstanding");
    Cell::new(load, &title, way.name(), u64::from(CLIENTS * outstanding))
}

/// A function that returns one figure for each round of a cell.
pub type CellFigure = fn(&Cell) -> Vec<f64>;

/// Requests per second of each round.
pub fn iops(cell: &Cell) -> Vec<f64> {
    cell.each(|round| round.iops)
}

/// Mean response time of each round, nanoseconds.
pub fn mean_ns(cell: &Cell) -> Vec<f64> {
    cell.each(|round| round.mean_ns)
}

/// CPU time of client and server together per request, of each round, nanoseconds.
pub fn cpu_ns(cell: &Cell) -> Vec<f64> {
    let servers = cell.more.get(SERVER_CPU_NS);
    let server = |round: usize| servers.and_then(|servers| *servers.get(round)?).unwrap_or(0.0);
    let both = |(number, round): (usize, &Figures)| round.cpu_ns_per_io + server(number);
    cell.rounds.iter().enumerate().map(both).collect()
}
