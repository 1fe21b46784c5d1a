//! Where disks end, and what their tables become, on tables made by hand.

use crate::lab::{Bytes, MIB};
use diskwright_volume::{ReadAt, ReasonKind, Step, TableKind, ends, table_change};
use std::io;

/// A disk in memory with sectors of another size.
struct Sectors(Vec<u8>, u32);

impl ReadAt for Sectors {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn sector_bytes(&self) -> u32 {
        self.1
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        let start = offset_bytes as usize;
        buf.copy_from_slice(&self.0[start..start + buf.len()]);
        Ok(())
    }
}

/// A GPT of `entries` on a disk, both copies valid.
fn gpt(size_bytes: usize, sector: usize, entries: &[(u64, u64)]) -> Vec<u8> {
    gpt_of(size_bytes, sector, entries, 128, 128, 34.max(2 + 16384 / sector as u64))
}

fn gpt_of(
    size_bytes: usize,
    sector: usize,
    entries: &[(u64, u64)],
    count: u32,
    entry_bytes: u32,
    first_usable: u64,
) -> Vec<u8> {
    let mut disk = vec![0; size_bytes];
    let last = (size_bytes / sector - 1) as u64;
    disk[450] = 0xee;
    disk[454] = 1;
    disk[458..462].copy_from_slice(&(last as u32).to_le_bytes());
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    let array_bytes = (u64::from(count) * u64::from(entry_bytes)).min(64 << 10) as usize;
    let mut array = vec![0; array_bytes];
    for (index, (first, end)) in entries.iter().enumerate() {
        let entry = &mut array[index * entry_bytes as usize..];
        entry[..16].fill(7);
        entry[32..40].copy_from_slice(&first.to_le_bytes());
        entry[40..48].copy_from_slice(&(end - 1).to_le_bytes());
    }
    let second = last - array_bytes.div_ceil(sector) as u64;
    for (mine, other, at) in [(1, last, 2), (last, 1, second)] {
        disk[at as usize * sector..][..array_bytes].copy_from_slice(&array);
        let mut header = vec![0; 92];
        header[..16].copy_from_slice(b"EFI PART\0\0\x01\0\x5c\0\0\0");
        for (place, value) in [(24, mine), (32, other), (40, first_usable), (48, second - 1), (72, at)] {
            header[place..place + 8].copy_from_slice(&value.to_le_bytes());
        }
        header[80..84].copy_from_slice(&count.to_le_bytes());
        header[84..88].copy_from_slice(&entry_bytes.to_le_bytes());
        header[88..92].copy_from_slice(&crc32fast::hash(&array).to_le_bytes());
        let crc = crc32fast::hash(&header);
        header[16..20].copy_from_slice(&crc.to_le_bytes());
        disk[mine as usize * sector..][..92].copy_from_slice(&header);
    }
    disk
}

/// Carries out steps on a disk that gets `size_bytes`.
fn carry_out(disk: &mut Vec<u8>, size_bytes: u64, steps: &[Step]) {
    disk.resize(disk.len().max(size_bytes as usize), 0);
    for step in steps {
        disk[step.offset_bytes as usize..][..step.bytes.len()].copy_from_slice(&step.bytes);
    }
    disk.truncate(size_bytes as usize);
}

#[test]
fn a_gpt_with_sectors_of_4096_bytes_moves() {
    let sector = 4096;
    let mut bytes = gpt(16 << 20, sector, &[(64, 128), (128, 1024)]);
    // 4 sectors for the entries, one for the header.
    let least = (1024 + 5) * sector as u64;
    assert_eq!(ends(&Sectors(bytes.clone(), 4096)).min_bytes, Ok(least));
    assert!(ends(&Bytes(bytes.clone())).min_bytes.is_err(), "512 bytes is wrong here");
    let change = table_change(&Sectors(bytes.clone(), 4096), least, None).unwrap();
    carry_out(&mut bytes, least, &change.steps);
    let moved = Sectors(bytes.clone(), 4096);
    assert_eq!(ends(&moved).min_bytes, Ok(least));
    assert_eq!(diskwright_volume::volumes(&moved).problem, None);
    assert!(table_change(&moved, least, None).unwrap().steps.is_empty(), "nothing is left to do");
    let change = table_change(&moved, 32 << 20, Some(2)).unwrap();
    assert_eq!(change.enlarged.unwrap().new_bytes, (31 << 20) - 128 * 4096);
    carry_out(&mut bytes, 32 << 20, &change.steps);
    assert_eq!(diskwright_volume::volumes(&Sectors(bytes, 4096)).problem, None);
}

/// Every prefix of the steps leaves a table that the next run accepts, and finishes.
#[test]
fn an_interrupted_change_is_finished() {
    let before = gpt(16 << 20, 512, &[(2048, 4096), (4096, 8192)]);
    for (size_bytes, enlarge) in [(8_u64 << 20, None), (16 << 20, Some(2)), (24 << 20, Some(2)), (24 << 20, None)] {
        let grown = size_bytes.max(16 << 20);
        let change = table_change(&Bytes(before.clone()), size_bytes, enlarge).unwrap();
        for done in 0..=change.steps.len() {
            let mut disk = before.clone();
            carry_out(&mut disk, grown, &change.steps[..done]);
            let rest = table_change(&Bytes(disk.clone()), size_bytes, enlarge)
                .unwrap_or_else(|error| panic!("{size_bytes} {enlarge:?}, {done} steps: {error}"));
            carry_out(&mut disk, size_bytes, &rest.steps);
            let disk = Bytes(disk);
            let layout = diskwright_volume::volumes(&disk);
            assert_eq!(layout.problem, None, "{size_bytes} {enlarge:?}, {done} steps");
            let end = layout.volumes[1].extents[0].disk_offset_bytes + layout.volumes[1].size_bytes();
            assert_eq!(end, if enlarge.is_some() { size_bytes - MIB } else { 4 << 20 });
        }
    }
}

#[test]
fn hostile_tables_are_refused() {
    let size = 16_usize << 20;
    let refused = |bytes: Vec<u8>, what: &str| {
        let disk = Bytes(bytes);
        assert!(ends(&disk).min_bytes.is_err(), "{what}");
        for size_bytes in [4 << 20, 16 << 20, 32 << 20] {
            assert!(table_change(&disk, size_bytes, None).is_err(), "{what}");
            assert!(table_change(&disk, size_bytes, Some(1)).is_err(), "{what}");
        }
    };
    refused(gpt(size, 512, &[(2048, 1 << 40)]), "a partition beyond the disk");
    refused(gpt(size, 512, &[(2048, 8192), (4096, 6144)]), "partitions in one another");
    refused(gpt(size, 512, &[(8192, 2048)]), "a partition that ends before it begins");
    refused(gpt(size, 512, &[(1, 4096)]), "a partition over the table");
    refused(gpt(size, 512, &[(2048, u64::MAX)]), "the last sector there can be");
    refused(gpt_of(size, 512, &[], 128, 0, 34), "entries of 0 bytes");
    refused(gpt_of(size, 512, &[], u32::MAX, 128, 34), "2^32 entries");
    refused(gpt_of(size, 512, &[], 128, 128, 10), "entries in the usable area");
    // The two copies are valid and differ.
    let mut two = gpt(size, 512, &[(2048, 4096)]);
    let other = gpt(size, 512, &[(2048, 6144)]);
    two[size - 33 * 512..].copy_from_slice(&other[size - 33 * 512..]);
    assert_eq!(ends(&Bytes(two.clone())).min_bytes.unwrap_err().why, ReasonKind::Ambiguous);
    assert!(table_change(&Bytes(two.clone()), 8 << 20, None).is_err());
    // That is what the first step of enlarging partition 1 leaves.
    assert!(table_change(&Bytes(two), 16 << 20, Some(1)).is_ok());
}

#[test]
fn an_empty_gpt_needs_only_itself() {
    let disk = Bytes(gpt(8 << 20, 512, &[]));
    let found = ends(&disk);
    assert_eq!((found.table, found.min_bytes), (TableKind::Gpt, Ok((35 + 33) * 512)));
}

#[test]
fn an_mbr_reaches_two_tebibytes() {
    let mut sector = vec![0; 4 << 20];
    sector[450] = 0x83;
    sector[454..462].copy_from_slice(&[0, 8, 0, 0, 0, 8, 0, 0]);
    sector[510..512].copy_from_slice(&[0x55, 0xaa]);
    let disk = Bytes(sector);
    assert_eq!(ends(&disk).min_bytes, Ok(2 * MIB));
    assert!(table_change(&disk, 2 << 40, Some(1)).unwrap_err().to_string().contains("convert the table to GPT"));
    let most = (2 << 40) - MIB;
    let change = table_change(&disk, most, Some(1)).unwrap();
    assert_eq!((change.steps.len(), change.enlarged.unwrap().new_bytes), (1, most - MIB));
}
