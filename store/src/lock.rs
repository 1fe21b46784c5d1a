//! File locks compatible with QEMU, so that neither program opens a file that the other is writing.
//!
//! QEMU (`block/file-posix.c`) announces what it does with a file by open-file-description locks on
//! single bytes. There are four permissions: consistent read 0, write 1, write unchanged 2, resize
//! 3. A read lock on byte `100 + n` means "I hold permission n"; one on byte `200 + n` means "no
//! one else may hold permission n". All locks are read locks, so taking them never conflicts.
//! Conflicts are detected afterwards, by testing whether a write lock could be placed:
//!
//! ```text
//!   take  100+n for each n held,   200+n for each n not shared
//!   test  200+n for each n held,   100+n for each n not shared     conflict: release, refuse
//! ```
//!
//! Taking first and testing afterwards avoids the race: of two programs that start together, at
//! least one sees the other. A reader holds `consistent read` and shares neither `write` nor
//! `resize`. A writer holds all four and shares neither `write` nor `resize`. So several readers
//! can open a file together, but a writer excludes all others.
//!
//! A lock belongs to the open file description of its descriptor and is released when the store is
//! dropped. A file system without locks is used without them, as QEMU does.

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

/// Which lock to take on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LockMode {
    /// No lock.
    None,
    /// Allows other readers; excludes writers.
    #[default]
    Shared,
    /// Excludes readers and writers.
    Exclusive,
}

const HELD_BASE: i64 = 100;
const UNSHARED_BASE: i64 = 200;

const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const WRITE_UNCHANGED: i64 = 2;
const RESIZE: i64 = 3;

/// Permissions that neither a reader nor a writer shares.
const UNSHARED: [i64; 2] = [WRITE, RESIZE];

/// Why a lock was not taken.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Another open file description holds a conflicting lock.
    Held,
    /// The system call failed.
    Io(io::Error),
}

/// Takes the lock. If it fails, nothing stays locked.
pub(crate) fn acquire(fd: BorrowedFd<'_>, mode: LockMode) -> Result<(), Refusal> {
    take(fd, mode).inspect_err(|_| release(fd))
}

/// Turns the lock of a reader into that of a writer, without a moment in which another program
/// could take the file. If it fails, the lock of the reader stays.
pub(crate) fn exclude(fd: BorrowedFd<'_>) -> Result<(), Refusal> {
    take(fd, LockMode::Exclusive).inspect_err(|_| {
        // The first error is returned. The bytes of a writer keep readers away for longer.
        let _ = share(fd);
    })
}

/// Takes the lock, and leaves a part of it if that fails.
fn take(fd: BorrowedFd<'_>, mode: LockMode) -> Result<(), Refusal> {
    let held: &[i64] = match mode {
        LockMode::None => return Ok(()),
        LockMode::Shared => &[CONSISTENT_READ],
        LockMode::Exclusive => &[CONSISTENT_READ, WRITE, WRITE_UNCHANGED, RESIZE],
    };
    let locks = || held.iter().map(|n| HELD_BASE + n).chain(UNSHARED.map(|n| UNSHARED_BASE + n));
    let tests = || held.iter().map(|n| UNSHARED_BASE + n).chain(UNSHARED.map(|n| HELD_BASE + n));
    for byte in locks() {
        match fcntl(fd, FcntlArg::F_OFD_SETLK(&one_byte(libc::F_RDLCK, byte))) {
            Ok(_) => {}
            Err(Errno::EAGAIN | Errno::EACCES) => return Err(Refusal::Held),
            // ENOLCK, EOPNOTSUPP, ENOSYS, EINVAL: the file system or the kernel does not support
            // these locks.
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
}

/// Turns the lock of a writer into that of a reader.
pub(crate) fn share(fd: BorrowedFd<'_>) -> io::Result<()> {
    for permission in [WRITE, WRITE_UNCHANGED, RESIZE] {
        match fcntl(fd, FcntlArg::F_OFD_SETLK(&one_byte(libc::F_UNLCK, HELD_BASE + permission))) {
            // As in `acquire`: no lock is held there.
            Ok(_) | Err(Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Releases all locks of the open file description. Closing its last descriptor would do that too,
/// but a worker of an io_uring may keep the file open for a moment after its last completion was
/// seen.
pub(crate) fn release(fd: BorrowedFd<'_>) {
    let everything = libc::flock { l_len: 0, ..one_byte(libc::F_UNLCK, 0) };
    // This fails where locks are not supported; then none is held.
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
        // A process chooses its own name, so it may contain control characters.
        let name: String = name.trim_end().chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        write!(f, " by {} (process {pid})", if name.is_empty() { "a program" } else { &name })
    }
}

/// A process that has the file `identity` (device and inode) open, as far as /proc shows;
/// preferably one that holds a lock on it. `ours` is the caller's descriptor, which is skipped.
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
