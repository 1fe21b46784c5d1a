//! Which targets, and what may be done to them before they are measured: shared by every command
//! that measures.

use super::words;
use crate::{context::Context, exit::Outcome};
use clap::Args;
use diskwright_lab::{
    open::{self, OpenHow},
    prepare::{self, PrepareOptions, Prepared},
};
use diskwright_load::{Job, OpenTarget, job::Bytes};

/// Arguments that say how targets are prepared.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Targets")]
pub struct TargetArgs {
    /// Make targets that are not there: a file of this size, or a dynamic disk where the name ends
    /// in .vhd or .vhdx. They are filled, and the lab's own from then on.
    #[arg(long, value_name = "SIZE", value_parser = words::size)]
    pub create_size: Option<Bytes>,
    /// Fill the working set first, with progress, and prove that all of it has space.
    #[arg(long)]
    pub fill: bool,
    /// Overwrite whatever data the targets hold.
    #[arg(long)]
    pub destroy_data: bool,
}

impl TargetArgs {
    /// Makes, guards, opens, fills and looks at the targets, and shows how far that is.
    ///
    /// # Errors
    /// Whatever the lab says of them.
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

/// Makes durable what was written to the targets, closes them, and shows which that is.
///
/// # Errors
/// The first failure; the others are closed all the same.
pub fn close(context: &Context, targets: &[OpenTarget]) -> diskwright_lab::Result<()> {
    let mut steps = context.steps();
    open::close(targets, &mut steps)
}
