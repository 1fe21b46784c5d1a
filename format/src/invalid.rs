//! The error of parsing a structure.

/// The result of parsing.
pub type Result<T, E = Invalid> = std::result::Result<T, E>;

/// A structure that contradicts its specification.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{structure}, byte {offset_bytes}: found {found}, expected {expected}")]
pub struct Invalid {
    /// The structure, as its specification calls it.
    pub structure: &'static str,
    /// Offset of the wrong field from the beginning of the structure, in bytes.
    pub offset_bytes: u64,
    /// What was found, in words.
    pub found: String,
    /// What was expected, in words.
    pub expected: String,
}

impl Invalid {
    /// An error at `offset_bytes` of `structure`.
    pub fn new(structure: &'static str, offset_bytes: u64, found: impl ToString, expected: impl ToString) -> Self {
        Self { structure, offset_bytes, found: found.to_string(), expected: expected.to_string() }
    }

    pub(crate) fn short(structure: &'static str, found_bytes: usize, expected_bytes: usize) -> Self {
        Self::new(structure, 0, format!("{found_bytes} bytes"), format!("at least {expected_bytes}"))
    }
}
