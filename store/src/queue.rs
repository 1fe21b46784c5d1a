//! The block queue: the interface through which every block device is driven.
//!
//! Threads share a [`BlockDevice`]. Each thread opens a [`BlockQueue`] of its own, pushes
//! [`Request`]s until the depth is reached, and reaps [`Completion`]s. A request owns its buffer
//! while it is in flight and returns it in the completion, so no code can touch memory that the
//! kernel is writing to. The memory is one [`IoBuf`], or [`Segments`] (a scatter-gather list) if
//! the payload lies in several places, is shared with another write, or belongs to another process.
//!
//! ```text
//!   push(Request{op, offset, buf, tag}) ─▶ in flight ─▶ reap() ─▶ Completion{tag, buf, result}
//! ```
//!
//! As on a physical disk, requests in flight at the same time are not ordered. A completed write is
//! visible to every queue of the device. It is durable after a flush that was pushed after its
//! completion, or if it carried [`Request::fua`].

use crate::{
    Engine, EngineKind, IoBuf, Segments, SharedRing, Slab, all_zero, at_risk::AtRisk, buffer::BUFFER_ALIGNMENT_BYTES,
    member_traffic::MemberTraffic, resize::SizeWatcher,
};
use std::{fmt, io, ops::Range, sync::Arc};

/// What a request does to its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Read the range into the buffer.
    Read,
    /// Write the buffer to the range.
    Write,
    /// Make the range read as zeros, keeping its space allocated where possible. No buffer.
    WriteZeroes,
    /// Make the range read as zeros and give its space back. No buffer.
    Discard,
    /// Make every completed write durable. No buffer, no range.
    Flush,
}

/// One request. Offsets and lengths are multiples of the device's logical sector size.
#[derive(Debug)]
pub struct Request {
    /// What to do with the range.
    pub operation: Operation,
    /// First byte of the range on the device.
    pub offset_bytes: u64,
    /// Length of the range. For reads and writes the buffer must hold this much after
    /// `buf_offset_bytes`.
    pub len_bytes: u64,
    /// The memory for reads and writes.
    pub buf: Option<IoBuf>,
    /// The scatter-gather list of a read or write that has no `buf`.
    pub segments: Option<Box<Segments>>,
    /// Where the payload begins, counted from the start of the buffer or of all segments. The bytes
    /// before it are free for a reply's header. A multiple of 4096 keeps the payload aligned for
    /// every device.
    pub buf_offset_bytes: usize,
    /// Returned in the completion.
    pub tag: u64,
    /// Force unit access: complete only when durable. For writes, write-zeroes and discards.
    pub fua: bool,
}

impl Request {
    /// A read of `len_bytes` at `offset_bytes` into the front of `buf`.
    pub fn read(offset_bytes: u64, len_bytes: usize, buf: IoBuf, tag: u64) -> Self {
        Self { operation: Operation::Read, len_bytes: len_bytes as u64, buf: Some(buf), ..Self::of(offset_bytes, tag) }
    }

    /// A write of the first `len_bytes` of `buf` at `offset_bytes`.
    pub fn write(offset_bytes: u64, len_bytes: usize, buf: IoBuf, tag: u64) -> Self {
        Self { operation: Operation::Write, len_bytes: len_bytes as u64, buf: Some(buf), ..Self::of(offset_bytes, tag) }
    }

    /// A read into all of `segments`, at `offset_bytes`.
    pub fn read_segments(offset_bytes: u64, segments: Box<Segments>, tag: u64) -> Self {
        let len_bytes = segments.len() as u64;
        Self { operation: Operation::Read, len_bytes, segments: Some(segments), ..Self::of(offset_bytes, tag) }
    }

    /// A write of all of `segments` at `offset_bytes`.
    pub fn write_segments(offset_bytes: u64, segments: Box<Segments>, tag: u64) -> Self {
        Self { operation: Operation::Write, ..Self::read_segments(offset_bytes, segments, tag) }
    }

    /// Zeroing of a range.
    pub fn write_zeroes(offset_bytes: u64, len_bytes: u64, tag: u64) -> Self {
        Self { operation: Operation::WriteZeroes, len_bytes, ..Self::of(offset_bytes, tag) }
    }

    /// A discard of a range.
    pub fn discard(offset_bytes: u64, len_bytes: u64, tag: u64) -> Self {
        Self { operation: Operation::Discard, len_bytes, ..Self::of(offset_bytes, tag) }
    }

    /// A flush.
    pub fn flush(tag: u64) -> Self {
        Self::of(0, tag)
    }

    /// An empty request, for the constructors to fill in.
    fn of(offset_bytes: u64, tag: u64) -> Self {
        let operation = Operation::Flush;
        Self { operation, offset_bytes, len_bytes: 0, buf: None, segments: None, buf_offset_bytes: 0, tag, fua: false }
    }

    /// The range of the payload in the buffer. Call only for a request that passed [`validate`].
    #[inline]
    pub fn buf_range(&self) -> Range<usize> {
        self.buf_offset_bytes..self.buf_offset_bytes.saturating_add(self.len_bytes as usize)
    }

    /// Whether this is a write whose payload is all zeros. Reads the payload up to its first other
    /// byte.
    pub fn writes_zeros(&self) -> bool {
        if self.operation != Operation::Write {
            return false;
        }
        if let Some(segments) = &self.segments {
            return segments.is_zero(self.buf_range());
        }
        let payload = self.buf.as_ref().and_then(|buf| buf.get(self.buf_range())).unwrap_or_default();
        !payload.is_empty() && all_zero(payload)
    }
}

/// A completed request.
#[derive(Debug)]
pub struct Completion {
    /// The request's tag.
    pub tag: u64,
    /// The request's buffer.
    pub buf: Option<IoBuf>,
    /// The request's scatter-gather list.
    pub segments: Option<Box<Segments>>,
    /// `Ok` if the whole range was done. There are no partial successes.
    pub result: io::Result<()>,
}

/// A request that [`BlockQueue::push`] refused, returned with its buffer.
#[derive(Debug)]
pub struct PushError {
    /// The request.
    pub request: Request,
    /// `WouldBlock` if the depth is reached, `InvalidInput` if range, alignment or buffer are
    /// wrong, `ReadOnlyFilesystem` for a write to a read-only device.
    pub reason: io::Error,
}

/// Size and sector sizes of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Capacity in bytes, a multiple of the logical sector size.
    pub size_bytes: u64,
    /// The unit of addressing.
    pub logical_sector_bytes: u32,
    /// The unit that the device writes without read-modify-write.
    pub physical_sector_bytes: u32,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// Options for opening a queue.
#[derive(Debug, Clone, Copy)]
pub struct QueueOptions<'a> {
    /// Maximum number of requests in flight.
    pub depth: usize,
    /// How I/O is submitted.
    pub engine: EngineKind,
    /// Buffers to register with the kernel. Ignored if `ring` is given: it has registered its own.
    pub slab: Option<&'a Slab>,
    /// A ring to share with other queues and streams of this thread. `engine` and `slab` are then
    /// ignored, except that [`EngineKind::Sync`] uses no ring.
    pub ring: Option<&'a SharedRing>,
}

impl Default for QueueOptions<'_> {
    fn default() -> Self {
        Self { depth: 32, engine: EngineKind::Auto, slab: None, ring: None }
    }
}

impl QueueOptions<'_> {
    /// Opens the engine that these options describe.
    pub fn engine(&self) -> io::Result<Engine> {
        match self.ring {
            Some(ring) if self.engine != EngineKind::Sync => Ok(Engine::on(ring)),
            _ => Engine::new(self.engine, self.depth, self.slab),
        }
    }
}

/// What a range of a device holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Bytes in a store.
    Data,
    /// Recorded as zeros by a layer: a zero or trimmed block, or a hole.
    Zero,
    /// No layer of the device maps the range; it reads as zeros.
    Unallocated,
    /// A layer's table entry for the range is invalid: reads fail and say why.
    Damaged,
}

impl ExtentKind {
    /// Whether the range is known to read as zeros without reading it.
    pub fn reads_as_zeros(self) -> bool {
        match self {
            Self::Zero | Self::Unallocated => true,
            Self::Data | Self::Damaged => false,
        }
    }
}

/// A run of blocks with the same state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte on the device.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// The state of the range.
    pub kind: ExtentKind,
    /// The layer that decides the state: 0 is the top of the chain.
    pub depth: u32,
    /// The index of the file within that layer, from 0; most layers have one file.
    pub file: u16,
    /// Offset of the bytes in that file, for [`ExtentKind::Data`].
    pub file_offset_bytes: Option<u64>,
}

/// A raw file, a block device, a virtual disk, or a network export.
pub trait BlockDevice: Send + Sync + fmt::Debug {
    /// Current size and sector sizes.
    fn geometry(&self) -> Geometry;

    /// Calls `watcher` whenever the size of the device changes, for as long as the caller keeps the
    /// watcher. Devices of fixed size never call it.
    fn watch_size(&self, _watcher: &Arc<SizeWatcher>) {}

    /// Opens a queue for the calling thread.
    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>>;

    /// Appends the extents of a range to `out`, in order and without gaps. A device that does not
    /// know its extents reports data.
    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
        out.push(Extent {
            offset_bytes,
            len_bytes,
            kind: ExtentKind::Data,
            depth: 0,
            file: 0,
            file_offset_bytes: None,
        });
        Ok(())
    }

    /// Whether the death of this process would undo completed requests. A power cut is not meant.
    /// A device that passes requests on to another one must pass this question on too.
    fn at_risk(&self) -> AtRisk {
        AtRisk::Never
    }

    /// What the members below the device have done, if its bytes lie in several of them; see
    /// [`Store::member_traffic`](crate::Store::member_traffic). A device that passes requests on
    /// must pass this question on too.
    fn member_traffic(&self) -> Vec<MemberTraffic> {
        Vec::new()
    }

    /// The points since which changes of the device are tracked.
    fn tracked_points(&self) -> Vec<TrackedPoint> {
        Vec::new()
    }

    /// Appends the parts of a range that have changed since a point to `out`, in order; no two of
    /// them touch. At most `enough` parts.
    ///
    /// # Errors
    /// `NotFound` if the device has no such point, or another one by this name.
    fn changed_since(
        &self,
        point: &TrackedPoint,
        range: Range<u64>,
        enough: usize,
        out: &mut Vec<Range<u64>>,
    ) -> io::Result<()> {
        let _ = (point, range, enough, out);
        Err(io::ErrorKind::NotFound.into())
    }
}

/// A point since which changes of a device are tracked.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TrackedPoint {
    /// Name of the point.
    pub name: String,
    /// Tells it from a former point of its name: a client that goes on after the point was stopped
    /// and started again must not mix the two.
    pub id: u64,
}

/// A thread's queue of requests to a device.
pub trait BlockQueue: fmt::Debug {
    /// Maximum number of requests in flight.
    fn depth(&self) -> usize;

    /// Requests pushed and not yet reaped.
    fn in_flight(&self) -> usize;

    /// Alignment of a write's memory address below which the payload is copied on its way.
    fn memory_alignment_bytes(&self) -> usize {
        BUFFER_ALIGNMENT_BYTES
    }

    /// Accepts a request, which may start now or at the next [`BlockQueue::reap`]. The error is
    /// boxed because it is rare and carries the request.
    fn push(&mut self, request: Request) -> Result<(), Box<PushError>>;

    /// Starts everything pushed (on a shared ring, the next user that waits does that), waits until
    /// at least `at_least` requests have ended (0 does not wait; at most as many as are in flight),
    /// and appends all completions. An error means that the queue itself has failed.
    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()>;
}

/// Checks a request against a geometry. All devices use it, so that all refuse the same requests.
pub fn validate(request: &Request, geometry: &Geometry) -> io::Result<()> {
    let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    if request.operation == Operation::Flush {
        return Ok(());
    }
    if geometry.read_only && request.operation != Operation::Read {
        return Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the disk is open read-only"));
    }
    let sector_mask = u64::from(geometry.logical_sector_bytes) - 1;
    if (request.offset_bytes | request.len_bytes) & sector_mask != 0 {
        return invalid(format!(
            "offset {} and length {} must be multiples of the disk's sector of {} bytes",
            request.offset_bytes, request.len_bytes, geometry.logical_sector_bytes
        ));
    }
    match request.offset_bytes.checked_add(request.len_bytes) {
        Some(end_bytes) if end_bytes <= geometry.size_bytes => {}
        _ => {
            return invalid(format!(
                "offset {} plus length {} reach beyond the disk's end at {}",
                request.offset_bytes, request.len_bytes, geometry.size_bytes
            ));
        }
    }
    if matches!(request.operation, Operation::Read | Operation::Write) {
        let held_bytes =
            request.buf.as_ref().map_or(0, |buf| buf.len().saturating_sub(request.buf_offset_bytes) as u64);
        if held_bytes < request.len_bytes || request.segments.is_some() {
            return validate_memory(request, held_bytes);
        }
    }
    Ok(())
}

/// Checks the memory of a read or write that has segments, or too small a buffer.
#[cold]
fn validate_memory(request: &Request, held_bytes: u64) -> io::Result<()> {
    let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let Some(segments) = &request.segments else {
        return invalid(format!("the buffer holds {held_bytes} bytes, the request needs {}", request.len_bytes));
    };
    if request.buf.is_some() {
        return invalid("a request has a buffer or segments, not both".to_owned());
    }
    let held_bytes = segments.len().saturating_sub(request.buf_offset_bytes) as u64;
    if held_bytes < request.len_bytes {
        return invalid(format!("the segments hold {held_bytes} bytes, the request needs {}", request.len_bytes));
    }
    if request.operation == Operation::Read && !segments.is_writable() {
        return invalid("a read cannot go into memory that is shared or mapped read-only".to_owned());
    }
    Ok(())
}

/// Drives a device one request at a time, for tools and tests where speed does not matter.
#[derive(Debug)]
pub struct Blocking {
    queue: Box<dyn BlockQueue>,
    buf: Option<IoBuf>,
    geometry: Geometry,
    done: Vec<Completion>,
}

/// Largest single transfer of [`Blocking`].
const BLOCKING_BYTES: usize = 1 << 20;

impl Blocking {
    /// Opens a queue of depth 1 on `device`.
    pub fn open(device: &dyn BlockDevice, engine: EngineKind) -> io::Result<Self> {
        let slab = Slab::new(1, BLOCKING_BYTES);
        let queue = device.open_queue(&QueueOptions { depth: 1, engine, ..QueueOptions::default() })?;
        Ok(Self { queue, buf: slab.take_all().pop(), geometry: device.geometry(), done: Vec::new() })
    }

    fn run(&mut self, request: Request) -> io::Result<()> {
        self.queue.push(request).map_err(|error| {
            self.buf = error.request.buf;
            error.reason
        })?;
        self.queue.reap(1, &mut self.done)?;
        let completion = self.done.pop().ok_or_else(|| io::Error::other("the queue completed no request"))?;
        if completion.buf.is_some() {
            self.buf = completion.buf;
        }
        completion.result
    }

    fn take(&mut self) -> io::Result<IoBuf> {
        self.buf.take().ok_or_else(|| io::Error::other("the buffer was lost in an earlier failure of the queue"))
    }

    /// Reads `out.len()` bytes; offset and length must be multiples of the sector size.
    pub fn read(&mut self, mut offset_bytes: u64, out: &mut [u8]) -> io::Result<()> {
        for chunk in out.chunks_mut(BLOCKING_BYTES) {
            let buf = self.take()?;
            self.run(Request::read(offset_bytes, chunk.len(), buf, 0))?;
            if let Some(buf) = &self.buf {
                chunk.copy_from_slice(&buf[..chunk.len()]);
            }
            offset_bytes += chunk.len() as u64;
        }
        Ok(())
    }

    /// Writes `data`; offset and length must be multiples of the sector size.
    pub fn write(&mut self, mut offset_bytes: u64, data: &[u8], fua: bool) -> io::Result<()> {
        for chunk in data.chunks(BLOCKING_BYTES) {
            let mut buf = self.take()?;
            buf[..chunk.len()].copy_from_slice(chunk);
            self.run(Request { fua, ..Request::write(offset_bytes, chunk.len(), buf, 0) })?;
            offset_bytes += chunk.len() as u64;
        }
        Ok(())
    }

    /// Makes a range read as zeros; offset and length must be multiples of the sector size.
    pub fn write_zeroes(&mut self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.run(Request::write_zeroes(offset_bytes, len_bytes, 0))
    }

    /// Discards a range; offset and length must be multiples of the sector size.
    pub fn discard(&mut self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.run(Request::discard(offset_bytes, len_bytes, 0))
    }

    /// Makes all completed writes durable.
    pub fn flush(&mut self) -> io::Result<()> {
        self.run(Request::flush(0))
    }

    /// Size and sector sizes, as of when the queue was opened.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }
}
