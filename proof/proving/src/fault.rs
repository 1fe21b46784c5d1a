//! Faults of operations on files: what fails, how, and when.

use crate::mutation::Phase;
use std::io;

/// Kinds of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum OpKind {
    /// Read bytes.
    Read,
    /// Write bytes, or write zeros that must be there.
    Write,
    /// Punch a hole. This is advice, so its failure need not be reported.
    Punch,
    /// Share another file's bytes (reflink). If it fails, the bytes are copied.
    Share,
    /// Grow, truncate or reserve.
    Length,
    /// Sync a file.
    Sync,
    /// Create, rename, remove, or sync a directory.
    Name,
}

/// An operation that was met, and what the code under test was doing.
pub type Met = (OpKind, Option<Phase>);

/// How an operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// The device fails (EIO).
    Io,
    /// The file system is full (ENOSPC).
    Full,
    /// The file system becomes full during a write; the first half of the write is done.
    Short,
    /// The operation is slow and succeeds.
    Slow,
    /// A lane never answers the operation (see `world/late.rs`). Only operations of lanes are
    /// counted.
    Silent,
}

impl FaultKind {
    /// Whether an operation of this kind can fail this way: ENOSPC occurs only in operations that
    /// need space.
    pub fn can_strike(self, op_kind: OpKind) -> bool {
        match self {
            Self::Silent => false,
            Self::Io | Self::Slow => true,
            Self::Full | Self::Short => op_kind != OpKind::Read,
        }
    }

    /// The error of the failed operation.
    pub fn error(self) -> io::Error {
        io::Error::from_raw_os_error(match self {
            Self::Io | Self::Slow | Self::Silent => 5,
            Self::Full | Self::Short => 28,
        })
    }
}

/// Which operations fail after the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Persistence {
    /// None.
    Once,
    /// All later operations.
    ForEver,
    /// All later operations on the same file.
    InThatFile,
}

/// A planned fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// How it fails.
    pub kind: FaultKind,
    /// Number of the operation that fails, from 1.
    pub at: u64,
    /// Which later operations fail.
    pub persistence: Persistence,
}

impl Fault {
    /// How operation `number` fails, if it does.
    pub(crate) fn strikes(&self, number: u64, op_kind: OpKind, same_file: bool) -> Option<FaultKind> {
        let persistence = match self.persistence {
            Persistence::Once => false,
            Persistence::ForEver => true,
            Persistence::InThatFile => same_file,
        };
        let due = number == self.at || (persistence && number > self.at);
        (due && self.kind.can_strike(op_kind)).then_some(self.kind)
    }

    /// Whether operation `number` of the lanes is never answered.
    pub(crate) fn silences(&self, number: u64) -> bool {
        self.kind == FaultKind::Silent
            && (number == self.at || (self.persistence != Persistence::Once && number > self.at))
    }
}
