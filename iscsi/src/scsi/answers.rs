//! What our initiator reads of a disk's answers. What a short answer lacks is 0.

use super::unit_of;
use crate::{array, u16_at, u32_at, u64_at};

fn text_at(data: &[u8], at: usize, len: usize) -> String {
    let there = data.get(at..).unwrap_or_default();
    String::from_utf8_lossy(&there[..there.len().min(len)]).trim_matches([' ', '\0']).to_owned()
}

/// Standard data of INQUIRY.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standard {
    /// Device type; 0 is a disk.
    pub kind: u8,
    /// Whether there is a device at this logical unit.
    pub is_there: bool,
    /// Who made it.
    pub vendor: String,
    /// What it is called.
    pub product: String,
    /// Its version.
    pub revision: String,
}

impl Standard {
    /// Decodes it.
    pub fn decode(data: &[u8]) -> Self {
        let first = data.first().copied().unwrap_or(0xff);
        Self {
            kind: first & 0x1f,
            is_there: first >> 5 == 0,
            vendor: text_at(data, 8, 8),
            product: text_at(data, 16, 16),
            revision: text_at(data, 32, 4),
        }
    }
}

/// The body of a page of vital product data; empty if it is not the page.
fn body_of(data: &[u8], page: u8) -> &[u8] {
    let end = 4 + usize::from(u16_at(data, 2));
    if data.get(1) == Some(&page) { data.get(4..end.min(data.len())).unwrap_or_default() } else { &[] }
}

/// The pages of vital product data that a disk has.
pub fn pages(data: &[u8]) -> &[u8] {
    body_of(data, 0)
}

/// The serial number.
pub fn serial(data: &[u8]) -> String {
    text_at(body_of(data, 0x80), 0, 64)
}

/// The page of block limits; 0 means that the disk tells no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockLimits {
    /// Maximum blocks of one read or write.
    pub transfer_blocks: u32,
    /// Maximum blocks of one WRITE SAME.
    pub same_blocks: u64,
}

impl BlockLimits {
    /// Decodes it.
    pub fn decode(data: &[u8]) -> Self {
        let body = body_of(data, 0xb0);
        Self { transfer_blocks: u32_at(body, 4), same_blocks: u64_at(body, 32) }
    }
}

/// Whether WRITE SAME(16) may unmap, of the page of logical block provisioning.
pub fn same_unmaps(data: &[u8]) -> bool {
    body_of(data, 0xb2).get(1).is_some_and(|flags| flags & 0x40 != 0)
}

/// READ CAPACITY(16).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Number of the last block.
    pub last_block: u64,
    /// Length of a block in bytes.
    pub block_bytes: u32,
    /// Power of 2 of the logical blocks in a physical one.
    pub physical_exponent: u8,
    /// Whether unmapped blocks read as zeros.
    pub unmapped_are_zero: bool,
}

impl Capacity {
    /// Decodes it.
    pub fn decode(data: &[u8]) -> Self {
        let [flags, thin] = array(data, 13);
        Self {
            last_block: u64_at(data, 0),
            block_bytes: u32_at(data, 8),
            physical_exponent: flags & 15,
            unmapped_are_zero: thin & 0x40 != 0,
        }
    }
}

/// What MODE SENSE(6) of the caching page tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caching {
    /// Whether the disk refuses writes.
    pub is_write_protected: bool,
    /// Whether a write may be durable when it ends.
    pub has_fua: bool,
    /// Whether completed writes may be in a volatile cache.
    pub has_write_cache: bool,
}

impl Caching {
    /// The number of the page.
    pub const PAGE: u8 = 0x08;

    /// Decodes it. A disk without the page is taken to have a cache.
    pub fn decode(data: &[u8]) -> Self {
        let [flags, descriptor_bytes] = array(data, 2);
        let page = data.get(4 + usize::from(descriptor_bytes)..).unwrap_or_default();
        let is_there = page.first().is_some_and(|&first| first & 0x3f == Self::PAGE);
        Self {
            is_write_protected: flags & 0x80 != 0,
            has_fua: flags & 0x10 != 0,
            has_write_cache: !is_there || page.get(2).is_none_or(|flags| flags & 0x04 != 0),
        }
    }
}

/// The logical units of REPORT LUNS that can be addressed here.
pub fn units(data: &[u8]) -> Vec<u16> {
    let end = 8_usize.saturating_add(u32_at(data, 0) as usize).min(data.len());
    let list = data.get(8..end).unwrap_or_default();
    list.chunks_exact(8).filter_map(|lun| unit_of(u64_at(lun, 0))).collect()
}

/// Whether REPORT SUPPORTED OPERATION CODES says that the command is supported; `None` if it does
/// not say.
pub fn says_supported(data: &[u8]) -> Option<bool> {
    match data.get(1)? & 7 {
        1 => Some(false),
        3 | 5 => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::{Described, command, command::OpcodesQuery, mode, op, report};

    #[test]
    fn what_our_target_tells_is_understood() {
        let disk = Described {
            blocks: 1 << 33,
            block_bytes: 512,
            physical_exponent: 3,
            is_read_only: true,
            id: [0xab; 16],
            target: "iqn.2026-11.org.example:a".into(),
            revision: "1.2",
            transfer_bytes_max: 1 << 20,
            transfer_bytes_best: 1 << 18,
            token_bytes_max: 1 << 40,
            token_bytes_best: 1 << 28,
        };
        let standard = Standard::decode(&disk.standard());
        assert_eq!((standard.kind, standard.is_there, &*standard.vendor), (0, true, "DISKWRGT"));
        assert_eq!((&*standard.product, &*standard.revision), ("Virtual disk", "1.2"));
        assert!(!Standard::decode(&crate::scsi::inquiry::absent("1.2")).is_there && !Standard::decode(&[]).is_there);
        assert_eq!(serial(&disk.page(0x80).unwrap()), "ab".repeat(16));
        assert!(pages(&disk.page(0).unwrap()).contains(&0xb0));
        let limits = BlockLimits::decode(&disk.page(0xb0).unwrap());
        assert_eq!((limits.transfer_blocks, limits.same_blocks), (2048, disk.same_blocks_max()));
        assert_eq!(BlockLimits::decode(&disk.page(0xb1).unwrap()), BlockLimits::default());
        assert!(same_unmaps(&disk.page(0xb2).unwrap()) && !same_unmaps(&[]));
        let capacity = Capacity::decode(&report::capacity_16(&disk));
        assert_eq!((capacity.last_block, capacity.block_bytes), ((1 << 33) - 1, 512));
        assert_eq!((capacity.physical_exponent, capacity.unmapped_are_zero), (3, true));
        assert_eq!(units(&report::luns(0, [0, 1, 300].into_iter()).unwrap()), [0, 1, 300]);
        let command::Command::ModeSense { query, .. } =
            command::Command::decode(&super::super::cdb::mode_sense(8, 64)).unwrap()
        else {
            panic!("MODE SENSE")
        };
        let caching = Caching::decode(&mode::sense(&disk, &query).unwrap());
        assert_eq!((caching.is_write_protected, caching.has_fua, caching.has_write_cache), (true, true, true));
        let query = |opcode| OpcodesQuery { options: 1, opcode, action: 0, with_times: false };
        assert_eq!(says_supported(&report::opcodes(&query(op::WRITE_SAME_16)).unwrap()), Some(true));
        assert_eq!(says_supported(&report::opcodes(&query(0xff)).unwrap()), Some(false));
        assert_eq!(says_supported(&[]), None);
    }
}
