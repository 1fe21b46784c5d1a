//! A job: the complete description of a run, without its targets.
//!
//! ```text
//!   Job ──┬─ engine, cache mode, contents, seed
//!         └─ phases, one after the other ──┬─ warm-up, duration (or a count), cool-down
//!                                          └─ loads, all at the same time:
//!                                             offsets, sizes, queue depth, rate
//! ```
//!
//! A profile is a job in TOML. Command-line options and DiskSpd's switches are converted into a
//! job. A result contains its job, so that it can be repeated. Targets are not part of a job: the
//! same job runs on any number of targets.
//!
//! Invariant: a job that has passed [`Job::validate`] can run on any target that is large enough.
//! Nothing here does I/O.

mod error;
mod load;

pub use diskwright_stats::units::{Bytes, Span};
pub use error::JobError;
pub use load::{Blocks, Burst, Distribution, Load, QUEUE_DEPTH_MAX, Rate, SizeShare, Spot, THREADS_MAX};

use diskwright_store::{CacheMode, EngineKind};
use serde::{Deserialize, Serialize};

/// Cache mode and durability of writes; DiskSpd's `-S`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Caching {
    /// Page cache.
    Cached,
    /// O_DIRECT. A write may still be in the device's volatile cache when it completes. DiskSpd's
    /// `-Su`.
    #[default]
    Direct,
    /// Page cache; each write is durable when it completes (O_DSYNC or FUA). DiskSpd's `-Sw`.
    WriteThrough,
    /// O_DIRECT; each write is durable when it completes. DiskSpd's `-Suw` and `-Sh`.
    DirectWriteThrough,
}

impl Caching {
    /// The cache mode with which the store is opened.
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

    /// The same durability with the cache mode in force, which differs from the one asked for where
    /// the file system has no O_DIRECT.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum IoEngine {
    /// io_uring where the kernel has it, else `pread` and `pwrite`.
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
    fn from(engine: IoEngine) -> Self {
        match engine {
            IoEngine::Auto => Self::Auto,
            IoEngine::IoUring => Self::Uring,
            IoEngine::Pread => Self::Sync,
        }
    }
}

/// Payload of writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, tag = "kind")]
pub enum Contents {
    /// Pseudorandom bytes that cannot be compressed or deduplicated.
    #[default]
    Incompressible,
    /// Zeros, as SQLIO writes them. A dynamic disk need not store them.
    Zero,
    /// Partly compressible, partly duplicate blocks. Both shares are in percent, 0 to 100.
    Mixed {
        /// Share of each block that is zeros.
        compressible_percent: f64,
        /// Share of writes that repeat one of 8 patterns.
        duplicate_percent: f64,
    },
    /// Each sector carries its offset, a generation and a checksum, which are checked when the
    /// sector is read.
    Verified,
}

/// A phase of a run. Latencies and rates are those of its measured part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Name in reports; unique in its job.
    pub name: String,
    /// Time at the start of the phase that is not measured.
    #[serde(default)]
    pub warm_up: Span,
    /// Measured time. Ignored when there is a `count`.
    #[serde(default = "thirty_seconds")]
    pub duration: Span,
    /// Number of requests of each thread, instead of a duration; all of them are measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// Time at the end of the phase in which the load continues and is not measured.
    #[serde(default)]
    pub cool_down: Span,
    /// Longest time to wait for the steady state (see [`crate::steady`]) before the measured time;
    /// `None`: no wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steady_within: Option<Span>,
    /// The loads of the phase, which run at the same time.
    #[serde(rename = "load")]
    pub loads: Vec<Load>,
}

/// The complete description of a run, without its targets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Name in reports, and the name of a profile.
    pub name: String,
    /// One sentence: what the workload is and where it comes from.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// How I/O is submitted: io_uring, or `pread` and `pwrite`.
    #[serde(default)]
    pub engine: IoEngine,
    /// Cache mode and durability of writes.
    #[serde(default)]
    pub cache: Caching,
    /// Seed of the payload, the offsets, and the order of reads and writes.
    #[serde(default = "one")]
    pub seed: u64,
    /// Length of an interval of the time series.
    #[serde(default = "one_second")]
    pub interval: Span,
    /// Payload of writes.
    #[serde(default)]
    pub contents: Contents,
    /// The phases, which run one after the other.
    #[serde(rename = "phase")]
    pub phases: Vec<Phase>,
}

fn one() -> u64 {
    1
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

    /// Whether any load of the job writes.
    pub fn writes(&self) -> bool {
        self.phases.iter().flat_map(|phase| &phase.loads).any(Load::writes)
    }

    /// Checks the job without a target.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn validate(&self) -> Result<(), JobError> {
        let wrong = |place: &str, what: &str, hint: &str| {
            Err(JobError { place: place.to_owned(), what: what.to_owned(), hint: hint.to_owned() })
        };
        if self.phases.is_empty() {
            return wrong("phase", "the job has no phase", "give it at least one [[phase]]");
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
                return wrong(&place, "two phases have this name", "give each phase a name of its own");
            }
            if phase.loads.is_empty() {
                return wrong(&place, "the phase has no load", "give it at least one [[phase.load]]");
            }
            if phase.count.is_none() && phase.duration == Span::default() {
                return wrong(&place, "the duration is 0", "give a duration or a count");
            }
            if phase.count == Some(0) {
                return wrong(&place, "the count is 0", "give at least 1");
            }
            for (number, load) in phase.loads.iter().enumerate() {
                load.validate(&format!("{place}, load {}", number + 1))?;
            }
        }
        Ok(())
    }

    /// Parses a job from TOML and validates it. An unknown key is an error that names the key.
    ///
    /// # Errors
    /// The error of the TOML parser, with line and column, or that of [`Job::validate`].
    pub fn from_toml(text: &str) -> Result<Self, String> {
        let job: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        job.validate().map_err(|error| error.to_string())?;
        Ok(job)
    }

    /// The job as TOML, which [`Job::from_toml`] reads back.
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
    fn a_job_is_read_back_from_its_toml() {
        let load = Load { read_percent: 70.0, random_percent: 100.0, ..Load::default() };
        let job = Job::simple("oltp", load, Span::from_secs(5), Span::from_secs(30));
        let text = job.to_toml();
        assert_eq!(Job::from_toml(&text).unwrap(), job, "{text}");
    }

    #[test]
    fn a_job_writes_when_one_size_of_a_mix_writes() {
        let share = |read_percent| SizeShare { size: Bytes(4096), weight: 1.0, read_percent, random_percent: None };
        let job = |read_percent, shares: &[Option<f64>]| {
            let block = Blocks::Mix(shares.iter().copied().map(share).collect());
            let load = Load { read_percent, block, ..Load::default() };
            Job::simple("mix", load, Span::default(), Span::from_secs(1))
        };
        let hidden = job(100.0, &[None, Some(0.0)]);
        assert!(hidden.writes() && hidden.phases[0].loads[0].reads());
        assert_eq!(hidden.phases[0].loads[0].title(), "4K/4K random 50 % read, 1 x 32");
        // Every size of the mix reads, although the load's own share of reads is 0.
        assert!(!job(0.0, &[Some(100.0), Some(100.0)]).writes());
        assert!(!job(100.0, &[None, None]).writes());
    }

    #[test]
    fn an_unknown_key_is_named() {
        let error = Job::from_toml("name = 'x'\n[[phase]]\nname='m'\n[[phase.load]]\nqueue_deptth = 3\n").unwrap_err();
        assert!(error.contains("queue_deptth"), "{error}");
    }

    #[test]
    fn an_invalid_field_is_named_with_its_phase_and_load() {
        let mut job = Job::simple("x", Load::default(), Span::default(), Span::from_secs(1));
        job.phases[0].loads[0].queue_depth = 0;
        let error = job.validate().unwrap_err().to_string();
        assert!(error.starts_with("phase \"main\", load 1") && error.contains("queue_depth"), "{error}");
        job.phases.clear();
        assert!(job.validate().is_err());
    }
}
