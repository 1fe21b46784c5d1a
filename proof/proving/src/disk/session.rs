//! One open disk, used through one queue, one request after the other.

use super::{
    DiskCase, DiskTruth, Front,
    front::{Served, device_of},
};
use crate::{
    contents::SECTOR_BYTES,
    ledger::{Version, stamp},
    mutation::Phase,
    stage::{Outcome, Stage},
};
use diskwright_disk::Disk;
use diskwright_store::{BlockDevice, BlockQueue, Completion, EngineKind, IoBuf, Operation, QueueOptions, Request};
use std::sync::Arc;

/// An open disk and its queue.
pub(super) struct Session<'a> {
    case: &'a DiskCase,
    pub(super) disk: Arc<Disk>,
    queue: Option<Box<dyn BlockQueue>>,
    /// Dropped after the queue and before the disk is closed.
    served: Option<Served>,
    buf: Option<IoBuf>,
    done: Vec<Completion>,
    pub(super) has_written: bool,
}

/// Runs one request to its completion.
fn carry_out(queue: &mut dyn BlockQueue, done: &mut Vec<Completion>, request: Request) -> (Option<IoBuf>, Outcome) {
    if let Err(refused) = queue.push(request) {
        return (refused.request.buf, Err(refused.reason.to_string()));
    }
    if let Err(error) = queue.reap(1, done) {
        return (None, Err(error.to_string()));
    }
    match done.pop() {
        Some(completion) => (completion.buf, completion.result.map_err(|error| error.to_string())),
        None => (None, Err("the queue completed no request".into())),
    }
}

impl<'a> Session<'a> {
    /// Uses the disk's own queue.
    pub(super) fn of(case: &'a DiskCase, disk: Arc<Disk>) -> Outcome<Self> {
        Self::through(Front::Queue, case, disk)
    }

    /// Uses the disk through a front.
    pub(super) fn through(front: Front, case: &'a DiskCase, disk: Arc<Disk>) -> Outcome<Self> {
        let options = QueueOptions { depth: 1, engine: case.engine(), slab: None, ring: None };
        let served = match front {
            Front::Queue => None,
            Front::Nbd | Front::Nvme | Front::Iscsi | Front::VhostUser => {
                Some(Served::start(front, device_of(case, &disk))?)
            }
        };
        let queue = match &served {
            None => disk.open_queue(&options),
            Some(served) => served.client().open_queue(&options),
        };
        let queue = queue.map_err(|error| error.to_string())?;
        let largest = case.windows.iter().map(|window| window.count).max().unwrap_or(1) * SECTOR_BYTES;
        let buf = Some(IoBuf::new(largest as usize));
        Ok(Self { case, disk, queue: Some(queue), served, buf, done: Vec::new(), has_written: false })
    }

    pub(super) fn enter_phase(&mut self, stage: &Stage<DiskTruth>, durable: bool) {
        let first = !std::mem::replace(&mut self.has_written, true);
        stage.world.phase(match (first, durable) {
            (true, _) => Some(Phase::FirstWrite),
            (false, true) => Some(Phase::DurableWrite),
            (false, false) => None,
        });
    }

    fn run(&mut self, request: Request) -> Outcome {
        let queue = self.queue.as_mut().ok_or("the disk is closed")?;
        let had_buf = request.buf.is_some();
        let (buf, outcome) = carry_out(&mut **queue, &mut self.done, request);
        if had_buf {
            self.buf = buf;
        }
        outcome
    }

    pub(super) fn write(&mut self, first: u64, count: u64, version: Version, fua: bool) -> Outcome {
        let len = (count * SECTOR_BYTES) as usize;
        let mut buf = self.buf.take().ok_or("the buffer was lost")?;
        stamp(&mut buf[..len], first, version);
        self.run(Request { fua, ..Request::write(first * SECTOR_BYTES, len, buf, 0) })
    }

    pub(super) fn zero(&mut self, first: u64, count: u64, discard: bool, fua: bool) -> Outcome {
        let (offset_bytes, len_bytes) = (first * SECTOR_BYTES, count * SECTOR_BYTES);
        let request = Request::write_zeroes(offset_bytes, len_bytes, 0);
        let operation = if discard { Operation::Discard } else { Operation::WriteZeroes };
        self.run(Request { operation, fua, ..request })
    }

    pub(super) fn flush(&mut self) -> Outcome {
        self.run(Request::flush(0))
    }

    pub(super) fn read_windows(&mut self) -> Outcome<Vec<Vec<u8>>> {
        let mut shown = Vec::new();
        let end = DiskCase::sectors_now(&self.disk);
        for window in self.case.windows.clone() {
            let len = (window.count * SECTOR_BYTES) as usize;
            if window.first >= end {
                // The disk is not large enough yet.
                shown.push(vec![0; len]);
                continue;
            }
            let buf = self.buf.take().ok_or("the buffer was lost")?;
            self.run(Request::read(window.first * SECTOR_BYTES, len, buf, 0))
                .map_err(|error| format!("a read failed: {error}"))?;
            shown.push(self.buf.as_ref().map_or_else(Vec::new, |buf| buf[..len].to_vec()));
        }
        Ok(shown)
    }

    pub(super) fn close(mut self) -> Outcome {
        self.queue = None;
        let stopped = self.served.take().map_or(Ok(()), Served::stop);
        let closed = self.disk.close().map_err(|error| error.to_string());
        stopped.and(closed)
    }
}

/// Writes through a queue of its own.
pub(super) fn write_by_another(disk: &Disk, first_version: Version, ranges: &[(u64, u64)]) -> Outcome {
    let options = QueueOptions { depth: 1, engine: EngineKind::Sync, slab: None, ring: None };
    let mut queue = disk.open_queue(&options).map_err(|error| error.to_string())?;
    for (version, &(first, count)) in (first_version..).zip(ranges) {
        let len = (count * SECTOR_BYTES) as usize;
        let mut buf = IoBuf::new(len);
        stamp(&mut buf, first, version);
        carry_out(&mut *queue, &mut Vec::new(), Request::write(first * SECTOR_BYTES, len, buf, 0)).1?;
    }
    Ok(())
}
