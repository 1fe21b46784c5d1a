//! Reports as data, rendered as terminal text, HTML, Markdown, CSV and JSON. All functions are
//! pure.
//!
//! ```text
//!                                ┌─▶ text.rs      text that fits the terminal
//!   figures ─▶ Chapter ──────────┼─▶ html.rs      one self-contained page, with plot/
//!              (chapter.rs)      └─▶ markdown.rs  without plots
//!   records ─▶ csv.rs
//!   values  ─▶ json.rs           indented, rows of numbers on one line
//! ```
//!
//! The terminal, the page and the Markdown are rendered from the same chapter, so that they cannot
//! contradict each other. Names in results come from files: they are escaped and never become
//! markup. A page also forbids scripts and network access.
//!
//! # Example
//!
//! ```
//! use diskwright_outline::{Block, Cell, Chapter, Table, TextOptions, text};
//!
//! let mut table = Table::new("Medians of five rounds", &["target", "IOPS"]);
//! table.row(vec![Cell::text("raw file"), Cell::figure(58_071.3, |iops| format!("{iops:.0}"))]);
//! let chapter = Chapter {
//!     id: "r1".into(),
//!     title: "Run of oltp".into(),
//!     source: "oltp.json".into(),
//!     subtitle: "2026-11-20 22:17:49 UTC".into(),
//!     verdict: "The disk did 58,071 IOPS.".into(),
//!     badges: vec![],
//!     warnings: vec![],
//!     blocks: vec![Block::Table(table)],
//! };
//! let shown = text(&chapter, &TextOptions { width: 80, ..TextOptions::default() });
//! assert!(shown.contains("raw file  58071"));
//! ```

#![forbid(unsafe_code)]

mod chapter;
mod csv;
mod html;
pub mod json;
mod lines;
mod markdown;
pub mod plot;
mod text;
mod text_table;

pub use chapter::{Block, Cell, Chapter, Row, Table, Tile, Tone, Warning};
pub use csv::Csv;
pub use html::page;
pub use lines::{columns_of, paint, wrap};
pub use markdown::markdown;
pub use maud::Markup;
pub use text::{TextOptions, text};
pub use text_table::table_text;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
