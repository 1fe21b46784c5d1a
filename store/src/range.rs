//! Ranges of a store, and what is done to them.

/// Whether a range is read or changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The bytes are read.
    Read,
    /// The bytes are written or zeroed.
    Write,
}

/// What happens to the space of a range that is zeroed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeroing {
    /// The space stays allocated (`FALLOC_FL_ZERO_RANGE`).
    Keep,
    /// The space may be freed (`FALLOC_FL_PUNCH_HOLE`).
    Deallocate,
}

/// A range of a store, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileRange {
    /// First byte.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}
