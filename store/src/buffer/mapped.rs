//! Memory of another process, mapped into this one: a guest's memory, passed as a memfd.
//!
//! ```text
//!   memfd ─▶ MappedMemory::of_memfd ─▶ Arc ─┬─▶ Segment ─▶ request ─▶ the kernel, by address
//!                                           └─▶ copy_out / copy_in: raw copies
//! ```
//!
//! The other process may change the bytes at any time, so no reference to them ever exists. A
//! request names them to the kernel by address; all other code copies them with volatile accesses.
//! Indexes that both processes write (those of a virtqueue) are read and written as atomic numbers.
//!
//! Invariant: the file cannot shrink. An access beyond the end of a mapped file kills the process
//! with SIGBUS, and the other process could truncate its file at any time.
//! [`MappedMemory::of_memfd`] therefore sets the seal `F_SEAL_SHRINK` and refuses a file on which
//! it cannot. (QEMU's `memory-backend-memfd` sets the seal by default.)
//!
//! The mapping lives until the last [`Arc`] of it is dropped; each segment in flight holds one.

#![allow(unsafe_code)]

use crate::range::FileRange;
use rustix::{
    fs::SealFlags,
    io::Errno,
    mm::{MapFlags, ProtFlags},
};
use std::{
    fmt, io,
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

/// A shared mapping of a memfd; see the module documentation.
pub struct MappedMemory {
    base: NonNull<u8>,
    len_bytes: usize,
    writable: bool,
}

// SAFETY: an address and a length. The bytes are accessed only by the kernel and by volatile
// copies, never by reference.
unsafe impl Send for MappedMemory {}
// SAFETY: as above.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    /// Maps a range of a memfd as shared memory. Disk reads can go into it only if it is
    /// `writable`.
    ///
    /// # Errors
    /// `InvalidInput` for a range that is empty, does not begin on a page, or reaches beyond the
    /// end of the file. `Unsupported` for a file that cannot be sealed against shrinking (only a
    /// memfd with `MFD_ALLOW_SEALING` can). Otherwise the kernel's error.
    pub fn of_memfd(fd: BorrowedFd<'_>, range: FileRange, writable: bool) -> io::Result<Arc<Self>> {
        let FileRange { offset_bytes, len_bytes } = range;
        seal(fd)?;
        let file_bytes = rustix::fs::fstat(fd)?.st_size as u64;
        let len = usize::try_from(len_bytes).ok().filter(|&len| len > 0 && isize::try_from(len).is_ok());
        let end_bytes = offset_bytes.checked_add(len_bytes).filter(|&end_bytes| end_bytes <= file_bytes);
        let is_on_page = offset_bytes.is_multiple_of(rustix::param::page_size() as u64);
        let (Some(len), Some(_), true) = (len, end_bytes, is_on_page) else {
            let what = format!(
                "{len_bytes} bytes at {offset_bytes} of shared memory of {file_bytes} bytes cannot be mapped: the range must lie within the memory and begin at a page"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        };
        let access = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, access, MapFlags::SHARED, fd, offset_bytes) }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("the kernel mapped nothing"))?;
        Ok(Arc::new(Self { base, len_bytes: len, writable }))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len_bytes
    }

    /// Always `false`: an empty range cannot be mapped.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// Whether disk reads can go into the memory.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Copies the bytes at `start` into `out`.
    ///
    /// # Errors
    /// `InvalidInput` for a range beyond the end of the memory.
    pub fn copy_out(&self, start: usize, out: &mut [u8]) -> io::Result<()> {
        let from = self.place(start, out.len())?;
        // SAFETY: `place` has checked the range, and the mapping lives as long as `self`.
        unsafe { copy_from_foreign(from, out) };
        Ok(())
    }

    /// Copies `bytes` into the memory at `start`.
    ///
    /// # Errors
    /// `InvalidInput` for a range beyond the end, `PermissionDenied` if the memory is not writable.
    pub fn copy_in(&self, start: usize, bytes: &[u8]) -> io::Result<()> {
        let to = self.place(start, bytes.len())?;
        if !self.writable {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the memory was mapped read-only"));
        }
        // SAFETY: as in `copy_out`, and the mapping is writable.
        unsafe { copy_to_foreign(bytes, to) };
        Ok(())
    }

    /// The little-endian number at `at`, which the other process may write at any time. Accesses
    /// that follow see what the other process wrote before the number (acquire).
    ///
    /// # Errors
    /// `InvalidInput` for a number that is not within the memory, or at an odd offset.
    pub fn load_u16(&self, at: usize) -> io::Result<u16> {
        Ok(u16::from_le(self.atomic_u16(at)?.load(Ordering::Acquire)))
    }

    /// Writes a little-endian number for the other process, which sees it after everything that was
    /// written before (release).
    ///
    /// # Errors
    /// As [`MappedMemory::load_u16`]; `PermissionDenied` if the memory is not writable.
    pub fn store_u16(&self, at: usize, value: u16) -> io::Result<()> {
        let number = self.atomic_u16(at)?;
        if !self.writable {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the memory was mapped read-only"));
        }
        number.store(value.to_le(), Ordering::Release);
        Ok(())
    }

    fn atomic_u16(&self, at: usize) -> io::Result<&AtomicU16> {
        let place = self.place(at, size_of::<u16>())?.cast::<u16>();
        if !place.is_aligned() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a number at the odd offset {at}")));
        }
        // SAFETY: `place` has checked that the number is within the mapping, which lives as long as
        // `self`, and it is aligned. Every other access of this process to these bytes is volatile
        // or the kernel's. A page that is mapped read-only is only loaded from.
        Ok(unsafe { AtomicU16::from_ptr(place) })
    }

    fn place(&self, start: usize, len: usize) -> io::Result<*mut u8> {
        match start.checked_add(len) {
            Some(end) if end <= self.len_bytes => Ok(self.base.as_ptr().wrapping_add(start)),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{len} bytes at {start} of mapped memory of {} bytes", self.len_bytes),
            )),
        }
    }

    /// The mapping's address. Valid as long as the mapping lives.
    pub(crate) fn address(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped in `of_memfd` with this length. No reference into it exists, and code that
        // uses its address holds an `Arc` of it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}

impl fmt::Debug for MappedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let access = if self.writable { "read and write" } else { "read" };
        write!(f, "MappedMemory({} bytes, {access})", self.len_bytes)
    }
}

/// Makes sure that a file cannot shrink.
fn seal(fd: BorrowedFd<'_>) -> io::Result<()> {
    let unsealed = |errno: Errno| {
        let what = format!(
            "shared memory must be a memfd that can be sealed against shrinking (MFD_ALLOW_SEALING, F_SEAL_SHRINK); otherwise its owner could crash this process: {errno}"
        );
        io::Error::new(io::ErrorKind::Unsupported, what)
    };
    if rustix::fs::fcntl_get_seals(fd).map_err(unsealed)?.contains(SealFlags::SHRINK) {
        return Ok(());
    }
    rustix::fs::fcntl_add_seals(fd, SealFlags::SHRINK).map_err(unsealed)
}

/// Copies from memory that another process may change meanwhile, eight bytes at a time where the
/// address is aligned.
///
/// # Safety
/// `out.len()` bytes from `from` on are mapped and readable.
pub(crate) unsafe fn copy_from_foreign(from: *const u8, out: &mut [u8]) {
    let head = from.align_offset(8).min(out.len());
    let (words_bytes, mut at) = ((out.len() - head) & !7, 0);
    while at < out.len() {
        let place = from.wrapping_add(at);
        if at >= head && at < head + words_bytes {
            // SAFETY: within the memory, as promised by the caller, and aligned.
            let word = unsafe { place.cast::<u64>().read_volatile() };
            out[at..at + 8].copy_from_slice(&word.to_ne_bytes());
            at += 8;
        } else {
            // SAFETY: within the memory.
            out[at] = unsafe { place.read_volatile() };
            at += 1;
        }
    }
}

/// Copies to memory that another process may access meanwhile.
///
/// # Safety
/// `bytes.len()` bytes from `to` on are mapped and writable, and no reference to them exists.
pub(crate) unsafe fn copy_to_foreign(bytes: &[u8], to: *mut u8) {
    let head = to.align_offset(8).min(bytes.len());
    let (words_bytes, mut at) = ((bytes.len() - head) & !7, 0);
    while at < bytes.len() {
        let place = to.wrapping_add(at);
        if at >= head && at < head + words_bytes {
            let word = u64::from_ne_bytes(std::array::from_fn(|n| bytes[at + n]));
            // SAFETY: within the memory, as promised by the caller, and aligned.
            unsafe { place.cast::<u64>().write_volatile(word) };
            at += 8;
        } else {
            // SAFETY: within the memory.
            unsafe { place.write_volatile(bytes[at]) };
            at += 1;
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::os::fd::AsFd;

    const LEN: u64 = 3 * 4096;

    fn range(offset_bytes: u64, len_bytes: u64) -> FileRange {
        FileRange { offset_bytes, len_bytes }
    }

    #[test]
    fn a_memfd_is_mapped_sealed_and_shared() {
        let fd = rustix::fs::memfd_create("guest", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, LEN).unwrap();
        let memory = MappedMemory::of_memfd(fd.as_fd(), range(4096, 8192), true).unwrap();
        let bytes: Vec<u8> = (0..5000u32).map(|n| (n % 251) as u8).collect();
        for start in [0, 1, 7, 13, 3192] {
            memory.copy_in(start, &bytes).unwrap();
            let (mut ours, mut theirs) = (vec![0; bytes.len()], vec![0; bytes.len()]);
            memory.copy_out(start, &mut ours).unwrap();
            rustix::io::pread(&fd, &mut theirs, 4096 + start as u64).unwrap();
            assert!(ours == bytes && theirs == bytes, "{start}");
        }
        assert!(memory.copy_in(3193, &bytes).is_err() && memory.copy_out(usize::MAX, &mut [0]).is_err());
        assert!(rustix::fs::ftruncate(&fd, 4096).is_err(), "the file could shrink below its mapping");
        memory.store_u16(4, 0x1234).unwrap();
        let mut theirs = [0; 2];
        rustix::io::pread(&fd, &mut theirs, 4096 + 4).unwrap();
        assert_eq!((theirs, memory.load_u16(4).unwrap()), ([0x34, 0x12], 0x1234));
        assert!(memory.load_u16(5).is_err() && memory.load_u16(8191).is_err() && memory.store_u16(8192, 0).is_err());
        let again = MappedMemory::of_memfd(fd.as_fd(), range(0, LEN), false).unwrap();
        assert_eq!(again.store_u16(4, 1).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(again.copy_in(0, &[1]).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn unsealable_files_and_invalid_ranges_are_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN).unwrap();
        let refused = |fd: BorrowedFd<'_>, range| MappedMemory::of_memfd(fd, range, true).unwrap_err().kind();
        assert_eq!(refused(file.as_fd(), range(0, LEN)), io::ErrorKind::Unsupported, "a file on a disk");
        let unsealable = rustix::fs::memfd_create("guest", MemfdFlags::empty()).unwrap();
        rustix::fs::ftruncate(&unsealable, LEN).unwrap();
        assert_eq!(refused(unsealable.as_fd(), range(0, LEN)), io::ErrorKind::Unsupported);
        let fd = rustix::fs::memfd_create("guest", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, LEN).unwrap();
        for bad in [range(0, LEN + 1), range(0, 0), range(1, 4096), range(u64::MAX - 4095, 4096), range(4096, u64::MAX)]
        {
            assert_eq!(refused(fd.as_fd(), bad), io::ErrorKind::InvalidInput, "{bad:?}");
        }
    }
}
