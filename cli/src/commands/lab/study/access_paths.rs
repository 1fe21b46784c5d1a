//! `diskwright lab study access-paths`.

use crate::{
    commands::experiment::{self, ExperimentArgs},
    context::Context,
    exit::Outcome,
    sizes,
};
use clap::{Args, ValueEnum};
use diskwright_lab::{
    study::access_paths::{self, AccessPathsOptions},
    targets::Container,
};

/// Arguments of `lab study access-paths`.
#[derive(Debug, Args)]
#[command(
    mut_arg("output", |arg| arg.help(
        "File for the result. [default: diskwright-access-paths-TIME.json in the current folder]"
    )),
    mut_arg("rounds", |arg| arg.help("Rounds of each cell. [default: 5; 3 with --quick]")),
    mut_arg("cell", |arg| arg.help(
        "Time per cell, a fifth of it (at most 30) warm-up. [default: 30s; 1s with --quick]"
    )),
    after_help = "\
Reaches one disk in several ways: in process (= 100), over NBD, and as an attached block device; for \
comparison a raw file in process and with qemu-nbd. The load is that of NetApp's paper on SMB 3.0, \
iSCSI and FC: twenty clients with 2, 4 and 6 outstanding requests each, 8K random, 70 % reads. \
Reports requests per second, response times, and the CPU time of client and server. Every cell \
begins with the disk as it was filled. Ways that need root (attach) or a missing program (qemu-nbd) \
are skipped. Use a release build.

The paper's cell length and rounds: --cell 930 --rounds 2.

EXIT CODES  0 done; 1 it could not be measured; 130 stopped (whole rounds are saved; servers, devices \
and scratch files are removed)

EXAMPLES
  sudo diskwright lab study access-paths --quick
  diskwright lab study access-paths --dir /mnt/nvme --disk vhd-dynamic \\
      --size 20G
  diskwright lab report diskwright-access-paths-*.json -o paths.html"
)]
pub struct AccessPathsArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Format and type of the disk.
    #[arg(long, value_enum, default_value_t = Disk::VhdxDynamic)]
    disk: Disk,
    /// Size of the disk. [default: 16G; 256M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Disk {
    /// A fully allocated dynamic VHDX.
    VhdxDynamic,
    /// A fixed VHDX.
    VhdxFixed,
    /// A fully allocated dynamic VHD.
    VhdDynamic,
    /// A fixed VHD.
    VhdFixed,
    /// A raw file.
    Raw,
}

impl Disk {
    fn container(self) -> Container {
        match self {
            Self::VhdxDynamic => Container::VhdxDynamic,
            Self::VhdxFixed => Container::VhdxFixed,
            Self::VhdDynamic => Container::VhdDynamic,
            Self::VhdFixed => Container::VhdFixed,
            Self::Raw => Container::Raw,
        }
    }
}

pub fn run(context: &mut Context, args: &AccessPathsArgs) -> Outcome {
    let options = AccessPathsOptions {
        study: args.experiment.study(&context.global),
        size_bytes: args.size,
        disk: Some(args.disk.container()),
        program: Some(AccessPathsOptions::own_program()?),
    };
    let mut steps = context.steps();
    let report = access_paths::run(&options, &mut steps);
    drop(steps);
    experiment::conclude(context, report)
}
