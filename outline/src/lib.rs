//! Reports: chapters of sentences, tables and plots as data, and the forms in which people and
//! programs read them. Pure functions: chapters in, text out.
//!
//! ```text
//!                                ┌─▶ text.rs      a terminal: as wide as it is
//!   figures ─▶ Chapter ──────────┼─▶ html.rs      one self-contained page, with plot/
//!              (chapter.rs)      └─▶ markdown.rs  the page without its plots
//!   rows    ─▶ csv.rs            records with the names of their columns
//!   values  ─▶ json.rs           indented, rows of numbers on one line
//! ```
//!
//! One chapter feeds the terminal, the page and Markdown, so they cannot contradict each other.
//! Names in results come from files. They are written as text, never as markup; a page forbids
//! itself scripts and the network besides.
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
//!     doubts: vec![],
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

pub use chapter::{Block, Cell, Chapter, Doubt, Row, Table, Tile, Tone};
pub use csv::Csv;
pub use html::page;
pub use lines::{paint, wrap};
pub use markdown::markdown;
pub use maud::Markup;
pub use text::{TextOptions, text};
pub use text_table::table_text;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
