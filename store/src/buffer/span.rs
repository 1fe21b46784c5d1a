//! Memory by address, for code that may hold no reference because the kernel may be writing there.

#![allow(unsafe_code)]

use super::IoBuf;
use std::ops::Range;

/// Zeros up to this size are written. For more, the file system zeroes the range: its calls cost
/// more than a small write.
pub(crate) const ZEROS_BYTES: usize = 64 << 10;

#[repr(align(4096))]
struct Zeros([u8; ZEROS_BYTES]);

static ZEROS: Zeros = Zeros([0; ZEROS_BYTES]);

/// Memory by address. Whoever holds it says what keeps the memory alive (`part`, `slots`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) address: *mut u8,
    pub(crate) len_bytes: usize,
}

impl Span {
    /// The memory of a whole buffer.
    pub(crate) fn of(buf: &IoBuf) -> Self {
        Self { address: buf.address(), len_bytes: buf.len() }
    }

    /// The given range of the memory; `None` if it does not lie within.
    pub(crate) fn slice(self, range: Range<usize>) -> Option<Self> {
        let lies_within = range.start <= range.end && range.end <= self.len_bytes;
        lies_within.then(|| Self { address: self.address.wrapping_add(range.start), len_bytes: range.len() })
    }

    /// Static zeros, at most 64 KiB; never written to.
    pub(crate) fn zeros(len_bytes: usize) -> Self {
        Self { address: ZEROS.0.as_ptr().cast_mut(), len_bytes: len_bytes.min(ZEROS_BYTES) }
    }

    pub(crate) const EMPTY: Self = Self { address: std::ptr::null_mut(), len_bytes: 0 };

    /// Fills the memory with zeros.
    ///
    /// # Safety
    /// The memory is alive and writable, no reference to it exists, and the kernel is not using it.
    pub(crate) unsafe fn fill_zeros(self) {
        // SAFETY: as promised by the caller.
        unsafe { self.address.write_bytes(0, self.len_bytes) }
    }

    /// Copies `bytes` into the memory.
    ///
    /// # Safety
    /// As [`Span::fill_zeros`].
    ///
    /// # Panics
    /// If the lengths differ, which is a programming error.
    pub(crate) unsafe fn copy_from(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len_bytes, "the bytes to copy must have the length of the memory");
        // SAFETY: as promised by the caller. `bytes` is a reference, so it does not overlap memory
        // to which no reference exists.
        unsafe { self.address.copy_from_nonoverlapping(bytes.as_ptr(), self.len_bytes) }
    }
}
