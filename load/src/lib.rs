//! A load generator for block devices: jobs as data, carried out by threads that drive queues, and
//! everything that they found.
//!
//! ```text
//!   job.rs, profiles/, workload.rs ──▶ run/ ──▶ record/ ──▶ figures.rs, steady.rs
//!   what to do, as data                the loop  what was      a few numbers for each window;
//!                                                found         whether it was steady
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`job`], [`workload`], [`profiles`] | what a run does, as data; jobs as TOML, the papers' among them |
//! | [`target`], [`null`] | what a run drives: any block device; the device that does nothing |
//! | [`run`] | threads, queues, schedules, histograms, time series |
//! | [`record`] | what a run found; totals are computed, never stored |
//! | [`figures`], [`steady`] | the numbers that are compared; SNIA's steady state |
//! | [`data`] | contents that can be checked without being kept |
//! | [`seeds`] | one rule for the seeds of all windows of an experiment |
//! | [`machine`], [`clock`], [`behind`], [`warning`] | what was measured on; reasons for doubt |
//!
//! # Example: run a job and print its 99th percentile
//!
//! ```
//! use diskwright_load::{
//!     Job, NullDevice, OpenTarget,
//!     job::{Load, Span},
//!     run::{RunOptions, Unwatched, run},
//! };
//!
//! # fn main() -> Result<(), diskwright_load::LoadError> {
//! let load = Load { queue_depth: 8, read_percent: 70.0, ..Load::default() };
//! let job = Job::simple("oltp", load, Span::default(), Span::from_millis(50));
//! let target = OpenTarget::new("null", NullDevice::new(1 << 30));
//! let found = run(&job, &[target], &RunOptions::default(), &Unwatched)?;
//! let total = found.phases[0].total();
//! println!("p99 is {} ns", total.both.latency().quantile_ns(0.99).unwrap_or(0));
//! # assert!(total.both.ios > 0);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod behind;
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
pub mod target;
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
