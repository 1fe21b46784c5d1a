//! `diskwright lab selftest`: measures the load generator itself.

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
    mut_arg("quick", |arg| arg.help("Shorter cells and fewer rounds; less certain")),
    mut_arg("rounds", |arg| arg.help("Rounds of each comparison. [default: 9; 5 with --quick]")),
    mut_arg("cell", |arg| arg.help("Time per cell. [default: 1s; 300ms with --quick]")),
    after_help = "\
Measures the load generator: IOPS from the page cache and CPU time per I/O compared to fio's io_uring \
engine, the cost of recording every latency, the rate on null:, and the memory of a run with eight \
nines. Without fio (apt-get install fio) its rows are skipped. Use a release build on an idle \
machine.

EXIT CODES  0 no promise was broken; 1 a promise was broken

EXAMPLES
  diskwright lab selftest --quick
  diskwright lab selftest --full --dir /mnt/nvme --output selftest.json"
)]
pub struct SelftestArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Also compare ten workloads with fio, which takes some minutes.
    #[arg(long)]
    full: bool,
}

pub fn run(context: &mut Context, args: &SelftestArgs) -> Outcome {
    let mut rows = selftest::ROWS.to_vec();
    rows.extend(args.full.then_some(selftest::AGREEMENT));
    let launcher = ChildLauncher::current_exe([CHILD_COMMAND])?;
    experiment::acceptance(context, "Self-test", &rows, &args.experiment, launcher)
}
