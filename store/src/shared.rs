//! A ring that several users on one thread share: the queues of some disks, and the streams by
//! which others reach them.
//!
//! ```text
//!   Engine ──┐  push                                   ┌─▶ mailbox of the engine   ─▶ Engine::reap(0)
//!   Engine ──┼────────▶ Ring ── one io_uring_enter ──▶ ├─▶ mailbox of the engine
//!   Streams ─┘                                         └─▶ mailbox of the streams  ─▶ Streams::reap
//! ```
//!
//! A user joins as a [`Member`] and gets a number, which stands in the upper half of the
//! `user_data` of all its entries. [`SharedRing::wait`] submits what all of them pushed, sleeps
//! until there is an answer to any of them, and sorts the answers into their mailboxes. Each user
//! looks into its own when it is next reaped.
//!
//! Everything here belongs to one thread (`Rc`, no lock). Invariants: neither the ring nor the
//! mailboxes stay borrowed when a method returns, so users may call in any order; a number is given
//! out again only when nothing of its last holder is in flight, for members wait for that before
//! they go.

use crate::{
    Slab,
    ring::{Answer, Ring},
};
use std::{
    cell::{RefCell, RefMut},
    io, mem,
    rc::Rc,
    time::Duration,
};

/// An answer as its user sees it: the number that the user gave its entry, and the result.
pub(crate) type Mail = (u32, i32);

/// One io_uring for everything that a thread drives. Clones are the same ring.
///
/// The order of a turn: [`wait`](Self::wait), reap every user, act on what came, reap once more the
/// users that were pushed to (a request may end at once, without the ring), and wait again.
#[derive(Debug, Clone)]
pub struct SharedRing {
    hub: Rc<Hub>,
}

#[derive(Debug)]
struct Hub {
    ring: RefCell<Ring>,
    /// The ring's, where it can be looked at without borrowing the ring.
    slab: Option<Slab>,
    mailboxes: RefCell<Mailboxes>,
}

#[derive(Debug, Default)]
struct Mailboxes {
    mail: Vec<Vec<Mail>>,
    free: Vec<u32>,
    /// In all of them together.
    undelivered: usize,
}

impl SharedRing {
    /// A ring for about `depth` operations at a time. Buffers of `slab` are registered with the
    /// kernel where it takes them.
    ///
    /// # Errors
    /// What the kernel says where it gives no io_uring, or one without time limits (before Linux
    /// 5.11). There is no way round it as there is for an [`Engine`](crate::Engine) of its own.
    pub fn new(depth: usize, slab: Option<&Slab>) -> io::Result<Self> {
        let ring = Ring::new(depth, slab)?;
        if !ring.can_time_out() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's io_uring cannot limit the time of waiting; it needs Linux 5.11",
            ));
        }
        let slab = ring.slab().cloned();
        Ok(Self { hub: Rc::new(Hub { ring: RefCell::new(ring), slab, mailboxes: RefCell::default() }) })
    }

    /// Submits everything that its users pushed, and waits until there is an answer to any of them.
    /// It does not sleep while a mailbox holds something that its user has not seen. It may return
    /// early, with nothing.
    ///
    /// With nothing in flight it waits for ever: a loop always has a receive, an accept or a timer
    /// under way.
    ///
    /// # Errors
    /// The ring itself has failed.
    pub fn wait(&self) -> io::Result<()> {
        self.hub.work(Patience::UntilAnswer(None))
    }

    /// As [`SharedRing::wait`], but never sleeps: for a thread that has work left, and wants to
    /// have begun what it pushed so far.
    ///
    /// # Errors
    /// The ring itself has failed.
    pub fn go_on(&self) -> io::Result<()> {
        self.hub.work(Patience::None)
    }

    /// As [`SharedRing::wait`], for no longer than `timeout`.
    ///
    /// # Errors
    /// The ring itself has failed. That the time is over is no error.
    pub fn wait_for(&self, timeout: Duration) -> io::Result<()> {
        self.hub.work(Patience::UntilTime(timeout))
    }

    /// Queues, engines and streams that are on it.
    pub fn users(&self) -> usize {
        let mailboxes = self.hub.mailboxes.borrow();
        mailboxes.mail.len() - mailboxes.free.len()
    }

    /// Calls of `io_uring_enter` so far.
    pub fn enters(&self) -> u64 {
        self.hub.ring.borrow().enters
    }
}

/// How long to wait.
#[derive(Clone, Copy)]
enum Patience {
    /// Not at all.
    None,
    /// Until there is an answer to this user, or to anybody.
    UntilAnswer(Option<u32>),
    /// Until there is an answer to anybody, or the time is over.
    UntilTime(Duration),
}

impl Hub {
    /// Submits, waits if there is nothing yet, and sorts the answers.
    fn work(&self, patience: Patience) -> io::Result<()> {
        let mut ring = self.ring.borrow_mut();
        let mut mailboxes = self.mailboxes.borrow_mut();
        let may_sleep = match patience {
            Patience::None => false,
            Patience::UntilAnswer(Some(number)) => mailboxes.mail[number as usize].is_empty(),
            Patience::UntilAnswer(None) | Patience::UntilTime(_) => mailboxes.undelivered == 0,
        };
        let entered = if may_sleep && !ring.has_answers() {
            match patience {
                Patience::UntilTime(timeout) => ring.enter_for(1, timeout),
                _ => ring.enter(1),
            }
        } else if ring.unsubmitted() > 0 || ring.has_task_work() {
            ring.enter(0)
        } else {
            Ok(())
        };
        let mut answers: [Answer; 64] = [(0, 0); 64];
        loop {
            let taken = ring.take(&mut answers);
            for &(user_data, result) in &answers[..taken] {
                mailboxes.mail[(user_data >> 32) as usize].push((user_data as u32, result));
            }
            mailboxes.undelivered += taken;
            if taken < answers.len() {
                return entered;
            }
        }
    }
}

/// A user of a shared ring.
#[derive(Debug)]
pub(crate) struct Member {
    hub: Rc<Hub>,
    number: u32,
    /// Whether something of it may still be in flight: then its number is never given out again.
    abandoned: bool,
}

impl Member {
    pub(crate) fn join(ring: &SharedRing) -> Self {
        let mut mailboxes = ring.hub.mailboxes.borrow_mut();
        let number = mailboxes.free.pop().unwrap_or_else(|| {
            mailboxes.mail.push(Vec::new());
            u32::try_from(mailboxes.mail.len() - 1).expect("more users of a ring than memory could hold")
        });
        Self { hub: Rc::clone(&ring.hub), number, abandoned: false }
    }

    /// The ring. Give it back before anything else of the ring is called.
    #[inline]
    pub(crate) fn ring(&self) -> RefMut<'_, Ring> {
        self.hub.ring.borrow_mut()
    }

    /// The registered slab.
    pub(crate) fn slab(&self) -> Option<&Slab> {
        self.hub.slab.as_ref()
    }

    /// What stands in the upper half of this user's entries.
    pub(crate) fn user_bits(&self) -> u64 {
        u64::from(self.number) << 32
    }

    /// Takes this user's answers, by exchanging its mailbox for `empty`.
    #[inline]
    pub(crate) fn take(&self, empty: &mut Vec<Mail>) {
        let mut mailboxes = self.hub.mailboxes.borrow_mut();
        mem::swap(&mut mailboxes.mail[self.number as usize], empty);
        mailboxes.undelivered -= empty.len();
    }

    /// Submits, and sleeps until there is an answer to anybody, unless there is one for this user
    /// already.
    pub(crate) fn wait(&self) -> io::Result<()> {
        self.hub.work(Patience::UntilAnswer(Some(self.number)))
    }

    /// Submits, and sorts what has come, without sleeping.
    pub(crate) fn go_on(&self) -> io::Result<()> {
        self.hub.work(Patience::None)
    }

    /// Says that something of this user may stay in flight for good.
    pub(crate) fn abandon(&mut self) {
        self.abandoned = true;
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if !self.abandoned {
            let mut mailboxes = self.hub.mailboxes.borrow_mut();
            let unseen = mem::take(&mut mailboxes.mail[self.number as usize]).len();
            mailboxes.undelivered -= unseen;
            mailboxes.free.push(self.number);
        }
    }
}
