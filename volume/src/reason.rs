//! Why a volume is left alone.

/// Kind of reason why nothing of a volume may be given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReasonKind {
    /// The file system was not unmounted cleanly, or has recorded errors.
    Dirty,
    /// A suspended system still has the volume in use.
    Hibernated,
    /// The contents are encrypted.
    Encrypted,
    /// The file system, or one of its features, is known by name only.
    Unsupported,
    /// A structure contradicts itself or another one.
    Damaged,
    /// Two valid signatures, or two partition tables, in one place.
    Ambiguous,
    /// No known signature.
    Unknown,
    /// A read failed.
    Unreadable,
}

/// Why a volume, or a disk, is left alone. Its text is a sentence for the user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{sentence}")]
pub struct LeftAlone {
    /// The kind of reason.
    pub why: ReasonKind,
    /// What was found, and what would help.
    pub sentence: String,
}

impl LeftAlone {
    pub(crate) fn new(why: ReasonKind, sentence: impl Into<String>) -> Self {
        Self { why, sentence: sentence.into() }
    }

    /// Something contradicts the format.
    pub(crate) fn damaged(what: impl std::fmt::Display) -> Self {
        Self::new(ReasonKind::Damaged, format!("{what}: check it with its own tools"))
    }

    /// A feature that no reader here knows.
    pub(crate) fn unsupported(what: impl std::fmt::Display) -> Self {
        Self::new(ReasonKind::Unsupported, format!("{what} is not supported"))
    }
}

/// Why a scan of a free-space map has ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The map cannot be trusted.
    LeftAlone(LeftAlone),
    /// The caller has asked for it.
    Cancelled,
}

impl From<LeftAlone> for Stop {
    fn from(reason: LeftAlone) -> Self {
        Self::LeftAlone(reason)
    }
}
