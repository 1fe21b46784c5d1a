//! Checksums of a sealed slab: CRC-32C for each 4 KiB of it, in a record of the member that holds
//! the copy.
//!
//! ```text
//!   0   magic "DWSUMS1\0"   8 CRC-32C, this field as 0   12 number of checksums
//!   16  GUID of the pool    32 file                      36 index of the slab in the file
//!   64  the checksums, 4 bytes each; zeros up to a multiple of 4 KiB
//! ```
//!
//! The records of a member lie before its second superblock, in the order of its slabs. So each
//! copy has its own record, which moves with it. A record counts only while the slab is sealed;
//! otherwise it may be old.

use super::{
    BLOCK_BYTES, Invalid, Result, SUM_BYTES, SUMS_AT, checksum, field, last_superblock_at, record_bytes, slabs_of,
    sums_of_slab, u32_at,
};
use uuid::Uuid;

const STRUCTURE: &str = "checksums of a slab";
const MAGIC: &[u8; 8] = b"DWSUMS1\0";
const CHECKSUM_AT: usize = 8;
/// Offset of the record of a slab of a member of `size_bytes`; `None` if the member has no such
/// slab.
pub fn record_at(size_bytes: u64, slab_shift: u8, slab: u32) -> Option<u64> {
    let from_end = slabs_of(size_bytes, slab_shift).checked_sub(slab).filter(|&left| left > 0)?;
    last_superblock_at(size_bytes)?.checked_sub(u64::from(from_end) * record_bytes(slab_shift))
}

/// The checksums of consecutive blocks of [`SUM_BYTES`].
pub fn sums_of(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks(SUM_BYTES as usize).map(crc32c::crc32c)
}

/// The record of a slab.
pub fn to_record(pool: Uuid, file: u32, index: u32, sums: &[u32]) -> Vec<u8> {
    let mut record = vec![0; (SUMS_AT + 4 * sums.len()).next_multiple_of(BLOCK_BYTES)];
    record[..8].copy_from_slice(MAGIC);
    record[12..16].copy_from_slice(&(sums.len() as u32).to_le_bytes());
    record[16..32].copy_from_slice(&pool.to_bytes_le());
    record[32..36].copy_from_slice(&file.to_le_bytes());
    record[36..40].copy_from_slice(&index.to_le_bytes());
    for (place, sum) in record[SUMS_AT..].chunks_exact_mut(4).zip(sums) {
        place.copy_from_slice(&sum.to_le_bytes());
    }
    let crc = checksum(&record, CHECKSUM_AT);
    record[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&crc.to_le_bytes());
    record
}

/// The checksums of a record, which must be that of slab `index` of `file`.
///
/// # Errors
/// [`Invalid`]: it is damaged, or another slab's.
pub fn parse_record(record: &[u8], pool: Uuid, file: u32, index: u32, slab_shift: u8) -> Result<Vec<u32>> {
    let invalid = |at: usize, found: String, expected: String| Err(Invalid::new(STRUCTURE, at as u64, found, expected));
    if record.len() as u64 != record_bytes(slab_shift) {
        return Err(Invalid::short(STRUCTURE, record.len(), record_bytes(slab_shift) as usize));
    }
    if &field::<8>(record, 0) != MAGIC {
        return invalid(0, "another signature".into(), format!("{:?}", String::from_utf8_lossy(MAGIC)));
    }
    let (found, expected) = (u32_at(record, CHECKSUM_AT), checksum(record, CHECKSUM_AT));
    if found != expected {
        return invalid(CHECKSUM_AT, format!("the checksum {found:08x}"), format!("{expected:08x}"));
    }
    let count = sums_of_slab(slab_shift);
    let is_ours = u32_at(record, 12) as usize == count
        && field::<16>(record, 16) == pool.to_bytes_le()
        && (u32_at(record, 32), u32_at(record, 36)) == (file, index);
    if !is_ours {
        return invalid(12, "the record of another slab".into(), format!("slab {index} of file {file}"));
    }
    Ok(record[SUMS_AT..].chunks_exact(4).take(count).map(|sum| u32_at(sum, 0)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: Uuid = Uuid::from_u128(7);

    #[test]
    fn a_record_is_read_as_it_was_written_and_not_for_another_slab() {
        let sums: Vec<u32> = (0..256).map(|sum| sum * 77).collect();
        let record = to_record(POOL, 3, 9, &sums);
        assert_eq!(record.len() as u64, record_bytes(20));
        assert_eq!(parse_record(&record, POOL, 3, 9, 20).unwrap(), sums);
        for (pool, file, index) in [(Uuid::from_u128(8), 3, 9), (POOL, 4, 9), (POOL, 3, 8)] {
            assert!(parse_record(&record, pool, file, index, 20).is_err());
        }
        for at in [0, 8, 13, 64, 1087, 4095] {
            let mut record = record.clone();
            record[at] ^= 1;
            assert!(parse_record(&record, POOL, 3, 9, 20).is_err(), "byte {at}");
        }
        assert!(parse_record(&record[..64], POOL, 3, 9, 20).is_err());
        assert!(parse_record(&record, POOL, 3, 9, 18).is_err(), "another number of checksums");
    }

    #[test]
    fn records_lie_between_the_last_slab_and_the_last_superblock() {
        for (size_bytes, shift) in [(100 << 20, 18), (100 << 20, 20), ((1 << 30) + 12345, 26), (1 << 44, 20)] {
            let slabs = slabs_of(size_bytes, shift);
            let slabs_end = super::super::SLABS_OFFSET_BYTES + (u64::from(slabs) << shift);
            let first = record_at(size_bytes, shift, 0).unwrap();
            let last = record_at(size_bytes, shift, slabs - 1).unwrap();
            assert!(first >= slabs_end, "{size_bytes} {shift}");
            assert_eq!(last + record_bytes(shift), last_superblock_at(size_bytes).unwrap());
            assert_eq!(last - first, u64::from(slabs - 1) * record_bytes(shift));
            assert_eq!(record_at(size_bytes, shift, slabs), None);
        }
        assert_eq!((record_bytes(18), record_bytes(20), record_bytes(26)), (4096, 4096, 65536 + 4096));
    }
}
