//! The saved result of the study, and figures computed from it.

use super::CLIENTS;
use crate::{
    cells::{Cell, Cells, Compared},
    guest::GuestRecord,
    network::NetworkSpec,
    targets::Container,
};
use diskwright_load::{figures::Figures, record::Head};
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, fmt};

/// Schema of [`AccessPathsResult`].
pub const SCHEMA: &str = "diskwright.study.access-paths/3";

/// Name of the figure in [`Cell::more`]: CPU time of the server process per request, nanoseconds;
/// `None` for an access path without a server.
pub const SERVER_CPU_NS: &str = "server_cpu_ns_per_io";

/// An access path to a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AccessPath {
    /// The disk in the process of the load generator; the base of the ratios on this host.
    InProcess,
    /// Our NBD server and our NBD client over a unix socket.
    Nbd,
    /// The same over TCP on loopback.
    NbdTcp,
    /// The same over the emulated network.
    NbdNetwork,
    /// Our NVMe/TCP target and our host over TCP on loopback.
    NvmeTcp,
    /// The same over the emulated network.
    NvmeNetwork,
    /// Our iSCSI target and our initiator over TCP on loopback.
    Iscsi,
    /// The same over the emulated network.
    IscsiNetwork,
    /// A loop device on a FUSE file.
    Attach,
    /// A raw file in the process of the load generator.
    RawFile,
    /// The raw file, served by `qemu-nbd` to our NBD client.
    QemuNbd,
    /// A vhost-user-blk device of a guest; the base of the ratios in the guest.
    GuestVhostUser,
    /// Our NVMe/TCP target and the host of the guest's kernel.
    GuestNvme,
    /// The same over the emulated network.
    GuestNvmeNetwork,
    /// Our iSCSI target and the initiator of the guest's kernel.
    GuestIscsi,
    /// The same over the emulated network.
    GuestIscsiNetwork,
    /// Samba, which shares the disk as a FUSE file, and the SMB client of the guest's kernel.
    GuestSmb,
    /// The same over the emulated network.
    GuestSmbNetwork,
}

impl AccessPath {
    /// All access paths. The base of the ratios on this host is the first, the base in the guest is
    /// the first of the guest.
    pub const ALL: [Self; 18] = [
        Self::InProcess,
        Self::Nbd,
        Self::NbdTcp,
        Self::NbdNetwork,
        Self::NvmeTcp,
        Self::NvmeNetwork,
        Self::Iscsi,
        Self::IscsiNetwork,
        Self::Attach,
        Self::RawFile,
        Self::QemuNbd,
        Self::GuestVhostUser,
        Self::GuestNvme,
        Self::GuestNvmeNetwork,
        Self::GuestIscsi,
        Self::GuestIscsiNetwork,
        Self::GuestSmb,
        Self::GuestSmbNetwork,
    ];

    /// Name in reports, and the subject of its cells.
    pub fn name(self) -> &'static str {
        self.names().1
    }

    /// Name among the access paths on the same scale.
    pub fn name_on_scale(self) -> &'static str {
        self.name().trim_start_matches("guest: ")
    }

    /// Name in options.
    pub fn word(self) -> &'static str {
        self.names().0
    }

    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::InProcess => ("in-process", "in process"),
            Self::Nbd => ("nbd", "NBD"),
            Self::NbdTcp => ("nbd-tcp", "NBD, TCP"),
            Self::NbdNetwork => ("nbd-network", "NBD, network"),
            Self::NvmeTcp => ("nvme-tcp", "NVMe/TCP"),
            Self::NvmeNetwork => ("nvme-network", "NVMe/TCP, network"),
            Self::Iscsi => ("iscsi", "iSCSI"),
            Self::IscsiNetwork => ("iscsi-network", "iSCSI, network"),
            Self::Attach => ("attach", "attach"),
            Self::RawFile => ("raw-file", "raw file"),
            Self::QemuNbd => ("qemu-nbd", "qemu-nbd, raw"),
            Self::GuestVhostUser => ("guest-vhost-user", "guest: vhost-user"),
            Self::GuestNvme => ("guest-nvme", "guest: NVMe/TCP"),
            Self::GuestNvmeNetwork => ("guest-nvme-network", "guest: NVMe/TCP, network"),
            Self::GuestIscsi => ("guest-iscsi", "guest: iSCSI"),
            Self::GuestIscsiNetwork => ("guest-iscsi-network", "guest: iSCSI, network"),
            Self::GuestSmb => ("guest-smb", "guest: SMB"),
            Self::GuestSmbNetwork => ("guest-smb-network", "guest: SMB, network"),
        }
    }

    /// The access path with which this one is compared.
    pub fn base(self) -> Self {
        if self.is_in_guest() { Self::GuestVhostUser } else { Self::InProcess }
    }

    /// Whether it reaches the raw file.
    pub fn is_raw(self) -> bool {
        matches!(self, Self::RawFile | Self::QemuNbd)
    }

    /// Whether the load generator is in the guest. Host and guest are never on one scale.
    pub fn is_in_guest(self) -> bool {
        matches!(
            self,
            Self::GuestVhostUser
                | Self::GuestNvme
                | Self::GuestNvmeNetwork
                | Self::GuestIscsi
                | Self::GuestIscsiNetwork
                | Self::GuestSmb
                | Self::GuestSmbNetwork
        )
    }

    /// Whether the emulated network is between the client and the server.
    pub fn is_over_network(self) -> bool {
        matches!(
            self,
            Self::NbdNetwork
                | Self::NvmeNetwork
                | Self::IscsiNetwork
                | Self::GuestNvmeNetwork
                | Self::GuestIscsiNetwork
                | Self::GuestSmbNetwork
        )
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
            Self::NbdNetwork | Self::NvmeNetwork | Self::IscsiNetwork => {
                "The same, with the server in a network namespace behind a virtual Ethernet with the network’s delay and rate."
            }
            Self::GuestNvmeNetwork | Self::GuestIscsiNetwork | Self::GuestSmbNetwork => {
                "The same, with the network’s rate at both ends of the tap device and its round trip in the guest."
            }
            Self::Attach => "`diskwright attach --ephemeral`: a loop device with direct I/O over a FUSE file.",
            Self::RawFile => "A raw file in the process of the load generator, overwritten in place.",
            Self::QemuNbd => {
                "`qemu-nbd -f raw --cache=none --aio=io_uring` and the NBD client over a unix socket; overwritten in place."
            }
            Self::GuestVhostUser => {
                "A virtual machine’s disk: `diskwright serve --vhost-user --ephemeral` and the guest’s virtio-blk driver."
            }
            Self::GuestNvme => {
                "`diskwright serve --nvme --ephemeral` and the NVMe/TCP host of the guest’s kernel, 2 I/O queues."
            }
            Self::GuestIscsi => {
                "`diskwright serve --iscsi --ephemeral` and the initiator of the guest’s kernel, one session."
            }
            Self::GuestSmb => {
                "`diskwright attach --fuse --ephemeral`, shared by Samba, and the SMB 3.1.1 client of the guest’s kernel, which demand neither signing nor encryption."
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
    /// The emulated network; `None` if there was none.
    pub network: Option<NetworkRecord>,
    /// The guest; `None` if nothing was measured in one.
    pub guest: Option<GuestRecord>,
    /// Each access path at each load. The part is the load, in the guest with
    /// [`IN_GUEST`] behind it; the subject is the access path. CPU time is that of the load
    /// generator's process, which on the host contains the client of NBD, NVMe/TCP or iSCSI.
    pub cells: Vec<Cell>,
}

impl AccessPathsResult {
    /// Whole rounds that were measured on the host, or in the guest if nothing was on the host.
    pub fn rounds_measured(&self) -> usize {
        let least = |in_guest| {
            let cells = self.cells.iter().filter(|cell| is_of_guest(cell) == in_guest);
            cells.map(|cell| cell.rounds.len()).min()
        };
        least(false).or_else(|| least(true)).unwrap_or(0)
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

/// Why an access path is skipped that is not among
/// [`AccessPathsOptions::only`](super::AccessPathsOptions::only).
pub(crate) const NOT_WANTED: &str = "it was not asked for";

/// End of the part's name of a cell in the guest.
pub const IN_GUEST: &str = ", guest";

/// Whether a cell was measured in the guest.
pub fn is_of_guest(cell: &Cell) -> bool {
    cell.part.ends_with(IN_GUEST)
}

/// The load of a part.
pub fn load_of(part: &str) -> &str {
    part.strip_suffix(IN_GUEST).unwrap_or(part)
}

/// A cell without rounds.
pub(crate) fn cell(load: &str, outstanding: u32, way: AccessPath) -> Cell {
    let title = format!("{load} load, {CLIENTS} clients with {outstanding} outstanding");
    let part = format!("{load}{}", if way.is_in_guest() { IN_GUEST } else { "" });
    Cell::new(&part, &title, way.name(), u64::from(CLIENTS * outstanding))
}

/// The loads on the host, and the loads in the guest.
pub(crate) fn scales(cells: &[Cell]) -> [Vec<Compared<'_>>; 2] {
    let (guest, host) = Compared::all(cells).into_iter().partition(|load| load.part.ends_with(IN_GUEST));
    [host, guest]
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
