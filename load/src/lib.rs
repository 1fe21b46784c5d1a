//! A load generator for block devices: jobs, threads that drive queues, and records of the results.
//!
//! ```text
//!   job/, profiles/, workload.rs ──▶ run/ ──▶ record/ ──▶ figures.rs, steady.rs
//!   the workload                     threads   results     figures of a window; steady state
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`job`], [`workload`], [`profiles`] | workloads; job files in TOML, and built-in profiles |
//! | [`target`], [`null`] | a block device under test; a device that completes requests at once |
//! | [`run`] | threads, queues, schedules, histograms, time series |
//! | [`record`] | the result of a run; totals are computed, never stored |
//! | [`figures`], [`steady`] | the figures that are compared; the steady state rule of SNIA |
//! | [`data`] | pseudorandom contents that can be checked from a seed and an offset |
//! | [`seeds`] | seeds of the measured windows of an experiment |
//! | [`machine`], [`clock`], [`backing`], [`warning`] | machine and target facts; warnings |
//!
//! # Example: run a job on a file and print its 99th percentile
//!
//! ```
//! use diskwright_load::{
//!     Job, OpenTarget,
//!     job::{Caching, Load, Span},
//!     run::{RunOptions, Unwatched, run},
//! };
//! use diskwright_store::{CacheMode, RawDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("disk.raw");
//! // `path` is a file of 8 MiB without holes: a read of a hole would not reach the disk.
//! std::fs::write(&path, vec![0x5a; 8 << 20])?;
//! let load = Load { queue_depth: 8, read_percent: 70.0, ..Load::default() };
//! let mut job = Job::simple("oltp", load, Span::default(), Span::from_millis(50));
//! job.cache = Caching::Cached;
//! let device = RawDevice::open(&path, true, CacheMode::PageCache)?;
//! let mut target = OpenTarget::new("disk.raw", device);
//! target.cache = Caching::Cached;
//! let found = run(&job, &[target], &RunOptions::default(), &Unwatched)?;
//! let total = found.phases[0].total();
//! println!("p99 is {} ns", total.both.latency().quantile_ns(0.99).unwrap_or(0));
//! # assert!(total.both.ios > 0);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod backing;
pub mod clock;
pub mod data;
pub mod error;
pub mod figures;
pub mod job;
pub mod machine;
pub mod null;
pub mod profiles;
pub mod record;
pub mod run;
pub mod seeds;
pub mod steady;
mod target;
pub mod warning;
pub mod workload;

pub use error::{LoadError, Result};
pub use job::Job;
pub use null::NullDevice;
pub use record::Run;
pub use target::{Close, OpenTarget};
pub use workload::Workload;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
