//! What can be wrong with an XML profile, told with its line.

/// What is wrong with a profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Not XML, an element that DiskSpd's profiles do not have, or a bad value.
    #[error("line {line}: found {found}, expected {expected}")]
    Wrong {
        /// Line of the file, from 1.
        line: usize,
        /// What stands there.
        found: String,
        /// What should stand there.
        expected: String,
    },
    /// An element of DiskSpd's that is not supported.
    #[error("line {line}: <{element}> is not supported: {why}")]
    Refused {
        /// Line of the file, from 1.
        line: usize,
        /// Its name.
        element: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// Targets of the command line and templates of the profile (`*1`) do not match.
    #[error("{0}")]
    Templates(String),
}
