//! One thread's way through the map to the engine.
//!
//! ```text
//!   push ─▶ validate ─▶ one unit, owner known? ── yes ─▶ engine.read_one / write_one          (no lock, no allocation)
//!                                   │ no
//!                                   ▼
//!                   `plan`, under the mutation lock ─▶ parts ─▶ unlock ─▶ engine.begin, parts, end
//!   reap ─▶ engine.reap ─▶ plain: hand out
//!                       └▶ with a cookie: commit what the payload made true, flush for FUA, then hand out
//! ```
//!
//! What a write means, and what makes it right, [`plan`](crate::plan) says. Invariant: a request is counted in `in_flight`, and in the epoch of
//! its parity, from its push until [`DiskQueue::finish`] gives it out.

use crate::{
    device::Shared,
    epoch::{Parity, QueueEpoch},
    error,
    map::{Owner, Run},
    plan::{Part, Pending, plan_write, plan_zero, settle},
};
use diskwright_image::ImageWriter;
use diskwright_store::{
    BlockQueue, Completion, Engine, EngineCompletion, IoBuf, Operation, PushError, QueueOptions, Request, TargetId,
    all_zero, queue::validate,
};
use std::{collections::HashMap, fmt, io, sync::Arc};

/// In the place of a [`Pending`]'s number: nothing but that the write was to be durable by itself.
const DURABLE: u64 = u64::MAX >> 2;

/// How a request was counted, and where its [`Pending`] is: the engine carries this as its cookie.
#[derive(Debug, Clone, Copy)]
struct Cookie(u64);

impl Cookie {
    fn new(parity: Option<Parity>, pending: u64) -> Self {
        let counted = match parity {
            None => 0,
            Some(Parity(false)) => 1,
            Some(Parity(true)) => 3,
        };
        Self(pending << 2 | counted)
    }

    fn parity(self) -> Option<Parity> {
        (self.0 & 1 == 1).then_some(Parity(self.0 & 2 != 0))
    }

    fn pending(self) -> Option<u64> {
        (self.0 >> 2 != 0).then_some(self.0 >> 2)
    }
}

/// See the module.
pub(crate) struct DiskQueue {
    /// Before `shared`: what is in flight ends before the disk can be closed.
    engine: Engine,
    shared: Arc<Shared>,
    targets: Vec<Option<TargetId>>,
    /// `None` for a read-only disk, whose map never changes.
    epoch: Option<QueueEpoch>,
    depth: usize,
    in_flight: usize,
    pending: HashMap<u64, Pending>,
    last_pending: u64,
    ended: Vec<EngineCompletion>,
    runs: Vec<Run>,
    parts: Vec<Part>,
}

impl fmt::Debug for DiskQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DiskQueue({} of {} in flight)", self.in_flight, self.depth)
    }
}

impl DiskQueue {
    pub(crate) fn open(shared: Arc<Shared>, options: &QueueOptions<'_>) -> io::Result<Self> {
        let engine = options.engine()?;
        let epoch = (!shared.geometry.read_only).then(|| shared.epochs.join());
        let targets = vec![None; shared.layers.len()];
        Ok(Self {
            shared,
            engine,
            targets,
            epoch,
            depth: options.depth.max(1),
            in_flight: 0,
            pending: HashMap::new(),
            last_pending: 0,
            ended: Vec::new(),
            runs: Vec::new(),
            parts: Vec::new(),
        })
    }

    #[inline]
    fn target(&mut self, layer: u32) -> io::Result<TargetId> {
        match self.targets[layer as usize] {
            Some(target) => Ok(target),
            None => {
                let target = self.engine.add_target(self.shared.layers[layer as usize].image.store())?;
                self.targets[layer as usize] = Some(target);
                Ok(target)
            }
        }
    }

    #[inline]
    fn enter(&self) -> Option<Parity> {
        self.epoch.as_ref().map(QueueEpoch::enter)
    }

    fn next_pending(&mut self) -> u64 {
        self.last_pending += 1;
        self.last_pending
    }

    /// Ends a request at once.
    fn end_with(&mut self, tag: u64, cookie: Cookie, buf: Option<IoBuf>, result: io::Result<()>) {
        let slot = self.engine.begin(tag, cookie.0, buf);
        if let Err(error) = result {
            self.engine.fail(&slot, error);
        }
        self.engine.end(slot);
    }

    fn read(&mut self, request: Request) {
        let parity = self.enter();
        let cookie = Cookie::new(parity, 0);
        let Request { offset_bytes, len_bytes, tag, buf, buf_offset_bytes, .. } = request;
        // `validate` has seen to it that a request for something has a buffer.
        let Some(buf) = buf else { return self.end_with(tag, cookie, None, Ok(())) };
        if len_bytes == 0 {
            return self.end_with(tag, cookie, Some(buf), Ok(()));
        }
        if let Some(Owner::Data { layer, offset_bytes: file_offset_bytes }) =
            self.shared.map.lookup(offset_bytes, len_bytes)
        {
            match self.target(layer) {
                Ok(target) => {
                    let range = buf_offset_bytes..buf_offset_bytes + len_bytes as usize;
                    self.engine.read_one(tag, cookie.0, target, file_offset_bytes, buf, range);
                }
                Err(error) => self.end_with(tag, cookie, Some(buf), Err(error)),
            }
            return;
        }
        let mut runs = std::mem::take(&mut self.runs);
        runs.clear();
        let folded = {
            let mut mutation = self.shared.lock();
            self.shared.fold(&mut mutation).runs(offset_bytes, offset_bytes + len_bytes, &mut runs)
        };
        let slot = self.engine.begin(tag, cookie.0, Some(buf));
        match folded {
            Ok(()) => {
                for run in &runs {
                    let start = buf_offset_bytes + (run.start_bytes - offset_bytes) as usize;
                    let range = start..start + run.len_bytes as usize;
                    match run.owner {
                        Owner::Data { layer, offset_bytes } => match self.target(layer) {
                            Ok(target) => self.engine.read(&slot, target, offset_bytes, range),
                            Err(error) => self.engine.fail(&slot, error),
                        },
                        Owner::Zero { .. } | Owner::Absent | Owner::Lazy { .. } => self.engine.fill_zeros(&slot, range),
                    }
                }
            }
            Err(error) => self.engine.fail(&slot, error::to_io(error)),
        }
        self.engine.end(slot);
        self.runs = runs;
    }

    fn write(&mut self, request: Request) {
        let parity = self.enter();
        let Request { offset_bytes, len_bytes, tag, buf, buf_offset_bytes, fua, .. } = request;
        let buf = match buf {
            Some(buf) if len_bytes > 0 => buf,
            nothing_to_store => return self.end_with(tag, Cookie::new(parity, 0), nothing_to_store, Ok(())),
        };
        if let Some(Owner::Data { layer: 0, offset_bytes: file_offset_bytes }) =
            self.shared.map.lookup(offset_bytes, len_bytes)
            && self.shared.has_begun_writing()
        {
            match self.target(0) {
                Ok(target) => {
                    if fua && let Err(error) = self.shared.check_poison() {
                        return self.end_with(tag, Cookie::new(parity, 0), Some(buf), Err(error));
                    }
                    let dirty = fua && self.shared.writer().is_ok_and(ImageWriter::is_dirty);
                    let mut pending = if fua { DURABLE } else { 0 };
                    if dirty {
                        pending = self.next_pending();
                        self.pending.insert(pending, Pending { flush_after: true, ..Pending::default() });
                    }
                    let cookie = Cookie::new(parity, pending);
                    let durable = fua && !dirty;
                    let range = buf_offset_bytes..buf_offset_bytes + len_bytes as usize;
                    self.engine.write_one(tag, cookie.0, target, file_offset_bytes, buf, range, durable);
                }
                Err(error) => self.end_with(tag, Cookie::new(parity, 0), Some(buf), Err(error)),
            }
            return;
        }
        let mut pending = Pending { flush_after: fua, ..Pending::default() };
        let shared = Arc::clone(&self.shared);
        let planned = plan_write(&shared, offset_bytes, len_bytes, &mut self.parts, &mut pending);
        self.issue(tag, parity, Some((buf, buf_offset_bytes)), pending, planned);
    }

    fn zero(&mut self, request: Request) {
        let parity = self.enter();
        let Request { operation, offset_bytes, len_bytes, tag, buf, fua, .. } = request;
        let mut pending = Pending { flush_after: fua, ..Pending::default() };
        let shared = Arc::clone(&self.shared);
        let planned =
            plan_zero(&shared, offset_bytes, len_bytes, operation == Operation::Discard, &mut self.parts, &mut pending);
        // No part of it reads the buffer; a write of zeros has one all the same, and gets it back.
        self.issue(tag, parity, buf.map(|buf| (buf, 0)), pending, planned);
    }

    /// Starts the parts of a planned write, with the buffer and where in it the payload begins. Their commits follow when they are done. Where planning failed half-way, what was
    /// planned is done all the same (it holds blocks busy), and the request fails.
    fn issue(
        &mut self,
        tag: u64,
        parity: Option<Parity>,
        payload: Option<(IoBuf, usize)>,
        mut pending: Pending,
        planned: io::Result<()>,
    ) {
        let durable = planned.is_ok() && self.is_durable_alone(&pending);
        (pending.flush_after, pending.is_durable) = (pending.flush_after && !durable, durable);
        let id = self.next_pending();
        self.pending.insert(id, pending);
        let (buf, buf_offset_bytes) = payload.map_or((None, 0), |(buf, offset_bytes)| (Some(buf), offset_bytes));
        let slot = self.engine.begin(tag, Cookie::new(parity, id).0, buf);
        if let Err(error) = planned {
            self.engine.fail(&slot, error);
        }
        let mut parts = std::mem::take(&mut self.parts);
        match self.target(0) {
            Ok(target) => {
                for part in parts.drain(..) {
                    match part {
                        Part::Payload { file_offset_bytes, start, len } => {
                            let start = buf_offset_bytes + start;
                            self.engine.write(&slot, target, file_offset_bytes, start..start + len, durable);
                        }
                        Part::Shared { file_offset_bytes, bytes } => {
                            self.engine.write_shared(&slot, target, file_offset_bytes, &bytes);
                        }
                        Part::Zeroes { range, how } => self.engine.write_zeroes(&slot, target, range, how),
                    }
                }
            }
            Err(error) => {
                parts.clear();
                self.engine.fail(&slot, error);
            }
        }
        self.engine.end(slot);
        self.parts = parts;
    }

    /// Whether a planned write that must be durable is so by its payload alone: one stretch of it, where no metadata waits for a flush.
    /// Of several stretches each would be made durable by itself, and one flush behind them is cheaper.
    fn is_durable_alone(&self, pending: &Pending) -> bool {
        pending.flush_after
            && pending.commits.is_empty()
            && pending.initialised.is_empty()
            && matches!(self.parts[..], [Part::Payload { .. }])
            && self.shared.check_poison().is_ok()
            && self.shared.writer().is_ok_and(|writer| !writer.is_dirty())
    }

    fn flush(&mut self, tag: u64) {
        let parity = self.enter();
        let plain = Cookie::new(parity, 0);
        if self.shared.geometry.read_only {
            return self.end_with(tag, plain, None, Ok(()));
        }
        if let Err(error) = self.shared.check_poison() {
            return self.end_with(tag, plain, None, Err(error));
        }
        match self.shared.writer().map(ImageWriter::is_dirty) {
            Err(error) => self.end_with(tag, plain, None, Err(error)),
            Ok(true) => self.request_flush(tag, plain, None),
            Ok(false) => match self.target(0) {
                Ok(target) => {
                    let id = self.next_pending();
                    self.pending.insert(id, Pending { is_sync: true, is_durable: true, ..Pending::default() });
                    let slot = self.engine.begin(tag, Cookie::new(parity, id).0, None);
                    self.engine.sync(&slot, target);
                    self.engine.end(slot);
                }
                Err(error) => self.end_with(tag, plain, None, Err(error)),
            },
        }
    }

    fn request_flush(&mut self, tag: u64, cookie: Cookie, buf: Option<IoBuf>) {
        let ticket = self.engine.external(tag, cookie.0, buf);
        self.shared.flusher.request(&self.shared, ticket);
    }

    /// What a finished request of the engine means. `None` when it goes on (FUA).
    fn finish(&mut self, ended: EngineCompletion) -> Option<Completion> {
        let EngineCompletion { tag, cookie, buf, mut result, lost } = ended;
        if lost {
            // A write of it may yet reach the file, so what it named must neither be called durable nor be used again.
            self.shared.poison();
        }
        let cookie = Cookie(cookie);
        let mut is_durable = cookie.pending() == Some(DURABLE);
        if let Some(pending) = cookie.pending().and_then(|id| self.pending.remove(&id)) {
            is_durable = pending.is_durable;
            if pending.is_sync && result.is_err() {
                self.shared.poison();
            }
            if !pending.commits.is_empty() || !pending.initialised.is_empty() {
                result = settle(&self.shared, &pending, result);
            }
            if pending.flush_after && result.is_ok() {
                self.request_flush(tag, Cookie::new(cookie.parity(), 0), buf);
                return None;
            }
        }
        // Another's sync may have failed while this one was under way: what that dropped, this one never saw.
        if is_durable && result.is_ok() {
            result = self.shared.check_poison();
        }
        if let (Some(epoch), Some(parity)) = (&self.epoch, cookie.parity()) {
            epoch.leave(parity);
        }
        self.in_flight -= 1;
        Some(Completion { tag, buf, result })
    }
}

impl BlockQueue for DiskQueue {
    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        let refused = if self.in_flight >= self.depth {
            Err(io::ErrorKind::WouldBlock.into())
        } else {
            validate(&request, &self.shared.geometry)
        };
        if let Err(reason) = refused {
            return Err(Box::new(PushError { request, reason }));
        }
        self.in_flight += 1;
        match request.operation {
            Operation::Read => self.read(request),
            Operation::Write if self.shared.detect_zeroes && writes_zeros(&request) => self.zero(request),
            Operation::Write => self.write(request),
            Operation::WriteZeroes | Operation::Discard => self.zero(request),
            Operation::Flush => self.flush(request.tag),
        }
        Ok(())
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let wanted = out.len() + at_least.min(self.in_flight);
        loop {
            let mut ended = std::mem::take(&mut self.ended);
            let reaped = self.engine.reap(wanted.saturating_sub(out.len()), &mut ended);
            for completion in ended.drain(..) {
                out.extend(self.finish(completion));
            }
            self.ended = ended;
            reaped?;
            if out.len() >= wanted {
                return Ok(());
            }
        }
    }
}

impl Drop for DiskQueue {
    /// Waits for what is in flight, so that commits are not lost and blocks do not stay busy.
    fn drop(&mut self) {
        // A request may go on (a write, then a flush for FUA), so there may be several rounds.
        while self.in_flight > 0 {
            let mut ended = Vec::new();
            let finished = self.engine.finish(&mut ended);
            if finished.is_err() {
                self.shared.poison();
            }
            if ended.is_empty() {
                return;
            }
            for completion in ended {
                self.finish(completion);
            }
        }
    }
}

/// Whether a write's payload is nothing but zeros.
fn writes_zeros(request: &Request) -> bool {
    let end = request.buf_offset_bytes + request.len_bytes as usize;
    let payload = request.buf.as_ref().and_then(|buf| buf.get(request.buf_offset_bytes..end)).unwrap_or_default();
    !payload.is_empty() && all_zero(payload)
}
