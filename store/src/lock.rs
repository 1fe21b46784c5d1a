//! Locks on files, the same that QEMU takes, so that neither opens what the other is writing.
//!
//! QEMU (`block/file-posix.c`) says what it does with a file by open-file-description locks on
//! single bytes. There are four permissions: consistent read 0, write 1, write unchanged 2, resize
//! 3. Byte `100 + n`, read-locked, says "I hold permission n"; byte `200 + n` says "nobody else may
//! hold permission n". All locks are read locks, so all of them can always be taken; what they mean
//! is checked after they are taken, by asking whether a write lock could be placed:
//!
//! ```text
//!   take  100+n for each n held,   200+n for each n not shared
//!   test  200+n for each n held,   100+n for each n not shared         somebody else is there: let go, refuse
//! ```
//!
//! Taking first and testing after is what makes the race safe: of two that start together, at least
//! one sees the other. A reader holds `consistent read` and shares neither `write` nor `resize`. A
//! writer holds all four and shares the same. So readers share, and a writer is alone.
//!
//! The lock belongs to the open file description of the descriptor it was taken on, and is let go
//! of when the store is dropped. A file system without locks is used without them, as QEMU does.

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
    libc,
};
use std::{
    fmt, fs, io,
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::fs::MetadataExt,
    },
};

/// How to lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LockMode {
    /// No lock.
    None,
    /// Readers share; writers are kept out.
    #[default]
    Shared,
    /// Alone.
    Exclusive,
}

const HELD_BASE: i64 = 100;
const UNSHARED_BASE: i64 = 200;

const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const WRITE_UNCHANGED: i64 = 2;
const RESIZE: i64 = 3;

/// What neither a reader nor a writer shares.
const UNSHARED: [i64; 2] = [WRITE, RESIZE];

/// Why there is no lock.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Another open file description has the file.
    Held,
    /// The system failed.
    Io(io::Error),
}

/// Takes the lock, or says why not; then nothing stays locked.
pub(crate) fn acquire(fd: BorrowedFd<'_>, mode: LockMode) -> Result<(), Refusal> {
    let held: &[i64] = match mode {
        LockMode::None => return Ok(()),
        LockMode::Shared => &[CONSISTENT_READ],
        LockMode::Exclusive => &[CONSISTENT_READ, WRITE, WRITE_UNCHANGED, RESIZE],
    };
    let locks = || held.iter().map(|n| HELD_BASE + n).chain(UNSHARED.map(|n| UNSHARED_BASE + n));
    let tests = || held.iter().map(|n| UNSHARED_BASE + n).chain(UNSHARED.map(|n| HELD_BASE + n));
    let taken = (|| {
        for byte in locks() {
            match fcntl(fd, FcntlArg::F_OFD_SETLK(&one_byte(libc::F_RDLCK, byte))) {
                Ok(_) => {}
                Err(Errno::EAGAIN | Errno::EACCES) => return Err(Refusal::Held),
                // ENOLCK, EOPNOTSUPP, ENOSYS, EINVAL: this file system, or this kernel, has no such
                // locks.
                Err(Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) => return Ok(()),
                Err(errno) => return Err(Refusal::Io(errno.into())),
            }
        }
        for byte in tests() {
            let mut found = one_byte(libc::F_WRLCK, byte);
            match fcntl(fd, FcntlArg::F_OFD_GETLK(&mut found)) {
                Ok(_) if found.l_type == libc::F_UNLCK as libc::c_short => {}
                Ok(_) => return Err(Refusal::Held),
                Err(errno) => return Err(Refusal::Io(errno.into())),
            }
        }
        Ok(())
    })();
    if taken.is_err() {
        release(fd);
    }
    taken
}

/// Lets go of all locks of the open file description. Closing its last descriptor would do that
/// too, but a worker of an io_uring may hold on to the file for a moment after the completion of
/// its last transfer was seen.
pub(crate) fn release(fd: BorrowedFd<'_>) {
    let everything = libc::flock { l_len: 0, ..one_byte(libc::F_UNLCK, 0) };
    // It fails where there are no locks, and then none is held.
    let _ = fcntl(fd, FcntlArg::F_OFD_SETLK(&everything));
}

fn one_byte(kind: libc::c_int, byte: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

/// A process that has a file open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) pid: u32,
}

/// As in " by qemu-img (process 123)".
impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid } = self;
        if *pid == std::process::id() {
            return f.write_str(" by this program itself");
        }
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        // A process names itself, so its name may hold anything.
        let name: String = name.trim_end().chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        write!(f, " by {} (process {pid})", if name.is_empty() { "a program" } else { &name })
    }
}

/// Who has the file `identity` (device and inode) open, as far as that can be seen. A process that
/// holds a lock on it is preferred. `ours` is the descriptor that asks.
pub(crate) fn holder(identity: (u64, u64), ours: BorrowedFd<'_>) -> Option<Holder> {
    let mut best: Option<(bool, u32)> = None;
    for process in directory("/proc") {
        let Ok(pid) = process.parse::<u32>() else { continue };
        for descriptor in directory(&format!("/proc/{pid}/fd")) {
            if pid == std::process::id() && descriptor.parse() == Ok(ours.as_raw_fd()) {
                continue;
            }
            let Ok(metadata) = fs::metadata(format!("/proc/{pid}/fd/{descriptor}")) else { continue };
            if (metadata.dev(), metadata.ino()) != identity {
                continue;
            }
            let locks = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}"))
                .is_ok_and(|info| info.contains("\nlock:"));
            if best.is_none_or(|(best_locks, _)| locks && !best_locks) {
                best = Some((locks, pid));
            }
        }
        if let Some((true, _)) = best {
            break;
        }
    }
    best.map(|(_, pid)| Holder { pid })
}

fn directory(path: &str) -> impl Iterator<Item = String> {
    fs::read_dir(path).into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok())
}

#[cfg(test)]
mod tests;
