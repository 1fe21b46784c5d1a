//! Columns that line up, in plain text. Colour only where the caller says that there is a terminal.

use std::fmt::Write as _;

/// Which way a column leans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// What a cell means, for those who see colours. Never the only sign: the text says it too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Tone {
    /// As it is.
    #[default]
    Plain,
    /// As hoped.
    Good,
    /// To be looked at.
    Bad,
    /// Secondary.
    Faint,
}

/// One cell.
#[derive(Debug, Clone, Default)]
pub struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// A plain cell.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), tone: Tone::Plain }
    }

    /// The same with a meaning.
    pub fn toned(text: impl Into<String>, tone: Tone) -> Self {
        Self { text: text.into(), tone }
    }
}

/// A table with a heading.
#[derive(Debug, Clone)]
pub struct Table {
    heads: Vec<(String, Align)>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table of these columns.
    pub fn new(heads: &[(&str, Align)]) -> Self {
        Self::of(heads.iter().copied(), [])
    }

    /// A table with these columns and rows.
    pub fn of<'a>(
        heads: impl IntoIterator<Item = (&'a str, Align)>,
        rows: impl IntoIterator<Item = Vec<Cell>>,
    ) -> Self {
        let heads = heads.into_iter().map(|(head, align)| (head.to_owned(), align)).collect();
        Self { heads, rows: rows.into_iter().collect() }
    }

    /// Columns of a terminal that it takes.
    pub fn width(&self) -> usize {
        self.widths().into_iter().map(|width| width + 2).sum()
    }

    fn widths(&self) -> Vec<usize> {
        let of_column = |(column, (head, _)): (usize, &(String, Align))| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).map(|cell| width_of(&cell.text));
            cells.chain([width_of(head)]).max().unwrap_or(0)
        };
        self.heads.iter().enumerate().map(of_column).collect()
    }

    /// Adds a row; what is missing at its end stays empty, what is over is dropped.
    pub fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// The text, each line indented by two spaces and ended by a line feed.
    pub fn render(&self, colour: bool) -> String {
        let widths = self.widths();
        let heads = self.heads.iter().map(|(head, _)| Cell::toned(head.clone(), Tone::Faint)).collect();
        let mut text = String::new();
        for row in std::iter::once(&heads).chain(&self.rows) {
            let mut line = String::new();
            let mut held_back = 0;
            for ((cell, (_, align)), width) in row.iter().zip(&self.heads).zip(&widths) {
                // Padding is held back until something follows it, so that no line ends in spaces.
                let gap = width - width_of(&cell.text);
                let before = held_back + 2 + if *align == Align::Right { gap } else { 0 };
                held_back = if *align == Align::Left { gap } else { 0 };
                if cell.text.is_empty() {
                    held_back += before;
                    continue;
                }
                let _ = write!(line, "{:before$}{}", "", paint(&cell.text, cell.tone, colour));
            }
            text.push_str(&line);
            text.push('\n');
        }
        text
    }
}

/// Columns that a text takes.
fn width_of(text: &str) -> usize {
    text.chars().count()
}

/// Text in the colour of its meaning, or as it is.
pub fn paint(text: &str, tone: Tone, colour: bool) -> String {
    let code = match tone {
        Tone::Good => "32",
        Tone::Bad => "31",
        Tone::Faint => "2",
        Tone::Plain => "",
    };
    if !colour || code.is_empty() { text.to_owned() } else { format!("\x1b[{code}m{text}\x1b[0m") }
}

/// A count with thin groups of thousands: `123,456`.
pub fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    if value < -0.5 { format!("-{text}") } else { text }
}

/// A figure with about three digits that matter: `12,345`, `123`, `12.3`, `1.23`, `0.012`.
pub fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 99.95 || size == 0.0 => grouped(value),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Nanoseconds as people say them: `12.3 µs`, `4.56 ms`, `1.23 s`.
pub fn duration(ns: f64) -> String {
    match ns.abs() {
        size if size >= 999.5e6 => format!("{} s", figure(ns / 1e9)),
        size if size >= 999.5e3 => format!("{} ms", figure(ns / 1e6)),
        size if size >= 999.5 => format!("{} µs", figure(ns / 1e3)),
        _ => format!("{} ns", figure(ns)),
    }
}

/// Bytes as people say them, powers of 1024: `512 B`, `1.50 MiB`.
pub fn bytes(value: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut scaled = value as f64;
    let mut unit = "B";
    for next in units {
        if scaled < 1024.0 {
            break;
        }
        scaled /= 1024.0;
        unit = next;
    }
    if unit == "B" || scaled.fract() == 0.0 {
        format!("{scaled:.0} {unit}")
    } else {
        format!("{} {unit}", figure(scaled))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_no_line_ends_in_spaces() {
        let mut table = Table::new(&[("target", Align::Left), ("IOPS", Align::Right), ("note", Align::Left)]);
        table.row(vec![Cell::new("raw"), Cell::new("100"), Cell::new("")]);
        table.row(vec![Cell::new("vhdx dynamic"), Cell::toned("12,345", Tone::Bad), Cell::new("ä")]);
        let text = table.render(false);
        assert_eq!(text, "  target          IOPS  note\n  raw              100\n  vhdx dynamic  12,345  ä\n");
        assert!(table.render(true).contains("\x1b[31m12,345\x1b[0m"));
    }

    #[test]
    fn an_empty_cell_keeps_the_columns_behind_it_in_place() {
        let mut table = Table::new(&[("a", Align::Right), ("bb", Align::Right), ("c", Align::Left)]);
        table.row(vec![Cell::new("1"), Cell::new(""), Cell::new("x")]);
        table.row(vec![Cell::new(""), Cell::new("22"), Cell::new("y")]);
        assert_eq!(table.render(false), "  a  bb  c\n  1      x\n     22  y\n");
    }

    #[test]
    fn numbers_have_the_digits_that_matter() {
        assert_eq!(
            [1_234_567.4, 999.6, 12.345, 1.2345, 0.9996, 0.01234, 0.0, -1234.0].map(figure).join(" "),
            "1,234,567 1,000 12.3 1.23 1.00 0.012 0 -1,234"
        );
        assert_eq!([950.0, 12_340.0, 4_560_000.0, 1.5e9].map(duration).join(" "), "950 ns 12.3 µs 4.56 ms 1.50 s");
        assert_eq!([0, 1023, 1536, 1 << 30, 40 << 30].map(bytes).join(" "), "0 B 1023 B 1.50 KiB 1 GiB 40 GiB");
    }
}
