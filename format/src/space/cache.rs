//! The write-back cache of a space: a ring of blocks of 4 KiB in a file of the pool.
//!
//! ```text
//!   file     block 0, 1   anchors, in turn     block 2 ...   the ring
//!   ring     position P lies in block 2 + P modulo the number of blocks of the ring
//!            a block is a header, or 4 KiB that were written to another file of the pool
//!
//!   anchor   0 magic "DWSCANCH"   8 CRC-32C, this field as 0   12 checksum of the header before
//!            16 GUID of the pool  32 sequence number of the first header that counts
//!            40 its position      48 number of the anchor      56 no block before this position
//!                                                                 counts
//!   header   0 magic "DWSCHEAD"   8 CRC-32C, this field as 0   12 checksum of the header before
//!            16 GUID of the pool  32 sequence number           40 position of the next header
//!            48 sequence number of the first header that was perhaps not durable then
//!            56 number of rows (u16)                           64 rows of 24 bytes
//!   row      0 file  4 slab of the file  8 block in the slab (u16)  10 kind (u16)
//!            12 position (u64)           20 CRC-32C of the block
//! ```
//!
//! Positions only grow, so a position contains the lap. Of two rows for the same block the one with
//! the higher position is the newer one. [`RowKind`] has the rows that end others.
//!
//! A header is written when a flush comes, after the blocks that it names, and made durable
//! together with them. So after a power cut its blocks may be missing: their checksums tell. Each
//! header names the checksum of the one before, so a header that is left over from before a power
//! cut does not continue a log that was written since.

use super::{BLOCK_BYTES, check_block, checksum, field, u16_at, u32_at, u64_at};
use uuid::Uuid;

const ANCHOR: &str = "anchor of a write-back cache";
const HEADER: &str = "header of a write-back cache";
const ANCHOR_MAGIC: &[u8; 8] = b"DWSCANCH";
const HEADER_MAGIC: &[u8; 8] = b"DWSCHEAD";
const CHECKSUM_AT: usize = 8;
const ROWS_AT: usize = 64;
const ROW_BYTES: usize = 24;
/// Rows that a header has room for.
pub const ROWS_MAX: usize = (BLOCK_BYTES - ROWS_AT) / ROW_BYTES;
/// Where the ring begins, in blocks.
pub const RING_AT: u64 = 2;
/// The smallest and the largest cache in bytes.
pub const CACHE_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=64 << 30;

/// Where a header lies, and what it must continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeaderPlace {
    /// Its sequence number.
    pub sequence: u64,
    /// Its position in the ring.
    pub position: u64,
    /// Checksum of the header before it; 0 if there is none.
    pub before: u32,
}

/// Where the log begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Anchor {
    /// The first header that counts.
    pub first: HeaderPlace,
    /// The anchor with the higher number is the newer one.
    pub number: u64,
    /// No block before this position counts.
    pub tail: u64,
}

impl Anchor {
    /// The anchor as a block.
    pub fn to_block(&self, pool: Uuid) -> [u8; BLOCK_BYTES] {
        let mut block = begin(ANCHOR_MAGIC, pool, self.first);
        block[40..48].copy_from_slice(&self.first.position.to_le_bytes());
        block[48..56].copy_from_slice(&self.number.to_le_bytes());
        block[56..64].copy_from_slice(&self.tail.to_le_bytes());
        finish(&mut block);
        block
    }

    /// The anchor in a block of the pool; `None` if there is none.
    pub fn parse(block: &[u8], pool: Uuid) -> Option<Self> {
        check_block(ANCHOR, block, ANCHOR_MAGIC, CHECKSUM_AT).ok()?;
        let first = HeaderPlace { sequence: u64_at(block, 32), position: u64_at(block, 40), before: u32_at(block, 12) };
        let anchor = Self { first, number: u64_at(block, 48), tail: u64_at(block, 56) };
        let is_ours = Uuid::from_bytes_le(field(block, 16)) == pool && anchor.tail <= first.position;
        // What follows is reckoned without checks for an overflow.
        let is_possible = first.position.max(first.sequence).max(anchor.number) < NUMBERS_MAX;
        (is_ours && is_possible).then_some(anchor)
    }
}

/// Positions and numbers of a log are below this: at a million blocks a second it lasts for 70,000
/// years.
const NUMBERS_MAX: u64 = 1 << 61;

/// What a row says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    /// The block lies at this position.
    Block,
    /// No row of this slab with a lower position counts any more.
    Forget,
    /// The row of this block with exactly this position does not count: its contents were not
    /// durable when power was lost.
    Void,
    /// As [`RowKind::Block`], but no member has contents with this checksum any more.
    Lost,
}

impl RowKind {
    /// Whether the log has a block at the position of such a row.
    pub fn has_block(self) -> bool {
        matches!(self, Self::Block | Self::Lost)
    }
}

/// A row of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Number of the file that it was written to.
    pub file: u32,
    /// Index of the slab in this file.
    pub index: u32,
    /// Number of the block in the slab.
    pub block: u16,
    /// What the row says.
    pub kind: RowKind,
    /// Its position in the ring.
    pub position: u64,
    /// CRC-32C of its contents.
    pub sum: u32,
}

/// Makes a header from at most [`ROWS_MAX`] rows, and returns the place of the next one.
///
/// # Panics
/// If there are more rows.
pub fn put_header(
    pool: Uuid,
    place: HeaderPlace,
    next_position: u64,
    durable: u64,
    rows: &[Row],
) -> ([u8; BLOCK_BYTES], HeaderPlace) {
    assert!(rows.len() <= ROWS_MAX, "more rows than a header has room for");
    let mut block = begin(HEADER_MAGIC, pool, place);
    block[40..48].copy_from_slice(&next_position.to_le_bytes());
    block[48..56].copy_from_slice(&durable.to_le_bytes());
    block[56..58].copy_from_slice(&(rows.len() as u16).to_le_bytes());
    for (bytes, row) in block[ROWS_AT..].chunks_exact_mut(ROW_BYTES).zip(rows) {
        bytes[..4].copy_from_slice(&row.file.to_le_bytes());
        bytes[4..8].copy_from_slice(&row.index.to_le_bytes());
        bytes[8..10].copy_from_slice(&row.block.to_le_bytes());
        let kind: u16 = match row.kind {
            RowKind::Block => 0,
            RowKind::Forget => 1,
            RowKind::Void => 2,
            RowKind::Lost => 3,
        };
        bytes[10..12].copy_from_slice(&kind.to_le_bytes());
        bytes[12..20].copy_from_slice(&row.position.to_le_bytes());
        bytes[20..24].copy_from_slice(&row.sum.to_le_bytes());
    }
    let before = finish(&mut block);
    (block, HeaderPlace { sequence: place.sequence.saturating_add(1), position: next_position, before })
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The header after it.
    pub next: HeaderPlace,
    /// Headers before this sequence number were durable when it was written.
    pub durable: u64,
    /// What it names, in the order in which it was written.
    pub rows: Vec<Row>,
}

impl Header {
    /// The header in `block` if it is the one at `place` of the pool's log. `None` for any other
    /// block: the log ends before it.
    pub fn parse(block: &[u8], pool: Uuid, place: HeaderPlace) -> Option<Self> {
        check_block(HEADER, block, HEADER_MAGIC, CHECKSUM_AT).ok()?;
        let is_next = u32_at(block, 12) == place.before
            && Uuid::from_bytes_le(field(block, 16)) == pool
            && u64_at(block, 32) == place.sequence;
        let position = u64_at(block, 40);
        let sequence = place.sequence.checked_add(1)?;
        let next = HeaderPlace { sequence, position, before: u32_at(block, CHECKSUM_AT) };
        let count = usize::from(u16_at(block, 56));
        if !is_next || position <= place.position || count > ROWS_MAX {
            return None;
        }
        let row = |bytes: &[u8]| {
            let kind = match u16_at(bytes, 10) {
                0 => RowKind::Block,
                1 => RowKind::Forget,
                2 => RowKind::Void,
                3 => RowKind::Lost,
                _ => return None,
            };
            let (file, index, block) = (u32_at(bytes, 0), u32_at(bytes, 4), u16_at(bytes, 8));
            Some(Row { file, index, block, kind, position: u64_at(bytes, 12), sum: u32_at(bytes, 20) })
        };
        let rows: Option<Vec<Row>> = block.get(ROWS_AT..)?.chunks_exact(ROW_BYTES).take(count).map(row).collect();
        Some(Self { next, durable: u64_at(block, 48), rows: rows? })
    }
}

fn begin(magic: &[u8; 8], pool: Uuid, place: HeaderPlace) -> [u8; BLOCK_BYTES] {
    let mut block = [0; BLOCK_BYTES];
    block[..8].copy_from_slice(magic);
    block[12..16].copy_from_slice(&place.before.to_le_bytes());
    block[16..32].copy_from_slice(&pool.to_bytes_le());
    block[32..40].copy_from_slice(&place.sequence.to_le_bytes());
    block
}

fn finish(block: &mut [u8; BLOCK_BYTES]) -> u32 {
    let sum = checksum(block, CHECKSUM_AT);
    block[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: Uuid = Uuid::from_u128(11);

    fn row(block: u16) -> Row {
        let kind = [RowKind::Block, RowKind::Forget, RowKind::Void, RowKind::Lost][usize::from(block) % 4];
        Row { file: 3, index: 1 << 20, block, kind, position: (1 << 40) + u64::from(block), sum: 0xdead_beef }
    }

    #[test]
    fn a_header_continues_only_the_one_before() {
        let first = HeaderPlace { sequence: 5, position: 100, before: 0 };
        let rows: Vec<Row> = (0..ROWS_MAX as u16).map(row).collect();
        let (one, second) = put_header(POOL, first, 300, 4, &rows);
        let (two, third) = put_header(POOL, second, 301, 5, &[]);
        assert_eq!(Header::parse(&one, POOL, first), Some(Header { next: second, durable: 4, rows }));
        assert_eq!(Header::parse(&two, POOL, second), Some(Header { next: third, durable: 5, rows: Vec::new() }));
        // After a power cut the first header is written again, with other rows.
        let (_, other) = put_header(POOL, first, 300, 4, &[row(1)]);
        assert_eq!(Header::parse(&two, POOL, other), None);
        assert_eq!(Header::parse(&one, Uuid::from_u128(1), first), None, "another pool");
        assert_eq!(Header::parse(&one, POOL, HeaderPlace { sequence: 6, ..first }), None, "another number");
        assert_eq!(Header::parse(&one, POOL, HeaderPlace { position: 300, ..first }), None, "it leads back");
        for at in 0..BLOCK_BYTES {
            let mut bad = one;
            bad[at] ^= 1;
            assert_eq!(Header::parse(&bad, POOL, first), None, "byte {at}");
        }
    }

    #[test]
    fn an_anchor_is_read_as_it_was_written() {
        let first = HeaderPlace { sequence: 9, position: 70, before: 8 };
        let anchor = Anchor { first, number: 3, tail: 60 };
        let block = anchor.to_block(POOL);
        assert_eq!(Anchor::parse(&block, POOL), Some(anchor));
        assert_eq!(Anchor::parse(&block, Uuid::from_u128(1)), None);
        assert_eq!(Anchor::parse(&[0; BLOCK_BYTES], POOL), None);
        assert_eq!(Anchor::parse(&Anchor { tail: 71, ..anchor }.to_block(POOL), POOL), None);
        let far = HeaderPlace { position: u64::MAX, ..first };
        assert_eq!(Anchor::parse(&Anchor { first: far, ..anchor }.to_block(POOL), POOL), None);
    }
}
