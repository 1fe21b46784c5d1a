//! `diskwright lab study tiers`.

use crate::{
    commands::experiment::{self, ExperimentArgs},
    context::Context,
    exit::Outcome,
    member_limit::{self, LimitArg},
    sizes,
};
use clap::Args;
use diskwright_lab::study::tiers::{self, TierOptions, TiersOptions};
use diskwright_space::MemberLimit;
use diskwright_store::StoreLimit;
use std::{path::PathBuf, time::Duration};

/// Arguments of `lab study tiers`.
#[derive(Debug, Args)]
#[command(
    mut_arg("output", |arg| arg.help(
        "File for the result. [default: diskwright-tiers-TIME.json in the current folder]"
    )),
    mut_arg("rounds", |arg| arg.help("Rounds of each cell. [default: 5; 2 with --quick]")),
    mut_arg("cell", |arg| arg.help("Time per cell. [default: 60s; 12s with --quick]")),
    after_help = "\
Makes a pool of fast and slow members, measures a zipf load on a disk that lies on the slow ones, moves \
what is used often to the fast ones, and measures it again. Reports which share of the requests the fast \
members serve, as predicted and as measured, and how large they would have to be to serve more: the \
report that the Storage Spaces paper reads after a night. Without folders the members are files in the \
scratch folder, limited to the speed of an SSD and of an array of hard disks.

EXAMPLES
  diskwright lab study tiers --quick
  diskwright lab study tiers --fast-dir /mnt/nvme --slow-dir /mnt/disks
  diskwright lab study tiers --quick --slow-limit iops=150,latency=6ms"
)]
pub struct TiersArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Size of the disk. [default: 16G; 512M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    /// What the fast members hold of the disk. [default: a tenth]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    fast_size: Option<u64>,
    /// Copies of each slab, and members of each class: 1 to 3.
    #[arg(long, value_name = "N", default_value = "2")]
    copies: u8,
    /// Exponent of the zipf distribution: the larger, the fewer blocks get most requests.
    #[arg(long, value_name = "THETA", default_value = "1.2")]
    zipf: f64,
    /// Folder for the fast members, on a fast device.
    #[arg(long, value_name = "DIR")]
    fast_dir: Option<PathBuf>,
    /// Folder for the slow members, on a slow device.
    #[arg(long, value_name = "DIR")]
    slow_dir: Option<PathBuf>,
    /// Speed of each fast member: iops=N,latency=TIME, or `none`. [default: that of the device of
    /// --fast-dir, else iops=20000,latency=100us]
    #[arg(long, value_name = "LIMIT", value_parser = member_limit::parse)]
    fast_limit: Option<LimitArg>,
    /// Speed of each slow member. [default: that of the device of --slow-dir, else
    /// iops=2000,latency=4ms]
    #[arg(long, value_name = "LIMIT", value_parser = member_limit::parse)]
    slow_limit: Option<LimitArg>,
}

pub fn run(context: &mut Context, args: &TiersArgs) -> Outcome {
    let limit = |LimitArg(limit): LimitArg| {
        let one =
            |limit: MemberLimit| StoreLimit { iops: limit.iops, latency: Duration::from_micros(limit.latency_us) };
        limit.map(one).unwrap_or_default()
    };
    let tier =
        |dir: &Option<PathBuf>, wanted: Option<LimitArg>| TierOptions { dir: dir.clone(), limit: wanted.map(limit) };
    let options = TiersOptions {
        study: args.experiment.study(&context.global),
        size_bytes: args.size,
        fast_bytes: args.fast_size,
        copies: args.copies,
        theta: args.zipf,
        fast: tier(&args.fast_dir, args.fast_limit),
        slow: tier(&args.slow_dir, args.slow_limit),
    };
    let mut steps = context.steps();
    let report = tiers::run(&options, &mut steps);
    drop(steps);
    experiment::conclude(context, report)
}
