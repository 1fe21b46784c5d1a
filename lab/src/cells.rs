//! The common form of measured figures: a *cell* is a subject under a load, with the figures of
//! each round.
//!
//! ```text
//!   result ──▶ cells ──┬─▶ medians, ratios to a base: chapters, verdicts
//!                      ├─▶ summary: printed by `--json` with the result
//!                      └─▶ rows: one per round, for CSV
//! ```
//!
//! Medians, ratios and ranges are computed from the cells and are not stored. A script finds the
//! IOPS of every kind of measurement in `summary[0].iops`.
//!
//! What a result stores although it could be computed again are its conclusions: the verdict of
//! every result, the knees and the best cells of a sweep, the tests of a comparison and which
//! `--fail-if` was true, the findings of a study of queue depth. They depend on rules and limits of
//! the program that measured. A later version may have other rules, and a report of an old result
//! must not contradict the exit code and the sentence that the user has seen. [`Figures`] are
//! computed from histograms, which only a run keeps: those of hundreds of cells would be too large.

use crate::ratio::Ratio;
use diskwright_load::{Run, figures::Figures, record::PhaseRecord};
use diskwright_outline::Csv;
use diskwright_stats::summary::{Summary, median};
use serde::{Deserialize, Serialize};
use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    io,
};

/// A subject under a load.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Cell {
    /// The part of the measurement: a phase, a stage, an experiment of a study. Empty if there is
    /// only one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub part: String,
    /// Name of the workload.
    pub load: String,
    /// What was measured: a target, a container, a way to a disk.
    pub subject: String,
    /// Configured queue depth, summed over all threads.
    pub in_flight: u64,
    /// The rounds in their order. With interleaved rounds, round `n` of all cells was measured at
    /// about the same time.
    pub rounds: Vec<Figures>,
    /// Figures that only this experiment has, one per round, by their names in CSV.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub more: BTreeMap<String, Vec<Option<f64>>>,
}

impl Cell {
    /// A cell without rounds.
    pub fn new(part: &str, load: &str, subject: &str, in_flight: u64) -> Self {
        let [part, load, subject] = [part, load, subject].map(str::to_owned);
        Self { part, load, subject, in_flight, ..Self::default() }
    }

    /// The cell with these rounds.
    pub fn with_rounds(self, rounds: Vec<Figures>) -> Self {
        Self { rounds, ..self }
    }

    /// Removes all rounds after the first `whole`.
    pub fn truncate(&mut self, whole: usize) {
        self.rounds.truncate(whole);
        self.more.values_mut().for_each(|values| values.truncate(whole));
    }

    /// A figure of each round.
    pub fn each(&self, figure: impl Fn(&Figures) -> f64) -> Vec<f64> {
        self.rounds.iter().map(figure).collect()
    }

    /// Whether a request completed in any round. If none did, nothing was measured: such a cell has
    /// no medians and no ratios.
    pub fn is_measured(&self) -> bool {
        self.rounds.iter().any(|round| round.iops > 0.0)
    }

    /// Median, min, max and standard deviation of a figure; `None` if nothing was measured.
    pub fn summary_of(&self, figure: impl Fn(&Figures) -> f64) -> Option<Summary> {
        Summary::of(&self.each(figure)).filter(|_| self.is_measured())
    }

    /// The median of a figure; `None` if nothing was measured.
    pub fn median(&self, figure: impl Fn(&Figures) -> f64) -> Option<f64> {
        median(&self.each(figure)).filter(|_| self.is_measured())
    }

    /// The medians of all figures; `None` if nothing was measured.
    pub fn medians(&self) -> Option<Figures> {
        Figures::medians(&self.rounds).filter(|_| self.is_measured())
    }

    /// A figure as a ratio to the same round of `base`; `None` if no round has both, or nothing was
    /// measured.
    pub fn ratio(&self, base: &Self, figure: impl Fn(&Figures) -> f64) -> Option<Ratio> {
        Ratio::of(&self.each(&figure), &base.each(&figure)).filter(|_| self.is_measured() && base.is_measured())
    }

    /// The figure of [`Cell::more`] with this name in each round; `None` if any round lacks it.
    pub fn more(&self, name: &str) -> Option<Vec<f64>> {
        self.more.get(name)?.iter().copied().collect()
    }

    /// Adds a figure of the latest round under this name.
    pub fn push_more(&mut self, name: &str, value: Option<f64>) {
        self.more.entry(name.to_owned()).or_default().push(value);
    }

    /// The load with its queue depth: `4K random read at QD 32`.
    pub fn title(&self) -> String {
        title(&self.load, self.in_flight)
    }

    /// The names of the cell with the medians, for scripts; `None` without a round.
    pub fn summary(&self) -> Option<CellSummary> {
        Some(CellSummary {
            part: self.part.clone(),
            load: self.load.clone(),
            subject: self.subject.clone(),
            in_flight: self.in_flight,
            rounds: self.rounds.len(),
            medians: self.medians()?,
        })
    }
}

/// A load with its queue depth: `4K random read at QD 32`.
pub fn title(load: &str, in_flight: u64) -> String {
    format!("{load} at QD {in_flight}")
}

/// All cells of one part under one load. The first is the base of the ratios.
#[derive(Debug, Clone)]
pub struct Compared<'a> {
    /// Part of the cells, see [`Cell::part`].
    pub part: &'a str,
    /// Load of the cells, see [`Cell::load`].
    pub load: &'a str,
    /// Queue depth of the cells, see [`Cell::in_flight`].
    pub in_flight: u64,
    /// The cells, one per subject.
    pub cells: Vec<&'a Cell>,
}

impl<'a> Compared<'a> {
    /// All parts and loads in the order of their first cells.
    pub fn all(cells: &'a [Cell]) -> Vec<Self> {
        let mut loads: Vec<Self> = Vec::new();
        for cell in cells {
            let Cell { part, load, in_flight, .. } = cell;
            match loads.iter_mut().find(|one| (one.part, one.load, one.in_flight) == (part, load, *in_flight)) {
                Some(known) => known.cells.push(cell),
                None => loads.push(Self { part, load, in_flight: *in_flight, cells: vec![cell] }),
            }
        }
        loads
    }

    /// The loads of one part.
    pub fn of_part(cells: &'a [Cell], part: &str) -> Vec<Self> {
        Self::all(cells).into_iter().filter(|one| one.part == part).collect()
    }

    /// The cell of a subject; `None` if it was not measured.
    pub fn cell(&self, subject: &str) -> Option<&'a Cell> {
        self.cells.iter().copied().find(|cell| cell.subject == subject)
    }

    /// A figure of a subject as a ratio to the base, round by round; `None` for the base, and for a
    /// subject that was not measured.
    pub fn ratio(&self, subject: &str, figure: impl Fn(&Cell) -> Vec<f64>) -> Option<Ratio> {
        let (base, cell) = (self.cells.first()?, self.cell(subject)?);
        if std::ptr::eq(*base, cell) { None } else { Ratio::of(&figure(cell), &figure(base)) }
    }

    /// Every cell except the base, with a figure as a ratio to the base.
    pub fn ratios(&self, figure: impl Fn(&Figures) -> f64 + Copy) -> impl Iterator<Item = (&'a Cell, Option<Ratio>)> {
        let base = self.cells.first().copied();
        let others = self.cells.clone().into_iter().skip(1);
        others.map(move |cell| (cell, base.and_then(|base| cell.ratio(base, figure))))
    }

    /// Medians of the ratios to the base, in the order of the cells; `None` for the base.
    pub fn median_ratios(&self, figure: impl Fn(&Figures) -> f64 + Copy) -> Vec<Option<f64>> {
        let ratios = self.ratios(figure).map(|(_, ratio)| ratio.as_ref().map(Ratio::median));
        std::iter::once(None).chain(ratios).collect()
    }
}

/// A result that consists of cells.
pub trait Cells {
    /// All cells, in the order in which reports show them.
    fn cells(&self) -> Cow<'_, [Cell]>;
}

/// Medians of the rounds of a cell.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct CellSummary {
    /// Part of the measurement; left out if it is empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub part: String,
    /// Name of the workload.
    pub load: String,
    /// The measured target, container or way to a disk.
    pub subject: String,
    /// Configured queue depth, summed over all threads.
    pub in_flight: u64,
    /// Number of rounds.
    pub rounds: usize,
    /// Median of each figure over the rounds.
    #[serde(flatten)]
    pub medians: Figures,
}

/// A result with its summary, as `--json` prints it.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct WithSummary<'a, T: Serialize> {
    #[serde(flatten)]
    result: &'a T,
    /// Medians of each cell. Only printed, not saved.
    summary: Vec<CellSummary>,
}

impl<'a, T: Serialize + Cells> WithSummary<'a, T> {
    /// Adds the summary to a result.
    pub fn of(result: &'a T) -> Self {
        Self { result, summary: result.cells().iter().filter_map(Cell::summary).collect() }
    }
}

/// Names of all additional figures ([`Cell::more`]) of `cells`.
pub(crate) fn names_of_more(cells: &[Cell]) -> BTreeSet<String> {
    cells.iter().flat_map(|cell| cell.more.keys().cloned()).collect()
}

/// Writes one CSV record per round of each cell, with the result's name and time first. `more`
/// names the last columns; see [`names_of_more`].
pub(crate) fn rows(
    csv: &mut Csv,
    name: &str,
    started_utc: &str,
    cells: &[Cell],
    more: &BTreeSet<String>,
) -> io::Result<()> {
    for cell in cells {
        for (number, round) in cell.rounds.iter().enumerate() {
            let text = |value: f64| value.to_string();
            let mut record = vec![
                ("result", name.to_owned()),
                ("started_utc", started_utc.to_owned()),
                ("part", cell.part.clone()),
                ("load", cell.load.clone()),
                ("subject", cell.subject.clone()),
                ("in_flight", cell.in_flight.to_string()),
                ("round", (number + 1).to_string()),
                ("window_s", text(round.window_ns as f64 / 1e9)),
                ("reads", round.reads.to_string()),
                ("writes", round.writes.to_string()),
                ("errors", round.errors.to_string()),
                ("iops", text(round.iops)),
                ("mb_per_s", text(round.mb_per_s)),
                ("mean_ns", text(round.mean_ns)),
                ("p50_ns", text(round.p50_ns)),
                ("p99_ns", text(round.p99_ns)),
                ("p99.9_ns", text(round.p999_ns)),
                ("max_ns", text(round.max_ns)),
                ("cpu_ns_per_io", text(round.cpu_ns_per_io)),
                ("machine_cpu_ns_per_io", text(round.machine_cpu_ns_per_io)),
                ("depth_reached", text(round.depth_reached)),
            ];
            record.extend(more.iter().map(|head| {
                let value = cell.more.get(head).and_then(|values| *values.get(number)?);
                (head.as_str(), value.map_or_else(String::new, text))
            }));
            csv.record(&record)?;
        }
    }
    Ok(())
}

impl Cells for Run {
    fn cells(&self) -> Cow<'_, [Cell]> {
        let targets: Vec<&str> = self.targets.iter().map(|target| target.name.as_str()).collect();
        let subject = targets.join(", ");
        let of = |phase: &PhaseRecord| {
            let planned = self.job.phases.iter().find(|planned| planned.name == phase.name);
            let loads: Vec<String> =
                planned.iter().flat_map(|planned| &planned.loads).map(|load| load.title()).collect();
            let load = if loads.is_empty() { self.job.name.clone() } else { loads.join(" beside ") };
            let figures = Figures::of(phase);
            Cell::new(&phase.name, &load, &subject, figures.queue_depth).with_rounds(vec![figures])
        };
        self.phases.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(load: &str, subject: &str, iops: &[f64]) -> Cell {
        let round = |iops: &f64| Figures { iops: *iops, cpu_ns_per_io: 1e6 / iops, ..Figures::default() };
        Cell::new("main", load, subject, 8).with_rounds(iops.iter().map(round).collect())
    }

    #[test]
    fn ratios_are_taken_within_rounds() {
        // The machine's speed is halved after the first round.
        let (base, ours) = (cell("read", "raw file", &[100.0, 50.0]), cell("read", "vhdx", &[90.0, 45.0]));
        let ratio = |figure: fn(&Figures) -> f64| ours.ratio(&base, figure).unwrap();
        assert!((ratio(|round| round.iops).median() - 0.9).abs() < 1e-12);
        assert!((ratio(|round| round.cpu_ns_per_io).summary.spread()).abs() < 1e-9);
        assert_eq!(ours.median(|round| round.iops), Some(67.5));
        assert!(cell("read", "vhd", &[]).ratio(&base, |round| round.iops).is_none());
    }

    #[test]
    fn cells_of_one_load_are_compared_with_the_first() {
        let cells = [
            cell("read", "raw file", &[100.0]),
            cell("read", "vhdx", &[50.0]),
            cell("write", "raw file", &[10.0]),
            Cell { part: "other".into(), ..cell("read", "raw file", &[1.0]) },
            cell("write", "vhdx", &[9.0]),
            cell("write", "new", &[]),
        ];
        let loads = Compared::of_part(&cells, "main");
        assert_eq!(
            loads.iter().map(|one| (one.load, one.cells.len())).collect::<Vec<_>>(),
            [("read", 2), ("write", 3)]
        );
        assert_eq!(loads[0].median_ratios(|round| round.iops), [None, Some(0.5)]);
        let iops = |cell: &Cell| cell.each(|round| round.iops);
        assert_eq!(loads[0].ratio("vhdx", iops).unwrap().median(), 0.5);
        assert!(loads[0].ratio("raw file", iops).is_none() && loads[0].ratio("vhd", iops).is_none());
        assert_eq!(loads[1].median_ratios(|round| round.iops), [None, Some(0.9), None]);
        assert_eq!(loads[1].cell("vhdx").unwrap().title(), "write at QD 8");
        assert!(Compared::of_part(&cells, "none").is_empty());
    }

    #[test]
    fn a_cell_that_is_cut_keeps_its_figures_together() {
        let mut cell = cell("read", "vhdx", &[90.0, 45.0]);
        cell.push_more("server_cpu_ns_per_io", Some(3.0));
        cell.push_more("server_cpu_ns_per_io", None);
        assert_eq!(cell.more("server_cpu_ns_per_io"), None);
        cell.truncate(1);
        assert_eq!((cell.rounds.len(), cell.more("server_cpu_ns_per_io")), (1, Some(vec![3.0])));
        let json = serde_json::to_string(&cell).unwrap();
        assert_eq!(serde_json::from_str::<Cell>(&json).unwrap(), cell);
    }

    #[test]
    fn the_summary_of_a_run_has_what_the_text_shows() {
        let run = crate::report::example::run();
        let json = serde_json::to_value(WithSummary::of(&run)).unwrap();
        assert_eq!(json["schema"].as_str().unwrap(), run.head.schema);
        let summary = json["summary"].as_array().unwrap();
        assert_eq!(summary.len(), run.phases.len());
        assert_eq!(summary[0]["part"], run.phases[0].name);
        assert_eq!(summary[0]["iops"].as_f64().unwrap(), run.phases[0].iops());
        let back: Run = serde_json::from_value(json).unwrap();
        assert_eq!(back, run, "the summary is ignored by who reads the result");
    }
}
