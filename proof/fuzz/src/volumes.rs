//! Damaged file systems and partition tables, as the readers of free space see them.
//!
//! ```text
//!   ../volumes/N.sectors    small file systems by their own tools (../volumes/make)
//!        │  an overlay of changed sectors; checksums repaired if the input says so
//!        ▼
//!   volumes(), free_ranges()    no panic; order, bounds and sums; bounded memory and time
//!   ends(), table_change()      nothing of a partition is lost or overwritten
//! ```
//!
//! Where every structure has a CRC-32C that is not repaired (XFS, btrfs), damage must not make
//! anything free that was in use.

use crate::mutation::Value;
use arbitrary::{Arbitrary, Unstructured};
use diskwright_volume::{Place, ReadAt, ends, free_ranges, table_change, volumes as volumes_of};
use std::{
    collections::BTreeMap,
    io,
    ops::{ControlFlow, Range},
    sync::OnceLock,
};

const SECTOR_BYTES: usize = 512;
/// Maximum number of edits of one input. Further ones are ignored.
const EDITS_MAX: usize = 8;

type Sector = [u8; SECTOR_BYTES];

/// A small file system.
struct Sample {
    name: &'static str,
    size_bytes: u64,
    /// The sectors that are not zeros, by number.
    sectors: BTreeMap<u64, Sector>,
    /// What is free while nothing is damaged.
    free: Vec<Range<u64>>,
}

const SAMPLES: [(&str, &[u8]); 11] = [
    ("ext4", include_bytes!("../volumes/ext4.sectors")),
    ("ext2", include_bytes!("../volumes/ext2.sectors")),
    ("ntfs", include_bytes!("../volumes/ntfs.sectors")),
    ("xfs", include_bytes!("../volumes/xfs.sectors")),
    ("fat12", include_bytes!("../volumes/fat12.sectors")),
    ("fat32", include_bytes!("../volumes/fat32.sectors")),
    ("exfat", include_bytes!("../volumes/exfat.sectors")),
    ("btrfs", include_bytes!("../volumes/btrfs.sectors")),
    ("mbr", include_bytes!("../volumes/mbr.sectors")),
    ("gpt", include_bytes!("../volumes/gpt.sectors")),
    ("lvm2", include_bytes!("../volumes/lvm2.sectors")),
];

/// The decoded input of a fuzzer.
#[derive(Debug, Arbitrary)]
struct Damage {
    /// Index of the sample, modulo the number of samples.
    sample: u8,
    edits: Vec<Edit>,
    /// Whether the checksums are repaired.
    seal: bool,
}

/// One change of a field.
#[derive(Debug, Arbitrary)]
struct Edit {
    /// Index among the sectors that are not zeros, modulo their number.
    sector: u16,
    /// Offset in the sector, modulo its length.
    offset: u16,
    /// Width of the field: 1, 2, 4 or 8 bytes, as `1 << (width % 4)`.
    width: u8,
    value: Value,
}

/// A sample with changed sectors.
struct Damaged<'a> {
    sample: &'a Sample,
    changed: BTreeMap<u64, Sector>,
}

impl ReadAt for Damaged<'_> {
    fn size_bytes(&self) -> u64 {
        self.sample.size_bytes
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        assert!(offset_bytes + buf.len() as u64 <= self.sample.size_bytes, "a read beyond the disk");
        let mut done = 0;
        while done < buf.len() {
            let at = offset_bytes + done as u64;
            let (number, into) = (at / SECTOR_BYTES as u64, at as usize % SECTOR_BYTES);
            let take = (SECTOR_BYTES - into).min(buf.len() - done);
            let part = &mut buf[done..done + take];
            match self.changed.get(&number).or_else(|| self.sample.sectors.get(&number)) {
                Some(sector) => part.copy_from_slice(&sector[into..into + take]),
                None => part.fill(0),
            }
            done += take;
        }
        Ok(())
    }
}

impl Damaged<'_> {
    fn get(&self, offset_bytes: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        if offset_bytes.checked_add(len as u64).is_some_and(|end| end <= self.sample.size_bytes) {
            self.read_at(offset_bytes, &mut bytes).expect("memory can be read");
        }
        bytes
    }

    fn put(&mut self, offset_bytes: u64, bytes: &[u8]) {
        for (at, byte) in (offset_bytes..).zip(bytes) {
            let number = at / SECTOR_BYTES as u64;
            let before = self.sample.sectors.get(&number).copied().unwrap_or([0; SECTOR_BYTES]);
            self.changed.entry(number).or_insert(before)[at as usize % SECTOR_BYTES] = *byte;
        }
    }

    fn apply(&mut self, edit: &Edit) {
        let count = self.sample.sectors.len();
        let Some(number) = self.sample.sectors.keys().nth(usize::from(edit.sector) % count) else { return };
        let width = 1_usize << (edit.width % 4);
        let at = number * SECTOR_BYTES as u64 + (usize::from(edit.offset) % SECTOR_BYTES / width * width) as u64;
        let big_endian = self.sample.name == "xfs";
        let mut whole = [0; 8];
        whole[..width].copy_from_slice(&self.get(at, width));
        if big_endian {
            whole[..width].reverse();
        }
        let mut value = edit.value.of(u64::from_le_bytes(whole)).to_le_bytes();
        if big_endian {
            value[..width].reverse();
        }
        self.put(at, &value[..width]);
    }

    /// Repairs the checksums of the structures that are read first.
    fn seal(&mut self) {
        match self.sample.name {
            "ext4" => {
                let sum = !crc32c::crc32c(&self.get(1024, 0x3fc));
                self.put(1024 + 0x3fc, &sum.to_le_bytes());
            }
            "xfs" => {
                let root = self.get(512 + 16, 4).try_into().map_or(0, u32::from_be_bytes);
                for (at, len, crc_at) in [(0, 512, 224), (512, 512, 216), (u64::from(root) * 4096, 4096, 52)] {
                    self.seal_around(at, len, crc_at);
                }
            }
            "btrfs" => {
                let uuid = self.get(0x1_0020, 16);
                let blocks: Vec<u64> = self.sample.sectors.keys().filter(|number| **number % 8 == 0).copied().collect();
                for at in blocks.into_iter().map(|number| number * SECTOR_BYTES as u64) {
                    if self.get(at + 32, 16) == uuid {
                        let sum = crc32c::crc32c(&self.get(at + 32, 4096 - 32));
                        self.put(at, &sum.to_le_bytes());
                    }
                }
            }
            "gpt" => {
                let sum = crc32fast::hash(&self.get(1024, 128 * 128));
                self.put(512 + 88, &sum.to_le_bytes());
                self.put(512 + 16, &[0; 4]);
                let sum = crc32fast::hash(&self.get(512, 92));
                self.put(512 + 16, &sum.to_le_bytes());
            }
            "exfat" => {
                let bytes = self.get(0, 11 * SECTOR_BYTES);
                let summed = bytes.iter().enumerate().filter(|(at, _)| !matches!(at, 106 | 107 | 112));
                let sum = summed.fold(0_u32, |sum, (_, byte)| sum.rotate_right(1).wrapping_add(u32::from(*byte)));
                self.put(11 * SECTOR_BYTES as u64, &sum.to_le_bytes().repeat(SECTOR_BYTES / 4));
            }
            _ => {}
        }
    }

    /// Repairs a CRC-32C whose own field counts as zeros.
    fn seal_around(&mut self, at: u64, len: usize, crc_at: usize) {
        let mut bytes = self.get(at, len);
        bytes[crc_at..crc_at + 4].fill(0);
        if at + len as u64 <= self.sample.size_bytes {
            self.put(at + crc_at as u64, &crc32c::crc32c(&bytes).to_le_bytes());
        }
    }
}

fn samples() -> &'static [Sample] {
    static MADE: OnceLock<Vec<Sample>> = OnceLock::new();
    MADE.get_or_init(|| SAMPLES.iter().map(|(name, packed)| unpack(name, packed)).collect())
}

/// Reads a sample; `../volumes/make` describes the form.
fn unpack(name: &'static str, packed: &[u8]) -> Sample {
    let (size, mut rest) = packed.split_first_chunk::<8>().expect("a size");
    let mut sectors = BTreeMap::new();
    while let Some((head, after)) = rest.split_first_chunk::<7>() {
        let first = u64::from(u32::from_le_bytes([head[0], head[1], head[2], head[3]]));
        let count = usize::from(u16::from_le_bytes([head[4], head[5]]));
        let len = if head[6] == 0 { count * SECTOR_BYTES } else { 1 };
        let (bytes, after) = after.split_at(len);
        for index in 0..count {
            let sector = match head[6] {
                0 => bytes[index * SECTOR_BYTES..][..SECTOR_BYTES].try_into().expect("a sector"),
                _ => [bytes[0]; SECTOR_BYTES],
            };
            sectors.insert(first + index as u64, sector);
        }
        rest = after;
    }
    let mut sample = Sample { name, size_bytes: u64::from_le_bytes(*size), sectors, free: Vec::new() };
    sample.free = free_of(&Damaged { sample: &sample, changed: BTreeMap::new() });
    sample
}

/// The free ranges of all volumes, after a check of order, bounds and sums.
fn free_of(disk: &Damaged<'_>) -> Vec<Range<u64>> {
    let mut all = Vec::new();
    for volume in volumes_of(disk).volumes {
        assert!(!volume.name().is_empty());
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let given = free_ranges(disk, &volume, &mut |range| {
            ranges.push(range);
            ControlFlow::Continue(())
        });
        assert_eq!(given, volume.free_bytes, "both answers are the same");
        assert_eq!(ranges.iter().map(|range| range.end - range.start).sum::<u64>(), given.unwrap_or(0));
        let inside = |range: &Range<u64>| {
            volume.extents.iter().any(|extent| {
                extent.disk_offset_bytes <= range.start && range.end <= extent.disk_offset_bytes + extent.len_bytes
            })
        };
        assert!(ranges.iter().all(|range| range.start < range.end && inside(range)));
        all.extend(ranges);
    }
    all.sort_by_key(|range| range.start);
    assert!(all.windows(2).all(|pair| pair[0].end <= pair[1].start), "volumes share a free range");
    all
}

/// A new size takes nothing from a partition: neither the smallest size, nor what is written to the
/// table for it, or for a disk of twice the size whose last partition is enlarged.
fn resize(disk: &Damaged<'_>) {
    let size_bytes = disk.size_bytes();
    let volumes = volumes_of(disk).volumes;
    let partitions: Vec<_> = volumes.iter().filter(|volume| matches!(volume.place, Place::Partition(_))).collect();
    let ranges: Vec<Range<u64>> = partitions
        .iter()
        .filter_map(|volume| volume.extents.first())
        .map(|extent| extent.disk_offset_bytes..extent.disk_offset_bytes + extent.len_bytes)
        .collect();
    let min_bytes = ends(disk).min_bytes.unwrap_or(size_bytes);
    assert!(min_bytes <= size_bytes && min_bytes.is_multiple_of(SECTOR_BYTES as u64));
    assert!(ranges.iter().all(|range| range.end <= min_bytes), "a partition is cut");
    for (new_bytes, number) in
        [min_bytes, size_bytes * 2].into_iter().flat_map(|size| (0..6).map(move |one| (size, one)))
    {
        let enlarge = (number > 0).then_some(number);
        let Ok(change) = table_change(disk, new_bytes, enlarge) else { continue };
        for step in &change.steps {
            let written = step.offset_bytes..step.offset_bytes + step.bytes.len() as u64;
            assert!(
                written.start.is_multiple_of(SECTOR_BYTES as u64) && written.end.is_multiple_of(SECTOR_BYTES as u64)
            );
            assert!(written.end <= new_bytes, "a write beyond the end");
            let touches = |range: &Range<u64>| written.start < range.end && range.start < written.end;
            // A partition over the table itself is refused elsewhere.
            assert!(!ranges.iter().any(touches), "{written:?} is in a partition");
        }
        if let Some(enlarged) = change.enlarged {
            assert!(enlarged.new_bytes >= enlarged.old_bytes && enlarged.new_bytes <= new_bytes);
        }
    }
}

/// Asks for the free space of a damaged disk, and how it could be resized.
pub fn volumes(data: &[u8]) {
    let Ok(damage) = Damage::arbitrary(&mut Unstructured::new(data)) else { return };
    let all = samples();
    let sample = &all[usize::from(damage.sample) % all.len()];
    let mut disk = Damaged { sample, changed: BTreeMap::new() };
    damage.edits.iter().take(EDITS_MAX).for_each(|edit| disk.apply(edit));
    if damage.seal {
        disk.seal();
    }
    resize(&disk);
    let free = free_of(&disk);
    if !damage.seal && matches!(sample.name, "xfs" | "btrfs") {
        let was_free = |range: &Range<u64>| {
            sample.free.iter().any(|around| around.start <= range.start && range.end <= around.end)
        };
        assert!(free.iter().all(was_free), "{}: damage makes used blocks free", sample.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_has_free_space_while_it_is_not_damaged() {
        for sample in samples() {
            let free_bytes: u64 = sample.free.iter().map(|range| range.end - range.start).sum();
            assert!(free_bytes > sample.size_bytes / 8, "{}: {free_bytes}", sample.name);
        }
    }

    #[test]
    fn every_sample_can_be_made_smaller_or_says_why() {
        for sample in samples() {
            let disk = Damaged { sample, changed: BTreeMap::new() };
            resize(&disk);
            assert!(ends(&disk).min_bytes.is_ok(), "{}: {:?}", sample.name, ends(&disk).min_bytes);
        }
    }

    #[test]
    fn repaired_checksums_are_right() {
        for sample in samples() {
            let mut disk = Damaged { sample, changed: BTreeMap::new() };
            disk.seal();
            assert_eq!(free_of(&disk), sample.free, "{}", sample.name);
        }
    }
}
