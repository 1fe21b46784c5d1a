//! Shared code of the commands that prepare disks, measure and clean up: the studies, `lab
//! selftest`, and the program `diskwright-bench`.
//!
//! All have the same arguments with different defaults. A command states its defaults with
//! `#[command(mut_arg("rounds", |arg| arg.help("...")))]`. [`conclude`] prints and saves the result
//! of a study; [`acceptance`] runs an acceptance run, then prints and saves its record.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    options::{self, GlobalOptions},
};
use clap::Args;
use diskwright_lab::{
    ChildLauncher,
    acceptance::{self, AcceptanceOptions, Row},
    cells::Cells,
    output::{Kind, Output},
    report::ToChapter,
    study::{StudyOptions, StudyReport},
};
use schemars::JsonSchema;
use serde::Serialize;
use std::{io::Write, path::PathBuf, time::Duration};

/// Name of the hidden command that measures in a fresh process.
pub const CHILD_COMMAND: &str = "measuring-child";

/// Arguments of an experiment.
#[derive(Debug, Clone, Args)]
pub struct ExperimentArgs {
    /// End within two minutes: smaller disks, short cells.
    #[arg(long)]
    pub quick: bool,
    /// Folder for the scratch files, on the disk to be measured. [default: the current folder]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Save the result to this file.
    #[arg(long, short, value_name = "FILE.json")]
    pub output: Option<PathBuf>,
    /// Rounds of each cell.
    #[arg(long, value_name = "N", value_parser = options::at_least_one)]
    pub rounds: Option<usize>,
    /// Time per cell.
    #[arg(long, value_name = "TIME", value_parser = options::time)]
    pub cell: Option<Duration>,
    /// Keep the scratch folder.
    #[arg(long)]
    pub keep: bool,
}

impl ExperimentArgs {
    /// The arguments as options of a study.
    pub fn study(&self, global: &GlobalOptions) -> StudyOptions {
        StudyOptions {
            quick: self.quick,
            dir: self.dir.clone(),
            engine: global.engine(),
            rounds: self.rounds,
            cell: self.cell,
            output: self.output.clone(),
            keep: self.keep,
        }
    }
}

/// Prints the result of a study, also if the study failed or was stopped, or the result cannot be
/// saved.
pub fn conclude<T: Serialize + JsonSchema + ToChapter + Cells>(
    context: &mut Context,
    report: diskwright_lab::Result<StudyReport<T>>,
) -> Outcome {
    let report = match report {
        // Ctrl-C also ends the child processes; their failure is not the reason.
        Err(_) if context.signals.came() => return Err(Failure::Stopped),
        report => report?,
    };
    if context.global.json {
        context.print_measured(&report.result)?;
    } else {
        context.print_chapter(&report.result, false)?;
        if let Ok(path) = &report.saved {
            writeln!(context.out, "\nsaved to {}", printable(&crate::json::path(path)))?;
        }
    }
    report.saved?;
    match report.failed {
        Some(_) if context.signals.came() => return Err(Failure::Stopped),
        Some(error) => return Err(error.into()),
        None => {}
    }
    if report.stopped { Err(Failure::Stopped) } else { Ok(exit::OK) }
}

/// Runs the rows of an acceptance run, then prints and saves the record, also if the run was
/// stopped. `title` names the run in its report.
///
/// # Errors
/// If the record cannot be saved or printed; [`Failure::Stopped`].
pub fn acceptance(
    context: &mut Context,
    title: &str,
    rows: &[Row],
    args: &ExperimentArgs,
    launcher: ChildLauncher,
) -> Outcome {
    let options = AcceptanceOptions {
        quick: args.quick,
        dir: args.dir.clone(),
        rounds: args.rounds,
        cell: args.cell,
        engine: context.global.engine(),
        launcher: Some(launcher),
        keep: args.keep,
    };
    // Fails before anything is measured.
    let output = args.output.as_deref().map(|path| Output::check(path, Kind::Result)).transpose()?;
    let mut steps = context.steps();
    let record = acceptance::run(title, rows, &options, &mut steps);
    drop(steps);
    let mut record = match record {
        // Ctrl-C also ends the child processes; their failure is not the reason.
        Err(_) if context.signals.came() => return Err(Failure::Stopped),
        record => record?,
    };
    if context.signals.came() {
        record.stopped_by_signal();
        if record.rows.is_empty() {
            return Err(Failure::Stopped);
        }
    }
    // The record is printed also if it cannot be saved.
    let saved = output.map(|output| output.save(&record).map(|()| output.path().to_owned())).transpose();
    if context.global.json {
        context.print_result(&record.with_summary())?;
    } else {
        context.print_chapter(&record, false)?;
        if let Ok(Some(path)) = &saved {
            writeln!(context.out, "\nsaved to {}", printable(&crate::json::path(path)))?;
        }
    }
    saved?;
    if record.stopped {
        return Err(Failure::Stopped);
    }
    Ok(if record.passed() { exit::OK } else { exit::FAILED })
}
