//! Messages for a thread that sleeps in its ring: a list of messages, and an eventfd to wake it.
//!
//! ```text
//!   put ─▶ messages (under a lock that is held for a push or a swap)
//!     └──▶ eventfd ─▶ the ring's read of it completes ─▶ take ─▶ all messages
//! ```
//!
//! The front thread of a server passes clients or rings to the workers this way, and the thread
//! that stops the server tells the front and the workers. The eventfd is written after the message
//! was added, so a thread that was woken finds the message. One wake-up may stand for several
//! messages, or for none if they were taken already. So a woken thread takes all messages, and an
//! empty list is normal.

use rustix::event::EventfdFlags;
use std::{
    io,
    os::fd::OwnedFd,
    sync::{Mutex, PoisonError},
};

/// The messages of one thread.
#[derive(Debug)]
pub(crate) struct Inbox<M> {
    messages: Mutex<Vec<M>>,
    wakeup: OwnedFd,
}

impl<M> Inbox<M> {
    pub(crate) fn new() -> io::Result<Self> {
        let wakeup = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { messages: Mutex::new(Vec::new()), wakeup })
    }

    pub(crate) fn put(&self, message: M) {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).push(message);
        // The write fails only if the counter is full, and then the thread is being woken already.
        let _ = rustix::io::write(&self.wakeup, &1u64.to_ne_bytes());
    }

    pub(crate) fn take(&self) -> Vec<M> {
        std::mem::take(&mut *self.messages.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A duplicate of the eventfd, for a ring to read.
    pub(crate) fn wakeup(&self) -> io::Result<OwnedFd> {
        Ok(rustix::io::fcntl_dupfd_cloexec(&self.wakeup, 0)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_their_order_and_wake_the_thread() {
        let inbox = Inbox::new().unwrap();
        let wakeup = inbox.wakeup().unwrap();
        let mut rings = [0; 8];
        assert!(rustix::io::read(&wakeup, &mut rings).is_err(), "no wake-up before the first message");
        inbox.put(1);
        inbox.put(2);
        rustix::io::read(&wakeup, &mut rings).unwrap();
        assert_eq!(u64::from_ne_bytes(rings), 2);
        assert_eq!(inbox.take(), [1, 2]);
        assert!(
            inbox.take().is_empty() && rustix::io::read(&wakeup, &mut rings).is_err(),
            "each message is taken once"
        );
    }
}
