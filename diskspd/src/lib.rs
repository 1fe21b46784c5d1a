//! DiskSpd's switches, XML profiles and reports. The measurement is that of every other run.
//!
//! ```text
//!   switches.rs, values.rs ───────────────┐             ┌─▶ job.rs ─▶ Job ─▶ run ─▶ Run ─┐
//!                                         ├─▶ Profile ──┤                       text.rs ◀─┤
//!   xml_profile.rs ─▶ profile_command.rs ─┘             └───────────────────────▶ xml.rs ◀─┘
//!                     (-X with switches and targets)
//! ```
//!
//! The interface that scripts rely on is kept: names of switches, defaults, the lines and columns
//! of the tables, the elements of the XML. A switch that has no effect or another effect gives a
//! note in [`Profile::notes`]; a switch that is not supported is an error. Jobs and reports are
//! made without I/O, except that the XML report reads the host name.

#![forbid(unsafe_code)]

mod hints;
mod job;
mod profile;
mod profile_command;
mod profile_error;
mod switches;
#[cfg(test)]
mod tests;
mod text;
mod values;
mod xml;
mod xml_profile;
mod xml_tree;

pub use hints::with_diskspds_switches;
pub use job::job;
pub use profile::{Order, Processor, Profile, ResultForm, Target, Throughput, TimeSpan, WriteContents};
pub use profile_command::ProfileCommand;
pub use profile_error::ProfileError;
pub use switches::parse;
pub use text::report;
pub use values::SwitchError;
pub use xml::{profile as profile_xml, results as results_xml};
pub use xml_profile::{read as read_xml_profile, text_of as xml_profile_text};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
