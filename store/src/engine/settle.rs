//! Closing an engine: waiting for everything in flight, and giving up parts that are never
//! answered.
//!
//! ```text
//! ring fails      ─▶ parts in the ring are lost       ┐  slots.lose: memory leaked, fresh buffer,
//! patience over   ─▶ parts that lanes hold are lost   ┘  completion is `lost`; nothing starts now
//! otherwise       ─▶ wait for ring, tickets and pool without limit, as for a disk
//! ```
//!
//! Invariant: the index of a lost part is never reused, so a late answer affects no other part.
//! `Part::carrier` tells a late answer of a lane from a current one. The ring is not entered again
//! after it failed.

use super::Engine;
use crate::{
    link::Link,
    part::Carrier,
    ring::{CANCEL, FIRST_LANE},
};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::{
    io,
    time::{Duration, Instant},
};

/// How long the engine waits for lanes before it enters the ring again.
const RING_POLL_INTERVAL: Duration = Duration::from_millis(10);

impl Engine {
    /// Waits for all parts and tickets; for lanes no longer than the patience.
    pub(super) fn settle(&mut self) -> io::Result<()> {
        let started = Instant::now();
        let mut outcome = Ok(());
        // A request that was never ended keeps its parts, so this waits for parts and tickets, not
        // requests.
        loop {
            self.drive_lanes();
            self.take_tickets();
            if self.in_ring == 0 && self.tickets == 0 {
                return outcome;
            }
            if self.lane_parts > 0 {
                let left = self.patience_with_lanes().saturating_sub(started.elapsed());
                if left.is_zero() {
                    self.lanes_failed();
                    continue;
                }
                let limit = if self.in_ring > 0 { left.min(RING_POLL_INTERVAL) } else { left };
                self.wait_off_ring(Some(limit));
            }
            if self.in_ring > 0 {
                if let Err(error) = self.enter_ring(self.lane_parts == 0) {
                    self.ring_failed(&error);
                    outcome = Err(error);
                }
            } else if self.lane_parts == 0 && self.tickets > 0 {
                self.externals.wait();
            }
        }
    }

    /// How long to wait for lanes: the longest patience among the lanes that hold parts, limited by
    /// the engine's own.
    fn patience_with_lanes(&self) -> Duration {
        let longest = self.lanes.iter().filter(|open| open.parts > 0).map(|open| open.lane.patience()).max();
        longest.map_or(self.patience, |longest| longest.min(self.patience))
    }

    fn enter_ring(&mut self, waits: bool) -> io::Result<()> {
        match &mut self.link {
            Link::None => {}
            Link::Own(ring) => ring.enter(usize::from(waits))?,
            Link::Shared(member) if waits => member.wait()?,
            Link::Shared(member) => member.go_on()?,
        }
        self.take_answers();
        Ok(())
    }

    /// Works until `wanted` requests have ended, after the ring has failed.
    pub(super) fn work_off_ring_until(&mut self, wanted: usize) {
        loop {
            self.drive_lanes();
            self.take_tickets();
            if self.slots.ended() >= wanted {
                return;
            }
            self.wait_off_ring(None);
        }
    }

    /// Sleeps until a ticket or a loan has completed, a lane has work, or `limit` is over. May
    /// return early.
    fn wait_off_ring(&mut self, limit: Option<Duration>) {
        if self.lane_parts == 0 || self.externals.eventfd().is_err() {
            // Without an eventfd, lanes are polled in intervals.
            let limit = if self.lane_parts > 0 { Some(RING_POLL_INTERVAL) } else { limit };
            self.lanes.iter_mut().for_each(|open| open.is_due = true);
            return match limit {
                Some(limit) => self.externals.wait_for(limit),
                None => self.externals.wait(),
            };
        }
        // Tickets that ended before the eventfd existed did not signal it.
        self.take_tickets();
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(self.lanes.len() + 1);
        fds.extend(self.externals.existing_eventfd().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        fds.extend(self.lanes.iter().map(|open| PollFd::from_borrowed_fd(open.lane.descriptor(), PollFlags::IN)));
        let limit = if self.tickets == 0 { Some(Duration::ZERO) } else { limit };
        let spec = limit.and_then(|limit| Timespec::try_from(limit).ok());
        // After EINTR and other errors, everything is examined again anyway.
        let _ = rustix::event::poll(&mut fds, spec.as_ref());
        drop(fds);
        self.lanes.iter_mut().for_each(|open| open.is_due = true);
        self.externals.clear_eventfd();
    }

    /// Gives up all parts in the ring: it will never answer them.
    #[cold]
    pub(super) fn ring_failed(&mut self, error: &io::Error) {
        self.refuse_new_parts();
        self.ring_failed = true;
        self.in_ring = 0;
        self.polling = false;
        self.lanes.iter_mut().for_each(|open| open.polling = false);
        for index in self.parts_in_flight(Carrier::Own) {
            let lost = format!(
                "the kernel's io_uring failed ({error}), and it is unknown whether this request was carried out; close the disk, check it, open it again"
            );
            self.lost_parts.push(index as u32);
            self.slots.lose(self.parts[index].slot, io::Error::new(error.kind(), lost));
        }
    }

    /// Gives up all parts that lanes hold.
    fn lanes_failed(&mut self) {
        self.refuse_new_parts();
        let seconds = self.patience_with_lanes().as_secs_f64();
        for index in self.parts_in_flight(Carrier::Lane) {
            let part = &mut self.parts[index];
            part.carrier = Carrier::Own;
            let store = &self.targets[part.target as usize].store;
            let lost = format!(
                "{} did not answer within {seconds} s of closing, and it is unknown whether this request was carried out",
                store.name().display()
            );
            self.tickets -= 1;
            self.lost_parts.push(index as u32);
            self.slots.lose(part.slot, io::Error::new(io::ErrorKind::TimedOut, lost));
        }
        self.lane_parts = 0;
        self.lanes.iter_mut().for_each(|open| open.parts = 0);
    }

    fn refuse_new_parts(&mut self) {
        self.failed = true;
        // So that every new part takes the slow path, which refuses it.
        self.targets.iter_mut().for_each(|target| target.is_plain_file = false);
    }

    /// Indices of the parts in flight that `carrier` is carrying out.
    fn parts_in_flight(&self, carrier: Carrier) -> Vec<usize> {
        let mut in_flight = vec![true; self.parts.len()];
        for &index in self.free_parts.iter().chain(&self.lost_parts) {
            in_flight[index as usize] = false;
        }
        (0..self.parts.len()).filter(|&index| in_flight[index] && self.parts[index].carrier == carrier).collect()
    }

    /// Cancels this engine's polls on a shared ring, which outlives the engine.
    fn stop_listening(&mut self) -> io::Result<()> {
        for (number, open) in (FIRST_LANE..).zip(&self.lanes) {
            if open.polling {
                let (polled, own) = (self.user_bits | u64::from(number), self.user_bits | u64::from(CANCEL));
                self.link.with(|ring| ring.cancel_poll(polled, own)).transpose()?;
                self.cancels += 1;
            }
        }
        while self.polling || self.cancels > 0 || self.lanes.iter().any(|open| open.polling) {
            if self.polling {
                self.externals.signal_eventfd();
            }
            self.enter_ring(true)?;
        }
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Errors are ignored: lost memory was leaked, so code that still uses it finds valid bytes.
        let _ = self.settle();
        if matches!(self.link, Link::Shared(_)) && !self.ring_failed && self.stop_listening().is_err() {
            self.ring_failed = true;
        }
        if let Link::Shared(member) = &mut self.link {
            for target in &self.targets {
                if let Some(index) = target.file_index {
                    member.ring().unregister_file(index);
                }
            }
            if self.ring_failed {
                member.abandon();
            }
        }
    }
}
