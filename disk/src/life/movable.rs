//! A disk that can be exchanged for another one while it is in use.
//!
//! ```text
//!   servers ─▶ Movable ─▶ queue of the current disk
//!                │
//!   live_move.rs │  Open ─▶ Tracked ─▶ Closed ─▶ (exchange) Settling ─▶ Open
//!                           writes     writes               flushes and FUA
//!                           mark       wait                 wait
//!                           their range
//! ```
//!
//! Servers open their queues on a [`Movable`]. Without a move it forwards requests: a read costs
//! one atomic load, a write one atomic addition when it begins and one when it ends.
//!
//! Rejected: a mirror, which sends each write to the old and to the new disk. It doubles the
//! latency of writes for the whole move, a slow or full destination slows down the clients,
//! overlapping writes must be ordered the same way on both disks, and all kinds of requests need a
//! second buffer or a second life. Here the new disk is not touched by clients before it is
//! complete, so its failures cannot reach them. What the mirror has and a copy of dirty ranges has
//! not is a bound: clients may dirty ranges faster than they are copied. So the last rounds hold
//! writes for moments that grow until the copy has caught up (`live_move.rs`).
//!
//! # Why no write is lost
//!
//! A request that changes data is counted in an epoch before it looks at the phase
//! ([`Epochs`](crate::engine::epoch::Epochs)). A change of the phase is published before a new
//! epoch begins, and the change then waits until the requests of the former epoch have ended. So:
//!
//! - After the change to *Tracked* every request either has ended, and a copy that begins now finds
//!   its data, or it marks its range before it is forwarded.
//! - The copy takes marks (clears them), waits for a grace period, and then reads the ranges. A
//!   request whose mark was taken was counted before the grace period began, so it has ended and
//!   its data is read. A request that marks later leaves its mark for the next round.
//! - After the change to *Closed* no request that changes data is in flight, and none begins. When
//!   the last marks are copied, both disks have the same contents.
//! - After the exchange a request that changes data is forwarded to the new disk only, as its queue
//!   fetches phase and disk together. A read that began before the exchange may still end on the
//!   old disk: it overlaps in time with every write that it does not see.
//! - A flush that began before the exchange covers writes that are durable in both disks: the new
//!   one was flushed before the exchange. After it flushes and FUA wait until the new name is
//!   durable and the old one is gone, so that no name leads to a disk without a write that was
//!   promised.
//!
//! Locks: `changing`, `inside` and `bells` of [`State`], each only for a moment but `changing`,
//! which is held during a grace period. No I/O happens under them, and requests take `inside` only
//! when the epoch has changed.

mod dirty;
mod queue;
mod state;

use crate::{Result, engine::device::Disk};
pub(crate) use dirty::Dirty;
use diskwright_store::{
    AtRisk, BlockDevice, BlockQueue, Extent, Geometry, MemberTraffic, QueueOptions, TrackedPoint, resize::SizeWatcher,
    sync::Mutex,
};
use queue::MovableQueue;
pub(crate) use state::{Phase, State};
use std::{io, ops::Range, sync::Arc};

/// A disk that can be moved while queues are open; see the module.
#[derive(Debug)]
pub struct Movable {
    pub(crate) state: Arc<State>,
    /// Held during a move.
    pub(crate) moving: Mutex<()>,
}

impl Movable {
    /// A movable disk that is `disk` at first. All its users must use the result.
    pub fn new(disk: Arc<Disk>) -> Self {
        Self { state: Arc::new(State::new(disk)), moving: Mutex::new(()) }
    }

    /// The disk as it is now. After a move it is another one.
    pub fn disk(&self) -> Arc<Disk> {
        self.state.disk()
    }

    /// Closes the current disk, as [`Disk::close`].
    ///
    /// # Errors
    /// As [`Disk::close`].
    pub fn close(&self) -> Result<()> {
        self.disk().close()
    }
}

impl BlockDevice for Movable {
    fn geometry(&self) -> Geometry {
        self.disk().geometry()
    }

    fn watch_size(&self, watcher: &Arc<SizeWatcher>) {
        self.state.watchers.add(watcher);
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        Ok(Box::new(MovableQueue::open(Arc::clone(&self.state), options)?))
    }

    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
        self.disk().extents(offset_bytes, len_bytes, out)
    }

    fn at_risk(&self) -> AtRisk {
        self.disk().at_risk()
    }

    fn member_traffic(&self) -> Vec<MemberTraffic> {
        self.disk().member_traffic()
    }

    fn tracked_points(&self) -> Vec<TrackedPoint> {
        self.disk().tracked_points()
    }

    fn changed_since(
        &self,
        point: &TrackedPoint,
        range: Range<u64>,
        enough: usize,
        out: &mut Vec<Range<u64>>,
    ) -> io::Result<()> {
        BlockDevice::changed_since(&*self.disk(), point, range, enough, out)
    }
}
