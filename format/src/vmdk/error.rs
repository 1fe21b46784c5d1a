//! Errors of parsing a VMDK structure.

/// A structure that contradicts the specification, or that this program does not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{structure} at offset {offset_bytes}: found {found}, expected {expected}")]
pub struct VmdkError {
    /// The structure, as the specification calls it.
    pub structure: &'static str,
    /// Offset of the wrong field in its file, in bytes. For a descriptor: of the line.
    pub offset_bytes: u64,
    /// What was found.
    pub found: String,
    /// What was expected.
    pub expected: String,
}
