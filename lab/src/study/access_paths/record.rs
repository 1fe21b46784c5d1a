//! What the study found, as it is saved, and what follows from it.

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

/// Name of the figure in [`Cell::more`]: CPU time of the server's process for each request,
/// nanoseconds; `None` where there is no server.
pub const SERVER_CPU_NS: &str = "server_cpu_ns_per_io";

/// A way to a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The engine in the generator's own process: what the others are measured against.
    InProcess,
    /// NBD over a unix socket, our server and our client.
    Nbd,
    /// A loop device over a FUSE file.
    Attach,
    /// A raw file in process.
    RawFile,
    /// The raw file by `qemu-nbd` and our client.
    QemuNbd,
}

impl Way {
    /// All of them, what the others are measured against first.
    pub const ALL: [Self; 5] = [Self::InProcess, Self::Nbd, Self::Attach, Self::RawFile, Self::QemuNbd];

    /// As shown to people.
    pub fn name(self) -> &'static str {
        match self {
            Self::InProcess => "in process",
            Self::Nbd => "NBD",
            Self::Attach => "attach",
            Self::RawFile => "raw file",
            Self::QemuNbd => "qemu-nbd, raw",
        }
    }

    /// Whether it leads to the raw file.
    pub fn is_raw(self) -> bool {
        matches!(self, Self::RawFile | Self::QemuNbd)
    }

    /// A sentence that describes it.
    pub fn description(self) -> &'static str {
        match self {
            Self::InProcess => "The engine in the process of the generator; writes go to a temporary child.",
            Self::Nbd => {
                "`diskwright serve --ephemeral` and the NBD client over a unix socket, a connection for each of the clients."
            }
            Self::Attach => "`diskwright attach --ephemeral`: a loop device with direct I/O over a FUSE file.",
            Self::RawFile => "A raw file in the process of the generator, overwritten in place.",
            Self::QemuNbd => {
                "`qemu-nbd -f raw --cache=none --aio=io_uring` and the NBD client over a unix socket; overwritten in place."
            }
        }
    }
}

/// The study, whole or as far as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct AccessPathsResult {
    /// When, where and by what it was measured, and the conclusion.
    #[serde(flatten)]
    pub head: Head,
    /// Whether it was the short form.
    pub quick: bool,
    /// Format and type of the disk.
    pub disk: Container,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Length of a cell with its warm-up, nanoseconds.
    pub cell_ns: u64,
    /// Rounds that were asked for.
    pub rounds: usize,
    /// The ways, those that could not be measured too.
    pub ways: Vec<WayRecord>,
    /// Each way at each load: the part is the load, the subject the way. CPU time is that of the
    /// generator's process, with the NBD client in it.
    pub cells: Vec<Cell>,
}

impl AccessPathsResult {
    /// Rounds that were measured in full.
    pub fn rounds_measured(&self) -> usize {
        self.cells.iter().map(|cell| cell.rounds.len()).min().unwrap_or(0)
    }
}

impl Cells for AccessPathsResult {
    fn cells(&self) -> Cow<'_, [Cell]> {
        Cow::from(&self.cells)
    }
}

/// Whether a way was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct WayRecord {
    /// The way.
    pub way: Way,
    /// Why it was not measured.
    pub skipped: Option<String>,
}

/// A cell that has no round yet.
pub(crate) fn cell(load: &str, outstanding: u32, way: Way) -> Cell {
    let title = format!("{load} load, {CLIENTS} clients with {outstanding} outstanding");
    Cell::new(load, &title, way.name(), u64::from(CLIENTS * outstanding))
}

/// A figure of each round of a cell.
pub type OfCell = fn(&Cell) -> Vec<f64>;

/// Requests a second.
pub fn iops(cell: &Cell) -> Vec<f64> {
    cell.each(|round| round.iops)
}

/// Mean response time, nanoseconds.
pub fn mean_ns(cell: &Cell) -> Vec<f64> {
    cell.each(|round| round.mean_ns)
}

/// CPU time of client and server together for each request, nanoseconds.
pub fn cpu_ns(cell: &Cell) -> Vec<f64> {
    let servers = cell.more.get(SERVER_CPU_NS);
    let server = |round: usize| servers.and_then(|servers| *servers.get(round)?).unwrap_or(0.0);
    let both = |(number, round): (usize, &Figures)| round.cpu_ns_per_io + server(number);
    cell.rounds.iter().enumerate().map(both).collect()
}
