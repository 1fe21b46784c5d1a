//! The laboratory: measures disks, and reports figures with their confidence intervals.
//!
//! ```text
//!   targets: open, inspect, fill          diskwright_load: job ──▶ run ──▶ record, figures
//!            │                                               ▲
//!            ▼                                               │ a window
//!   rounds.rs ─▶ measure.rs, sweep/, comparison/, study/, selftest/
//!            │                                               │ statistics
//!            ▼                                               ▼
//!   results: head, options, cells                        diskwright_stats
//!            ├──▶ report/ (chapters) ──▶ diskwright_outline (terminal, page)
//!            └──▶ export/ (CSV, JSON)
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `open.rs`, `backing.rs` | opens targets; the image or server behind a device |
//! | `prepare.rs`, `inspect/`, `fill.rs` | prepares targets; checks before writing; fills them |
//! | `targets.rs`, `chain.rs`, `child.rs` | containers; chains; one operation in a fresh process |
//! | `peer.rs`, `server.rs`, `traffic.rs` | other programs; servers; bytes moved by the kernel |
//! | `guest/` | a virtual machine that measures the disks that it is given |
//! | `fleet/` | the targets of an agent, and the plan of a controller of many |
//! | `network.rs` | an emulated network between the load generator and servers |
//! | `rounds.rs` | the loop of interleaved rounds: order, seeds, stop |
//! | `cells.rs`, `ratio.rs` | measured figures; medians; ratios within rounds |
//! | `measure.rs` | one workload on several targets |
//! | `sweep/`, `comparison/` | a workload over a range of loads; A/B comparison |
//! | `study/`, `paper.rs` | experiments of papers; figures of the VHD paper |
//! | `acceptance/`, `selftest/` | figures compared to promised limits; the load generator itself |
//! | `document.rs`, `output.rs` | results read from files; which file may be written, and how |
//! | `report/`, `export/` | a chapter for each kind of result; CSV, JSON, Markdown |
//!
//! Three rules hold everywhere. A target is compared with its base *within a round*. Before a
//! target is measured, its allocation is checked, and targets of the user that are not fully
//! allocated give a warning. A result names what could not be measured, and has a warning for each
//! reason to doubt a figure.
//!
//! # Running a study
//!
//! ```no_run
//! use diskwright_lab::{
//!     ChildLauncher, ContainersOptions, Step, StudyOptions,
//!     report::{self, TextOptions},
//!     study,
//! };
//!
//! # fn main() -> diskwright_lab::Result<()> {
//! let options = ContainersOptions {
//!     study: StudyOptions { quick: true, ..StudyOptions::default() },
//!     // The program must answer `<itself> measuring-child ARGS...` by
//!     // printing `child_main(ARGS)?` on standard output.
//!     launcher: Some(ChildLauncher::current_exe(["measuring-child"])?),
//!     ..ContainersOptions::default()
//! };
//! // Called between windows. Returning `false` stops the study: it returns its whole rounds, or
//! // `LabError::Stopped` if there is none.
//! let mut progress = |step: Step<'_>| {
//!     eprintln!("{} {}/{} {}", step.phase, step.done, step.total, step.message);
//!     true
//! };
//! let found = study::run(&options, &mut progress)?;
//! print!("{}", report::text(&found.result, &TextOptions::default()));
//! println!("saved to {}", found.saved?.display()); // `found.result` is what `--json` prints
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod acceptance;
mod backing;
pub mod cells;
pub mod chain;
pub mod child;
pub mod comparison;
pub mod document;
mod error;
pub mod export;
pub mod fill;
pub mod fleet;
pub mod guest;
mod inspect;
pub mod measure;
pub mod network;
pub mod open;
pub mod output;
mod paper;
pub mod peer;
pub mod prepare;
pub mod progress;
mod ratio;
pub mod report;
pub mod rounds;
pub mod scratch;
pub mod selftest;
pub mod server;
pub mod study;
pub mod sweep;
pub mod targets;
pub mod traffic;

pub use acceptance::{AcceptanceOptions, AcceptanceRecord};
pub use child::{ChildLauncher, child_main};
pub use error::{LabError, Result};
pub use progress::{Progress, Step};
pub use study::{ContainersOptions, StudyOptions, StudyReport};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
