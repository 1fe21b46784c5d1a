//! A chapter as text for a terminal. No line is wider than the terminal, except a single long word.
//!
//! ```text
//!   warnings that void the result   first, because they make the figures below meaningless
//!   verdict                         the conclusion
//!   title, subtitle, badges         what was measured, and when
//!   headings, sentences, tables     without plots, tiles and code
//!   Warnings                        the other warnings, last, next to the prompt
//! ```
//!
//! A heading is printed only when a visible block follows it.

use crate::{
    chapter::{Block, Chapter, Tone},
    lines::{paint, wrap},
    text_table::table_text,
};

/// Indentation of everything below a heading.
const INDENT: &str = "  ";
/// Names of facts are padded to at most this many columns.
const FACT_COLUMNS: usize = 18;

/// Options of terminal text.
#[derive(Debug, Clone, Copy)]
pub struct TextOptions {
    /// Columns of the terminal.
    pub width: usize,
    /// Whether to write terminal colours.
    pub colour: bool,
    /// Whether to show the blocks of [`Block::Folded`].
    pub details: bool,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self { width: 80, colour: false, details: false }
    }
}

/// Renders a chapter. The text ends with a line feed.
pub fn text(chapter: &Chapter, options: &TextOptions) -> String {
    let mut page = Page { lines: Vec::new(), headings: Vec::new(), options: *options };
    for warning in chapter.warnings.iter().filter(|warning| warning.tone == Tone::Bad) {
        page.paragraph(&warning.sentence, "", Tone::Bad);
    }
    page.paragraph(&chapter.verdict, "", Tone::Plain);
    let badges: Vec<&str> = chapter.badges.iter().map(|(_, word)| word.as_str()).collect();
    let mut title = chapter.title.clone();
    for more in [chapter.origin(), badges.join(", ")] {
        if !more.is_empty() {
            title.push_str("; ");
            title.push_str(&more);
        }
    }
    page.paragraph(&title, INDENT, Tone::Faint);
    chapter.blocks.iter().for_each(|block| page.block(block));
    let warnings: Vec<_> = chapter.warnings.iter().filter(|warning| warning.tone != Tone::Bad).collect();
    if !warnings.is_empty() {
        page.headings.clear();
        page.headings.push("Warnings".into());
        page.begin();
        for warning in warnings {
            page.hanging("! ", &warning.sentence, Tone::Bad);
        }
    }
    let mut text = page.lines.join("\n");
    text.push('\n');
    text
}

/// The lines that have been rendered.
struct Page {
    lines: Vec<String>,
    /// Headings that are printed before the next visible block.
    headings: Vec<String>,
    options: TextOptions,
}

impl Page {
    fn block(&mut self, block: &Block) {
        match block {
            Block::Heading(heading) => {
                self.headings.clear();
                self.headings.push(heading.clone());
            }
            Block::Text(sentence) => {
                self.begin();
                self.paragraph(sentence, INDENT, Tone::Plain);
            }
            Block::Table(table) if !table.rows.is_empty() => {
                self.begin();
                if !table.caption.is_empty() {
                    self.paragraph(&table.caption, INDENT, Tone::Faint);
                    self.lines.push(String::new());
                }
                let shown = table_text(table, self.options.width, self.options.colour);
                self.lines.extend(shown.lines().map(str::to_owned));
            }
            Block::Facts(facts) if !facts.is_empty() => {
                self.begin();
                let widest = facts.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
                let padded = widest.min(FACT_COLUMNS);
                for (name, value) in facts {
                    self.hanging(&format!("{name:padded$}  "), value, Tone::Plain);
                }
            }
            Block::Folded { name, blocks } if self.options.details => {
                self.headings.push(name.clone());
                blocks.iter().for_each(|block| self.block(block));
                self.headings.clear();
            }
            Block::Table(_)
            | Block::Facts(_)
            | Block::Folded { .. }
            | Block::Tiles(_)
            | Block::Plots(_)
            | Block::Code { .. } => {}
        }
    }

    /// Writes the pending headings, with an empty line before and after each.
    fn begin(&mut self) {
        self.lines.push(String::new());
        for heading in std::mem::take(&mut self.headings) {
            self.paragraph(&heading, "", Tone::Plain);
            self.lines.push(String::new());
        }
    }

    fn paragraph(&mut self, sentence: &str, indent: &str, tone: Tone) {
        let width = self.options.width.saturating_sub(indent.len());
        for line in wrap(sentence, width) {
            self.lines.push(format!("{indent}{}", paint(&line, tone, self.options.colour)));
        }
    }

    /// Writes an indented paragraph after `lead`, with a hanging indent.
    fn hanging(&mut self, lead: &str, sentence: &str, tone: Tone) {
        // A long name gets a line of its own, so that its value is not squeezed.
        let columns = lead.chars().count();
        let beside = columns <= FACT_COLUMNS + 2;
        let room = if beside { columns } else { 4 };
        if !beside {
            self.lines.push(format!("{INDENT}{}", lead.trim_end()));
        }
        let width = self.options.width.saturating_sub(INDENT.len() + room);
        for (number, line) in wrap(sentence, width).into_iter().enumerate() {
            let before = if number == 0 && beside { lead.to_owned() } else { " ".repeat(room) };
            let line = format!("{before}{line}");
            self.lines.push(format!("{INDENT}{}", paint(line.trim_end(), tone, self.options.colour)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chapter::{Cell, Table, Warning};

    fn chapter() -> Chapter {
        let mut table = Table::new("Medians of the rounds", &["target", "IOPS"]);
        table.row(vec![Cell::text("raw file"), Cell::figure(58_071.0, |iops| format!("{iops}"))]);
        let warning = |tone, sentence: &str| Warning { tone, sentence: sentence.into() };
        Chapter {
            id: "r1".into(),
            title: "Run of oltp".into(),
            source: String::new(),
            subtitle: "2026-11-20 22:17:49 UTC, 12.0 s in all".into(),
            verdict:
                "The disk did 58,071 IOPS with a queue of 32 and a working set that no cache of this machine holds."
                    .into(),
            badges: vec![(Tone::Good, "complete".into())],
            warnings: vec![
                warning(Tone::Warning, "The page cache can hold all that is under test; use --cache direct."),
                warning(Tone::Bad, "NOT STORAGE: it was a debug build."),
            ],
            blocks: vec![
                Block::Heading("Figures".into()),
                Block::Tiles(vec![]),
                Block::Table(table.clone()),
                Block::Heading("Plots".into()),
                Block::Plots(vec![]),
                Block::Folded { name: "Each thread".into(), blocks: vec![Block::Table(table)] },
                Block::Heading("How it was measured".into()),
                Block::Facts(vec![
                    ("Processor".into(), "2 × AMD EPYC".into()),
                    (
                        "System".into(),
                        "Debian GNU/Linux 12, 6.18.0 with a long name that takes more than one line".into(),
                    ),
                ]),
            ],
        }
    }

    #[test]
    fn a_chapter_as_text() {
        insta::assert_snapshot!(text(&chapter(), &TextOptions { width: 60, ..TextOptions::default() }));
    }

    #[test]
    fn details_and_colours_are_optional() {
        let plain = text(&chapter(), &TextOptions::default());
        assert!(!plain.contains("Each thread") && !plain.contains('\x1b') && !plain.contains("Plots"));
        let all = text(&chapter(), &TextOptions { details: true, colour: true, ..TextOptions::default() });
        assert!(all.contains("Each thread") && all.contains("\x1b[31mNOT STORAGE: it was a debug build.\x1b[0m"));
    }

    #[test]
    fn lines_are_no_wider_than_the_terminal() {
        for width in [40, 60, 80, 200] {
            let shown = text(&chapter(), &TextOptions { width, ..TextOptions::default() });
            assert!(shown.lines().all(|line| line.chars().count() <= width), "{width}: {shown}");
        }
    }
}
