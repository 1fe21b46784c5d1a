//! `diskwright lab study queue-depth`.

use crate::{
    commands::{
        experiment::{self, ExperimentArgs},
        lab::{agents::AgentsArgs, targets::TargetArgs, words},
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
    mut_arg("agent", |arg| arg
        .help("Measure on this agent, by the address that it prints (may be repeated). A name may stand before it.")
        .conflicts_with_all(["dir", "keep", "create_size", "destroy_data"])),
    mut_arg("lost_after", |arg| arg.requires("agent")),
    mut_arg("identity", |arg| arg.requires("agent")),
    mut_arg("quick", |arg| arg.help("End within two minutes: less data, fewer depths, short cells.")),
    mut_arg("output", |arg| arg.help(
        "File for the result. If it is an unfinished study, the study is resumed. [default: diskwright-queue-depth-TIME.json in the current folder]"
    )),
    mut_arg("rounds", |arg| arg.help("Rounds of each cell. [default: 5; 3 with --quick]")),
    mut_arg("cell", |arg| arg.help(
        "Time per cell, a third of it warm-up. [default: 180s, in five rounds the paper's 15 minutes; with --quick computed from the time budget]"
    )),
    after_help = "\
Runs the procedure of the Storage Spaces paper: pre-tests (steady state; 1, 2 and 4 files), 1 to 24 \
outstanding requests for each of 8 threads, combinations of threads and outstanding requests for the \
depth that was found, sequential reads and writes of 512K. Reports the queue depth that each load \
needs, with a 95 % confidence interval or the reason why it is undetermined, the load on each device \
of an array (--copies, --devices), and the paper's figures. Direct I/O with durable writes is used, \
like the paper's -h. The full study takes a day. It saves its result regularly, and the same command \
with the same --output resumes it.

With --agent it measures on several virtual machines at the same time, one target on each. Start \
`lab agent` on them. Their own command lines say what may be created and overwritten; --target is the \
name that they gave the target, and is not needed if each allows only one. --threads and --size are \
those of each agent, --target-depth is the total of all. Pre-test 2 then shows how many agents are \
enough. An array (--copies, --devices) is the one below all agents. The same command resumes the study \
with the same agents.

EXIT CODES  0 done; 1 a request failed, an agent was lost, or the study could not be made; 130 \
stopped (the figures so far are saved)

EXAMPLES
  diskwright lab study queue-depth --quick
  diskwright lab study queue-depth --dir /mnt/array --copies 2 --devices 8 \\
      --output array.json
  diskwright lab study queue-depth --target /dev/vdb --destroy-data --fill \\
      --max-p99 2ms
  diskwright lab study queue-depth --quick --cell 2 --size 8G
  diskwright lab study queue-depth --agent vm1=10.0.0.1:7407#3f2a.../91bc... \\
      --agent vm2=10.0.0.2:7407#77e0.../5d21... --target data --output vms.json"
)]
pub struct QueueDepthArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Bytes under test. [default: 64G as in the paper; 2G with --quick; all of a --target or of
    /// the target of an agent]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    /// Threads for random I/O. [default: 8 as in the paper]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Total requests in flight for the combinations of threads and depth. [default: the result of
    /// test 1]
    #[arg(long, value_name = "N")]
    target_depth: Option<u32>,
    /// Largest acceptable 99th percentile, for example 2ms.
    #[arg(long, value_name = "TIME", value_parser = words::span)]
    max_p99: Option<Span>,
    /// Copies of the data in the array below.
    #[arg(long, value_name = "N", requires = "devices")]
    copies: Option<u32>,
    /// Devices of the array below.
    #[arg(long, value_name = "N")]
    devices: Option<u32>,
    /// Do not make writes durable when they complete.
    #[arg(long)]
    write_back: bool,
    /// Target to measure instead of new files (may be repeated: pre-test 2 needs 2 or 4). With
    /// --agent: name of the target of the agents.
    #[arg(long, value_name = "TARGET")]
    target: Vec<String>,
    #[command(flatten)]
    prepare: TargetArgs,
    #[command(flatten)]
    agents: AgentsArgs,
}

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
        agents: args.agents.of_study(&args.target, args.prepare.fill)?,
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
