//! One thread's requests, from the map to the engine.
//!
//! ```text
//!   push ─▶ validate ─▶ one unit, owner known? ── yes ─▶ engine.read_one / write_one
//!                                   │ no                 (no lock, no allocation)
//!                                   ▼
//!          ┌──▶ plan, under the mutation lock ─▶ Ready ─▶ unlock ─▶ engine.begin, parts, end
//!          │         ├─▶ Work ─▶ done here, or by the loader while the request rests ─┐
//!          │         └─▶ Busy ─▶ the request rests until the block is free ───────────┤
//!          └──────────────────────────────────────────────────────────────────────────┘
//!   reap ─▶ engine.reap ─▶ no cookie: return the completion
//!                       └▶ with a cookie: commit the mapping, flush for FUA, continue, or return
//! ```
//!
//! `planned.rs` asks `plan.rs` what to do for a request. A queue with its own ring does the work
//! that a plan needs itself, so only its own requests wait. A queue with a shared ring passes the
//! work to the loader, so that no other queue's requests wait.
//!
//! A *resting* request is an external ticket of the engine. Completing the ticket wakes the queue's
//! thread, and the request is planned again. A resting request is counted in no epoch, so it delays
//! no grace period, and it holds no block. A large discard is planned in stages of some blocks
//! each, and may rest between two stages. So is a write that goes to two images (`plan.rs`). A
//! resting request may wait for a block that another request of the same queue holds until `reap`
//! sees its completion. So while a request rests, `reap` waits for one completion at a time, and a
//! queue that is dropped fails its resting requests.
//!
//! Invariant: a request is counted in `in_flight` from its push until [`DiskQueue::finish`] returns
//! its completion, and in the epoch of its parity while anything that it looked up is in use.

mod pieces;
mod planned;
mod task;

use crate::engine::{
    chain::Chain,
    epoch::{EpochTicket, Parity, QueueEpoch},
    map::{Owner, SourceId},
    plan::{Draft, Pending},
    shared::Shared,
};
use diskwright_image::ImageWriter;
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken, uses_loader};
use diskwright_store::{
    BlockQueue, Completion, Engine, EngineCompletion, Operation, PushError, QueueOptions, Request, SlotId, TargetId,
    queue::validate,
};
use std::{collections::HashMap, fmt, io, sync::Arc};
use task::{Cookie, DURABLE, Payload, RequestState};

/// A queue of a disk. See the module.
pub(crate) struct DiskQueue {
    /// Dropped before `shared`: requests in flight end before the disk can be closed.
    engine: Engine,
    shared: Arc<Shared>,
    chain: Arc<Chain>,
    /// The epoch in which `chain` was fetched.
    chain_epoch: u64,
    targets: Vec<Option<TargetId>>,
    /// `None` for a read-only disk, whose chain never changes.
    epoch: Option<QueueEpoch>,
    /// Whether the ring is shared, so that this thread must not block on I/O.
    hands_over: bool,
    depth: usize,
    in_flight: usize,
    kept: HashMap<u64, RequestState>,
    /// Number of resting requests in `kept`.
    resting: usize,
    last_kept: u64,
    /// The queue is being dropped: no request continues.
    is_closing: bool,
    ended: Vec<EngineCompletion>,
    /// A finished draft, reused for its allocations.
    spare: Draft,
    /// Whether a request was lost: the kernel may still be working on it.
    has_lost: bool,
}

impl fmt::Debug for DiskQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DiskQueue({} of {} in flight)", self.in_flight, self.depth)
    }
}

impl DiskQueue {
    /// A queue on an open disk. The caller has called [`Shared::queue_opens`].
    pub(crate) fn open(shared: Arc<Shared>, options: &QueueOptions<'_>) -> io::Result<Self> {
        let engine = match options.engine() {
            Ok(engine) => engine,
            Err(error) => {
                shared.queue_closed();
                return Err(error);
            }
        };
        let chain = shared.chain();
        let epoch = (!chain.geometry.read_only).then(|| shared.epochs.join());
        let hands_over = options.ring.is_some();
        #[cfg(feature = "shuttle")]
        let hands_over = hands_over || uses_loader();
        Ok(Self {
            hands_over,
            shared,
            chain,
            // Not a valid epoch, so the first request fetches the chain.
            chain_epoch: u64::MAX,
            engine,
            targets: Vec::new(),
            epoch,
            depth: options.depth.max(1),
            in_flight: 0,
            kept: HashMap::new(),
            resting: 0,
            last_kept: 0,
            is_closing: false,
            ended: Vec::new(),
            spare: Draft::default(),
            has_lost: false,
        })
    }

    #[inline]
    fn target(&mut self, source: SourceId) -> io::Result<TargetId> {
        match self.targets.get(usize::from(source)) {
            Some(Some(target)) => Ok(*target),
            _ => self.add_target(source),
        }
    }

    #[cold]
    fn add_target(&mut self, source: SourceId) -> io::Result<TargetId> {
        let gone = || io::Error::other("a file of the disk has left the chain; try again");
        if self.chain.source(source).is_none() && looks_again() {
            // The map is shared with a newer chain, and another queue has written to its new top.
            self.chain = self.shared.chain();
        }
        let target = self.engine.add_target(self.chain.source(source).ok_or_else(gone)?)?;
        if self.targets.len() <= usize::from(source) {
            self.targets.resize(usize::from(source) + 1, None);
        }
        self.targets[usize::from(source)] = Some(target);
        Ok(target)
    }

    /// Counts a request in, and fetches the chain if the epoch has changed.
    #[inline]
    fn enter(&mut self) -> Option<Parity> {
        let EpochTicket { parity, epoch } = self.epoch.as_ref()?.enter();
        #[cfg(feature = "shuttle")]
        if is_broken(Rule::ChainIsFetchedAnew) && self.chain_epoch != u64::MAX {
            return Some(parity);
        }
        if epoch != self.chain_epoch {
            self.chain_epoch = epoch;
            self.fetch_chain();
        }
        Some(parity)
    }

    /// Fetches the current chain, and removes the files that left it from the engine. The engine
    /// closes each file when no request uses it any more. An idle queue keeps them until its next
    /// request.
    #[cold]
    fn fetch_chain(&mut self) {
        self.chain = self.shared.chain();
        for (source, target) in (0..).zip(&mut self.targets) {
            if let Some(left) = target.take_if(|_| self.chain.source(source).is_none()) {
                self.engine.remove_target(left);
            }
        }
    }

    #[inline]
    fn leave(&self, parity: Option<Parity>) {
        if let (Some(epoch), Some(parity)) = (&self.epoch, parity) {
            epoch.leave(parity);
        }
    }

    fn keep(&mut self, kept: RequestState) -> u64 {
        self.last_kept += 1;
        self.kept.insert(self.last_kept, kept);
        self.last_kept
    }

    /// Completes a request without I/O.
    fn end_with(&mut self, tag: u64, cookie: Cookie, payload: Payload, result: io::Result<()>) {
        let slot = self.begin(tag, cookie, payload);
        if let Err(error) = result {
            self.engine.fail(&slot, error);
        }
        self.engine.end(slot);
    }

    #[inline]
    fn begin(&mut self, tag: u64, cookie: Cookie, (buf, segments): Payload) -> SlotId {
        let slot = self.engine.begin(tag, cookie.0, buf);
        self.engine.attach(&slot, segments);
        slot
    }

    fn read(&mut self, mut request: Request, parity: Option<Parity>) {
        if let Some(Owner::Data { source, offset_bytes: file_offset_bytes }) =
            self.chain.map.lookup(request.offset_bytes, request.len_bytes)
        {
            let Some(buf) = request.buf.take() else {
                return self.transfer_pieces(request, parity, source, file_offset_bytes);
            };
            match self.target(source) {
                Ok(target) => {
                    let cookie = Cookie::new(parity, 0);
                    self.engine.read_one(request.tag, cookie.0, target, file_offset_bytes, buf, request.buf_range());
                }
                Err(error) => self.end_with(request.tag, Cookie::new(parity, 0), (Some(buf), None), Err(error)),
            }
            return;
        }
        self.begin_task(request, parity, false);
    }

    fn write(&mut self, mut request: Request, parity: Option<Parity>) {
        let track = self.chain.track.as_ref();
        if track.is_none_or(|view| view.passes(request.offset_bytes, request.len_bytes))
            && let Some(Owner::Data { source, offset_bytes: file_offset_bytes }) =
                self.chain.map.lookup(request.offset_bytes, request.len_bytes)
            && let Some(image) = self.chain.written_with(source)
            && image.has_begun_writing()
        {
            let Some(buf) = request.buf.take() else {
                return self.transfer_pieces(request, parity, source, file_offset_bytes);
            };
            let (tag, fua, range) = (request.tag, request.fua, request.buf_range());
            let ready = if fua { self.shared.check_poison(&self.chain) } else { Ok(()) };
            let dirty = fua && image.image.writer().is_some_and(ImageWriter::is_dirty);
            match ready.and_then(|()| self.target(source)) {
                Ok(target) => {
                    let mut kept = if fua { DURABLE } else { 0 };
                    if dirty {
                        kept =
                            self.keep(RequestState::Parts(Pending { flush_after: true, ..Pending::default() }, None));
                    }
                    let cookie = Cookie::new(parity, kept);
                    self.engine.write_one(tag, cookie.0, target, file_offset_bytes, buf, range, fua && !dirty);
                }
                Err(error) => self.end_with(tag, Cookie::new(parity, 0), (Some(buf), None), Err(error)),
            }
            return;
        }
        self.begin_task(request, parity, false);
    }

    fn flush(&mut self, tag: u64, parity: Option<Parity>) {
        let plain = Cookie::new(parity, 0);
        if self.chain.geometry.read_only {
            return self.end_with(tag, plain, (None, None), Ok(()));
        }
        // The flush must also cover what another queue has written and completed on a new top,
        // although this request was counted in the previous epoch.
        self.chain = self.shared.chain();
        if let Err(error) = self.shared.check_poison(&self.chain) {
            return self.end_with(tag, plain, (None, None), Err(error));
        }
        // Several files, or dirty metadata: the flush needs several ordered steps.
        let dirty = !self.chain.writes_one_file || self.chain.top().image.writer().is_some_and(ImageWriter::is_dirty);
        if dirty {
            return self.request_flush(tag, plain, (None, None));
        }
        match self.target(self.chain.top().source(0)) {
            Ok(target) => {
                let pending = Pending { is_sync: true, is_durable: true, ..Pending::default() };
                let kept = self.keep(RequestState::Parts(pending, None));
                let slot = self.engine.begin(tag, Cookie::new(parity, kept).0, None);
                self.engine.sync(&slot, target);
                self.engine.end(slot);
            }
            Err(error) => self.end_with(tag, plain, (None, None), Err(error)),
        }
    }

    fn request_flush(&mut self, tag: u64, cookie: Cookie, (buf, segments): Payload) {
        let ticket = self.engine.external_with(tag, cookie.0, buf, segments);
        self.shared.request_flush(ticket);
    }

    /// Handles a completion of the engine. `None` if the request continues.
    fn finish(&mut self, ended: EngineCompletion) -> Option<Completion> {
        let EngineCompletion { tag, cookie, mut buf, mut segments, mut result, lost } = ended;
        if lost {
            // The kernel may still write to this request's range, at an unknown time. So the range
            // is never reused, and nothing is reported as durable any more.
            self.shared.poison.set();
            self.has_lost = true;
        }
        let cookie = Cookie(cookie);
        let mut is_durable = cookie.kept() == Some(DURABLE);
        match cookie.kept().and_then(|id| self.kept.remove(&id)) {
            None => {}
            Some(RequestState::Resting(mut task)) => {
                self.resting -= 1;
                if result.is_ok() && !self.is_closing {
                    let parity = self.enter();
                    self.advance(*task, parity);
                    return None;
                }
                (buf, segments) = (task.request.buf.take(), task.request.segments.take());
            }
            Some(RequestState::Parts(pending, continues)) => {
                is_durable = pending.is_durable;
                if pending.is_sync && result.is_err() {
                    self.shared.poison.set();
                }
                if !pending.commits.is_empty() || !pending.initialised.is_empty() {
                    result = self.shared.settle(&pending, result);
                }
                if let Some(mut task) = continues.filter(|_| result.is_ok() && !self.is_closing) {
                    (task.request.buf, task.request.segments) = (buf, segments);
                    self.leave(cookie.parity());
                    let parity = self.enter();
                    self.advance(*task, parity);
                    return None;
                }
                if pending.flush_after && result.is_ok() {
                    self.request_flush(tag, Cookie::new(cookie.parity(), 0), (buf, segments));
                    return None;
                }
            }
        }
        // Another sync may have failed during this one. The kernel may have dropped pages that this
        // sync did not see.
        if is_durable && result.is_ok() {
            result = self.shared.check_poison(&self.chain);
        }
        if !lost {
            self.leave(cookie.parity());
        }
        self.in_flight -= 1;
        Some(Completion { tag, buf, segments, result })
    }
}

impl BlockQueue for DiskQueue {
    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn memory_alignment_bytes(&self) -> usize {
        let stores = self.chain.top().image.stores().iter();
        stores.filter_map(|store| store.data_file()).map(|file| file.alignment_bytes as usize).max().unwrap_or(1).max(1)
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        if self.in_flight >= self.depth {
            return Err(Box::new(PushError { request, reason: io::ErrorKind::WouldBlock.into() }));
        }
        let parity = self.enter();
        if let Err(reason) = validate(&request, &self.chain.geometry) {
            self.leave(parity);
            return Err(Box::new(PushError { request, reason }));
        }
        self.in_flight += 1;
        let is_zeros = self.shared.detect_zeroes && request.writes_zeros();
        match request.operation {
            Operation::Flush => self.flush(request.tag, parity),
            _ if request.len_bytes == 0 => {
                self.end_with(request.tag, Cookie::new(parity, 0), (request.buf, request.segments), Ok(()));
            }
            Operation::Read => self.read(request, parity),
            Operation::Write if !is_zeros => self.write(request, parity),
            Operation::Write | Operation::WriteZeroes | Operation::Discard => {
                self.begin_task(request, parity, is_zeros);
            }
        }
        Ok(())
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let wanted = out.len() + at_least.min(self.in_flight);
        loop {
            let mut ended = std::mem::take(&mut self.ended);
            let missing = wanted.saturating_sub(out.len());
            let reaped = self.engine.reap(if self.resting > 0 { missing.min(1) } else { missing }, &mut ended);
            for completion in ended.drain(..) {
                out.extend(self.finish(completion));
            }
            self.ended = ended;
            reaped?;
            // A continued request may have ended at once, or may have parts that a lane must send.
            // Nothing on the ring reports that, so the engine must be asked now.
            if out.len() >= wanted && !self.engine.wants_reap() {
                return Ok(());
            }
        }
    }
}

impl Drop for DiskQueue {
    /// Waits for requests in flight, so that commits are not lost and blocks do not stay claimed.
    /// Resting requests are failed, not waited for: their block may be held by a request of this
    /// queue, or of another queue of this thread.
    fn drop(&mut self) {
        self.is_closing = true;
        if self.resting > 0 {
            let engine = &self.engine;
            self.shared.lock().claims.fail_waiting(|ticket| engine.owns(ticket));
        }
        // A request may continue (a write, then a flush for FUA), so there may be several rounds.
        while self.in_flight > 0 {
            let mut ended = Vec::new();
            if self.engine.finish(&mut ended).is_err() {
                self.shared.poison.set();
                self.has_lost = true;
            }
            if ended.is_empty() {
                break;
            }
            for completion in ended {
                self.finish(completion);
            }
        }
        if self.has_lost
            && let Some(epoch) = self.epoch.take()
        {
            epoch.abandon();
        }
        self.shared.queue_closed();
    }
}

/// Whether a queue looks up an unknown file in the current chain. Always true, unless a test breaks
/// that rule.
fn looks_again() -> bool {
    #[cfg(feature = "shuttle")]
    return !is_broken(Rule::MapMayBeAhead);
    #[cfg(not(feature = "shuttle"))]
    true
}
