//! Small images of every type, and functions to damage them. Checksums are recomputed by
//! independent code, so that readers get past them and an error in the format crate's checksums is
//! found.

#![allow(dead_code, reason = "each test file uses a part of it")]

pub mod vhd;
pub mod vhdx;

use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_image::{CheckReport, DiskType, Format, Severity, probe};
use diskwright_store::{BlockDevice, Blocking, EngineKind, FileStore};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;

/// Offsets of the structures in our VHDX files.
pub const HEADERS: [usize; 2] = [64 * KIB, 128 * KIB];
pub const REGION_TABLES: [usize; 2] = [192 * KIB, 256 * KIB];
pub const LOG: usize = MIB;
pub const METADATA: usize = 2 * MIB;
pub const BAT: usize = 3 * MIB;
pub const FILE_PARAMETERS: usize = METADATA + 64 * KIB;
pub const DISK_SIZE: usize = FILE_PARAMETERS + 8;
pub const LOGICAL_SECTOR: usize = DISK_SIZE + 8 + 16;
pub const PHYSICAL_SECTOR: usize = LOGICAL_SECTOR + 8;
pub const LOCATOR: usize = PHYSICAL_SECTOR + 8;
/// The BAT entry of the first chunk's sector bitmap block, for blocks of 1 MiB and sectors of 512
/// bytes.
pub const BITMAP_ENTRY: usize = BAT + 8 * 4096;

pub type Damage = fn(&mut Vec<u8>);

/// Image, name of the damage, the damage, and the expected result.
pub type Case = (&'static str, &'static str, Damage, Told);

/// The expected result.
pub enum Told {
    /// Opening or reading fails. The error has these words, the file, the offset and what was
    /// expected.
    Error(&'static [&'static str]),
    /// Opening or reading fails without an offset: the whole file is invalid, or needs something
    /// that does not exist.
    Refusal(&'static [&'static str]),
    /// The disk can be read, and the check has a finding of at least this severity with these
    /// words.
    Finding(Severity, &'static [&'static str]),
}

/// An image with some payload, and its parent if it has one.
#[derive(Debug, Clone)]
pub struct Sample {
    pub name: &'static str,
    pub format: Format,
    pub path: PathBuf,
    /// The undamaged file.
    pub bytes: Vec<u8>,
}

pub fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

pub fn get_u32_be(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub fn get_u64_be(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

pub fn get_u64_le(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// CRC-32C (Castagnoli), computed bit by bit as defined, for a table of 256 entries.
pub fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut index = 0;
        while index < 256 {
            let mut value = index as u32;
            let mut bit = 0;
            while bit < 8 {
                value = if value & 1 == 1 { value >> 1 ^ 0x82f6_3b78 } else { value >> 1 };
                bit += 1;
            }
            table[index] = value;
            index += 1;
        }
        table
    };
    !bytes.iter().fold(u32::MAX, |crc, &byte| TABLE[((crc ^ u32::from(byte)) & 0xff) as usize] ^ crc >> 8)
}

/// Recomputes the checksum, at offset 4, of the VHDX structure of `len` bytes at `at`.
pub fn seal(bytes: &mut [u8], at: usize, len: usize) {
    bytes[at + 4..at + 8].fill(0);
    let crc = crc32c(&bytes[at..at + len]);
    put(bytes, at + 4, &crc.to_le_bytes());
}

/// Recomputes the VHD checksum at `at + field` of the structure of `len` bytes at `at`.
pub fn sum(bytes: &mut [u8], at: usize, len: usize, field: usize) {
    bytes[at + field..at + field + 4].fill(0);
    let sum = !bytes[at..at + len].iter().fold(0_u32, |sum, &byte| sum.wrapping_add(u32::from(byte)));
    put(bytes, at + field, &sum.to_be_bytes());
}

/// Writes into both footers of a dynamic VHD, or the only one of a fixed VHD.
pub fn in_footers(bytes: &mut [u8], field: usize, value: &[u8]) {
    let tail = bytes.len() - 512;
    for at in [0, tail].into_iter().skip(usize::from(bytes[..8] != *b"conectix")) {
        put(bytes, at + field, value);
        sum(bytes, at, 512, 64);
    }
}

/// Writes into the dynamic header of one of our VHDs, at offset 512.
pub fn in_header(bytes: &mut [u8], field: usize, value: &[u8]) {
    put(bytes, 512 + field, value);
    sum(bytes, 512, 1024, 36);
}

/// Writes into both headers of a VHDX.
pub fn in_headers(bytes: &mut [u8], field: usize, value: &[u8]) {
    for at in HEADERS {
        put(bytes, at + field, value);
        seal(bytes, at, 4096);
    }
}

/// Writes into both region tables.
pub fn in_regions(bytes: &mut [u8], field: usize, value: &[u8]) {
    for at in REGION_TABLES {
        put(bytes, at + field, value);
        seal(bytes, at, 64 * KIB);
    }
}

/// Recomputes all checksums, whatever the file holds now.
pub fn reseal(bytes: &mut [u8], format: Format) {
    match format {
        Format::Vhd if bytes.len() < 2048 => {}
        Format::Vhd => {
            let tail = bytes.len() - 512;
            if bytes[..8] == *b"conectix" {
                sum(bytes, 0, 512, 64);
            }
            sum(bytes, tail, 512, 64);
            if bytes[512..520] == *b"cxsparse" {
                sum(bytes, 512, 1024, 36);
            }
        }
        Format::Vhdx => {
            for (at, len) in HEADERS.map(|at| (at, 4096)).into_iter().chain(REGION_TABLES.map(|at| (at, 64 * KIB))) {
                if at + len <= bytes.len() {
                    seal(bytes, at, len);
                }
            }
            // The only entry of the log.
            let len =
                bytes.get(LOG + 8..LOG + 12).map_or(0, |len| u32::from_le_bytes(len.try_into().unwrap()) as usize);
            if len >= 4096 && LOG + len <= bytes.len() {
                seal(bytes, LOG, len);
            }
        }
        _ => {}
    }
}

fn payload(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 512) as u8 ^ seed | 1).collect()
}

/// Opens for writing and writes at several offsets. Returns the bytes of the file after a flush,
/// before the close.
fn fill(path: &Path) -> Vec<u8> {
    let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
    let size = disk.geometry().size_bytes;
    for (offset, len, seed) in [(0, 4096, 1), (size / 2, 20 * KIB, 2), (size - 1024, 1024, 3)] {
        io.write(offset, &payload(seed, len), false).unwrap();
    }
    io.flush().unwrap();
    let open = std::fs::read(path).unwrap();
    drop(io);
    disk.close().unwrap();
    open
}

fn made(dir: &Path, name: &'static str, request: &CreateRequest) -> PathBuf {
    let path = dir.join(name);
    create(&path, request).unwrap();
    path
}

/// One small image of each type. The last is a VHDX whose log must be replayed.
pub fn samples(dir: &Path) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (name, disk_type, size_bytes, block_bytes) in [
        ("raw.raw", None, 64 * KIB, None),
        ("fixed.vhd", Some(DiskType::Fixed), 64 * KIB, None),
        ("dynamic.vhd", Some(DiskType::Dynamic), 512 * KIB, Some(32 << 10)),
        ("diff.vhd", Some(DiskType::Differencing), 512 * KIB, Some(32 << 10)),
        ("fixed.vhdx", Some(DiskType::Fixed), 2 * MIB, Some(1 << 20)),
        ("dynamic.vhdx", Some(DiskType::Dynamic), 4 * MIB, Some(1 << 20)),
        ("diff.vhdx", Some(DiskType::Differencing), 4 * MIB, Some(1 << 20)),
    ] {
        let mut request =
            CreateRequest { size_bytes: Some(size_bytes as u64), disk_type, block_bytes, ..CreateRequest::default() };
        if disk_type == Some(DiskType::Differencing) {
            let parent = if name.ends_with("vhd") { "parent.vhd" } else { "parent.vhdx" };
            let base = CreateRequest { disk_type: Some(DiskType::Dynamic), ..request.clone() };
            let parent = made(dir, parent, &base);
            fill(&parent);
            request.parent = Some(parent);
        }
        let path = made(dir, name, &request);
        fill(&path);
        let format = probe::format_of_extension(&path).unwrap();
        samples.push(Sample { name, format, bytes: std::fs::read(&path).unwrap(), path });
    }
    let request =
        CreateRequest { size_bytes: Some(4 * MIB as u64), block_bytes: Some(1 << 20), ..CreateRequest::default() };
    let path = made(dir, "logged.vhdx", &request);
    let mut bytes = fill(&path);
    // Removes the table page that the last flush wrote in place, so that only the log has it.
    bytes[BAT..BAT + 4096].fill(0);
    std::fs::write(&path, &bytes).unwrap();
    samples.push(Sample { name: "logged.vhdx", format: Format::Vhdx, path, bytes });
    samples
}

/// Opens read-only and reads the whole disk and its extents. Extents of zeros must read as zeros.
pub fn read_all(path: &Path, options: &OpenOptions) -> Result<Vec<String>, String> {
    let disk = Disk::open(path, options).map_err(|error| error.to_string())?;
    let size = disk.geometry().size_bytes;
    let mut extents = Vec::new();
    let walked = disk.extents(0, size.min(64 * MIB as u64), &mut extents);
    let mut io = Blocking::open(&*disk, EngineKind::Sync).map_err(|error| error.to_string())?;
    let mut piece = vec![0xEE; MIB];
    // Damage may make a disk huge, so only its start and its end are read.
    let ends = [0..size.min(16 * MIB as u64), size.saturating_sub(2 * MIB as u64).max(size.min(16 * MIB as u64))..size];
    for range in ends {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(MIB as u64) as usize;
            io.read(at, &mut piece[..len]).map_err(|error| error.to_string())?;
            for extent in &extents {
                let (from, to) =
                    (extent.offset_bytes.max(at), (extent.offset_bytes + extent.len_bytes).min(at + len as u64));
                if extent.kind.reads_as_zeros() && from < to {
                    let zeros = &piece[(from - at) as usize..(to - at) as usize];
                    assert!(zeros.iter().all(|&byte| byte == 0), "{}: {extent:?} holds data", path.display());
                }
            }
            at += len as u64;
        }
    }
    walked.map_err(|error| error.to_string())?;
    let layers = disk.layers();
    let remarks = layers.iter().flat_map(|layer| layer.image.info().remarks.clone());
    Ok(remarks.chain(disk.warnings().iter().cloned()).collect())
}

pub fn check(path: &Path, format: Format) -> Result<CheckReport, String> {
    let store = FileStore::open(path, &diskwright_store::OpenOptions::default()).map_err(|error| error.to_string())?;
    probe::check(Arc::new(store), Some(format)).map(|(_, report)| report).map_err(|error| error.to_string())
}
