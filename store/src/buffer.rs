//! Buffers that the kernel reads from and writes to while a request is in flight.
//!
//! A [`Slab`] is one page-aligned, zeroed allocation, divided into buffers of one or several sizes.
//! Each buffer is handed out once, as an [`IoBuf`], which is its only owner. It moves into a
//! request, through the engine, and back out in the completion, so no reference to the bytes can
//! exist while the kernel may write them. A ring may register the whole slab and then name a buffer
//! by index (`READ_FIXED`). The allocation lives until the slab and all its buffers are dropped.
//!
//! Invariant: no two `IoBuf`s overlap. [`Slab::take_all`] hands each buffer out at most once, and
//! `IoBuf` cannot be cloned.
//!
//! `segments` holds scatter-gather lists, whose memory may be shared or another process's; `mapped`
//! maps the memory of another process. `loan` lends a range of a request's memory to the thread or
//! lane that carries out a part of the request; `span` names memory by address.

#![allow(unsafe_code)]

mod loan;
mod mapped;
mod segments;
mod span;

pub use loan::Loan;
pub use mapped::MappedMemory;
pub(crate) use mapped::{copy_from_foreign, copy_to_foreign};
pub(crate) use segments::{Cursor, Cut};
pub use segments::{SEGMENTS_MAX, Segment, SegmentMemory, Segments};
pub(crate) use span::{Span, ZEROS_BYTES};

use std::{
    alloc::{Layout, alloc, dealloc, handle_alloc_error},
    fmt,
    iter::repeat_n,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Size of a huge page in bytes. A slab of at least this size asks for huge pages. A large request
/// is then one piece of memory for the kernel, not one for each page, which costs less and allows
/// neighbouring requests to be merged.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Alignment of every buffer: one page, which satisfies every O_DIRECT device.
pub(crate) const BUFFER_ALIGNMENT_BYTES: usize = 4096;

struct Memory {
    base: NonNull<u8>,
    layout: Layout,
    /// (count, size in bytes) of each size, in the order of the allocation.
    classes: Vec<(usize, usize)>,
    taken: AtomicBool,
}

// SAFETY: `Memory` is only an address and its layout. The bytes are reached through `IoBuf`s, each
// of which owns a disjoint range, so sharing and sending the owner of the allocation is sound.
unsafe impl Send for Memory {}
// SAFETY: as above; `&Memory` gives no access to the bytes.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `Slab::of_classes` with this layout, and no `IoBuf` is left (each
        // holds an `Arc` of this).
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// One allocation, divided into buffers.
#[derive(Clone)]
pub struct Slab {
    memory: Arc<Memory>,
}

impl Slab {
    /// Allocates `pieces` zeroed buffers of `piece_bytes` each, rounded up to whole pages.
    ///
    /// # Panics
    /// If either is 0 or the product overflows; both are programming errors.
    pub fn new(pieces: usize, piece_bytes: usize) -> Self {
        Self::of_classes(&[(pieces, piece_bytes)])
    }

    /// Allocates zeroed buffers of several sizes, given as (count, size in bytes).
    /// [`Slab::take_all`] returns them in this order.
    ///
    /// # Panics
    /// As [`Slab::new`], for each size.
    pub fn of_classes(classes: &[(usize, usize)]) -> Self {
        let classes: Vec<(usize, usize)> = classes
            .iter()
            .map(|&(pieces, piece_bytes)| (pieces, piece_bytes.next_multiple_of(BUFFER_ALIGNMENT_BYTES)))
            .collect();
        let has_bytes = |&(pieces, piece_bytes): &(usize, usize)| pieces > 0 && piece_bytes > 0;
        assert!(
            !classes.is_empty() && classes.iter().all(has_bytes),
            "a slab needs at least one buffer of at least one byte"
        );
        let total_bytes = classes
            .iter()
            .try_fold(0usize, |sum, &(pieces, piece_bytes)| sum.checked_add(pieces.checked_mul(piece_bytes)?))
            .expect("the size of a slab overflows");
        let huge = total_bytes >= HUGE_PAGE_BYTES;
        let alignment_bytes = if huge { HUGE_PAGE_BYTES } else { BUFFER_ALIGNMENT_BYTES };
        let layout = Layout::from_size_align(total_bytes, alignment_bytes).expect("the size of a slab overflows");
        // SAFETY: the layout's size is greater than zero.
        let base = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        if huge {
            // SAFETY: the range was just allocated, and the advice does not change its contents.
            // The slab also works without huge pages, so the result is ignored.
            let _ =
                unsafe { rustix::mm::madvise(base.as_ptr().cast(), total_bytes, rustix::mm::Advice::LinuxHugepage) };
        }
        // SAFETY: the range was just allocated and has no other user.
        unsafe { base.as_ptr().write_bytes(0, total_bytes) };
        Self { memory: Arc::new(Memory { base, layout, classes, taken: AtomicBool::new(false) }) }
    }

    /// Hands out all buffers. A second call returns none.
    pub fn take_all(&self) -> Vec<IoBuf> {
        if self.memory.taken.swap(true, Ordering::AcqRel) {
            return Vec::new();
        }
        let sizes = self.memory.classes.iter().flat_map(|&(pieces, piece_bytes)| repeat_n(piece_bytes, pieces));
        let mut next_bytes = 0;
        sizes
            .map(|len| {
                let start = next_bytes;
                next_bytes += len;
                IoBuf { memory: Arc::clone(&self.memory), start, len }
            })
            .collect()
    }

    /// Address of the allocation, for registering it with a ring.
    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.base.as_ptr()
    }

    /// Size of the whole allocation in bytes.
    pub(crate) fn total_bytes(&self) -> usize {
        self.memory.layout.size()
    }

    /// Whether `buf` is a buffer of this slab.
    pub fn owns(&self, buf: &IoBuf) -> bool {
        Arc::ptr_eq(&self.memory, &buf.memory)
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slab({:?} as (count, bytes))", self.memory.classes)
    }
}

/// A page-aligned buffer that one request owns at a time.
pub struct IoBuf {
    memory: Arc<Memory>,
    /// Offset in the allocation.
    start: usize,
    len: usize,
}

impl IoBuf {
    /// A single buffer with an allocation of its own.
    ///
    /// # Panics
    /// As [`Slab::new`].
    pub fn new(len_bytes: usize) -> Self {
        let mut buf = Slab::new(1, len_bytes).take_all().pop().expect("a new slab has a buffer");
        buf.len = len_bytes;
        buf
    }

    /// The buffer's address. Valid as long as the buffer lives, also while it is moved.
    pub(crate) fn address(&self) -> *mut u8 {
        // SAFETY: `start` is the offset of one of the slab's buffers, so the result is within the
        // allocation.
        unsafe { self.memory.base.as_ptr().add(self.start) }
    }
}

impl Deref for IoBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range is within the allocation, zeroed when it was allocated, and owned by
        // `self` alone.
        unsafe { std::slice::from_raw_parts(self.address(), self.len) }
    }
}

impl DerefMut for IoBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.len) }
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuf({} bytes at {:#x})", self.len, self.start)
    }
}
