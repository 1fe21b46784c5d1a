//! Tests of whole VHD images: against a model, with hostile files, and with other programs. (Power
//! cuts are tested in `proof/proving/`, except those during growth.)

mod bitmaps;
mod cuts;
mod damage;
mod foreign;
mod grow;
mod hostile;
mod model;
mod places;
mod relink;
mod sparse;
mod structures;
mod unit;
mod xenserver;

use super::{check, create, image::VhdImage, open};
use crate::{BlockState, CheckReport, Commit, CreateOptions, DiskType, Image, ParentLink, Severity};
use diskwright_format::vhd::{DynamicHeader, FOOTER_BYTES, Footer, HEADER_BYTES, VhdError};
use diskwright_store::Store;
use sparse::SparseStore;
use std::sync::Arc;
use uuid::Uuid;

const SECTOR: u64 = 512;

fn options(disk_type: DiskType, size_bytes: u64, block_bytes: u32) -> CreateOptions {
    CreateOptions {
        disk_type,
        size_bytes,
        block_bytes: Some(block_bytes),
        logical_sector_bytes: 512,
        physical_sector_bytes: 512,
        parent: (disk_type == DiskType::Differencing).then(|| ParentLink {
            relative_path: Some(".\\parent.vhd".into()),
            absolute_path: Some("C:\\disks\\parent.vhd".into()),
            name: Some("parent.vhd".into()),
            linkage: Some(Uuid::from_u128(7).into()),
            modified_seconds: Some(800_000_000),
            ..Default::default()
        }),
        preallocate: false,
        disk_id: Some(Uuid::from_u128(99)),
        own: Default::default(),
    }
}

fn created(disk_type: DiskType, size_bytes: u64, block_bytes: u32) -> Arc<SparseStore> {
    let store = Arc::new(SparseStore::new("disk.vhd"));
    create(store.clone(), &options(disk_type, size_bytes, block_bytes)).unwrap();
    store
}

fn assert_sound(store: Arc<dyn Store>) -> CheckReport {
    let report = check(store).unwrap();
    assert!(report.worst() < Some(Severity::Corrupt), "{:#?}", report.findings);
    assert!(!report.findings.iter().any(|finding| finding.message.contains("all ones")), "{:#?}", report.findings);
    report
}

/// Acts as the disk above: calls in its order, and reads the parent.
struct TestDisk {
    image: VhdImage,
    /// The parent's contents; zeros beyond its end.
    parent: Vec<u8>,
    /// Whether the disk writes the initial bitmap of the next block. If not, the flush must.
    writes_init: bool,
}

impl TestDisk {
    fn open(store: Arc<dyn Store>, writable: bool, parent: Vec<u8>) -> Self {
        Self { image: open(store, writable).unwrap(), parent, writes_init: true }
    }

    fn store(&self) -> &Arc<dyn Store> {
        self.image.store()
    }

    fn block_bytes(&self) -> u64 {
        self.image.info().block_bytes
    }

    fn state(&self, block: u64) -> BlockState {
        let mut state = [BlockState::Zero];
        self.image.block_states(block, &mut state).unwrap();
        state[0]
    }

    /// Splits a range at blocks: (block, offset in the block, offset in the range, length).
    fn split(&self, offset: u64, len: usize) -> Vec<(u64, u64, usize, usize)> {
        let mut at = 0;
        let mut pieces = Vec::new();
        while at < len {
            let inside = (offset + at as u64) % self.block_bytes();
            let take = (len - at).min((self.block_bytes() - inside) as usize);
            pieces.push(((offset + at as u64) / self.block_bytes(), inside, at, take));
            at += take;
        }
        pieces
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let writer = self.image.writer().unwrap();
        writer.begin_writing().unwrap();
        for (block, inside, at, len) in self.split(offset, data.len()) {
            let (place, commit) = match self.state(block) {
                BlockState::Data { offset_bytes, .. } => (offset_bytes, None),
                _ => {
                    let reservation = writer.reserve_waiting(block).unwrap();
                    if let Some((offset, bytes)) = reservation.init.filter(|_| self.writes_init) {
                        self.store().write_at(&bytes, offset).unwrap();
                        writer.initialised(block);
                    }
                    let sectors = ((inside / SECTOR) as u32, (len as u64 / SECTOR) as u32);
                    // As the disk decides: a block without space reads as zeros around the payload,
                    // unless the parent's data is visible.
                    let has_parent = self.image.info().disk_type == DiskType::Differencing;
                    let is_fresh = self.state(block) == BlockState::Absent && !has_parent;
                    let change = if is_fresh || len as u64 == self.block_bytes() {
                        Commit::Whole
                    } else {
                        Commit::Sectors { first: sectors.0, count: sectors.1 }
                    };
                    (reservation.offset_bytes, Some(change))
                }
            };
            self.store().write_at(&data[at..at + len], place + inside).unwrap();
            if let Some(change) = commit {
                writer.commit_waiting(block, change).unwrap();
            }
        }
    }

    fn discard(&self, block: u64) {
        let state = self.image.writer().unwrap().commit_waiting(block, Commit::Discard).unwrap();
        assert_eq!(state, BlockState::Absent);
    }

    fn read_parent(&self, offset: u64, out: &mut [u8]) {
        out.fill(0);
        let held = self.parent.get(offset as usize..).unwrap_or_default();
        let len = held.len().min(out.len());
        out[..len].copy_from_slice(&held[..len]);
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0xee; len];
        for (block, inside, at, len) in self.split(offset, len) {
            let out = &mut out[at..at + len];
            match self.state(block) {
                BlockState::Zero => out.fill(0),
                BlockState::Absent => self.read_parent(offset + at as u64, out),
                BlockState::Data { offset_bytes, .. } => self.store().read_at(out, offset_bytes + inside).unwrap(),
                BlockState::Partial { offset_bytes, .. } => {
                    let bits = self.image.sector_bitmap(block).unwrap();
                    for (index, sector) in out.chunks_mut(SECTOR as usize).enumerate() {
                        let within = inside + index as u64 * SECTOR;
                        if bits.get((within / SECTOR) as u32) {
                            self.store().read_at(sector, offset_bytes + within).unwrap();
                        } else {
                            self.read_parent(block * self.image.info().block_bytes + within, sector);
                        }
                    }
                }
                other => panic!("block {block} is {other:?}"),
            }
        }
        out
    }

    fn flush(&self) {
        self.image.writer().unwrap().flush().unwrap();
        assert!(!self.image.writer().unwrap().is_dirty());
    }

    fn close(self) {
        self.image.writer().unwrap().close().unwrap();
    }
}

/// A sector with its own number on the disk and the version of its data.
fn tagged(sector: u64, version: u32) -> [u8; SECTOR as usize] {
    let mut bytes = [0; SECTOR as usize];
    if version > 0 {
        for chunk in bytes.chunks_mut(16) {
            chunk[..8].copy_from_slice(&(sector + 1).to_le_bytes());
            chunk[8..12].copy_from_slice(&version.to_le_bytes());
        }
    }
    bytes
}

const MIB: u64 = 1 << 20;

fn disk(disk_type: DiskType) -> (Arc<SparseStore>, TestDisk) {
    let store = created(disk_type, 4 * MIB, 65536);
    let disk = TestDisk::open(store.clone(), true, Vec::new());
    (store, disk)
}

fn footer_at(store: &SparseStore, offset: u64) -> Result<Footer, VhdError> {
    let mut bytes = [0; FOOTER_BYTES];
    store.read_at(&mut bytes, offset).unwrap();
    Footer::parse(&bytes, offset)
}

fn edit_footers(store: &SparseStore, change: impl Fn(&mut Footer)) {
    let len = store.len_bytes().unwrap();
    for at in [0, len - 512] {
        let mut footer = footer_at(store, at).unwrap();
        change(&mut footer);
        store.write_at(&footer.to_bytes(), at).unwrap();
    }
}

fn header(store: &SparseStore) -> DynamicHeader {
    let mut bytes = [0; HEADER_BYTES];
    store.read_at(&mut bytes, 512).unwrap();
    DynamicHeader::parse(&bytes, 512).unwrap()
}

fn messages(store: &Arc<SparseStore>, severity: Severity) -> Vec<String> {
    let report = check(store.clone()).unwrap();
    report.findings.into_iter().filter(|finding| finding.severity == severity).map(|f| f.message).collect()
}
