//! One thread's way through the map to the engine.
//!
//! ```text
//!   push ─▶ validate ─▶ one unit, owner known? ── yes ─▶ engine.read_one / write_one          (no lock, no allocation)
//!                                   │ no
//!                                   ▼
//!          ┌──▶ plan, under the mutation lock ─▶ Ready ─▶ unlock ─▶ engine.begin, parts, end
//!          │         ├─▶ Work ─▶ done here, or by the loader while the request rests ─┐
//!          │         └─▶ Busy ─▶ the request rests until the block is free ───────────┤
//!          └──────────────────────────────────────────────────────────────────────────┘
//!   reap ─▶ engine.reap ─▶ plain: hand out
//!                       └▶ with a cookie: commit what the payload made true, flush for FUA, go on, or hand out
//! ```
//!
//! What a request means [`plan`](crate::plan) says. A queue with a ring of its own does the work
//! that a plan lacks by itself: only its own requests wait. A queue that shares its ring hands it
//! to the loader, so that nobody else's requests wait.
//!
//! A request that *rests* is a ticket of the engine: whoever completes it wakes the queue's thread,
//! and the request is planned again. It is not counted in any epoch meanwhile, so it holds up
//! nobody who waits for one, and it holds no block. A large discard goes in stages of some blocks
//! each, and rests, when it must, between two of them. A request that rests may wait for another of
//! the same queue, whose block is free when `reap` has seen its end: so while a request rests,
//! `reap` waits for one end at a time, and a queue that is dropped fails what rests.
//!
//! Invariant: a request is counted in `in_flight` from its push until [`DiskQueue::finish`] gives
//! it out, and in the epoch of its parity while anything that it looked up is in use.

mod pieces;

use crate::{
    carry_out,
    chain::Chain,
    epoch::{Entered, Parity, QueueEpoch},
    guard::guarded,
    map::{Owner, SourceId},
    plan::{self, Draft, Next, Part, Pending},
    shared::Shared,
    work::Work,
};
use diskwright_image::ImageWriter;
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken, uses_loader};
use diskwright_store::{
    BlockQueue, Completion, Engine, EngineCompletion, ExternalTicket, IoBuf, Operation, PushError, QueueOptions,
    Request, Segments, SlotId, TargetId, queue::validate,
};
use std::{collections::HashMap, fmt, io, sync::Arc};

/// Marks a write that was sent with RWF_DSYNC: it needs no flush and has no `Kept` entry.
const DURABLE: u64 = u64::MAX >> 2;

/// How a request was counted, and where its [`Kept`] is: the engine carries this as its cookie.
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

/// A request on its way, with what has been planned of it.
#[derive(Debug)]
struct Errand {
    request: Request,
    draft: Draft,
    /// Of zeros and discards: where the next stage begins.
    at: u64,
    /// A write that becomes zeros without payload. Looked at once, for memory that others may
    /// change (a guest's) may show something else later.
    is_zeros: bool,
}

impl Errand {
    /// Whether it is zeroing, which is planned some blocks at a time.
    fn goes_in_stages(&self) -> bool {
        match self.request.operation {
            Operation::WriteZeroes | Operation::Discard => true,
            Operation::Write => self.is_zeros,
            Operation::Read | Operation::Flush => false,
        }
    }
}

/// What is kept of a request while the engine has it.
#[derive(Debug)]
enum Kept {
    /// Parts are in flight. The errand goes on after them, if there is one.
    Parts(Pending, Option<Box<Errand>>),
    /// It rests.
    Resting(Box<Errand>),
}

/// See the module.
pub(crate) struct DiskQueue {
    /// Before `shared`: what is in flight ends before the disk can be closed.
    engine: Engine,
    shared: Arc<Shared>,
    chain: Arc<Chain>,
    /// The epoch in which `chain` was fetched.
    chain_epoch: u64,
    targets: Vec<Option<TargetId>>,
    /// `None` for a read-only disk, whose chain never changes.
    epoch: Option<QueueEpoch>,
    /// Whether others use the ring, so that this thread must not wait for the disk.
    hands_over: bool,
    depth: usize,
    in_flight: usize,
    kept: HashMap<u64, Kept>,
    /// How many of them rest.
    resting: usize,
    last_kept: u64,
    /// The queue is being dropped: nothing goes on.
    is_closing: bool,
    ended: Vec<EngineCompletion>,
    /// An errand's draft, kept for its vectors.
    spare: Draft,
    /// Whether a request ended without it being known that the kernel has done with it.
    has_lost: bool,
}

impl fmt::Debug for DiskQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DiskQueue({} of {} in flight)", self.in_flight, self.depth)
    }
}

impl DiskQueue {
    /// A queue on an open disk; [`Shared::queue_opens`] has been called for it.
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
            // Before any epoch that there can be: the first request fetches the chain.
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
            // The map is shared with a chain that was published after this one, and another queue
            // has written to its new top.
            self.chain = self.shared.chain();
        }
        let target = self.engine.add_target(self.chain.source(source).ok_or_else(gone)?)?;
        if self.targets.len() <= usize::from(source) {
            self.targets.resize(usize::from(source) + 1, None);
        }
        self.targets[usize::from(source)] = Some(target);
        Ok(target)
    }

    /// Counts a request in, and sees to it that the chain is one that holds in its epoch.
    #[inline]
    fn enter(&mut self) -> Option<Parity> {
        let Entered { parity, epoch } = self.epoch.as_ref()?.enter();
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

    /// Takes the chain as it is now, and gives up the files that have left it: each is closed when
    /// no request uses it any more. A queue that has nothing to do keeps them until its next
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

    fn keep(&mut self, kept: Kept) -> u64 {
        self.last_kept += 1;
        self.kept.insert(self.last_kept, kept);
        self.last_kept
    }

    /// Ends a request at once.
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
        self.begin_errand(request, parity, false);
    }

    fn write(&mut self, mut request: Request, parity: Option<Parity>) {
        if let Some(Owner::Data { source, offset_bytes: file_offset_bytes }) =
            self.chain.map.lookup(request.offset_bytes, request.len_bytes)
            && self.chain.top().has_source(source)
            && self.chain.top().has_begun_writing()
        {
            let Some(buf) = request.buf.take() else {
                return self.transfer_pieces(request, parity, source, file_offset_bytes);
            };
            let (tag, fua, range) = (request.tag, request.fua, request.buf_range());
            let ready = if fua { self.shared.check_poison(self.chain.top()) } else { Ok(()) };
            let dirty = fua && self.chain.top().image.writer().is_some_and(ImageWriter::is_dirty);
            match ready.and_then(|()| self.target(source)) {
                Ok(target) => {
                    let mut kept = if fua { DURABLE } else { 0 };
                    if dirty {
                        kept = self.keep(Kept::Parts(Pending { flush_after: true, ..Pending::default() }, None));
                    }
                    let cookie = Cookie::new(parity, kept);
                    self.engine.write_one(tag, cookie.0, target, file_offset_bytes, buf, range, fua && !dirty);
                }
                Err(error) => self.end_with(tag, Cookie::new(parity, 0), (Some(buf), None), Err(error)),
            }
            return;
        }
        self.begin_errand(request, parity, false);
    }

    fn begin_errand(&mut self, request: Request, parity: Option<Parity>, is_zeros: bool) {
        let at = request.offset_bytes;
        let draft = std::mem::take(&mut self.spare);
        self.advance(Errand { request, draft, at, is_zeros }, parity);
    }

    /// Plans an errand as often as it takes, and carries out, parks or ends it.
    fn advance(&mut self, mut errand: Errand, parity: Option<Parity>) {
        loop {
            let shared = Arc::clone(&self.shared);
            let mut mutation = shared.lock();
            if !Arc::ptr_eq(&self.chain, &mutation.chain) {
                self.chain = Arc::clone(&mutation.chain);
            }
            let end = errand.request.offset_bytes + errand.request.len_bytes;
            let planned = guarded(&shared.poison, || match errand.request.operation {
                // A disk that shrank may have left the request without its range.
                _ if end > self.chain.geometry.size_bytes => Err(validate(&errand.request, &self.chain.geometry)
                    .err()
                    .unwrap_or_else(|| io::ErrorKind::InvalidInput.into())),
                Operation::Read => Ok(plan::plan_read(&mutation, errand.request.offset_bytes, end, &mut errand.draft)),
                Operation::WriteZeroes | Operation::Discard => {
                    let discard = errand.request.operation == Operation::Discard;
                    plan::plan_zero(&mut mutation, &mut errand.at, end, discard, &mut errand.draft)
                }
                Operation::Write if errand.is_zeros => {
                    plan::plan_zero(&mut mutation, &mut errand.at, end, false, &mut errand.draft)
                }
                Operation::Write | Operation::Flush => {
                    let start = errand.request.offset_bytes;
                    plan::plan_write(&mut mutation, start, end, &mut errand.draft)
                }
            });
            if !self.chain.geometry.read_only {
                shared.try_recycle(&mut mutation);
            }
            let has_stage = errand.at > errand.request.offset_bytes
                && !(errand.draft.parts.is_empty() && errand.draft.pending.commits.is_empty());
            match planned {
                Err(error) => {
                    drop(mutation);
                    return self.issue(errand, parity, Err(error), false);
                }
                Ok(Next::Ready) => {
                    drop(mutation);
                    let done = errand.at >= end || !errand.goes_in_stages();
                    if done || has_stage {
                        return self.issue(errand, parity, Ok(()), !done);
                    }
                }
                Ok(next @ (Next::Work(_) | Next::Busy(_))) if has_stage && errand.goes_in_stages() => {
                    // The next stage asks for it again; a block must not stay excluded for work
                    // that is not done now.
                    #[cfg(feature = "shuttle")]
                    let next = if is_broken(Rule::ExclusionEnds) { Next::Ready } else { next };
                    if let Next::Work(Work::CopyUp { block }) = next {
                        mutation.claims.end_exclusion((self.chain.top().id, block));
                    }
                    drop(mutation);
                    return self.issue(errand, parity, Ok(()), true);
                }
                Ok(Next::Busy(key)) => {
                    self.leave(parity);
                    let ticket = self.rest(errand);
                    return mutation.claims.wait(key, ticket);
                }
                Ok(Next::Work(work)) => {
                    drop(mutation);
                    if self.hands_over {
                        let chain = Arc::clone(&self.chain);
                        let ticket = self.rest(errand);
                        shared.request_work(carry_out::load(chain, work, ticket));
                        // Only now: whoever changes the chain waits for what is counted, and then
                        // for the loader.
                        return self.leave(parity);
                    }
                    // Counted meanwhile, for it may write to an image that is not to be written any
                    // more when the chain has changed. It waits for no grace period.
                    if let Err(error) = guarded(&shared.poison, || shared.carry_out(&self.chain, &work)) {
                        return self.issue(errand, parity, Err(error), false);
                    }
                }
            }
        }
    }

    /// Lays an errand by, until its ticket is completed.
    fn rest(&mut self, errand: Errand) -> ExternalTicket {
        let tag = errand.request.tag;
        self.resting += 1;
        let kept = self.keep(Kept::Resting(Box::new(errand)));
        self.engine.external(tag, Cookie::new(None, kept).0, None)
    }

    /// Starts the parts of a planned errand. Their commits follow when they are done. Where
    /// planning failed half-way, what was planned is done all the same (it holds blocks), and the
    /// request fails.
    fn issue(&mut self, mut errand: Errand, parity: Option<Parity>, planned: io::Result<()>, goes_on: bool) {
        let Request { tag, fua, buf_offset_bytes, .. } = errand.request;
        let is_read = errand.request.operation == Operation::Read;
        let payload = (errand.request.buf.take(), errand.request.segments.take());
        let in_one = payload.1.as_ref().is_none_or(|segments| segments.count() <= 1);
        let mut pending = std::mem::take(&mut errand.draft.pending);
        pending.flush_after = fua && !goes_on && !is_read;
        let durable = planned.is_ok() && in_one && self.is_durable_alone(&pending, &errand.draft.parts);
        (pending.flush_after, pending.is_durable) = (pending.flush_after && !durable, durable);
        let mut draft = std::mem::take(&mut errand.draft);
        let offset_bytes = errand.request.offset_bytes;
        let kept = if is_read { 0 } else { self.keep(Kept::Parts(pending, goes_on.then(|| Box::new(errand)))) };
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
                    Owner::Packed { layer } => {
                        let bytes = unpacked(&self.chain, &draft, layer, run.start_bytes, run.len_bytes);
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

    /// Whether a planned write that must be durable is so by its payload alone: one stretch of it,
    /// where no metadata waits for a flush. Of several stretches each would be made durable by
    /// itself, and one flush behind them is cheaper.
    fn is_durable_alone(&self, pending: &Pending, parts: &[Part]) -> bool {
        pending.flush_after
            && pending.commits.is_empty()
            && pending.initialised.is_empty()
            && matches!(parts, [Part::Payload { .. }])
            && self.shared.check_poison(self.chain.top()).is_ok()
            && self.chain.top().image.writer().is_some_and(|writer| !writer.is_dirty())
    }

    fn flush(&mut self, tag: u64, parity: Option<Parity>) {
        let plain = Cookie::new(parity, 0);
        if self.chain.geometry.read_only {
            return self.end_with(tag, plain, (None, None), Ok(()));
        }
        // What another queue has written to a new top, and was told of, is to be durable too,
        // though this request was counted in the epoch before.
        self.chain = self.shared.chain();
        if let Err(error) = self.shared.check_poison(self.chain.top()) {
            return self.end_with(tag, plain, (None, None), Err(error));
        }
        // Several files, or metadata: that takes steps that wait for each other.
        let dirty = !self.chain.writes_one_file || self.chain.top().image.writer().is_some_and(ImageWriter::is_dirty);
        if dirty {
            return self.request_flush(tag, plain, (None, None));
        }
        match self.target(self.chain.top().source(0)) {
            Ok(target) => {
                let pending = Pending { is_sync: true, is_durable: true, ..Pending::default() };
                let kept = self.keep(Kept::Parts(pending, None));
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

    /// What a finished request of the engine means. `None` when it goes on.
    fn finish(&mut self, ended: EngineCompletion) -> Option<Completion> {
        let EngineCompletion { tag, cookie, mut buf, mut segments, mut result, lost } = ended;
        if lost {
            // The kernel may still write where this request was sent, and nothing can tell when it
            // has ended: what it reaches is never used again, and nothing is called durable any
            // more.
            self.shared.poison.set();
            self.has_lost = true;
        }
        let cookie = Cookie(cookie);
        let mut is_durable = cookie.kept() == Some(DURABLE);
        match cookie.kept().and_then(|id| self.kept.remove(&id)) {
            None => {}
            Some(Kept::Resting(mut errand)) => {
                self.resting -= 1;
                if result.is_ok() && !self.is_closing {
                    let parity = self.enter();
                    self.advance(*errand, parity);
                    return None;
                }
                (buf, segments) = (errand.request.buf.take(), errand.request.segments.take());
            }
            Some(Kept::Parts(pending, goes_on)) => {
                is_durable = pending.is_durable;
                if pending.is_sync && result.is_err() {
                    self.shared.poison.set();
                }
                if !pending.commits.is_empty() || !pending.initialised.is_empty() {
                    result = self.shared.settle(&pending, result);
                }
                if let Some(mut errand) = goes_on.filter(|_| result.is_ok() && !self.is_closing) {
                    (errand.request.buf, errand.request.segments) = (buf, segments);
                    self.leave(cookie.parity());
                    let parity = self.enter();
                    self.advance(*errand, parity);
                    return None;
                }
                if pending.flush_after && result.is_ok() {
                    self.request_flush(tag, Cookie::new(cookie.parity(), 0), (buf, segments));
                    return None;
                }
            }
        }
        // Another's sync may have failed while this one was under way: what that dropped, this one
        // never saw.
        if is_durable && result.is_ok() {
            result = self.shared.check_poison(self.chain.top());
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
        let is_zeros = self.shared.detect_zeroes && pieces::writes_zeros(&request);
        match request.operation {
            Operation::Flush => self.flush(request.tag, parity),
            _ if request.len_bytes == 0 => {
                self.end_with(request.tag, Cookie::new(parity, 0), (request.buf, request.segments), Ok(()));
            }
            Operation::Read => self.read(request, parity),
            Operation::Write if !is_zeros => self.write(request, parity),
            Operation::Write | Operation::WriteZeroes | Operation::Discard => {
                self.begin_errand(request, parity, is_zeros);
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
            // A request that goes on may have ended at once, or may have parts that a lane is to
            // send. Nothing on the ring tells of it, so it must not be left for later.
            if out.len() >= wanted && !self.engine.wants_reap() {
                return Ok(());
            }
        }
    }
}

impl Drop for DiskQueue {
    /// Waits for what is in flight, so that commits are not lost and blocks do not stay taken. What
    /// rests is not waited for: the block may be held by a request of this queue, or of another
    /// queue of this thread.
    fn drop(&mut self) {
        self.is_closing = true;
        if self.resting > 0 {
            let engine = &self.engine;
            self.shared.lock().claims.give_up(|ticket| engine.owns(ticket));
        }
        // A request may go on (a write, then a flush for FUA), so there may be several rounds.
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

/// Whether a queue looks into the present chain for a file that its own chain does not know. True,
/// unless that rule is broken.
fn looks_again() -> bool {
    #[cfg(feature = "shuttle")]
    return !is_broken(Rule::MapMayBeAhead);
    #[cfg(not(feature = "shuttle"))]
    true
}

/// The bytes of a stretch of a packed block.
fn unpacked<'a>(
    chain: &Chain,
    draft: &'a Draft,
    layer: crate::map::LayerId,
    start_bytes: u64,
    len_bytes: u64,
) -> Option<&'a [u8]> {
    let block_bytes = chain.member(layer)?.block_bytes;
    let (block, within) = (start_bytes / block_bytes, (start_bytes % block_bytes) as usize);
    let (.., cell) = draft.decoded.iter().find(|(of, number, _)| (*of, *number) == (layer, block))?;
    cell.get()?.get(within..within + len_bytes as usize)
}
