//! Whether an engine uses a ring.

use rustix::io::Errno;
use std::io;

/// How I/O is submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineKind {
    /// io_uring if the kernel offers it, else `pread` and `pwrite`.
    #[default]
    Auto,
    /// io_uring; opening fails if the kernel does not offer it.
    Uring,
    /// `pread` and `pwrite`, one after the other, in the calling thread.
    Sync,
}

/// Whether `error` means that the system offers no ring: switched off (by sysctl, seccomp or a
/// container), unknown, too old, or over the limit of locked memory.
pub(super) fn lacks_ring(error: &io::Error) -> bool {
    let refusals = [Errno::NOSYS, Errno::PERM, Errno::ACCESS, Errno::NOMEM, Errno::INVAL, Errno::OPNOTSUPP];
    error.kind() == io::ErrorKind::Unsupported
        || Errno::from_io_error(error).is_some_and(|errno| refusals.contains(&errno))
}
