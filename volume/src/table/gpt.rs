//! The GUID partition table (UEFI 2.10, chapter 5): a header and an array of entries at both ends
//! of the disk, each with a CRC. Both copies must be right and say the same. If one of them is
//! wrong, the partitions of the other are shown and left alone.

use super::{
    mbr::{self, Entry},
    partition::{Partition, PartitionTable, TableKind, partition},
};
use crate::{
    bytes::{get, le32, le64, utf16},
    read::Window,
    reason::{LeftAlone, ReasonKind},
};
use uuid::{Uuid, uuid};

/// Maximum bytes of an array of entries: 512 partitions. The usual size is 16 KiB.
const ARRAY_BYTES_MAX: u64 = 64 << 10;

/// Types whose partitions belong to a volume manager that has its own idea of where data lie.
const MANAGED: [(Uuid, &str); 4] = [
    (uuid!("5808c8aa-7e8f-42e0-85d2-e1e90434cfb3"), "the metadata of a dynamic disk (LDM)"),
    (uuid!("af9b60a0-1431-4f62-bc68-3311714a69ad"), "a part of a dynamic disk (LDM)"),
    (uuid!("e75caf8f-f680-4cee-afa3-b001e56efc2d"), "a part of Storage Spaces"),
    (uuid!("aa31e02a-400f-11db-9590-000c2911d1b8"), "a part of VMFS"),
];

/// A header whose checksum is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) my_lba: u64,
    pub(super) other_lba: u64,
    pub(super) first_usable_lba: u64,
    pub(super) last_usable_lba: u64,
    pub(super) disk_id: [u8; 16],
    pub(super) array_lba: u64,
    pub(super) entries: u32,
    pub(super) entry_bytes: u32,
    pub(super) array_crc: u32,
}

impl Header {
    /// Length of the array of entries in bytes: at most 64 KiB.
    pub(super) fn array_bytes(&self) -> u64 {
        u64::from(self.entries) * u64::from(self.entry_bytes)
    }
}

/// Whether the signature of a header is at this byte.
pub(super) fn is_header(window: &Window<'_>, at: u64) -> bool {
    window.array(at) == Some(*b"EFI PART")
}

/// The partitions of a GPT.
pub(super) fn read(window: &Window<'_>, protective: Option<[Entry; 4]>) -> Result<PartitionTable, LeftAlone> {
    let last_lba = window.size_bytes() / u64::from(window.sector_bytes()) - 1;
    let first = copy(window, 1);
    let other_lba = first.as_ref().map_or(last_lba, |(header, _)| header.other_lba);
    let second = copy(window, other_lba);
    let (problem, shown) = match (first, second) {
        (Ok(first), Ok(second)) => (disagreement(&first, &second), Some(first)),
        (Ok(first), Err(reason)) => (Some(one_copy("second", &reason)), Some(first)),
        (Err(reason), Ok(second)) => (Some(one_copy("first", &reason)), Some(second)),
        (Err(reason), Err(_)) => (Some(reason), None),
    };
    let hybrid = protective.is_some_and(|entries| mbr::is_hybrid(&entries));
    let problem = problem.or_else(|| {
        hybrid.then(|| LeftAlone::new(ReasonKind::Ambiguous, "a GPT, and an MBR that has partitions too (hybrid MBR)"))
    });
    let partitions = shown.map_or(Vec::new(), |(header, array)| partitions(window, &header, &array));
    Ok(PartitionTable { kind: TableKind::Gpt, problem, partitions })
}

fn one_copy(which: &str, reason: &LeftAlone) -> LeftAlone {
    LeftAlone::new(
        ReasonKind::Damaged,
        format!("the {which} copy of the GPT is not valid; repair it with gdisk: {reason}"),
    )
}

/// Where both copies are valid but do not say the same.
pub(super) fn disagreement((first, one): &(Header, Vec<u8>), (second, other): &(Header, Vec<u8>)) -> Option<LeftAlone> {
    let mirrored = Header { my_lba: second.other_lba, other_lba: second.my_lba, array_lba: first.array_lba, ..*second };
    (mirrored != *first || one != other).then(|| {
        LeftAlone::new(ReasonKind::Ambiguous, "the two copies of the GPT do not agree: repair the table with gdisk")
    })
}

/// The copy whose header is in this sector, with its array.
pub(super) fn copy(window: &Window<'_>, lba: u64) -> Result<(Header, Vec<u8>), LeftAlone> {
    let header = header_at(window, lba)?;
    let array = array_of(window, &header)?;
    if crc32fast::hash(&array) != header.array_crc {
        return Err(wrong(lba, "the checksum of the entries does not match"));
    }
    Ok((header, array))
}

fn wrong(lba: u64, what: &str) -> LeftAlone {
    LeftAlone::damaged(format!("GPT header in sector {lba}: {what}"))
}

/// First byte of a sector.
fn place(window: &Window<'_>, lba: u64) -> Result<u64, LeftAlone> {
    lba.checked_mul(window.sector_bytes().into())
        .ok_or_else(|| LeftAlone::damaged(format!("the GPT points to sector {lba}")))
}

/// The array that a header names. Its checksum is not verified.
pub(super) fn array_of(window: &Window<'_>, header: &Header) -> Result<Vec<u8>, LeftAlone> {
    window.bytes(place(window, header.array_lba)?, header.array_bytes() as usize)
}

/// The header in this sector. Its own checksum is right.
pub(super) fn header_at(window: &Window<'_>, lba: u64) -> Result<Header, LeftAlone> {
    let sector = window.bytes(place(window, lba)?, 512)?;
    let wrong = |what: &str| wrong(lba, what);
    if sector[..8] != *b"EFI PART" {
        return Err(wrong("no signature"));
    }
    let header_bytes = le32(&sector, 12) as usize;
    if !(92..=512).contains(&header_bytes) {
        return Err(wrong("the length is not 92 to 512 bytes"));
    }
    let mut without = sector[..header_bytes].to_vec();
    without[16..20].fill(0);
    if crc32fast::hash(&without) != le32(&sector, 16) {
        return Err(wrong("the checksum does not match"));
    }
    let header = Header {
        my_lba: le64(&sector, 24),
        other_lba: le64(&sector, 32),
        first_usable_lba: le64(&sector, 40),
        last_usable_lba: le64(&sector, 48),
        disk_id: get(&sector, 56),
        array_lba: le64(&sector, 72),
        entries: le32(&sector, 80),
        entry_bytes: le32(&sector, 84),
        array_crc: le32(&sector, 88),
    };
    if header.my_lba != lba {
        return Err(wrong("it names another sector as its own"));
    }
    let array_bytes = header.array_bytes();
    if header.entry_bytes < 128 || !header.entry_bytes.is_multiple_of(8) || array_bytes > ARRAY_BYTES_MAX {
        return Err(wrong("the array of entries has an unknown shape"));
    }
    Ok(header)
}

/// The partitions of an array.
pub(super) fn partitions(window: &Window<'_>, header: &Header, array: &[u8]) -> Vec<Partition> {
    let mut partitions = Vec::new();
    for (index, entry) in array.chunks_exact(header.entry_bytes as usize).enumerate() {
        let kind = Uuid::from_bytes_le(get(entry, 0));
        if kind.is_nil() {
            continue;
        }
        let (first, last) = (le64(entry, 32), le64(entry, 40));
        let number = index as u32 + 1;
        let mut made = partition(window, number, first, last.saturating_add(1), kind.to_string());
        made.name = utf16(&entry[56..128]);
        if first < header.first_usable_lba || last > header.last_usable_lba {
            made.problem
                .get_or_insert(LeftAlone::damaged(format!("partition {number} lies outside of the usable area")));
        }
        if let Some((_, what)) = MANAGED.iter().find(|(managed, _)| *managed == kind) {
            made.problem = Some(LeftAlone::unsupported(what));
        }
        partitions.push(made);
    }
    partitions
}
