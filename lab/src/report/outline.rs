//! What a report says, before it is a page or a text: chapters of sentences, tables, facts and
//! plots.
//!
//! ```text
//!   results ──▶ chapters (run.rs, containers.rs, bench.rs, overlay.rs) ──▶ html.rs ──▶ one page
//!                                                                     └──▶ export/markdown.rs ──▶ text; plots are left out
//! ```
//!
//! Each figure in a table is kept beside its text, so that a page can carry the exact value where
//! people read a rounded one, and so that both forms say the same.

use crate::{record::End, table::grouped, warning::Warning};
use maud::Markup;

/// How a figure or a sentence is to be taken. Shown by colour and by words or weight, never by
/// colour alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Tone {
    /// As it is.
    #[default]
    Plain,
    /// As hoped.
    Good,
    /// Not to be overlooked.
    Bad,
    /// A reason for doubt.
    Doubt,
    /// Secondary.
    Faint,
}

/// Where a figure would stand.
const NONE: &str = "–";

/// One cell of a table.
#[derive(Debug, Clone, Default)]
pub struct Cell {
    /// As people read it.
    pub text: String,
    /// In full, where it is a figure.
    pub value: Option<f64>,
    /// How it is to be taken.
    pub tone: Tone,
}

impl Cell {
    /// A word.
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    /// A figure and how it is written.
    pub fn figure(value: f64, write: impl FnOnce(f64) -> String) -> Self {
        Self { text: write(value), value: Some(value), tone: Tone::Plain }
    }

    /// A figure, or a dash where there is none.
    pub fn maybe(value: Option<f64>, write: impl FnOnce(f64) -> String) -> Self {
        value.map_or_else(|| Self::text(NONE).toned(Tone::Faint), |value| Self::figure(value, write))
    }

    /// The same with a meaning.
    pub fn toned(self, tone: Tone) -> Self {
        Self { tone, ..self }
    }
}

/// A row.
#[derive(Debug, Clone, Default)]
pub struct Row {
    /// Its cells; the first is its name.
    pub cells: Vec<Cell>,
    /// Whether it sums up the others.
    pub total: bool,
}

/// A table.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// What it tells; also for screen readers.
    pub caption: String,
    /// Heads of the columns, with units.
    pub heads: Vec<String>,
    /// The rows.
    pub rows: Vec<Row>,
}

impl Table {
    /// An empty table of these columns.
    pub fn new(caption: impl Into<String>, heads: &[&str]) -> Self {
        Self { caption: caption.into(), heads: heads.iter().map(|head| (*head).to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(Row { cells, total: false });
    }

    /// Adds a row that sums up the others.
    pub fn total(&mut self, cells: Vec<Cell>) {
        self.rows.push(Row { cells, total: true });
    }

    /// Whether the cells of this column are figures (or one of them would be), and so stand on the
    /// right.
    pub fn is_numeric(&self, column: usize) -> bool {
        self.rows.iter().filter_map(|row| row.cells.get(column)).any(|cell| cell.value.is_some() || cell.text == NONE)
    }
}

/// A figure that is shown large.
#[derive(Debug, Clone)]
pub struct Tile {
    /// What it is.
    pub name: String,
    /// The figure.
    pub cell: Cell,
    /// Its unit, or what else stands behind it.
    pub unit: String,
}

/// A piece of a chapter.
pub enum Block {
    /// A heading.
    Heading(String),
    /// A paragraph.
    Text(String),
    /// Figures shown large.
    Tiles(Vec<Tile>),
    /// A table.
    Table(Table),
    /// Plots, side by side where there is room.
    Plots(Vec<Markup>),
    /// Names and what they stand for.
    Facts(Vec<(String, String)>),
    /// Text as it is, for a program to read.
    Code {
        /// What it is for.
        name: String,
        /// The text.
        text: String,
        /// Its language, for Markdown.
        language: &'static str,
    },
    /// What few need to see: folded away on a screen, open on paper.
    Folded {
        /// What is inside.
        name: String,
        /// It.
        blocks: Vec<Block>,
    },
}

/// How something ended, as a badge.
pub fn end_badge(end: &End) -> (Tone, String) {
    match end {
        End::Complete => (Tone::Good, "complete".into()),
        End::Stopped => (Tone::Doubt, "partial".into()),
        End::Failed { .. } => (Tone::Bad, "failed".into()),
    }
}

/// A sentence that warns.
#[derive(Debug, Clone)]
pub struct Doubt {
    /// [`Tone::Bad`] or [`Tone::Doubt`].
    pub tone: Tone,
    /// The sentence.
    pub sentence: String,
}

impl Doubt {
    /// What failed, then each warning as a sentence.
    pub fn of(end: &End, warnings: &[Warning]) -> Vec<Self> {
        let failed = match end {
            End::Failed { errors, first } => Some(Self {
                tone: Tone::Bad,
                sentence: format!(
                    "{} failed; the first: {first}. The figures are those of the requests that succeeded and say little about the device.",
                    if *errors == 1 { "1 request".into() } else { format!("{} requests", grouped(*errors as f64)) }
                ),
            }),
            _ => None,
        };
        failed.into_iter().chain(Self::of_all(warnings)).collect()
    }

    /// Each warning as a sentence; what voids a result is bad.
    pub fn of_all(warnings: &[Warning]) -> Vec<Self> {
        let of = |warning: &Warning| Self {
            tone: if warning.voids() { Tone::Bad } else { Tone::Doubt },
            sentence: warning.to_string(),
        };
        warnings.iter().map(of).collect()
    }
}

/// One result, or several side by side.
pub struct Chapter {
    /// Unique in the report; letters, digits and hyphens.
    pub id: String,
    /// What it is, as in "oltp.json".
    pub title: String,
    /// What kind of result, and when.
    pub subtitle: String,
    /// The conclusion.
    pub verdict: String,
    /// A word or two each: complete, stopped, steady state.
    pub badges: Vec<(Tone, String)>,
    /// Reasons for doubt, the gravest first.
    pub doubts: Vec<Doubt>,
    /// The rest.
    pub blocks: Vec<Block>,
}
