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

/// The entries of a block table in the bytes of a file.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    pub format: Format,
    pub offset: usize,
}

impl Table {
    /// The table of a file that this program has just made.
    pub fn of(format: Format, bytes: &[u8]) -> Self {
        let offset = match format {
            Format::Vhd => u64::from_be_bytes(bytes[512 + 16..512 + 24].try_into().unwrap()) as usize,
            _ => 3 << 20,
        };
        Self { format, offset }
    }

    fn at(&self, block: u64) -> (usize, usize) {
        let len = if self.format == Format::Vhd { 4 } else { 8 };
        (self.offset + block as usize * len, len)
    }

    pub fn entry<'a>(&self, bytes: &'a mut [u8], block: u64) -> &'a mut [u8] {
        let (at, len) = self.at(block);
        &mut bytes[at..at + len]
    }

    /// Whether the block has space.
    pub fn has_space(&self, bytes: &mut [u8], block: u64) -> bool {
        let entry = self.entry(bytes, block);
        if entry.len() == 4 { entry != [0xff; 4] } else { entry[0] & 7 >= 6 }
    }

    /// Makes the entry say that the block has no space.
    pub fn wipe(&self, bytes: &mut [u8], block: u64) {
        let value = if self.format == Format::Vhd { 0xff } else { 0 };
        self.entry(bytes, block).fill(value);
    }

    /// Fills the entry with a value that no table has: it points far beyond any file.
    pub fn garble(&self, bytes: &mut [u8], block: u64) {
        self.entry(bytes, block).fill(0xd7);
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
