//! `diskwright lab selftest`: what the load generator itself costs.

use crate::{
    commands::experiment::{self, CHILD_COMMAND, ExperimentArgs},
    context::Context,
    exit::Outcome,
};
use clap::Args;
use diskwright_lab::{ChildLauncher, selftest};

/// Arguments of `lab selftest`.
#[derive(Debug, Args)]
#[command(
    mut_arg("quick", |arg| arg.help("Shorter cells and fewer rounds: a look, not a proof")),
    mut_arg("rounds", |arg| arg.help("How often each comparison is made. [default: 9; 5 with --quick]")),
    mut_arg("cell", |arg| arg.help("Seconds that a cell takes. [default: 1; 0.3 with --quick]")),
    after_help = "\
Measures the load generator before you measure with it: IOPS from the page cache and CPU time per I/O beside fio's io_uring engine, the cost of \
recording every latency, the rate against null:, and the memory of a run of eight nines. Without fio (apt-get install fio) its rows are skipped by name. \
Use a release build on a machine that does nothing else.

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

/// Measures, and prints the record.
pub fn run(context: &mut Context, args: &SelftestArgs) -> Outcome {
    let mut rows = selftest::ROWS.to_vec();
    rows.extend(args.full.then_some(selftest::AGREEMENT));
    let launcher = ChildLauncher::current_exe([CHILD_COMMAND])?;
    experiment::acceptance(context, "Self-test", &rows, &args.experiment, launcher)
}
