//! The engine at work: starting parts, waiting for answers, joining them to the ends of requests.
//!
//! ```text
//!   start ─▶ carry_out ─▶ ring ─▶ answer ─▶ judge ─┬─▶ part_ended ─▶ the slot lets go
//!               │  ▲                               └─▶ again, or by a blocking call
//!               │  └───────────────────────────────────────┘
//!               └─▶ run_blocking ─▶ part_ended
//! ```
//!
//! Answers come from the engine's own ring, or from its mailbox at a shared one. Tickets that other threads hold ring an eventfd, which
//! the ring polls while there are any.

#![allow(unsafe_code)]

use super::Engine;
use crate::{
    link::Link,
    part::{Part, Verdict},
    ring::{Answer, WAKE},
};
use std::{io, mem};

impl Engine {
    /// Submits everything, and works until `wanted` requests are ready.
    pub(super) fn work_until(&mut self, wanted: usize) -> io::Result<()> {
        self.take_tickets();
        match self.link {
            Link::None => {
                while self.slots.ended() < wanted {
                    self.externals.wait();
                    self.take_tickets();
                }
                Ok(())
            }
            Link::Own(_) => self.work_alone_until(wanted),
            Link::Shared(_) => self.work_among_others_until(wanted),
        }
    }

    fn work_alone_until(&mut self, wanted: usize) -> io::Result<()> {
        self.take_answers();
        let mut looked = false;
        loop {
            let missing = wanted.saturating_sub(self.slots.ended());
            let Link::Own(ring) = &mut self.link else { return Ok(()) };
            if missing == 0 && ring.unsubmitted() == 0 && (looked || !ring.has_task_work()) {
                return Ok(());
            }
            // Each request that is missing brings an answer of its own, but one bell may ring for many tickets.
            let wait_for = if self.tickets == 0 { missing } else { missing.min(1) };
            if wait_for > 0 && self.listen_for_tickets()? {
                continue;
            }
            let Link::Own(ring) = &mut self.link else { return Ok(()) };
            ring.enter(wait_for)?;
            looked = true;
            self.take_answers();
        }
    }

    fn work_among_others_until(&mut self, wanted: usize) -> io::Result<()> {
        self.take_answers();
        loop {
            // Also when nothing is waited for: the next to wait is somebody else, who cannot know of our tickets.
            self.listen_for_tickets()?;
            let Link::Shared(member) = &self.link else { return Ok(()) };
            if self.slots.ended() >= wanted {
                return Ok(());
            }
            member.wait()?;
            self.take_answers();
        }
    }

    /// Sees to it that the ring hears of tickets, if there are any. Says whether it had to.
    pub(super) fn listen_for_tickets(&mut self) -> io::Result<bool> {
        if self.tickets == 0 || self.polling {
            return Ok(false);
        }
        let (eventfd, user_data) = (self.externals.eventfd()?, self.user_bits | u64::from(WAKE));
        self.link.with(|ring| ring.poll(eventfd, user_data)).transpose()?;
        self.polling = true;
        // What ended before there was an eventfd did not ring it.
        self.take_tickets();
        Ok(true)
    }

    fn take_answers(&mut self) {
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
        if number == WAKE {
            self.polling = false;
            self.externals.silence();
            self.take_tickets();
        } else {
            self.answered(number, answer);
        }
    }

    fn take_tickets(&mut self) {
        if self.tickets == 0 {
            return;
        }
        let mut ended = mem::take(&mut self.ended_tickets);
        self.externals.take(&mut ended);
        for (slot, result) in ended.drain(..) {
            self.tickets -= 1;
            self.slots.let_go(slot, result);
        }
        self.ended_tickets = ended;
    }

    #[inline]
    pub(super) fn start(&mut self, part: Part) {
        self.stats.parts += 1;
        self.slots.hold(part.slot);
        let index = match self.free_parts.pop() {
            Some(index) => {
                self.parts[index as usize] = part;
                index
            }
            None => {
                self.parts.push(part);
                u32::try_from(self.parts.len() - 1).expect("more parts in flight than memory could hold")
            }
        };
        self.carry_out(index, false);
    }

    /// Gives a part to the ring, or does it here.
    #[inline]
    fn carry_out(&mut self, index: u32, block: bool) {
        let part = &self.parts[index as usize];
        let target = &self.targets[part.target as usize];
        let user_data = self.user_bits | u64::from(index);
        let by_ring = !block && part.fits_ring(target);
        // SAFETY: the part fits. Its memory is its slot's buffer, memory the slot shares, or static zeros; the slot keeps it
        // and lets nobody reach it until the part has ended, which is when its answer has been taken. `registered`
        // was set from the slab that the ring has registered. Reads are made of the slot's own buffer only.
        let start = |ring: &mut crate::ring::Ring| unsafe { ring.start(part, target, user_data) };
        let started = if by_ring { self.link.with(start) } else { None };
        let result = match started {
            Some(Ok(())) => {
                self.in_ring += 1;
                return;
            }
            Some(Err(error)) => Err(error),
            None => {
                self.stats.inline_parts += 1;
                // SAFETY: as above, and the part is not in the ring: it never was, or its answer has been taken.
                unsafe { part.run_blocking(target) }
            }
        };
        self.part_ended(index, result);
    }

    #[inline]
    fn answered(&mut self, index: u32, answer: i32) {
        self.in_ring -= 1;
        let part = &mut self.parts[index as usize];
        let target = &self.targets[part.target as usize];
        // SAFETY: the slot keeps the memory, and the answer says that the kernel has done with it.
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
    fn part_ended(&mut self, index: u32, result: io::Result<()>) {
        self.free_parts.push(index);
        self.slots.let_go(self.parts[index as usize].slot, result);
    }

    fn wait_for_an_answer(&mut self) -> io::Result<()> {
        match &mut self.link {
            Link::None => {}
            Link::Own(ring) => ring.enter(1)?,
            Link::Shared(member) => member.wait()?,
        }
        self.take_answers();
        Ok(())
    }

    /// Waits for all parts and tickets, and for the poll on a ring that stays.
    fn settle(&mut self) -> io::Result<()> {
        // A request that was never ended keeps its parts, so what is waited for here is parts and tickets.
        while self.in_ring > 0 || self.tickets > 0 {
            if self.in_ring > 0 {
                self.wait_for_an_answer()?;
            } else {
                self.externals.wait();
                self.take_tickets();
            }
        }
        while self.polling && matches!(self.link, Link::Shared(_)) {
            self.externals.ring_the_bell();
            self.wait_for_an_answer()?;
        }
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let settled = self.settle();
        if settled.is_err() {
            // The kernel may still write to the buffers, and nothing can tell when it has ended: they are left to it.
            self.slots.leak();
        }
        if let Link::Shared(member) = &mut self.link {
            for target in &self.targets {
                if let Some(index) = target.file_index {
                    member.ring().unregister_file(index);
                }
            }
            if settled.is_err() {
                member.abandon();
            }
        }
    }
}
