//! `diskwright lab selftest`: what the generator itself costs.

use crate::{
    commands::{
        self,
        experiment::{CHILD_COMMAND, ExperimentArgs},
    },
    context::Context,
    exit::Outcome,
};
use clap::Args;
use diskwright_lab::{
    ChildLauncher,
    bench::{self, BenchOptions, Row},
};

/// Arguments of `lab selftest`.
#[derive(Debug, Args)]
#[command(
    mut_arg("quick", |arg| arg.help("Shorter cells and fewer rounds: a look, not a proof")),
    mut_arg("rounds", |arg| arg.help("How often each comparison is made. [default: 9; 5 with --quick]")),
    mut_arg("cell", |arg| arg.help("Seconds that a cell takes. [default: 1; 0.3 with --quick]")),
    after_help = "\
Measures the instrument before you measure with it: IOPS from the page cache and CPU time per I/O beside fio's io_uring engine, what it costs to \
record every latency, how fast the generator is against nothing, and what a run of eight nines keeps in memory. Without fio (apt-get install fio) its rows are skipped by name. \
Use a release build on a machine that does nothing else. The same rows are part of `diskwright bench`.

EXIT CODES  0 no promise was broken, 1 one was

EXAMPLES
  diskwright lab selftest --quick
  diskwright lab selftest --full --dir /mnt/nvme --output selftest.json"
)]
pub struct SelftestArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Compare ten workloads with fio as well, which takes some minutes.
    #[arg(long)]
    full: bool,
}

/// Measures, prints the table.
pub fn run(context: &mut Context, args: &SelftestArgs) -> Outcome {
    let mut rows = Row::SELFTEST.to_vec();
    if args.full {
        rows.push(Row::Agreement);
    }
    let options = BenchOptions {
        quick: args.experiment.quick,
        dir: args.experiment.dir.clone(),
        rounds: args.experiment.rounds,
        cell: args.experiment.cell,
        engine: context.global.engine(),
        keep: args.experiment.keep,
        launcher: Some(ChildLauncher::current_exe([CHILD_COMMAND])?),
    };
    let output = args.experiment.place()?;
    let mut steps = context.steps();
    let report = bench::run(&rows, &options, &mut steps);
    drop(steps);
    commands::bench::present(context, report, output.as_ref())
}
