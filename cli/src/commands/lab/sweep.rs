//! `diskwright lab sweep`: measures a workload over a range of loads and finds the knee.

use super::{
    targets::{self, TargetArgs},
    words,
    workload::WorkloadArgs,
};
use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
};
use clap::Args;
use diskwright_lab::{
    output::{Kind, Output},
    sweep::{self, ArrayOptions, Axis, Knob, SweepOptions, SweepRecord},
};
use diskwright_load::{
    OpenTarget,
    job::Span,
    record::TargetRecord,
    run::{self, RunOptions, Watch},
    warning::Warning,
};
use std::{io::Write, path::PathBuf};

/// Arguments of `lab sweep`.
#[derive(Debug, Args)]
#[command(after_help = "\
Measures the workload at each value in interleaved rounds, and marks these loads: efficient (largest \
power: IOPS divided by mean latency), saturation (first at 95 % of the peak), limit (most IOPS with \
p99 within --max-p99), and the load by the Storage Spaces paper's rule. Each has a 95 % confidence \
interval, or a reason why it is undetermined.

Every finished window is saved at once. The same command resumes a stopped sweep; only --rounds (more), \
--max-p99, --copies and --devices may change.

One or two of these can vary: queue-depth, threads, block-size, read-percent, random-percent, files, \
working-set. Values: 1..24 (each), 2..24+2 (steps), 1..256*2 (doubling), 1,2,4 (list).

EXIT CODES  0 done; 1 a request failed or the sweep could not be made; 130 stopped (the figures so far \
are saved)

EXAMPLES
  diskwright lab sweep disk.vhdx --vary queue-depth=1..24
  diskwright lab sweep disk.vhdx --vary queue-depth=1..256*2 --max-p99 2ms \\
      --duration 10s --output sweep.json
  diskwright lab sweep test.dat --destroy-data -b 8K --read-percent 70 \\
      --threads 8 --vary queue-depth=1..24 --copies 2 --devices 8
  diskwright lab sweep test.dat -b 8K --vary threads=1..24 --total-depth 120
  diskwright lab sweep disk.vhdx --vary block-size=4K..1M*2 \\
      --vary queue-depth=1..32*2")]
pub struct SweepArgs {
    /// Target to measure (may be repeated).
    #[arg(required = true, value_name = "TARGET")]
    targets: Vec<String>,
    /// The varied setting and its values (may be given twice).
    #[arg(long, required = true, value_name = "SETTING=VALUES")]
    vary: Vec<Axis>,
    /// Rounds of each combination.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: u32,
    /// Requests in flight over all threads and targets. Threads or depth are computed from it;
    /// combinations that do not divide it are left out.
    #[arg(long, value_name = "N")]
    total_depth: Option<u32>,
    /// Largest acceptable 99th percentile, for example 2ms.
    #[arg(long, value_name = "TIME", value_parser = words::span)]
    max_p99: Option<Span>,
    /// Copies of the data in the array below, for figures per device.
    #[arg(long, value_name = "N", requires = "devices")]
    copies: Option<u32>,
    /// Devices of the array below.
    #[arg(long, value_name = "N")]
    devices: Option<u32>,
    #[command(flatten)]
    prepare: TargetArgs,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// File for the result. If it is an unfinished sweep, the sweep is resumed.
    #[arg(long, short, value_name = "FILE.json", default_value = "diskwright-sweep.json")]
    output: PathBuf,
    /// Label for the result: key=value (may be repeated).
    #[arg(long, value_name = "KEY=VALUE", value_parser = words::label)]
    label: Vec<(String, String)>,
}

/// Runs or resumes the sweep, then saves and prints it.
pub fn run(context: &mut Context, args: &SweepArgs) -> Outcome {
    let options = SweepOptions {
        job: args.workload.job(&context.global)?,
        targets: args.targets.clone(),
        axes: args.vary.clone(),
        rounds: args.rounds,
        total_depth: args.total_depth,
        max_p99: args.max_p99,
        array: args.devices.map(|devices| ArrayOptions { copies: args.copies.unwrap_or(1), devices }),
    };
    if args.vary.iter().any(|axis| axis.knob == Knob::Agents) {
        return Err(Failure::usage("agents are those of a fleet: use `lab fleet`, or vary files"));
    }
    // Bad options, and a file that cannot be saved or resumed, fail before a target is filled.
    let output = Output::check(&args.output, Kind::Result)?;
    let saved = if args.output.exists() { Some(sweep::read(&args.output)?) } else { None };
    let widest = sweep::plan::widest_job(&options)?;
    if let Some(saved) = &saved {
        sweep::resume(saved.clone(), options.clone(), &[])?;
    }
    let prepared = args.prepare.prepare(context, &widest, &args.targets)?;
    let records: Vec<TargetRecord> = prepared.targets.iter().map(OpenTarget::record).collect();
    let mut record = match saved {
        Some(saved) => {
            let record = sweep::resume(saved, options, &records)?;
            context.warn(&format!("resuming {}", args.output.display()));
            record
        }
        None => sweep::begin(options, records, args.label.clone())?,
    };
    for warning in prepared.warnings {
        if !record.head.warnings.contains(&warning) {
            record.head.warnings.push(warning);
        }
    }
    Warning::sort(&mut record.head.warnings);
    let swept = measure(context, &mut record, &prepared.targets, &output);
    let closed = targets::close(context, &prepared.targets);
    let has_figures = record.cells.iter().any(|cell| !cell.measured.rounds.is_empty());
    let swept = match (swept, closed) {
        // The figures so far are shown, also if a window could not be measured or saved.
        (Err(error), _) if has_figures => Err(error),
        (Ok(()), Err(error)) => {
            record.head.end = record.head.end.failing(error.to_string(), 1);
            output.save(&record).map_err(Failure::from)
        }
        (swept, _) => Ok(swept?),
    };
    if context.global.json {
        context.print_measured(&record)?;
    } else {
        context.print_chapter(&record, false)?;
        if swept.is_ok() {
            writeln!(context.out, "\nsaved to {}", printable(&crate::json::path(output.path())))?;
        }
    }
    swept?;
    Ok(exit::of_end(&record.head.end))
}

fn measure(
    context: &mut Context,
    record: &mut SweepRecord,
    targets: &[OpenTarget],
    output: &Output,
) -> Result<(), Failure> {
    let mut steps = context.steps();
    let mut measure =
        |job: &_, files: usize, watch: &dyn Watch| Ok(run::run(job, &targets[..files], &RunOptions::default(), watch)?);
    let mut keep = |record: &SweepRecord| output.save(record);
    sweep::run(record, "sweep", &mut measure, &mut keep, &mut steps).map_err(Failure::from)
}
