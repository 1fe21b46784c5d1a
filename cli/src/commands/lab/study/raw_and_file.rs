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
        "File for the result. [default: diskwright-raw-and-file-TIME.json in the current folder]"
    )),
    mut_arg("rounds", |arg| arg.help("Rounds of each cell. [default: 5; 3 with --quick]")),
    mut_arg("cell", |arg| arg.help(
        "Time per cell, a sixth of it warm-up. [default: 72s, in five rounds the paper's 6 minutes; with --quick computed from the time budget]"
    )),
    after_help = "\
Measures the VMFS paper's matrix (five sizes, five patterns, 64 in flight) on a block device, on raw device \
mappings of it (VMDK, physical and virtual), and on flat VMDKs in a file system on the device: thick and \
eagerly zeroed, thick and lazily zeroed, and thin. All have the same size and the same kind of data, and \
are measured in interleaved rounds. First writes to new files are measured apart, with the flush. Reports \
throughput and CPU cost (also as MHz per IOPS) as ratios to the device, with the paper's figures.

Without --device, the block devices are loop devices with direct I/O on a file in the scratch folder. \
--device is a block device, or /dev/zram0 for memory. It is split in two halves, with partitions that \
exist only in the kernel: one half is bare, the other gets a new file system. At the end, or on Ctrl-C, \
the file system is unmounted, and partitions and loop devices are removed. The data on the device are \
lost. Needs root.

EXIT CODES  0 done; 1 failed; 130 stopped (whole rounds are saved)

EXAMPLES
  sudo diskwright lab study raw-and-file --quick
  sudo diskwright lab study raw-and-file --dir /mnt/nvme --fs xfs \\
      --output nvme.json
  sudo diskwright lab study raw-and-file --device /dev/nvme1n1 --destroy-data"
)]
pub struct RawAndFileArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Size of each disk. [default: 20G as in the paper; 1G with --quick]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    /// File system to create.
    #[arg(long = "fs", value_name = "NAME", value_enum, default_value = "ext4")]
    file_system: FileSystemArg,
    /// Block device to use instead of a file in the scratch folder. All of it may be overwritten.
    #[arg(long, value_name = "DEVICE")]
    device: Option<PathBuf>,
    /// Allow data on the device to be overwritten.
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
