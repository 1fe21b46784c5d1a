//! `diskwright lab`: the laboratory.

mod compare;
pub mod profiles;
pub mod report;
mod run;
mod selftest;
mod study;
mod sweep;
pub mod targets;
mod words;
pub mod workload;

use crate::{
    context::Context,
    exit::{self, Codes, Outcome},
};
use clap::{Args, Subcommand};
use std::{ffi::OsString, io::Write};

/// Arguments of `lab`.
#[derive(Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Debug, Subcommand)]
enum LabCommand {
    /// Measure targets by a workload: IOPS, MB/s, latency, CPU for each request.
    Run(Box<run::RunArgs>),
    /// Saved results as a page with plots, or as CSV, Markdown, JSON.
    Report(report::ReportArgs),
    /// Measure a workload over a range of loads, and mark the points that matter.
    Sweep(Box<sweep::SweepArgs>),
    /// Tell which of several results, or of several targets, is faster, by how much, and how sure
    /// that is.
    Compare(Box<compare::CompareArgs>),
    /// One of the papers' experiments, from preparation to report.
    Study(study::StudyArgs),
    /// List the built-in profiles, or print one.
    Profiles(profiles::ProfilesArgs),
    /// What the generator itself costs, beside fio.
    Selftest(selftest::SelftestArgs),
}

/// Arguments of the hidden command.
#[derive(Debug, Args)]
pub struct ChildArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

impl LabArgs {
    /// With what the command ends that has failed.
    pub fn codes(&self) -> Codes {
        match self.command {
            LabCommand::Compare(_) => Codes::COMPARE,
            _ => Codes::USUAL,
        }
    }
}

/// Runs what was asked for.
pub fn run(context: &mut Context, args: &LabArgs) -> Outcome {
    match &args.command {
        LabCommand::Run(args) => run::run(context, args),
        LabCommand::Report(args) => report::run(context, args),
        LabCommand::Sweep(args) => sweep::run(context, args),
        LabCommand::Compare(args) => compare::run(context, args),
        LabCommand::Study(args) => study::run(context, args),
        LabCommand::Profiles(args) => profiles::run(context, args),
        LabCommand::Selftest(args) => selftest::run(context, args),
    }
}

/// The other side of the lab's `ChildLauncher`.
pub fn measuring_child(context: &mut Context, args: &ChildArgs) -> Outcome {
    let cost = diskwright_lab::child::child_main(&args.arguments)?;
    writeln!(context.out, "{cost}")?;
    Ok(exit::OK)
}
