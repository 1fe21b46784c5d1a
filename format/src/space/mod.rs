//! On-disk structures of a space: a pool of files and devices (*members*) whose *slabs* hold the
//! contents of files, in one, two or three copies. All numbers are little endian.
//!
//! ```text
//!   member    0        superblock, 4 KiB
//!             1 MiB    slabs, one after the other, all of the pool's slab size
//!             ...      a record of checksums for each slab, up to the second superblock
//!             end      superblock, 4 KiB, the same as the first: at the last multiple of 4 KiB
//!                      that leaves 4 KiB
//!   area      a run of slabs on up to three members, each with the same contents:
//!             journal      blocks of 4 KiB; block number S lies at S modulo the number of blocks
//!             checkpoint   two places in turn
//! ```
//!
//! - [`superblock`]: identity, members, generation, where the areas lie
//! - [`change`]: a change of the map: which slabs a file has, in which state they are
//! - [`journal`]: a block of changes; the header of a checkpoint, whose contents are changes too
//! - [`sums`]: the checksums of a sealed slab
//! - [`cache`]: the log of the write-back cache
//!
//! What must hold: the superblock with the highest generation counts. Its areas are read; the
//! checkpoint with the highest sequence number is the beginning, and the blocks of the journal from
//! this number on are applied in order, as long as each one names the checksum of the one before.

pub mod cache;
pub mod change;
pub mod journal;
pub mod sums;
pub mod superblock;

pub use crate::invalid::{Invalid, Result};

/// Where the first slab of a member begins, in bytes.
pub const SLABS_OFFSET_BYTES: u64 = 1 << 20;
/// Length of a superblock, of a block of the journal, and of the header of a checkpoint.
pub const BLOCK_BYTES: usize = 4096;
/// Number of members that a pool may have.
pub const MEMBERS_MAX: usize = 64;
/// Number of slabs that a member may have.
pub const SLABS_MAX: u32 = (1 << 26) - 2;
/// Number of slabs that a file may have: 256 TiB with slabs of 1 MiB.
pub const FILE_SLABS_MAX: u32 = 1 << 28;
/// Number of copies that a slab may have.
pub const COPIES_MAX: usize = 3;
/// Number of members that hold an area.
pub const AREAS_MAX: usize = 3;
/// The smallest and the largest slab, as powers of two: 256 KiB and 64 MiB.
pub const SLAB_SHIFTS: std::ops::RangeInclusive<u8> = 18..=26;
/// How many bytes of a slab one checksum covers.
pub const SUM_BYTES: u64 = 4096;
/// Where the checksums begin in a record.
const SUMS_AT: usize = 64;
/// Size of a witness: a member with two superblocks and no slabs, which only counts when more than
/// half of the members are needed.
pub const WITNESS_BYTES: u64 = SLABS_OFFSET_BYTES + BLOCK_BYTES as u64;
/// Longest name of a pool or of a file, in bytes.
pub const NAME_BYTES_MAX: usize = 255;

/// Offset of the second superblock of a member of `size_bytes`; `None` if the member is too small
/// for two superblocks.
pub fn last_superblock_at(size_bytes: u64) -> Option<u64> {
    let end_bytes = size_bytes & !(BLOCK_BYTES as u64 - 1);
    end_bytes.checked_sub(BLOCK_BYTES as u64).filter(|&at| at >= SLABS_OFFSET_BYTES)
}

/// Number of checksums of a slab.
pub fn sums_of_slab(slab_shift: u8) -> usize {
    1 << (slab_shift.min(SLAB_SHIFTS.last().unwrap_or(26)) - 12)
}

/// Length of a record of checksums in bytes: 4 KiB for slabs of up to 2 MiB.
pub fn record_bytes(slab_shift: u8) -> u64 {
    (SUMS_AT + 4 * sums_of_slab(slab_shift)).next_multiple_of(BLOCK_BYTES) as u64
}

/// Number of slabs of a member of `size_bytes`, each with a record of checksums. At most
/// [`SLABS_MAX`].
pub fn slabs_of(size_bytes: u64, slab_shift: u8) -> u32 {
    let held_bytes = last_superblock_at(size_bytes).map_or(0, |end_bytes| end_bytes - SLABS_OFFSET_BYTES);
    let slab_bytes = (1_u64 << slab_shift.min(63)).saturating_add(record_bytes(slab_shift));
    (held_bytes / slab_bytes).min(u64::from(SLABS_MAX)) as u32
}

/// One copy of a slab: a slab of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Copy {
    /// Number of the member, below [`MEMBERS_MAX`].
    pub member: u8,
    /// Number of the slab on it, below [`SLABS_MAX`].
    pub slab: u32,
}

impl Copy {
    /// The copy as 32 bits: 6 for the member, 26 for the slab plus one. Never 0.
    pub fn to_bits(self) -> u32 {
        u32::from(self.member) << 26 | (self.slab + 1)
    }

    /// The copy of [`Copy::to_bits`]; `None` for bits without a slab.
    #[inline]
    pub fn from_bits(bits: u32) -> Option<Self> {
        let slab = (bits & ((1 << 26) - 1)).checked_sub(1)?;
        (slab < SLABS_MAX).then_some(Self { member: (bits >> 26) as u8, slab })
    }

    /// Offset of the slab in the member's file.
    pub fn offset_bytes(self, slab_shift: u8) -> u64 {
        SLABS_OFFSET_BYTES + (u64::from(self.slab) << slab_shift)
    }
}

/// The bytes of a field. Structures are read from blocks of full length, so a field that is not
/// there is a bug of this module, and reads as zeros.
#[inline]
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

#[inline]
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(field(bytes, at))
}

#[inline]
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(field(bytes, at))
}

#[inline]
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(field(bytes, at))
}

/// The checksum of a block whose checksum field lies at `at`: CRC-32C with this field as zeros.
fn checksum(block: &[u8], at: usize) -> u32 {
    let (before, rest) = block.split_at(at.min(block.len()));
    let crc = crc32c::crc32c_append(crc32c::crc32c(before), &[0; 4]);
    crc32c::crc32c_append(crc, rest.get(4..).unwrap_or_default())
}

/// Checks the magic, the checksum and the length of a block.
fn check_block(structure: &'static str, block: &[u8], magic: &[u8; 8], checksum_at: usize) -> Result<()> {
    if block.len() != BLOCK_BYTES {
        return Err(Invalid::short(structure, block.len(), BLOCK_BYTES));
    }
    if &field::<8>(block, 0) != magic {
        return Err(Invalid::new(structure, 0, "another signature", format!("{:?}", String::from_utf8_lossy(magic))));
    }
    let (found, expected) = (u32_at(block, checksum_at), checksum(block, checksum_at));
    if found != expected {
        let found = format!("the checksum {found:08x}");
        return Err(Invalid::new(structure, checksum_at as u64, found, format!("{expected:08x}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_has_room_for_whole_slabs_between_its_superblocks() {
        let mib = 1 << 20;
        assert_eq!(last_superblock_at(mib + 4095), None);
        assert_eq!(last_superblock_at(mib + 4096), Some(mib));
        assert_eq!(last_superblock_at(mib + 8191), Some(mib));
        assert_eq!((slabs_of(mib, 20), slabs_of(WITNESS_BYTES, 18)), (0, 0));
        assert_eq!(last_superblock_at(WITNESS_BYTES), Some(mib));
        assert_eq!(slabs_of(2 * mib + 8191, 20), 0);
        assert_eq!(slabs_of(2 * mib + 8192, 20), 1);
        assert_eq!(slabs_of(2 * mib + 8192, 18), 3);
        assert_eq!(slabs_of(2 * mib + 4096 + 4 * 4096, 18), 4);
        assert_eq!(slabs_of(u64::MAX, 18), SLABS_MAX);
    }

    #[test]
    fn copies_are_32_bits() {
        for copy in [Copy { member: 0, slab: 0 }, Copy { member: 63, slab: SLABS_MAX - 1 }, Copy { member: 5, slab: 9 }]
        {
            assert_ne!(copy.to_bits(), 0);
            assert_eq!(Copy::from_bits(copy.to_bits()), Some(copy));
        }
        assert_eq!(Copy::from_bits(0), None);
        assert_eq!(Copy::from_bits(7 << 26), None);
        assert_eq!(Copy::from_bits(u32::MAX), None);
    }
}
