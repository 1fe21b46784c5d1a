//! `diskwright lab study zero-payload`.

use crate::{
    commands::experiment::{self, ExperimentArgs},
    context::Context,
    exit::Outcome,
    sizes,
};
use clap::Args;
use diskwright_lab::study::zero_payload::{self, ZeroPayloadOptions};

/// Arguments of `lab study zero-payload`.
#[derive(Debug, Args)]
#[command(
    mut_arg("output", |arg| arg.help(
        "Where to save the result. [default: diskwright-zero-payload-TIME.json in the current folder]"
    )),
    mut_arg("rounds", |arg| arg.help("How often each cell is measured. [default: 5; 3 with --quick]")),
    mut_arg("cell", |arg| arg.help("Seconds that a cell takes. [default: 10; 0.7 with --quick]")),
    after_help = "\
Repeats SQLIO's eight tests on a dynamic and on a fixed disk, once with zeros as the paper did and once with data that cannot be compressed, \
and tells how many of the requests never reached the store. Use a release build.

EXAMPLES
  diskwright lab study zero-payload --quick
  diskwright lab study zero-payload --dir /mnt/nvme --size 20G"
)]
pub struct ZeroPayloadArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Size of each disk. [default: 20G, the paper's; 1G with --quick]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
}

/// Runs the study, prints its tables.
pub fn run(context: &mut Context, args: &ZeroPayloadArgs) -> Outcome {
    let options = ZeroPayloadOptions { study: args.experiment.study(&context.global), size_bytes: args.size };
    let mut steps = context.steps();
    let report = zero_payload::run(&options, &mut steps);
    drop(steps);
    experiment::conclude(context, report)
}
