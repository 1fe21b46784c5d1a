//! `diskwright lab study zero-payload`.

use crate::{
    args as shared,
    context::Context,
    exit::{self, Failure, Outcome},
    sizes,
};
use clap::Args;
use diskwright_lab::study::zero_payload::{self, ZeroPayloadOptions};
use std::{io::Write, path::PathBuf, time::Duration};

/// Arguments of `lab study zero-payload`.
#[derive(Debug, Args)]
#[command(after_help = "\
Repeats SQLIO's eight tests on a dynamic and on a fixed disk, once with zeros as the paper did and once with data that cannot be compressed, \
and tells how many of the requests never reached the store. Use a release build.

EXAMPLES
  diskwright lab study zero-payload --quick
  diskwright lab study zero-payload --dir /mnt/nvme --size 20G")]
pub struct ZeroPayloadArgs {
    /// End within two minutes: smaller disks, short cells.
    #[arg(long)]
    quick: bool,
    /// Where to make the scratch folder: on the disk to be measured. [default: the current folder]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Where to save the result. [default: diskwright-zero-payload-TIME.json in the current folder]
    #[arg(long, short, value_name = "FILE.json")]
    output: Option<PathBuf>,
    /// Size of each disk. [default: 20G, the paper's; 1G with --quick]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    /// How often each cell is measured. [default: 5; 3 with --quick]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Seconds that a cell takes. [default: 10; 0.7 with --quick]
    #[arg(long, value_name = "SECONDS", value_parser = shared::seconds)]
    cell: Option<Duration>,
    /// Leave the scratch folder when done.
    #[arg(long)]
    keep: bool,
}

/// Runs the study, prints its tables.
pub fn run(context: &mut Context, args: &ZeroPayloadArgs) -> Outcome {
    let options = ZeroPayloadOptions {
        quick: args.quick,
        dir: args.dir.clone(),
        engine: context.global.engine(),
        rounds: args.rounds,
        cell: args.cell,
        size_bytes: args.size,
        output: args.output.clone(),
        keep: args.keep,
    };
    let mut steps = context.steps();
    let report = zero_payload::run(&options, &mut steps);
    drop(steps);
    if report.is_err() && context.signals.came() {
        return Err(Failure::Stopped);
    }
    let report = report?;
    if context.global.json {
        serde_json::to_writer_pretty(&mut context.out, &report.result).map_err(std::io::Error::from)?;
        writeln!(context.out)?;
    } else {
        context.out.write_all(zero_payload::render(&report.result, context.style.colour).as_bytes())?;
        writeln!(context.out, "\nsaved to {}", report.saved_to.display())?;
    }
    Ok(exit::OK)
}
