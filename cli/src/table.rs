//! Aligned text: labelled values, and tables.

use std::io::{self, Write};

/// Labelled values, one a line, the values in one column. A value with line feeds, or with an empty
/// label, continues below.
#[derive(Debug, Default)]
pub struct Fields {
    rows: Vec<(String, String)>,
}

impl Fields {
    /// Adds a value. An empty label continues the one above.
    pub fn add(&mut self, label: &str, value: impl ToString) {
        for (index, line) in value.to_string().split('\n').enumerate() {
            let label = if index == 0 { label } else { "" };
            self.rows.push((label.to_owned(), line.to_owned()));
        }
    }

    /// Writes the lines.
    ///
    /// # Errors
    /// What the system says of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let width = self.rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
        self.rows
            .iter()
            .try_for_each(|(label, value)| writeln!(out, "{}", format!("{label:width$}  {value}").trim_end()))
    }
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

    /// Writes heading and rows.
    ///
    /// # Errors
    /// What the system says of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let heads: Vec<String> = self.heads.iter().map(|(head, _)| (*head).to_owned()).collect();
        let lines = || std::iter::once(&heads).chain(&self.rows);
        let widths: Vec<usize> = (0..self.heads.len())
            .map(|column| lines().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .collect();
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
