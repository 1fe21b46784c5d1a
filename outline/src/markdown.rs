//! Chapters as Markdown with tables of GitHub, without plots and tiles.

use crate::chapter::{Block, Cell, Chapter, Table, Tone};
use std::fmt::Write as _;

/// Renders chapters as Markdown. `made_by` names the program and is the last line, in italics.
pub fn markdown(chapters: &[Chapter], made_by: &str) -> String {
    let mut text = String::new();
    for chapter in chapters {
        write_chapter(&mut text, chapter);
    }
    let _ = writeln!(text, "_{made_by}_");
    text
}

fn write_chapter(text: &mut String, chapter: &Chapter) {
    let _ = writeln!(text, "# {}\n\n**{}**\n", escape(&chapter.title), escape(&chapter.verdict));
    let badges: Vec<&str> = chapter.badges.iter().map(|(_, word)| word.as_str()).collect();
    let _ = writeln!(text, "{} ({})\n", escape(&chapter.origin()), escape(&badges.join(", ")));
    for warning in &chapter.warnings {
        let word = if warning.tone == Tone::Bad { "Wrong" } else { "Warning" };
        let _ = writeln!(text, "> **{word}:** {}\n", escape(&warning.sentence));
    }
    for block in &chapter.blocks {
        write_block(text, block);
    }
}

fn write_block(text: &mut String, block: &Block) {
    let _ = match block {
        Block::Heading(heading) => writeln!(text, "## {}\n", escape(heading)),
        Block::Text(sentence) => writeln!(text, "{}\n", escape(sentence)),
        // Tables have the same figures.
        Block::Tiles(_) | Block::Plots(_) => Ok(()),
        Block::Table(table) => write_table(text, table),
        Block::Facts(facts) => {
            for (name, value) in facts {
                let _ = writeln!(text, "- {}: {}", escape(name), escape(value));
            }
            writeln!(text)
        }
        Block::Code { name, text: code, language } => {
            // The fence is longer than any run of backticks in the code.
            let fence = "`".repeat(longest_run(code).max(2) + 1);
            writeln!(text, "{}\n\n{fence}{language}\n{}\n{fence}\n", escape(name), code.trim_end())
        }
        Block::Folded { name, blocks } => {
            let _ = writeln!(text, "### {}\n", escape(name));
            blocks.iter().for_each(|block| write_block(text, block));
            Ok(())
        }
    };
}

fn write_table(text: &mut String, table: &Table) -> std::fmt::Result {
    let heads: Vec<String> = table.heads.iter().map(|head| escape(head)).collect();
    let rules: Vec<&str> =
        (0..heads.len()).map(|column| if table.is_numeric(column) { "---:" } else { "---" }).collect();
    writeln!(text, "{}\n\n| {} |\n| {} |", escape(&table.caption), heads.join(" | "), rules.join(" | "))?;
    for row in &table.rows {
        let mut cells: Vec<String> = row.cells.iter().map(|cell| write_cell(cell, row.total)).collect();
        cells.resize(heads.len(), String::new());
        writeln!(text, "| {} |", cells.join(" | "))?;
    }
    writeln!(text)
}

fn write_cell(cell: &Cell, total: bool) -> String {
    let text = escape(&cell.text);
    if (total || cell.tone == Tone::Bad) && !text.is_empty() { format!("**{text}**") } else { text }
}

fn longest_run(code: &str) -> usize {
    code.split(|c| c != '`').map(str::len).max().unwrap_or(0)
}

/// Escapes text for Markdown and HTML.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' | '`' | '*' | '_' | '[' | ']' | '|' | '#' => escaped.extend(['\\', c]),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '\n' | '\r' => escaped.push(' '),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_out_of_their_cells() {
        assert_eq!(escape("a|b\n<i>`c`_d_"), "a\\|b &lt;i&gt;\\`c\\`\\_d\\_");
        let mut text = String::new();
        let code = Block::Code { name: "x".into(), text: "````\n".into(), language: "toml" };
        write_block(&mut text, &code);
        assert!(text.contains("`````toml\n````\n`````"), "{text}");
    }
}
