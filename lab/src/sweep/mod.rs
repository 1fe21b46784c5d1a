//! Sweeps: one workload over a range of loads, block sizes, mixes or files, with conclusions.
//!
//! ```text
//!   axis.rs      the varied settings, and their command-line syntax
//!   plan.rs      axes ──▶ cells ──▶ the job of a cell
//!   run.rs       interleaved rounds over the cells; saves after each window; resumes
//!   conclude.rs  cells ──▶ knees, best combination, verdict
//!   warnings.rs  condenses the windows' warnings
//!   array.rs     queue depth and throughput per device of a mirrored array
//!   record.rs    the saved result
//! ```
//!
//! A function parameter does the measuring, so that tests can run the same code on simulated
//! devices.

pub mod array;
pub mod axis;
mod conclude;
pub mod plan;
pub mod record;
mod run;
#[cfg(test)]
pub(crate) mod tests;
mod warnings;

pub use array::{ArrayFigures, ArrayOptions};
pub use axis::{Axis, Coordinate, Knob};
pub use plan::title;
pub use record::{AMPLIFICATION, BestCells, KneeRow, SWEEP_SCHEMA, SweepCell, SweepOptions, SweepRecord};
pub use run::{Measure, SaveRecord, begin, read, resume, run};
pub(crate) use warnings::{of_cell as add_warning_of_cell, settle as settle_warnings};
