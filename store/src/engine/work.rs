//! Starting parts, waiting for their answers, and completing requests.
//!
//! ```text
//!   start ─▶ carry_out ─▶ ring ─▶ answer ─▶ judge ─┬─▶ part_ended ─▶ Slots::let_go
//!               │  ▲                               └─▶ again, or by a blocking call
//!               │  └───────────────────────────────────────┘
//!               └─▶ carry_out_off_ring ─┬─▶ lane or pool: a loan ─▶ take_tickets ─▶ part_ended
//!                                       ├─▶ run_blocking ─▶ part_ended
//!                                       └─▶ pieces, each started again (a store that is not plain)
//!               └─▶ carry_out_in_copies (a store with a placement: `copies.rs`)
//! ```
//!
//! Answers come from the engine's own ring, or from its mailbox on a shared ring. Tickets and loans
//! that others hold signal an eventfd when they complete; the ring polls that eventfd while there
//! are any, and the descriptors of lanes that hold parts.

#![allow(unsafe_code)]

use super::{Engine, overlapping_parts};
use crate::{
    buffer::Loan,
    external::Origin,
    link::Link,
    part::{Carrier, Part, Route, Target, Verdict},
    pool,
    ring::{Answer, CANCEL, FIRST_LANE, WAKE},
};
use std::{
    io, mem,
    panic::{AssertUnwindSafe, catch_unwind},
};

impl Engine {
    /// Submits everything, and works until `wanted` requests have ended.
    pub(super) fn work_until(&mut self, wanted: usize) -> io::Result<()> {
        self.take_tickets();
        let worked = match self.link {
            _ if self.failed => {
                self.work_off_ring_until(wanted);
                return Ok(());
            }
            Link::None => {
                while self.slots.ended() < wanted {
                    self.externals.wait();
                    self.take_tickets();
                }
                return Ok(());
            }
            Link::Own(_) => self.work_on_own_ring_until(wanted),
            Link::Shared(_) => self.work_on_shared_ring_until(wanted),
        };
        worked.inspect_err(|error| self.ring_failed(error))
    }

    fn work_on_own_ring_until(&mut self, wanted: usize) -> io::Result<()> {
        self.take_answers();
        let mut looked = false;
        loop {
            self.drive_lanes();
            // Poll even if nothing is waited for: a caller that polls with `reap(0)` must still
            // learn that a lane is ready.
            if self.lane_parts > 0 && self.listen()? {
                continue;
            }
            let missing = wanted.saturating_sub(self.slots.ended());
            let Link::Own(ring) = &mut self.link else { return Ok(()) };
            if missing == 0 && ring.unsubmitted() == 0 && (looked || !ring.has_task_work()) {
                return Ok(());
            }
            // Each missing request brings an answer of its own, but one eventfd signal may stand
            // for many tickets.
            let wait_for = if self.tickets == 0 { missing } else { missing.min(1) };
            if wait_for > 0 && self.listen()? {
                continue;
            }
            let Link::Own(ring) = &mut self.link else { return Ok(()) };
            ring.enter(wait_for)?;
            looked = true;
            self.take_answers();
        }
    }

    fn work_on_shared_ring_until(&mut self, wanted: usize) -> io::Result<()> {
        self.take_answers();
        loop {
            self.drive_lanes();
            // Poll even if nothing is waited for: the next to sleep on the ring may be another
            // user, which does not know of this engine's tickets.
            self.listen()?;
            let Link::Shared(member) = &self.link else { return Ok(()) };
            if self.slots.ended() >= wanted {
                return Ok(());
            }
            member.wait()?;
            self.take_answers();
        }
    }

    /// Makes the ring poll the eventfd of tickets and loans, and the lanes that hold parts. Returns
    /// whether it had to start a poll.
    pub(super) fn listen(&mut self) -> io::Result<bool> {
        if self.tickets == 0 {
            return Ok(false);
        }
        let mut had_to = false;
        if self.lane_parts > 0 {
            for (number, open) in (FIRST_LANE..).zip(&mut self.lanes) {
                if open.parts > 0 && !open.polling {
                    let fd = std::os::fd::AsRawFd::as_raw_fd(&open.lane.descriptor());
                    let user_data = self.user_bits | u64::from(number);
                    self.link.with(|ring| ring.poll(fd, user_data)).transpose()?;
                    open.polling = true;
                    had_to = true;
                }
            }
        }
        if !self.polling {
            let (eventfd, user_data) = (self.externals.eventfd()?, self.user_bits | u64::from(WAKE));
            self.link.with(|ring| ring.poll(eventfd, user_data)).transpose()?;
            self.polling = true;
            had_to = true;
            // Tickets that ended before the eventfd existed did not signal it.
            self.take_tickets();
        }
        Ok(had_to)
    }

    pub(super) fn take_answers(&mut self) {
        match &mut self.link {
            Link::None => {}
            Link::Shared(member) => {
                let mut mail = mem::take(&mut self.mail);
                member.take(&mut mail);
                for &(number, answer) in &mail {
                    self.answer(number, answer);
                }
                mail.clear();
                self.mail = mail;
            }
            Link::Own(_) => {
                let mut answers: [Answer; 64] = [(0, 0); 64];
                loop {
                    let Link::Own(ring) = &mut self.link else { return };
                    let taken = ring.take(&mut answers);
                    for &(user_data, answer) in &answers[..taken] {
                        self.answer(user_data as u32, answer);
                    }
                    if taken < answers.len() {
                        return;
                    }
                }
            }
        }
    }

    #[inline]
    fn answer(&mut self, number: u32, answer: i32) {
        if number >= FIRST_LANE {
            self.poll_ended(number);
        } else {
            self.answered(number, answer);
        }
    }

    /// Handles the end, or the cancellation, of a poll.
    #[cold]
    fn poll_ended(&mut self, number: u32) {
        match number {
            WAKE => {
                self.polling = false;
                self.externals.clear_eventfd();
                self.take_tickets();
            }
            CANCEL => self.cancels -= 1,
            lane => {
                if let Some(open) = self.lanes.get_mut((lane - FIRST_LANE) as usize) {
                    (open.polling, open.is_due) = (false, true);
                }
            }
        }
    }

    /// Lets the lanes that are due make progress, and takes the loans that ended.
    #[inline]
    pub(super) fn drive_lanes(&mut self) {
        if self.lane_parts > 0 {
            self.drive_due_lanes();
        }
    }

    #[cold]
    fn drive_due_lanes(&mut self) {
        // The engine's own thread completes these loans: no wake-up is necessary.
        self.externals.attend();
        for open in &mut self.lanes {
            if mem::take(&mut open.is_due) {
                open.lane.drive();
            }
        }
        self.take_tickets();
    }

    pub(super) fn take_tickets(&mut self) {
        if self.tickets == 0 {
            return;
        }
        let mut ended = mem::take(&mut self.ended_tickets);
        self.externals.take(&mut ended);
        for (origin, result) in ended.drain(..) {
            match origin {
                Origin::Slot(slot) => {
                    self.tickets -= 1;
                    self.slots.let_go(slot, result);
                }
                Origin::Part(index) => self.loan_ended(index, result),
            }
        }
        self.ended_tickets = ended;
    }

    fn loan_ended(&mut self, index: u32, result: io::Result<()>) {
        let part = &mut self.parts[index as usize];
        let target = &self.targets[part.target as usize];
        let result = match mem::replace(&mut part.carrier, Carrier::Own) {
            // The part was given up earlier; see `settle`.
            Carrier::Own => return,
            Carrier::Pool => result,
            Carrier::Lane => {
                self.lane_parts -= 1;
                if let Some(lane) = target.lane {
                    self.lanes[lane.number as usize].parts -= 1;
                }
                part.settle(result, target)
            }
        };
        self.tickets -= 1;
        self.slots.get(part.slot).end_loan(part.memory(), part.fills());
        self.bounce_back(index, &result);
        self.part_ended(index, result);
    }

    #[inline]
    pub(super) fn start(&mut self, part: Part) {
        self.stats.parts += 1;
        self.slots.hold(part.slot);
        let index = self.keep_part(part);
        self.carry_out(index, false);
    }

    /// Puts a part into the table.
    #[inline]
    pub(super) fn keep_part(&mut self, part: Part) -> u32 {
        match self.free_parts.pop() {
            Some(index) => {
                self.parts[index as usize] = part;
                index
            }
            None => {
                self.parts.push(part);
                u32::try_from(self.parts.len() - 1).expect("more parts in flight than memory could hold")
            }
        }
    }

    /// Gives a part to the ring, or to whatever else can carry it out.
    #[inline]
    pub(super) fn carry_out(&mut self, index: u32, block: bool) {
        let part = &self.parts[index as usize];
        let target = &self.targets[part.target as usize];
        let user_data = self.user_bits | u64::from(index);
        if block || !part.fits_ring(target) {
            if target.members.is_some() && part.route == Route::Unasked {
                return self.carry_out_in_copies(index);
            }
            return self.carry_out_off_ring(index);
        }
        // SAFETY: the part fits the ring. Its memory is its slot's buffer or segments, memory that
        // the slot shares, or static zeros. The slot keeps it, and hands it to no other code, until
        // the part has ended, which is after its answer was taken. `registered` was set from the
        // slab that is registered with the ring. Reads go only into the slot's own memory, or into
        // another process's memory, to which no reference exists.
        let start = |ring: &mut crate::ring::Ring| unsafe { ring.start(part, target, user_data) };
        match self.link.with(start) {
            Some(Ok(())) => self.in_ring += 1,
            Some(Err(error)) => self.part_ended(index, Err(error)),
            None => self.carry_out_off_ring(index),
        }
    }

    /// Splits a part into pieces that the store reaches in different ways, and starts each.
    fn carry_out_in_pieces(&mut self, index: u32) {
        let mut rest = self.parts[index as usize];
        self.stats.parts -= 1;
        loop {
            let piece = rest.cut_front(&self.targets[rest.target as usize]);
            self.start(piece);
            if rest.len_bytes == 0 {
                break;
            }
        }
        // The original part held the slot until now.
        self.part_ended(index, Ok(()));
    }

    /// Carries out a part by a lane, a thread of the pool, or a blocking call.
    #[cold]
    pub(super) fn carry_out_off_ring(&mut self, index: u32) {
        if self.failed {
            let refused = "an earlier failure of the I/O engine left requests without an answer; close the disk and open it again";
            return self.part_ended(index, Err(io::Error::other(refused)));
        }
        let part = &mut self.parts[index as usize];
        let target = &self.targets[part.target as usize];
        let is_reached = target.fd.is_some() || target.lane.is_some();
        if part.route == Route::Unasked && is_reached && !target.store.is_plain() {
            return self.carry_out_in_pieces(index);
        }
        if part.is_foreign {
            self.bounce(index);
        }
        let part = &mut self.parts[index as usize];
        let target = &self.targets[part.target as usize];
        if !self.link.is_some() || target.never_blocks {
            self.stats.inline_parts += 1;
            // SAFETY: as above, and the part is not in the ring: it never was, or its answer was
            // taken. It no longer names memory of another process.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { part.run_blocking(target) }));
            let result = result.unwrap_or_else(|_| Err(panicked(target)));
            self.bounce_back(index, &result);
            return self.part_ended(index, result);
        }
        let (memory, fills) = (part.memory(), part.fills());
        let holder = self.slots.get(part.slot);
        if memory.len_bytes > 0 {
            if holder.clashes(memory, fills) {
                return self.part_ended(index, Err(overlapping_parts()));
            }
            holder.lend(memory, fills);
        }
        self.tickets += 1;
        // SAFETY: the memory is as for the ring, and initialised. The slot keeps it until
        // `loan_ended`, or leaks it. It overlaps no conflicting loan, and nothing accesses the
        // slot's other memory meanwhile.
        let loan = unsafe { Loan::new(memory, fills, index, &self.externals) };
        if let Some(lane) = part.fits_lane(target) {
            part.carrier = Carrier::Lane;
            self.stats.lane_parts += 1;
            self.lane_parts += 1;
            let op = part.lane_op();
            let open = &mut self.lanes[lane.number as usize];
            open.parts += 1;
            open.is_due = true;
            open.lane.start(op, loan);
        } else {
            part.carrier = Carrier::Pool;
            self.stats.pool_parts += 1;
            let (part, target) = (*part, target.clone());
            pool::run(Box::new(move || {
                let mut loan = loan;
                let result = part.run_with(&target, &mut loan);
                // Dropped before the engine learns of the completion, after which the caller may
                // expect the store to be closed.
                drop(target);
                loan.complete(result);
            }));
        }
        if matches!(self.link, Link::Shared(_)) {
            // As for tickets: another user of the ring may be the next to sleep on it.
            let _ = self.listen();
        }
    }

    #[inline]
    fn answered(&mut self, index: u32, answer: i32) {
        self.in_ring -= 1;
        let part = &mut self.parts[index as usize];
        let target = &self.targets[part.target as usize];
        // SAFETY: the slot keeps the memory, and the answer means that the kernel no longer uses
        // it.
        match unsafe { part.judge(answer, target) } {
            Verdict::Done(result) => {
                let result = part.settle(result, target);
                self.part_ended(index, result);
            }
            Verdict::Again => self.carry_out(index, false),
            Verdict::Block => self.carry_out(index, true),
        }
    }

    #[inline]
    pub(super) fn part_ended(&mut self, index: u32, result: io::Result<()>) {
        if self.parts[index as usize].copy_of.is_some() {
            return self.copy_ended(index, result);
        }
        self.free_parts.push(index);
        self.slots.let_go(self.parts[index as usize].slot, result);
    }
}

/// The error of a part whose store panicked in the engine's own thread. The panic fails that part;
/// the thread's other requests go on.
#[cold]
fn panicked(target: &Target) -> io::Error {
    let name = target.store.name().display();
    io::Error::other(format!("{name}: internal error: the request failed; report the panic message on standard error"))
}
