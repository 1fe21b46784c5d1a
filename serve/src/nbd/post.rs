//! News for a thread that sleeps in its ring: a list of letters, and a bell.
//!
//! ```text
//!   put ─▶ letters (under a lock that is held for a push or a swap)
//!     └──▶ bell (an eventfd) ─▶ the receive that the ring has on it ends ─▶ take ─▶ all letters
//! ```
//!
//! The front hands clients over to its workers this way, and whoever stops the server tells the
//! front and the workers so. The bell is rung after the letter is on the list: a thread that has
//! heard it finds the letter. Several letters may be behind one ring, and one ring may be behind no
//! letter, where the list was taken in between; so all is taken each time, and an empty list means
//! nothing.

use super::{connection::Peer, handshake::TlsNeed};
use rustix::event::EventfdFlags;
use std::{
    io,
    os::fd::OwnedFd,
    sync::{Mutex, PoisonError},
};

/// What a thread is told.
#[derive(Debug)]
pub(crate) enum Letter {
    /// A client.
    Client(OwnedFd, Peer, TlsNeed),
    /// Finish, and leave.
    Stop,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Post {
    letters: Mutex<Vec<Letter>>,
    bell: OwnedFd,
}

impl Post {
    pub(crate) fn new() -> io::Result<Self> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { letters: Mutex::default(), bell })
    }

    pub(crate) fn put(&self, letter: Letter) {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner).push(letter);
        // It fails only when the counter is full, and then it is ringing already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    pub(crate) fn take(&self) -> Vec<Letter> {
        std::mem::take(&mut *self.letters.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Another descriptor of the bell, for a ring.
    pub(crate) fn bell(&self) -> io::Result<OwnedFd> {
        Ok(rustix::io::fcntl_dupfd_cloexec(&self.bell, 0)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_come_in_their_order_and_the_bell_rings_for_them() {
        let post = Post::new().unwrap();
        let bell = post.bell().unwrap();
        let mut rings = [0; 8];
        assert!(rustix::io::read(&bell, &mut rings).is_err(), "it is silent before there is a letter");
        let client = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        post.put(Letter::Client(client, Peer::Unix(None), TlsNeed::No));
        post.put(Letter::Stop);
        rustix::io::read(&bell, &mut rings).unwrap();
        assert_eq!(u64::from_ne_bytes(rings), 2);
        assert!(matches!(post.take()[..], [Letter::Client(..), Letter::Stop]));
        assert!(post.take().is_empty() && rustix::io::read(&bell, &mut rings).is_err(), "told once");
    }
}
