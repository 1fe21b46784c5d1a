//! Aligned text: labelled values, and tables.

use diskwright_outline::{columns_of, wrap};
use std::io::{self, Write};

/// Labelled values, one a line, the values in one column. A value with line feeds, or with an empty
/// label, continues below.
#[derive(Debug, Default)]
pub struct Fields {
    rows: Vec<(String, String)>,
    /// Columns that a line must not exceed.
    limit: Option<usize>,
}

impl Fields {
    /// Adds a value. An empty label continues the one above.
    pub fn add(&mut self, label: &str, value: impl ToString) {
        for (index, line) in value.to_string().split('\n').enumerate() {
            let label = if index == 0 { label } else { "" };
            self.rows.push((label.to_owned(), line.to_owned()));
        }
    }

    /// Continues values in the next line where a line would have more than `limit` columns, if
    /// there is a limit.
    pub fn within(self, limit: Option<usize>) -> Self {
        Self { limit, ..self }
    }

    /// Writes the lines.
    ///
    /// # Errors
    /// What the system says of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let width = self.rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
        self.rows
            .iter()
            .try_for_each(|(label, value)| write_hanging(out, &format!("{label:width$}  "), value, self.limit))
    }
}

/// A text is not wrapped to fewer columns than this.
const WRAPPED_MIN: usize = 20;

/// Writes `prefix` and `text` as a line. What has no room within `limit` columns continues below
/// the beginning of `text`.
///
/// # Errors
/// What the system says of `out`.
pub fn write_hanging(out: &mut dyn Write, prefix: &str, text: &str, limit: Option<usize>) -> io::Result<()> {
    let indent = columns_of(prefix);
    let lines = match limit {
        Some(limit) => wrap(text, limit.saturating_sub(indent).max(WRAPPED_MIN)),
        None => vec![text.to_owned()],
    };
    for (index, line) in lines.iter().enumerate() {
        let line = if index == 0 { format!("{prefix}{line}") } else { format!("{:indent$}{line}", "") };
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// A text is not shortened below this.
pub const TEXT_MIN: usize = 12;

/// The text in at most `width` characters, with an ellipsis in the place of its middle.
pub fn shortened(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.to_owned();
    }
    let (front, back) = (width / 2, width - width / 2 - 1);
    text.chars().take(front).chain(['…']).chain(text.chars().skip(count - back)).collect()
}

/// Alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// For text.
    Left,
    /// For numbers.
    Right,
}

/// A table of columns with a heading.
#[derive(Debug)]
pub struct Columns {
    heads: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Columns {
    /// An empty table with these headings.
    pub fn new(heads: &[(&'static str, Align)]) -> Self {
        Self { heads: heads.to_vec(), rows: Vec::new() }
    }

    /// Adds a row; missing cells are empty, surplus ones are dropped.
    pub fn row(&mut self, mut cells: Vec<String>) {
        cells.resize(self.heads.len(), String::new());
        self.rows.push(cells);
    }

    /// Shortens the longest texts until a line has at most `limit` columns, if there is a limit. A
    /// shortened text keeps its beginning and its end: names often differ at the end.
    pub fn within(mut self, limit: Option<usize>) -> Self {
        let Some(limit) = limit else { return self };
        loop {
            let widths = self.widths();
            let total = widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1);
            let texts = (0..widths.len()).filter(|&column| self.heads[column].1 == Align::Left);
            let Some(widest) = texts.max_by_key(|&column| widths[column]) else { return self };
            if total <= limit || widths[widest] <= TEXT_MIN {
                return self;
            }
            // The next one may have to become shorter too.
            let width = widths[widest].saturating_sub(total - limit).max(TEXT_MIN);
            for row in &mut self.rows {
                row[widest] = shortened(&row[widest], width);
            }
            if self.heads[widest].0.chars().count() > width {
                return self;
            }
        }
    }

    fn widths(&self) -> Vec<usize> {
        let of = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0).max(self.heads[column].0.chars().count())
        };
        (0..self.heads.len()).map(of).collect()
    }

    /// Writes heading and rows.
    ///
    /// # Errors
    /// What the system says of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let heads: Vec<String> = self.heads.iter().map(|(head, _)| (*head).to_owned()).collect();
        let lines = || std::iter::once(&heads).chain(&self.rows);
        let widths = self.widths();
        for row in lines() {
            let mut line = String::new();
            for (index, ((cell, (_, align)), width)) in row.iter().zip(&self.heads).zip(&widths).enumerate() {
                if index > 0 {
                    line.push_str("  ");
                }
                match align {
                    Align::Left => line.push_str(&format!("{cell:<width$}")),
                    Align::Right => line.push_str(&format!("{cell:>width$}")),
                }
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_line_up() {
        let mut fields = Fields::default();
        fields.add("format", "vhdx");
        fields.add("virtual size", "40 GiB");
        fields.add("remarks", "one\ntwo");
        let mut out = Vec::new();
        fields.write(&mut out).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap(), @r"
        format        vhdx
        virtual size  40 GiB
        remarks       one
                      two
        ");
    }

    #[test]
    fn a_long_value_continues_below_itself_where_the_terminal_ends() {
        let written = |limit| {
            let mut fields = Fields::default();
            fields.add("log", "3 entries, replayed in memory");
            fields.add("parent", "/a/path/that/is/not/broken");
            let mut out = Vec::new();
            fields.within(limit).write(&mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        insta::assert_snapshot!(written(Some(30)), @r"
        log     3 entries, replayed in
                memory
        parent  /a/path/that/is/not/broken
        ");
        assert!(written(None).contains("log     3 entries, replayed in memory\n"));
    }

    #[test]
    fn a_long_text_is_shortened_where_the_terminal_ends() {
        let table = || {
            let mut table = Columns::new(&[("image", Align::Left), ("type", Align::Left), ("size", Align::Right)]);
            table.row(vec![
                format!("└─ {}_monday.avhdx", "long".repeat(60)),
                "vhdx differencing".into(),
                "40 GiB".into(),
            ]);
            table.row(vec!["a.vhdx".into(), "vhdx".into(), "1 GiB".into()]);
            table
        };
        let written = |limit| {
            let mut out = Vec::new();
            table().within(limit).write(&mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let told = written(Some(80));
        assert!(told.lines().all(|line| line.chars().count() <= 80), "{told}");
        assert!(told.contains("└─ long") && told.contains("…") && told.contains("_monday.avhdx  vhdx diff"), "{told}");
        // Not below what can be read, and never without a terminal.
        assert!(written(Some(20)).contains("└─ lon…avhdx"), "{}", written(Some(20)));
        assert!(written(None).contains(&"long".repeat(60)));
    }

    #[test]
    fn columns_line_up() {
        let mut table = Columns::new(&[("layer", Align::Left), ("bytes", Align::Right), ("note", Align::Left)]);
        table.row(vec!["top".into(), "5".into()]);
        table.row(vec!["a".into(), "123456".into(), "·".into()]);
        let mut out = Vec::new();
        table.write(&mut out).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap(), @r"
        layer   bytes  note
        top         5
        a      123456  ·
        ");
    }
}
