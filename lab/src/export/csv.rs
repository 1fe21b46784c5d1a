//! Results as CSV (RFC 4180: commas, CRLF, quotes where needed) in tidy form: one observation per
//! row, one variable per column, units in the column names. A column says which rows are totals.
//!
//! - `figures`: one row for the reads, writes or flushes of one thread on one target in one phase.
//!   Rows with the `scope` `phase` are totals of a phase, because percentiles cannot be added.
//! - `series`: one row per interval of a phase.
//! - `latencies`: one row per bucket of the histogram of one direction of a phase; `up_to_ns` is
//!   the largest latency of the bucket.
//!
//! Only runs have all three tables (`runs.rs`). Sweeps and studies have `figures`, with one row per
//! round of each cell (`cells.rs`). A comparison has one row per compared figure, an acceptance run
//! one per check. A column without a figure is empty.

use super::{judged, runs};
use crate::{
    LabError, Result,
    cells::{self, Cell, Cells},
    document::Document,
    report::Named,
};
use diskwright_outline::Csv;
use std::{borrow::Cow, collections::BTreeSet, io};

/// A table of a CSV file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CsvTable {
    /// Rates, latencies, errors.
    #[default]
    Figures,
    /// The time series of runs.
    Series,
    /// The histograms of runs.
    Latencies,
}

/// Results as one CSV table. All must be of one kind, because each kind has its own columns.
///
/// # Errors
/// [`LabError::BadOptions`] if the kinds are mixed, or if the kind does not have this table.
pub fn csv(results: &[Named<'_>], table: CsvTable) -> Result<String> {
    let kind = |document: &Document| std::mem::discriminant(document);
    if results.windows(2).any(|pair| kind(pair[0].1) != kind(pair[1].1)) {
        return Err(LabError::BadOptions {
            what: "the results are of several kinds, and each kind has its own columns".into(),
            hint: "make a CSV file of each kind".into(),
        });
    }
    let cells: Vec<Cow<'_, [Cell]>> = results.iter().map(|(_, document)| document.cells()).collect();
    let more: BTreeSet<String> = cells.iter().flat_map(|cells| cells::names_of_more(cells)).collect();
    let mut csv = Csv::default();
    for ((name, document), cells) in results.iter().zip(&cells) {
        let written = match (document, table) {
            (Document::Run(run), CsvTable::Figures) => runs::figures(&mut csv, name, run),
            (Document::Run(run), CsvTable::Series) => runs::series(&mut csv, name, run),
            (Document::Run(run), CsvTable::Latencies) => runs::latencies(&mut csv, name, run),
            (Document::Comparison(record), CsvTable::Figures) => judged::comparison(&mut csv, name, record),
            (Document::Acceptance(record), CsvTable::Figures) => judged::acceptance(&mut csv, name, record),
            (document, CsvTable::Figures) => cells::rows(&mut csv, name, document.started_utc(), cells, &more),
            _ => {
                return Err(LabError::BadOptions {
                    what: format!("{name} has no time series and no histograms"),
                    hint: "export its figures instead".into(),
                });
            }
        };
        written.map_err(|error| failed(&error))?;
    }
    csv.finish().map_err(|error| failed(&error))
}

fn failed(error: &io::Error) -> LabError {
    LabError::BadOptions { what: format!("the CSV could not be written: {error}"), hint: "please report this".into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    fn table(text: &str) -> Vec<std::collections::BTreeMap<String, String>> {
        let mut reader = ::csv::Reader::from_reader(text.as_bytes());
        reader.deserialize().map(|row| row.unwrap()).collect()
    }

    #[test]
    fn every_thread_and_direction_has_a_row_and_the_phases_sum_up() {
        let mut run = example::run();
        run.targets[0].name = "a, \"quoted\"\nname".into();
        let document = Document::Run(Box::new(run.clone()));
        let text = csv(&[("r.json", &document)], CsvTable::Figures).unwrap();
        assert!(text.starts_with("result,started_utc,phase,scope") && text.contains("\r\n"));
        let rows = table(&text);
        let threads: usize = run.phases.iter().map(|phase| phase.threads.len() * 2).sum();
        assert_eq!(rows.len(), threads + 3 * run.phases.len());
        assert_eq!(rows[0]["target"], run.targets[0].name);
        let sum: u64 = rows
            .iter()
            .filter(|row| row["phase"] == "main" && row["scope"] == "thread")
            .map(|row| row["ios"].parse::<u64>().unwrap())
            .sum();
        let both = rows.iter().find(|row| row["phase"] == "main" && row["direction"] == "both").unwrap();
        assert_eq!(both["ios"], sum.to_string());
        assert_eq!(both["iops"].parse::<f64>().unwrap(), run.phases[0].iops());
        // 40,000 requests support three nines.
        assert!(!both["p99.9_ns"].is_empty() && both["p99.99_ns"].is_empty(), "{both:?}");
    }

    #[test]
    fn the_other_tables_are_complete() {
        let run = example::run();
        let document = Document::Run(Box::new(run.clone()));
        let series = table(&csv(&[("r", &document)], CsvTable::Series).unwrap());
        assert_eq!(series.len(), run.phases.iter().map(|phase| phase.series.len()).sum::<usize>());
        assert_eq!(series.iter().filter(|row| row["phase"] == "main" && row["part"] == "warm-up").count(), 12);
        let latencies = table(&csv(&[("r", &document)], CsvTable::Latencies).unwrap());
        let requests: u64 = latencies
            .iter()
            .filter(|row| row["phase"] == "main")
            .map(|row| row["requests"].parse::<u64>().unwrap())
            .sum();
        assert_eq!(requests, run.phases[0].total().both.ios);
        let study = Document::Containers(Box::new(example::containers()));
        assert!(table(&csv(&[("s", &study)], CsvTable::Figures).unwrap()).len() > 10);
        let sweep = Document::Sweep(Box::new(example::sweep()));
        assert_eq!(table(&csv(&[("d", &sweep)], CsvTable::Figures).unwrap()).len(), 7 * 3);
        let paths = Document::AccessPaths(Box::new(crate::study::access_paths::example::result()));
        assert_eq!(table(&csv(&[("p", &paths)], CsvTable::Figures).unwrap()).len(), 3 * 11 * 3);
        let acceptance = Document::Acceptance(Box::new(example::acceptance()));
        assert!(!table(&csv(&[("b", &acceptance)], CsvTable::Figures).unwrap()).is_empty());
    }

    #[test]
    fn kinds_are_not_mixed() {
        let run = Document::Run(Box::new(example::run()));
        let study = Document::Containers(Box::new(example::containers()));
        let error = csv(&[("r", &run), ("s", &study)], CsvTable::Figures).unwrap_err().to_string();
        assert!(error.contains("several kinds"), "{error}");
        assert!(csv(&[("s", &study)], CsvTable::Series).is_err());
    }
}
