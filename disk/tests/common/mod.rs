//! Shared by the tests of disks: a disk with a model of its contents.

#![allow(dead_code, reason = "each test file uses a part of it")]

pub mod devices;

use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_image::{DiskType, Format};
use diskwright_store::{BlockDevice, Blocking, CacheMode, EngineKind};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::TempDir;

/// The contents of a disk that is not open.
pub fn read_all(path: &Path) -> Vec<u8> {
    let disk = Disk::open(path, &OpenOptions::default()).unwrap();
    let mut bytes = vec![0xEE; disk.geometry().size_bytes as usize];
    Blocking::open(&*disk, EngineKind::Auto).unwrap().read(0, &mut bytes).unwrap();
    bytes
}

/// Writes a byte many times to a disk that is not open; zeros are written as such.
pub fn write(path: &Path, offset_bytes: u64, byte: u8, len: usize) {
    let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let mut queue = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    match byte {
        0 => queue.write_zeroes(offset_bytes, len as u64).unwrap(),
        byte => queue.write(offset_bytes, &vec![byte; len], false).unwrap(),
    }
    drop(queue);
    disk.close().unwrap();
}

/// A kind of disk to test.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub format: Format,
    pub disk_type: DiskType,
    pub block_bytes: Option<u32>,
    pub sector_bytes: u32,
    pub cache: CacheMode,
    pub engine: EngineKind,
}

impl Kind {
    pub fn new(format: Format, disk_type: DiskType, block_bytes: Option<u32>) -> Self {
        Self {
            format,
            disk_type,
            block_bytes,
            sector_bytes: 512,
            cache: CacheMode::PageCache,
            engine: EngineKind::Auto,
        }
    }
}

/// One operation on a disk. Offsets and lengths are in sectors.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    Write {
        sector: u64,
        sectors: u64,
        seed: u8,
        fua: bool,
    },
    Zero {
        sector: u64,
        sectors: u64,
    },
    Discard {
        sector: u64,
        sectors: u64,
    },
    Read {
        sector: u64,
        sectors: u64,
    },
    Flush,
    Reopen,
    /// Close the disk and continue in a child (only formats with children).
    Child,
}

/// A disk and its expected contents.
pub struct Twin {
    pub dir: TempDir,
    pub kind: Kind,
    pub chain: Vec<PathBuf>,
    pub model: Vec<u8>,
    disk: Option<Arc<Disk>>,
    io: Option<Blocking>,
}

impl Twin {
    pub fn new(kind: Kind, size_bytes: u64) -> Self {
        let dir =
            tempfile::tempdir_in(std::env::var_os("CARGO_TARGET_TMPDIR").unwrap_or_else(|| "/tmp".into())).unwrap();
        let path = dir.path().join(format!("disk-0.{}", kind.format));
        let base_type = if kind.disk_type == DiskType::Differencing { DiskType::Dynamic } else { kind.disk_type };
        create(
            &path,
            &CreateRequest {
                size_bytes: Some(size_bytes),
                disk_type: Some(base_type),
                block_bytes: kind.block_bytes,
                logical_sector_bytes: Some(kind.sector_bytes),
                ..CreateRequest::default()
            },
        )
        .unwrap();
        let mut twin = Self { dir, kind, chain: vec![path], model: vec![0; size_bytes as usize], disk: None, io: None };
        twin.open();
        if kind.disk_type == DiskType::Differencing {
            // Contents for the child to inherit, so that visible parent data can be detected.
            for start in (0..size_bytes).step_by(96 << 10) {
                let sector = start / u64::from(kind.sector_bytes);
                twin.apply(Step::Write { sector, sectors: 64, seed: (start >> 15) as u8 | 1, fua: false });
            }
            twin.apply(Step::Child);
        }
        twin
    }

    /// An existing disk at `path` with the contents `model`.
    pub fn of(kind: Kind, dir: TempDir, path: PathBuf, model: Vec<u8>) -> Self {
        let mut twin = Self { dir, kind, chain: vec![path], model, disk: None, io: None };
        twin.open();
        twin
    }

    pub fn open(&mut self) {
        let options =
            OpenOptions { writable: true, cache: self.kind.cache, engine: self.kind.engine, ..OpenOptions::default() };
        let disk = Disk::open(self.chain.last().unwrap(), &options).unwrap();
        self.io = Some(Blocking::open(&*disk, self.kind.engine).unwrap());
        self.disk = Some(disk);
    }

    pub fn close(&mut self) {
        self.io = None;
        if let Some(disk) = self.disk.take() {
            disk.close().unwrap();
        }
    }

    pub fn disk(&self) -> &Arc<Disk> {
        self.disk.as_ref().unwrap()
    }

    fn range(&self, sector: u64, sectors: u64) -> (u64, u64) {
        let sector_bytes = u64::from(self.kind.sector_bytes);
        let size = self.model.len() as u64;
        let start = (sector * sector_bytes).min(size);
        (start, (start + sectors * sector_bytes).min(size))
    }

    pub fn apply(&mut self, step: Step) {
        let io = self.io.as_mut().unwrap();
        match step {
            Step::Write { sector, sectors, seed, fua } => {
                let (start, end) = self.range(sector, sectors);
                let data: Vec<u8> =
                    (start..end).map(|at| (at / 512) as u8 ^ (at as u8).wrapping_mul(seed) ^ seed).collect();
                self.io.as_mut().unwrap().write(start, &data, fua).unwrap();
                self.model[start as usize..end as usize].copy_from_slice(&data);
            }
            Step::Zero { sector, sectors } => {
                let (start, end) = self.range(sector, sectors);
                self.io.as_mut().unwrap().write_zeroes(start, end - start).unwrap();
                self.model[start as usize..end as usize].fill(0);
            }
            Step::Discard { sector, sectors } => {
                let (start, end) = self.range(sector, sectors);
                self.io.as_mut().unwrap().discard(start, end - start).unwrap();
                self.model[start as usize..end as usize].fill(0);
            }
            Step::Read { sector, sectors } => {
                let (start, end) = self.range(sector, sectors);
                let mut data = vec![0xEE; (end - start) as usize];
                self.io.as_mut().unwrap().read(start, &mut data).unwrap();
                assert_same(&data, &self.model[start as usize..end as usize], start);
            }
            Step::Flush => io.flush().unwrap(),
            Step::Reopen => {
                self.close();
                self.open();
            }
            Step::Child => {
                if self.kind.disk_type == DiskType::Differencing {
                    self.close();
                    let path = self.dir.path().join(format!("disk-{}.{}", self.chain.len(), self.kind.format));
                    create(&path, &CreateRequest { parent: self.chain.last().cloned(), ..CreateRequest::default() })
                        .unwrap();
                    self.chain.push(path);
                    self.open();
                }
            }
        }
    }

    /// Checks that the contents equal the model, and that extents of zeros are zero.
    pub fn verify(&mut self) {
        let mut all = vec![0xEE; self.model.len()];
        self.io.as_mut().unwrap().read(0, &mut all).unwrap();
        assert_same(&all, &self.model, 0);
        let mut extents = Vec::new();
        self.disk().extents(0, self.model.len() as u64, &mut extents).unwrap();
        let mut at = 0;
        for extent in extents {
            assert_eq!(extent.offset_bytes, at, "extents leave no gap");
            at += extent.len_bytes;
            if extent.kind.reads_as_zeros() {
                let held = &self.model[extent.offset_bytes as usize..at as usize];
                assert!(held.iter().all(|&byte| byte == 0), "{extent:?} holds data");
            }
        }
        assert_eq!(at, self.model.len() as u64);
    }
}

fn assert_same(found: &[u8], expected: &[u8], start: u64) {
    if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
        panic!("byte {} is {:#04x}, should be {:#04x}", start + at as u64, found[at], expected[at]);
    }
}
