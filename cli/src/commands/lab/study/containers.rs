//! `diskwright lab study containers`.

use crate::{
    commands::experiment::{self, CHILD_COMMAND, ExperimentArgs},
    context::Context,
    exit::Outcome,
    options::CacheArg,
    sizes::{self, Human},
};
use clap::Args;
use diskwright_lab::{
    child::ChildLauncher,
    study::{self, ContainersOptions},
};

/// Arguments of `lab study containers`.
#[derive(Debug, Args)]
#[command(
    mut_arg("quick", |arg| arg.help("End within two minutes: smaller disks, short cells, one queue depth")),
    mut_arg("output", |arg| arg.help(
        "File for the result. [default: diskwright-containers-TIME.json in the current folder]"
    )),
    mut_arg("rounds", |arg| arg.help("Rounds of each cell. [default: 5]")),
    mut_arg("cell", |arg| arg.help("Time per cell. [default: 2s; with --quick computed from the time budget]")),
    after_help = "\
Creates a raw file and fixed, dynamic and differencing disks in a scratch folder, fills them with \
incompressible data, verifies all of it, measures them in interleaved rounds, and removes them. The \
report has the figures of the paper of 2010 for comparison. The result is saved as JSON with machine, \
kernel, options and versions. Use a release build.

EXIT CODES  0 done; 1 failed; 130 stopped (the figures so far are printed and saved as a partial result)

EXAMPLES
  diskwright lab study containers --quick
  diskwright lab study containers --dir /mnt/nvme --size 8G
  diskwright lab study containers --queue-depth 1,32 --rounds 7 \\
      --output nvme.json"
)]
pub struct ContainersArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Size of each disk, rounded up to a multiple of 32M. [default: 4G; 512M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    /// Requests in flight, separated by commas. [default: 1,2,4,...,256; 32 with --quick]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    queue_depth: Option<Vec<u32>>,
    /// Differencing disks in the chain-length experiment, ascending. [default:
    /// 1,2,4,...,64,256,1023]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    chain_length: Option<Vec<u32>>,
}

pub fn run(context: &mut Context, args: &ContainersArgs) -> Outcome {
    let options = ContainersOptions {
        study: args.experiment.study(&context.global),
        cache: context.global.cache.map(CacheArg::mode),
        size_bytes: args.size,
        creation_bytes: None,
        queue_depths: args.queue_depth.clone(),
        chain_lengths: args.chain_length.clone(),
        launcher: Some(ChildLauncher::current_exe([CHILD_COMMAND])?),
    };
    if let Some(asked_bytes) = args.size
        && let Some(disk_bytes) = study::containers::disk_bytes(asked_bytes)
        && !(asked_bytes == 0 || disk_bytes == asked_bytes)
    {
        context.warn(&format!(
            "each disk will have {}, not {}: the size is rounded up to a multiple of 32M",
            Human(disk_bytes),
            Human(asked_bytes)
        ));
    }
    let mut steps = context.steps();
    let report = study::run(&options, &mut steps);
    drop(steps);
    experiment::conclude(context, report)
}
