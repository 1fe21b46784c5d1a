//! Carries out changes: whole sectors at once, parts of sectors one patch at a time (see
//! `changes`).
//!
//! ```text
//!   change ─▶ start ─▶ queue ─────────────────────────────────────────▶ changed ─▶ reply
//!         └▶ waiting ─▶ start_waiting ─▶ patch_on, step by step:
//!                                        read, modify, write ─────────▶ changed ─▶ reply
//! ```

use super::{PATCH, Patching, QueueOperation, Session, Slot, Waiting, errno_of};
use crate::fuse::{
    buffers::LEAD_BYTES,
    changes::{self, Change, Piece},
};
use diskwright_store::Request;
use rustix::io::Errno;
use std::{io, ops::Range};

impl Session {
    pub(super) fn change(&mut self, wanted: Waiting) {
        if self.view.read_only {
            return self.refuse(wanted.buf, wanted.unique, Errno::ROFS);
        }
        if wanted.bytes.is_empty() {
            return self.changed(wanted, Ok(()));
        }
        let whole = (wanted.bytes.start | wanted.bytes.end).is_multiple_of(self.sector_bytes);
        if whole && self.waiting.is_empty() && self.patching.is_none() {
            return self.start(wanted);
        }
        self.waiting.push_back(wanted);
        self.start_waiting();
    }

    /// Starts a change of whole sectors.
    fn start(&mut self, wanted: Waiting) {
        let Waiting { unique, change, bytes, buf } = wanted;
        let (start, len) = (bytes.start, bytes.end - bytes.start);
        match change {
            Change::Payload => {
                let tag = self.occupy(Slot { unique, doing: QueueOperation::Write { bytes } });
                let request = Request::write(start, len as usize, buf, tag);
                self.push(Request { buf_offset_bytes: LEAD_BYTES, ..request });
            }
            Change::Zeroes | Change::Discard => {
                let buf = self.smaller(buf);
                let tag = self.occupy(Slot { unique, doing: QueueOperation::Zero { bytes, buf } });
                self.push(zeroing(change, &(start..start + len), tag));
            }
        }
    }

    /// Starts waiting changes, in order, until one must wait for a change in flight.
    pub(super) fn start_waiting(&mut self) {
        while let Some(next) = self.waiting.front() {
            let sectors = changes::sectors_of(&next.bytes, self.sector_bytes);
            let whole = sectors == next.bytes;
            let may_start = match &self.patching {
                Some(patching) => whole && !changes::overlap(&patching.sectors, &sectors),
                None => whole || !self.meets_a_change(&sectors),
            };
            if !may_start {
                return;
            }
            let Some(next) = self.waiting.pop_front() else { return };
            if whole {
                self.start(next);
            } else {
                let pieces = changes::pieces(next.change, &next.bytes, self.sector_bytes);
                self.patching = Some(Patching { of: next, sectors, pieces, reading: None });
                self.patch_on(Ok(()));
            }
        }
    }

    fn meets_a_change(&self, sectors: &Range<u64>) -> bool {
        self.slots.iter().flatten().any(|slot| match &slot.doing {
            QueueOperation::Write { bytes } | QueueOperation::Zero { bytes, .. } => changes::overlap(bytes, sectors),
            QueueOperation::Read { .. } | QueueOperation::Flush { .. } => false,
        })
    }

    /// Continues the patching change after one of its steps has ended with `result`. The scratch
    /// buffer must have been returned by the queue.
    pub(super) fn patch_on(&mut self, result: io::Result<()>) {
        let Some(mut patching) = self.patching.take() else { return };
        let finished = result.is_err() || (patching.reading.is_none() && patching.pieces.is_empty());
        let scratch = if finished { None } else { self.scratch.take() };
        let Some(mut scratch) = scratch else {
            self.changed(patching.of, result);
            return self.start_waiting();
        };
        let request = if let Some(Piece::Patch { sectors, bytes }) = patching.reading.take() {
            let len = (bytes.end - bytes.start) as usize;
            let place = &mut scratch[LEAD_BYTES + (bytes.start - sectors.start) as usize..][..len];
            match patching.of.change {
                Change::Payload => {
                    let from = (bytes.start - patching.of.bytes.start) as usize;
                    place.copy_from_slice(&patching.of.buf[LEAD_BYTES + from..][..len]);
                }
                Change::Zeroes | Change::Discard => place.fill(0),
            }
            Request::write(sectors.start, (sectors.end - sectors.start) as usize, scratch, PATCH)
        } else {
            match patching.pieces.pop_front() {
                Some(Piece::Whole { sectors }) => {
                    self.scratch = Some(scratch);
                    zeroing(patching.of.change, &sectors, PATCH)
                }
                Some(Piece::Patch { sectors, bytes }) => {
                    let len = (sectors.end - sectors.start) as usize;
                    let request = Request::read(sectors.start, len, scratch, PATCH);
                    patching.reading = Some(Piece::Patch { sectors, bytes });
                    request
                }
                None => unreachable!("a change without steps left has finished"),
            }
        };
        self.patching = Some(patching);
        self.push(Request { buf_offset_bytes: LEAD_BYTES, ..request });
    }

    /// Replies to a change.
    pub(super) fn changed(&mut self, change: Waiting, result: io::Result<()>) {
        let len = (change.bytes.end - change.bytes.start) as u32;
        let is_write = change.change == Change::Payload;
        self.answer(change.buf, change.unique, result.map_err(|error| errno_of(&error)), |answer, ()| {
            if is_write {
                answer.write_out(len);
            }
        });
    }
}

fn zeroing(change: Change, bytes: &Range<u64>, tag: u64) -> Request {
    let len_bytes = bytes.end - bytes.start;
    match change {
        Change::Discard => Request::discard(bytes.start, len_bytes, tag),
        Change::Payload | Change::Zeroes => Request::write_zeroes(bytes.start, len_bytes, tag),
    }
}
