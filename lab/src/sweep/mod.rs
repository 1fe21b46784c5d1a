//! A workload over a range of loads.

pub mod array;
pub mod axis;
pub mod record;

pub use array::{ArrayFigures, ArrayOptions};
pub use axis::{Axis, Coordinate, Knob};
pub use record::{KneeRow, SWEEP_SCHEMA, SweepCell, SweepOptions, SweepRecord};
