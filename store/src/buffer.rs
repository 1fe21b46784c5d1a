//! Memory that the kernel reads from and writes into while a request is in flight.
//!
//! A [`Slab`] is one page-aligned, zeroed allocation cut into pieces of one size or a few. Each
//! piece is handed out once, as an [`IoBuf`], which owns it alone: it moves into a request, through
//! the engine, and back out in the completion. So no reference to the bytes can exist while the
//! kernel may write them. A ring may register the whole slab, and then use the piece by its index
//! (`READ_FIXED`). The allocation lives until the slab and all its pieces are gone.
//!
//! Invariant: no two `IoBuf`s overlap. [`Slab::take_all`] gives the pieces out at most once;
//! `IoBuf` cannot be cloned.
//!
//! A payload of several pieces, some of which may be shared or another process's, is in `segments`;
//! the memory of another process in `mapped`.

#![allow(unsafe_code)]

mod mapped;
mod segments;

pub use mapped::MappedMemory;
pub(crate) use mapped::{copy_from_foreign, copy_to_foreign};
pub(crate) use segments::{Cursor, Cut};
pub use segments::{SEGMENTS_MAX, Segment, SegmentMemory, Segments};

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

/// Bytes of a huge page. A slab of this size or more asks for them: a large request is then one
/// piece of memory to the kernel and not one for each page, which costs less and lets neighbouring
/// requests join.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Alignment of every buffer: a page, which satisfies every O_DIRECT device.
pub const BUFFER_ALIGNMENT_BYTES: usize = 4096;

struct Memory {
    base: NonNull<u8>,
    layout: Layout,
    /// (how many, how large), in the order in which they lie.
    classes: Vec<(usize, usize)>,
    taken: AtomicBool,
}

// SAFETY: `Memory` is only an address and its layout; the bytes are reached through `IoBuf`s, each
// of which owns a disjoint range, so sharing and sending the owner of the allocation is sound.
unsafe impl Send for Memory {}
// SAFETY: as above; `&Memory` gives no access to the bytes.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `Slab::new` with this layout, and no `IoBuf` is left (each holds an
        // `Arc` of this).
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// One allocation, cut into buffers.
#[derive(Clone)]
pub struct Slab {
    memory: Arc<Memory>,
}

impl Slab {
    /// Allocates `pieces` buffers of `piece_bytes` each (rounded up to whole pages), all zero.
    ///
    /// # Panics
    /// When either is 0 or the product overflows, both of which are errors of the program, not of
    /// its input.
    pub fn new(pieces: usize, piece_bytes: usize) -> Self {
        Self::of_classes(&[(pieces, piece_bytes)])
    }

    /// Allocates buffers of several sizes, (how many, how large) for each size, all zero.
    /// [`Slab::take_all`] gives them in this order.
    ///
    /// # Panics
    /// As [`Slab::new`], for each of them.
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
        // SAFETY: the layout has a size above zero.
        let base = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        if huge {
            // SAFETY: the range was just allocated, and the advice changes nothing of what it
            // holds. Where the kernel has no huge pages the slab works all the same, so its answer
            // does not matter.
            let _ =
                unsafe { rustix::mm::madvise(base.as_ptr().cast(), total_bytes, rustix::mm::Advice::LinuxHugepage) };
        }
        // SAFETY: the range was just allocated and is nobody else's.
        unsafe { base.as_ptr().write_bytes(0, total_bytes) };
        Self { memory: Arc::new(Memory { base, layout, classes, taken: AtomicBool::new(false) }) }
    }

    /// Hands out all buffers. The second call gives none.
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

    /// First byte, for registering with a ring.
    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.base.as_ptr()
    }

    /// Bytes of the whole allocation.
    pub(crate) fn total_bytes(&self) -> usize {
        self.memory.layout.size()
    }

    /// Whether `buf` is a piece of this slab.
    pub fn owns(&self, buf: &IoBuf) -> bool {
        Arc::ptr_eq(&self.memory, &buf.memory)
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slab({:?} buffers of so many bytes)", self.memory.classes)
    }
}

/// A page-aligned buffer that one request owns at a time.
pub struct IoBuf {
    memory: Arc<Memory>,
    /// Where it begins in the allocation.
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

    /// Its address. Valid as long as the buffer lives; the buffer may be moved meanwhile.
    pub(crate) fn address(&self) -> *mut u8 {
        // SAFETY: `start` is where one of the slab's pieces begins, so the result stays inside the
        // allocation.
        unsafe { self.memory.base.as_ptr().add(self.start) }
    }
}

impl Deref for IoBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the piece is inside the allocation, initialised (zeroed at birth), and owned by
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
