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
//! [`plan`] decides what to do for a request. A queue with its own ring does the work
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

use crate::{
    engine::track::tracker::View,
    engine::{
        carry_out,
        chain::Chain,
        epoch::{EpochTicket, Parity, QueueEpoch},
        guard::guarded,
        map::{Owner, SourceId},
        plan::{self, Draft, Part, Pending, PlanResult},
        shared::Shared,
        work::Work,
    },
};
use diskwright_image::ImageWriter;
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken, uses_loader};
use diskwright_store::{
    BlockQueue, Completion, Engine, EngineCompletion, ExternalTicket, IoBuf, Operation, PushError, QueueOptions,
    Request, Segments, SlotId, TargetId, queue::validate,
};
use std::{collections::HashMap, fmt, io, sync::Arc};

/// Marks a write that was sent with RWF_DSYNC: it needs no flush and has no `RequestState` entry.
const DURABLE: u64 = u64::MAX >> 2;

/// The engine's cookie of a request: the parity under which it was counted, and the key of its
/// [`RequestState`].
#[derive(Debug, Clone, Copy)]
struct Cookie(u64);

impl Cookie {
    fn new(parity: Option<Parity>, kept: u64) -> Self {
        let counted = match parity {
            None => 0,
            Some(Parity(false)) => 1,
            Some(Parity(true)) => 3,
        };
        Self(kept << 2 | counted)
    }

    fn parity(self) -> Option<Parity> {
        (self.0 & 1 == 1).then_some(Parity(self.0 & 2 != 0))
    }

    fn kept(self) -> Option<u64> {
        (self.0 >> 2 != 0).then_some(self.0 >> 2)
    }
}

/// A request's memory: one buffer, or several pieces.
type Payload = (Option<IoBuf>, Option<Box<Segments>>);

/// A request in progress, with its plan.
#[derive(Debug)]
struct Task {
    request: Request,
    draft: Draft,
    /// Writes and zeroing: the offset at which the next stage begins.
    at: u64,
    /// Whether an earlier stage was carried out.
    is_continued: bool,
    /// The payload is all zeros, so the write becomes zeroing. Checked once, because a guest may
    /// change its memory later.
    is_zeros: bool,
    /// Where the whole range is marked as changed, durably.
    marked: Option<Arc<View>>,
}

impl Task {
    /// Whether the request may be planned some blocks at a time: zeroing always, a write if it goes
    /// to two images.
    fn goes_in_stages(&self) -> bool {
        match self.request.operation {
            Operation::WriteZeroes | Operation::Discard | Operation::Write => true,
            Operation::Read | Operation::Flush => false,
        }
    }

    /// Where the range must be marked before the request may change anything.
    fn unmarked(&self, chain: &Chain) -> Option<Arc<View>> {
        let view = chain.track.as_ref()?;
        let changes = !matches!(self.request.operation, Operation::Read | Operation::Flush);
        let is_marked = self.marked.as_ref().is_some_and(|marked| Arc::ptr_eq(marked, view));
        (changes && !is_marked).then(|| Arc::clone(view))
    }
}

/// State of a request while the engine has it.
#[derive(Debug)]
enum RequestState {
    /// Parts are in flight. The request continues with the task afterwards, if there is one.
    Parts(Pending, Option<Box<Task>>),
    /// The request rests.
    Resting(Box<Task>),
}

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

    fn begin_task(&mut self, request: Request, parity: Option<Parity>, is_zeros: bool) {
        let at = request.offset_bytes;
        let draft = std::mem::take(&mut self.spare);
        self.advance(Task { request, draft, at, is_continued: false, is_zeros, marked: None }, parity);
    }

    /// Plans a task, again after each piece of work, until it can be issued, rests or fails.
    fn advance(&mut self, mut task: Task, parity: Option<Parity>) {
        loop {
            let shared = Arc::clone(&self.shared);
            let mut mutation = shared.lock();
            if !Arc::ptr_eq(&self.chain, &mutation.chain) {
                self.chain = Arc::clone(&mutation.chain);
            }
            // The chain that the plan is for decides: it may have a newer point.
            if let Some(view) = task.unmarked(&self.chain) {
                drop(mutation);
                if !view.passes(task.request.offset_bytes, task.request.len_bytes) {
                    let (offset_bytes, len_bytes) = (task.request.offset_bytes, task.request.len_bytes);
                    let ticket = self.rest(task);
                    view.request(offset_bytes, len_bytes, ticket);
                    return self.leave(parity);
                }
                task.marked = Some(view);
                continue;
            }
            let end = task.request.offset_bytes + task.request.len_bytes;
            let planned = guarded(&shared.poison, || match task.request.operation {
                // The disk may have shrunk since the request was validated.
                _ if end > self.chain.geometry.size_bytes => Err(validate(&task.request, &self.chain.geometry)
                    .err()
                    .unwrap_or_else(|| io::ErrorKind::InvalidInput.into())),
                Operation::Read => Ok(plan::plan_read(&mutation, task.request.offset_bytes, end, &mut task.draft)),
                Operation::WriteZeroes | Operation::Discard => {
                    let discard = task.request.operation == Operation::Discard;
                    plan::plan_zero(&mut mutation, &mut task.at, end, discard, &mut task.draft)
                }
                Operation::Write if task.is_zeros => {
                    plan::plan_zero(&mut mutation, &mut task.at, end, false, &mut task.draft)
                }
                Operation::Write | Operation::Flush => {
                    let start = task.request.offset_bytes;
                    plan::plan_write(&mut mutation, start, &mut task.at, end, &mut task.draft)
                }
            });
            if !self.chain.geometry.read_only {
                shared.try_recycle(&mut mutation);
            }
            let has_stage = task.at > task.request.offset_bytes
                && !(task.draft.parts.is_empty() && task.draft.pending.commits.is_empty());
            match planned {
                Err(error) => {
                    drop(mutation);
                    return self.issue(task, parity, Err(error), false);
                }
                Ok(PlanResult::Ready) => {
                    drop(mutation);
                    let done = task.at >= end || !task.goes_in_stages();
                    if done || has_stage {
                        return self.issue(task, parity, Ok(()), !done);
                    }
                }
                Ok(next @ (PlanResult::Work(_) | PlanResult::Busy(_))) if has_stage && task.goes_in_stages() => {
                    // The next stage plans this again. A block must not stay excluded for work that
                    // is not done now.
                    #[cfg(feature = "shuttle")]
                    let next = if is_broken(Rule::ExclusionEnds) { PlanResult::Ready } else { next };
                    if let PlanResult::Work(Work::CopyUp { layer, block }) = next {
                        mutation.claims.end_exclusion((layer, block));
                    }
                    drop(mutation);
                    return self.issue(task, parity, Ok(()), true);
                }
                Ok(PlanResult::Busy(key)) => {
                    self.leave(parity);
                    let ticket = self.rest(task);
                    return mutation.claims.wait(key, ticket);
                }
                Ok(PlanResult::Work(work)) => {
                    drop(mutation);
                    if self.hands_over {
                        let chain = Arc::clone(&self.chain);
                        let ticket = self.rest(task);
                        shared.request_work(carry_out::load(chain, work, ticket));
                        // Only now: a change of the chain waits for counted requests first, and
                        // then for the loader.
                        return self.leave(parity);
                    }
                    // The request stays counted during the work, which may write to the image:
                    // after a change of the chain that image must not be written. The work waits
                    // for no grace period.
                    if let Err(error) = guarded(&shared.poison, || shared.carry_out(&self.chain, &work)) {
                        return self.issue(task, parity, Err(error), false);
                    }
                }
            }
        }
    }

    /// Lets a task rest until its ticket is completed.
    fn rest(&mut self, task: Task) -> ExternalTicket {
        let tag = task.request.tag;
        self.resting += 1;
        let kept = self.keep(RequestState::Resting(Box::new(task)));
        self.engine.external(tag, Cookie::new(None, kept).0, None)
    }

    /// Starts the parts of a planned task. Their commits follow when they are done. If planning
    /// failed half-way, the planned parts are still carried out, because they hold blocks, and the
    /// request fails.
    fn issue(&mut self, mut task: Task, parity: Option<Parity>, planned: io::Result<()>, continues: bool) {
        let Request { tag, fua, buf_offset_bytes, .. } = task.request;
        let is_read = task.request.operation == Operation::Read;
        let payload = (task.request.buf.take(), task.request.segments.take());
        let in_one = payload.1.as_ref().is_none_or(|segments| segments.count() <= 1);
        let mut pending = std::mem::take(&mut task.draft.pending);
        pending.flush_after = fua && !continues && !is_read;
        let alone = planned.is_ok() && in_one && !task.is_continued;
        let durable = alone && self.is_durable_alone(&pending, &task.draft.parts);
        task.is_continued = true;
        (pending.flush_after, pending.is_durable) = (pending.flush_after && !durable, durable);
        let mut draft = std::mem::take(&mut task.draft);
        let offset_bytes = task.request.offset_bytes;
        let kept = if is_read { 0 } else { self.keep(RequestState::Parts(pending, continues.then(|| Box::new(task)))) };
        let slot = self.begin(tag, Cookie::new(parity, kept), payload);
        if let Err(error) = planned {
            self.engine.fail(&slot, error);
        } else {
            for &run in &draft.runs {
                let start = buf_offset_bytes + (run.start_bytes - offset_bytes) as usize;
                let range = start..start + run.len_bytes as usize;
                match run.owner {
                    Owner::Data { source, offset_bytes } => match self.target(source) {
                        Ok(target) => self.engine.read(&slot, target, offset_bytes, range),
                        Err(error) => self.engine.fail(&slot, error),
                    },
                    Owner::Damaged { layer } => self.engine.fail(&slot, self.chain.damage(layer, run.start_bytes)),
                    Owner::Compressed { layer } => {
                        let bytes = decompressed(&self.chain, &draft, layer, run.start_bytes, run.len_bytes);
                        match bytes {
                            Some(bytes) => self.engine.fill(&slot, start, bytes),
                            None => self.engine.fail(&slot, io::ErrorKind::UnexpectedEof.into()),
                        }
                    }
                    Owner::Zero { .. } | Owner::Absent | Owner::Lazy { .. } => self.engine.fill_zeros(&slot, range),
                }
            }
        }
        for part in draft.parts.drain(..) {
            let source = match &part {
                Part::Payload { source, .. } | Part::Shared { source, .. } | Part::Zeroes { source, .. } => *source,
            };
            match (self.target(source), part) {
                (Ok(target), Part::Payload { file_offset_bytes, start, len, .. }) => {
                    let start = buf_offset_bytes + start;
                    self.engine.write(&slot, target, file_offset_bytes, start..start + len, durable);
                }
                (Ok(target), Part::Shared { file_offset_bytes, bytes, .. }) => {
                    self.engine.write_shared(&slot, target, file_offset_bytes, &bytes);
                }
                (Ok(target), Part::Zeroes { range, how, .. }) => self.engine.write_zeroes(&slot, target, range, how),
                (Err(error), _) => self.engine.fail(&slot, error),
            }
        }
        self.engine.end(slot);
        draft.runs.clear();
        draft.decoded.clear();
        self.spare = draft;
    }

    /// Whether a write with FUA can be made durable by RWF_DSYNC alone: its payload is one
    /// contiguous part, and no metadata waits for a flush. For several parts one flush is cheaper
    /// than one RWF_DSYNC each.
    fn is_durable_alone(&self, pending: &Pending, parts: &[Part]) -> bool {
        pending.flush_after
            && pending.commits.is_empty()
            && pending.initialised.is_empty()
            && matches!(parts, [Part::Payload { .. }])
            && self.shared.check_poison(&self.chain).is_ok()
            && pending.member.as_ref().and_then(|image| image.image.writer()).is_some_and(|writer| !writer.is_dirty())
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

/// A range of a decompressed block; `None` if it is not in the draft.
fn decompressed<'a>(
    chain: &Chain,
    draft: &'a Draft,
    layer: crate::engine::map::LayerId,
    start_bytes: u64,
    len_bytes: u64,
) -> Option<&'a [u8]> {
    let block_bytes = chain.member(layer)?.block_bytes;
    let (block, within) = (start_bytes / block_bytes, (start_bytes % block_bytes) as usize);
    let (.., cell) = draft.decoded.iter().find(|(of, number, _)| (*of, *number) == (layer, block))?;
    cell.get()?.get(within..within + len_bytes as usize)
}
