use super::{AccessPath, agent_server::AgentServer};
use crate::{LabError, Result, guest::GuestChoice, network::NetworkSpec, study::StudyOptions, targets::Container};
use diskwright_fleet::controller::{FleetOptions, Wanted};
use std::path::PathBuf;

/// Why access paths are skipped without [`AccessPathsOptions::program`].
pub(super) const NO_PROGRAM: &str = "the caller gave no way to start this program as a server";

/// Agents of a fleet, and where the servers of the study listen for them. Each agent must allow a
/// target for each access path, which is named by the word of the access path
/// ([`AgentServer::targets`]).
#[derive(Debug, Clone)]
pub struct AgentsChoice {
    /// The agents. They must be reached by dialling. Groups and targets are those of the study.
    pub wanted: Vec<Wanted>,
    /// Options of the fleet.
    pub fleet: FleetOptions,
    /// Where the servers listen. The agents' machines must reach this address.
    pub server: AgentServer,
}

/// Options of the study.
#[derive(Debug, Clone, Default)]
pub struct AccessPathsOptions {
    /// Default: 5 rounds, 3 if quick; cells of 30 s, 1 s if quick.
    pub study: StudyOptions,
    /// Size of the disk, rounded up to a multiple of 32 MiB. Default: 16 GiB, 256 MiB if quick.
    pub size_bytes: Option<u64>,
    /// Format and type of the disk. Default: dynamic VHDX. Differencing is not supported, because
    /// the study creates its own child.
    pub disk: Option<Container>,
    /// The executable to start as a server. If `None`, the access paths that need a server are
    /// skipped.
    pub program: Option<PathBuf>,
    /// The access paths to measure, with what they are compared with. Default: all.
    pub only: Vec<AccessPath>,
    /// The emulated network. If `None`, the access paths over it are skipped.
    pub network: Option<NetworkSpec>,
    /// What is needed to measure in a guest. If `None`, the access paths from a guest are skipped.
    pub guest: Option<GuestChoice>,
    /// Agents of a fleet. If `None`, the access paths of agents are not measured.
    pub agents: Option<AgentsChoice>,
}

impl AccessPathsOptions {
    /// Whether an access path is to be measured.
    pub(super) fn wants(&self, way: AccessPath) -> bool {
        self.only.is_empty() || self.only.iter().any(|one| *one == way || one.scale().base() == Some(way))
    }

    /// The path of the running program, for [`Self::program`].
    ///
    /// # Errors
    /// [`LabError::File`] if the system does not report it.
    pub fn own_program() -> Result<PathBuf> {
        std::env::current_exe().map_err(LabError::file("find the running program", "/proc/self/exe"))
    }
}
