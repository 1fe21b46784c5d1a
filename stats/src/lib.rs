//! Statistics of benchmarks. Pure functions: numbers in, numbers out; no I/O, no clock.
//!
//! | module | what it holds |
//! |---|---|
//! | [`summary`] | median, min, max, spread; ratios within rounds; the order of rounds |
//! | [`inference`] | rank tests, shifts with intervals, Holm, the fewest rounds needed |
//! | [`knee`] | efficient, saturation and limit points of a load curve, with intervals |
//! | [`units`] | parses and prints sizes (`8K`) and times (`500ms`) in options and job files |
//! | [`numbers`] | formats numbers for terminals, pages and messages (`12.3 µs`, `1.50 GiB`) |
//!
//! The terminal, the HTML page and the JSON take their conclusions from this crate. One test of a
//! rule therefore covers all three.
//!
//! # Example
//!
//! Two disks were measured eight times each, in turns. Does the throughput of the second one
//! differ?
//!
//! ```
//! use diskwright_stats::inference::{paired_shift, wilcoxon_signed_rank};
//!
//! let raw = [100.2, 98.7, 101.0, 99.5, 100.8, 99.9, 100.1, 98.9];
//! let vhdx = [95.1, 94.0, 96.2, 94.7, 95.9, 95.2, 95.5, 93.8];
//! let changes: Vec<f64> =
//!     vhdx.iter().zip(raw).map(|(ours, base): (&f64, f64)| (ours / base).ln()).collect();
//! let test = wilcoxon_signed_rank(&changes).expect("there are eight pairs");
//! assert!(test.p < 0.05, "the difference is significant");
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
