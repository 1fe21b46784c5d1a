//! `diskwright lab selftest`: what the generator itself costs.

use crate::{args as shared, commands, context::Context, exit::Outcome};
use clap::Args;
use diskwright_lab::bench::{self, BenchOptions, Row};
use std::{path::PathBuf, time::Duration};

/// Arguments of `lab selftest`.
#[derive(Debug, Args)]
#[command(after_help = "\
Measures the instrument before you measure with it: IOPS from the page cache and CPU time per I/O beside fio's io_uring engine, what it costs to \
record every latency, and how fast the generator is against nothing. Without fio (apt-get install fio) its rows are skipped by name. \
Use a release build on a machine that does nothing else. The same rows are part of `diskwright bench`.

EXIT CODES  0 no promise was broken, 1 one was

EXAMPLES
  diskwright lab selftest --quick
  diskwright lab selftest --full --dir /mnt/nvme --output selftest.json")]
pub struct SelftestArgs {
    /// Shorter cells and fewer rounds: a look, not a proof.
    #[arg(long)]
    quick: bool,
    /// Compare ten workloads with fio as well, which takes some minutes.
    #[arg(long)]
    full: bool,
    /// Where to make the scratch folder. [default: the current folder]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Save the result here too.
    #[arg(long, short, value_name = "FILE.json")]
    output: Option<PathBuf>,
    /// How often each comparison is made. [default: 9; 5 with --quick]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Seconds that a cell takes. [default: 1; 0.3 with --quick]
    #[arg(long, value_name = "SECONDS", value_parser = shared::seconds)]
    cell: Option<Duration>,
}

/// Measures, prints the table.
pub fn run(context: &mut Context, args: &SelftestArgs) -> Outcome {
    let mut rows = Row::SELFTEST.to_vec();
    if args.full {
        rows.push(Row::Agreement);
    }
    let options = BenchOptions {
        quick: args.quick,
        dir: args.dir.clone(),
        rounds: args.rounds,
        cell: args.cell,
        engine: context.global.engine(),
        ..BenchOptions::default()
    };
    let mut steps = context.steps();
    let report = bench::run(&rows, &options, &mut steps);
    drop(steps);
    commands::bench::present(context, report, args.output.as_deref())
}
