//! Whether the log is clean: its last record is an unmount record.
//!
//! The log is a ring of basic blocks of 512 bytes. Each block carries the number of the round (the
//! cycle) in which it was written, in its first word, or in the second word of a record's header.
//!
//! ```text
//!   block      0                 head                      end
//!   cycle      c  c  c  c  c  c │ c-1  c-1  c-1  c-1  c-1
//!                    [H][unmount]
//! ```
//!
//! The head is where the cycle changes. The log is clean if a record with one operation ends
//! exactly at the head, and this operation is "unmount". The kernel finds the head by bisection and
//! repairs what a crash has left behind; here every block is read, and a log with any other pattern
//! counts as dirty.

use super::superblock::Superblock;
use crate::{
    bytes::{be32, get},
    read::Window,
    reason::{LeftAlone, ReasonKind},
};

const BASIC_BLOCK_BYTES: usize = 512;
const HEADER_MAGIC: u32 = 0xfeed_babe;
const UNMOUNT_FLAG: u8 = 0x20;
/// A header covers this much of a record in version 2 of the log; longer ones have further blocks.
const HEADER_COVERS_BYTES: u32 = 32 << 10;
const PIECE_BYTES: usize = 1 << 20;

/// What one pass over the log finds.
struct Pass {
    first_cycle: u32,
    /// First block of the earlier cycle; `None` while all are of one cycle.
    head: Option<u64>,
    /// The last header before the head, and the last one of all.
    header: Option<(u64, [u8; BASIC_BLOCK_BYTES])>,
}

/// Refuses a log that is not clean.
pub(super) fn check(window: &Window<'_>, fs: &Superblock) -> Result<(), LeftAlone> {
    let blocks = fs.log_bytes / BASIC_BLOCK_BYTES as u64;
    let mut pass = Pass { first_cycle: 0, head: None, header: None };
    let mut tail_header = None;
    let mut piece = vec![0; PIECE_BYTES];
    let mut at = 0_u64;
    while at < blocks {
        let take = (blocks - at).min((PIECE_BYTES / BASIC_BLOCK_BYTES) as u64) as usize;
        let bytes = &mut piece[..take * BASIC_BLOCK_BYTES];
        window.read(fs.log_start_bytes + at * BASIC_BLOCK_BYTES as u64, bytes)?;
        for block in bytes.chunks_exact(BASIC_BLOCK_BYTES) {
            pass.look_at(at, block, &mut tail_header)?;
            at += 1;
        }
    }
    // With the head at the beginning, the last record ends at the end of the ring.
    let head = pass.head.unwrap_or(0);
    let Some((start, header)) = pass.header.or(tail_header) else { return Err(not_clean()) };
    let (version, len_bytes, operations) = (be32(&header, 8), be32(&header, 12), be32(&header, 40));
    let header_blocks = match (version, be32(&header, 320)) {
        (1, _) => 1,
        (2, size_bytes) => u64::from(size_bytes.div_ceil(HEADER_COVERS_BYTES).max(1)),
        _ => return Err(not_clean()),
    };
    let data_blocks = u64::from(len_bytes).div_ceil(BASIC_BLOCK_BYTES as u64);
    let ends_at_head = data_blocks > 0 && (start + header_blocks + data_blocks) % blocks == head;
    if operations != 1 || !ends_at_head || get::<16>(&header, 304) != fs.log_uuid {
        return Err(not_clean());
    }
    let place = (start + header_blocks) % blocks;
    let operation = window.bytes(fs.log_start_bytes + place * BASIC_BLOCK_BYTES as u64, BASIC_BLOCK_BYTES)?;
    if operation[9] & UNMOUNT_FLAG == 0 {
        return Err(not_clean());
    }
    Ok(())
}

impl Pass {
    /// The next block. `tail_header` becomes the last header behind the head.
    fn look_at(
        &mut self,
        at: u64,
        block: &[u8],
        tail_header: &mut Option<(u64, [u8; BASIC_BLOCK_BYTES])>,
    ) -> Result<(), LeftAlone> {
        let is_header = be32(block, 0) == HEADER_MAGIC;
        let cycle = be32(block, if is_header { 4 } else { 0 });
        if at == 0 {
            self.first_cycle = cycle;
        } else if self.head.is_none() && cycle != self.first_cycle {
            self.head = Some(at);
        }
        let expected = self.first_cycle.wrapping_sub(u32::from(self.head.is_some()));
        if cycle != expected {
            return Err(not_clean());
        }
        if is_header {
            let header = Some((at, get(block, 0)));
            if self.head.is_none() {
                self.header = header;
            } else {
                *tail_header = header;
            }
        }
        Ok(())
    }
}

fn not_clean() -> LeftAlone {
    LeftAlone::new(ReasonKind::Dirty, "the log of XFS is not clean: mount the file system once and unmount it")
}
