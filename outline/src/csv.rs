//! Records as CSV (RFC 4180: commas, CRLF, quotes where they are needed), tidy: one observation a
//! row, one variable a column, units in the names of the columns.
//!
//! A record names its columns itself, so that a value cannot stand under another column's name. All
//! records of one table have the same columns in the same order; the first record decides which.

use std::io;

/// A table that is being written.
#[derive(Debug)]
pub struct Csv {
    heads: Vec<String>,
    rows: ::csv::Writer<Vec<u8>>,
}

impl Default for Csv {
    fn default() -> Self {
        let rows = ::csv::WriterBuilder::new().terminator(::csv::Terminator::CRLF).from_writer(Vec::new());
        Self { heads: Vec::new(), rows }
    }
}

impl Csv {
    /// Adds a record: names of columns and their values; a value that is not known is empty.
    ///
    /// # Errors
    /// When the columns are not those of the first record.
    pub fn record(&mut self, fields: &[(&str, String)]) -> io::Result<()> {
        let heads = || fields.iter().map(|(head, _)| *head);
        if self.heads.is_empty() {
            self.heads = heads().map(str::to_owned).collect();
            self.rows.write_record(&self.heads)?;
        }
        if !heads().eq(self.heads.iter().map(String::as_str)) {
            let found = heads().collect::<Vec<_>>().join(",");
            return Err(io::Error::other(format!("a record has the columns {found}, not {}", self.heads.join(","))));
        }
        Ok(self.rows.write_record(fields.iter().map(|(_, value)| value.as_str()))?)
    }

    /// The table as text.
    ///
    /// # Errors
    /// When a value is not UTF-8, which no `String` can be.
    pub fn finish(self) -> io::Result<String> {
        let bytes = self.rows.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
        String::from_utf8(bytes).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_quoted_where_they_must_be_and_columns_do_not_change() {
        let mut csv = Csv::default();
        csv.record(&[("target", "a, \"b\"\nc".into()), ("iops", "12".into())]).unwrap();
        let error = csv.record(&[("iops", "12".into()), ("target", "x".into())]).unwrap_err().to_string();
        assert_eq!(error, "a record has the columns iops,target, not target,iops");
        csv.record(&[("target", "d".into()), ("iops", String::new())]).unwrap();
        assert_eq!(csv.finish().unwrap(), "target,iops\r\n\"a, \"\"b\"\"\nc\",12\r\nd,\r\n");
    }
}
