//! Bytes that this process moved to and from storage, by the kernel's account `/proc/self/io`.
//!
//! The kernel counts `read_bytes` and `write_bytes` when a transfer is passed to the block layer,
//! or, for writes to the page cache, when a page becomes dirty. So requests that an image answers
//! from metadata are not counted, and neither are reads from the page cache.

use crate::{LabError, Result};
use std::{io, ops::Sub, path::Path};

const ACCOUNT: &str = "/proc/self/io";

/// Bytes since the process started, or between two readings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Read from storage.
    pub read_bytes: u64,
    /// Written to storage.
    pub written_bytes: u64,
}

impl Traffic {
    /// Bytes of all threads so far, including threads that have ended.
    ///
    /// # Errors
    /// [`LabError::File`] if the kernel's account cannot be read.
    pub fn of_process() -> Result<Self> {
        let failed = LabError::file("read the kernel's account of this process from", Path::new(ACCOUNT));
        std::fs::read_to_string(ACCOUNT).and_then(|text| Self::parse(&text)).map_err(failed)
    }

    fn parse(text: &str) -> io::Result<Self> {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            line.and_then(|value| value.trim().parse().ok())
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("the number {name} is missing")))
        };
        Ok(Self { read_bytes: field("read_bytes")?, written_bytes: field("write_bytes")? })
    }
}

impl Sub for Traffic {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            read_bytes: self.read_bytes.saturating_sub(before.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(before.written_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_account_is_read() {
        let text = "rchar: 1\nwchar: 2\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 7\n";
        let traffic = Traffic::parse(text).unwrap();
        assert_eq!((traffic.read_bytes, traffic.written_bytes), (4096, 8192));
        assert!(Traffic::parse("rchar: 1").is_err());
        assert!(Traffic::of_process().is_ok());
    }
}
