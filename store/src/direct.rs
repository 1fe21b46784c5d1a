//! O_DIRECT: the second descriptor of a file, its alignment, and unaligned transfers through it.
//!
//! An O_DIRECT transfer must be aligned in offset, length and memory. Metadata is not (a VHD footer
//! has 512 bytes, a device may require 4096), so it passes through a bounce buffer here:
//!
//! ```text
//!   write:  |..head block..|=====whole blocks=====|..tail block..|   one O_DIRECT write of it all
//!            read, patched                          read, patched
//! ```
//!
//! Invariants:
//! - A read-modify-write holds `patching`, so two of them cannot overwrite each other's change. An
//!   aligned write takes no lock: it covers whole blocks, so it shares a block with another write
//!   only if their bytes overlap.
//! - The file is never extended beyond the bytes that are written. If a file's length is not a
//!   multiple of the alignment, its last block is therefore written through the page cache, and the
//!   caller is told ([`Route`]).

use crate::IoBuf;
use rustix::{
    fs::{AtFlags, OFlags, StatxFlags},
    io::Errno,
};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Mutex, PoisonError},
};

/// Size of a bounce buffer: the largest piece of an unaligned transfer.
const BOUNCE_BYTES: usize = 128 << 10;

/// Maximum number of bounce buffers kept for reuse.
const BOUNCES_KEPT: usize = 4;

/// `f_type` of tmpfs and ramfs, which accept O_DIRECT but use the page cache nevertheless.
const MEMORY_FILE_SYSTEMS: [rustix::fs::FsWord; 2] = [0x0102_1994, 0x8584_58f6];

/// Whether a write used the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// The whole write bypassed the page cache.
    Direct,
    /// The file's last, partial block was written through the page cache and may still be cached.
    TouchedPageCache,
}

/// A descriptor opened with O_DIRECT.
#[derive(Debug)]
pub(crate) struct DirectFile {
    fd: OwnedFd,
    alignment_bytes: u32,
    bounces: Mutex<Vec<IoBuf>>,
    patching: Mutex<()>,
}

impl DirectFile {
    /// Opens the file behind `meta` a second time with O_DIRECT. `None` if the file system does not
    /// support it.
    pub(crate) fn open(meta: BorrowedFd<'_>, path: &Path, writable: bool, is_block_device: bool) -> Option<Self> {
        if let Ok(file_system) = rustix::fs::fstatfs(meta)
            && MEMORY_FILE_SYSTEMS.contains(&file_system.f_type)
            && !is_block_device
        {
            return None;
        }
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let flags = access | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NOCTTY;
        let again = format!("/proc/self/fd/{}", meta.as_raw_fd());
        let fd = rustix::fs::open(again, flags, rustix::fs::Mode::empty())
            .or_else(|_| rustix::fs::open(path, flags, rustix::fs::Mode::empty()))
            .ok()?;
        // Without /proc the path was opened, which may refer to another file by now.
        let (ours, theirs) = (rustix::fs::fstat(meta).ok()?, rustix::fs::fstat(&fd).ok()?);
        if (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino) {
            return None;
        }
        let alignment_bytes = alignment_bytes(fd.as_fd(), is_block_device)?;
        Some(Self { fd, alignment_bytes, bounces: Mutex::default(), patching: Mutex::default() })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Required alignment of offsets, lengths and memory: a power of two.
    pub(crate) fn alignment_bytes(&self) -> u32 {
        self.alignment_bytes
    }

    /// Sets a larger alignment than the device requires.
    #[cfg(test)]
    pub(crate) fn coarsen(&mut self, alignment_bytes: u32) {
        self.alignment_bytes = self.alignment_bytes.max(alignment_bytes);
    }

    fn mask(&self) -> u64 {
        u64::from(self.alignment_bytes) - 1
    }

    fn is_aligned(&self, buf: &[u8], offset_bytes: u64) -> bool {
        (offset_bytes | buf.len() as u64 | buf.as_ptr() as u64) & self.mask() == 0
    }

    fn with_bounce<T>(&self, work: impl FnOnce(&mut IoBuf) -> io::Result<T>) -> io::Result<T> {
        let kept = self.bounces.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut bounce = kept.unwrap_or_else(|| IoBuf::new(BOUNCE_BYTES));
        let result = work(&mut bounce);
        let mut kept = self.bounces.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < BOUNCES_KEPT {
            kept.push(bounce);
        }
        result
    }

    /// Fills `buf`, at any alignment. `UnexpectedEof` at the end of the file.
    pub(crate) fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        if self.is_aligned(buf, offset_bytes) {
            return if read_upto(self.fd(), buf, offset_bytes)? < buf.len() { Err(end_of_file()) } else { Ok(()) };
        }
        let end_bytes = offset_bytes.checked_add(buf.len() as u64).ok_or_else(beyond_addressing)?;
        self.with_bounce(|bounce| {
            let mut at_bytes = offset_bytes;
            let mut rest = buf;
            while !rest.is_empty() {
                let start_bytes = at_bytes & !self.mask();
                let window_bytes = (end_bytes - start_bytes).saturating_add(self.mask()) & !self.mask();
                let window_bytes = window_bytes.min(BOUNCE_BYTES as u64) as usize;
                let held_bytes = read_upto(self.fd(), &mut bounce[..window_bytes], start_bytes)?;
                let skip_bytes = (at_bytes - start_bytes) as usize;
                let piece_bytes = rest.len().min(window_bytes - skip_bytes);
                if held_bytes < skip_bytes + piece_bytes {
                    return Err(end_of_file());
                }
                let (piece, later) = rest.split_at_mut(piece_bytes);
                piece.copy_from_slice(&bounce[skip_bytes..skip_bytes + piece_bytes]);
                rest = later;
                at_bytes += piece_bytes as u64;
            }
            Ok(())
        })
    }

    /// Writes all of `buf`, at any alignment. `meta` is the descriptor that uses the page cache,
    /// for the file's last partial block.
    pub(crate) fn write_at(&self, meta: BorrowedFd<'_>, buf: &[u8], offset_bytes: u64) -> io::Result<Route> {
        if self.is_aligned(buf, offset_bytes) {
            return write_all(self.fd(), buf, offset_bytes).map(|()| Route::Direct);
        }
        let end_bytes = offset_bytes.checked_add(buf.len() as u64).ok_or_else(beyond_addressing)?;
        let patches = (offset_bytes | end_bytes) & self.mask() != 0;
        let _patching = patches.then(|| self.patching.lock().unwrap_or_else(PoisonError::into_inner));
        self.with_bounce(|bounce| {
            let (mut at_bytes, mut route) = (offset_bytes, Route::Direct);
            while at_bytes < end_bytes {
                let start_bytes = at_bytes & !self.mask();
                let mut stop_bytes = end_bytes.min(start_bytes.saturating_add(BOUNCE_BYTES as u64));
                let mut piece = &buf[(at_bytes - offset_bytes) as usize..(stop_bytes - offset_bytes) as usize];
                if stop_bytes & self.mask() != 0 && (stop_bytes | self.mask()) >= file_len_bytes(meta)? {
                    // Writing the whole last block would extend the file beyond the bytes to write.
                    stop_bytes &= !self.mask();
                    if stop_bytes <= at_bytes {
                        write_all(meta, piece, at_bytes)?;
                        route = Route::TouchedPageCache;
                        break;
                    }
                    piece = &piece[..(stop_bytes - at_bytes) as usize];
                }
                self.write_window(&mut bounce[..], piece, at_bytes)?;
                at_bytes = stop_bytes;
            }
            Ok(route)
        })
    }

    /// Writes one piece, which fits the bounce buffer, together with the rest of its first and last
    /// block.
    fn write_window(&self, bounce: &mut [u8], piece: &[u8], at_bytes: u64) -> io::Result<()> {
        let block_bytes = self.alignment_bytes as usize;
        let start_bytes = at_bytes & !self.mask();
        let skip_bytes = (at_bytes - start_bytes) as usize;
        let used_bytes = skip_bytes + piece.len();
        let window = &mut bounce[..used_bytes.next_multiple_of(block_bytes)];
        let last_block = window.len() - block_bytes;
        if skip_bytes > 0 {
            self.read_block(&mut window[..block_bytes], start_bytes)?;
        }
        if used_bytes < window.len() && (last_block > 0 || skip_bytes == 0) {
            self.read_block(&mut window[last_block..], start_bytes + last_block as u64)?;
        }
        window[skip_bytes..used_bytes].copy_from_slice(piece);
        write_all(self.fd(), window, start_bytes)
    }

    /// Reads one block; bytes beyond the end of the file become zeros.
    fn read_block(&self, block: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let held_bytes = read_upto(self.fd(), block, offset_bytes)?;
        block[held_bytes..].fill(0);
        Ok(())
    }
}

/// The alignment for O_DIRECT; `None` if it is not supported after all.
fn alignment_bytes(fd: BorrowedFd<'_>, is_block_device: bool) -> Option<u32> {
    let power_of_two = |bytes: u32| if bytes.is_power_of_two() { bytes } else { 4096 };
    if let Ok(statx) = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        && statx.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let wanted_bytes = statx.stx_dio_offset_align.max(statx.stx_dio_mem_align);
        return (statx.stx_dio_offset_align != 0).then(|| power_of_two(wanted_bytes));
    }
    if is_block_device {
        return rustix::fs::ioctl_blksszget(fd).ok().map(power_of_two);
    }
    // Before Linux 6.1. 4096 suits every device. Whether 512 does is found by a test read of the
    // second sector, if the file has one.
    let mut probe = IoBuf::new(4096);
    let takes_512 = rustix::io::pread(fd, &mut probe[512..1024], 512).is_ok_and(|held_bytes| held_bytes > 0);
    Some(if takes_512 { 512 } else { 4096 })
}

/// Length of a file or a block device.
pub(crate) fn file_len_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let stat = rustix::fs::fstat(fd)?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_block_device() {
        return Ok(rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?);
    }
    Ok(stat.st_size as u64)
}

/// Reads until `buf` is full or the file ends. Returns the number of bytes read.
pub(crate) fn read_upto(fd: BorrowedFd<'_>, buf: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
    let mut done_bytes = 0;
    while done_bytes < buf.len() {
        match rustix::io::pread(fd, &mut buf[done_bytes..], offset_bytes + done_bytes as u64) {
            Ok(0) => break,
            Ok(moved_bytes) => done_bytes += moved_bytes,
            Err(Errno::INTR) => {}
            // An O_DIRECT read that the end of the file cut short cannot continue, because the rest
            // is not aligned.
            Err(Errno::INVAL) if done_bytes > 0 && offset_bytes + done_bytes as u64 >= file_len_bytes(fd)? => {
                break;
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(done_bytes)
}

/// Writes all of `buf`.
pub(crate) fn write_all(fd: BorrowedFd<'_>, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
    let mut done_bytes = 0;
    while done_bytes < buf.len() {
        match rustix::io::pwrite(fd, &buf[done_bytes..], offset_bytes + done_bytes as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(moved_bytes) => done_bytes += moved_bytes,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

pub(crate) fn end_of_file() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends before the end of the range to read")
}

pub(crate) fn beyond_addressing() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the range ends beyond what 64 bits can address")
}

/// Whether the error means that this method is not supported, and another may be tried.
pub(crate) fn cannot(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::NODEV | Errno::NOTTY)
}
