//! (docs below, once written)
pub mod clock;
pub mod data;
pub mod error;
pub mod fill;
pub mod generator;
pub mod machine;
pub mod measure;
pub mod null;
pub mod paper;
pub mod progress;
pub mod scratch;
pub mod stats;
pub mod table;
pub mod targets;
pub mod workload;
pub use error::{LabError, Result};
