//! `diskwright lab`: measuring disks.

pub mod agent;
mod agents;
mod compare;
mod fleet;
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
    /// Measure targets with a workload: IOPS, MB/s, latency, CPU time per request.
    Run(Box<run::RunArgs>),
    /// Show saved results as text or as a page with plots, or export CSV, Markdown, JSON.
    Report(report::ReportArgs),
    /// Measure a workload over a range of loads, and find the knee.
    Sweep(Box<sweep::SweepArgs>),
    /// Compare saved results or targets: which is faster, by how much, and is it significant.
    Compare(Box<compare::CompareArgs>),
    /// Make load on this machine for the controller of a fleet.
    Agent(agent::AgentArgs),
    /// Measure with one load from many machines.
    Fleet(Box<fleet::FleetArgs>),
    /// Run an experiment of a published paper, from preparation to report.
    Study(study::StudyArgs),
    /// List the built-in profiles, or print one.
    Profiles(profiles::ProfilesArgs),
    /// Measure the load generator itself, compared to fio.
    Selftest(selftest::SelftestArgs),
}

/// Arguments of the hidden command `measuring-child`.
#[derive(Debug, Args)]
pub struct ChildArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

impl LabArgs {
    /// The exit codes of failures.
    pub fn codes(&self) -> Codes {
        match self.command {
            LabCommand::Compare(_) => Codes::COMPARE,
            _ => Codes::USUAL,
        }
    }
}

pub fn run(context: &mut Context, args: &LabArgs) -> Outcome {
    match &args.command {
        LabCommand::Run(args) => run::run(context, args),
        LabCommand::Report(args) => report::run(context, args),
        LabCommand::Sweep(args) => sweep::run(context, args),
        LabCommand::Compare(args) => compare::run(context, args),
        LabCommand::Agent(args) => agent::run(context, args),
        LabCommand::Fleet(args) => fleet::run(context, args),
        LabCommand::Study(args) => study::run(context, args),
        LabCommand::Profiles(args) => profiles::run(context, args),
        LabCommand::Selftest(args) => selftest::run(context, args),
    }
}

/// Runs one operation in this fresh process, for the lab's `ChildLauncher`.
pub fn measuring_child(context: &mut Context, args: &ChildArgs) -> Outcome {
    let cost = diskwright_lab::child::child_main(&args.arguments)?;
    writeln!(context.out, "{cost}")?;
    Ok(exit::OK)
}
