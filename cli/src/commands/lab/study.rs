//! `diskwright lab study`: experiments of published papers. A new study needs a module, a variant,
//! and a line in [`run`].

mod access_paths;
mod containers;
mod guest;
mod native_and_guest;
mod queue_depth;
mod raw_and_file;
mod tiers;
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
    /// Cost of fixed, dynamic and differencing disks compared to a raw file, in VHD and VHDX.
    Containers(containers::ContainersArgs),
    /// Queue depth, threads and files that a target needs, by the Storage Spaces paper's procedure.
    QueueDepth(Box<queue_depth::QueueDepthArgs>),
    /// A zipf load on fast and slow members of a pool, before and after an optimisation.
    Tiers(tiers::TiersArgs),
    /// Cost of a file system, and of virtual disks on it, compared to the block device.
    RawAndFile(raw_and_file::RawAndFileArgs),
    /// Cost of NBD, NVMe/TCP, iSCSI, SMB and an attached device; also by many agents.
    AccessPaths(access_paths::AccessPathsArgs),
    /// The same disks on the host and in a virtual machine.
    NativeAndGuest(native_and_guest::NativeAndGuestArgs),
    /// Why a dynamic disk full of zeros seems many times faster than a fixed one.
    ZeroPayload(zero_payload::ZeroPayloadArgs),
}

pub fn run(context: &mut Context, args: &StudyArgs) -> Outcome {
    match &args.study {
        Study::Containers(args) => containers::run(context, args),
        Study::QueueDepth(args) => queue_depth::run(context, args),
        Study::Tiers(args) => tiers::run(context, args),
        Study::RawAndFile(args) => raw_and_file::run(context, args),
        Study::AccessPaths(args) => access_paths::run(context, args),
        Study::NativeAndGuest(args) => native_and_guest::run(context, args),
        Study::ZeroPayload(args) => zero_payload::run(context, args),
    }
}
