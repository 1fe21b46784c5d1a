//! Big-endian fields, read one after the other from the front of a slice. A read beyond the end
//! returns `None`.

use super::{STRING_BYTES_MAX, WireError};

/// The unread rest of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*front)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    pub(super) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(front)
    }

    /// Reads a string preceded by its 32-bit length.
    pub(super) fn string(&mut self, what: &'static str) -> Result<&'a str, WireError> {
        let len = self.u32().ok_or(WireError::Length { what, found: 0, expected: "a length field of 4 bytes" })?;
        let found = self.0.len() as u64;
        let bytes = self.take(len as usize).ok_or(WireError::Length {
            what,
            found,
            expected: "the number of bytes in its length field",
        })?;
        text(bytes, what)
    }
}

/// Checks that bytes are a string as the protocol allows it.
pub(super) fn text<'a>(bytes: &'a [u8], what: &'static str) -> Result<&'a str, WireError> {
    let text = std::str::from_utf8(bytes).map_err(|_| WireError::Text { what })?;
    if text.len() > STRING_BYTES_MAX || text.contains('\0') { Err(WireError::Text { what }) } else { Ok(text) }
}

/// Appends a string preceded by its 32-bit length. Callers pass only short strings of our own.
pub(super) fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u32).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}
