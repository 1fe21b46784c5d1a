//! A payload in several pieces: a scatter-gather list.
//!
//! ```text
//!   Segments: [ Own(IoBuf, range) | Shared(Arc<IoBuf>, range) | Mapped(Arc<MappedMemory>, range) | ... ]
//!                                        one payload, in this order
//! ```
//!
//! - *Own* memory belongs to the request alone, as the one buffer of an ordinary request does.
//! - *Shared* memory may be in several writes at a time (a mirror), and is only ever read.
//! - *Mapped* memory is another process's, which may change it at any time. No reference to it
//!   exists.
//!
//! The request owns the list while it is in flight and gives it back in its completion, so all
//! owners live until the kernel has done with the memory. [`Segments::clear`] makes a list that
//! came back ready to be filled again, without an allocation.
//!
//! **Cuts.** A request of several segments becomes several parts of the engine, not one `READV` or
//! `WRITEV`: each part is resumed, lent, retried and moved through registered buffers as any other,
//! and they all go out in one system call. A vector would be all or nothing: one segment that
//! O_DIRECT or a lane cannot take would send all of them through the pool.
//!
//! A write is not cut within [`UNIT_BYTES`] of the payload, for a sector written by two parts could
//! be torn by a power cut, or be seen half by a reader. Where two segments meet within such a unit,
//! the unit is gathered: copied into a buffer of the engine. A read is cut wherever segments meet.

use super::{IoBuf, MappedMemory};
use crate::part::Span;
use std::{fmt, io, ops::Range, sync::Arc};

/// Most segments of one request: as many as the kernel takes in one vector (`UIO_MAXIOV`).
pub const SEGMENTS_MAX: usize = 1024;

/// A write is not cut between two multiples of this, counted from the beginning of the payload: the
/// largest sector of a disk.
pub(crate) const UNIT_BYTES: usize = 4096;

/// Neighbouring units are gathered together up to this length.
const GATHER_BYTES: usize = 64 << 10;

/// Who keeps the memory of a segment alive.
#[derive(Debug)]
pub enum SegmentMemory {
    /// The request alone.
    Own(IoBuf),
    /// Several writes, and whoever else holds a reference to it.
    Shared(Arc<IoBuf>),
    /// Memory of another process.
    Mapped(Arc<MappedMemory>),
}

impl SegmentMemory {
    fn len(&self) -> usize {
        match self {
            Self::Own(buf) => buf.len(),
            Self::Shared(buf) => buf.len(),
            Self::Mapped(memory) => memory.len(),
        }
    }

    /// Whether a read can go into it.
    fn is_writable(&self) -> bool {
        match self {
            Self::Own(_) => true,
            Self::Shared(_) => false,
            Self::Mapped(memory) => memory.is_writable(),
        }
    }

    /// The buffer, unless the memory is another process's.
    fn buf(&self) -> Option<&IoBuf> {
        match self {
            Self::Own(buf) => Some(buf),
            Self::Shared(buf) => Some(buf),
            Self::Mapped(_) => None,
        }
    }

    fn span(&self) -> Span {
        match self {
            Self::Own(buf) => Span::of(buf),
            Self::Shared(buf) => Span::of(buf),
            Self::Mapped(memory) => Span { address: memory.address(), len_bytes: memory.len() },
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Shared(one), Self::Shared(two)) => Arc::ptr_eq(one, two),
            (Self::Mapped(one), Self::Mapped(two)) => Arc::ptr_eq(one, two),
            _ => false,
        }
    }
}

impl From<IoBuf> for SegmentMemory {
    fn from(buf: IoBuf) -> Self {
        Self::Own(buf)
    }
}

impl From<Arc<IoBuf>> for SegmentMemory {
    fn from(buf: Arc<IoBuf>) -> Self {
        Self::Shared(buf)
    }
}

impl From<Arc<MappedMemory>> for SegmentMemory {
    fn from(memory: Arc<MappedMemory>) -> Self {
        Self::Mapped(memory)
    }
}

/// A stretch of memory.
#[derive(Debug)]
pub struct Segment {
    /// Who keeps it alive.
    pub memory: SegmentMemory,
    /// Which of its bytes: not empty, and within the memory.
    range: Range<usize>,
}

impl Segment {
    /// Which bytes of the memory it is.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The segment's address and length.
    fn span(&self) -> Span {
        self.memory.span().slice(self.range.clone()).unwrap_or(Span::EMPTY)
    }
}

/// A place in the payload: in this segment, which begins at this byte of the payload.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cursor {
    index: usize,
    start: usize,
}

/// What is to be moved next.
pub(crate) enum Cut<'a> {
    /// Memory of one segment. `buf` is `None` for memory of another process.
    Direct { span: Span, buf: Option<&'a IoBuf> },
    /// So many bytes of several segments, which are to be copied.
    Gather { len_bytes: usize },
}

/// See the module.
#[derive(Default)]
pub struct Segments {
    list: Vec<Segment>,
    len_bytes: usize,
}

impl Segments {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a stretch of `memory`. What follows the last segment in the same shared or mapped
    /// memory makes that one longer.
    ///
    /// # Errors
    /// `InvalidInput` for a stretch that is empty or does not lie within the memory, and for more
    /// than [`SEGMENTS_MAX`] segments. The memory is dropped then.
    pub fn push(&mut self, memory: impl Into<SegmentMemory>, range: Range<usize>) -> io::Result<()> {
        let memory = memory.into();
        if range.start >= range.end || range.end > memory.len() {
            let what = format!("a segment at {range:?} of memory of {} bytes", memory.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let len_bytes = self.len_bytes.checked_add(range.len()).ok_or(io::ErrorKind::InvalidInput)?;
        let count = self.list.len();
        match self.list.last_mut() {
            Some(last) if last.range.end == range.start && last.memory.is_same(&memory) => last.range.end = range.end,
            _ if count == SEGMENTS_MAX => {
                let what = format!("a request has at most {SEGMENTS_MAX} segments");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
            }
            _ => self.list.push(Segment { memory, range }),
        }
        self.len_bytes = len_bytes;
        Ok(())
    }

    /// Bytes of all segments together.
    pub fn len(&self) -> usize {
        self.len_bytes
    }

    /// Whether there is no segment.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// How many segments there are.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// The segments, in the order of the payload.
    pub fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.list.iter()
    }

    /// Whether a read can go into all of them: not into shared memory, nor into memory that was
    /// mapped for reading only.
    pub fn is_writable(&self) -> bool {
        self.list.iter().all(|segment| segment.memory.is_writable())
    }

    /// Takes all segments out, in order, and keeps the list's own memory for the next payload.
    pub fn clear(&mut self) -> impl Iterator<Item = Segment> + '_ {
        self.len_bytes = 0;
        self.list.drain(..)
    }

    /// Copies `out.len()` bytes of the payload, from `start` on, into `out`.
    ///
    /// # Errors
    /// `InvalidInput` when the payload ends before.
    pub fn copy_out(&self, start: usize, out: &mut [u8]) -> io::Result<()> {
        let mut cursor = Cursor::default();
        let mut done = 0;
        while done < out.len() {
            let (segment, within) = self.locate(&mut cursor, start.saturating_add(done)).ok_or_else(beyond)?;
            let from = segment.range.start + within;
            let now = (segment.range.end - from).min(out.len() - done);
            let piece = &mut out[done..done + now];
            match &segment.memory {
                SegmentMemory::Mapped(memory) => memory.copy_out(from, piece)?,
                own => piece.copy_from_slice(own.buf().map_or(&[], |buf| &buf[from..from + now])),
            }
            done += now;
        }
        Ok(())
    }

    /// Copies `bytes` into the payload, from `start` on.
    ///
    /// # Errors
    /// `InvalidInput` when the payload ends before, `PermissionDenied` where a segment is not
    /// writable.
    pub fn copy_in(&mut self, start: usize, bytes: &[u8]) -> io::Result<()> {
        let mut cursor = Cursor::default();
        let mut done = 0;
        while done < bytes.len() {
            let (segment, within) = self.locate(&mut cursor, start.saturating_add(done)).ok_or_else(beyond)?;
            let to = segment.range.start + within;
            let now = (segment.range.end - to).min(bytes.len() - done);
            let piece = &bytes[done..done + now];
            match &mut self.list[cursor.index].memory {
                SegmentMemory::Own(buf) => buf[to..to + now].copy_from_slice(piece),
                SegmentMemory::Mapped(memory) => memory.copy_in(to, piece)?,
                SegmentMemory::Shared(_) => return Err(not_writable()),
            }
            done += now;
        }
        Ok(())
    }

    /// Whether `range` of the payload is nothing but zeros; not so for an empty range or one that
    /// the payload does not have. Mapped memory may change at once, so the answer counts for the
    /// moment only.
    pub fn is_zero(&self, range: Range<usize>) -> bool {
        let mut piece = [0; UNIT_BYTES];
        let mut at = range.start;
        while at < range.end {
            let now = (range.end - at).min(piece.len());
            if self.copy_out(at, &mut piece[..now]).is_err() || !crate::all_zero(&piece[..now]) {
                return false;
            }
            at += now;
        }
        range.start < range.end
    }

    /// Whether the payload from `start` on can be moved segment by segment by a device that needs
    /// references and whole sectors of at most `unit_bytes`: no memory is another process's, and
    /// segments meet at multiples of `unit_bytes` from `start` only.
    pub fn can_be_sliced(&self, start: usize, unit_bytes: usize) -> bool {
        let mut seam = 0;
        self.list.iter().all(|segment| {
            let fits = seam <= start || (seam - start).is_multiple_of(unit_bytes);
            seam += segment.range.len();
            fits && segment.memory.buf().is_some()
        })
    }

    /// Bytes of the payload from `at` to the end of that segment. 0 beyond the end.
    pub fn left_in_segment(&self, at: usize) -> usize {
        self.locate(&mut Cursor::default(), at).map_or(0, |(segment, within)| segment.range.len() - within)
    }

    /// A range of the payload that lies within one segment, whose memory is not another process's.
    pub fn slice(&self, range: Range<usize>) -> Option<&[u8]> {
        let (segment, within) = self.locate(&mut Cursor::default(), range.start)?;
        segment.memory.buf()?.get(segment.range.clone())?.get(within..within.checked_add(range.len())?)
    }

    /// As [`Segments::slice`], for memory that is the request's own.
    pub fn slice_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        let mut cursor = Cursor::default();
        let (_, within) = self.locate(&mut cursor, range.start)?;
        let Segment { memory: SegmentMemory::Own(buf), range: of } = &mut self.list[cursor.index] else { return None };
        buf.get_mut(of.clone())?.get_mut(within..within.checked_add(range.len())?)
    }

    /// The segment that holds byte `at` of the payload, and how far inside of it. A cursor only
    /// goes forward.
    fn locate(&self, cursor: &mut Cursor, at: usize) -> Option<(&Segment, usize)> {
        loop {
            let segment = self.list.get(cursor.index)?;
            let within = at.checked_sub(cursor.start)?;
            if within < segment.range.len() {
                return Some((segment, within));
            }
            cursor.index += 1;
            cursor.start += segment.range.len();
        }
    }

    /// What of `at..end` is moved next by one part. `None` where the payload has no such bytes, or
    /// a part that `fills` memory may not.
    pub(crate) fn cut(&self, cursor: &mut Cursor, at: usize, end: usize, fills: bool) -> Option<Cut<'_>> {
        let (segment, within) = self.locate(cursor, at)?;
        if fills && !segment.memory.is_writable() {
            return None;
        }
        let there = segment.range.len() - within;
        let mut now = there.min(end - at);
        if !fills && now == there && at + now < end {
            // Another segment follows.
            let odd = (at + now) % UNIT_BYTES;
            if odd >= now {
                return Some(Cut::Gather { len_bytes: self.gathered_until(*cursor, at, end) - at });
            }
            now -= odd;
        }
        let span = segment.span().slice(within..within + now)?;
        Some(Cut::Direct { span, buf: segment.memory.buf() })
    }

    /// Where gathering stops that begins at `at`: at a unit that lies in one segment, or at the
    /// end.
    fn gathered_until(&self, mut cursor: Cursor, at: usize, end: usize) -> usize {
        let mut stop = (at / UNIT_BYTES + 1) * UNIT_BYTES;
        while stop < end && stop - at < GATHER_BYTES {
            match self.locate(&mut cursor, stop) {
                Some((segment, within)) if segment.range.len() - within >= UNIT_BYTES => break,
                _ => stop += UNIT_BYTES,
            }
        }
        stop.min(end)
    }

    /// The same list for a request of which nothing will be heard again: fresh memory in the place
    /// of what was its own.
    pub(crate) fn replacement(&self) -> Self {
        let list = self.list.iter().map(|segment| {
            let memory = match &segment.memory {
                SegmentMemory::Own(buf) => SegmentMemory::Own(IoBuf::new(buf.len().max(1))),
                SegmentMemory::Shared(buf) => SegmentMemory::Shared(Arc::clone(buf)),
                SegmentMemory::Mapped(memory) => SegmentMemory::Mapped(Arc::clone(memory)),
            };
            Segment { memory, range: segment.range.clone() }
        });
        Self { list: list.collect(), len_bytes: self.len_bytes }
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segments({} bytes in {})", self.len_bytes, self.list.len())
    }
}

fn beyond() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the payload's segments end before")
}

fn not_writable() -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, "shared memory cannot be read into")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buf(len: usize, byte: u8) -> IoBuf {
        let mut buf = IoBuf::new(len);
        buf.fill(byte);
        buf
    }

    /// What a write of the whole payload is cut into: lengths, gathered ones below zero.
    fn cuts(segments: &Segments) -> Vec<i64> {
        let (mut at, mut cursor, mut found) = (0, Cursor::default(), Vec::new());
        while at < segments.len() {
            let (len, cut) = match segments.cut(&mut cursor, at, segments.len(), false).unwrap() {
                Cut::Direct { span, .. } => (span.len_bytes, span.len_bytes as i64),
                Cut::Gather { len_bytes } => (len_bytes, -(len_bytes as i64)),
            };
            found.push(cut);
            at += len;
        }
        found
    }

    fn of_lengths(lengths: &[usize]) -> Segments {
        let mut segments = Segments::new();
        for &len in lengths {
            segments.push(buf(len, 1), 0..len).unwrap();
        }
        segments
    }

    #[test]
    fn a_write_is_cut_at_units_and_what_crosses_one_is_gathered() {
        assert_eq!(cuts(&of_lengths(&[8192, 4096])), [8192, 4096]);
        assert_eq!(cuts(&of_lengths(&[8191, 4097])), [4096, -4096, 4096]);
        assert_eq!(cuts(&of_lengths(&[1, 12_287])), [-4096, 8192]);
        assert_eq!(cuts(&of_lengths(&[5000, 100, 100, 2000, 9184])), [4096, -4096, 8192]);
        assert_eq!(cuts(&of_lengths(&[1; 1024])), [-1024]);
        assert_eq!(cuts(&of_lengths(&[4095, 2, 4095, 4096])), [-8192, 4096], "no unit in between lies in one segment");
        assert_eq!(cuts(&of_lengths(&[512, 512])), [-1024]);
    }

    #[test]
    fn memory_that_is_not_there_is_refused() {
        let mut segments = Segments::new();
        for bad in [0..0, 1..513, 513..514] {
            assert!(segments.push(buf(512, 1), bad).is_err());
        }
        #[expect(clippy::reversed_empty_ranges, reason = "a range as a hostile guest may give it")]
        let reversed = 5..3;
        assert!(segments.push(buf(512, 1), reversed).is_err());
        let shared = Arc::new(buf(2048, 1));
        for n in 0..SEGMENTS_MAX {
            segments.push(Arc::clone(&shared), 2 * n % 2048..2 * n % 2048 + 1).unwrap();
        }
        assert!(segments.push(Arc::clone(&shared), 0..1).is_err());
        assert_eq!((segments.len(), segments.count(), segments.is_writable()), (1024, 1024, false));
        assert_eq!(segments.clear().count(), 1024);
        assert!(segments.is_empty() && Arc::strong_count(&shared) == 1);
    }

    #[test]
    fn neighbours_in_one_memory_are_one_segment() {
        let shared = Arc::new(buf(4096, 1));
        let mut segments = Segments::new();
        segments.push(Arc::clone(&shared), 0..100).unwrap();
        segments.push(Arc::clone(&shared), 100..300).unwrap();
        assert_eq!((segments.count(), segments.len()), (1, 300));
        segments.push(Arc::clone(&shared), 301..302).unwrap();
        segments.push(Arc::new(buf(4096, 1)), 302..303).unwrap();
        assert_eq!((segments.count(), segments.len()), (3, 302));
    }

    #[test]
    fn slices_lie_within_one_segment() {
        let mut segments = of_lengths(&[1024, 512, 4096]);
        assert!(segments.can_be_sliced(0, 512) && !segments.can_be_sliced(0, 1024) && segments.can_be_sliced(512, 512));
        assert!(!segments.can_be_sliced(1, 512) && segments.can_be_sliced(1536, 4096));
        assert_eq!([0, 1000, 1024, 5632].map(|at| segments.left_in_segment(at)), [1024, 24, 512, 0]);
        assert_eq!(segments.slice(1000..1024).map(<[u8]>::len), Some(24));
        assert!(segments.slice(1000..1025).is_none() && segments.slice(5632..5633).is_none());
        segments.slice_mut(1024..1536).unwrap().fill(3);
        let mut all = vec![0; 5632];
        segments.copy_out(0, &mut all).unwrap();
        assert!(all[..1024].iter().chain(&all[1536..]).all(|&byte| byte == 1) && all[1024..1536] == [3; 512]);
        let mut shared = Segments::new();
        shared.push(Arc::new(buf(512, 2)), 0..512).unwrap();
        assert!(shared.slice(0..512).is_some() && shared.slice_mut(0..512).is_none() && shared.can_be_sliced(0, 512));
    }

    #[test]
    fn a_payload_is_copied_over_the_seams() {
        let mut segments = of_lengths(&[3, 1, 5000, 7]);
        let bytes: Vec<u8> = (0..5000u32).map(|n| (n % 251) as u8).collect();
        segments.copy_in(2, &bytes).unwrap();
        let mut back = vec![0; 5000];
        segments.copy_out(2, &mut back).unwrap();
        assert!(back == bytes);
        assert!(segments.copy_out(12, &mut back).is_err() && segments.copy_in(5011, &[1]).is_err());
        assert!(!segments.is_zero(0..5011) && !segments.is_zero(0..0));
        segments.copy_in(0, &[0; 5011]).unwrap();
        assert!(segments.is_zero(0..5011) && segments.is_zero(3..4) && !segments.is_zero(0..5012));
        segments.copy_in(5010, &[1]).unwrap();
        assert!(!segments.is_zero(0..5011) && segments.is_zero(0..5010));
        let mut shared = Segments::new();
        shared.push(Arc::new(buf(8, 1)), 0..8).unwrap();
        assert_eq!(shared.copy_in(0, &[1]).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
