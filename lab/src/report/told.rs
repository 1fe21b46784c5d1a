//! What every result can do: become a chapter.

use diskwright_outline::Chapter;

/// A result that can be told as a chapter of a report.
pub trait Told {
    /// The chapter. `id` is unique in the report; `name` is that of the result's file.
    fn chapter(&self, id: &str, name: &str) -> Chapter;
}

impl Told for Chapter {
    /// As it is, under whatever name it was made.
    fn chapter(&self, _id: &str, _name: &str) -> Chapter {
        self.clone()
    }
}
