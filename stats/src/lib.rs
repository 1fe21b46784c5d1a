//! Statistics of benchmarks. Pure functions: numbers in, numbers out; no I/O, no clock.
//!
//! | module | what it holds |
//! |---|---|
//! | [`summary`] | median, extremes and spread of rounds; ratios within rounds; the order of rounds |
//! | [`inference`] | rank tests, shifts with intervals, Holm's correction, how many rounds are needed |
//! | [`knee`] | how much load is enough: efficient, saturation and limit points with intervals |
//! | [`units`] | sizes and times as people write them |
//! | [`numbers`] | numbers as people read them |
//!
//! Every figure that a report concludes from goes through this crate, so that one test of a rule
//! holds for terminals, pages and JSON alike.
//!
//! # Example
//!
//! Two disks were measured eight times each, in turns. Is the second one faster?
//!
//! ```
//! use diskwright_stats::inference::{paired_shift, wilcoxon_signed_rank};
//!
//! let raw = [100.2, 98.7, 101.0, 99.5, 100.8, 99.9, 100.1, 98.9];
//! let vhdx = [95.1, 94.0, 96.2, 94.7, 95.9, 95.2, 95.5, 93.8];
//! let changes: Vec<f64> = vhdx.iter().zip(raw).map(|(ours, base): (&f64, f64)| (ours / base).ln()).collect();
//! let test = wilcoxon_signed_rank(&changes).expect("there are eight pairs");
//! assert!(test.p < 0.05, "beyond chance");
//! ```

#![forbid(unsafe_code)]

pub mod inference;
pub mod knee;
pub mod numbers;
pub mod summary;
pub mod units;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
