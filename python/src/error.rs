//! `DiskError`: an `OSError` with the library's sentence and its code.

use diskwright_lib::{DiskError as LibraryError, ErrorCode};
use pyo3::{create_exception, exceptions::PyOSError, prelude::*};
use std::io;

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

/// Arguments that can never work.
pub(crate) fn refused(sentence: String) -> Failure {
    Failure::Disk(ErrorCode::InvalidInput, sentence)
}

impl From<LibraryError> for Failure {
    fn from(error: LibraryError) -> Self {
        Self::Disk(error.code(), error.to_string())
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Disk(LibraryError::code_of(&error), error.to_string())
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
