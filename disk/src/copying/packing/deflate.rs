//! Blocks as raw deflate streams (RFC 1951) with the window of a qcow2.
//!
//! QEMU decompresses a cluster with a window of 4 KiB. A stream that refers further back is damage
//! for it, so libdeflate, which has no smaller window than 32 KiB, cannot be used.

use super::chunk::Packer;
use flate2::{Compress, Compression, FlushCompress, Status};
use std::io;

/// The level of zlib, and of QEMU.
const USUAL_LEVEL: u8 = 6;
/// A window of 4 KiB, as a power of two.
const WINDOW_BITS: u8 = 12;

/// Compresses blocks as deflate streams. A block that does not become shorter is stored as it is:
/// its length says so.
pub(crate) struct Deflate(Compress);

impl Deflate {
    /// The levels that a user may choose. 1 is the fastest, 9 the smallest.
    pub(crate) const LEVELS: std::ops::RangeInclusive<u8> = 1..=9;

    /// A packer of this level; the usual one for `None`.
    pub(crate) fn new(level: Option<u8>) -> Self {
        let level = Compression::new(level.unwrap_or(USUAL_LEVEL).into());
        Self(Compress::new_with_window_bits(level, false, WINDOW_BITS))
    }
}

impl Packer for Deflate {
    fn pack(&mut self, block: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        let start = out.len();
        out.resize(start + block.len(), 0);
        self.0.reset();
        let status = self.0.compress(block, &mut out[start..], FlushCompress::Finish).map_err(io::Error::other)?;
        let len = self.0.total_out() as usize;
        if status == Status::StreamEnd && len < block.len() {
            out.truncate(start + len);
        } else {
            out[start..].copy_from_slice(block);
        }
        Ok(())
    }
}
