//! CSV by RFC 4180: commas, CRLF, quotes where they are needed. Tables are tidy: one observation
//! per row, one variable per column, units in the names of the columns.
//!
//! Each record is given with the names of its columns, so that a value cannot be written under
//! another name. All records of a table have the columns of the first record, in the same order.

use std::io;

/// A CSV table in memory.
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
    /// Adds a record: pairs of a column name and a value. An unknown value is an empty string.
    ///
    /// # Errors
    /// When the columns differ from those of the first record.
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

    /// The CSV text.
    ///
    /// # Errors
    /// Those of the CSV writer, which does not fail in memory.
    pub fn finish(self) -> io::Result<String> {
        let bytes = self.rows.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
        String::from_utf8(bytes).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_quoted_and_other_columns_are_an_error() {
        let mut csv = Csv::default();
        csv.record(&[("target", "a, \"b\"\nc".into()), ("iops", "12".into())]).unwrap();
        let error = csv.record(&[("iops", "12".into()), ("target", "x".into())]).unwrap_err().to_string();
        assert_eq!(error, "a record has the columns iops,target, not target,iops");
        csv.record(&[("target", "d".into()), ("iops", String::new())]).unwrap();
        assert_eq!(csv.finish().unwrap(), "target,iops\r\n\"a, \"\"b\"\"\nc\",12\r\nd,\r\n");
    }
}
