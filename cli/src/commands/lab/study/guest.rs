//! Options of the studies that measure in a virtual machine.

use crate::commands::experiment::CHILD_COMMAND;
use clap::{Args, ValueEnum};
use diskwright_lab::{
    ChildLauncher, Result,
    guest::{Accelerator, GuestChoice},
};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct GuestArgs {
    /// Folder with the guest's kernel.
    #[arg(long, value_name = "DIR")]
    kernel: Option<PathBuf>,
    /// What executes the guest's instructions. [default: kvm if it works, else tcg]
    #[arg(long, value_enum)]
    accelerator: Option<By>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    /// The machine's processors.
    Kvm,
    /// QEMU's emulation.
    Tcg,
}

impl GuestArgs {
    /// The guest, which runs this program.
    pub fn choice(&self) -> Result<GuestChoice> {
        let accelerator = self.accelerator.map(|by| match by {
            By::Kvm => Accelerator::Kvm,
            By::Tcg => Accelerator::Tcg,
        });
        let launcher = ChildLauncher::current_exe([CHILD_COMMAND])?;
        Ok(GuestChoice { launcher, kernel: self.kernel.clone(), accelerator })
    }
}
