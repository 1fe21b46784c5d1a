//! Options for targets and their preparation, shared by all measuring commands.

use super::words;
use crate::{context::Context, exit::Outcome};
use clap::Args;
use diskwright_lab::{
    open::{self, OpenHow},
    prepare::{self, PrepareOptions, Prepared},
};
use diskwright_load::{Job, OpenTarget, job::Bytes};

/// Options for preparing targets.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Targets")]
pub struct TargetArgs {
    /// Create targets that do not exist: a raw file of this size, or a dynamic disk if the name
    /// ends in .vhd or .vhdx. The lab fills them, and later runs may write them.
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
}

/// Flushes and closes the targets, and shows the progress.
///
/// # Errors
/// The first failure. All targets are closed in any case.
pub fn close(context: &Context, targets: &[OpenTarget]) -> diskwright_lab::Result<()> {
    let mut steps = context.steps();
    open::close(targets, &mut steps)
}
