//! The access paths to a disk, and the scales on which they are compared: where the clients are.
//!
//! ```text
//!   scale     clients                               = 100
//!   host      20 threads of one process             the disk in process
//!   guest     20 threads in a virtual machine       its vhost-user disk
//!   agents    20 threads, spread over the agents    the first access path that was measured
//! ```
//!
//! Figures of two scales are never compared. What a cell, the verdict and the report do differently
//! for each scale is asked of the scale. The scale of a cell is the end of its part's name, so the
//! saved cells of all scales lie in one list.

use crate::cells::{Cell, Compared};
use serde::{Deserialize, Serialize};

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
    /// Our NBD server and the NBD clients of agents.
    AgentNbd,
    /// Our NVMe/TCP target and the hosts of agents.
    AgentNvme,
    /// Our iSCSI target and the initiators of agents.
    AgentIscsi,
}

impl AccessPath {
    /// All access paths, scale by scale. The base of a scale is its first one.
    pub const ALL: [Self; 21] = [
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
        Self::AgentNbd,
        Self::AgentNvme,
        Self::AgentIscsi,
    ];

    /// Name in reports, and the subject of its cells.
    pub fn name(self) -> &'static str {
        self.names().1
    }

    /// Name among the access paths on the same scale.
    pub fn name_on_scale(self) -> &'static str {
        self.name().trim_start_matches(self.scale().name_start())
    }

    /// Name in options. An agent allows an access path by a target with this name.
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
            Self::AgentNbd => ("agent-nbd", "agents: NBD"),
            Self::AgentNvme => ("agent-nvme", "agents: NVMe/TCP"),
            Self::AgentIscsi => ("agent-iscsi", "agents: iSCSI"),
        }
    }

    /// Whether it reaches the raw file.
    pub fn is_raw(self) -> bool {
        matches!(self, Self::RawFile | Self::QemuNbd)
    }

    /// Where its clients are.
    pub fn scale(self) -> Scale {
        match self {
            Self::InProcess
            | Self::Nbd
            | Self::NbdTcp
            | Self::NbdNetwork
            | Self::NvmeTcp
            | Self::NvmeNetwork
            | Self::Iscsi
            | Self::IscsiNetwork
            | Self::Attach
            | Self::RawFile
            | Self::QemuNbd => Scale::Host,
            Self::GuestVhostUser
            | Self::GuestNvme
            | Self::GuestNvmeNetwork
            | Self::GuestIscsi
            | Self::GuestIscsiNetwork
            | Self::GuestSmb
            | Self::GuestSmbNetwork => Scale::Guest,
            Self::AgentNbd | Self::AgentNvme | Self::AgentIscsi => Scale::Agents,
        }
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
            Self::AgentNbd => {
                "`diskwright serve --ephemeral` and the NBD clients of all agents over TCP, one connection per client."
            }
            Self::AgentNvme => {
                "`diskwright serve --nvme --ephemeral` and the hosts of all agents over TCP, one I/O queue per client."
            }
            Self::AgentIscsi => {
                "`diskwright serve --iscsi --ephemeral` and the initiators of all agents over TCP, one session per client."
            }
            Self::GuestSmb => {
                "`diskwright attach --fuse --ephemeral`, shared by Samba, and the SMB 3.1.1 client of the guest’s kernel, which demand neither signing nor encryption."
            }
        }
    }
}

/// Where the clients are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Threads of this process.
    Host,
    /// Threads in a virtual machine of this host.
    Guest,
    /// Threads of the agents of a fleet.
    Agents,
}

impl Scale {
    /// All scales, in the order of reports.
    pub const ALL: [Self; 3] = [Self::Host, Self::Guest, Self::Agents];

    /// Its access paths.
    pub fn ways(self) -> impl Iterator<Item = AccessPath> {
        AccessPath::ALL.into_iter().filter(move |way| way.scale() == self)
    }

    /// The access path with which all others of the scale are compared, if it is always the same
    /// one. `None`: the first one that was measured. The paper compares with its first protocol.
    pub fn base(self) -> Option<AccessPath> {
        match self {
            Self::Host => Some(AccessPath::InProcess),
            Self::Guest => Some(AccessPath::GuestVhostUser),
            Self::Agents => None,
        }
    }

    /// The scale of a cell.
    pub fn of(cell: &Cell) -> Self {
        Self::of_part(&cell.part).0
    }

    /// The scale of a part, and its load.
    pub fn of_part(part: &str) -> (Self, &str) {
        let of = |scale: Self| Some((scale, part.strip_suffix(scale.part_end())?));
        [Self::Guest, Self::Agents].into_iter().find_map(of).unwrap_or((Self::Host, part))
    }

    /// Name of the part with the cells of a load.
    pub fn part(self, load: &str) -> String {
        format!("{load}{}", self.part_end())
    }

    /// The loads that were measured on the scale.
    pub fn loads(self, cells: &[Cell]) -> Vec<Compared<'_>> {
        Compared::all(cells).into_iter().filter(|load| Self::of_part(load.part).0 == self).collect()
    }

    /// Whole rounds that were measured on the scale; `None` if nothing was.
    pub fn rounds_measured(self, cells: &[Cell]) -> Option<usize> {
        cells.iter().filter(|cell| Self::of(cell) == self).map(|cell| cell.rounds.len()).min()
    }

    /// Start of the names of its access paths.
    pub(super) fn name_start(self) -> &'static str {
        match self {
            Self::Host => "",
            Self::Guest => "guest: ",
            Self::Agents => "agents: ",
        }
    }

    fn part_end(self) -> &'static str {
        match self {
            Self::Host => "",
            Self::Guest => ", guest",
            Self::Agents => ", agents",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::example::cells, *};

    #[test]
    fn every_access_path_and_every_part_has_one_scale() {
        for scale in Scale::ALL {
            assert_eq!(Scale::of_part(&scale.part("heavy")), (scale, "heavy"));
            assert!(scale.ways().all(|way| way.name().starts_with(scale.name_start())));
            assert!(scale.base().is_none_or(|base| scale.ways().next() == Some(base)), "the base is the first");
        }
        assert_eq!(Scale::ALL.into_iter().flat_map(Scale::ways).count(), AccessPath::ALL.len());
    }

    #[test]
    fn the_base_of_the_agents_is_the_first_that_was_measured() {
        let mut cells = cells();
        let base = |cells: &[Cell]| Scale::Agents.loads(cells)[0].cells[0].subject.clone();
        assert_eq!(base(&cells), AccessPath::AgentNbd.name());
        cells.retain(|cell| cell.subject != AccessPath::AgentNbd.name());
        assert_eq!(base(&cells), AccessPath::AgentNvme.name());
        assert_eq!(Scale::Agents.rounds_measured(&cells), Some(3));
        cells.retain(|cell| Scale::of(cell) != Scale::Agents);
        assert!(Scale::Agents.loads(&cells).is_empty() && Scale::Agents.rounds_measured(&cells).is_none());
    }
}
