//! Whether writes that a server has answered may be lost.
//!
//! A server that dies takes along what it has answered and not flushed. If the client connected to
//! the next server as if nothing had happened, its next flush would succeed, and nobody would ever
//! know. So after such a reconnection every later flush fails, until the export is opened again.
//!
//! ```text
//!   write answered ─▶ answered + 1       flush answered ─▶ flushed = answered when it was sent
//!   a new connection, answered > flushed:   the same server ─▶ nothing is lost
//!                                           another one, or unknown after a break ─▶ lost
//! ```
//!
//! A server tells its id by a metadata context ([`CONTEXT_SERVER`](crate::wire::CONTEXT_SERVER)).
//! Other programs do not, so with them every connection that broke counts as a server that has
//! died. All connections of a device share one [`Answered`], because a flush on one covers the
//! writes of all.

use crate::wire::{Command, CommandFlags};
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

/// What servers have answered to a device.
#[derive(Debug, Default)]
pub(super) struct Answered {
    /// The id of the server of the last connection, if it told one.
    server: Mutex<Option<String>>,
    /// Changes of the export that were answered.
    answered: AtomicU64,
    /// How many of those a flush has covered.
    flushed: AtomicU64,
    /// Whether a connection broke since the last one was made.
    broke: AtomicBool,
    lost: AtomicBool,
}

impl Answered {
    /// Nothing yet, from the server of the first connection.
    pub(super) fn by(server: Option<String>) -> Self {
        Self { server: Mutex::new(server), ..Self::default() }
    }

    /// What a flush that is sent now will cover.
    pub(super) fn so_far(&self) -> u64 {
        self.answered.load(Ordering::Acquire)
    }

    /// Takes the success of a call into account. `covers` is that of a flush. Call before the
    /// request completes.
    pub(super) fn add(&self, command: Command, flags: CommandFlags, covers: u64) {
        match command {
            Command::WRITE | Command::WRITE_ZEROES | Command::TRIM if !flags.contains(CommandFlags::FUA) => {
                self.answered.fetch_add(1, Ordering::AcqRel);
            }
            Command::FLUSH => {
                self.flushed.fetch_max(covers, Ordering::AcqRel);
            }
            _ => {}
        }
    }

    /// A connection broke.
    pub(super) fn broke(&self) {
        self.broke.store(true, Ordering::Release);
    }

    /// A connection was made to the server with this id.
    pub(super) fn connected(&self, server: Option<&str>) {
        let mut known = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let may_be_another = match (known.as_deref(), server) {
            (Some(before), Some(now)) => before != now,
            _ => self.broke.load(Ordering::Acquire),
        };
        if may_be_another && self.so_far() > self.flushed.load(Ordering::Acquire) {
            self.lost.store(true, Ordering::Release);
        }
        *known = server.map(str::to_owned);
        self.broke.store(false, Ordering::Release);
    }

    /// Whether no flush may succeed any more.
    pub(super) fn are_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(answered: &Answered) {
        answered.add(Command::WRITE, CommandFlags::empty(), 0);
    }

    #[test]
    fn only_another_server_loses_what_was_not_flushed() {
        let answered = Answered::by(Some("a".into()));
        write(&answered);
        answered.broke();
        answered.connected(Some("a"));
        assert!(!answered.are_lost(), "the network broke");
        answered.add(Command::FLUSH, CommandFlags::empty(), answered.so_far());
        answered.add(Command::WRITE, CommandFlags::FUA, 0);
        answered.add(Command::READ, CommandFlags::empty(), 0);
        answered.connected(Some("b"));
        assert!(!answered.are_lost(), "everything was durable");
        let covers = answered.so_far();
        write(&answered);
        answered.add(Command::FLUSH, CommandFlags::empty(), covers);
        answered.connected(Some("c"));
        assert!(answered.are_lost(), "the flush was sent before the write was answered");
        answered.add(Command::FLUSH, CommandFlags::empty(), answered.so_far());
        answered.connected(Some("c"));
        assert!(answered.are_lost(), "for ever");
    }

    #[test]
    fn a_server_without_an_id_is_another_one_after_a_break() {
        let answered = Answered::by(None);
        write(&answered);
        answered.connected(None);
        assert!(!answered.are_lost(), "one more connection");
        answered.broke();
        answered.connected(None);
        assert!(answered.are_lost());
    }
}
