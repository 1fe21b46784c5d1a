//! What a protocol does for a queue: it encodes commands and understands headers.
//!
//! A protocol keeps the state of its connection: digests, limits, numbers of commands. It is never
//! given the socket. What it wants to send goes to the [`Outbound`].

use super::{Calls, Connection, ConnectionError};
use crate::{Operation, Outbound};
use std::{fmt, io};

/// Data of a read that follow a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Data {
    /// The id of the call.
    pub call: u16,
    /// Where they begin in the call's payload.
    pub start: usize,
    /// Where they end.
    pub end: usize,
    /// Bytes that follow the data: padding and digest.
    pub tail_bytes: usize,
}

/// A header that was understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heard {
    /// Its length, with everything that belongs to it and is not data of a read.
    pub taken_bytes: usize,
    /// The data that follow.
    pub data: Option<Data>,
}

/// Why nothing more can be received on a connection.
#[derive(Debug)]
pub enum Broken {
    /// How the server violated the protocol, as the end of a sentence.
    Violation(String),
    /// Why the server ends the connection, as it may.
    Ended(String),
}

impl From<String> for Broken {
    fn from(what: String) -> Self {
        Self::Violation(what)
    }
}

/// A protocol; see the module documentation.
pub trait Protocol: fmt::Debug {
    /// Refuses operations that the server does not support.
    ///
    /// # Errors
    /// Why it is not supported.
    fn check(&self, operation: Operation) -> io::Result<()>;

    /// Maximum length of the range of one call in bytes.
    fn call_bytes_max(&self, operation: Operation) -> u64;

    /// Whether the server takes one more command now.
    fn may_begin(&self) -> bool {
        true
    }

    /// Queues the command of a call, and the payload that goes with it at once.
    fn begin(&mut self, id: u16, calls: &mut Calls, outbound: &mut Outbound);

    /// Decodes the header that `staged` begins with, and acts on it. Returns `None` if more bytes
    /// are needed.
    ///
    /// # Errors
    /// Nothing more is received.
    fn header(&mut self, staged: &[u8], calls: &mut Calls, outbound: &mut Outbound) -> Result<Option<Heard>, Broken>;

    /// Data were received, and are followed by `tail`.
    ///
    /// # Errors
    /// As [`Protocol::header`].
    fn data_received(
        &mut self,
        data: &Data,
        tail: &[u8],
        calls: &mut Calls,
        outbound: &mut Outbound,
    ) -> Result<(), Broken>;

    /// Opens a new connection in place of one that broke while no call was in flight and no write
    /// was waiting for a flush. Returns `None` if the protocol cannot.
    fn reopen(&mut self) -> Option<Result<Connection, ConnectionError>> {
        None
    }
}
