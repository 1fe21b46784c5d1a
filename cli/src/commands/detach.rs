//! `diskwright detach TARGET`: flush, and let go of an attached disk.

use crate::{
    context::Context,
    exit::{self, Outcome},
    json,
};
use clap::Args;
use diskwright_serve::attach::{self, DetachOptions, Registry};
use serde::Serialize;
use std::path::PathBuf;

/// Arguments of `detach`.
#[derive(Debug, Args)]
#[command(after_help = "\
The disk is flushed and closed when the command ends. A disk that is mounted, used as swap, or open in a program is not detached; the \
error names the user. --force takes file systems away under the programs that use them, whose I/O then fails, and ends a server that does not answer.

EXAMPLES
  diskwright detach disk.vhdx
  diskwright detach /dev/loop0
  diskwright detach disk.vhdx --unmount")]
pub struct DetachArgs {
    /// The image, its device, or where it is mounted.
    target: PathBuf,
    /// Unmount what is mounted from it, unless a program has a file or folder there open.
    #[arg(long, short)]
    unmount: bool,
    /// Detach although it is in use, or cannot be flushed: what is not written is lost.
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    file: String,
    device: Option<String>,
}

/// Detaches.
pub fn run(context: &mut Context, args: &DetachArgs) -> Outcome {
    let how = DetachOptions { unmount: args.unmount, force: args.force };
    let record = attach::detach(&Registry::open()?, &args.target, how)?;
    if context.global.json {
        let device = record.device.as_deref().map(json::path);
        context.print_json("diskwright.detach/1", Report { file: json::path(&record.file), device })?;
    }
    Ok(exit::OK)
}
