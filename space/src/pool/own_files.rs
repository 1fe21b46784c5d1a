//! Tables that the pool keeps in files of its own, which no user can name: what is used often, and
//! what has moved.
//!
//! ```text
//!   0 magic (8 bytes)   8 CRC-32C of what follows   12 number of rows   16 the rows
//! ```
//!
//! The pool works as well without them. A table that is damaged is an error for whoever reads it,
//! and is written anew.

use super::Pool;
use crate::{file::SpaceFile, file_state::NewFile, numbers::u32_at};
use diskwright_format::space::change::Tier;
use diskwright_store::{LockMode, Store};
use std::{io, sync::Arc};

const HEAD_BYTES: usize = 16;
/// Longest table.
const TABLE_BYTES_MAX: u64 = 1 << 30;

impl Pool {
    /// The rows of a table; none if there is no such file.
    pub(super) fn read_table(
        self: &Arc<Self>,
        name: &str,
        magic: &[u8; 8],
        row_bytes: usize,
    ) -> io::Result<Vec<Vec<u8>>> {
        if self.file_named(name).is_none() {
            return Ok(Vec::new());
        }
        let store = SpaceFile::open(self, name, false, LockMode::None).map_err(io::Error::other)?;
        let len_bytes = store.len_bytes()?;
        if len_bytes > store.allocated_bytes()?.min(TABLE_BYTES_MAX) {
            return Err(io::Error::other(format!("a file of {len_bytes} bytes")));
        }
        let mut bytes = vec![0; len_bytes as usize];
        store.read_at(&mut bytes, 0)?;
        let (Some(head), Some(rows)) = (bytes.get(..HEAD_BYTES), bytes.get(HEAD_BYTES..)) else {
            return Ok(Vec::new());
        };
        if &head[..8] != magic || u32_at(head, 8) != crc32c::crc32c(&bytes[12..]) {
            return Err(io::Error::other("they are damaged"));
        }
        Ok(rows.chunks_exact(row_bytes).take(u32_at(head, 12) as usize).map(<[u8]>::to_vec).collect())
    }

    /// Writes a table in place of the one before.
    pub(super) fn write_table(
        self: &Arc<Self>,
        name: &str,
        magic: &[u8; 8],
        row_bytes: usize,
        rows: &[u8],
    ) -> io::Result<()> {
        let mut bytes = vec![0; HEAD_BYTES];
        bytes.extend_from_slice(rows);
        bytes[..8].copy_from_slice(magic);
        bytes[12..16].copy_from_slice(&((rows.len() / row_bytes) as u32).to_le_bytes());
        let crc = crc32c::crc32c(&bytes[12..]);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        if self.file_named(name).is_none() {
            let new = NewFile { len_bytes: 0, copies: self.default_copies(), columns: 1, tier: Tier::Slow };
            self.create_unchecked(name, new).map_err(io::Error::other)?;
        }
        let store = SpaceFile::open(self, name, true, LockMode::None).map_err(io::Error::other)?;
        store.write_at(&bytes, 0)?;
        store.set_len(bytes.len() as u64)
    }
}
