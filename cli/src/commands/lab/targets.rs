//! Options for targets and their preparation, shared by all measuring commands.

use super::words;
use crate::{context::Context, exit::Outcome, live::LiveDisplay};
use clap::Args;
use diskwright_lab::{
    open::{self, OpenHow},
    prepare::{self, PrepareOptions, Prepared},
};
use diskwright_load::{
    Job, OpenTarget, Run,
    job::Bytes,
    run::{self, RunOptions},
    warning::Warning,
};

/// Options for preparing targets.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Targets")]
pub struct TargetArgs {
    /// Create targets that do not exist, with this size: a dynamic disk if the name ends in .vhd,
    /// .vhdx, .qcow2, .vmdk or .vdi, else a raw file. The lab fills them, and later runs may write
    /// them.
    #[arg(long, value_name = "SIZE", value_parser = words::size)]
    pub create_size: Option<Bytes>,
    /// Fill the working set first, and check that all of it is allocated.
    #[arg(long)]
    pub fill: bool,
    /// Allow data on the targets to be overwritten.
    #[arg(long)]
    pub destroy_data: bool,
}

impl TargetArgs {
    /// Creates, checks, opens, fills and inspects the targets, and shows the progress.
    ///
    /// # Errors
    /// Errors of the lab.
    pub fn prepare(&self, context: &Context, job: &Job, targets: &[String]) -> Outcome<Prepared> {
        let options = PrepareOptions {
            create_bytes: self.create_size.map(|size| size.0),
            fill: self.fill,
            destroy_data: self.destroy_data,
            open: OpenHow { writable: false, cache: job.cache, disk: context.global.open_options(false) },
        };
        let mut steps = context.steps();
        Ok(prepare::prepare(job, targets, &options, &mut steps)?)
    }

    /// Prepares the targets, runs the job on them with a live display, and closes them. The run has
    /// the warnings of the preparation. If a target cannot be closed, the run counts as failed.
    ///
    /// # Errors
    /// Errors of the preparation and of the run.
    pub fn measure(&self, context: &Context, job: &Job, targets: &[String], options: &RunOptions) -> Outcome<Run> {
        let prepared = self.prepare(context, job, targets)?;
        let live = LiveDisplay::new(context.global.quiet, context.signals.patient());
        let outcome = run::run(job, &prepared.targets, options, &live);
        drop(live);
        let closed = close(context, &prepared.targets);
        let mut run = outcome?;
        if let Err(error) = closed {
            run.head.end = run.head.end.failing(error.to_string(), 1);
        }
        run.head.warnings.splice(0..0, prepared.warnings);
        Warning::sort(&mut run.head.warnings);
        Ok(run)
    }
}

/// Flushes and closes the targets, and shows the progress.
///
/// # Errors
/// The first failure. All targets are closed in any case.
pub fn close(context: &Context, targets: &[OpenTarget]) -> diskwright_lab::Result<()> {
    let mut steps = context.steps();
    open::close(targets, &mut steps)
}
