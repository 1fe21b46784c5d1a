//! Acceptance runs: figures measured against what is promised of them.
//!
//! A [`Row`] is one promise: it prepares its files, measures ours and the peer's in turns over
//! several rounds, and judges each figure against a [`Bar`]. [`run`] carries out a list of rows.
//! The lab has the rows about its own load generator ([`crate::selftest`]); the program
//! `diskwright-bench` has the rows about disks and servers.
//!
//! ```text
//!   rows ──▶ run ──▶ a row: files in the scratch folder, rounds ──▶ Check (figure, Bar, Outcome)
//!             └────▶ AcceptanceRecord ──▶ report/acceptance.rs, export/judged.rs
//! ```
//!
//! | file | room |
//! |---|---|
//! | `judge.rs` | bars, and the outcome of a figure |
//! | `record.rs` | the record of a run |
//!
//! A row whose peer is not installed, or which needs what this machine does not have, is *skipped
//! by name* and never counted as passed. A row that fails to run counts as failed, and the others
//! go on.

mod judge;
mod record;

pub use judge::{Bar, Check, Outcome};
pub use record::{AcceptanceRecord, RowResult, SCHEMA};

use crate::{
    LabError, Result,
    child::{ChildLauncher, engine_word},
    peer,
    progress::{Progress, report},
    scratch::Scratch,
    targets::Preparation,
};
use diskwright_load::{
    clock,
    machine::{Machine, OtherLoad, Place, Versions},
    warning::Warning,
};
use diskwright_store::{CacheMode, EngineKind};
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

/// Seed of all contents and requests; see [`diskwright_load::seeds`].
pub const SEED: u64 = 0x6265_6e63;

/// Measures one row.
pub type MeasureRow = fn(&Context<'_>, &mut dyn Progress) -> Result<Found>;

/// One promise.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The name by which the row is selected.
    pub name: &'static str,
    /// The promise, in words.
    pub title: &'static str,
    /// Measures the row in a scratch folder that is empty when the row begins.
    pub measure: MeasureRow,
}

/// How to run.
#[derive(Debug, Clone, Default)]
pub struct AcceptanceOptions {
    /// Smaller disks, fewer blocks, shorter cells: a look, not a proof.
    pub quick: bool,
    /// Where to make the scratch folder. `None` is the current folder.
    pub dir: Option<PathBuf>,
    /// Rounds of each comparison. `None` is each row's own number.
    pub rounds: Option<usize>,
    /// Time of one cell, warm-up included. `None` is each row's own time.
    pub cell: Option<Duration>,
    /// The I/O engine of our side.
    pub engine: EngineKind,
    /// How to measure in a fresh process. Without it, the rows that need one are skipped.
    pub launcher: Option<ChildLauncher>,
    /// Keep the scratch folder.
    pub keep: bool,
}

/// What every row is given.
#[derive(Debug)]
pub struct Context<'a> {
    /// The user's options.
    pub options: &'a AcceptanceOptions,
    /// The folder for the row's files.
    pub scratch: Scratch,
}

/// What a row gives back.
#[derive(Debug, Default)]
pub struct Found {
    /// The figures that were judged.
    pub checks: Vec<Check>,
    /// What a reader must know.
    pub notes: Vec<String>,
    /// Number of checks that may fail or stay open while the row still passes.
    pub may_miss: usize,
}

impl Found {
    /// A row that cannot be run on this machine.
    pub fn skipped(name: &str, why: impl Into<String>) -> Self {
        Self { checks: vec![Check::skipped(name, why)], ..Self::default() }
    }
}

impl Context<'_> {
    /// `quick` with the option of that name, else `full`.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.options.quick { quick } else { full }
    }

    /// Number of rounds: the user's, else `usual`; at least 1.
    pub fn rounds(&self, usual: usize) -> usize {
        self.options.rounds.unwrap_or(usual).max(1)
    }

    /// Time of one cell: the user's, else 0.1 s with `quick` and 0.25 s without.
    pub fn cell(&self) -> Duration {
        self.options.cell.unwrap_or_else(|| Duration::from_millis(self.pick(100, 250)))
    }

    /// How a disk of `size_bytes` is filled and opened.
    pub fn preparation(&self, size_bytes: u64, cache: CacheMode) -> Preparation {
        Preparation { size_bytes, seed: SEED, cache, engine: self.options.engine }
    }
}

/// Runs `rows` one after the other; `title` is [`AcceptanceRecord::title`]. A row that fails to run
/// counts as failed, with the reason, and the others go on. When `progress` stops the run, the rows
/// that were finished are kept ([`AcceptanceRecord::stopped`]).
///
/// # Errors
/// When the scratch folder cannot be made, or cannot be emptied between rows.
pub fn run(
    title: &str,
    rows: &[Row],
    options: &AcceptanceOptions,
    progress: &mut dyn Progress,
) -> Result<AcceptanceRecord> {
    let start = Instant::now();
    let started_utc = clock::compact_utc_now();
    let machine = Machine::detect();
    let context = Context { options, scratch: Scratch::new(options.dir.as_deref(), options.keep)? };
    let place = Place::detect(context.scratch.path());
    let mut warnings = Vec::new();
    if cfg!(debug_assertions) {
        warnings.push(Warning::DebugBuild);
    }
    let watch = OtherLoad::watch();
    let peers_cpu = clock::CpuTime::of_children();
    let mut measured = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let result = report(progress, "row", index as u64, rows.len() as u64, row.name)
            .and_then(|()| run_row(row, &context, progress));
        match result {
            Ok(row) => measured.push(row),
            Err(LabError::Stopped) => break,
            Err(error) => return Err(error),
        }
    }
    let (busy, stolen) = watch.since();
    let peers_ns = (clock::CpuTime::of_children() - peers_cpu).total_ns();
    let busy = busy - peers_ns as f64 / (start.elapsed().as_nanos() as f64).max(1.0);
    if busy > 0.25 {
        warnings.push(Warning::OtherLoad { cpus: busy });
    }
    if stolen > 0.05 {
        warnings.push(Warning::StolenTime { cpus: stolen });
    }
    Ok(AcceptanceRecord {
        schema: SCHEMA.into(),
        title: title.to_owned(),
        started_utc,
        took_ns: start.elapsed().as_nanos() as u64,
        machine,
        place,
        versions: Versions { qemu: peer::qemu_version(), ..Versions::detect() },
        quick: options.quick,
        engine: engine_word(options.engine).into(),
        stopped: measured.len() < rows.len(),
        rows: measured,
        warnings,
    })
}

fn run_row(row: &Row, context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowResult> {
    let start = Instant::now();
    let found = match (row.measure)(context, progress) {
        Ok(found) => found,
        Err(LabError::Stopped) => return Err(LabError::Stopped),
        Err(error) => Found { checks: vec![Check::broken(row.name, error.to_string())], ..Found::default() },
    };
    remove_contents(context)?;
    Ok(RowResult {
        row: row.name.into(),
        title: row.title.into(),
        outcome: judge::worst(&found.checks, found.may_miss),
        checks: found.checks,
        notes: found.notes,
        took_ns: start.elapsed().as_nanos() as u64,
    })
}

/// Empties the scratch folder for the next row, and lets the file system finish its work.
fn remove_contents(context: &Context<'_>) -> Result<()> {
    if context.options.keep {
        return Ok(());
    }
    let dir = context.scratch.path();
    let failed = || LabError::file("empty the scratch folder", dir);
    for entry in std::fs::read_dir(dir).map_err(failed())? {
        let path = entry.map_err(failed())?.path();
        let removed = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        removed.map_err(LabError::file("remove", &path))?;
    }
    context.scratch.settle()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::{Silent, Step};
    use std::fs;

    fn row(name: &'static str, measure: MeasureRow) -> Row {
        Row { name, title: "a promise", measure }
    }

    const KEPT: MeasureRow = |context, _| {
        assert_eq!(fs::read_dir(context.scratch.path()).unwrap().count(), 0, "the row before left its files");
        fs::write(context.scratch.path().join("file"), "data").unwrap();
        let check = Check::absolute("a figure", "ns", &[1.0], Bar::AtMost(2.0));
        Ok(Found { checks: vec![check], ..Found::default() })
    };
    const BROKEN: MeasureRow = |_, _| Err(LabError::BadOptions { what: "no disk".into(), hint: "add one".into() });
    const SKIPPED: MeasureRow = |_, _| Ok(Found::skipped("a figure", "no peer"));

    /// Runs rows in a folder that must be empty afterwards.
    fn run_in_a_folder(rows: &[Row], progress: &mut dyn Progress) -> AcceptanceRecord {
        let home = tempfile::tempdir().unwrap();
        let options =
            AcceptanceOptions { quick: true, dir: Some(home.path().to_owned()), ..AcceptanceOptions::default() };
        let record = run("Test", rows, &options, progress).unwrap();
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0, "scratch files were left behind");
        record
    }

    #[test]
    fn a_row_that_fails_to_run_is_a_failure_and_the_others_go_on() {
        let rows = [row("kept", KEPT), row("broken", BROKEN), row("again", KEPT), row("skipped", SKIPPED)];
        let record = run_in_a_folder(&rows, &mut Silent);
        let outcomes: Vec<_> = record.rows.iter().map(|row| (row.row.as_str(), row.outcome)).collect();
        assert_eq!(
            outcomes,
            [
                ("kept", Outcome::Pass),
                ("broken", Outcome::Fail),
                ("again", Outcome::Pass),
                ("skipped", Outcome::Skipped)
            ]
        );
        assert!(record.rows[1].checks[0].why.as_deref().unwrap().contains("no disk"));
        assert!(!record.passed() && !record.stopped);
        let again: AcceptanceRecord = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        assert_eq!(again, record);
    }

    #[test]
    fn a_stopped_run_keeps_the_finished_rows() {
        let first_row_only = &mut |step: Step<'_>| step.phase != "row" || step.done == 0;
        let mut record = run_in_a_folder(&[row("kept", KEPT), row("again", KEPT)], first_row_only);
        assert!(record.stopped && record.rows.len() == 1);
        // A signal reaches the peers too: a last row that failed says nothing.
        record.stopped_by_signal();
        assert_eq!(record.rows.len(), 1);
        record.rows[0].outcome = Outcome::Fail;
        record.stopped_by_signal();
        assert!(record.rows.is_empty());
    }
}
