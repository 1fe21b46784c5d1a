//! The error of a job that cannot run.

/// A job that is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {what}; {hint}")]
pub struct JobError {
    /// The field of the job: `phase "main", load 2, block`.
    pub place: String,
    /// What is wrong with the field.
    pub what: String,
    /// A valid value, or what to do.
    pub hint: String,
}
