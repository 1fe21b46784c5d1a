//! Freezing a file system (`linux/fs.h`): everything is written to its device, and nothing more is,
//! until it is thawed. A frozen file system stays so when the process that froze it ends.

#![allow(unsafe_code)]

use rustix::{
    io,
    ioctl::{NoArg, Opcode, ioctl, opcode},
};
use std::os::fd::BorrowedFd;

const FIFREEZE: Opcode = opcode::read_write::<core::ffi::c_int>(b'X', 119);
const FITHAW: Opcode = opcode::read_write::<core::ffi::c_int>(b'X', 120);

/// Freezes the file system of an open folder. Waits until everything is written. `EBUSY` if it is
/// frozen already, `EOPNOTSUPP` if it cannot be frozen.
pub fn freeze(folder: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the kernel ignores the argument of FIFREEZE.
    let request = unsafe { NoArg::<FIFREEZE>::new() };
    // SAFETY: the call accesses no memory of ours.
    unsafe { ioctl(folder, request) }
}

/// Thaws the file system of an open folder. `EINVAL` if it is not frozen.
pub fn thaw(folder: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the kernel ignores the argument of FITHAW.
    let request = unsafe { NoArg::<FITHAW>::new() };
    // SAFETY: the call accesses no memory of ours.
    unsafe { ioctl(folder, request) }
}
