//! INIT: chooses the protocol version and the features from what the kernel offers.
//!
//! Features that are used, and why:
//!
//! - `ASYNC_DIO`, `ASYNC_READ`: without them a loop device has only one request in flight, whatever
//!   its queue depth.
//! - `MAX_PAGES` with 256 pages, `BIG_WRITES`: a request of 1 MiB is one message.
//! - A high `max_background`: FUSE treats the requests of a loop device as background requests, and
//!   by default allows 12 of them.
//! - `DIRECT_IO_ALLOW_MMAP`: files are opened for direct I/O, and programs that map them must still
//!   work.
//!
//! Not used: `WRITEBACK_CACHE` (a second page cache), `ATOMIC_O_TRUNC` (the kernel would then
//! assume that opening with O_TRUNC sets the length to 0).

use crate::fuse::wire::{Accepted, MAJOR, MINOR, init};

/// Largest transfer of one message.
pub const MAX_TRANSFER_BYTES: u32 = 1 << 20;

/// The oldest supported minor version. Since 31 (Linux 5.4), FALLOCATE, LSEEK, and INIT with
/// `max_pages` have their present layout.
pub const OLDEST_MINOR: u32 = 31;

const PAGE_BYTES: u32 = 4096;

/// Background requests that the kernel may have in flight. It allows fewer to mounts of users other
/// than root.
const MAX_BACKGROUND: u16 = 512;

const WANTED: u64 = init::ASYNC_READ
    | init::BIG_WRITES
    | init::ASYNC_DIO
    | init::PARALLEL_DIROPS
    | init::MAX_PAGES
    | init::NO_OPENDIR_SUPPORT
    | init::INIT_EXT
    | init::DIRECT_IO_ALLOW_MMAP;

/// The reply to INIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Negotiated {
    /// Accept, with these parameters.
    Accept(Accepted),
    /// Reply with our version only: the kernel's major version is newer, and it will send INIT
    /// again.
    Retry,
    /// The kernel's version is not supported.
    TooOld,
}

pub fn negotiate(major: u32, minor: u32, max_readahead_bytes: u32, offered: u64) -> Negotiated {
    if major > MAJOR {
        return Negotiated::Retry;
    }
    if major < MAJOR || minor < OLDEST_MINOR || offered & init::MAX_PAGES == 0 {
        return Negotiated::TooOld;
    }
    Negotiated::Accept(Accepted {
        minor: minor.min(MINOR),
        max_readahead_bytes,
        flags: offered & WANTED,
        max_background: MAX_BACKGROUND,
        congestion_threshold: MAX_BACKGROUND / 4 * 3,
        max_write_bytes: MAX_TRANSFER_BYTES,
        max_pages: (MAX_TRANSFER_BYTES / PAGE_BYTES) as u16,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_features_known_to_both_are_used() {
        let Negotiated::Accept(accepted) = negotiate(7, 45, 131_072, u64::MAX) else { panic!("refused") };
        assert_eq!((accepted.minor, accepted.flags, accepted.max_pages), (MINOR, WANTED, 256));
        let old = init::MAX_PAGES | init::ASYNC_DIO;
        let Negotiated::Accept(accepted) = negotiate(7, 31, 0, old) else { panic!("refused") };
        assert_eq!((accepted.minor, accepted.flags), (31, old));
    }

    #[test]
    fn other_versions_are_refused() {
        assert_eq!(negotiate(8, 0, 0, 0), Negotiated::Retry);
        assert_eq!(negotiate(7, 30, 0, u64::MAX), Negotiated::TooOld);
        assert_eq!(negotiate(6, 40, 0, u64::MAX), Negotiated::TooOld);
        assert_eq!(negotiate(7, 31, 0, 0), Negotiated::TooOld);
    }
}
