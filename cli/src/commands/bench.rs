//! `diskwright bench`: whether the engine keeps its promises on this machine, against its peers,
//! side by side.

use crate::{
    commands::experiment::ExperimentArgs,
    context::Context,
    describe::printable,
    exit::{self, Failure},
};
use clap::{
    Args,
    builder::{PossibleValue, PossibleValuesParser, TypedValueParser},
};
use diskwright_lab::{
    bench::{self, BenchOptions, BenchReport, Outcome, Row},
    child::ChildLauncher,
    output::Output,
};
use std::io::Write;

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[command(
    mut_arg("quick", |arg| arg.help("Smaller disks and shorter cells: a look, not a proof")),
    mut_arg("rounds", |arg| arg.help("How often each comparison is made. [default: each row's own]")),
    mut_arg("cell", |arg| arg.help(
        "Seconds that a cell takes, where a row has such. [default: each row's own: 0.25 to 3; 0.1 to 1 with --quick]"
    )),
    after_help = "\
Every promise is a row; without a ROW all are measured. A row whose peer (qemu-img, qemu-io, qemu-nbd, nbdkit, fio, mkfs.xfs and others) is not there is skipped by name, \
and never counted as kept. Use a release build on a machine that does nothing else.

EXIT CODES  0 no promise was broken, 1 one was

EXAMPLES
  diskwright bench --quick
  diskwright bench workloads page-cache --dir /mnt/nvme
  diskwright bench nbd-io nbd-vhd attach --quick
  diskwright bench convert --rounds 7 --output convert.json"
)]
pub struct BenchArgs {
    /// Which promises to measure. [default: all]
    #[arg(value_name = "ROW", value_parser = rows())]
    rows: Vec<Row>,
    #[command(flatten)]
    experiment: ExperimentArgs,
}

fn rows() -> impl TypedValueParser<Value = Row> {
    let names = Row::ALL.map(|row| PossibleValue::new(row.name()).help(row.title()));
    PossibleValuesParser::new(names).try_map(|name| Row::from_name(&name).ok_or("there is no such row"))
}

/// Measures, prints the table.
pub fn run(context: &mut Context, args: &BenchArgs) -> exit::Outcome {
    let options = BenchOptions {
        quick: args.experiment.quick,
        dir: args.experiment.dir.clone(),
        rounds: args.experiment.rounds,
        cell: args.experiment.cell,
        engine: context.global.engine(),
        launcher: Some(ChildLauncher::current_exe([super::experiment::CHILD_COMMAND])?),
        keep: args.experiment.keep,
    };
    let output = args.experiment.place()?;
    let mut steps = context.steps();
    let report = bench::run(&args.rows, &options, &mut steps);
    drop(steps);
    present(context, report, output.as_ref())
}

/// Saves and prints what was found, also when it was stopped.
pub fn present(
    context: &mut Context,
    report: diskwright_lab::Result<BenchReport>,
    output: Option<&Output>,
) -> exit::Outcome {
    let mut report = match report {
        // A signal from the keyboard reaches the children too; their failure is not the reason
        // then.
        Err(_) if context.signals.came() => return Err(Failure::Stopped),
        report => report?,
    };
    if context.signals.came() {
        // The row under way may have failed only because its peer got the signal as well.
        report.stopped = true;
        if report.rows.last().is_some_and(|row| row.outcome == Outcome::Fail) {
            report.rows.pop();
        }
        if report.rows.is_empty() {
            return Err(Failure::Stopped);
        }
    }
    // What was measured is shown though it cannot be saved.
    let saved = output.map(|output| output.save(&report).map(|()| output.path())).transpose();
    if context.global.json {
        context.print_result(&report)?;
    } else {
        context.print_chapter(&report, false)?;
        if let Ok(Some(path)) = saved {
            writeln!(context.out, "\nsaved to {}", printable(&crate::json::path(path)))?;
        }
    }
    saved?;
    if report.stopped {
        return Err(Failure::Stopped);
    }
    Ok(if report.passed() { exit::OK } else { exit::FAILED })
}
