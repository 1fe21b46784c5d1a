//! Results for other programs: CSV for spreadsheets and statistics, Markdown for texts. The JSON of a result is the result itself.

mod csv;
mod markdown;
mod studies;

pub use csv::{CsvTable, csv};
pub use markdown::markdown;

use crate::document::{BUNDLE_SCHEMA, Bundle, Document};

/// Results as JSON: one as it is, several in a bundle that can be read back.
///
/// # Errors
/// What the JSON writer says.
pub fn json(results: &[crate::report::Named<'_>]) -> serde_json::Result<String> {
    let documents: Vec<&Document> = results.iter().map(|(_, document)| *document).collect();
    let mut text = match documents.as_slice() {
        [one] => serde_json::to_string_pretty(one)?,
        several => serde_json::to_string_pretty(&Bundle { schema: BUNDLE_SCHEMA, results: several.to_vec() })?,
    };
    text.push('\n');
    Ok(text)
}
