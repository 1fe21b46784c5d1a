//! The laboratory: what a disk costs, measured so that the answer can be believed.
//!
//! ```text
//!   workload, job ──▶ run ──────▶ record ──▶ measure, sweep, contest ──▶ stats ──▶ study, bench ──▶ result (JSON), table (text)
//!   what is asked     the loop    what was   rounds in turns             medians   experiments,
//!                                 found                                  ratios    promises
//! ```
//!
//! | file | room |
//! |---|---|
//! | `workload.rs` | workloads as data; the VHD paper's sixteen |
//! | `job/`, `record.rs` | everything that a run does, as data; everything that it found |
//! | `data.rs`, `fill.rs` | contents that can be checked without being kept; filling and verifying a target |
//! | `null.rs` | the target that does nothing: the generator's ceiling |
//! | `profiles/` | jobs as TOML: the papers', VMFleet's, the user's |
//! | `steady.rs` | SNIA's rule of five rounds |
//! | `prepare.rs` | from what a user named to targets that may be measured |
//! | `behind.rs` | what a target shows that is no file: an export, an attached disk |
//! | `server.rs` | servers as children, and what they cost |
//! | `screen/` | a run as text |
//! | `inspect/` | before a run: what a target holds, who uses it, whether it may be written |
//! | `run/` | the generator: carries a job out, by threads, requests, schedules, latencies, series |
//! | `stats.rs`, `measure.rs` | pure statistics; targets in turns, ratios within rounds |
//! | `figures.rs`, `inference/` | the few figures that are compared; what may be concluded from few rounds |
//! | `knee/`, `sweep/` | how much load is enough, with intervals; a workload over a range of loads |
//! | `targets.rs`, `chain.rs`, `child.rs` | the containers under comparison; chains; opening in a fresh process |
//! | `machine.rs`, `warning.rs`, `result.rs`, `table.rs` | what it was measured on, reasons for doubt, JSON, text |
//! | `output.rs`, `document.rs`, `json.rs` | which file may be written, and how; results as files |
//! | `report/`, `export/` | pages with plots; CSV, Markdown |
//! | `diskspd/` | DiskSpd's switches, profiles and reports |
//! | `paper.rs` | the paper's own figures |
//! | `study/`, `bench/` | the paper's experiments; the engine's promises against its peers |
//!
//! Three rules hold throughout. A target is compared with its base *within a round*, never across.
//! A target is filled, read back and found allocated before it is measured, or it is not measured.
//! What could not be measured is left out by name, and what makes a figure doubtful is said beside
//! it.
//!
//! # Running a study
//!
//! ```no_run
//! use diskwright_lab::{ChildLauncher, ContainersOptions, Step, StudyOptions, study};
//!
//! # fn main() -> diskwright_lab::Result<()> {
//! let options = ContainersOptions {
//!     study: StudyOptions { quick: true, ..StudyOptions::default() },
//!     // The program must answer `<itself> bench-child ARGS...` by printing `child_main(ARGS)?` on standard output.
//!     launcher: Some(ChildLauncher::current_exe(["bench-child"])?),
//!     ..ContainersOptions::default()
//! };
//! // Called between cells, never while one is measured. `false` stops the run: it cleans up and ends with `LabError::Stopped`.
//! let mut progress = |step: Step<'_>| {
//!     eprintln!("{} {}/{} {}", step.phase, step.done, step.total, step.message);
//!     true
//! };
//! let report = study::run(&options, &mut progress)?;
//! print!("{}", study::render(&report.result, false)); // `true` for a terminal with colours
//! println!("saved to {}", report.saved?.display()); // `report.result` is what `--json` prints
//! # Ok(())
//! # }
//! ```
//!
//! # Running the bench
//!
//! ```no_run
//! use diskwright_lab::{BenchOptions, ChildLauncher, Row, bench, progress::Silent};
//!
//! # fn main() -> diskwright_lab::Result<()> {
//! let options = BenchOptions { launcher: Some(ChildLauncher::current_exe(["bench-child"])?), ..BenchOptions::default() };
//! // No rows means all of them; `Row::from_name("open-chain")` finds one by its name, `Row::ALL` has their names and titles.
//! let report = bench::run(&[Row::OpenChain, Row::CreateFixed], &options, &mut Silent)?;
//! print!("{}", bench::render(&report, false));
//! std::process::exit(if report.passed() { 0 } else { 1 });
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod behind;
pub mod bench;
pub mod chain;
pub mod child;
pub mod clock;
pub mod contest;
pub mod data;
pub mod diskspd;
pub mod document;
pub mod error;
pub mod export;
pub mod figures;
pub mod fill;
pub mod inference;
pub mod inspect;
pub mod job;
pub mod json;
pub mod knee;
pub mod machine;
pub mod measure;
pub mod null;
pub mod output;
pub mod paper;
pub mod prepare;
pub mod profiles;
pub mod progress;
pub mod record;
pub mod report;
pub mod result;
pub mod run;
pub mod scratch;
pub mod screen;
mod seeds;
mod server;
pub mod stats;
pub mod steady;
pub mod study;
pub mod sweep;
pub mod table;
pub mod targets;
mod traffic;
pub mod warning;
pub mod workload;

pub use bench::{BenchOptions, BenchReport, Row};
pub use child::{ChildLauncher, child_main};
pub use error::{LabError, Result};
pub use job::Job;
pub use null::NullDevice;
pub use progress::{Progress, Step};
pub use record::Run;
pub use study::{ContainersOptions, StudyOptions, StudyReport};
pub use workload::Workload;
