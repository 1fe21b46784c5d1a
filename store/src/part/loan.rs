//! A piece of a request's memory, lent to another thread or to a [`Lane`](crate::Lane) until the
//! part has ended.
//!
//! ```text
//!   Engine ── lend(part) ──▶ Loan { memory, promise } ──▶ a lane, or a thread of the pool
//!      ▲                                  │ complete(result), or drop
//!      └── ended list, bell ◀─────────────┘
//! ```
//!
//! The memory and the promise to end the part are one object. To end the part is to give the memory
//! back, so nobody can use the memory afterwards.
//!
//! Invariants:
//! - The request's slot keeps the memory until the loan has come back. An engine that gives a loan
//!   up (see [`Engine::finish`](crate::Engine::finish)) leaks the memory: a late use still hits
//!   valid bytes.
//! - No two loans of one request overlap where one of them writes. The slot checks this when it
//!   lends.
//! - A loan of a write never gives out `&mut` access: its bytes may be shared by several parts.

#![allow(unsafe_code)]

use super::Span;
use crate::external::{Externals, Whose};
use std::{io, sync::Arc};

/// See the module. Dropped without [`Loan::complete`], the part ends with an error.
#[derive(Debug)]
#[must_use = "a loan that is dropped fails its part"]
pub struct Loan {
    memory: Span,
    /// Whether the part reads from the store, and so writes into the memory.
    fills: bool,
    part: u32,
    externals: Arc<Externals>,
    sent: bool,
}

// SAFETY: the memory is reached through this loan only (see the invariants), and stays alive until
// the loan has come back, or for ever. `Externals` is shared between threads anyway.
unsafe impl Send for Loan {}
// SAFETY: `&Loan` gives `&[u8]` only.
unsafe impl Sync for Loan {}

impl Loan {
    /// Lends memory to whoever carries out part number `part`.
    ///
    /// # Safety
    /// The memory is initialised and stays alive until the loan has come back or, if it never does,
    /// for ever. Until then nobody else writes to it; where `fills`, nobody else reaches it at all.
    pub(crate) unsafe fn new(memory: Span, fills: bool, part: u32, externals: &Arc<Externals>) -> Self {
        Self { memory, fills, part, externals: Arc::clone(externals), sent: false }
    }

    /// Length of the piece in bytes. 0 for a part that moves no payload.
    pub fn len(&self) -> usize {
        self.memory.len_bytes
    }

    /// Whether the piece has no bytes.
    pub fn is_empty(&self) -> bool {
        self.memory.len_bytes == 0
    }

    /// Whether the part reads from the store: then [`Loan::bytes_mut`] gives the place to fill.
    pub fn is_writable(&self) -> bool {
        self.fills
    }

    /// The bytes: the payload of a write, or what has been filled in so far of a read.
    pub fn bytes(&self) -> &[u8] {
        if self.is_empty() {
            return &[];
        }
        // SAFETY: alive, initialised, and written by nobody else, as promised to `new`.
        unsafe { std::slice::from_raw_parts(self.memory.address, self.memory.len_bytes) }
    }

    /// The bytes to fill. Empty for a loan of a write, whose bytes may be shared.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.is_empty() || !self.fills {
            return &mut [];
        }
        // SAFETY: alive, initialised, and reached by nobody else, as promised to `new`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.address, self.memory.len_bytes) }
    }

    /// Ends the part and gives the memory back.
    pub fn complete(mut self, result: io::Result<()>) {
        self.sent = true;
        self.externals.put(Whose::Part(self.part), result);
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if !self.sent {
            let error = io::Error::other("the store gave the request up without a result");
            self.externals.put(Whose::Part(self.part), Err(error));
        }
    }
}
