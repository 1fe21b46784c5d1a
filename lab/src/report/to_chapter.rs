//! The trait of results that can be shown as a chapter of a report.

use diskwright_outline::Chapter;

/// A result that can be shown as a chapter of a report.
pub trait ToChapter {
    /// The chapter. `id` is unique in the report; `name` is the name of the result's file.
    fn chapter(&self, id: &str, name: &str) -> Chapter;
}

impl ToChapter for Chapter {
    /// A copy; `id` and `name` are ignored.
    fn chapter(&self, _id: &str, _name: &str) -> Chapter {
        self.clone()
    }
}
