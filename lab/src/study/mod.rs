//! The studies: an experiment of a paper, from preparation to conclusion.
//!
//! ```text
//!   containers.rs   raw file, fixed, dynamic, differencing; VHD and VHDX: the whole run
//!   creation.rs     how long it takes to create each type
//!   chains.rs       how reads and opening fare as a chain grows
//!   zero_payload/   SQLIO's surprise: zeros that are never stored
//!   budget.rs       how a run that must end in time spends it
//!   verdict.rs      from figures to a sentence, and to warnings
//!   report.rs       the text that is printed
//! ```

mod budget;
mod chains;
pub mod containers;
pub(crate) mod creation;
pub mod report;
mod verdict;
pub mod zero_payload;

pub use containers::{ContainersOptions, ContainersReport, run};
pub use report::render;
