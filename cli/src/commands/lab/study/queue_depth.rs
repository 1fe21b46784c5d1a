//! `diskwright lab study queue-depth`.

use crate::{
    commands::{
        experiment::{self, ExperimentArgs},
        lab::{targets::TargetArgs, words},
    },
    context::Context,
    exit::{self, Outcome},
    sizes,
};
use clap::Args;
use diskwright_lab::{
    open::OpenHow,
    prepare::PrepareOptions,
    study::queue_depth::{self, QueueDepthOptions},
    sweep::ArrayOptions,
};
use diskwright_load::{
    job::{Caching, Span},
    record::End,
};
use diskwright_store::CacheMode;

/// Arguments of `lab study queue-depth`.
#[derive(Debug, Args)]
#[command(
    mut_arg("quick", |arg| arg.help("End within two minutes: less data, fewer depths, short cells.")),
    mut_arg("output", |arg| arg.help(
        "Where to save the result; an unfinished study that is there is gone on with. [default: diskwright-queue-depth-TIME.json in the current folder]"
    )),
    mut_arg("rounds", |arg| arg.help("How often each cell is measured. [default: 5; 3 with --quick]")),
    mut_arg("cell", |arg| arg.help(
        "Seconds that a cell takes, a third of them to warm up. [default: 180, in five rounds the paper's 15 minutes; with --quick what the time allows]"
    )),
    after_help = "\
Goes through the whole procedure of the Storage Spaces paper: pre-tests (steady state; 1, 2 and 4 files), 1 to 24 outstanding I/Os for each of 8 \
threads, the splits of the depth that was found over threads, sequential reads and writes of 512K. Tells how much load is enough for each, with a 95 % \
interval or the reason why it is undetermined, what that asks of each device of an array (--copies, --devices), and the paper's figures beside. \
Requests go past the page cache and writes are durable when they complete, as with the paper's -h. The long form takes a day; what was \
measured is saved as it goes, and the same command with the same --output goes on with it.

EXIT CODES  0 done, 1 a request failed or the study could not be made, 130 stopped (what was measured is saved)

EXAMPLES
  diskwright lab study queue-depth --quick
  diskwright lab study queue-depth --dir /mnt/array --copies 2 --devices 8 --output array.json
  diskwright lab study queue-depth --target /dev/vdb --destroy-data --fill --max-p99 2ms
  diskwright lab study queue-depth --quick --cell 2 --size 8G"
)]
pub struct QueueDepthArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Bytes under test. [default: 64G, the paper's; 2G with --quick; all of a --target]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    /// Threads for random I/O. [default: 8, the paper's]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Requests in flight that threads x outstanding are to have. [default: what the depths show]
    #[arg(long, value_name = "N")]
    target_depth: Option<u32>,
    /// The 99th percentile that is still bearable: 2ms.
    #[arg(long, value_name = "TIME", value_parser = words::span)]
    max_p99: Option<Span>,
    /// Copies of the data that the array below keeps.
    #[arg(long, value_name = "N", requires = "devices")]
    copies: Option<u32>,
    /// Devices of the array below.
    #[arg(long, value_name = "N")]
    devices: Option<u32>,
    /// Writes need not be durable when they complete.
    #[arg(long)]
    write_back: bool,
    /// Measure this instead of files of its own (may be repeated: pre-test 2 then takes 1, 2 and 4
    /// of them).
    #[arg(long, value_name = "TARGET")]
    target: Vec<String>,
    #[command(flatten)]
    prepare: TargetArgs,
}

/// Runs the study, prints its tables.
pub fn run(context: &mut Context, args: &QueueDepthArgs) -> Outcome {
    let through_cache = context.global.cache.is_some_and(|cache| cache.mode() == CacheMode::PageCache);
    let cache = match (through_cache, args.write_back) {
        (false, false) => Caching::DirectWriteThrough,
        (false, true) => Caching::Direct,
        (true, false) => Caching::WriteThrough,
        (true, true) => Caching::Cached,
    };
    let options = QueueDepthOptions {
        study: args.experiment.study(&context.global),
        size_bytes: args.size,
        threads: args.threads,
        target_depth: args.target_depth,
        array: args.devices.map(|devices| ArrayOptions { copies: args.copies.unwrap_or(1), devices }),
        max_p99: args.max_p99,
        cache: Some(cache),
        targets: args.target.clone(),
        prepare: PrepareOptions {
            create_bytes: args.prepare.create_size.map(|size| size.0),
            fill: args.prepare.fill,
            destroy_data: args.prepare.destroy_data,
            open: OpenHow { writable: false, cache, disk: context.global.open_options(false) },
        },
    };
    let mut steps = context.steps();
    let report = queue_depth::run(&options, &mut steps);
    drop(steps);
    let has_failed = report.as_ref().is_ok_and(|report| matches!(report.result.head.end, End::Failed { .. }));
    let code = experiment::conclude(context, report)?;
    Ok(if has_failed { exit::FAILED } else { code })
}
