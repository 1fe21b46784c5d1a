//! Reasons why a file cannot be read as a result.

use std::{io, path::PathBuf};

/// A reason why a file cannot be read as a result.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file could not be opened or read.
    #[error("cannot read the result {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file is longer than any result.
    #[error("{} is longer than 1 GiB, so it is not a result of the lab; give a JSON file that the lab wrote", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// The JSON ends in the middle.
    #[error("{} ends in the middle of line {line}: it is incomplete; copy it again, or repeat the measurement", path.display())]
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
    /// The file is JSON, but not a result of the lab.
    #[error("{} is JSON but not a result of the lab: {found}; give a file that `lab run`, `lab study`, `lab sweep` or `lab selftest` saved", path.display())]
    NoResult {
        /// The file.
        path: PathBuf,
        /// What was found instead of the schema.
        found: String,
    },
    /// The schema has a later version than this program knows.
    #[error("{} was written by a newer Diskwright: its schema is {found}, this version ({}) reads up to {known}; use the newer version", path.display(), env!("CARGO_PKG_VERSION"))]
    Newer {
        /// The file.
        path: PathBuf,
        /// Schema of the file.
        found: String,
        /// The schema of this kind that this program reads.
        known: &'static str,
    },
    /// The schema has an earlier version than this program reads.
    #[error("{} was written by an older Diskwright: its schema is {found}, this version ({}) reads only {known}; measure again, or use the older version", path.display(), env!("CARGO_PKG_VERSION"))]
    Older {
        /// The file.
        path: PathBuf,
        /// Schema of the file.
        found: String,
        /// The schema of this kind that this program reads.
        known: &'static str,
    },
    /// The file is a bundle of several results, but one is needed.
    #[error("{} holds {results} results, but one is needed; give the file with that result alone", path.display())]
    Several {
        /// The file.
        path: PathBuf,
        /// Number of results in it.
        results: usize,
    },
    /// The fields are not those of the schema, or contradict each other.
    #[error("{} says that it is {schema}, but it is damaged: {what}; it was changed after it was written; copy it again, or repeat the measurement", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Schema of the file.
        schema: String,
        /// The first wrong field, and what is wrong with it.
        what: String,
    },
}
