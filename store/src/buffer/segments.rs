//! A scatter-gather list: one payload in several pieces of memory.
//!
//! ```text
//!   Segments: [ Own(IoBuf, range) | Shared(Arc<IoBuf>, range) | Mapped(Arc<MappedMemory>, range) ]
//!                                        one payload, in this order
//! ```
//!
//! - *Own* memory belongs to the request alone, as the buffer of an ordinary request does.
//! - *Shared* memory may be part of several writes at the same time (a mirror), and is only read.
//! - *Mapped* memory belongs to another process, which may change it at any time. No reference to
//!   it exists.
//!
//! The request owns the list while it is in flight and returns it in its completion, so the memory
//! lives until the kernel no longer uses it. [`Segments::clear`] prepares a returned list for the
//! next payload without an allocation.
//!
//! **Splitting.** A request of several segments becomes several parts of the engine, not one
//! `READV` or `WRITEV`. Each part is continued, lent, retried and transferred through registered
//! buffers like any other, and all are submitted in one system call. A vector would be all or
//! nothing: one segment that O_DIRECT or a lane cannot take would send all of them through the
//! pool.
//!
//! A write is not split within [`UNIT_BYTES`] of the payload: if two parts wrote one sector, a
//! power cut could leave it torn, and a reader could see half of it. Where two segments meet within
//! such a unit, the unit is gathered: copied into a buffer of the engine. A read is split wherever
//! segments meet.

use super::{IoBuf, MappedMemory, span::Span};
use std::{fmt, io, ops::Range, sync::Arc};

/// Maximum number of segments of a request: what the kernel accepts in one vector (`UIO_MAXIOV`).
pub const SEGMENTS_MAX: usize = 1024;

/// A write is split only at multiples of this size, counted from the beginning of the payload: the
/// largest sector size of a disk.
pub(crate) const UNIT_BYTES: usize = 4096;

/// Maximum length of a gathered copy of consecutive units.
const GATHER_BYTES: usize = 64 << 10;

/// The memory of a segment, by its owner.
#[derive(Debug)]
pub enum SegmentMemory {
    /// Owned by the request alone.
    Own(IoBuf),
    /// Shared by several writes and other holders of the `Arc`.
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

    /// Whether a read can go into the memory.
    fn is_writable(&self) -> bool {
        match self {
            Self::Own(_) => true,
            Self::Shared(_) => false,
            Self::Mapped(memory) => memory.is_writable(),
        }
    }

    /// The buffer; `None` for another process's memory.
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

/// A range of some memory.
#[derive(Debug)]
pub struct Segment {
    /// The owner of the memory.
    pub memory: SegmentMemory,
    /// The bytes of the memory that are used: not empty, and within the memory.
    range: Range<usize>,
}

impl Segment {
    /// The range of the memory that the segment uses.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The segment's address and length.
    fn span(&self) -> Span {
        self.memory.span().slice(self.range.clone()).unwrap_or(Span::EMPTY)
    }
}

/// A position in the payload: a segment's index, and the payload offset at which it starts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cursor {
    index: usize,
    start: usize,
}

/// The next piece of a payload to transfer.
pub(crate) enum Cut<'a> {
    /// Memory of one segment. `buf` is `None` for another process's memory.
    Direct { span: Span, buf: Option<&'a IoBuf> },
    /// `len_bytes` of several segments, which must be copied into one buffer.
    Gather { len_bytes: usize },
}

/// A scatter-gather list; see the module documentation.
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

    /// Appends a range of `memory`. If it continues the last segment in the same shared or mapped
    /// memory, that segment is extended.
    ///
    /// # Errors
    /// `InvalidInput` for a range that is empty or not within the memory, and for more than
    /// [`SEGMENTS_MAX`] segments. The memory is then dropped.
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

    /// Total length of all segments in bytes.
    pub fn len(&self) -> usize {
        self.len_bytes
    }

    /// Whether there is no segment.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Number of segments.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// The segments, in the order of the payload.
    pub fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.list.iter()
    }

    /// Whether a read can go into all segments: none is shared or mapped read-only.
    pub fn is_writable(&self) -> bool {
        self.list.iter().all(|segment| segment.memory.is_writable())
    }

    /// Removes all segments, in order, and keeps the list's allocation for the next payload.
    pub fn clear(&mut self) -> impl Iterator<Item = Segment> + '_ {
        self.len_bytes = 0;
        self.list.drain(..)
    }

    /// Copies `out.len()` bytes of the payload, from `start` on, into `out`.
    ///
    /// # Errors
    /// `InvalidInput` if the payload is shorter.
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
    /// `InvalidInput` if the payload is shorter, `PermissionDenied` if a segment is not writable.
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

    /// Whether `range` of the payload consists of zeros. False for an empty range and for one
    /// beyond the payload. Mapped memory may change at any time, so the answer may be outdated
    /// immediately.
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

    /// Whether the payload from `start` on can be transferred segment by segment by a device that
    /// needs references and whole sectors of at most `unit_bytes`: no memory is another process's,
    /// and segments meet only at multiples of `unit_bytes` from `start`.
    pub fn can_be_sliced(&self, start: usize, unit_bytes: usize) -> bool {
        let mut seam = 0;
        self.list.iter().all(|segment| {
            let fits = seam <= start || (seam - start).is_multiple_of(unit_bytes);
            seam += segment.range.len();
            fits && segment.memory.buf().is_some()
        })
    }

    /// Number of bytes from payload offset `at` to the end of its segment; 0 beyond the payload.
    pub fn left_in_segment(&self, at: usize) -> usize {
        self.locate(&mut Cursor::default(), at).map_or(0, |(segment, within)| segment.range.len() - within)
    }

    /// A range of the payload; `None` unless it lies within one segment that is not another
    /// process's memory.
    pub fn slice(&self, range: Range<usize>) -> Option<&[u8]> {
        let (segment, within) = self.locate(&mut Cursor::default(), range.start)?;
        segment.memory.buf()?.get(segment.range.clone())?.get(within..within.checked_add(range.len())?)
    }

    /// As [`Segments::slice`], but only for memory that the request owns.
    pub fn slice_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        let mut cursor = Cursor::default();
        let (_, within) = self.locate(&mut cursor, range.start)?;
        let Segment { memory: SegmentMemory::Own(buf), range: of } = &mut self.list[cursor.index] else { return None };
        buf.get_mut(of.clone())?.get_mut(within..within.checked_add(range.len())?)
    }

    /// The segment that holds payload offset `at`, and the offset within that segment. A cursor
    /// only moves forward.
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

    /// The first piece of `at..end` that one part can transfer. `None` if the payload ends before,
    /// or if the part `fills` memory that is not writable.
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

    /// Where a gathered copy that begins at `at` ends: at the next unit that lies within one
    /// segment, or at `end`.
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

    /// The list to return for a lost request: its own memory is replaced by fresh memory.
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
    io::Error::new(io::ErrorKind::InvalidInput, "the range ends beyond the payload's segments")
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

    /// The pieces into which a write of the whole payload is split: their lengths, negative if
    /// gathered.
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
    fn writes_are_split_at_units_and_units_across_segments_gathered() {
        assert_eq!(cuts(&of_lengths(&[8192, 4096])), [8192, 4096]);
        assert_eq!(cuts(&of_lengths(&[8191, 4097])), [4096, -4096, 4096]);
        assert_eq!(cuts(&of_lengths(&[1, 12_287])), [-4096, 8192]);
        assert_eq!(cuts(&of_lengths(&[5000, 100, 100, 2000, 9184])), [4096, -4096, 8192]);
        assert_eq!(cuts(&of_lengths(&[1; 1024])), [-1024]);
        assert_eq!(cuts(&of_lengths(&[4095, 2, 4095, 4096])), [-8192, 4096], "no unit in between lies in one segment");
        assert_eq!(cuts(&of_lengths(&[512, 512])), [-1024]);
    }

    #[test]
    fn invalid_segments_are_refused() {
        let mut segments = Segments::new();
        for bad in [0..0, 1..513, 513..514] {
            assert!(segments.push(buf(512, 1), bad).is_err());
        }
        #[expect(clippy::reversed_empty_ranges, reason = "an invalid range, as a hostile guest may send it")]
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
    fn a_payload_is_copied_across_segment_boundaries() {
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
