//! Which structures count as evidence, on file systems that the tests build byte by byte.

use super::*;
use crate::{bytes::crc32c_raw, sighting::PROOF};
use std::io;

const MIB: u64 = 1 << 20;
/// 100 ns since 1601, in 2024.
const FORMATTED: u64 = 133_500_000_000_000_000;
const CLUSTER: usize = 4096;
/// First byte of the MFT in a volume of [`ntfs`].
const MFT: usize = 16 * CLUSTER;

/// A disk in memory, of which some ranges cannot be read.
struct Disk {
    bytes: Vec<u8>,
    unread: Vec<Range<u64>>,
}

impl ReadAt for Disk {
    fn size_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset_bytes + buf.len() as u64;
        if self.unread.iter().any(|range| range.start < end && offset_bytes < range.end) {
            return Err(io::Error::other("lost"));
        }
        buf.copy_from_slice(&self.bytes[offset_bytes as usize..end as usize]);
        Ok(())
    }
}

/// A record of an MFT of 64 clusters, created and last changed at these times.
fn record(number: u32, created: u64, changed: u64) -> [u8; 1024] {
    let mut raw = [0; 1024];
    let mut put = |at: usize, bytes: &[u8]| raw[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"FILE\x30\0\x03\0");
    put(0x14, &[0x38, 0, 1, 0]);
    put(0x2c, &number.to_le_bytes());
    // Fixups: the mark 1 at the end of both sectors, and zeros in their place.
    put(0x30, &[1, 0]);
    put(510, &[1, 0]);
    put(1022, &[1, 0]);
    // $STANDARD_INFORMATION.
    put(0x38, &[0x10, 0, 0, 0, 72]);
    put(0x38 + 16, &[48, 0, 0, 0, 24]);
    for (index, time) in [created, changed, changed, changed].into_iter().enumerate() {
        put(0x38 + 24 + index * 8, &time.to_le_bytes());
    }
    // $DATA with one run.
    put(0x80, &[0x80, 0, 0, 0, 72, 0, 0, 0, 1]);
    put(0x80 + 24, &63_u64.to_le_bytes());
    put(0x80 + 32, &[64]);
    put(0x80 + 64, &[0x11, 64, 16]);
    put(0xc8, &[0xff; 4]);
    raw
}

/// The boot sector of a volume of 1 MiB.
fn boot(serial: u64) -> [u8; 512] {
    let mut raw = [0; 512];
    raw[3..11].copy_from_slice(b"NTFS    ");
    raw[0x0b..0x0e].copy_from_slice(&[0, 2, 8]);
    raw[0x28..0x30].copy_from_slice(&(MIB / 512 - 8).to_le_bytes());
    raw[0x30] = 16;
    raw[0x40] = 0xf6;
    raw[0x48..0x50].copy_from_slice(&serial.to_le_bytes());
    raw[510..].copy_from_slice(&[0x55, 0xaa]);
    raw
}

/// A disk of 4 MiB with one volume at its start.
fn disk() -> Disk {
    let mut bytes = vec![0; 4 * MIB as usize];
    bytes[..512].copy_from_slice(&boot(7));
    bytes[MFT..MFT + 1024].copy_from_slice(&record(0, FORMATTED, FORMATTED));
    Disk { bytes, unread: Vec::new() }
}

/// Records 8 to 11 in a block of 4 KiB, and where the witness sees them.
fn seen(witness: &DiskEvidence, changed: u64) -> Vec<(u64, u32)> {
    let block: Vec<u8> = (8..12).flat_map(|number| record(number, changed, changed)).collect();
    let mut found = Vec::new();
    witness.look(&block, &mut |seen| {
        if let Sighting::At { within_bytes, disk_offset_bytes, weight, .. } = seen {
            found.push((disk_offset_bytes - within_bytes as u64, weight));
        }
    });
    found
}

fn learned(disk: &Disk, anchors: &[u64]) -> DiskEvidence {
    let anchors: Vec<Anchor> = anchors.iter().map(|&start_bytes| Anchor { start_bytes, superblock_bytes: 0 }).collect();
    DiskEvidence::learn(disk, &anchors, u64::MAX)
}

#[test]
fn records_of_the_volume_state_their_place() {
    let witness = learned(&disk(), &[0]);
    let found = seen(&witness, FORMATTED + 1);
    assert_eq!(found, [((MFT + 8 * 1024) as u64, 1); 4]);
    assert!(found.iter().map(|(_, weight)| weight).sum::<u32>() >= PROOF);
}

/// A volume that was formatted again: records of the former one have the same numbers.
#[test]
fn records_older_than_the_volume_prove_nothing() {
    let witness = learned(&disk(), &[0]);
    assert_eq!(seen(&witness, FORMATTED - 36_000_000_000), []);
}

/// Records do not name their volume: with another one on the disk, whose MFT is lost, they prove
/// nothing.
#[test]
fn records_prove_nothing_beside_an_ntfs_that_is_not_known() {
    // The copy of the boot sector is of the volume itself.
    let mut own = disk();
    let copy = (MIB - 4096) as usize;
    own.bytes[copy..copy + 512].copy_from_slice(&boot(7));
    assert_eq!(seen(&learned(&own, &[0, copy as u64]), FORMATTED).len(), 4);
    // Another volume whose MFT is lost, found by its boot sector.
    let mut two = disk();
    let at = 2 * MIB as usize;
    two.bytes[at..at + 512].copy_from_slice(&boot(8));
    assert_eq!(seen(&learned(&two, &[0, at as u64]), FORMATTED), []);
    // The boot sector of another volume in bytes of unknown place.
    let witness = learned(&disk(), &[0]);
    assert_eq!(seen(&witness, FORMATTED).len(), 4);
    witness.look(&boot(7), &mut |_| {});
    assert_eq!(seen(&witness, FORMATTED).len(), 4);
    witness.look(&boot(8), &mut |_| {});
    assert_eq!(seen(&witness, FORMATTED), []);
}

/// A partition whose first sector cannot be read, or a lost partition table, may hide a volume.
#[test]
fn records_prove_nothing_beside_what_cannot_be_read() {
    let shifted = |partitions: &[(u32, u32)]| {
        let mut bytes = vec![0; 8 * MIB as usize];
        let volume = disk().bytes;
        bytes[MIB as usize..5 * MIB as usize].copy_from_slice(&volume);
        for (index, (start, sectors)) in partitions.iter().enumerate() {
            let at = 0x1be + index * 16;
            bytes[at + 4] = 7;
            bytes[at + 8..at + 12].copy_from_slice(&start.to_le_bytes());
            bytes[at + 12..at + 16].copy_from_slice(&sectors.to_le_bytes());
        }
        bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
        Disk { bytes, unread: Vec::new() }
    };
    let mut known = shifted(&[(2048, 4096), (12288, 1024)]);
    assert_eq!(seen(&learned(&known, &[]), FORMATTED).len(), 4);
    known.unread.push(6 * MIB..7 * MIB);
    assert_eq!(seen(&learned(&known, &[]), FORMATTED), [], "the second partition");
    let mut lost = shifted(&[(2048, 4096)]);
    lost.unread.push(0..4096);
    assert_eq!(seen(&learned(&lost, &[MIB]), FORMATTED), [], "the partition table");
}

/// A disk of superblocks of ext4 with as many groups as can be: each KiB is one, and claims to be
/// the first one.
struct Superblocks {
    raw: Vec<u8>,
    reads: Cell<u64>,
}

impl ReadAt for Superblocks {
    fn size_bytes(&self) -> u64 {
        1 << 40
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.set(self.reads.get() + 1);
        for (at, byte) in (offset_bytes..).zip(buf) {
            *byte = self.raw[(at % 1024) as usize];
        }
        Ok(())
    }
}

#[test]
fn hostile_superblocks_have_one_budget_for_all() {
    let mut raw = vec![0; 1024];
    let mut put = |at: usize, value: u32| raw[at..at + 4].copy_from_slice(&value.to_le_bytes());
    // 2^20 groups of 256 blocks, with checksums.
    put(0x04, 256 << 20);
    put(0x00, 8 << 20);
    put(0x14, 1);
    put(0x20, 256);
    put(0x24, 256);
    put(0x28, 8);
    put(0x38, 0xef53);
    put(0x4c, 1);
    put(0x58, 256);
    put(0x64, 0x400);
    raw[0x175] = 1;
    let sum = crc32c_raw(!0, &raw[..0x3fc]);
    raw[0x3fc..].copy_from_slice(&sum.to_le_bytes());
    let disk = Superblocks { raw, reads: Cell::new(0) };
    let anchors: Vec<Anchor> =
        (0..64).map(|index| Anchor { start_bytes: index * MIB, superblock_bytes: 1024 }).collect();
    let budget_bytes = 16 * MIB;
    let witness = DiskEvidence::learn(&disk, &anchors, budget_bytes);
    assert!(witness.systems() > 0, "the superblocks are believed");
    // No read is shorter than 512 bytes, so a piece of 64 KiB is read by at most 128 of them.
    assert!(disk.reads.get() <= 2 * budget_bytes / 512, "{} reads", disk.reads.get());
}
