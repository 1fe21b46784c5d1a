//! Results for other programs: CSV, and Markdown. The JSON of a result is the result itself.

mod csv;
mod judged;
mod runs;

pub use crate::report::markdown;
pub use csv::{CsvTable, csv};

use crate::document::{BUNDLE_SCHEMA, Bundle, Document};
use diskwright_outline::json::to_text;

/// Results as JSON: a single result unchanged, several as a bundle that can be read back.
///
/// # Errors
/// If a result cannot be serialised.
pub fn json(results: &[crate::report::Named<'_>]) -> std::io::Result<String> {
    let documents: Vec<&Document> = results.iter().map(|(_, document)| *document).collect();
    match documents.as_slice() {
        [one] => to_text(one),
        several => to_text(&Bundle { schema: BUNDLE_SCHEMA, results: several.to_vec() }),
    }
}
