//! A chunk of the disk on its way: taken from the source, then with its blocks compressed.

use std::{io, ops::Range};

/// Length of a chunk: what is read at once. A multiple of the block.
pub(super) const CHUNK_BYTES: u64 = 1 << 20;

/// Compresses blocks. Each worker has its own.
pub(crate) trait Packer: Send {
    /// Appends a block to `out`, compressed.
    fn pack(&mut self, block: &[u8], out: &mut Vec<u8>) -> io::Result<()>;
}

/// A chunk of the source that a worker has taken.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// Chunks are handed to the sink in the order of their numbers.
    pub(super) number: u64,
    pub(super) offset_bytes: u64,
    /// The ranges of the disk that may hold data, within the chunk; not empty.
    pub(super) data: Vec<Range<u64>>,
    /// Whether everything between the ranges can be read, and reads as zeros.
    pub(super) is_whole: bool,
}

/// A chunk whose blocks are compressed.
pub(super) struct Ready {
    pub(super) number: u64,
    /// Number of each block, and its place in `bytes`.
    pub(super) blocks: Vec<(u64, Range<usize>)>,
    pub(super) bytes: Vec<u8>,
    /// Bytes of the disk in all blocks of the chunk, and in those of zeros.
    pub(super) disk_bytes: u64,
    pub(super) zero_bytes: u64,
}
