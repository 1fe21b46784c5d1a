//! Control of loop devices, and of partitions on any block device (`linux/loop.h`,
//! `linux/blkpg.h`).
//!
//! A loop device shows a file as a block device. [`configure`] sets the file and all options in one
//! step, so no other process sees a partly configured device. The device keeps the file open until
//! it is [`clear`]ed and its last user has closed it.

#![allow(unsafe_code)]

use nix::libc;
use rustix::{
    io,
    ioctl::{Ioctl, IoctlOutput, NoArg, Opcode, Setter, ioctl},
};
use std::os::fd::{AsRawFd, BorrowedFd};

const LOOP_CLR_FD: Opcode = 0x4C01;
const LOOP_SET_CAPACITY: Opcode = 0x4C07;
const LOOP_CONFIGURE: Opcode = 0x4C0A;
const LOOP_CTL_GET_FREE: Opcode = 0x4C82;
const BLKPG: Opcode = 0x1269;

const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_PARTSCAN: u32 = 8;
const LO_FLAGS_DIRECT_IO: u32 = 16;

const BLKPG_ADD_PARTITION: libc::c_int = 1;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset_bytes: u64,
    size_limit_bytes: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_bytes: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
#[derive(Debug)]
struct Configuration {
    fd: u32,
    block_bytes: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// `struct blkpg_partition`.
#[repr(C)]
#[derive(Debug)]
struct BlkpgPartition {
    start_bytes: libc::c_longlong,
    len_bytes: libc::c_longlong,
    number: libc::c_int,
    names: [u8; 128],
}

/// `struct blkpg_ioctl_arg`.
#[repr(C)]
#[derive(Debug)]
struct BlkpgArgument {
    operation: libc::c_int,
    flags: libc::c_int,
    len_bytes: libc::c_int,
    data: *const BlkpgPartition,
}

const _: () = assert!(size_of::<LoopInfo>() == 232 && size_of::<Configuration>() == 304);
const _: () = assert!(size_of::<BlkpgPartition>() == 152);

/// Options of a loop device.
#[derive(Debug, Clone, Copy)]
pub struct LoopConfig<'a> {
    /// The file that the device shows.
    pub backing: BorrowedFd<'a>,
    /// Where in the file the device begins.
    pub offset_bytes: u64,
    /// Length of the device; 0 means to the end of the file.
    pub size_limit_bytes: u64,
    /// Logical sector size: a power of two from 512 to 4096.
    pub block_bytes: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether the kernel looks for partitions.
    pub partition_scan: bool,
    /// Whether the file is accessed with O_DIRECT, which also allows many requests in flight.
    pub direct_io: bool,
    /// The file name that `losetup` shows if it cannot see the file; truncated to 63 bytes.
    pub name: &'a [u8],
}

/// `LOOP_CTL_GET_FREE`, which returns a device number.
#[derive(Debug)]
struct GetFree;

// SAFETY: the call takes no argument, returns a device number, and accesses no memory of ours.
unsafe impl Ioctl for GetFree {
    type Output = u32;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        LOOP_CTL_GET_FREE
    }

    fn as_ptr(&mut self) -> *mut libc::c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut libc::c_void) -> io::Result<u32> {
        u32::try_from(output).map_err(|_| io::Errno::IO)
    }
}

/// The number of an unused loop device, created if necessary. `control` is `/dev/loop-control`. If
/// another process uses the device first, [`configure`] fails with `EBUSY`; ask again then.
pub fn free_number(control: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: see `GetFree`. A descriptor of another file answers ENOTTY.
    unsafe { ioctl(control, GetFree) }
}

/// Sets the file and the options of a loop device.
pub fn configure(device: BorrowedFd<'_>, config: &LoopConfig<'_>) -> io::Result<()> {
    let mut flags = 0;
    for (wanted, flag) in [
        (config.read_only, LO_FLAGS_READ_ONLY),
        (config.partition_scan, LO_FLAGS_PARTSCAN),
        (config.direct_io, LO_FLAGS_DIRECT_IO),
    ] {
        flags |= if wanted { flag } else { 0 };
    }
    let mut file_name = [0; 64];
    let shown = config.name.len().min(file_name.len() - 1);
    file_name[..shown].copy_from_slice(&config.name[..shown]);
    let configuration = Configuration {
        fd: config.backing.as_raw_fd().cast_unsigned(),
        block_bytes: config.block_bytes,
        info: LoopInfo {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset_bytes: config.offset_bytes,
            size_limit_bytes: config.size_limit_bytes,
            number: 0,
            encrypt_type: 0,
            encrypt_key_bytes: 0,
            flags,
            file_name,
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
        },
        reserved: [0; 8],
    };
    // SAFETY: the opcode is LOOP_CONFIGURE, which reads one `struct loop_config`, and
    // `Configuration` has its layout.
    let request = unsafe { Setter::<LOOP_CONFIGURE, Configuration>::new(configuration) };
    // SAFETY: the call reads the struct, which lives in `request`. Both descriptors are borrowed,
    // hence open.
    unsafe { ioctl(device, request) }
}

/// Makes a loop device adopt the current length of its file.
pub fn set_capacity(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: LOOP_SET_CAPACITY takes no argument.
    let request = unsafe { NoArg::<LOOP_SET_CAPACITY>::new() };
    // SAFETY: the call accesses no memory of ours.
    unsafe { ioctl(device, request) }
}

/// Detaches the file from a loop device: at once, or, if others have the device open, when the last
/// of them closes it.
pub fn clear(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: LOOP_CLR_FD takes no argument.
    let request = unsafe { NoArg::<LOOP_CLR_FD>::new() };
    // SAFETY: the call accesses no memory of ours.
    unsafe { ioctl(device, request) }
}

/// Adds a partition that the kernel has not found by itself. Fails with `EBUSY` if it exists.
pub fn add_partition(device: BorrowedFd<'_>, number: u32, start_bytes: u64, len_bytes: u64) -> io::Result<()> {
    let too_large = |_| io::Errno::OVERFLOW;
    let partition = BlkpgPartition {
        start_bytes: start_bytes.try_into().map_err(too_large)?,
        len_bytes: len_bytes.try_into().map_err(too_large)?,
        number: number.try_into().map_err(too_large)?,
        names: [0; 128],
    };
    let argument = BlkpgArgument {
        operation: BLKPG_ADD_PARTITION,
        flags: 0,
        len_bytes: size_of::<BlkpgPartition>() as libc::c_int,
        data: &raw const partition,
    };
    // SAFETY: the opcode is BLKPG, which reads one `struct blkpg_ioctl_arg`, and `BlkpgArgument`
    // has its layout.
    let request = unsafe { Setter::<BLKPG, BlkpgArgument>::new(argument) };
    // SAFETY: the call reads that struct and the partition that it points to; both live until it
    // has returned.
    unsafe { ioctl(device, request) }
}
