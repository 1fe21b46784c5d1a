//! Rules that are broken on purpose in the files below the disk. The code under test is unchanged;
//! the [`World`](crate::world::World) below it does not do what it was asked. (An image wrapper
//! that breaks rules is in [`rule_breaker`](crate::rule_breaker).) A broken rule that no test
//! catches is not tested.

use crate::{
    contents::{Change, Contents},
    history::FileId,
};

/// What the code under test is doing at the moment, so that a rule can be broken in one place only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Opening for writing, including log replay.
    Open,
    /// The first write of a session: identities change, free space is surveyed.
    FirstWrite,
    /// A write with FUA.
    DurableWrite,
    /// A flush.
    Flush,
    /// An image is added on top of a disk in use.
    Snapshot,
    /// A disk in use is merged into its parent.
    Absorb,
    /// A disk in use grows.
    Grow,
    /// Frozen images of a disk in use are merged.
    Merge,
    /// A disk in use gets another link to its parent.
    Relink,
    /// A disk in use is compacted.
    Compact,
    /// Slabs of a pool get checksums, or are compared with them.
    Scrub,
    /// Slabs of a pool move between members.
    Migrate,
    /// Blocks of a pool's cache go to their slabs.
    Destage,
    /// Closing.
    Close,
    /// A command: create or convert.
    Command,
}

/// A rule to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// The n-th sync of each phase of this kind does nothing. The sync is made up for when the
    /// phase ends, so only the *order* within the phase is broken.
    Unordered(Phase, u32),
    /// All syncs of a phase of this kind take effect only when the phase ends: the order within it
    /// is lost.
    Disordered(Phase),
    /// Syncs of a phase of this kind do nothing at all.
    NotDurable(Phase),
    /// Syncs of a phase of this kind take effect only for the file that was made first.
    FirstFileOnly(Phase),
    /// A lane answers a write before it carries it out, which it does when it is driven next.
    AnsweredTooEarly,
    /// Directories are not synced.
    NoDirectorySync,
    /// Space is not zeroed before it is reused.
    NoZeroing,
    /// Files are not truncated.
    NoCutting,
    /// Nothing is written to the first sector of an existing file, which holds a VHD's copy of the
    /// footer.
    NoFirstSector,
}

impl Mutation {
    /// Whether this sync is left out, and if so, whether it is made up for at the end of the phase.
    pub(crate) fn leaves_out(self, in_phase: Phase, number: u32, file: FileId) -> Option<bool> {
        match self {
            Self::Unordered(phase, which) if phase == in_phase && which == number => Some(true),
            Self::Disordered(phase) if phase == in_phase => Some(true),
            Self::NotDurable(phase) if phase == in_phase => Some(false),
            Self::FirstFileOnly(phase) if phase == in_phase && file > 0 => Some(false),
            _ => None,
        }
    }

    /// Whether this change is left out.
    pub(crate) fn drops(self, change: &Change, contents: Option<&Contents>) -> bool {
        let len_bytes = contents.map_or(0, Contents::len_bytes);
        match (self, change) {
            (Self::NoZeroing, Change::Zero(_)) => true,
            (Self::NoCutting, Change::Length(to)) => *to < len_bytes,
            (Self::NoFirstSector, Change::Write(at, _)) => *at == 0 && len_bytes > 0,
            _ => false,
        }
    }
}
