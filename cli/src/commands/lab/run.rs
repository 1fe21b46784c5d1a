//! `diskwright lab run`: runs one job on some targets.

use super::{targets::TargetArgs, words, workload::WorkloadArgs};
use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
};
use clap::Args;
use diskwright_lab::{
    LabError,
    output::{Kind, Output, PROFILE_MARK},
};
use diskwright_load::{Run, clock, record::End, run::RunOptions};
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// A longer profile is not printed, only its file is named.
const PROFILE_LINES_MAX: usize = 60;

/// Arguments of `lab run`.
#[derive(Debug, Args)]
#[command(after_help = "\
A TARGET is a virtual disk, a raw file, a block device, an export of an NBD server \
(nbd://HOST/EXPORT, nbd+unix:///EXPORT?socket=PATH), or null: (null:64G), which measures the load \
generator alone. The cache of an export is that of its server. Targets are inspected before a run: \
reads of unallocated blocks or of zeros would measure metadata, and the result then begins with a \
warning; use --fill. A target that holds data is written only with --destroy-data. A target that is \
mounted or otherwise in use is never written.

The result is saved as JSON with machine, options and versions. A profile to repeat the run is saved \
with it.

EXIT CODES  0 done; 1 a request failed, a target could not be closed, or the run could not be made; \
130 stopped (the figures so far are saved as a partial result)

EXAMPLES
  diskwright lab run disk.vhdx
  diskwright lab run test.dat --create-size 4G -b 8K --read-percent 70 \\
      --threads 4 --queue-depth 8 --duration 60s
  diskwright lab run /dev/nvme1n1 --destroy-data --fill --read-percent 0 \\
      --wait-steady 30m
  diskwright lab run disk.vhdx --profile vhd-applications/oltp-db --destroy-data
  diskwright lab run 'nbd+unix:///?socket=/tmp/disk.sock' --threads 4 \\
      --queue-depth 8
  diskwright lab run null: --duration 2s --json")]
pub struct RunArgs {
    /// Target to measure (may be repeated).
    #[arg(required = true, value_name = "TARGET")]
    targets: Vec<String>,
    #[command(flatten)]
    prepare: TargetArgs,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// File for the result; the profile has the same name with .toml. [default:
    /// diskwright-run-TIME.json in the current folder]
    #[arg(long, short, value_name = "FILE.json", conflicts_with = "no_save")]
    output: Option<PathBuf>,
    /// Do not save the result.
    #[arg(long)]
    no_save: bool,
    /// Show the figures of each thread.
    #[arg(long)]
    per_thread: bool,
    /// Continue when requests fail. The run still counts as failed.
    #[arg(long)]
    keep_going: bool,
    /// Label for the result: key=value (may be repeated).
    #[arg(long, value_name = "KEY=VALUE", value_parser = words::label)]
    label: Vec<(String, String)>,
}

/// Runs the job, then saves and prints the result.
pub fn run(context: &mut Context, args: &RunArgs) -> Outcome {
    let job = args.workload.job(&context.global)?;
    let places = if args.no_save { None } else { Some(Places::choose(args)?) };
    let options = RunOptions { keep_going: args.keep_going, labels: args.label.clone(), ..RunOptions::default() };
    let run = args.prepare.measure(context, &job, &args.targets, &options)?;
    if run.head.end == End::Stopped && has_nothing(&run) {
        context.warn_always("stopped before anything was measured: no result is saved");
        return Ok(exit::STOPPED);
    }
    // The result is shown also if it cannot be saved.
    let saved = places.as_ref().map_or(Ok(()), |places| places.save(&run));
    let shown = places.as_ref().filter(|_| saved.is_ok());
    if context.global.json {
        context.print_measured(&run)?;
    } else {
        context.print_chapter(&run, args.per_thread)?;
        print_profile(context, args, &run, shown)?;
    }
    saved?;
    Ok(exit::of_end(&run.head.end))
}

/// Whether the run ended in the warm-up of its first phase.
fn has_nothing(run: &Run) -> bool {
    run.phases.iter().flat_map(|phase| &phase.threads).all(|thread| {
        let requests = thread.reads.ios + thread.writes.ios + thread.flushes.ios;
        requests == 0 && thread.overdue == 0
    })
}

/// Output files of a run.
struct Places {
    result: Output,
    profile: Output,
}

impl Places {
    /// Checks the files before the run, so that nothing is measured that cannot be saved.
    fn choose(args: &RunArgs) -> Outcome<Self> {
        let json =
            args.output.clone().unwrap_or_else(|| format!("diskwright-run-{}.json", clock::compact_utc_now()).into());
        if json.extension().is_some_and(|extension| extension == "toml") {
            return Err(Failure::usage(format!(
                "{} has the extension of a profile; use a name that ends in .json",
                json.display()
            )));
        }
        let result = Output::check(&json, Kind::Result)?;
        // A profile that the user wrote is not replaced; it may be the profile of this run.
        let [first, second] = ["toml", "run.toml"].map(|extension| json.with_extension(extension));
        let profile = Output::check(&first, Kind::Profile).or_else(|_| Output::check(&second, Kind::Profile));
        let profile = profile.map_err(|_| LabError::BadOptions {
            what: format!("the profile cannot be saved as {} or as {}", first.display(), second.display()),
            hint: "nothing was changed; choose another name for the result (-o)".into(),
        })?;
        Ok(Self { result, profile })
    }

    fn save(&self, run: &Run) -> Outcome<()> {
        self.result.save(run)?;
        Ok(self.profile.write(&format!("{PROFILE_MARK}\n{}", run.job.to_toml()))?)
    }
}

fn print_profile(context: &mut Context, args: &RunArgs, run: &Run, saved: Option<&Places>) -> Outcome<()> {
    let text = run.job.to_toml();
    writeln!(context.out, "\nProfile to repeat the run")?;
    if text.lines().count() <= PROFILE_LINES_MAX || saved.is_none() {
        for line in text.lines() {
            writeln!(context.out, "{}", format!("  {line}").trim_end())?;
        }
    }
    if let Some(Places { result, profile }) = saved {
        let quoted = |path: &Path| shell_word(&path.to_string_lossy());
        let targets: Vec<String> = args.targets.iter().map(|target| shell_word(target)).collect();
        writeln!(context.text(), "\nsaved to {}", printable(&crate::json::path(result.path())))?;
        writeln!(
            context.out,
            "repeat with: diskwright lab run {} --profile {}",
            printable(&targets.join(" ")),
            printable(&quoted(profile.path()))
        )?;
    }
    Ok(())
}

/// The text as one word for a shell.
fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=+@,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(
            ["disk.vhdx", "null:64G", "my disk", "it's", ""].map(shell_word).join(" "),
            r"disk.vhdx null:64G 'my disk' 'it'\''s' ''"
        );
    }
}
