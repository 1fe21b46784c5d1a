//! A queue of a movable disk: forwards requests to a queue of the current disk.
//!
//! ```text
//!   push ─▶ read ───────────────────────────────────────────▶ queue of the current disk
//!        ─▶ write: count, look at the phase ─▶ Open, Tracked ─▶ (mark) the same queue
//!                                           └▶ Closed        ─▶ rests until the phase changes
//!   exchange: the queue of the old disk ends its requests beside the new one, and is dropped
//! ```
//!
//! Tags are replaced by the index of a slot, which remembers the caller's tag and the parity under
//! which the request was counted.
//!
//! On a shared ring the thread may sleep when the phase changes. So the queue always has one ticket
//! of an engine of its own on that ring, its *waker*, which the change completes.

use super::state::{Inside, Phase, State, pause};
use crate::engine::epoch::{Parity, QueueEpoch};
use diskwright_store::{
    BlockDevice, BlockQueue, Completion, Engine, EngineCompletion, EngineKind, Operation, PushError, QueueOptions,
    Request, SharedRing, Slab,
    queue::validate,
    sync::atomic::{AtomicU64, Ordering},
};
use std::{collections::VecDeque, fmt, io, sync::Arc};

/// A request in flight.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    tag: u64,
    parity: Option<Parity>,
}

/// Wakes the thread of the queue out of its ring.
struct Waker {
    engine: Engine,
    ended: Vec<EngineCompletion>,
    /// How often all wakers had run when this one was last seen.
    heard: u64,
}

/// A queue of a movable disk; see the module.
pub(crate) struct MovableQueue {
    /// A queue of the current disk. Dropped before `epoch`: its requests end before they stop
    /// counting.
    current: Box<dyn BlockQueue>,
    /// The number of the disk to which `current` belongs.
    number: u64,
    /// Queues of earlier disks, until their requests have ended.
    former: Vec<Box<dyn BlockQueue>>,
    epoch: QueueEpoch,
    state: Arc<State>,
    /// The epoch in which `phase` was fetched.
    seen_epoch: u64,
    phase: Phase,
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
    /// Requests that wait for another phase.
    resting: VecDeque<Request>,
    /// Resting requests that were refused when they could go on.
    refused: Vec<Completion>,
    done: Vec<Completion>,
    in_flight: usize,
    ended: Arc<AtomicU64>,
    waker: Option<Waker>,
    depth: usize,
    engine: EngineKind,
    slab: Option<Slab>,
    ring: Option<SharedRing>,
}

impl fmt::Debug for MovableQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MovableQueue({} of {} in flight, {:?})", self.in_flight, self.depth, self.current)
    }
}

impl MovableQueue {
    pub(crate) fn open(state: Arc<State>, options: &QueueOptions<'_>) -> io::Result<Self> {
        let (epoch, ended) = state.join();
        let (seen_epoch, number, phase, current) = loop {
            let seen_epoch = epoch.now();
            let Inside { disk, number, phase } = state.inside();
            match disk.open_queue(options) {
                Ok(current) => break (seen_epoch, number, phase, current),
                // The disk was exchanged meanwhile, and the old one closed.
                Err(_) if state.inside().number != number => {}
                Err(error) => return Err(error),
            }
        };
        let ring = options.ring.filter(|_| options.engine != EngineKind::Sync);
        let mut queue = Self {
            current,
            number,
            former: Vec::new(),
            epoch,
            state,
            seen_epoch,
            phase,
            slots: Vec::new(),
            free_slots: Vec::new(),
            resting: VecDeque::new(),
            refused: Vec::new(),
            done: Vec::new(),
            in_flight: 0,
            ended,
            waker: ring.map(|ring| Waker { engine: Engine::on(ring), ended: Vec::new(), heard: 0 }),
            depth: options.depth.max(1),
            engine: options.engine,
            slab: options.slab.cloned(),
            ring: options.ring.cloned(),
        };
        queue.hang_up_bell();
        Ok(queue)
    }

    /// Gives the state a ticket that wakes this thread.
    fn hang_up_bell(&mut self) {
        if let Some(waker) = &mut self.waker {
            self.state.add_waker(waker.engine.external(0, 0, None));
        }
    }

    /// Takes note of a waker that has run.
    fn hear_bell(&mut self) -> io::Result<()> {
        let Some(waker) = &mut self.waker else { return Ok(()) };
        let rings = self.state.rings();
        if rings == waker.heard {
            return Ok(());
        }
        waker.engine.reap(0, &mut waker.ended)?;
        // A waker that has not arrived yet, or was hung up after the ring, is looked for again.
        if !waker.ended.is_empty() {
            waker.ended.clear();
            waker.heard = rings;
            // Before the epoch is looked at, so that the next change rings it again.
            self.hang_up_bell();
        }
        Ok(())
    }

    /// Fetches the phase and the disk, if the epoch has changed.
    #[inline]
    fn look(&mut self, epoch: u64) -> io::Result<()> {
        if epoch == self.seen_epoch { Ok(()) } else { self.fetch(epoch) }
    }

    #[cold]
    fn fetch(&mut self, epoch: u64) -> io::Result<()> {
        let Inside { disk, number, phase } = self.state.inside();
        if number != self.number {
            let options = QueueOptions {
                depth: self.depth,
                engine: self.engine,
                slab: self.slab.as_ref(),
                ring: self.ring.as_ref(),
            };
            let former = std::mem::replace(&mut self.current, disk.open_queue(&options)?);
            self.number = number;
            if former.in_flight() > 0 {
                self.former.push(former);
            }
        }
        self.phase = phase;
        self.seen_epoch = epoch;
        Ok(())
    }

    /// Whether the request can go on in the present phase.
    #[inline]
    fn may_go(&self, request: &Request) -> bool {
        match &self.phase {
            Phase::Open | Phase::Tracked(_) => true,
            Phase::Closed => matches!(request.operation, Operation::Read | Operation::Flush),
            Phase::Settling => request.operation != Operation::Flush && !request.fua,
        }
    }

    /// Forwards a request, or returns it if it must wait for another phase.
    #[inline]
    fn forward(&mut self, request: Request) -> Result<Option<Request>, Box<PushError>> {
        let changes = !matches!(request.operation, Operation::Read | Operation::Flush);
        // A request that changes data is counted before the phase is looked at.
        let entered = changes.then(|| self.epoch.enter());
        let epoch = entered.map_or_else(|| self.epoch.now(), |entered| entered.epoch);
        let parity = entered.map(|entered| entered.parity);
        let refuse = |queue: &Self, request, reason| {
            parity.into_iter().for_each(|parity| queue.epoch.leave(parity));
            Err(Box::new(PushError { request, reason }))
        };
        if let Err(reason) = self.look(epoch) {
            return refuse(self, request, reason);
        }
        if !self.may_go(&request) {
            if let Err(reason) = validate(&request, &self.state.disk().geometry()) {
                return refuse(self, request, reason);
            }
            parity.into_iter().for_each(|parity| self.epoch.leave(parity));
            return Ok(Some(request));
        }
        if let (Phase::Tracked(dirty), true) = (&self.phase, changes) {
            dirty.mark(request.offset_bytes, request.len_bytes);
        }
        let slot = Slot { tag: request.tag, parity };
        let index = match self.free_slots.pop() {
            Some(index) => {
                self.slots[index as usize] = slot;
                index
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        };
        match self.current.push(Request { tag: index.into(), ..request }) {
            Ok(()) => Ok(None),
            Err(mut refused) => {
                refused.request.tag = slot.tag;
                self.free_slots.push(index);
                refuse(self, refused.request, refused.reason)
            }
        }
    }

    /// Forwards the resting requests that can go on.
    #[cold]
    fn go_on(&mut self) {
        for request in std::mem::take(&mut self.resting) {
            match self.forward(request) {
                Ok(None) => {}
                Ok(Some(request)) => self.resting.push_back(request),
                Err(refused) => {
                    let PushError { request: Request { tag, buf, segments, .. }, reason } = *refused;
                    self.refused.push(Completion { tag, buf, segments, result: Err(reason) });
                }
            }
        }
    }

    /// Appends the completions in `done`, with the tags of the caller.
    fn hand_out(&mut self, out: &mut Vec<Completion>) {
        for mut completion in self.done.drain(..) {
            let index = completion.tag as usize;
            let Slot { tag, parity } = std::mem::take(&mut self.slots[index]);
            if let Some(parity) = parity {
                self.epoch.leave(parity);
            }
            self.free_slots.push(index as u32);
            completion.tag = tag;
            out.push(completion);
        }
    }

    /// One look at everything, waiting for one completion of a disk if `waits`.
    fn turn(&mut self, waits: bool, out: &mut Vec<Completion>) -> io::Result<()> {
        self.hear_bell()?;
        // An error stays for the next request; what is in flight goes on.
        let _ = self.look(self.epoch.now());
        if !self.resting.is_empty() {
            self.go_on();
        }
        let mut waits = waits && self.refused.is_empty();
        out.append(&mut self.refused);
        for former in &mut self.former {
            former.reap(usize::from(waits), &mut self.done)?;
            waits = waits && self.done.is_empty();
        }
        self.former.retain(|former| former.in_flight() > 0);
        if waits && self.current.in_flight() == 0 {
            // Everything rests. A thread without a shared ring has no waker.
            pause();
        }
        self.current.reap(usize::from(waits), &mut self.done)?;
        self.hand_out(out);
        Ok(())
    }
}

impl BlockQueue for MovableQueue {
    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn memory_alignment_bytes(&self) -> usize {
        self.current.memory_alignment_bytes()
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        if self.in_flight >= self.depth {
            let reason = io::Error::new(io::ErrorKind::WouldBlock, "the queue is full");
            return Err(Box::new(PushError { request, reason }));
        }
        if let Some(request) = self.forward(request)? {
            self.resting.push_back(request);
        }
        self.in_flight += 1;
        Ok(())
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let (before, at_least) = (out.len(), at_least.min(self.in_flight));
        let mut result;
        loop {
            result = self.turn(at_least > out.len() - before, out);
            if result.is_err() || out.len() - before >= at_least {
                break;
            }
        }
        let ended = out.len() - before;
        self.in_flight -= ended;
        // Only this thread writes it.
        self.ended.store(self.ended.load(Ordering::Relaxed) + ended as u64, Ordering::Relaxed);
        result
    }
}

impl Drop for MovableQueue {
    /// An engine that is dropped waits for its tickets.
    fn drop(&mut self) {
        if let Some(waker) = &self.waker
            && let Some(ticket) = self.state.take_waker(|ticket| waker.engine.owns(ticket))
        {
            ticket.complete(Ok(()));
        }
    }
}
