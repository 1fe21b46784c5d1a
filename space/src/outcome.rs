//! What became of a read or a write by blocking calls.

/// What a read of a slab has found; the worst last.
#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Found {
    /// All is well.
    Intact,
    /// A copy was wrong or could not be read, and another one was not.
    Wrong,
    /// There is nothing to compare the slab with.
    NoSums,
    /// No copy has the checksums.
    Lost,
}

/// Whether a write has entered the log of the cache.
#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq)]
pub(crate) enum Entered {
    Yes,
    /// It does not belong there.
    No,
    /// There was no room after all.
    Full,
}
