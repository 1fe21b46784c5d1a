//! The options of the study.

use crate::{LabError, Result, study::StudyOptions, targets::Container};
use std::path::PathBuf;

/// Options of the study.
#[derive(Debug, Clone, Default)]
pub struct AccessPathsOptions {
    /// Rounds: 5 unless said, 3 quick. Time of one cell, warm-up included: 30 s unless said, 1 s
    /// quick.
    pub study: StudyOptions,
    /// Size of the disk: 16 GiB, 256 MiB quick.
    pub size_bytes: Option<u64>,
    /// What the disk is; a populated dynamic VHDX unless said. It cannot be a differencing one: the
    /// temporary child is.
    pub disk: Option<Container>,
    /// This program, to be started as a server. Without it, nothing can be measured but what is in
    /// process.
    pub program: Option<PathBuf>,
}

impl AccessPathsOptions {
    /// With this program as its own server.
    ///
    /// # Errors
    /// [`LabError::File`] when the system cannot tell which program is running.
    pub fn own_program() -> Result<PathBuf> {
        std::env::current_exe().map_err(LabError::file("find the running program", "/proc/self/exe"))
    }
}
