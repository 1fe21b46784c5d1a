//! Options that describe a workload, shared by all measuring commands, and their conversion to a
//! job.
//!
//! ```text
//!   --profile ─▶ Job ─┐
//!   or 4K random ─────┴─▶ each given option replaces its field in every load and phase
//!   reads                     └─▶ Job, validated
//! ```

use super::words;
use crate::{
    exit::{Failure, Outcome},
    options::{CacheArg, EngineArg, GlobalOptions},
};
use clap::Args;
use diskwright_load::{
    Job,
    job::{Blocks, Burst, Bytes, Caching, Contents, Distribution, IoEngine, Load, Rate, Span},
    profiles,
};

/// Options of a workload. None has a default in clap, so that given options can be distinguished.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Workload")]
pub struct WorkloadArgs {
    /// Start from a built-in profile (NAME or NAME/PHASE, see `lab profiles`) or from a file. The
    /// options below replace its values.
    #[arg(long, value_name = "NAME|FILE")]
    pub profile: Option<String>,
    /// Size of requests, or sizes with weights: 8K, 4K:60,64K:40. [default: 4K]
    #[arg(long, short, value_name = "SIZE", value_parser = words::blocks)]
    pub block_size: Option<Blocks>,
    /// Percentage of reads; the rest are writes. [default: 100]
    #[arg(long, value_name = "PERCENT", value_parser = words::percent)]
    pub read_percent: Option<f64>,
    /// Percentage of requests at random offsets; the others follow the request before. [default:
    /// 100]
    #[arg(long, value_name = "PERCENT", value_parser = words::percent, conflicts_with = "sequential")]
    pub random_percent: Option<f64>,
    /// Same as --random-percent 0.
    #[arg(long)]
    pub sequential: bool,
    /// Threads per target. [default: 1]
    #[arg(long, short, value_name = "N")]
    pub threads: Option<u32>,
    /// Let every thread use all targets; --threads is then the total number.
    #[arg(long)]
    pub across_targets: bool,
    /// Requests in flight per thread and target. [default: 32]
    #[arg(long, value_name = "N")]
    pub queue_depth: Option<u32>,
    /// Completions that a thread waits for before it makes new requests. Saves system calls, but
    /// lowers the depth reached. [default: 1]
    #[arg(long, value_name = "N")]
    pub batch: Option<u32>,
    /// Measure for this long: 30s, 2m, 500ms. [default: 30s]
    #[arg(long, short, value_name = "TIME", value_parser = words::span)]
    pub duration: Option<Span>,
    /// Measure exactly this many requests per thread, without warm-up.
    #[arg(long, value_name = "N", conflicts_with_all = ["duration", "warm_up", "wait_steady"])]
    pub count: Option<u64>,
    /// Run the load for this long before measuring. [default: 5s]
    #[arg(long, value_name = "TIME", value_parser = words::span)]
    pub warm_up: Option<Span>,
    /// Continue the load for this long after measuring.
    #[arg(long, value_name = "TIME", value_parser = words::span)]
    pub cool_down: Option<Span>,
    /// Wait at most this long for the steady state (SNIA: five rounds, range within 20 %, slope
    /// within 10 %) before measuring.
    #[arg(long, value_name = "TIME", value_parser = words::span)]
    pub wait_steady: Option<Span>,
    /// Interval of the time series. [default: 1s]
    #[arg(long, value_name = "TIME", value_parser = words::span)]
    pub interval: Option<Span>,
    /// Use only this much of each target. [default: all]
    #[arg(long, value_name = "SIZE", value_parser = words::size)]
    pub working_set: Option<Bytes>,
    /// Start of the working set. [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = words::size)]
    pub start: Option<Bytes>,
    /// Distance between the starts of the threads' sequential streams.
    #[arg(long, value_name = "SIZE", value_parser = words::size)]
    pub thread_start: Option<Bytes>,
    /// Random offsets are multiples of this. [default: the request size]
    #[arg(long, value_name = "SIZE", value_parser = words::size)]
    pub align: Option<Bytes>,
    /// Distance between the starts of sequential requests. [default: the request size]
    #[arg(long, value_name = "SIZE", value_parser = words::size)]
    pub stride: Option<Bytes>,
    /// Let the threads of a target share one sequential stream.
    #[arg(long)]
    pub interlocked: bool,
    /// Distribution of random offsets: uniform, zipf:THETA, pareto:H, or shares of requests with
    /// shares of the working set as in 90/10:5/20.
    #[arg(long, value_name = "DISTRIBUTION", value_parser = words::distribution)]
    pub distribution: Option<Distribution>,
    /// Rate per thread, by an absolute schedule: requests per second (5000) or bytes per second
    /// (100M).
    #[arg(long, value_name = "RATE", value_parser = words::rate)]
    pub rate: Option<Rate>,
    /// Pause between a completion and the request that replaces it.
    #[arg(long, value_name = "TIME", value_parser = words::span)]
    pub think_time: Option<Span>,
    /// This many requests, then a pause: 32:100ms.
    #[arg(long, value_name = "N:TIME", value_parser = words::burst)]
    pub burst: Option<Burst>,
    /// Flush after this many writes of a thread.
    #[arg(long, value_name = "N")]
    pub flush_every: Option<u64>,
    /// Make each write durable when it completes (O_DSYNC or FUA).
    #[arg(long)]
    pub write_through: bool,
    /// Written data: incompressible, zero, verified, or compressible=50,duplicate=20. [default:
    /// incompressible]
    #[arg(long, value_name = "CONTENTS", value_parser = words::contents)]
    pub contents: Option<Contents>,
    /// Seed of contents, offsets and the order of cells. [default: 1]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

impl WorkloadArgs {
    /// The job that these options describe.
    ///
    /// # Errors
    /// A profile that cannot be read; options that exclude each other.
    pub fn job(&self, global: &GlobalOptions) -> Outcome<Job> {
        let job = self.profile.as_ref().map(|profile| profiles::load(profile)).transpose()?;
        self.onto(job, global)
    }

    /// A job with the given options; without one, 4K random reads.
    ///
    /// # Errors
    /// Options that exclude each other.
    pub fn onto(&self, job: Option<Job>, global: &GlobalOptions) -> Outcome<Job> {
        let is_named = job.is_some();
        let mut job =
            job.unwrap_or_else(|| Job::simple("run", Load::default(), Span::from_secs(5), Span::from_secs(30)));
        for phase in &mut job.phases {
            set(&mut phase.duration, &self.duration);
            set(&mut phase.warm_up, &self.warm_up);
            set(&mut phase.cool_down, &self.cool_down);
            if self.wait_steady.is_some() {
                phase.steady_within = self.wait_steady;
            }
            if let Some(count) = self.count {
                (phase.count, phase.warm_up, phase.cool_down) = (Some(count), Span::default(), Span::default());
                phase.steady_within = None;
            } else if self.duration.is_some() {
                phase.count = None;
            }
            phase.loads.iter_mut().for_each(|load| self.apply(load));
        }
        set(&mut job.interval, &self.interval);
        set(&mut job.contents, &self.contents);
        set(&mut job.seed, &self.seed);
        job.cache = caching(job.cache, global.cache, self.write_through);
        job.engine = match global.io_engine {
            EngineArg::Auto => job.engine,
            EngineArg::IoUring => IoEngine::IoUring,
            EngineArg::Pread => IoEngine::Pread,
        };
        if !is_named {
            job.name = job.phases[0].loads[0].title();
        }
        job.validate().map_err(|error| Failure::new(error.to_string()))?;
        Ok(job)
    }

    fn apply(&self, load: &mut Load) {
        set(&mut load.block, &self.block_size);
        set(&mut load.read_percent, &self.read_percent);
        set(&mut load.random_percent, &self.random_percent);
        if self.sequential {
            load.random_percent = 0.0;
        }
        set(&mut load.threads, &self.threads);
        load.across_targets |= self.across_targets;
        set(&mut load.queue_depth, &self.queue_depth);
        set(&mut load.batch, &self.batch);
        set(&mut load.working_set, &self.working_set);
        set(&mut load.start, &self.start);
        set(&mut load.thread_start, &self.thread_start);
        load.align = self.align.or(load.align);
        load.stride = self.stride.or(load.stride);
        load.interlocked |= self.interlocked;
        set(&mut load.distribution, &self.distribution);
        load.rate = self.rate.or(load.rate);
        set(&mut load.think_time, &self.think_time);
        load.burst = self.burst.or(load.burst);
        set(&mut load.flush_every, &self.flush_every);
        // The load's name in the profile would no longer be true.
        if self.block_size.is_some() || self.read_percent.is_some() || self.random_percent.is_some() || self.sequential
        {
            load.name.clear();
        }
    }
}

fn set<T: Clone>(field: &mut T, given: &Option<T>) {
    if let Some(value) = given {
        field.clone_from(value);
    }
}

/// Combines direct I/O or page cache with durable writes.
fn caching(job: Caching, global: Option<CacheArg>, write_through: bool) -> Caching {
    let direct = match global {
        Some(CacheArg::Direct) => true,
        Some(CacheArg::Page) => false,
        None => matches!(job, Caching::Direct | Caching::DirectWriteThrough),
    };
    let durable = write_through || matches!(job, Caching::WriteThrough | Caching::DirectWriteThrough);
    match (direct, durable) {
        (false, false) => Caching::Cached,
        (false, true) => Caching::WriteThrough,
        (true, false) => Caching::Direct,
        (true, true) => Caching::DirectWriteThrough,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        workload: WorkloadArgs,
        #[command(flatten)]
        global: GlobalOptions,
    }

    fn job(line: &str) -> Result<Job, String> {
        let line =
            Line::try_parse_from(format!("test {line}").split_whitespace()).map_err(|error| error.to_string())?;
        line.workload.job(&line.global).map_err(|failure| format!("{failure:?}"))
    }

    #[test]
    fn without_options_it_is_4k_random_reads() {
        let job = job("").unwrap();
        assert_eq!(job.phases[0].loads, [Load::default()]);
        assert_eq!((job.name.as_str(), job.cache), ("4K random read, 1 x 32", Caching::Direct));
        assert_eq!((job.phases[0].warm_up, job.phases[0].duration), (Span::from_secs(5), Span::from_secs(30)));
    }

    #[test]
    fn options_become_a_job_that_comes_back_from_its_profile() {
        let job = job("-b 8K --read-percent 70 --threads 4 --queue-depth 12 -d 600s --warm-up 5m --cool-down 10 --working-set 1G \
             --start 1M --distribution 90/10:5/20 --rate 5000 --think-time 1ms --flush-every 100 --contents zero --seed 7 \
             --cache page --write-through --wait-steady 10m --interval 500ms --align 4K --io-engine pread")
        .unwrap();
        let load = &job.phases[0].loads[0];
        assert_eq!((load.read_percent, load.threads, load.queue_depth, load.flush_every), (70.0, 4, 12, 100));
        assert_eq!((job.cache, job.engine, job.seed), (Caching::WriteThrough, IoEngine::Pread, 7));
        assert_eq!(job.phases[0].steady_within, Some(Span::from_secs(600)));
        assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job);
    }

    #[test]
    fn options_replace_what_a_profile_says_in_every_load() {
        let job = job("--profile vmfleet-sql --duration 1s --warm-up 0 --queue-depth 3").unwrap();
        let loads = &job.phases[0].loads;
        assert_eq!((loads[0].queue_depth, loads[1].queue_depth), (3, 3));
        assert_eq!((loads[0].threads, loads[0].name.as_str(), job.name.as_str()), (4, "OLTP", "vmfleet-sql"));
        assert_eq!(job.cache, Caching::DirectWriteThrough);
        let job = self::job("--profile vhd-applications/oltp-db --cache page -b 4K --count 100").unwrap();
        assert_eq!((job.phases.len(), job.cache, job.phases[0].count), (1, Caching::Cached, Some(100)));
        assert_eq!((job.phases[0].warm_up, job.phases[0].loads[0].name.as_str()), (Span::default(), ""));
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        for (line, word) in [
            ("--read-percent 101", "--read-percent"),
            ("--random-percent 5 --sequential", "--sequential"),
            ("--count 5 --duration 3s", "--duration"),
            ("--queue-depth 0", "queue_depth"),
            ("-b 1000", "block"),
            ("--profile nonsense", "nonsense"),
            ("--distribution zipf:1", "theta"),
        ] {
            let error = job(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
