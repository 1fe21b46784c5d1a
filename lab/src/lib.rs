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
//! | file | room |
//! |---|---|
//! | `open.rs`, `backing.rs` | opens targets; the image or server behind a device |
//! | `prepare.rs`, `inspect/`, `fill.rs` | may a target be written, what it holds; filling it |
//! | `targets.rs`, `chain.rs`, `child.rs` | the containers; chains; opening in a fresh process |
//! | `peer.rs`, `server.rs`, `traffic.rs` | other programs; servers; bytes that reached storage |
//! | `rounds.rs` | the loop in which cells are measured by turns: order, seeds, stop |
//! | `cells.rs`, `ratio.rs` | what was measured; medians, and ratios within rounds |
//! | `measure.rs` | one workload on several targets |
//! | `sweep/`, `comparison/` | a workload over a range of loads; A against B |
//! | `study/`, `paper.rs` | the papers' experiments; the papers' own figures |
//! | `acceptance/`, `selftest/` | figures against promises; the load generator against fio |
//! | `document.rs`, `output.rs` | results as files; which file may be written, and how |
//! | `report/`, `export/` | a chapter for each kind of result; CSV and JSON |
//!
//! Three rules hold everywhere. A target is compared with its base *within a round*. A target is
//! measured only after it was filled, read back and found to be allocated. A result names what
//! could not be measured, and has a warning for each circumstance that makes a figure doubtful.
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
//! // Called between windows, never while one is measured. `false` stops the study: it keeps the
//! // whole rounds that there are, or ends with `LabError::Stopped` where there is none.
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
pub mod backing;
pub mod cells;
pub mod chain;
pub mod child;
pub mod comparison;
pub mod document;
pub mod error;
pub mod export;
pub mod fill;
pub mod inspect;
pub mod measure;
pub mod open;
pub mod output;
pub mod paper;
pub mod peer;
pub mod prepare;
pub mod progress;
pub mod ratio;
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
