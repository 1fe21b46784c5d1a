use crate::{ChildLauncher, guest::Accelerator, study::StudyOptions};
use std::path::PathBuf;

/// Options of the study.
#[derive(Debug, Clone, Default)]
pub struct NativeAndGuestOptions {
    /// Default: 5 rounds, 3 if quick; cells of 10 s, 0.4 s if quick.
    pub study: StudyOptions,
    /// Size of each disk, rounded up to a multiple of 32 MiB. Default: 8 GiB, 256 MiB if quick.
    pub size_bytes: Option<u64>,
    /// Folder with the guest's kernel; see [`Kernel::find`](crate::guest::Kernel::find).
    pub kernel: Option<PathBuf>,
    /// What executes the guest's instructions. Default: KVM if it works, else TCG.
    pub accelerator: Option<Accelerator>,
    /// Starts this program in the guest. Required.
    pub launcher: Option<ChildLauncher>,
}
