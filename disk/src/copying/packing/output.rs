//! A file that is written from its front to its end, by large aligned writes.
//!
//! Bytes are gathered in one buffer and written when it is full, so that O_DIRECT moves them
//! without a copy. The file grows by the writes alone: a file system that is full fails the write
//! that does not fit.

use diskwright_store::{IoBuf, Store};
use ring::digest::{Context, Digest};
use std::{io, sync::Arc};

/// Length of the buffer, and of a write.
const BUFFER_BYTES: usize = 1 << 20;

/// The end of a file that grows.
pub(crate) struct Output {
    store: Arc<dyn Store>,
    buf: IoBuf,
    filled: usize,
    /// Offset in the file of the front of the buffer: a multiple of its length after the first
    /// write.
    offset_bytes: u64,
    digest: Option<Context>,
}

impl Output {
    /// Appends to `store` from `offset_bytes` on, and computes the digest of what is appended, if
    /// there is one.
    pub(crate) fn new(store: Arc<dyn Store>, offset_bytes: u64, digest: Option<Context>) -> Self {
        Self { store, buf: IoBuf::new(BUFFER_BYTES), filled: 0, offset_bytes, digest }
    }

    pub(crate) fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let room = BUFFER_BYTES - (self.offset_bytes % BUFFER_BYTES as u64) as usize - self.filled;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.buf[self.filled..self.filled + now.len()].copy_from_slice(now);
            self.filled += now.len();
            bytes = later;
            if now.len() == room {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Writes what is gathered, and returns the end of the file.
    pub(crate) fn flush(&mut self) -> io::Result<u64> {
        if self.filled > 0 {
            let bytes = &self.buf[..self.filled];
            if let Some(digest) = &mut self.digest {
                digest.update(bytes);
            }
            self.store.write_at(bytes, self.offset_bytes)?;
            self.offset_bytes += self.filled as u64;
            self.filled = 0;
        }
        Ok(self.offset_bytes)
    }

    /// The digest of everything that was flushed, once.
    pub(crate) fn take_digest(&mut self) -> Option<Digest> {
        self.digest.take().map(Context::finish)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::MemoryStore;

    #[test]
    fn bytes_are_appended_in_pieces_of_any_length() {
        let store = Arc::new(MemoryStore::with_bytes("x", vec![9; 700]));
        let mut output = Output::new(store.clone(), 512, Some(Context::new(&ring::digest::SHA256)));
        let bytes: Vec<u8> = (0..5_000_000_u32).map(|index| (index % 251) as u8).collect();
        let mut rest = &bytes[..];
        for len in [1, 511, 1 << 20, 3, 0, 2_500_000].into_iter().chain([usize::MAX]) {
            let (now, later) = rest.split_at(len.min(rest.len()));
            output.append(now).unwrap();
            rest = later;
        }
        assert_eq!(output.flush().unwrap(), 512 + bytes.len() as u64);
        let expected = ring::digest::digest(&ring::digest::SHA256, &bytes);
        assert_eq!(output.take_digest().unwrap().as_ref(), expected.as_ref());
        let written = store.to_vec();
        assert_eq!((&written[..512], &written[512..]), (&[9; 512][..], &bytes[..]));
    }

    #[test]
    fn a_full_store_fails() {
        let store = Arc::new(MemoryStore::new("x"));
        store.limit(2 << 20);
        let mut output = Output::new(store, 0, None);
        assert!(output.append(&vec![1; 2 << 20]).is_ok());
        let full = output.append(&vec![1; 1 << 20]).and_then(|()| output.flush()).unwrap_err();
        assert!(diskwright_store::is_full(&full), "{full}");
    }
}
