//! A workload over a range of loads, block sizes, mixes or files, and what that says.
//!
//! ```text
//!   axis.rs      what varies, as written on a command line
//!   plan.rs      axes ──▶ cells ──▶ the job of a cell
//!   carry.rs     rounds interleaved over the cells; kept after each window; taken up again
//!   conclude.rs  cells ──▶ marked points (knee/), best combination, a sentence
//!   array.rs     queue depth and throughput per device of a mirrored array
//!   record.rs    what is saved
//! ```
//!
//! The sweep does not measure: it is handed a function that does, so that the same code runs on
//! devices that are simulated.

pub mod array;
pub mod axis;
mod carry;
mod conclude;
mod doubts;
pub mod plan;
pub mod record;
#[cfg(test)]
pub(crate) mod tests;

pub use array::{ArrayFigures, ArrayOptions};
pub use axis::{Axis, Coordinate, Knob};
pub use carry::{Keep, Measure, begin, carry_out, read, resume};
pub(crate) use doubts::{of_cell as add_warning_of_cell, settle as settle_warnings};
pub use plan::title;
pub use record::{BestCells, KneeRow, SWEEP_SCHEMA, SweepCell, SweepOptions, SweepRecord};
