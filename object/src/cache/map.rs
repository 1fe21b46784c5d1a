//! The map of a cached object: which of its blocks are in the data file beside it, which of their
//! units were read, and their checksums.
//!
//! ```text
//!   0      head: magic, CRC-32C, lengths, name, ETag          4096 bytes
//!   4096   for each block:                                    8 bytes, all rounded up to 4096
//!            0   0 not there; 0x80 | age
//!            2   units that are there (16 bits)
//!            4   units that were read (16 bits)
//!   ...    checksums: CRC-32C of each 4 KiB of a block         1024 bytes a block
//! ```
//!
//! Pure: no I/O. Numbers are little-endian. A map is hostile until its head was checked, and a
//! block until its bytes were compared with its checksums.

use crate::{BLOCK_BYTES, SUM_BYTES, units::Units};
use std::ops::Range;

pub(super) const HEAD_BYTES: usize = 4096;
const MAGIC: &[u8; 8] = b"DWOBJC2\n";
/// Checksums of a block.
pub(crate) const SUMS: usize = (BLOCK_BYTES / SUM_BYTES) as usize;
const SUMS_BYTES: u64 = SUMS as u64 * 4;
/// The largest object. S3 has objects up to 50 TiB.
pub(crate) const OBJECT_BYTES_MAX: u64 = 64 << 40;

/// A block that is there has this bit; the others are its age.
pub(super) const THERE: u8 = 0x80;
/// The age of a block that was just fetched: rounds that it survives without being used.
pub(super) const AGE_NEW: u8 = 1;
/// The age of a block that was used.
pub(super) const AGE_USED: u8 = 3;

/// Bytes of a block's state, and where in it its parts are.
pub(super) const STATE_BYTES: usize = 8;
pub(super) const UNITS_AT: u64 = 2;
pub(super) const USED_AT: u64 = 4;

/// The checksums of a block. Those of units that are not there are 0.
pub(crate) type Sums = Box<[u32; SUMS]>;

/// What the map says of a block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct State {
    /// 0, or [`THERE`] and the age.
    pub(super) byte: u8,
    /// Units that are there.
    pub(super) units: Units,
    /// Units that were read.
    pub(super) used: Units,
}

impl State {
    pub(super) fn of_bytes(bytes: &[u8; STATE_BYTES]) -> Self {
        let units = |at: u64| Units::of_bits(u16::from_le_bytes([bytes[at as usize], bytes[at as usize + 1]]));
        Self { byte: bytes[0], units: units(UNITS_AT), used: units(USED_AT) }
    }

    /// Whether something of the block is there.
    pub(super) fn is_there(self) -> bool {
        self.byte & THERE != 0
    }

    pub(super) fn age(self) -> u8 {
        self.byte & !THERE
    }
}

/// What tells a version of an object from all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The name, without secrets.
    pub(crate) name: String,
    /// The server of a bucket; empty for a URL.
    pub(crate) server: String,
    pub(crate) etag: String,
    pub(crate) size_bytes: u64,
}

impl Identity {
    /// Number of blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.size_bytes.div_ceil(BLOCK_BYTES)
    }

    /// Length of a block.
    pub(crate) fn block_len(&self, block: u64) -> usize {
        self.size_bytes.saturating_sub(block * BLOCK_BYTES).min(BLOCK_BYTES) as usize
    }

    /// SHA-256 of all of it: the name of its files, and its identity as a file.
    pub(crate) fn digest(&self) -> [u8; 32] {
        let mut context = ring::digest::Context::new(&ring::digest::SHA256);
        for part in [&self.name, &self.server, &self.etag] {
            context.update(&(part.len() as u64).to_le_bytes());
            context.update(part.as_bytes());
        }
        context.update(&self.size_bytes.to_le_bytes());
        let mut digest = [0; 32];
        digest.copy_from_slice(context.finish().as_ref());
        digest
    }

    /// Name of the files, without an ending.
    pub(super) fn file_name(&self) -> String {
        self.digest()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The head of its map; `None` if the name is too long to be kept.
    pub(super) fn head(&self) -> Option<[u8; HEAD_BYTES]> {
        let mut head = [0; HEAD_BYTES];
        head[..8].copy_from_slice(MAGIC);
        head[12..16].copy_from_slice(&(BLOCK_BYTES as u32).to_le_bytes());
        head[16..24].copy_from_slice(&self.size_bytes.to_le_bytes());
        let mut at = 24;
        for part in [&self.name, &self.server, &self.etag] {
            let len = u16::try_from(part.len()).ok()?;
            head.get_mut(at..at + 2)?.copy_from_slice(&len.to_le_bytes());
            head.get_mut(at + 2..at + 2 + part.len())?.copy_from_slice(part.as_bytes());
            at += 2 + part.len();
        }
        let crc = crc32c::crc32c(&head[12..]);
        head[8..12].copy_from_slice(&crc.to_le_bytes());
        Some(head)
    }

    /// The identity in a head; `None` if it is damaged or of another version.
    pub(super) fn of_head(head: &[u8; HEAD_BYTES]) -> Option<Self> {
        let number =
            |at: usize| head.get(at..at + 4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        if &head[..8] != MAGIC || number(8)? != crc32c::crc32c(&head[12..]) || u64::from(number(12)?) != BLOCK_BYTES {
            return None;
        }
        let size_bytes = u64::from(number(16)?) | u64::from(number(20)?) << 32;
        let mut at = 24;
        let mut text = || {
            let len = usize::from(u16::from_le_bytes([*head.get(at)?, *head.get(at + 1)?]));
            let bytes = head.get(at + 2..(at + 2).checked_add(len)?)?;
            at += 2 + len;
            String::from_utf8(bytes.to_vec()).ok()
        };
        let (name, server, etag) = (text()?, text()?, text()?);
        (size_bytes <= OBJECT_BYTES_MAX).then_some(Self { name, server, etag, size_bytes })
    }

    /// Offset of the state of a block.
    pub(super) fn state_at(&self, block: u64) -> u64 {
        HEAD_BYTES as u64 + block * STATE_BYTES as u64
    }

    /// Units of a block, as ranges of the object in bytes.
    pub(super) fn ranges(&self, block: u64, units: Units) -> impl Iterator<Item = Range<u64>> {
        let (at_bytes, len_bytes) = (block * BLOCK_BYTES, self.block_len(block) as u64);
        let runs = units.runs().map(move |run| run.start.min(len_bytes)..run.end.min(len_bytes));
        runs.map(move |run| at_bytes + run.start..at_bytes + run.end).filter(|run| !run.is_empty())
    }

    /// Offset of the checksums of a block.
    pub(super) fn sums_at(&self, block: u64) -> u64 {
        let states_bytes = (self.blocks() * STATE_BYTES as u64).next_multiple_of(4096);
        HEAD_BYTES as u64 + states_bytes + block * SUMS_BYTES
    }
}

/// Checksums of bytes of a block from `at_bytes` on, a multiple of 4096; those of others are 0. The
/// last one is of what the object has of its 4 KiB, followed by zeros, as the data file has it.
pub(crate) fn sums_of(at_bytes: u64, bytes: &[u8]) -> Sums {
    let mut sums = Box::new([0; SUMS]);
    let of_bytes = sums.iter_mut().skip((at_bytes / SUM_BYTES) as usize);
    for (sum, piece) in of_bytes.zip(bytes.chunks(SUM_BYTES as usize)) {
        *sum = match piece.len() as u64 == SUM_BYTES {
            true => crc32c::crc32c(piece),
            false => {
                let mut whole = piece.to_vec();
                whole.resize(SUM_BYTES as usize, 0);
                crc32c::crc32c(&whole)
            }
        };
    }
    sums
}

/// Whether bytes that begin at `offset_bytes` of a block, a multiple of 4096, have these checksums.
pub(super) fn have_sums(sums: &[u32; SUMS], offset_bytes: u64, bytes: &[u8]) -> bool {
    let first = (offset_bytes / SUM_BYTES) as usize;
    let mut pieces = bytes.chunks_exact(SUM_BYTES as usize);
    let all = (&mut pieces).zip(sums.iter().skip(first)).all(|(piece, sum)| crc32c::crc32c(piece) == *sum);
    all && pieces.remainder().is_empty() && first + bytes.len() / SUM_BYTES as usize <= SUMS
}

pub(super) fn sums_to_bytes(sums: &[u32]) -> Vec<u8> {
    sums.iter().flat_map(|sum| sum.to_le_bytes()).collect()
}

pub(super) fn sums_of_bytes(bytes: &[u8; SUMS * 4]) -> Sums {
    let mut sums = Box::new([0; SUMS]);
    for (sum, bytes) in sums.iter_mut().zip(bytes.chunks_exact(4)) {
        *sum = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_head_is_read_as_it_was_written(name in ".{0,300}", etag in "[!-~]{1,80}", size_bytes in 1..OBJECT_BYTES_MAX) {
            let identity = Identity { name, server: "https://s3".into(), etag, size_bytes };
            let head = identity.head().unwrap();
            prop_assert_eq!(Identity::of_head(&head), Some(identity));
        }

        #[test]
        fn a_damaged_head_is_refused(at in 0..HEAD_BYTES, bits in 1..=255_u8) {
            let identity = Identity { name: "s3://b/k".into(), server: String::new(), etag: "\"e\"".into(), size_bytes: 5 };
            let mut head = identity.head().unwrap();
            head[at] ^= bits;
            prop_assert_eq!(Identity::of_head(&head), None);
        }
    }

    #[test]
    fn what_is_too_long_is_not_kept_and_what_lies_is_refused() {
        let identity = |name: &str, size_bytes| Identity {
            name: name.into(),
            server: String::new(),
            etag: "\"e\"".into(),
            size_bytes,
        };
        assert!(identity(&"k".repeat(5000), 5).head().is_none());
        assert!(Identity::of_head(&identity("k", OBJECT_BYTES_MAX + 1).head().unwrap()).is_none());
        // The parts are kept apart.
        let (mut one, mut two) = (identity("ab", 5), identity("a", 5));
        (one.server, two.server) = ("c".into(), "bc".into());
        assert_ne!(one.digest(), two.digest());
    }

    #[test]
    fn checksums_find_what_differs() {
        let bytes: Vec<u8> = (0..10_000_u32).map(|at| (at % 251) as u8).collect();
        let sums = sums_of(0, &bytes);
        assert_eq!(sums_of_bytes(&sums_to_bytes(&sums[..]).try_into().unwrap()), sums);
        let mut padded = bytes.clone();
        padded.resize(12_288, 0);
        assert!(have_sums(&sums, 0, &padded) && have_sums(&sums, 4096, &padded[4096..]));
        padded[5000] ^= 1;
        assert!(!have_sums(&sums, 0, &padded) && have_sums(&sums, 8192, &padded[8192..]));
        assert!(!have_sums(&sums, 0, &[0; 100]), "only whole pieces can be compared");
        let rest = sums_of(8192, &bytes[8192..]);
        assert_eq!((rest[1], rest[2]), (0, sums[2]));
        // A hole has zeros, and their checksum is not the one of a map that was not written.
        assert!(!have_sums(&Box::new([0; SUMS]), 0, &[0; 4096]));
    }
}
