use super::AccessPath;
use crate::{LabError, Result, guest::GuestChoice, network::NetworkSpec, study::StudyOptions, targets::Container};
use std::path::PathBuf;

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
}

impl AccessPathsOptions {
    /// Whether an access path is to be measured.
    pub(super) fn wants(&self, way: AccessPath) -> bool {
        self.only.is_empty() || self.only.iter().any(|one| *one == way || one.base() == way)
    }

    /// The path of the running program, for [`Self::program`].
    ///
    /// # Errors
    /// [`LabError::File`] if the system does not report it.
    pub fn own_program() -> Result<PathBuf> {
        std::env::current_exe().map_err(LabError::file("find the running program", "/proc/self/exe"))
    }
}
