//! The thread that makes metadata durable.
//!
//! A flush with nothing but payload to write is one fdatasync in the queue's own ring. A flush with metadata takes several
//! steps that must wait for each other (payload, log entry, tables); those block, so they are done here, and the queue
//! goes on. Everybody who asks while a cycle is under way is answered together by the next one.
//!
//! The thread is started by the first flush that needs it, holds only a weak reference to the disk, and ends with it.

use crate::device::Shared;
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::{
    ExternalTicket,
    sync::{
        mpsc::{Receiver, Sender, channel},
        thread,
    },
};
use std::{
    io,
    sync::{Arc, OnceLock, Weak},
};

/// The way to the thread.
#[derive(Debug, Default)]
pub(crate) struct Flusher {
    sender: OnceLock<Sender<ExternalTicket>>,
}

impl Flusher {
    /// Asks for a flush; the ticket is completed when it is done.
    pub(crate) fn request(&self, shared: &Arc<Shared>, ticket: ExternalTicket) {
        if self.sender.get().is_none() {
            let (sender, receiver) = channel();
            // Of several who are here at once, one starts the thread.
            if self.sender.set(sender).is_ok() {
                let disk = Arc::downgrade(shared);
                // Should it not start, the receiver is dropped with the closure, and sending fails below.
                let _ = thread::Builder::new().name("flusher".into()).spawn(move || run(&disk, &receiver));
            }
        }
        let unsent = match self.sender.get().map(|sender| sender.send(ticket)) {
            Some(Err(unsent)) => unsent.0,
            Some(Ok(())) | None => return,
        };
        unsent.complete(shared.flush_blocking());
    }
}

fn run(disk: &Weak<Shared>, receiver: &Receiver<ExternalTicket>) {
    while let Ok(first) = receiver.recv() {
        let mut waiting = vec![first];
        waiting.extend(receiver.try_iter());
        let result = match disk.upgrade() {
            Some(shared) => shared.flush_blocking(),
            None => Err(io::Error::other("the disk was closed before it was flushed")),
        };
        #[cfg(feature = "shuttle")]
        if is_broken(Rule::AnsweredByALaterCycle) {
            waiting.extend(receiver.try_iter());
        }
        for ticket in waiting {
            ticket.complete(same(&result));
        }
    }
}

/// The same result once more: errors cannot be cloned, but their kind and words can.
fn same(result: &io::Result<()>) -> io::Result<()> {
    match result {
        Ok(()) => Ok(()),
        Err(error) => match error.raw_os_error() {
            Some(code) => Err(io::Error::from_raw_os_error(code)),
            None => Err(io::Error::new(error.kind(), error.to_string())),
        },
    }
}
