//! Rules broken on purpose, from outside: the code under test is as it is shipped, and the world
//! below it (or the image between, see [`meddler`](crate::meddler)) does not do what it was asked
//! for. What is not caught then is not tested.

use crate::{
    contents::{Change, Contents},
    history::FileId,
};

/// What the code under test is doing, so that a rule can be broken in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Opening for writing: replay of a log.
    Open,
    /// The first write of a session: identities change, space is surveyed.
    FirstWrite,
    /// A write that must be durable when it ends.
    DurableWrite,
    /// A flush.
    Flush,
    /// An image joins on top of a disk that is in use.
    Snapshot,
    /// A disk that is in use grows.
    Grow,
    /// Closing.
    Close,
    /// A command: create, convert.
    Command,
}

/// A rule to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// The n-th sync of each phase of a kind does nothing. What it should have made durable is
    /// durable when the phase has ended, so that only the *order* within it is broken.
    Unordered(Phase, u32),
    /// No sync of a phase of this kind does anything until it has ended: all order within is lost.
    Disordered(Phase),
    /// No sync of a phase of this kind does anything: what was promised is not there.
    NotDurable(Phase),
    /// Syncs of a phase of this kind reach the file that was made first, and no other.
    FirstFileOnly(Phase),
    /// A lane answers a write before it is carried out, which is when the lane is driven next.
    AnsweredTooEarly,
    /// Names are not made durable.
    NoDirectorySync,
    /// Space is not zeroed before it is used again.
    NoZeroing,
    /// The file is never cut.
    NoCutting,
    /// Nothing is written to the first sector of a file that is there already: a VHD's copy of the
    /// footer.
    NoFirstSector,
}

impl Mutation {
    /// Whether this sync is left out, and if so whether it is made up for at the end of the phase.
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
