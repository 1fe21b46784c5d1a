//! Disks whose contents are known, and damage to their tables.

use diskwright_disk::{CreateRequest, Disk, OpenOptions, RangeKind, RescueOptions, Rescued, create, rescue};
use diskwright_image::{DiskType, Format};
use diskwright_store::{Blocking, CacheMode, EngineKind};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;

/// A folder in memory, as tools sync what they write.
pub fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// Runs a tool in a folder. `None` if it is not installed.
#[track_caller]
pub fn tool(dir: &Path, line: &str) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let output = match Command::new(words[0])
        .args(&words[1..])
        .current_dir(dir)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .output()
    {
        Ok(output) => output,
        Err(error) => {
            println!("skipped: {}: {error}", words[0]);
            return None;
        }
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{line}: {text}{}", String::from_utf8_lossy(&output.stderr));
    Some(text)
}

/// Creates an image with these contents. Blocks of zeros have no space.
pub fn image(path: &Path, block_bytes: Option<u32>, disk_type: DiskType, contents: &[u8]) {
    let request = CreateRequest {
        size_bytes: Some(contents.len() as u64),
        disk_type: Some(disk_type),
        block_bytes,
        ..CreateRequest::default()
    };
    create(path, &request).unwrap();
    write(path, contents);
}

/// Writes all pieces of 64 KiB that are not zeros.
pub fn write(path: &Path, contents: &[u8]) {
    write_pieces(path, contents, |piece| piece.iter().any(|byte| *byte != 0));
}

/// Writes everything, zeros too.
pub fn write_all(path: &Path, contents: &[u8]) {
    write_pieces(path, contents, |_| true);
}

fn write_pieces(path: &Path, contents: &[u8], is_written: impl Fn(&[u8]) -> bool) {
    let disk = Disk::open(path, &OpenOptions { writable: true, cache: CacheMode::PageCache, ..OpenOptions::default() })
        .unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    for (index, piece) in contents.chunks(64 << 10).enumerate() {
        if is_written(piece) {
            io.write((index as u64) << 16, piece, false).unwrap();
        }
    }
    drop(io);
    disk.close().unwrap();
}

/// The entries of a block table in the bytes of a file, which may have two copies.
#[derive(Debug, Clone)]
pub struct Table {
    pub format: Format,
    pub offsets: Vec<usize>,
    width: usize,
}

fn u32_le(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

fn u64_be(bytes: &[u8], at: usize) -> usize {
    (u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00) as usize
}

impl Table {
    /// The table of a file that this program has just made.
    pub fn of(format: Format, bytes: &[u8]) -> Self {
        let (offsets, width) = match format {
            Format::Vhd => (vec![u64_be(bytes, 512 + 16)], 4),
            Format::Vdi => (vec![u32_le(bytes, 0x154)], 4),
            // The first L2 table.
            Format::Qcow2 => (vec![u64_be(bytes, u64_be(bytes, 40))], 8),
            // The first table of each directory.
            Format::Vmdk => ([56, 48].map(|at| u32_le(bytes, u32_le(bytes, at) * 512) * 512).to_vec(), 4),
            _ => (vec![3 << 20], 8),
        };
        Self { format, offsets, width }
    }

    pub fn entry<'a>(&self, bytes: &'a [u8], block: u64) -> &'a [u8] {
        &bytes[self.offsets[0] + block as usize * self.width..][..self.width]
    }

    /// Changes the entry, in all copies.
    pub fn set(&self, bytes: &mut [u8], block: u64, value: &[u8]) {
        for offset in &self.offsets {
            bytes[offset + block as usize * self.width..][..self.width].copy_from_slice(value);
        }
    }

    /// Whether the block has space.
    pub fn has_space(&self, bytes: &[u8], block: u64) -> bool {
        let entry = self.entry(bytes, block);
        match self.format {
            Format::Vhd | Format::Vdi => entry != [0xff; 4],
            Format::Qcow2 | Format::Vmdk => entry.iter().any(|byte| *byte != 0),
            _ => entry[0] & 7 >= 6,
        }
    }

    /// Makes the entry say that the block has no space.
    pub fn wipe(&self, bytes: &mut [u8], block: u64) {
        let value = if matches!(self.format, Format::Vhd | Format::Vdi) { 0xff } else { 0 };
        self.set(bytes, block, &[value; 8][..self.width]);
    }

    /// Fills the entry with a value that no table has: it points far beyond any file.
    pub fn garble(&self, bytes: &mut [u8], block: u64) {
        self.set(bytes, block, &[0xd7; 8][..self.width]);
    }
}

/// Rescues `source` into `dest.raw`, and returns the result and the contents.
#[track_caller]
pub fn rescued(dir: &Path, source: &Path, options: &RescueOptions) -> (Rescued, Vec<u8>) {
    let dest = dir.join("dest.raw");
    let _ = fs::remove_file(&dest);
    let before = fs::read(source).unwrap();
    let found = rescue(source, &dest, options, &mut |_, _| true).unwrap();
    assert!(fs::read(source).unwrap() == before, "the source was written to");
    (found, fs::read(dest).unwrap())
}

/// Checks that everything that was called readable is what was written, and that the rest is zeros.
/// The ranges cover the whole disk.
#[track_caller]
pub fn same_as(found: &Rescued, copy: &[u8], model: &[u8]) {
    assert_eq!(copy.len(), model.len());
    let mut at = 0;
    for range in &found.ranges {
        assert_eq!(range.offset_bytes, at, "{range:?}");
        at += range.len_bytes;
        let bytes = range.offset_bytes as usize..at as usize;
        match range.kind {
            RangeKind::Data | RangeKind::Zero => {
                let wrong = copy[bytes.clone()].iter().zip(&model[bytes]).position(|(a, b)| a != b);
                assert_eq!(wrong.map(|within| range.offset_bytes + within as u64), None, "{range:?}");
            }
            RangeKind::Lost | RangeKind::Doubted => {
                assert!(copy[bytes].iter().all(|byte| *byte == 0), "{range:?}");
                assert_eq!(range.reason.is_some(), range.kind == RangeKind::Lost, "{range:?}");
            }
        }
    }
    assert_eq!(at + found.unlisted_bytes, model.len() as u64);
}

/// Contents without any structure, different in every sector.
pub fn noise(seed: u64, len: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    next.flatten().take(len as usize).collect()
}

pub fn path_of(dir: &Path, name: &str, format: Format) -> PathBuf {
    dir.join(format!("{name}.{format}"))
}
