//! What a report says, before it is a page or a text: chapters of sentences, tables, facts and
//! plots.
//!
//! Each figure in a table is kept beside its text, so that a page can carry the exact value where
//! people read a rounded one, and so that all forms of a report say the same.

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
#[derive(Debug, Clone)]
pub struct Table {
    /// What it tells; also for screen readers.
    pub caption: String,
    /// Heads of the columns, with units.
    pub heads: Vec<String>,
    /// The rows.
    pub rows: Vec<Row>,
    /// How many columns at the left name a row. A table that is too wide for a terminal is
    /// continued below with these columns again.
    pub keys: usize,
}

impl Table {
    /// An empty table of these columns.
    pub fn new(caption: impl Into<String>, heads: &[&str]) -> Self {
        Self {
            caption: caption.into(),
            heads: heads.iter().map(|head| (*head).to_owned()).collect(),
            rows: Vec::new(),
            keys: 1,
        }
    }

    /// The same table with this many columns that name a row.
    pub fn keys(self, keys: usize) -> Self {
        Self { keys, ..self }
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
#[derive(Debug, Clone)]
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
    /// Details that few readers need. A page shows them when the reader opens the section and on
    /// paper; a terminal shows them only where [`crate::TextOptions::details`] asks for them.
    Folded {
        /// Heading of the section.
        name: String,
        /// Blocks hidden until the reader opens the section.
        blocks: Vec<Block>,
    },
}

/// A sentence that warns.
#[derive(Debug, Clone)]
pub struct Doubt {
    /// [`Tone::Bad`] or [`Tone::Doubt`].
    pub tone: Tone,
    /// The sentence.
    pub sentence: String,
}

/// One result, or several side by side.
#[derive(Debug, Clone)]
pub struct Chapter {
    /// Unique in the report; letters, digits and hyphens.
    pub id: String,
    /// What was measured, as in "Run of oltp on golden.vhdx".
    pub title: String,
    /// The name by which readers know the result, its file's: "oltp.json". May be empty.
    pub source: String,
    /// When it was measured and how long that took.
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

impl Chapter {
    /// Source and subtitle, joined by a comma where both are there.
    pub(crate) fn origin(&self) -> String {
        let parts = [self.source.as_str(), self.subtitle.as_str()];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
    }
}
