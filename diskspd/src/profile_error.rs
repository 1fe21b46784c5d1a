//! Errors of XML profiles.

/// An XML profile that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Text that is not XML, an unknown element, or a bad value.
    #[error("line {line}: found {found}, expected {expected}")]
    Wrong {
        /// Line of the file, from 1.
        line: usize,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// An element of DiskSpd that is not supported.
    #[error("line {line}: <{element}> is not supported: {why}")]
    Refused {
        /// Line of the file, from 1.
        line: usize,
        /// Name of the element.
        element: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// The targets of the command line do not match the templates of the profile (`*1`).
    #[error("{0}")]
    Templates(String),
}
