//! A range of a request's memory, lent to another thread or to a [`Lane`](crate::Lane) until the
//! part has ended.
//!
//! ```text
//!   Engine ── lend(part) ──▶ Loan { memory, promise } ──▶ a lane, or a thread of the pool
//!      ▲                                  │ complete(result), or drop
//!      └── list of ended loans, eventfd ◀─┘
//! ```
//!
//! One object holds the memory and the promise to end the part. Ending the part gives the memory
//! back, so the borrower cannot use it afterwards.
//!
//! Invariants:
//! - The request's slot keeps the memory until the loan has completed. An engine that gives up a
//!   loan (see [`Engine::finish`](crate::Engine::finish)) leaks the memory, so a late access still
//!   hits valid bytes.
//! - No two loans of one request overlap if one of them writes. The slot checks this when it lends.
//! - A loan of a write never gives `&mut` access: several parts may share its bytes.

#![allow(unsafe_code)]

use super::span::Span;
use crate::external::{Externals, Origin};
use std::{io, sync::Arc};

/// Memory lent for one part. If a loan is dropped without [`Loan::complete`], its part ends with an
/// error.
#[derive(Debug)]
#[must_use = "a loan that is dropped fails its part"]
pub struct Loan {
    memory: Span,
    /// Whether the part reads from the store, and therefore writes to the memory.
    fills: bool,
    part: u32,
    externals: Arc<Externals>,
    sent: bool,
}

// SAFETY: only this loan reaches the memory (see the invariants), which stays alive until the loan
// has completed, or for ever. `Externals` is shared between threads.
unsafe impl Send for Loan {}
// SAFETY: `&Loan` gives `&[u8]` only.
unsafe impl Sync for Loan {}

impl Loan {
    /// Lends memory to the thread or lane that carries out part number `part`.
    ///
    /// # Safety
    /// The memory is initialised, and stays alive until the loan has completed or, if it never
    /// does, for ever. Until then no other code writes to it; if `fills`, no other code accesses it
    /// at all.
    pub(crate) unsafe fn new(memory: Span, fills: bool, part: u32, externals: &Arc<Externals>) -> Self {
        Self { memory, fills, part, externals: Arc::clone(externals), sent: false }
    }

    /// Length of the memory in bytes; 0 for a part without payload.
    pub fn len(&self) -> usize {
        self.memory.len_bytes
    }

    /// Whether the part has no payload.
    pub fn is_empty(&self) -> bool {
        self.memory.len_bytes == 0
    }

    /// Whether the part reads from the store. [`Loan::bytes_mut`] then gives the memory to fill.
    pub fn is_writable(&self) -> bool {
        self.fills
    }

    /// The payload of a write, or the bytes of a read filled in so far.
    pub fn bytes(&self) -> &[u8] {
        if self.is_empty() {
            return &[];
        }
        // SAFETY: alive, initialised, and written by no other code, as promised to `new`.
        unsafe { std::slice::from_raw_parts(self.memory.address, self.memory.len_bytes) }
    }

    /// The memory to fill. Empty for a loan of a write, whose bytes may be shared.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.is_empty() || !self.fills {
            return &mut [];
        }
        // SAFETY: alive, initialised, and accessed by no other code, as promised to `new`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.address, self.memory.len_bytes) }
    }

    /// Ends the part and returns the memory to the engine.
    pub fn complete(mut self, result: io::Result<()>) {
        self.sent = true;
        self.externals.put(Origin::Part(self.part), result);
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if !self.sent {
            let error = io::Error::other("the store dropped the request without a result");
            self.externals.put(Origin::Part(self.part), Err(error));
        }
    }
}
