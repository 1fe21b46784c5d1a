//! A job: everything that a run does, as data.
//!
//! ```text
//!   Job ──┬─ how: engine, cache mode, contents, seed
//!         └─ phases, one after the other ──┬─ how long: warm-up, measured (or a count), cool-down
//!                                          └─ loads, all at the same time: where, how large, how many, how fast
//! ```
//!
//! A profile is a job in TOML; a command line is turned into a job; DiskSpd's switches are turned
//! into a job; a result carries the job that made it. So whatever was run can be run again from
//! what was printed, and there is one place that says what a workload can be. Targets are not in a
//! job: the same job runs on any number of them.
//!
//! Invariant: a job that has passed [`Job::validate`] can be carried out on a target that is large
//! enough. Nothing here does I/O.

mod load;

pub use diskwright_stats::units::{Bytes, Span};
pub use load::{Blocks, Burst, Distribution, Load, QUEUE_DEPTH_MAX, Rate, SizeShare, Spot, THREADS_MAX};

use diskwright_store::{CacheMode, EngineKind};
use serde::{Deserialize, Serialize};

/// How requests reach the store; DiskSpd's `-S`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Caching {
    /// Through the page cache.
    Cached,
    /// Past the page cache (O_DIRECT); the device's own cache may still hold writes. DiskSpd's
    /// `-Su`.
    #[default]
    Direct,
    /// Through the page cache, each write durable when it completes (O_DSYNC or FUA). DiskSpd's
    /// `-Sw`.
    WriteThrough,
    /// Past the page cache, each write durable when it completes. DiskSpd's `-Suw` and `-Sh`.
    DirectWriteThrough,
}

impl Caching {
    /// How the store is to be opened.
    pub fn mode(self) -> CacheMode {
        match self {
            Self::Cached | Self::WriteThrough => CacheMode::PageCache,
            Self::Direct | Self::DirectWriteThrough => CacheMode::Direct,
        }
    }

    /// Whether a write is durable when it completes.
    pub fn is_durable(self) -> bool {
        matches!(self, Self::WriteThrough | Self::DirectWriteThrough)
    }

    /// The same durability with the mode that is in force.
    pub fn in_force(self, mode: CacheMode) -> Self {
        match (mode, self.is_durable()) {
            (CacheMode::PageCache, false) => Self::Cached,
            (CacheMode::PageCache, true) => Self::WriteThrough,
            (CacheMode::Direct, false) => Self::Direct,
            (CacheMode::Direct, true) => Self::DirectWriteThrough,
        }
    }
}

/// How I/O is submitted: io_uring, or `pread` and `pwrite`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoEngine {
    /// io_uring where the kernel has it.
    #[default]
    Auto,
    /// io_uring.
    IoUring,
    /// `pread` and `pwrite`.
    Pread,
}

impl From<EngineKind> for IoEngine {
    fn from(engine: EngineKind) -> Self {
        match engine {
            EngineKind::Auto => Self::Auto,
            EngineKind::Uring => Self::IoUring,
            EngineKind::Sync => Self::Pread,
        }
    }
}

impl From<IoEngine> for EngineKind {
    fn from(mover: IoEngine) -> Self {
        match mover {
            IoEngine::Auto => Self::Auto,
            IoEngine::IoUring => Self::Uring,
            IoEngine::Pread => Self::Sync,
        }
    }
}

/// What is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, tag = "kind")]
pub enum Contents {
    /// Bytes that no layer below can compress or deduplicate.
    #[default]
    Incompressible,
    /// Zeros: what SQLIO wrote, and what a dynamic disk need not store.
    Zero,
    /// Shares of each block that compress to nothing, and of blocks that repeat, in percent (0 to
    /// 100).
    Mixed {
        /// Share of each block that is zeros.
        compressible_percent: f64,
        /// Share of blocks that are copies of one of a small set.
        duplicate_percent: f64,
    },
    /// Each block carries its offset, a generation and a checksum, and is checked when it is read.
    Verified,
}

/// A stretch of a run. Latencies and rates are of its measured part only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// As shown to people; unique in its job.
    pub name: String,
    /// Not measured, at the beginning.
    #[serde(default)]
    pub warm_up: Span,
    /// Measured. Ignored when there is a `count`.
    #[serde(default = "thirty_seconds")]
    pub duration: Span,
    /// Exactly this many requests for each thread instead of a duration; all are measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// Not measured, at the end, while the load goes on.
    #[serde(default)]
    pub cool_down: Span,
    /// Whether measuring waits for the steady state of the SNIA rule (see `steady`), for at most
    /// this long; none: it does not wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steady_within: Option<Span>,
    /// What runs at the same time.
    #[serde(rename = "load")]
    pub loads: Vec<Load>,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// As shown to people, and the name of a profile.
    pub name: String,
    /// What it is and where it comes from, a sentence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// How I/O is submitted: io_uring, or `pread` and `pwrite`.
    #[serde(default)]
    pub engine: IoEngine,
    /// How requests reach the store.
    #[serde(default)]
    pub cache: Caching,
    /// Of contents, offsets and orders.
    #[serde(default = "one")]
    pub seed: u64,
    /// Length of a step of the time series.
    #[serde(default = "one_second")]
    pub interval: Span,
    /// What is written.
    #[serde(default)]
    pub contents: Contents,
    /// One after the other.
    #[serde(rename = "phase")]
    pub phases: Vec<Phase>,
}

fn one() -> u64 {
    1
}

/// Why a job cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {what}; {hint}")]
pub struct JobError {
    /// Where in the job: `phase "main", load 2, block`.
    pub place: String,
    /// What is wrong.
    pub what: String,
    /// What would be right.
    pub hint: String,
}

impl Job {
    /// A job of one phase with one load, for `duration` after `warm_up`.
    pub fn simple(name: &str, load: Load, warm_up: Span, duration: Span) -> Self {
        Self {
            name: name.to_owned(),
            description: String::new(),
            engine: IoEngine::default(),
            cache: Caching::default(),
            seed: 1,
            interval: one_second(),
            contents: Contents::default(),
            phases: vec![Phase {
                name: "main".into(),
                warm_up,
                duration,
                count: None,
                cool_down: Span::default(),
                steady_within: None,
                loads: vec![load],
            }],
        }
    }

    /// Whether any load of it writes.
    pub fn writes(&self) -> bool {
        self.phases.iter().flat_map(|phase| &phase.loads).any(Load::writes)
    }

    /// Checks what can be checked without a target.
    ///
    /// # Errors
    /// The first thing that is wrong, with its place.
    pub fn validate(&self) -> Result<(), JobError> {
        let wrong = |place: &str, what: &str, hint: &str| {
            Err(JobError { place: place.to_owned(), what: what.to_owned(), hint: hint.to_owned() })
        };
        if self.phases.is_empty() {
            return wrong("phase", "the job has none", "give it at least one [[phase]]");
        }
        if self.interval.as_nanos() < 10_000_000 {
            return wrong("interval", "shorter than 10 ms", "the time series needs longer steps; a second is usual");
        }
        if let Contents::Mixed { compressible_percent, duplicate_percent } = self.contents
            && ![compressible_percent, duplicate_percent].iter().all(|share| (0.0..=100.0).contains(share))
        {
            return wrong("contents", "a share is outside 0 to 100", "give percentages");
        }
        for (index, phase) in self.phases.iter().enumerate() {
            let place = format!("phase \"{}\"", phase.name);
            if self.phases[..index].iter().any(|other| other.name == phase.name) {
                return wrong(&place, "two phases have this name", "give each its own");
            }
            if phase.loads.is_empty() {
                return wrong(&place, "it has no load", "give it at least one [[phase.load]]");
            }
            if phase.count.is_none() && phase.duration == Span::default() {
                return wrong(&place, "it lasts no time", "give it a duration or a count");
            }
            if phase.count == Some(0) {
                return wrong(&place, "a count of 0 moves nothing", "give at least 1");
            }
            for (number, load) in phase.loads.iter().enumerate() {
                load.validate(&format!("{place}, load {}", number + 1))?;
            }
        }
        Ok(())
    }

    /// Reads a job from TOML and validates it. An unknown key is an error that names it.
    ///
    /// # Errors
    /// What the TOML reader says, with line and column, or what [`Job::validate`] says.
    pub fn from_toml(text: &str) -> Result<Self, String> {
        let job: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        job.validate().map_err(|error| error.to_string())?;
        Ok(job)
    }

    /// The profile that repeats this job.
    ///
    /// # Panics
    /// Never: every field of a job has a form in TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a job can be written as TOML")
    }
}

fn one_second() -> Span {
    Span::from_secs(1)
}

fn thirty_seconds() -> Span {
    Span::from_secs(30)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_comes_back_from_its_profile() {
        let load = Load { read_percent: 70.0, random_percent: 100.0, ..Load::default() };
        let job = Job::simple("oltp", load, Span::from_secs(5), Span::from_secs(30));
        let text = job.to_toml();
        assert_eq!(Job::from_toml(&text).unwrap(), job, "{text}");
    }

    #[test]
    fn a_size_of_a_mix_that_writes_makes_the_job_write() {
        let share = |read_percent| SizeShare { size: Bytes(4096), weight: 1.0, read_percent, random_percent: None };
        let job = |read_percent, shares: &[Option<f64>]| {
            let block = Blocks::Mix(shares.iter().copied().map(share).collect());
            let load = Load { read_percent, block, ..Load::default() };
            Job::simple("mix", load, Span::default(), Span::from_secs(1))
        };
        let hidden = job(100.0, &[None, Some(0.0)]);
        assert!(hidden.writes() && hidden.phases[0].loads[0].reads());
        assert_eq!(hidden.phases[0].loads[0].title(), "4K/4K random 50 % read, 1 x 32");
        // And the other way: every size reads, whatever the load's own share says.
        assert!(!job(0.0, &[Some(100.0), Some(100.0)]).writes());
        assert!(!job(100.0, &[None, None]).writes());
    }

    #[test]
    fn an_unknown_key_is_named() {
        let error = Job::from_toml("name = 'x'\n[[phase]]\nname='m'\n[[phase.load]]\nqueue_deptth = 3\n").unwrap_err();
        assert!(error.contains("queue_deptth"), "{error}");
    }

    #[test]
    fn what_cannot_be_run_is_told_with_its_place() {
        let mut job = Job::simple("x", Load::default(), Span::default(), Span::from_secs(1));
        job.phases[0].loads[0].queue_depth = 0;
        let error = job.validate().unwrap_err().to_string();
        assert!(error.starts_with("phase \"main\", load 1") && error.contains("queue_depth"), "{error}");
        job.phases.clear();
        assert!(job.validate().is_err());
    }
}
