//! Why a file is not a result that can be used.

use std::{io, path::PathBuf};

/// Why a file is not a result that can be used.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The system could not open or read the file.
    #[error("cannot read the result {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is longer than any result.
    #[error("{} is longer than 1 GiB and so no result of the lab; give a JSON file that the lab wrote", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// The JSON ends in the middle.
    #[error("{} ends in the middle of line {line}: it was cut off, or its run has not ended; copy it again or run again", path.display())]
    CutOff {
        /// The file.
        path: PathBuf,
        /// The last line, from 1.
        line: usize,
    },
    /// Not JSON.
    #[error("{} is not JSON (line {line}, column {column}); give a result that the lab saved as JSON, not a report made from it", path.display())]
    NotJson {
        /// The file.
        path: PathBuf,
        /// The line of the first error, from 1.
        line: usize,
        /// The column of the first error, from 1.
        column: usize,
    },
    /// The file is JSON, but no result of the lab.
    #[error("{} is JSON but no result of the lab: {found}; give what `lab run`, `lab study`, `lab sweep` or `lab selftest` saved", path.display())]
    NoResult {
        /// The file.
        path: PathBuf,
        /// What stands in the place of the schema, in words.
        found: String,
    },
    /// The schema has a later version than this program knows.
    #[error("{} was written by a newer Diskwright: its schema is {found}, this one ({}) reads up to {known}; read it with the newer one", path.display(), env!("CARGO_PKG_VERSION"))]
    Newer {
        /// The file.
        path: PathBuf,
        /// Schema of the file.
        found: String,
        /// The schema of this kind that this program reads.
        known: &'static str,
    },
    /// The schema has an earlier version than this program reads.
    #[error("{} was written by an older Diskwright: its schema is {found}, this one ({}) reads {known} only; measure again, or read it with the older one", path.display(), env!("CARGO_PKG_VERSION"))]
    Older {
        /// The file.
        path: PathBuf,
        /// Schema of the file.
        found: String,
        /// The schema of this kind that this program reads.
        known: &'static str,
    },
    /// The file is a bundle of several results, where one is wanted.
    #[error("{} holds {results} results, and one is wanted; give the file of that one, as it was saved", path.display())]
    Several {
        /// The file.
        path: PathBuf,
        /// Number of results in it.
        results: usize,
    },
    /// The fields are not those of the schema, or contradict each other.
    #[error("{} says that it is {schema}, but it is damaged: {what}; it was edited or harmed after it was written: copy it again or run again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Schema of the file.
        schema: String,
        /// The first field that is wrong, and what is wrong with it.
        what: String,
    },
}
