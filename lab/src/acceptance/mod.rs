//! Acceptance runs: compares measured figures with promised limits.
//!
//! A [`Row`] is one promise. It prepares its files, measures our side and the peer in interleaved
//! rounds, and checks each figure against a [`Bar`]. [`run`] runs a list of rows. The lab has the
//! rows about its load generator ([`crate::selftest`]); the program `diskwright-bench` has the rows
//! about disks and servers.
//!
//! ```text
//!   rows ──▶ run ──▶ a row: files in the scratch folder, rounds ──▶ Check (figure, Bar, Outcome)
//!             └────▶ AcceptanceRecord ──▶ report/acceptance.rs, export/judged.rs
//! ```
//!
//! | file | room |
//! |---|---|
//! | `judge.rs` | limits, and outcomes of checks |
//! | `record.rs` | the record of a run |
//!
//! A row is *skipped* if its peer is not installed, or if the machine lacks something that it
//! needs. It is never counted as passed. A row that cannot be run counts as failed; the other rows
//! are run.

mod judge;
mod record;

pub use judge::{Bar, Check, Outcome};
pub use record::{AcceptanceRecord, AcceptanceWithSummary, CheckSummary, RowResult, SCHEMA};

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
pub type MeasureRow = fn(&Context<'_>, &mut dyn Progress) -> Result<RowOutcome>;

/// A promise, and how it is measured.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Name to select the row.
    pub name: &'static str,
    /// The promise as a sentence.
    pub title: &'static str,
    /// Measures the row. Its scratch folder is empty when it begins.
    pub measure: MeasureRow,
}

/// Options of an acceptance run.
#[derive(Debug, Clone, Default)]
pub struct AcceptanceOptions {
    /// Smaller disks, fewer rounds, shorter cells; the outcome is less certain.
    pub quick: bool,
    /// Parent of the scratch folder. `None`: the current folder.
    pub dir: Option<PathBuf>,
    /// Rounds of each comparison. `None`: the row's own number.
    pub rounds: Option<usize>,
    /// Time of one cell, warm-up included. `None`: the row's own time.
    pub cell: Option<Duration>,
    /// I/O engine of our side.
    pub engine: EngineKind,
    /// Starts fresh processes to measure in. If `None`, rows that need one are skipped.
    pub launcher: Option<ChildLauncher>,
    /// Keep the scratch folder.
    pub keep: bool,
}

/// Input of every row.
#[derive(Debug)]
pub struct Context<'a> {
    /// The user's options.
    pub options: &'a AcceptanceOptions,
    /// Folder for the row's files.
    pub scratch: Scratch,
}

/// Result of a row.
#[derive(Debug, Default)]
pub struct RowOutcome {
    /// Figures with their limits and outcomes.
    pub checks: Vec<Check>,
    /// Notes for the reader.
    pub notes: Vec<String>,
    /// Number of checks that may fail or be unsure while the row still passes.
    pub may_miss: usize,
}

impl RowOutcome {
    /// A row that this machine cannot run.
    pub fn skipped(name: &str, why: impl Into<String>) -> Self {
        Self { checks: vec![Check::skipped(name, why)], ..Self::default() }
    }
}

impl Context<'_> {
    /// `quick` in a quick run, else `full`.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.options.quick { quick } else { full }
    }

    /// Number of rounds: the option, else `usual`; at least 1.
    pub fn rounds(&self, usual: usize) -> usize {
        self.options.rounds.unwrap_or(usual).max(1)
    }

    /// Time of one cell: the option, else 0.1 s in a quick run and 0.25 s in a full one.
    pub fn cell(&self) -> Duration {
        self.options.cell.unwrap_or_else(|| Duration::from_millis(self.pick(100, 250)))
    }

    /// Options to fill and open a disk of `size_bytes`.
    pub fn preparation(&self, size_bytes: u64, cache: CacheMode) -> Preparation {
        Preparation { size_bytes, seed: SEED, cache, engine: self.options.engine }
    }
}

/// Runs `rows` in turn; `title` is [`AcceptanceRecord::title`]. A row that cannot be run counts as
/// failed, with its error, and the other rows are run. If `progress` stops the run, the finished
/// rows are kept ([`AcceptanceRecord::stopped`]).
///
/// # Errors
/// If the scratch folder cannot be created, or cannot be emptied between rows.
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
        Err(error) => RowOutcome { checks: vec![Check::broken(row.name, error.to_string())], ..RowOutcome::default() },
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

/// Empties the scratch folder for the next row, and waits until the file system has freed the
/// space.
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
        Ok(RowOutcome { checks: vec![check], ..RowOutcome::default() })
    };
    const BROKEN: MeasureRow = |_, _| Err(LabError::BadOptions { what: "no disk".into(), hint: "add one".into() });
    const SKIPPED: MeasureRow = |_, _| Ok(RowOutcome::skipped("a figure", "no peer"));

    /// Runs rows in a folder that is empty afterwards.
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
        // A signal may also end the peers, so a failure of the last row does not count.
        record.stopped_by_signal();
        assert_eq!(record.rows.len(), 1);
        record.rows[0].outcome = Outcome::Fail;
        record.stopped_by_signal();
        assert!(record.rows.is_empty());
    }
}
