//! Which is faster, by how much, and how sure that is.
//!
//! ```text
//!   saved results ──read.rs──▶ sides of rounds ─┐
//!   two targets ───live.rs───▶ rounds in pairs ─┴─judge.rs──▶ changes ──▶ record.rs, verdict.rs
//!                                                                    └──▶ fail.rs: exit code
//! ```
//!
//! The first side is the base; each other one is compared with it, figure by figure, group by group
//! (a group is what both have: a phase, a cell of a sweep, a workload on a container). Everything
//! is a ratio, so that a percent means the same for IOPS and latencies. Rounds that were
//! interleaved are compared in pairs, others as two groups; p-values are corrected for the number
//! of comparisons; "no difference seen" comes with how large a difference may have been missed.

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
pub use record::{COMPARISON_SCHEMA, Circumstances, ComparisonRecord, FigureChange, Group, Said, Side};
