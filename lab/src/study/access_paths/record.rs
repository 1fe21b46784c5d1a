//! The saved result of the study, and figures computed from it.

use super::way::{AccessPath, Scale};
use crate::{
    cells::{Cell, Cells},
    guest::GuestRecord,
    network::NetworkSpec,
    targets::Container,
};
use diskwright_load::{figures::Figures, machine::Machine, record::Head};
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, collections::BTreeSet, fmt};

/// Schema of [`AccessPathsResult`].
pub const SCHEMA: &str = "diskwright.study.access-paths/4";

/// Name of the figure in [`Cell::more`]: CPU time of the server process per request, nanoseconds;
/// `None` for an access path without a server.
pub const SERVER_CPU_NS: &str = "server_cpu_ns_per_io";

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
    /// The emulated network; `None` if there was none.
    pub network: Option<NetworkRecord>,
    /// The guest; `None` if nothing was measured in one.
    pub guest: Option<GuestRecord>,
    /// The agents; `None` if nothing was measured by agents.
    pub agents: Option<AgentsRecord>,
    /// Each access path at each load. The part is the load with the end of its scale
    /// ([`Scale::part`]); the subject is the access path. CPU time is that of the load
    /// generator's processes, which outside of a guest contain the client of NBD, NVMe/TCP or
    /// iSCSI.
    pub cells: Vec<Cell>,
}

impl AccessPathsResult {
    /// Whole rounds that were measured on the first scale on which something was.
    pub fn rounds_measured(&self) -> usize {
        Scale::ALL.into_iter().find_map(|scale| scale.rounds_measured(&self.cells)).unwrap_or(0)
    }
}

/// The emulated network between servers and clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct NetworkRecord {
    /// Its delay and rate.
    #[serde(flatten)]
    pub spec: NetworkSpec,
    /// Whether this host's kernel could delay packets. If not, only the rate was limited on the
    /// host; a guest delays its packets itself.
    pub has_delay: bool,
}

impl fmt::Display for NetworkRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let without =
            if self.has_delay { "" } else { " (on the host without the round trip: its kernel has no netem)" };
        write!(f, "{}{without}", self.spec)
    }
}

/// The agents that measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct AgentsRecord {
    /// Host name or address at which the servers listened.
    pub server: String,
    /// The agents.
    pub agents: Vec<ClientsRecord>,
    /// Largest difference between the starts of the agents' windows, of all windows, nanoseconds.
    pub skew_ns: u64,
    /// Largest error of an agent's clock, of all windows, nanoseconds.
    pub clock_error_ns: u64,
}

/// An agent, and how many of the clients are its threads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ClientsRecord {
    /// Name of the agent.
    pub name: String,
    /// Clients of the agent.
    pub clients: u32,
    /// Machine of the agent.
    pub machine: Machine,
    /// Boot identifier of the machine: agents with the same one share a machine.
    pub boot_id: String,
}

impl AgentsRecord {
    /// Clients of all agents.
    pub fn clients(&self) -> u32 {
        self.agents.iter().map(|agent| agent.clients).sum()
    }

    /// Number of machines with agents.
    pub fn machines(&self) -> usize {
        self.agents.iter().map(|agent| &agent.boot_id).collect::<BTreeSet<_>>().len()
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

impl AccessPathRecord {
    /// An access path that was not asked for.
    pub(crate) fn not_wanted(way: AccessPath) -> Self {
        Self { way, skipped: Some(NOT_WANTED.into()) }
    }
}

/// Why an access path is skipped that is not among
/// [`AccessPathsOptions::only`](super::AccessPathsOptions::only).
pub(crate) const NOT_WANTED: &str = "it was not asked for";

/// A cell without rounds.
pub(crate) fn cell(load: &str, (clients, outstanding): (u32, u32), way: AccessPath) -> Cell {
    let title = format!("{load} load, {clients} clients with {outstanding} outstanding");
    Cell::new(&way.scale().part(load), &title, way.name(), u64::from(clients * outstanding))
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
