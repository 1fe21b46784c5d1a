//! Results as CSV (RFC 4180: commas, CRLF, quotes where they are needed), tidy: one observation a row, one variable a column, units in
//! the names of the columns, no totals among the rows unless a column says so.
//!
//! | table | a row is |
//! |---|---|
//! | `figures` | one direction of one thread on one target in one phase; rows whose `scope` is `phase` sum a phase up, because percentiles of parts do not add up |
//! | `series` | one interval of one phase |
//! | `latencies` | one bucket of the histogram of one direction of one phase: `up_to_ns` is the longest latency in it |
//!
//! A column that has no figure is left empty. Sweeps, studies, comparisons and the bench have `figures` only; what a row is there, `studies.rs` says.

use super::studies;
use crate::{
    LabError, Result,
    document::Document,
    record::{DirectionRecord, LatencyRecord, PhaseRecord, Run, Total},
    report::Named,
    sweep::SweepRecord,
};

/// Which table.
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

pub(super) type Rows = ::csv::Writer<Vec<u8>>;

/// Results as one CSV table. All must be of one kind, for each kind has its own columns.
///
/// # Errors
/// [`LabError::BadOptions`] when the kinds are mixed, or the kind has no such table.
pub fn csv(results: &[Named<'_>], table: CsvTable) -> Result<String> {
    let kind = |document: &Document| std::mem::discriminant(document);
    if results.windows(2).any(|pair| kind(pair[0].1) != kind(pair[1].1)) {
        return Err(LabError::BadOptions {
            what: "these results are of several kinds, and each kind has its own columns".into(),
            hint: "make a CSV file of each kind".into(),
        });
    }
    let mut rows = ::csv::WriterBuilder::new().terminator(::csv::Terminator::CRLF).from_writer(Vec::new());
    let written = results.iter().enumerate().try_for_each(|(index, (name, document))| match (document, table) {
        (Document::Run(run), CsvTable::Figures) => run_figures(&mut rows, name, run, index == 0),
        (Document::Run(run), CsvTable::Series) => run_series(&mut rows, name, run, index == 0),
        (Document::Run(run), CsvTable::Latencies) => run_latencies(&mut rows, name, run, index == 0),
        (Document::Sweep(record), CsvTable::Figures) => sweep(&mut rows, name, record, index == 0),
        (document, CsvTable::Figures) => studies::figures(&mut rows, name, document, index == 0),
        _ => Err(LabError::BadOptions {
            what: format!("{name} has no time series and no histograms of its own"),
            hint: "leave out --table".into(),
        }),
    });
    written?;
    let bytes = rows.into_inner().map_err(|error| failed(&error))?;
    String::from_utf8(bytes).map_err(|error| failed(&error))
}

fn failed(error: &dyn std::fmt::Display) -> LabError {
    LabError::BadOptions { what: format!("the CSV could not be written: {error}"), hint: "please report this".into() }
}

pub(super) fn put<'a>(rows: &mut Rows, fields: impl IntoIterator<Item = &'a str>) -> Result<()> {
    rows.write_record(fields).map_err(|error| failed(&error))
}

pub(super) fn put_all(rows: &mut Rows, fields: &[String]) -> Result<()> {
    put(rows, fields.iter().map(String::as_str))
}

const FIGURES: [&str; 31] = [
    "result",
    "started_utc",
    "phase",
    "scope",
    "load",
    "thread",
    "target",
    "target_kind",
    "direction",
    "queue_depth",
    "window_s",
    "ios",
    "bytes",
    "errors",
    "iops",
    "mb_per_s",
    "latency_kind",
    "mean_ns",
    "deviation_ns",
    "min_ns",
    "p50_ns",
    "p90_ns",
    "p99_ns",
    "p99.9_ns",
    "p99.99_ns",
    "p99.999_ns",
    "p99.9999_ns",
    "p99.99999_ns",
    "p99.999999_ns",
    "max_ns",
    "cpu_ns_per_io",
];

fn run_figures(rows: &mut Rows, name: &str, run: &Run, head: bool) -> Result<()> {
    if head {
        put(rows, FIGURES)?;
    }
    for phase in &run.phases {
        let lead = |scope: &str| [name, &run.started_utc, &phase.name, scope].map(str::to_owned).to_vec();
        for thread in &phase.threads {
            let target = run.targets.get(thread.target as usize);
            for (word, direction) in [("read", &thread.reads), ("write", &thread.writes)] {
                let mut row = lead("thread");
                row.extend([
                    thread.load.to_string(),
                    thread.thread.to_string(),
                    target.map_or_else(String::new, |target| target.name.clone()),
                    target.map_or_else(String::new, |target| target.kind.clone()),
                    word.to_owned(),
                    thread.queue_depth.to_string(),
                ]);
                direction_row(&mut row, phase, direction);
                row.push(String::new());
                put_all(rows, &row)?;
            }
        }
        let Total { reads, writes, both, queue_depth, .. } = phase.total();
        for (word, direction) in [("read", &reads), ("write", &writes), ("both", &both)] {
            let mut row = lead("phase");
            row.extend(["", "", "", "", word].map(str::to_owned));
            row.push(queue_depth.to_string());
            direction_row(&mut row, phase, direction);
            row.push(if word == "both" { phase.cpu_ns_per_io().to_string() } else { String::new() });
            put_all(rows, &row)?;
        }
    }
    Ok(())
}

fn direction_row(row: &mut Vec<String>, phase: &PhaseRecord, direction: &DirectionRecord) {
    let seconds = phase.window_s().max(1e-9);
    let latency = direction.latency();
    row.extend([
        phase.window_s().to_string(),
        direction.ios.to_string(),
        direction.bytes.to_string(),
        direction.errors.to_string(),
        (direction.ios as f64 / seconds).to_string(),
        (direction.bytes as f64 / 1e6 / seconds).to_string(),
        if direction.response.is_some() { "response".into() } else { "service".into() },
    ]);
    let any = latency.count > 0;
    let when = |known: bool, value: String| if known { value } else { String::new() };
    row.extend([
        when(any, latency.mean_ns().to_string()),
        when(any, latency.deviation_ns().to_string()),
        when(any, latency.min_ns.to_string()),
    ]);
    row.extend(quantiles(latency));
    row.push(when(any, latency.max_ns.to_string()));
}

/// p50, p90, then one for each nine; empty where fewer than ten requests lie beyond.
fn quantiles(latency: &LatencyRecord) -> impl Iterator<Item = String> {
    let nines = latency.nines();
    let at = move |share: f64, known: bool| {
        latency.quantile_ns(share).filter(|_| known).map_or_else(String::new, |ns| ns.to_string())
    };
    [at(0.5, latency.count >= 20)]
        .into_iter()
        .chain((1..=8).map(move |nine| at(1.0 - 10_f64.powi(-(nine as i32)), nine <= nines)))
}

fn run_series(rows: &mut Rows, name: &str, run: &Run, head: bool) -> Result<()> {
    if head {
        let heads = [
            "result",
            "phase",
            "start_s",
            "interval_s",
            "part",
            "read_iops",
            "read_mb_per_s",
            "write_iops",
            "write_mb_per_s",
            "mean_ns",
            "p50_ns",
            "p99_ns",
            "max_ns",
        ];
        put(rows, heads)?;
    }
    for phase in &run.phases {
        let end = phase.window_start_ns.saturating_add(phase.window_ns);
        for point in &phase.series {
            let length_ns = if point.len_ns > 0 { point.len_ns } else { phase.interval_ns };
            let interval_s = (length_ns as f64 / 1e9).max(1e-9);
            let part = match point.start_ns {
                start if start < phase.window_start_ns => "warm-up",
                start if start < end => "measured",
                _ => "cool-down",
            };
            let row = [
                name.to_owned(),
                phase.name.clone(),
                (point.start_ns as f64 / 1e9).to_string(),
                interval_s.to_string(),
                part.to_owned(),
                (point.read_ios as f64 / interval_s).to_string(),
                (point.read_bytes as f64 / 1e6 / interval_s).to_string(),
                (point.write_ios as f64 / interval_s).to_string(),
                (point.write_bytes as f64 / 1e6 / interval_s).to_string(),
                point.mean_ns.to_string(),
                point.p50_ns.to_string(),
                point.p99_ns.to_string(),
                point.max_ns.to_string(),
            ];
            put_all(rows, &row)?;
        }
    }
    Ok(())
}

fn run_latencies(rows: &mut Rows, name: &str, run: &Run, head: bool) -> Result<()> {
    if head {
        put(rows, ["result", "phase", "direction", "latency_kind", "up_to_ns", "requests", "share_up_to"])?;
    }
    for phase in &run.phases {
        let total = phase.total();
        for (word, direction) in [("read", &total.reads), ("write", &total.writes)] {
            let kinds = [("service", Some(&direction.service)), ("response", direction.response.as_ref())];
            for (kind, latency) in kinds.into_iter().filter_map(|(kind, latency)| Some((kind, latency?))) {
                let mut seen = 0;
                for (up_to, count) in &latency.buckets {
                    seen += count;
                    let share = seen as f64 / latency.count.max(1) as f64;
                    let row = [
                        name.to_owned(),
                        phase.name.clone(),
                        word.to_owned(),
                        kind.to_owned(),
                        up_to.to_string(),
                        count.to_string(),
                        share.to_string(),
                    ];
                    put_all(rows, &row)?;
                }
            }
        }
    }
    Ok(())
}

fn sweep(rows: &mut Rows, name: &str, sweep: &SweepRecord, head: bool) -> Result<()> {
    if head {
        let heads = [
            "result",
            "started_utc",
            "threads",
            "queue_depth",
            "files",
            "in_flight",
            "varied",
            "round",
            "window_s",
            "reads",
            "writes",
            "errors",
            "iops",
            "mb_per_s",
            "mean_ns",
            "p50_ns",
            "p99_ns",
            "p99.9_ns",
            "max_ns",
            "cpu_ns_per_io",
            "depth_reached",
        ];
        put(rows, heads)?;
    }
    for cell in &sweep.cells {
        let varied: Vec<String> =
            cell.point.iter().map(|at| format!("{}={}", at.knob.name(), at.knob.show(at.value))).collect();
        for (round, figures) in cell.rounds.iter().enumerate() {
            let row = [
                name.to_owned(),
                sweep.started_utc.clone(),
                cell.threads.to_string(),
                cell.queue_depth.to_string(),
                cell.files.to_string(),
                cell.total_depth.to_string(),
                varied.join(" "),
                (round + 1).to_string(),
                (figures.window_ns as f64 / 1e9).to_string(),
                figures.reads.to_string(),
                figures.writes.to_string(),
                figures.errors.to_string(),
                figures.iops.to_string(),
                figures.mb_per_s.to_string(),
                figures.mean_ns.to_string(),
                figures.p50_ns.to_string(),
                figures.p99_ns.to_string(),
                figures.p999_ns.to_string(),
                figures.max_ns.to_string(),
                figures.cpu_ns_per_io.to_string(),
                figures.depth_reached.to_string(),
            ];
            put_all(rows, &row)?;
        }
    }
    Ok(())
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
        // 40,000 requests support three nines, not four.
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
        assert_eq!(table(&csv(&[("p", &paths)], CsvTable::Figures).unwrap()).len(), 3 * 3 * 3);
        let bench = Document::Bench(Box::new(example::bench()));
        assert!(!table(&csv(&[("b", &bench)], CsvTable::Figures).unwrap()).is_empty());
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
