//! A block of the journal, and the header of a checkpoint.
//!
//! ```text
//!   block       0 magic "DWSPJRNL"   8 CRC-32C, this field as 0   12 CRC-32C of the block before
//!               16 GUID of the pool  32 sequence number (u64)     40 bytes of changes (u16)
//!               48 changes
//!   checkpoint  0 magic "DWSPCKPT"   8 CRC-32C, this field as 0   12 CRC-32C of the block before
//!               16 GUID of the pool  32 sequence number (u64)     40 bytes of changes (u64)
//!               48 CRC-32C of the changes; they follow in the next blocks
//! ```
//!
//! The sequence number of a block is one higher than that of the block before. A checkpoint has the
//! number of the first block that it does not contain: its changes lead from an empty map to the
//! state before this block. Since each block names the checksum of the one before, a block that is
//! left over from before a power cut does not continue a journal that was written since.

use super::{BLOCK_BYTES, Invalid, Result, check_block, checksum, field, u16_at, u32_at, u64_at};
use uuid::Uuid;

const BLOCK: &str = "block of a space's journal";
const CHECKPOINT: &str = "checkpoint of a space";
const BLOCK_MAGIC: &[u8; 8] = b"DWSPJRNL";
const CHECKPOINT_MAGIC: &[u8; 8] = b"DWSPCKPT";
const CHECKSUM_AT: usize = 8;
const CHANGES_AT: usize = 48;
/// Bytes of changes that a block has room for.
pub const CHANGES_BYTES_MAX: usize = BLOCK_BYTES - CHANGES_AT;

/// A place in the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Sequence number of the next block.
    pub sequence: u64,
    /// Checksum of the block before it; 0 if there is none.
    pub before: u32,
}

/// Makes the block at `position` from `changes`, and returns the next position.
///
/// # Panics
/// If the changes are longer than [`CHANGES_BYTES_MAX`].
pub fn put_block(block: &mut [u8; BLOCK_BYTES], pool: Uuid, position: Position, changes: &[u8]) -> Position {
    assert!(changes.len() <= CHANGES_BYTES_MAX, "the changes are longer than a block");
    block.fill(0);
    block[..8].copy_from_slice(BLOCK_MAGIC);
    block[12..16].copy_from_slice(&position.before.to_le_bytes());
    block[16..32].copy_from_slice(&pool.to_bytes_le());
    block[32..40].copy_from_slice(&position.sequence.to_le_bytes());
    block[40..42].copy_from_slice(&(changes.len() as u16).to_le_bytes());
    block[CHANGES_AT..CHANGES_AT + changes.len()].copy_from_slice(changes);
    let before = checksum(block, CHECKSUM_AT);
    block[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&before.to_le_bytes());
    Position { sequence: position.sequence.saturating_add(1), before }
}

/// The changes in `block` if it is the one at `position` of the pool's journal, and the next
/// position. `None` for any other block: the journal ends before it.
pub fn parse_block(block: &[u8], pool: Uuid, position: Position) -> Option<(&[u8], Position)> {
    check_block(BLOCK, block, BLOCK_MAGIC, CHECKSUM_AT).ok()?;
    let is_next = u32_at(block, 12) == position.before
        && Uuid::from_bytes_le(field(block, 16)) == pool
        && u64_at(block, 32) == position.sequence;
    let changes = block.get(CHANGES_AT..CHANGES_AT + usize::from(u16_at(block, 40)))?;
    let next = Position { sequence: position.sequence.checked_add(1)?, before: u32_at(block, CHECKSUM_AT) };
    is_next.then_some((changes, next))
}

/// The header of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpoint {
    /// Where the journal continues.
    pub position: Position,
    /// Length of its changes in bytes.
    pub changes_bytes: u64,
    /// CRC-32C of its changes.
    pub changes_checksum: u32,
}

impl Checkpoint {
    /// The header as a block.
    pub fn to_block(&self, pool: Uuid) -> [u8; BLOCK_BYTES] {
        let mut block = [0; BLOCK_BYTES];
        block[..8].copy_from_slice(CHECKPOINT_MAGIC);
        block[12..16].copy_from_slice(&self.position.before.to_le_bytes());
        block[16..32].copy_from_slice(&pool.to_bytes_le());
        block[32..40].copy_from_slice(&self.position.sequence.to_le_bytes());
        block[40..48].copy_from_slice(&self.changes_bytes.to_le_bytes());
        block[48..52].copy_from_slice(&self.changes_checksum.to_le_bytes());
        let sum = checksum(&block, CHECKSUM_AT);
        block[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
        block
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`Invalid`]: it is damaged, or belongs to another pool.
    pub fn parse(block: &[u8], pool: Uuid) -> Result<Self> {
        check_block(CHECKPOINT, block, CHECKPOINT_MAGIC, CHECKSUM_AT)?;
        let found = Uuid::from_bytes_le(field(block, 16));
        if found != pool {
            return Err(Invalid::new(CHECKPOINT, 16, format!("pool {found}"), pool));
        }
        Ok(Self {
            position: Position { sequence: u64_at(block, 32), before: u32_at(block, 12) },
            changes_bytes: u64_at(block, 40),
            changes_checksum: u32_at(block, 48),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: Uuid = Uuid::from_u128(9);

    #[test]
    fn a_journal_ends_at_a_block_that_does_not_continue_it() {
        let first = Position { sequence: 7, before: 0 };
        let (mut one, mut two, mut other) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES], [0; BLOCK_BYTES]);
        let second = put_block(&mut one, POOL, first, b"one");
        let third = put_block(&mut two, POOL, second, b"two");
        assert_eq!(parse_block(&one, POOL, first), Some((&b"one"[..], second)));
        assert_eq!(parse_block(&two, POOL, second), Some((&b"two"[..], third)));
        // The first block is written again with other contents: the old second one no longer
        // counts.
        let new_second = put_block(&mut other, POOL, first, b"new");
        assert_eq!(parse_block(&other, POOL, first), Some((&b"new"[..], new_second)));
        assert_eq!(parse_block(&two, POOL, new_second), None);
        assert_eq!(parse_block(&one, Uuid::from_u128(1), first), None, "another pool");
        assert_eq!(parse_block(&one, POOL, second), None, "another number");
        for at in 0..BLOCK_BYTES {
            let mut bad = one;
            bad[at] ^= 1;
            assert_eq!(parse_block(&bad, POOL, first), None, "byte {at}");
        }
    }

    #[test]
    fn a_checkpoint_is_read_as_it_was_written() {
        let position = Position { sequence: 99, before: 5 };
        let checkpoint = Checkpoint { position, changes_bytes: 1 << 33, changes_checksum: 6 };
        let block = checkpoint.to_block(POOL);
        assert_eq!(Checkpoint::parse(&block, POOL).unwrap(), checkpoint);
        assert!(Checkpoint::parse(&block, Uuid::from_u128(1)).unwrap_err().to_string().contains("pool"));
        let mut bad = block;
        bad[50] ^= 1;
        assert!(Checkpoint::parse(&bad, POOL).is_err());
    }
}
