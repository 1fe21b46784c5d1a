//! Which of the two disks of a copy failed, and where.

use std::{io, ops::Range};

/// The disk that failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The source, while this range was read.
    Source(Range<u64>, io::Error),
    /// The disk that is written.
    Dest(io::Error),
}

impl Failure {
    /// The offset of the failure, to select the first one. A failure of the destination counts as
    /// 0.
    pub(crate) fn start_bytes(&self) -> u64 {
        match self {
            Self::Source(range, _) => range.start,
            Self::Dest(_) => 0,
        }
    }
}
