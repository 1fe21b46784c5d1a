//! DiskSpd's face: its switches and profiles in, its reports out; the measuring between is that of
//! every other run.
//!
//! ```text
//!   switches.rs ──────────────────┐                    ┌─▶ job.rs ──▶ Job ──▶ run ──▶ Run ──┐
//!                                 ├─▶ profile.rs ──────┤                                    ├─▶ text.rs, xml.rs
//!   xml_profile.rs ─▶ composed.rs ┘    (its own model) └────────────────────────────────────┘
//!                      (-X with switches and targets beside it)
//! ```
//!
//! What scripts rely on is kept: names of switches, defaults, the lines and columns of the tables,
//! the elements of the XML. What DiskSpd does and this does not is said in [`Profile::notes`], or
//! refused by name. Nothing here does I/O.

#![forbid(unsafe_code)]

mod composed;
mod hints;
mod job;
mod profile;
mod profile_error;
mod switches;
#[cfg(test)]
mod tests;
mod text;
mod xml;
mod xml_profile;
mod xml_tree;

pub use composed::Composed;
pub use hints::with_diskspds_switches;
pub use job::job;
pub use profile::{Order, Processor, Profile, ResultForm, Target, Throughput, TimeSpan, WriteContents};
pub use profile_error::ProfileError;
pub use switches::{SwitchError, parse};
pub use text::report;
pub use xml::{profile as profile_xml, results as results_xml};
pub use xml_profile::{read as read_xml_profile, text_of as xml_profile_text};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
