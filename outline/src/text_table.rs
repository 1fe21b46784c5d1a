//! A table as text that fits a terminal.
//!
//! A table that is too wide is made narrower by the first of these steps that is enough:
//!
//! 1. Heads of columns are wrapped at spaces.
//! 2. Columns of text are wrapped at spaces, the widest one first.
//! 3. Further columns follow below, and the columns that name a row are repeated.
//!
//! Figures are never broken. Columns of figures are right-aligned, the others left-aligned.

use crate::{
    chapter::{Row, Table, Tone},
    lines::{paint, wrap},
};
use std::ops::Range;

/// Spaces before each column.
const GAP: usize = 2;
/// Smallest width of a wrapped column of text.
const NARROWEST: usize = 14;

/// Renders a table without its caption. Each line is indented by two spaces and ends with a line
/// feed; no line ends in spaces. `width` is in columns. With `colour`, cells have terminal colours.
pub fn table_text(table: &Table, width: usize, colour: bool) -> String {
    let columns = table.heads.len();
    let natural: Vec<Widths> = (0..columns).map(|column| Widths::of(table, column)).collect();
    let whole: Vec<usize> = natural.iter().map(|widths| widths.cells.max(widths.head)).collect();
    if total(&whole) <= width {
        return lines(table, &whole, 0..columns, colour);
    }
    let unbroken: Vec<usize> = natural.iter().map(|widths| widths.cells.max(widths.head_word)).collect();
    let mut narrow = unbroken.clone();
    shrink(table, &natural, &mut narrow, width);
    if total(&narrow) <= width {
        // The remaining width goes to wrapped heads, so that few heads are wrapped.
        widen(&natural, &mut narrow, width);
        return lines(table, &narrow, 0..columns, colour);
    }
    // The table continues below. Cells are wrapped only where they are longer than half a line.
    let half = width / 2;
    let mut narrow: Vec<usize> =
        unbroken.iter().zip(&narrow).map(|(unbroken, narrow)| (*unbroken).min(half).max(*narrow)).collect();
    let keys = table.keys.min(columns);
    let key_columns = total(&narrow[..keys]);
    let beside = width.saturating_sub(key_columns + GAP);
    for (column, width) in narrow.iter_mut().enumerate().skip(keys) {
        if !table.is_numeric(column) && *width > beside {
            *width = beside.max(longest_word(table, column));
        }
    }
    let mut text = String::new();
    let mut from = keys;
    while from < columns {
        let mut to = from + 1;
        while to < columns && key_columns + total(&narrow[from..=to]) <= width {
            to += 1;
        }
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&lines(table, &narrow, from..to, colour));
        from = to;
    }
    text
}

/// Natural widths of a column.
struct Widths {
    cells: usize,
    head: usize,
    /// Width of the longest word of the head.
    head_word: usize,
}

impl Widths {
    fn of(table: &Table, column: usize) -> Self {
        let head = &table.heads[column];
        Self {
            cells: cells_of(table, column).map(width_of).max().unwrap_or(0),
            head: width_of(head),
            head_word: head.split(' ').map(width_of).max().unwrap_or(0),
        }
    }
}

fn cells_of(table: &Table, column: usize) -> impl Iterator<Item = &str> {
    table.rows.iter().filter_map(move |row| row.cells.get(column)).map(|cell| cell.text.as_str())
}

fn longest_word(table: &Table, column: usize) -> usize {
    cells_of(table, column).flat_map(|cell| cell.split(' ')).map(width_of).max().unwrap_or(0)
}

/// Width of a text in columns.
fn width_of(text: &str) -> usize {
    text.chars().count()
}

fn total(widths: &[usize]) -> usize {
    widths.iter().map(|width| width + GAP).sum()
}

/// Makes columns of text narrower until the table fits or no column can be narrower.
fn shrink(table: &Table, natural: &[Widths], widths: &mut [usize], most: usize) {
    loop {
        let can = |column: &usize| {
            let least = longest_word(table, *column).max(NARROWEST).max(natural[*column].head_word);
            !table.is_numeric(*column) && widths[*column] > least
        };
        match (0..widths.len()).filter(can).max_by_key(|column| widths[*column]) {
            Some(column) if total(widths) > most => widths[column] -= 1,
            _ => return,
        }
    }
}

/// Gives remaining width to heads that are wrapped.
fn widen(natural: &[Widths], widths: &mut [usize], most: usize) {
    for (column, wanted) in natural.iter().enumerate() {
        let lacks = wanted.head.saturating_sub(widths[column]);
        if lacks > 0 && total(widths) + lacks <= most {
            widths[column] += lacks;
        }
    }
}

/// Renders the key columns and the columns `shown`, with their heads.
fn lines(table: &Table, widths: &[usize], shown: Range<usize>, colour: bool) -> String {
    let keys = 0..table.keys.min(shown.start);
    let columns: Vec<usize> = keys.chain(shown).collect();
    let numeric: Vec<bool> = (0..widths.len()).map(|column| table.is_numeric(column)).collect();
    let mut text = String::new();
    let heads: Vec<(Vec<String>, Tone)> =
        columns.iter().map(|column| (wrap(&table.heads[*column], widths[*column]), Tone::Faint)).collect();
    // Heads are aligned at the bottom, next to the figures.
    let most = heads.iter().map(|(lines, _)| lines.len()).max().unwrap_or(0);
    let padded = heads.into_iter().map(|(lines, tone)| {
        let above = vec![String::new(); most - lines.len()];
        (above.into_iter().chain(lines).collect(), tone)
    });
    put(&mut text, &columns, widths, &numeric, &padded.collect::<Vec<_>>(), colour);
    for Row { cells, .. } in &table.rows {
        let row: Vec<(Vec<String>, Tone)> = columns
            .iter()
            .map(|column| match cells.get(*column) {
                Some(cell) if numeric[*column] => (vec![cell.text.clone()], cell.tone),
                Some(cell) => (wrap(&cell.text, widths[*column]), cell.tone),
                None => (vec![], Tone::Plain),
            })
            .collect();
        put(&mut text, &columns, widths, &numeric, &row, colour);
    }
    text
}

/// Writes one row. Each cell may have several lines.
fn put(
    text: &mut String,
    columns: &[usize],
    widths: &[usize],
    numeric: &[bool],
    cells: &[(Vec<String>, Tone)],
    colour: bool,
) {
    let most = cells.iter().map(|(lines, _)| lines.len()).max().unwrap_or(0);
    for number in 0..most {
        let mut line = String::new();
        // Padding is written only before a further cell, so that no line ends in spaces.
        let mut held_back = 0;
        for (column, (lines, tone)) in columns.iter().zip(cells) {
            let cell = lines.get(number).map_or("", String::as_str);
            let gap = widths[*column].saturating_sub(width_of(cell));
            if cell.is_empty() {
                held_back += GAP + gap;
                continue;
            }
            let before = held_back + GAP + if numeric[*column] { gap } else { 0 };
            held_back = if numeric[*column] { 0 } else { gap };
            line.push_str(&" ".repeat(before));
            line.push_str(&paint(cell, *tone, colour));
        }
        text.push_str(&line);
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chapter::Cell;
    use proptest::prelude::*;

    fn number(value: f64) -> Cell {
        Cell::figure(value, |value| format!("{value}"))
    }

    fn table() -> Table {
        let mut table = Table::new("", &["target", "IOPS", "mean latency", "remark"]);
        table.row(vec![Cell::text("raw"), number(100.0), number(1.25)]);
        table.row(vec![
            Cell::text("vhdx dynamic"),
            number(12345.0).toned(Tone::Bad),
            number(0.5),
            Cell::text("ä remark of several words"),
        ]);
        table
    }

    #[test]
    fn columns_are_aligned_and_no_line_ends_in_spaces() {
        let expected = "  target         IOPS  mean latency  remark
  raw             100          1.25
  vhdx dynamic  12345           0.5  ä remark of several words
";
        assert_eq!(table_text(&table(), 80, false), expected);
        assert!(table_text(&table(), 80, true).contains("\x1b[31m12345\x1b[0m"));
    }

    #[test]
    fn a_wide_table_is_wrapped_and_then_continued_below() {
        let broken = "                          mean
  target         IOPS  latency  remark
  raw             100     1.25
  vhdx dynamic  12345      0.5  ä remark of
                                several words
";
        assert_eq!(table_text(&table(), 48, false), broken);
        let continued = "  target         IOPS  latency
  raw             100     1.25
  vhdx dynamic  12345      0.5

  target        remark
  raw
  vhdx dynamic  ä remark of
                several words
";
        let narrow = table_text(&table(), 31, false);
        assert_eq!(narrow, format!("                          mean\n{continued}"));
    }

    #[test]
    fn an_empty_cell_keeps_the_following_columns_aligned() {
        let mut table = Table::new("", &["a", "bb", "c"]);
        table.row(vec![number(1.0), Cell::default(), Cell::text("x")]);
        table.row(vec![Cell::default(), number(22.0), Cell::text("y")]);
        assert_eq!(table_text(&table, 80, false), "  a  bb  c\n  1      x\n     22  y\n");
    }

    proptest! {
        #[test]
        fn every_cell_is_shown_and_every_line_fits(
            cells in prop::collection::vec(prop::collection::vec("[a-z]{1,9}( [a-z]{1,9}){0,4}", 6), 1..5),
            width in 40_usize..120,
        ) {
            let mut table = Table::new("", &["name", "one", "two words", "three", "four", "five"]);
            cells.iter().for_each(|row| table.row(row.iter().map(Cell::text).collect()));
            let text = table_text(&table, width, false);
            prop_assert!(text.lines().all(|line| line.chars().count() <= width && !line.ends_with(' ')), "{}", text);
            for word in cells.iter().flatten().flat_map(|cell| cell.split(' ')) {
                prop_assert!(text.contains(word));
            }
        }
    }
}
