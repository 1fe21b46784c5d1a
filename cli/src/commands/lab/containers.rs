//! `diskwright lab study containers`: the README's first command.

use crate::{
    args as shared,
    args::CacheArg,
    context::Context,
    exit::{self, Failure, Outcome},
    sizes,
};
use clap::Args;
use diskwright_lab::{
    child::ChildLauncher,
    study::{self, ContainersOptions},
};
use std::{io::Write, path::PathBuf, time::Duration};

/// Arguments of `lab study containers`.
#[derive(Debug, Args)]
#[command(after_help = "\
Makes a raw file and fixed, dynamic and differencing disks in a scratch folder, fills them with incompressible data, proves that all read \
back the same bytes, measures them side by side, and removes them again. The table stands beside the figures of the paper \
of 2010; the result is saved as JSON with machine, kernel, options and versions. Use a release build.

EXAMPLES
  diskwright lab study containers --quick
  diskwright lab study containers --dir /mnt/nvme --size 8G
  diskwright lab study containers --queue-depth 1,32 --rounds 7 --output nvme.json")]
pub struct ContainersArgs {
    /// End within two minutes: smaller disks, short cells, one queue depth.
    #[arg(long)]
    quick: bool,
    /// Where to make the scratch folder: on the disk to be measured. [default: the current folder]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Where to save the result. [default: diskwright-containers-TIME.json in the current folder]
    #[arg(long, short, value_name = "FILE.json")]
    output: Option<PathBuf>,
    /// Size of each disk. [default: 4G; 512M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    /// How often each cell is measured. [default: 5; 3 with --quick]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Seconds that a cell takes. [default: 2; with --quick what the time allows]
    #[arg(long, value_name = "SECONDS", value_parser = shared::seconds)]
    cell: Option<Duration>,
    /// Requests in flight, separated by commas. [default: 1,2,4,...,256; 32 with --quick]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    queue_depth: Option<Vec<u32>>,
    /// Children in the chain-length experiment, ascending. [default: 1,2,4,...,64,256,1023]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    chain_length: Option<Vec<u32>>,
    /// Leave the scratch folder when done.
    #[arg(long)]
    keep: bool,
}

/// Runs the study, prints its tables.
pub fn run(context: &mut Context, args: &ContainersArgs) -> Outcome {
    let options = ContainersOptions {
        quick: args.quick,
        dir: args.dir.clone(),
        engine: context.global.engine(),
        cache: context.global.cache.map(CacheArg::mode),
        rounds: args.rounds,
        cell: args.cell,
        size_bytes: args.size,
        queue_depths: args.queue_depth.clone(),
        chain_lengths: args.chain_length.clone(),
        output: args.output.clone(),
        keep: args.keep,
        launcher: Some(ChildLauncher::current_exe([super::CHILD_COMMAND])?),
    };
    let mut steps = context.steps();
    let report = study::run(&options, &mut steps);
    drop(steps);
    // A signal from the keyboard reaches the children that the study starts as well; their failure is not the reason then.
    if report.is_err() && context.signals.came() {
        return Err(Failure::Stopped);
    }
    let report = report?;
    if context.global.json {
        serde_json::to_writer_pretty(&mut context.out, &report.result).map_err(std::io::Error::from)?;
        writeln!(context.out)?;
    } else {
        context.out.write_all(study::render(&report.result, context.style.colour).as_bytes())?;
        writeln!(context.out, "\nsaved to {}", report.saved_to.display())?;
    }
    Ok(exit::OK)
}
