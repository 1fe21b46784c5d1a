//! Blocks as zlib streams (RFC 1950), by libdeflate.

use super::chunk::Packer;
use libdeflater::{CompressionLvl, Compressor};
use std::io;

/// The level of qemu-img and of zlib itself.
const USUAL_LEVEL: u8 = 6;

/// Compresses blocks as zlib streams.
pub(crate) struct Zlib(Compressor);

impl Zlib {
    /// The levels that a user may choose. 1 is the fastest, 12 the smallest.
    pub(crate) const LEVELS: std::ops::RangeInclusive<u8> = 1..=12;

    /// A packer of this level; the usual one for `None`.
    ///
    /// # Errors
    /// `InvalidInput` for a level that does not exist.
    pub(crate) fn new(level: Option<u8>) -> io::Result<Self> {
        let level = CompressionLvl::new(level.unwrap_or(USUAL_LEVEL).into());
        let level = level.map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "there is no such level"))?;
        Ok(Self(Compressor::new(level)))
    }
}

impl Packer for Zlib {
    fn pack(&mut self, block: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        let start = out.len();
        out.resize(start + self.0.zlib_compress_bound(block.len()), 0);
        let len = self.0.zlib_compress(block, &mut out[start..]).map_err(io::Error::other)?;
        out.truncate(start + len);
        Ok(())
    }
}
