//! `diskwright lab fleet`: one load from many machines.
//!
//! ```text
//!   plan, --agent, workload ─▶ Fleet: connect, compare clocks, prepare
//!        └─ without --vary ─▶ one run ─▶ saved as the result of a run
//!        └─ with --compare ─▶ targets compared in interleaved rounds ─▶ saved
//!        └─ with --vary    ─▶ a sweep, each window by the fleet ─▶ saved after each window
//! ```
//!
//! The result of a fleet is that of a run or a sweep, so all reports, comparisons and exports read
//! it.

use super::{agents::AgentsArgs, compare::warn_of_few_rounds, words, workload::WorkloadArgs};
use crate::{
    context::{Context, print_message},
    describe::printable,
    exit::{self, Failure, Outcome},
    live::FleetDisplay,
};
use clap::{Args, ValueEnum};
use diskwright_fleet::{
    address::Address,
    controller::{Entrance, Fleet, FleetLook, FleetOptions, OnLoss, Remote, Wanted, Way, new_run},
    trust::{Token, Trust},
};
use diskwright_lab::{
    LabError,
    comparison::{self, COMPARISON_SCHEMA, JudgeOptions, LiveOptions},
    document::{self, Document},
    fleet::{Agents, Group, OneLoad, Plan},
    output::{Kind, Output},
    sweep::{self, Axis, Knob, SweepOptions},
};
use diskwright_load::{
    Job, Run, clock,
    job::Span,
    record::{End, Head},
    run::Watch,
};
use std::{
    collections::BTreeMap,
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

/// Rounds of a sweep and of a comparison that are not told another number.
const SWEEP_ROUNDS: u32 = 3;
const COMPARE_ROUNDS: u32 = 10;

/// What happens when an agent is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnLossArg {
    /// The others are stopped.
    Stop,
    /// The others go on to the end of their phase.
    GoOn,
}

/// Arguments of `lab fleet`.
#[derive(Debug, Args)]
#[command(after_help = "\
Start `lab agent` on each machine, and give the address that it prints with --agent or in a plan. \
All agents open, check and fill their targets before the first one measures. All start at the same \
time, by clocks that are compared before and after. Histograms of latencies are added, so percentiles \
are those of all requests.

With --vary it is a sweep; `--vary agents=1..8` shows how many agents are enough. With --compare it \
compares targets. The same command \
resumes a stopped sweep, and a run whose controller has died.

A PLAN is TOML:
  on-loss = \"go-on\"
  [[group]]
  name = \"database\"
  agents = [\"db1=10.0.0.1:7407#...\", \"10.0.0.2:7407#.../TOKEN\"]
  targets = [\"data\"]
  profile = \"vmfleet-sql\"
  [[group]]
  name = \"backup\"
  expect = 2          # agents that connect to this controller (--listen)

EXIT CODES  0 done; 1 an agent was lost, a request failed, or the fleet could not measure; 130 stopped \
(the figures so far are saved)

EXAMPLES
  diskwright lab fleet --agent 10.0.0.1:7407#3f2a.../91bc... \\
      --agent 10.0.0.2:7407#77e0.../5d21... --threads 4 --duration 60s
  diskwright lab fleet plan.toml --output result.json
  diskwright lab fleet plan.toml --vary agents=1..8 --max-p99 2ms
  diskwright lab fleet plan.toml --compare --target raw --target vhdx
  diskwright lab fleet --fingerprint")]
pub struct FleetArgs {
    /// The plan: groups of agents with targets and loads.
    #[arg(value_name = "PLAN.toml")]
    plan: Option<PathBuf>,
    #[command(flatten)]
    agents: AgentsArgs,
    /// Number of agents that connect to this controller. A token for each is printed.
    #[arg(long, value_name = "N", default_value_t = 0)]
    expect: u32,
    /// Where agents connect. [default: a free port of 127.0.0.1]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Name of a target of the agents (may be repeated). [default: all that they allow]
    #[arg(long, value_name = "NAME")]
    target: Vec<String>,
    /// Fill the working sets first, and check that all of them are allocated.
    #[arg(long)]
    fill: bool,
    /// What happens when an agent is lost. [default: stop]
    #[arg(long, value_name = "WHAT")]
    on_loss: Option<OnLossArg>,
    /// Measure over a range of loads: a setting and its values, as in `lab sweep`; also agents.
    #[arg(long, value_name = "SETTING=VALUES")]
    vary: Vec<Axis>,
    /// Compare the targets that are named by --target, in interleaved rounds: first all agents
    /// measure the first one, then all measure the next one.
    #[arg(long, conflicts_with = "vary")]
    compare: bool,
    /// Rounds of a sweep or a comparison. [default: 3 of a sweep, 10 of a comparison]
    #[arg(long, value_name = "N")]
    rounds: Option<u32>,
    /// Largest acceptable 99th percentile of a sweep, for example 2ms.
    #[arg(long, value_name = "TIME", value_parser = words::span, requires = "vary")]
    max_p99: Option<Span>,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// File for the result. [default: diskwright-fleet-TIME.json in the current folder]
    #[arg(long, short, value_name = "FILE.json")]
    output: Option<PathBuf>,
    /// Continue when requests fail. The run still counts as failed.
    #[arg(long)]
    keep_going: bool,
    /// Label for the result: key=value (may be repeated).
    #[arg(long, value_name = "KEY=VALUE", value_parser = words::label)]
    label: Vec<(String, String)>,
    /// Print the fingerprint of this controller, for `lab agent --controller`.
    #[arg(long)]
    fingerprint: bool,
}

/// Measures with a fleet, then saves and prints the result.
pub fn run(context: &mut Context, args: &FleetArgs) -> Outcome {
    if args.fingerprint {
        writeln!(context.out, "{}", args.agents.identity()?.fingerprint)?;
        return Ok(exit::OK);
    }
    if args.rounds.is_some() && !args.compare && args.vary.is_empty() {
        return Err(Failure::usage("--rounds belongs to a sweep (--vary) or a comparison (--compare)"));
    }
    if args.compare && args.target.len() < 2 {
        return Err(Failure::usage("--compare needs two targets or more, each named by --target"));
    }
    let plan = plan(args)?;
    let wanted = plan.wanted()?;
    let jobs = jobs(context, args, &plan)?;
    let path =
        args.output.clone().unwrap_or_else(|| format!("diskwright-fleet-{}.json", clock::compact_utc_now()).into());
    let output = Output::check(&path, Kind::Result)?;
    let options = FleetOptions {
        on_loss: plan.on_loss,
        keep_going: args.keep_going,
        labels: args.label.clone(),
        ..args.agents.options(plan.lost_after)?
    };
    let entrance = entrance(context, &plan, &wanted, &options)?;
    let led = Led { agents: Agents { wanted, options, entrance, fill: plan.fill }, jobs };
    match (args.compare, args.vary.is_empty()) {
        (true, _) => a_comparison(context, args, &led, &output),
        (false, true) => one_run(context, &led, &output),
        (false, false) => a_sweep(context, args, &led, &output),
    }
}

/// The plan of the file and of the options.
fn plan(args: &FleetArgs) -> Outcome<Plan> {
    let mut plan = args.plan.as_deref().map(Plan::read).transpose()?.unwrap_or_default();
    if !args.agents.agent.is_empty() || args.expect > 0 {
        plan.groups.push(Group { expect: args.expect, ..args.agents.group(&args.target) });
    }
    match args.on_loss {
        Some(OnLossArg::Stop) => plan.on_loss = OnLoss::Stop,
        Some(OnLossArg::GoOn) => plan.on_loss = OnLoss::GoOn,
        None => {}
    }
    plan.lost_after = args.agents.lost_after.or(plan.lost_after);
    plan.listen = args.listen.clone().or(plan.listen);
    plan.fill |= args.fill;
    if plan.groups.is_empty() {
        return Err(Failure::usage("no agent is named; give a plan, or the address of each agent with --agent"));
    }
    Ok(plan)
}

/// The job of each group.
fn jobs(context: &Context, args: &FleetArgs, plan: &Plan) -> Outcome<BTreeMap<String, Job>> {
    plan.groups
        .iter()
        .map(|group| {
            let job = match group.job()? {
                Some(job) => args.workload.onto(Some(job), &context.global)?,
                None => args.workload.job(&context.global)?,
            };
            Ok((group.name.clone(), job))
        })
        .collect()
}

/// Listens for the agents that dial, and prints what to start on their machines.
fn entrance(
    context: &mut Context,
    plan: &Plan,
    wanted: &[Wanted],
    options: &FleetOptions,
) -> Outcome<Option<Arc<Entrance>>> {
    if !plan.expects() {
        return Ok(None);
    }
    let waited: Vec<&Wanted> = wanted.iter().filter(|agent| agent.way == Way::Await).collect();
    let tokens: Vec<Token> = waited.iter().map(|_| Token::random()).collect::<Result<_, _>>()?;
    let trust = Trust::new(Vec::new(), tokens.clone());
    let refused = |why: String| print_message(&printable(&format!("a connection was refused: {why}")));
    let entrance = Entrance::open(&options.identity, &plan.entrance()?, trust, Box::new(refused))?;
    context.warn_always(&format!("waiting for {} agents; start on each machine one of", waited.len()));
    for token in tokens {
        let (place, fingerprint) = (entrance.place().clone(), options.identity.fingerprint);
        let address = Address { place, fingerprint, token: None };
        context.warn_always(&format!("diskwright lab agent --connect {address}/{} TARGET...", token.reveal()));
    }
    Ok(Some(entrance))
}

/// The agents and the load of each group.
struct Led {
    agents: Agents,
    jobs: BTreeMap<String, Job>,
}

impl Led {
    /// Connects to all agents and prepares their targets.
    fn prepare(&self, context: &Context, run: &str, job_of: &(dyn Fn(&Remote) -> Job + Sync)) -> Outcome<Fleet> {
        let mut fleet = self.agents.connect(run)?;
        self.agents.prepare(&mut fleet, job_of, &mut context.steps())?;
        Ok(fleet)
    }

    /// The load of all groups, if they have the same one.
    fn one_job(&self) -> Outcome<&Job> {
        let mut jobs = self.jobs.values();
        jobs.next().filter(|first| jobs.all(|job| job == *first)).ok_or_else(|| {
            Failure::usage("the groups of the plan have different loads; a sweep or a comparison has one")
        })
    }

    fn job_of(&self, remote: &Remote) -> Job {
        self.jobs[remote.group()].clone()
    }
}

fn one_run(context: &mut Context, led: &Led, output: &Output) -> Outcome {
    let job_of = |remote: &Remote| led.job_of(remote);
    let old = unfinished(output.path())?;
    if old.is_some() {
        context.warn(&format!("going on with the run of {}", output.path().display()));
    }
    let run = old.map_or_else(new_run, Ok)?;
    let mut fleet = led.prepare(context, &run, &job_of)?;
    let agents = fleet.remotes().len();
    // A controller that dies from here on can go on: the agents keep their records.
    output.save(&fleet.begun(&job_of))?;
    let display = FleetDisplay::new(context.global.quiet, context.signals.patient());
    let measured = fleet.measure(agents, &job_of, &display);
    drop(display);
    let measured = measured.map_err(LabError::from);
    let saved = measured.as_ref().map_or(Ok(()), |run| output.save(run));
    if measured.is_ok() && saved.is_ok() {
        fleet.kept();
    }
    fleet.finish();
    let run = measured?;
    if context.global.json {
        context.print_measured(&run)?;
    } else {
        context.print_chapter(&run, false)?;
        if saved.is_ok() {
            writeln!(context.text(), "\nsaved to {}", printable(&crate::json::path(output.path())))?;
        }
    }
    saved?;
    Ok(exit::of_end(&run.head.end))
}

/// The identifier of a run that a controller began and did not save to its end.
fn unfinished(path: &Path) -> Outcome<Option<String>> {
    if !path.exists() {
        return Ok(None);
    }
    match document::read_one(path) {
        Ok(Document::Run(run)) if run.head.end == End::Stopped && run.phases.is_empty() => {
            Ok(run.fleet.map(|fleet| fleet.run))
        }
        _ => Ok(None),
    }
}

fn a_sweep(context: &mut Context, args: &FleetArgs, led: &Led, output: &Output) -> Outcome {
    let job = led.one_job()?;
    if args.vary.iter().any(|axis| axis.knob == Knob::Files) {
        return Err(Failure::usage("a fleet has no files; vary agents instead"));
    }
    let options = SweepOptions {
        job: job.clone(),
        targets: led.agents.wanted.iter().map(|agent| agent.name.clone()).collect(),
        axes: args.vary.clone(),
        rounds: args.rounds.unwrap_or(SWEEP_ROUNDS),
        total_depth: None,
        max_p99: args.max_p99,
        array: None,
    };
    let widest = sweep::plan::widest_job(&options)?;
    let saved = if output.path().exists() { Some(sweep::read(output.path())?) } else { None };
    if let Some(saved) = &saved {
        sweep::resume(saved.clone(), options.clone(), &[])?;
    }
    let fleet = OneLoad::new(led.prepare(context, &new_run()?, &|_| widest.clone())?);
    let records = fleet.targets();
    let mut record = match saved {
        Some(saved) => sweep::resume(saved, options, &records)?,
        None => sweep::begin(options, records, args.label.clone())?,
    };
    let mut steps = context.steps();
    let mut measure = |job: &Job, agents: usize, watch: &dyn Watch| fleet.measure(job, agents, watch);
    let mut keep = |record: &sweep::SweepRecord| {
        output.save(record)?;
        fleet.kept();
        Ok(())
    };
    let swept = sweep::run(&mut record, "sweep", &mut measure, &mut keep, &mut steps);
    drop(steps);
    fleet.finish();
    let has_figures = record.cells.iter().any(|cell| !cell.measured.rounds.is_empty());
    if swept.is_err() && !has_figures {
        swept?;
        return Ok(exit::FAILED);
    }
    if context.global.json {
        context.print_measured(&record)?;
    } else {
        context.print_chapter(&record, false)?;
        writeln!(context.out, "\nsaved to {}", printable(&crate::json::path(output.path())))?;
    }
    swept?;
    Ok(exit::of_end(&record.head.end))
}

/// Compares targets that all agents have, each measured by all agents at the same time.
fn a_comparison(context: &mut Context, args: &FleetArgs, led: &Led, output: &Output) -> Outcome {
    let job = led.one_job()?;
    if job.phases.iter().flat_map(|phase| &phase.loads).any(|load| !load.targets.is_empty()) {
        return Err(Failure::usage("the profile fixes the targets of its loads; a comparison chooses them"));
    }
    let rounds = args.rounds.unwrap_or(COMPARE_ROUNDS) as usize;
    warn_of_few_rounds(context, rounds, args.target.len(), 0, job);
    let (start, mut head) = (Instant::now(), Head::begin(COMPARISON_SCHEMA));
    let mut fleet = led.prepare(context, &new_run()?, &|_| job.clone())?;
    let agents = fleet.remotes().len();
    let sizes = fleet.remotes().iter().flat_map(|remote| remote.targets().iter().map(|target| target.size_bytes));
    let how = LiveOptions { rounds, smallest_bytes: sizes.min().unwrap_or(0) };
    let mut steps = context.steps();
    let mut measure = |index: usize, job: &Job, watch: &dyn Watch| -> Result<Run, LabError> {
        let mut job = job.clone();
        job.phases.iter_mut().flat_map(|phase| &mut phase.loads).for_each(|load| load.targets = vec![index]);
        let sum = |look: &FleetLook<'_>| watch.update(&look.sum);
        let run = fleet.measure(agents, &|_| job.clone(), &sum)?;
        fleet.kept();
        Ok(run)
    };
    let sides = comparison::live(&args.target, job, &how, &mut measure, &mut steps);
    drop(steps);
    fleet.finish();
    head.took_ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let options = JudgeOptions { paired: true, ..JudgeOptions::default() };
    let record = comparison::judge(head, sides?, &options);
    let saved = output.save(&record);
    if context.global.json {
        context.print_measured(&record)?;
    } else {
        context.print_chapter(&record, false)?;
        if saved.is_ok() {
            writeln!(context.out, "\nsaved to {}", printable(&crate::json::path(output.path())))?;
        }
    }
    saved?;
    Ok(exit::OK)
}
