//! What can go wrong below, and when.

use std::io;

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Reading bytes.
    Read,
    /// Writing bytes, or zeros that must be there.
    Write,
    /// Giving space back: advice, whose failure nobody need be told of.
    Punch,
    /// Sharing another file's bytes: where that fails they are copied.
    Share,
    /// Growing, cutting, reserving.
    Length,
    /// Making durable.
    Sync,
    /// Creating, renaming, removing; making a directory durable.
    Name,
}

/// How an operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// The medium fails (EIO).
    Io,
    /// The file system is full (ENOSPC).
    Full,
    /// The file system is full in the middle of a write, whose first half is there.
    Short,
    /// It takes a while, and succeeds.
    Slow,
    /// A lane never answers it (see `world/late.rs`). Such a fault counts the operations of lanes.
    Silent,
}

impl FaultKind {
    /// What the system says.
    pub fn error(self) -> io::Error {
        io::Error::from_raw_os_error(match self {
            Self::Io | Self::Slow | Self::Silent => 5,
            Self::Full | Self::Short => 28,
        })
    }
}

/// What fails after the operation that failed first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lasts {
    /// Nothing.
    Once,
    /// All that follows.
    ForEver,
    /// All that follows on the same file.
    InThatFile,
}

/// A fault that is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// How it fails.
    pub kind: FaultKind,
    /// The operation that fails, from 1 on.
    pub at: u64,
    /// What fails after it.
    pub lasts: Lasts,
}

impl Fault {
    /// How operation `number` fails, if it does. Space runs out only where space is asked for.
    pub(crate) fn strikes(&self, number: u64, moment: Moment, same_file: bool) -> Option<FaultKind> {
        let lasts = match self.lasts {
            Lasts::Once => false,
            Lasts::ForEver => true,
            Lasts::InThatFile => same_file,
        };
        let due = number == self.at || (lasts && number > self.at);
        let possible = match self.kind {
            FaultKind::Silent => false,
            FaultKind::Io | FaultKind::Slow => true,
            FaultKind::Full | FaultKind::Short => moment != Moment::Read,
        };
        (due && possible).then_some(self.kind)
    }

    /// Whether operation `number` of lanes is never answered.
    pub(crate) fn silences(&self, number: u64) -> bool {
        self.kind == FaultKind::Silent && (number == self.at || (self.lasts != Lasts::Once && number > self.at))
    }
}
