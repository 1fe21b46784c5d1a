//! Locks between the processes that share a cache: one byte of a map's range each.
//!
//! ```text
//!   OPEN        shared by all that have the object open; exclusively to remove its files
//!   HEAD        while the head is made
//!   BLOCKS + n  while block n is fetched, or dropped
//! ```
//!
//! The locks are those of open file descriptions: they end with the process, and two opens of one
//! process exclude each other.

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
    libc,
};
use std::{fs::File, io};

/// The byte that says that the object is open.
pub(super) const OPEN: u64 = 1 << 60;
/// The byte of the head.
pub(super) const HEAD: u64 = 1 << 61;
/// The byte of block 0.
pub(super) const BLOCKS: u64 = 1 << 62;

fn range(kind: i32, at: u64) -> libc::flock {
    libc::flock { l_type: kind as _, l_whence: libc::SEEK_SET as _, l_start: at as _, l_len: 1, l_pid: 0 }
}

/// Takes a lock. `false` if another one has it.
pub(super) fn try_lock(file: &File, at: u64, is_exclusive: bool) -> io::Result<bool> {
    let kind = if is_exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
    match fcntl(file, FcntlArg::F_OFD_SETLK(&range(kind, at))) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Waits for a lock.
pub(super) fn lock(file: &File, at: u64) -> io::Result<()> {
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLKW(&range(libc::F_WRLCK, at))) {
            Err(Errno::EINTR) => {}
            result => return result.map(|_| ()).map_err(io::Error::from),
        }
    }
}

/// Gives a lock up.
pub(super) fn unlock(file: &File, at: u64) {
    // It cannot fail for a lock that is held, and ends with the file.
    let _ = fcntl(file, FcntlArg::F_OFD_SETLK(&range(libc::F_UNLCK, at)));
}
