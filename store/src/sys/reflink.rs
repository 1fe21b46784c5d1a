//! Sharing a range between files (reflink).

#![allow(unsafe_code)]

use rustix::{io, ioctl};
use std::os::fd::{AsRawFd, BorrowedFd};

/// `struct file_clone_range` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug)]
struct FileCloneRange {
    source_fd: i64,
    source_offset_bytes: u64,
    len_bytes: u64,
    destination_offset_bytes: u64,
}

const FICLONERANGE: ioctl::Opcode = ioctl::opcode::write::<FileCloneRange>(0x94, 13);

/// Shares `len_bytes` of `source` into `destination`. A length of 0 means "to the end of the
/// source", so callers must not pass it.
pub(crate) fn clone_range(
    destination: BorrowedFd<'_>,
    destination_offset_bytes: u64,
    source: BorrowedFd<'_>,
    source_offset_bytes: u64,
    len_bytes: u64,
) -> io::Result<()> {
    let range = FileCloneRange {
        source_fd: i64::from(source.as_raw_fd()),
        source_offset_bytes,
        len_bytes,
        destination_offset_bytes,
    };
    // SAFETY: the opcode is FICLONERANGE, which reads one `struct file_clone_range`, and
    // `FileCloneRange` has its layout.
    let request = unsafe { ioctl::Setter::<FICLONERANGE, FileCloneRange>::new(range) };
    // SAFETY: the call reads the struct, which lives in `request`, and accesses no other memory of
    // ours. Both descriptors are borrowed, so they are open.
    unsafe { ioctl::ioctl(destination, request) }
}
