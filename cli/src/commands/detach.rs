//! `diskwright detach TARGET...`: flushes and detaches disks.

use crate::{
    context::Context,
    exit::{self, Codes, Outcome},
    json::{self, Document},
    several::{self, Between},
};
use clap::Args;
use diskwright_serve::attach::{self, DetachOptions, Registry};
use schemars::JsonSchema;
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
    /// The images, their devices, or their mount points.
    #[arg(required = true, value_name = "TARGET")]
    targets: Vec<PathBuf>,
    /// Unmount its file systems first, unless a program has a file or folder open there.
    #[arg(long, short)]
    unmount: bool,
    /// Detach although the disk is in use or cannot be flushed: unwritten data are lost.
    #[arg(long)]
    force: bool,
}

/// What `detach --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The image.
    file: String,
    /// The block device that it had; none where it was attached as a file.
    device: Option<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.detach/1";
}

/// Detaches, and prints what was detached with `--json`.
pub fn run(context: &mut Context, args: &DetachArgs) -> Outcome {
    let how = DetachOptions { unmount: args.unmount, force: args.force };
    several::each(context, &args.targets, Codes::USUAL, Between::Nothing, |context, target| {
        let record = attach::detach(&Registry::open()?, target, how)?;
        if context.global.json {
            let device = record.device.as_deref().map(json::path);
            context.print_json(&Report { file: json::path(&record.file), device })?;
        }
        Ok(exit::OK)
    })
}
