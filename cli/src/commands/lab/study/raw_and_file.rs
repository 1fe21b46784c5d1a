//! `diskwright lab study raw-and-file`.

use crate::{
    commands::experiment::{self, ExperimentArgs},
    context::Context,
    exit::Outcome,
    sizes,
};
use clap::{Args, ValueEnum};
use diskwright_lab::study::raw_and_file::{self, FileSystem, RawAndFileOptions};
use std::path::PathBuf;

/// Arguments of `lab study raw-and-file`.
#[derive(Debug, Args)]
#[command(
    mut_arg("quick", |arg| arg.help("End within two minutes: smaller disks, two of the five sizes, short cells.")),
    mut_arg("output", |arg| arg.help(
        "Where to save the result. [default: diskwright-raw-and-file-TIME.json in the current folder]"
    )),
    mut_arg("rounds", |arg| arg.help("How often each cell is measured. [default: 5; 3 with --quick]")),
    mut_arg("cell", |arg| arg.help(
        "Seconds that a cell takes, a sixth of them to warm up. [default: 72, in five rounds the paper's 6 minutes; with --quick what the time allows]"
    )),
    after_help = "\
Measures the VMFS paper's workloads (five sizes by five patterns, 64 in flight) on a block device, on a file of a file system on it, and on a fixed and a \
dynamic VHDX there: alike in size, full of the same kind of data, in rounds that take turns. Tells throughput and CPU time for each request as ratios to the \
device, with the paper's beside.

The device is a file in the scratch folder shown by loop devices that go past the page cache, or --device: a real one, or /dev/zram0 for memory. It is \
halved: bare in the one half, with a new file system in the other, by partitions that only the kernel is told of. At the end, or on Ctrl-C, the file \
system is unmounted and partitions and loop devices go; what was on the device is lost. Needs root.

EXIT CODES  0 done, 1 it could not be done, 130 stopped (whole workloads are saved)

EXAMPLES
  sudo diskwright lab study raw-and-file --quick
  sudo diskwright lab study raw-and-file --dir /mnt/nvme --fs xfs --output nvme.json
  sudo diskwright lab study raw-and-file --device /dev/nvme1n1 --destroy-data"
)]
pub struct RawAndFileArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Size of each disk. [default: 20G, the paper's; 1G with --quick]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    /// The file system that is made.
    #[arg(long = "fs", value_name = "NAME", value_enum, default_value = "ext4")]
    file_system: FileSystemArg,
    /// A block device to take instead of a file in the scratch folder. All of it may be
    /// overwritten.
    #[arg(long, value_name = "DEVICE")]
    device: Option<PathBuf>,
    /// Overwrite whatever data the device holds.
    #[arg(long, requires = "device")]
    destroy_data: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum FileSystemArg {
    /// ext4, by mkfs.ext4.
    Ext4,
    /// XFS, by mkfs.xfs.
    Xfs,
}

/// Runs the study, prints its tables.
pub fn run(context: &mut Context, args: &RawAndFileArgs) -> Outcome {
    let options = RawAndFileOptions {
        study: args.experiment.study(&context.global),
        size_bytes: args.size,
        file_system: match args.file_system {
            FileSystemArg::Ext4 => FileSystem::Ext4,
            FileSystemArg::Xfs => FileSystem::Xfs,
        },
        device: args.device.clone(),
        destroy_data: args.destroy_data,
    };
    let mut steps = context.steps();
    let report = raw_and_file::run(&options, &mut steps);
    drop(steps);
    experiment::conclude(context, report)
}
