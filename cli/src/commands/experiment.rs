//! What every command takes that prepares disks, measures, and cleans up: the studies, `bench`,
//! `lab selftest`.
//!
//! The arguments are the same everywhere; what they default to is not, so a command says that in
//! its own words: `#[command(mut_arg("rounds", |arg| arg.help("...")))]`. A study's end is the same
//! everywhere too: [`conclude`].

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    options::{self, GlobalOptions},
};
use clap::Args;
use diskwright_lab::{
    cells::Cells,
    output::{Kind, Output},
    report::Told,
    study::{StudyOptions, StudyReport},
};
use serde::Serialize;
use std::{io::Write, path::PathBuf, time::Duration};

/// The name under which the program starts itself again to measure what opening a disk costs.
pub const CHILD_COMMAND: &str = "measuring-child";

/// See the module.
#[derive(Debug, Clone, Args)]
pub struct ExperimentArgs {
    /// End within two minutes: smaller disks, short cells.
    #[arg(long)]
    pub quick: bool,
    /// Where to make the scratch folder: on the disk to be measured. [default: the current folder]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Save the result here too.
    #[arg(long, short, value_name = "FILE.json")]
    pub output: Option<PathBuf>,
    /// How often each cell is measured.
    #[arg(long, value_name = "N", value_parser = options::at_least_one)]
    pub rounds: Option<usize>,
    /// Seconds that a cell takes.
    #[arg(long, value_name = "SECONDS", value_parser = options::seconds)]
    pub cell: Option<Duration>,
    /// Leave the scratch folder when done.
    #[arg(long)]
    pub keep: bool,
}

impl ExperimentArgs {
    /// Where `bench` and `lab selftest` save, if anywhere. Studies save without `--output` too, and
    /// ask for their place themselves.
    ///
    /// # Errors
    /// As [`Output::check`].
    pub fn place(&self) -> Outcome<Option<Output>> {
        Ok(self.output.as_deref().map(|path| Output::check(path, Kind::Result)).transpose()?)
    }

    /// As a study takes them.
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

/// Prints what a study found, also when it was stopped in the middle, and when it could not be
/// saved.
pub fn conclude<T: Serialize + Told + Cells>(
    context: &mut Context,
    report: diskwright_lab::Result<StudyReport<T>>,
) -> Outcome {
    let report = match report {
        // A signal from the keyboard reaches the children that a study starts as well; their
        // failure is not the reason then.
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
    if report.stopped { Err(Failure::Stopped) } else { Ok(exit::OK) }
}
