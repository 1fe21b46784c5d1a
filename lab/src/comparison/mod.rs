//! Compares measurements: which side is faster, by how much, and whether that is significant.
//!
//! ```text
//!   saved results ──read.rs──▶ sides with rounds ─┐
//!   live targets ──live.rs───▶ interleaved rounds ┴─judge.rs──▶ changes ──▶ record.rs, verdict.rs
//!                                                                     └──▶ fail.rs: exit code
//! ```
//!
//! The first side is the base. Every other side is compared with it, figure by figure and group by
//! group. A group is a measurement that both sides have: a phase of a run, a cell of a sweep, a
//! workload on a container. Changes are ratios, so a percentage means the same for IOPS and
//! latencies. Interleaved rounds are compared in pairs, others as two independent samples. p values
//! are corrected for the number of comparisons. If no difference is significant, the confidence
//! interval shows how large a difference may be missed.

mod fail;
mod judge;
mod live;
mod read;
mod record;
#[cfg(test)]
mod tests;
mod verdict;

pub use fail::{Certainty, FailIf};
pub use judge::{JudgeOptions, judge};
pub use live::{LiveOptions, MeasureOne, live};
pub use read::read_side;
pub use record::{COMPARISON_SCHEMA, Circumstances, ComparisonRecord, Conclusion, FigureChange, Group, Side};
