//! The data of a report: chapters of sentences, tables, facts and plots.
//!
//! A table cell has both the exact figure and its rounded text. A page shows the text and carries
//! the exact figure for programs.

use maud::Markup;

/// Meaning of a figure or a sentence. It is shown by colour together with words or weight, never by
/// colour alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Tone {
    /// No special meaning.
    #[default]
    Plain,
    /// A good result.
    Good,
    /// A bad result, or a warning that voids a result.
    Bad,
    /// A warning.
    Warning,
    /// Less important text.
    Faint,
}

/// Text of a cell without a figure.
const NONE: &str = "–";

/// One cell of a table.
#[derive(Debug, Clone, Default)]
pub struct Cell {
    /// Text that is shown.
    pub text: String,
    /// The exact figure; `None` for a cell of text.
    pub value: Option<f64>,
    /// Meaning of the cell.
    pub tone: Tone,
}

impl Cell {
    /// A cell of text.
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    /// A cell of a figure, formatted by `write`.
    pub fn figure(value: f64, write: impl FnOnce(f64) -> String) -> Self {
        Self { text: write(value), value: Some(value), tone: Tone::Plain }
    }

    /// A cell of a figure, or a dash for `None`.
    pub fn maybe(value: Option<f64>, write: impl FnOnce(f64) -> String) -> Self {
        value.map_or_else(|| Self::text(NONE).toned(Tone::Faint), |value| Self::figure(value, write))
    }

    /// The same cell with the given meaning.
    pub fn toned(self, tone: Tone) -> Self {
        Self { tone, ..self }
    }
}

/// A row of a table.
#[derive(Debug, Clone, Default)]
pub struct Row {
    /// Cells of the row; the first one names it.
    pub cells: Vec<Cell>,
    /// Whether this is a row of totals.
    pub total: bool,
}

/// A table.
#[derive(Debug, Clone)]
pub struct Table {
    /// Caption, which screen readers also read.
    pub caption: String,
    /// Heads of the columns, with units.
    pub heads: Vec<String>,
    /// The rows.
    pub rows: Vec<Row>,
    /// Number of columns at the left that name a row. When a table is too wide for a terminal, its
    /// further columns follow below, and these columns are repeated.
    pub keys: usize,
}

impl Table {
    /// An empty table with these heads and one key column.
    pub fn new(caption: impl Into<String>, heads: &[&str]) -> Self {
        Self {
            caption: caption.into(),
            heads: heads.iter().map(|head| (*head).to_owned()).collect(),
            rows: Vec::new(),
            keys: 1,
        }
    }

    /// The same table with `keys` columns that name a row.
    pub fn keys(self, keys: usize) -> Self {
        Self { keys, ..self }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(Row { cells, total: false });
    }

    /// Adds a row of totals.
    pub fn total(&mut self, cells: Vec<Cell>) {
        self.rows.push(Row { cells, total: true });
    }

    /// Whether a cell of this column is a figure or a dash for one. Such a column is right-aligned.
    pub(crate) fn is_numeric(&self, column: usize) -> bool {
        self.rows.iter().filter_map(|row| row.cells.get(column)).any(|cell| cell.value.is_some() || cell.text == NONE)
    }
}

/// A figure in large type, at the top of a page.
#[derive(Debug, Clone)]
pub struct Tile {
    /// Name of the figure.
    pub name: String,
    /// The figure.
    pub cell: Cell,
    /// Unit, or other text after the figure.
    pub unit: String,
}

/// A block of a chapter.
#[derive(Debug, Clone)]
pub enum Block {
    /// A heading.
    Heading(String),
    /// A paragraph.
    Text(String),
    /// Figures in large type.
    Tiles(Vec<Tile>),
    /// A table.
    Table(Table),
    /// Plots, side by side where there is room.
    Plots(Vec<Markup>),
    /// Pairs of a name and a value.
    Facts(Vec<(String, String)>),
    /// Preformatted text, such as a job file.
    Code {
        /// Caption of the text.
        name: String,
        /// The text.
        text: String,
        /// Language of the text, for Markdown.
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

/// A warning about the result.
#[derive(Debug, Clone)]
pub struct Warning {
    /// [`Tone::Bad`] for a warning that voids the result, else [`Tone::Warning`].
    pub tone: Tone,
    /// The sentence.
    pub sentence: String,
}

/// The report of one result, or of several that are compared.
#[derive(Debug, Clone)]
pub struct Chapter {
    /// Unique in the report; letters, digits and hyphens.
    pub id: String,
    /// What was measured, as in "Run of oltp on golden.vhdx".
    pub title: String,
    /// File name of the result: "oltp.json". May be empty.
    pub source: String,
    /// Time and duration of the measurement.
    pub subtitle: String,
    /// The conclusion, one sentence.
    pub verdict: String,
    /// Short labels: complete, stopped, steady state.
    pub badges: Vec<(Tone, String)>,
    /// Warnings; those that void the result come first.
    pub warnings: Vec<Warning>,
    /// The content after verdict and warnings.
    pub blocks: Vec<Block>,
}

impl Chapter {
    /// Source and subtitle, joined by a comma where both are there.
    pub(crate) fn origin(&self) -> String {
        let parts = [self.source.as_str(), self.subtitle.as_str()];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
    }
}
