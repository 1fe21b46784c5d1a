//! Runs a long operation without the GIL, and calls Python between its steps.
//!
//! What Python says between two steps, a signal or the callback's own exception, ends the operation
//! and is what the caller gets.

use crate::error::Failure;
use diskwright_lib::{DiskError as LibraryError, Progress};
use pyo3::prelude::*;

/// Runs `operation`, and passes what it tells to `callback(done, total)`. `failed` turns an error
/// of the library into the caller's.
///
/// # Errors
/// The exception that has ended it, else the error of `operation`.
pub(crate) fn with_progress<T: Send>(
    py: Python<'_>,
    callback: Option<Py<PyAny>>,
    failed: fn(&LibraryError) -> Failure,
    operation: impl FnOnce(&mut Progress<'_>) -> Result<T, LibraryError> + Send,
) -> Result<T, Failure> {
    let mut raised = None;
    let mut step = |done_bytes: u64, total_bytes: u64| {
        Python::attach(|py| {
            let told = py.check_signals().and_then(|()| match &callback {
                Some(callback) => callback.call1(py, (done_bytes, total_bytes)).map(drop),
                None => Ok(()),
            });
            match told {
                Ok(()) => raised.is_none(),
                Err(error) => {
                    raised.get_or_insert(error);
                    false
                }
            }
        })
    };
    let outcome = py.detach(|| operation(&mut step));
    match raised {
        Some(error) => Err(Failure::Python(error)),
        None => outcome.map_err(|error| failed(&error)),
    }
}
