//! A device that is served no faster than its limits allow.
//!
//! ```text
//!   push ─▶ RateLimiter::reserve ─┬─ now ───▶ the device's own queue
//!                                 └─ later ─▶ held, in order ── its time has come ─▶ the same
//! ```
//!
//! All queues of the device share one [`RateLimiter`]. A request that must wait is held in its
//! queue, with its buffer, and counts as in flight. On a shared ring a timer wakes the thread when
//! the first held request may start, so that a worker can sleep meanwhile. Without a ring
//! [`BlockQueue::reap`] sleeps itself; while it waits for requests in flight, held ones start when
//! the first of those has ended.
//!
//! Flushes are never held. They cover completed writes only, so none is overtaken.
//!
//! Invariant: held requests are in the order of their start times, and a request is only passed on
//! directly if none is held.

use crate::{
    Alarm, AtRisk, BlockDevice, BlockQueue, Completion, Extent, Geometry, MemberTraffic, Operation, PushError,
    QueueOptions, RateLimiter, Request, TrackedPoint, queue::validate, resize::SizeWatcher,
};
use std::{collections::VecDeque, io, ops::Range, sync::Arc, thread, time::Duration};

/// A device behind a [`RateLimiter`]. See the module.
#[derive(Debug)]
pub struct LimitedDevice {
    inner: Arc<dyn BlockDevice>,
    limiter: Arc<RateLimiter>,
}

impl LimitedDevice {
    /// `inner`, limited by `limiter`.
    pub fn new(inner: Arc<dyn BlockDevice>, limiter: Arc<RateLimiter>) -> Self {
        Self { inner, limiter }
    }
}

impl BlockDevice for LimitedDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn watch_size(&self, watcher: &Arc<SizeWatcher>) {
        self.inner.watch_size(watcher);
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        Ok(Box::new(LimitedQueue {
            queue: self.inner.open_queue(options)?,
            device: Arc::clone(&self.inner),
            limiter: Arc::clone(&self.limiter),
            held: VecDeque::new(),
            alarm: options.ring.map(Alarm::new),
        }))
    }

    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
        self.inner.extents(offset_bytes, len_bytes, out)
    }

    fn at_risk(&self) -> AtRisk {
        self.inner.at_risk()
    }

    fn member_traffic(&self) -> Vec<MemberTraffic> {
        self.inner.member_traffic()
    }

    fn tracked_points(&self) -> Vec<TrackedPoint> {
        self.inner.tracked_points()
    }

    fn changed_since(
        &self,
        point: &TrackedPoint,
        range: Range<u64>,
        enough: usize,
        out: &mut Vec<Range<u64>>,
    ) -> io::Result<()> {
        self.inner.changed_since(point, range, enough, out)
    }
}

#[derive(Debug)]
struct LimitedQueue {
    queue: Box<dyn BlockQueue>,
    device: Arc<dyn BlockDevice>,
    limiter: Arc<RateLimiter>,
    /// Requests that wait, with the times at which they may start.
    held: VecDeque<(u64, Request)>,
    alarm: Option<Alarm>,
}

impl LimitedQueue {
    /// Passes on the held requests whose time has come. One that the device refuses is completed
    /// with the error.
    fn release(&mut self, out: &mut Vec<Completion>) {
        while let Some(&(start_ns, _)) = self.held.front()
            && start_ns <= self.limiter.now_ns()
            && let Some((_, request)) = self.held.pop_front()
        {
            if let Err(refused) = self.queue.push(request) {
                let Request { tag, buf, segments, .. } = refused.request;
                out.push(Completion { tag, buf, segments, result: Err(refused.reason) });
            }
        }
    }

    /// How long until the first held request may start.
    fn until_next(&self) -> Option<Duration> {
        let &(start_ns, _) = self.held.front()?;
        Some(Duration::from_nanos(start_ns.saturating_sub(self.limiter.now_ns())))
    }

    fn set_alarm(&mut self) {
        if let (Some(after), Some(alarm)) = (self.until_next(), &mut self.alarm) {
            alarm.set(after);
        }
    }
}

impl BlockQueue for LimitedQueue {
    fn depth(&self) -> usize {
        self.queue.depth()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight() + self.held.len()
    }

    fn memory_alignment_bytes(&self) -> usize {
        self.queue.memory_alignment_bytes()
    }

    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        if request.operation == Operation::Flush || self.held.is_empty() && !self.limiter.is_limited() {
            return self.queue.push(request);
        }
        let refuse = |request, reason| Err(Box::new(PushError { request, reason }));
        if self.in_flight() >= self.depth() {
            return refuse(request, io::ErrorKind::WouldBlock.into());
        }
        // A request that is refused takes no tokens.
        if let Err(reason) = validate(&request, &self.device.geometry()) {
            return refuse(request, reason);
        }
        let now_ns = self.limiter.now_ns();
        let start_ns = self.limiter.reserve(now_ns, request.operation, request.len_bytes);
        if start_ns <= now_ns && self.held.is_empty() {
            return self.queue.push(request);
        }
        // After the limits were replaced, a request may be allowed to start before a held one.
        let start_ns = self.held.back().map_or(start_ns, |&(last_ns, _)| start_ns.max(last_ns));
        self.held.push_back((start_ns, request));
        self.set_alarm();
        Ok(())
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let has_alarm = self.alarm.as_ref().is_some_and(Alarm::is_set);
        if self.held.is_empty() && !has_alarm {
            return self.queue.reap(at_least, out);
        }
        let wanted = out.len() + at_least.min(self.in_flight());
        loop {
            if let Some(alarm) = &mut self.alarm {
                alarm.take();
            }
            self.release(out);
            self.queue.reap(0, out)?;
            self.set_alarm();
            if out.len() >= wanted {
                return Ok(());
            }
            if self.queue.in_flight() > 0 {
                self.queue.reap(1, out)?;
            } else if let Some(pause) = self.until_next() {
                thread::sleep(pause);
            }
        }
    }
}

#[cfg(test)]
mod tests;
