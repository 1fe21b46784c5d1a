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
        "File for the result. [default: diskwright-zero-payload-TIME.json in the current folder]"
    )),
    mut_arg("rounds", |arg| arg.help("Rounds of each cell. [default: 5; 3 with --quick]")),
    mut_arg("cell", |arg| arg.help("Time per cell. [default: 10s; 700ms with --quick]")),
    after_help = "\
Runs SQLIO's tests of the paper on a dynamic and on a fixed disk, once with zeros as in the paper and \
once with incompressible data. Reports the share of the bytes that never reached storage. Use a \
release build.

EXAMPLES
  diskwright lab study zero-payload --quick
  diskwright lab study zero-payload --dir /mnt/nvme --size 20G"
)]
pub struct ZeroPayloadArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Size of each disk. [default: 20G as in the paper; 1G with --quick]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
}

pub fn run(context: &mut Context, args: &ZeroPayloadArgs) -> Outcome {
    let options = ZeroPayloadOptions { study: args.experiment.study(&context.global), size_bytes: args.size };
    let mut steps = context.steps();
    let report = zero_payload::run(&options, &mut steps);
    drop(steps);
    experiment::conclude(context, report)
}
