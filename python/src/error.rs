//! `DiskError`: an `OSError` with the library's sentence and its code.
//!
//! The library's texts name its own options. [`for_keywords`] gives them the names of the keyword
//! arguments here, in errors and in every sentence that is returned. Options that no function here
//! has keep the library's name.

use diskwright_lib::{DiskError as LibraryError, ErrorCode, rename_options};
use pyo3::{create_exception, exceptions::PyOSError, prelude::*};
use std::{fmt::Display, io};

create_exception!(
    diskwright,
    DiskError,
    PyOSError,
    "Why a disk operation failed: a sentence, and `code`, a stable name such as 'not_found', 'locked', 'corrupt'."
);

/// What becomes an exception.
pub(crate) enum Failure {
    /// A `DiskError` with this code.
    Disk(ErrorCode, String),
    /// An exception of Python's own.
    Python(PyErr),
}

impl Failure {
    /// An error of any other function.
    pub(crate) fn of_disk(error: &LibraryError) -> Self {
        Self::Disk(error.code(), for_keywords(error))
    }

    /// An error of `convert`.
    pub(crate) fn of_convert(error: &LibraryError) -> Self {
        Self::Disk(error.code(), for_convert_keywords(error))
    }
}

/// A sentence of the library, with keyword arguments for the options in it.
pub(crate) fn for_keywords(sentence: impl Display) -> String {
    with_keywords(&sentence.to_string(), "format")
}

/// The same for `convert`, whose `format` is that of the copy.
pub(crate) fn for_convert_keywords(sentence: impl Display) -> String {
    with_keywords(&sentence.to_string(), "source_format")
}

fn with_keywords(sentence: &str, format_of_source: &str) -> String {
    rename_options(sentence, |option, has_value| {
        let keyword = match option {
            "OpenOptions::format" => format_of_source,
            "OpenOptions::allow_parent_write" => "allow_parent_write",
            "ParentPolicy::allow_any" => "allow_any_parent",
            "ParentPolicy::allowed_dirs" => "allow_parent_dirs",
            "ParentPolicy::ignore_timestamp" => "ignore_parent_timestamp",
            "CreateRequest::block_bytes" => "block_size",
            "CreateRequest::disk_type" => "disk_type",
            "CreateRequest::format" => "format",
            "CreateRequest::logical_sector_bytes" => "sector_size",
            "CreateRequest::parent" => "parent",
            "CreateRequest::preallocate" => "preallocate",
            "CreateRequest::size_bytes" => "size",
            "ConvertOptions::azure" => "azure",
            "ConvertOptions::identity" => "identity",
            "ConvertOptions::size" => "size",
            "ConvertOptions::skip_damaged" => "skip_damaged",
            "MoveOptions::keep_old" => "keep_old",
            "RescueOptions::block_bytes" => "block_size",
            "RescueOptions::no_parent" => "no_parent",
            "RescueOptions::parent" => "parent",
            "RescueOptions::size_bytes" => "size",
            "RescueOptions::trust_absent" => "trust_table",
            _ => return None,
        };
        Some(format!("`{keyword}`{}", if has_value { " = " } else { "" }))
    })
}

/// Arguments that can never work.
pub(crate) fn refused(sentence: String) -> Failure {
    Failure::Disk(ErrorCode::InvalidInput, sentence)
}

impl From<LibraryError> for Failure {
    fn from(error: LibraryError) -> Self {
        Self::of_disk(&error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Disk(LibraryError::code_of(&error), for_keywords(error))
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Python(error) => error,
            Failure::Disk(code, sentence) => Python::attach(|py| {
                let error = DiskError::new_err(sentence);
                match error.value(py).setattr("code", code.as_str()) {
                    Ok(()) => error,
                    Err(other) => other,
                }
            }),
        }
    }
}
