//! `diskwright lab compare`: compares saved results or live targets.

use super::{
    targets::{self, TargetArgs},
    workload::WorkloadArgs,
};
use crate::{
    context::Context,
    exit::{self, Failure, Outcome},
    switches::all_with_switches,
};
use clap::{Args, ValueEnum};
use diskwright_lab::{
    comparison::{self, COMPARISON_SCHEMA, Certainty, ComparisonRecord, FailIf, JudgeOptions, LiveOptions, Side},
    output::{Kind, Output},
};
use diskwright_load::{
    Job,
    figures::Metric,
    record::Head,
    run::{self, RunOptions, Watch},
    warning::Warning,
};
use diskwright_stats::inference::Design;
use std::{path::PathBuf, time::Instant};

/// Arguments of `lab compare`.
#[derive(Debug, Args)]
#[command(after_help = "\
The first RESULT is the base. Results of `lab run`, `lab sweep` and `lab study containers` can be \
compared. Several runs of the same measurement are its rounds: join their files with commas \
(old1.json,old2.json,old3.json new1.json,new2.json,new3.json). NAME:FILE,... gives them a name. If \
each side is a single run, stretches of the runs are compared, with a warning.

With --live the arguments are targets. They are measured in interleaved rounds and compared round \
by round. This finds smaller differences, because a slower machine affects both sides alike.

If no difference is significant, the confidence interval shows how large a difference may be \
missed. p values are corrected for the number of comparisons.

EXIT CODES  0 compared, and no --fail-if is true; 1 a --fail-if is true; 2 could not compare, or a \
--fail-if is undecided (standard error says why, and how many rounds are needed); 130 stopped

EXAMPLES
  diskwright lab compare old.json new.json
  diskwright lab compare old:o1.json,o2.json,o3.json,o4.json \\
      new:n1.json,n2.json,n3.json,n4.json --fail-if 'slower-than 5%'
  diskwright lab compare before.json after.json \\
      --fail-if 'p99 worse-than 10%' --fail-when possible
  diskwright lab compare --live disk.raw disk.vhdx --rounds 12 --duration 5s \\
      --queue-depth 8")]
pub struct CompareArgs {
    /// Results, the base first; targets with --live.
    #[arg(required = true, num_args = 2.., value_name = "RESULT|TARGET")]
    sides: Vec<String>,
    /// Measure targets now, in interleaved rounds.
    #[arg(long)]
    live: bool,
    /// Rounds of each target. Fewer than 8 cannot show a difference in five figures.
    #[arg(long, value_name = "N", default_value_t = 10, requires = "live")]
    rounds: usize,
    /// Compare only these figures: iops, mb, mean, p50, p99, cpu.
    #[arg(long, value_name = "FIGURE,...", value_delimiter = ',', value_parser = metric)]
    figures: Vec<Metric>,
    /// End with exit code 1 if this is true: 'slower-than 5%', 'p99 worse-than 10%' (may be
    /// repeated).
    #[arg(long, value_name = "CONDITION")]
    fail_if: Vec<FailIf>,
    /// How certain the loss of --fail-if must be.
    #[arg(long, value_enum, value_name = "CERTAINTY", default_value_t = FailWhen::Shown)]
    fail_when: FailWhen,
    #[command(flatten)]
    prepare: TargetArgs,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Save the comparison as JSON.
    #[arg(long, short, value_name = "FILE.json")]
    output: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FailWhen {
    /// The whole confidence interval is worse than the limit, and the corrected test is
    /// significant.
    Shown,
    /// The estimate is worse than the limit.
    Estimate,
    /// Some of the confidence interval is worse than the limit.
    Possible,
}

fn metric(text: &str) -> Result<Metric, String> {
    Metric::from_name(text)
        .ok_or_else(|| format!("\"{text}\" is not a figure; use one of: {}", Metric::ALL.map(Metric::name).join(", ")))
}

pub fn run(context: &mut Context, args: &CompareArgs) -> Outcome {
    let certainty = match args.fail_when {
        FailWhen::Shown => Certainty::Shown,
        FailWhen::Estimate => Certainty::Estimate,
        FailWhen::Possible => Certainty::Possible,
    };
    let options = JudgeOptions {
        metrics: args.figures.clone(),
        paired: args.live,
        fail_if: args.fail_if.iter().map(|condition| FailIf { certainty, ..condition.clone() }).collect(),
        ..JudgeOptions::default()
    };
    let output = args.output.as_deref().map(|path| Output::check(path, Kind::Result)).transpose()?;
    let (start, mut head) = (Instant::now(), Head::begin(COMPARISON_SCHEMA));
    let sides = if args.live { live(context, args)? } else { saved(&args.sides)? };
    head.took_ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let mut record = comparison::judge(head, sides, &options);
    record.unjudged = all_with_switches(&record.unjudged);
    // The comparison is shown also if it cannot be saved.
    let saved = output.map_or(Ok(()), |output| output.save(&record));
    print(context, &record)?;
    // Also with --quiet: an undecided condition must not look like one that passed.
    record.unjudged.iter().for_each(|sentence| context.warn_always(sentence));
    saved?;
    Ok(match (record.comparisons.is_empty(), record.failed.is_empty(), record.undecided) {
        (true, ..) => exit::NOT_COMPARED,
        (_, false, _) => exit::FAILED,
        // An undecided condition has not passed.
        (_, _, true) => exit::NOT_COMPARED,
        _ => exit::OK,
    })
}

fn saved(sides: &[String]) -> Outcome<Vec<Side>> {
    let mut read = Vec::with_capacity(sides.len());
    for side in sides {
        // The text before a colon is a name, unless the whole is the name of a file.
        let (name, files) = match side.split_once(':') {
            Some((name, files)) if !std::path::Path::new(side).exists() => (name, files),
            _ => ("", side.as_str()),
        };
        let files: Vec<PathBuf> = if std::path::Path::new(files).exists() {
            vec![files.into()]
        } else {
            files.split(',').map(PathBuf::from).collect()
        };
        read.push(comparison::read_side(name, &files)?);
    }
    Ok(read)
}

/// Number of compared figures without --figures: IOPS, three latencies, CPU time.
const USUAL_FIGURES: usize = 5;

/// Warns before measuring if the rounds are too few to show any difference. `figures`: number of
/// compared figures, 0 for the usual ones.
pub(super) fn warn_of_few_rounds(context: &mut Context, rounds: usize, sides: usize, figures: usize, job: &Job) {
    let figures = if figures == 0 { USUAL_FIGURES } else { figures };
    let comparisons = figures * job.phases.len() * (sides - 1);
    let fewest = Design::Paired.fewest(comparisons);
    if rounds < fewest {
        context.warn(&format!(
            "{rounds} rounds cannot show a difference with {comparisons} comparisons; use --rounds {fewest}, or fewer figures (--figures iops)"
        ));
    }
}

fn live(context: &mut Context, args: &CompareArgs) -> Outcome<Vec<Side>> {
    let job = args.workload.job(&context.global)?;
    warn_of_few_rounds(context, args.rounds, args.sides.len(), args.figures.len(), &job);
    let mut prepared = Vec::with_capacity(args.sides.len());
    for name in &args.sides {
        prepared.push(args.prepare.prepare(context, &job, std::slice::from_ref(name))?);
    }
    let sizes = prepared.iter().flat_map(|one| &one.targets).map(|target| target.device.geometry().size_bytes);
    let how = LiveOptions { rounds: args.rounds, smallest_bytes: sizes.min().unwrap_or(0) };
    let mut steps = context.steps();
    let mut measure = |index: usize, job: &_, watch: &dyn Watch| {
        Ok(run::run(job, &prepared[index].targets, &RunOptions::default(), watch)?)
    };
    let mut sides = comparison::live(&args.sides, &job, &how, &mut measure, &mut steps)?;
    drop(steps);
    for prepared in &prepared {
        targets::close(context, &prepared.targets)?;
    }
    for (side, prepared) in sides.iter_mut().zip(&prepared) {
        side.circumstances.warnings.extend(prepared.warnings.iter().cloned());
        Warning::sort(&mut side.circumstances.warnings);
    }
    Ok(sides)
}

fn print(context: &mut Context, record: &ComparisonRecord) -> Result<(), Failure> {
    if context.global.json {
        context.print_measured(record)?;
    } else {
        context.print_chapter(record, false)?;
    }
    Ok(())
}
