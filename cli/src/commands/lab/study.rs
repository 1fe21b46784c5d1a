//! `diskwright lab study`: the papers' experiments. A new study is a module, a variant, and a line
//! in [`run`].

mod access_paths;
mod containers;
mod queue_depth;
mod raw_and_file;
mod zero_payload;

use crate::{context::Context, exit::Outcome};
use clap::{Args, Subcommand};

/// Arguments of `lab study`.
#[derive(Debug, Args)]
pub struct StudyArgs {
    #[command(subcommand)]
    study: Study,
}

#[derive(Debug, Subcommand)]
enum Study {
    /// What fixed, dynamic and differencing disks cost against a raw file, in VHD and in VHDX.
    Containers(containers::ContainersArgs),
    /// How much load is enough: queue depth, threads, files, as the Storage Spaces paper finds out.
    QueueDepth(Box<queue_depth::QueueDepthArgs>),
    /// What a file system, and virtual disks on it, cost over the bare device.
    RawAndFile(raw_and_file::RawAndFileArgs),
    /// What it costs to reach a disk by NBD, or as an attached device, instead of in process.
    AccessPaths(access_paths::AccessPathsArgs),
    /// Why a dynamic disk full of zeros seems many times as fast as a fixed one.
    ZeroPayload(zero_payload::ZeroPayloadArgs),
}

/// Runs the study that was asked for.
pub fn run(context: &mut Context, args: &StudyArgs) -> Outcome {
    match &args.study {
        Study::Containers(args) => containers::run(context, args),
        Study::QueueDepth(args) => queue_depth::run(context, args),
        Study::RawAndFile(args) => raw_and_file::run(context, args),
        Study::AccessPaths(args) => access_paths::run(context, args),
        Study::ZeroPayload(args) => zero_payload::run(context, args),
    }
}
