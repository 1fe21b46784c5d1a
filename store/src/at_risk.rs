//! What the death of a process costs.

/// Whether the death of this process would undo requests that were completed; the worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AtRisk {
    /// At no time: a completed request is in a file, in the page cache, or at a server.
    Never,
    /// None of those that were completed, but later ones may be.
    NotNow,
    /// Some, unless a flush follows: the mapping that leads to their payload is in memory only.
    Now,
}
