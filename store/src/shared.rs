//! A ring shared by several users on one thread: the queues of disks, and the streams of a server's
//! clients.
//!
//! ```text
//! Engine ──┐  push                                 ┌─▶ mailbox of the engine   ─▶ Engine::reap(0)
//! Engine ──┼──────▶ Ring ── one io_uring_enter ──▶ ├─▶ mailbox of the engine
//! Streams ─┘                                       └─▶ mailbox of the streams  ─▶ Streams::reap
//! ```
//!
//! A user joins as a [`Member`] and gets a number, which is the upper half of the `user_data` of
//! all its entries. [`SharedRing::wait`] submits what all users pushed, sleeps until any of them
//! has an answer, and sorts the answers into the mailboxes. Each user reads its own mailbox when it
//! is next reaped.
//!
//! Everything here belongs to one thread (`Rc`, no lock). Invariants: no method returns while it
//! borrows the ring or the mailboxes, so users may call in any order. A number is reused only when
//! no entry of its last holder is in flight, because members wait for that before they leave.

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

/// An answer as its user sees it: the number that the user chose for its entry, and the result.
pub(crate) type RingAnswer = (u32, i32);

/// One io_uring for everything that a thread drives. Clones share the ring.
///
/// In each turn of an event loop: [`wait`](Self::wait), reap every user, act on the completions,
/// reap again the users that were pushed to (a request may complete without the ring), and wait
/// again.
#[derive(Debug, Clone)]
pub struct SharedRing {
    hub: Rc<RingHub>,
}

#[derive(Debug)]
struct RingHub {
    ring: RefCell<Ring>,
    /// The ring's slab, readable without borrowing the ring.
    slab: Option<Slab>,
    mailboxes: RefCell<Mailboxes>,
}

#[derive(Debug, Default)]
struct Mailboxes {
    mail: Vec<Vec<RingAnswer>>,
    free: Vec<u32>,
    /// Number of entries in all mailboxes.
    undelivered: usize,
}

impl SharedRing {
    /// A ring for about `depth` operations in flight. Buffers of `slab` are registered with the
    /// kernel if it permits.
    ///
    /// # Errors
    /// The kernel's error, if it offers no io_uring, or one without timeouts (before Linux 5.11).
    /// Unlike an [`Engine`](crate::Engine) with a ring of its own, there is no fallback.
    pub fn new(depth: usize, slab: Option<&Slab>) -> io::Result<Self> {
        let ring = Ring::new(depth, slab)?;
        if !ring.can_time_out() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's io_uring cannot wait with a timeout; Linux 5.11 or later is needed",
            ));
        }
        let slab = ring.slab().cloned();
        Ok(Self { hub: Rc::new(RingHub { ring: RefCell::new(ring), slab, mailboxes: RefCell::default() }) })
    }

    /// Submits everything that the users pushed, and waits until any of them has an answer. Does
    /// not sleep while a mailbox holds an answer that its user has not taken. May return early,
    /// without an answer.
    ///
    /// If nothing is in flight, it waits for ever: an event loop must always have a receive, an
    /// accept or a timer in flight.
    ///
    /// # Errors
    /// The ring itself failed.
    pub fn wait(&self) -> io::Result<()> {
        self.hub.work(WaitFor::Answer(None))
    }

    /// As [`SharedRing::wait`], but never sleeps. For a thread that still has work and wants to
    /// submit what it has pushed so far.
    ///
    /// # Errors
    /// The ring itself failed.
    pub fn go_on(&self) -> io::Result<()> {
        self.hub.work(WaitFor::None)
    }

    /// As [`SharedRing::wait`], for at most `timeout`.
    ///
    /// # Errors
    /// The ring itself failed. A timeout is not an error.
    pub fn wait_for(&self, timeout: Duration) -> io::Result<()> {
        self.hub.work(WaitFor::Time(timeout))
    }

    /// Number of queues, engines and streams on the ring.
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
enum WaitFor {
    /// Not at all.
    None,
    /// Until this user, or if `None` any user, has an answer.
    Answer(Option<u32>),
    /// Until any user has an answer, or the timeout expires.
    Time(Duration),
}

impl RingHub {
    /// Submits, waits if there is no answer yet, and sorts the answers into the mailboxes.
    fn work(&self, wait_for: WaitFor) -> io::Result<()> {
        let mut ring = self.ring.borrow_mut();
        let mut mailboxes = self.mailboxes.borrow_mut();
        let may_sleep = match wait_for {
            WaitFor::None => false,
            WaitFor::Answer(Some(number)) => mailboxes.mail[number as usize].is_empty(),
            WaitFor::Answer(None) | WaitFor::Time(_) => mailboxes.undelivered == 0,
        };
        let entered = if may_sleep && !ring.has_answers() {
            match wait_for {
                WaitFor::Time(timeout) => ring.enter_for(1, timeout),
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
    hub: Rc<RingHub>,
    number: u32,
    /// Whether an entry of this user may still be in flight. Its number is then never reused.
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

    /// Borrows the ring. Drop the borrow before any other call on the shared ring.
    #[inline]
    pub(crate) fn ring(&self) -> RefMut<'_, Ring> {
        self.hub.ring.borrow_mut()
    }

    /// The registered slab.
    pub(crate) fn slab(&self) -> Option<&Slab> {
        self.hub.slab.as_ref()
    }

    /// The upper half of the `user_data` of this user's entries.
    pub(crate) fn user_bits(&self) -> u64 {
        u64::from(self.number) << 32
    }

    /// Takes this user's answers by swapping its mailbox with `empty`.
    #[inline]
    pub(crate) fn take(&self, empty: &mut Vec<RingAnswer>) {
        let mut mailboxes = self.hub.mailboxes.borrow_mut();
        mem::swap(&mut mailboxes.mail[self.number as usize], empty);
        mailboxes.undelivered -= empty.len();
    }

    /// Submits, and sleeps until any user has an answer, unless this user has one already.
    pub(crate) fn wait(&self) -> io::Result<()> {
        self.hub.work(WaitFor::Answer(Some(self.number)))
    }

    /// Submits, and sorts the answers that have come, without sleeping.
    pub(crate) fn go_on(&self) -> io::Result<()> {
        self.hub.work(WaitFor::None)
    }

    /// Records that entries of this user may stay in flight for good.
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
