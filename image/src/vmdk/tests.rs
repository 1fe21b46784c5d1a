//! Images by `qemu-img`, and images that lie.

mod esx;
mod growing;
mod histories;
mod relinking;
mod writing;

use super::{examine, open};
use crate::{BlockState, Format, Image, Severity};
use diskwright_format::vmdk::{Placing, SECTOR_BYTES, SparseFlags, SparseHeader};
use diskwright_store::{FileStore, MemoryStore, OpenOptions, Store};
use std::{path::Path, process::Command, sync::Arc};

const SUBFORMATS: [&str; 5] =
    ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat", "streamOptimized"];

fn store(path: &Path) -> Arc<dyn Store> {
    Arc::new(FileStore::open(path, &OpenOptions::default()).unwrap())
}

fn opened(path: &Path) -> Arc<dyn Image> {
    let first = store(path);
    let references = Format::Vmdk.driver().references(&*first).unwrap();
    let further = references.iter().map(|reference| store(&path.with_file_name(&reference.name)));
    Format::Vmdk.driver().open_files([first].into_iter().chain(further).collect(), false, 512).unwrap()
}

/// The bytes of the disk, by the states of its blocks.
fn contents(image: &dyn Image) -> Vec<u8> {
    let block_bytes = image.info().block_bytes;
    let mut all = Vec::new();
    for block in 0..image.size_bytes().div_ceil(block_bytes) {
        let len = block_bytes.min(image.size_bytes() - block * block_bytes) as usize;
        let mut bytes = vec![0; len];
        let mut state = [BlockState::Absent];
        image.block_states(block, &mut state).unwrap();
        match state[0] {
            BlockState::Absent | BlockState::Zero => {}
            BlockState::Data { store, offset_bytes } => {
                image.stores()[usize::from(store)].read_at(&mut bytes, offset_bytes).unwrap();
            }
            BlockState::Compressed => image.read_compressed(block, 0, &mut bytes).unwrap(),
            other => panic!("block {block} is {other:?}"),
        }
        all.extend(bytes);
    }
    all
}

#[test]
fn every_kind_by_qemu_img_reads_right() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        return println!("skipped: qemu-img is not installed");
    }
    let dir = tempfile::tempdir().unwrap();
    let mut raw = vec![0_u8; 5 << 20];
    for (index, sector) in raw.chunks_mut(512).enumerate() {
        if index / 150 % 3 == 0 {
            sector.fill(index as u8 | 1);
        }
    }
    let source = dir.path().join("source.raw");
    std::fs::write(&source, &raw).unwrap();
    for kind in SUBFORMATS {
        let path = dir.path().join(format!("{kind}.vmdk"));
        let made = Command::new("qemu-img")
            .args(["convert", "-f", "raw", "-O", "vmdk", "-o", &format!("subformat={kind}")])
            .args([&source, &path])
            .output()
            .unwrap();
        assert!(made.status.success(), "{kind}: {}", String::from_utf8_lossy(&made.stderr));
        let image = opened(&path);
        assert_eq!(image.info().subformat.as_deref(), Some(kind));
        assert!(image.info().remarks.is_empty(), "{:?}", image.info().remarks);
        assert!(contents(&*image) == raw, "{kind} reads other bytes");
        let stores: Vec<_> = image.stores().iter().cloned().map(Some).collect();
        let report = examine(&stores, false).unwrap().report;
        assert!(report.worst() < Some(Severity::Corrupt), "{kind}: {:?}", report.findings);
    }
}

/// A sparse extent of 1 MiB without descriptor: both directories, one table each, one grain.
fn bare() -> Vec<u8> {
    let header = SparseHeader {
        version: 1,
        flags: SparseFlags(SparseFlags::TEXT_CHECK | SparseFlags::REDUNDANT),
        capacity_sectors: 2048,
        grain_sectors: 128,
        descriptor_sector: 0,
        descriptor_sectors: 0,
        table_entries: 512,
        redundant_directory: Some(1),
        directory: Placing::Sector(6),
        overhead_sectors: 128,
        is_unclean: false,
        compression: 0,
    };
    let mut bytes = vec![0; 128 * 512 + 65536];
    bytes[..512].copy_from_slice(&header.to_bytes());
    for (directory, table) in [(1_u32, 2_u32), (6, 7)] {
        let at = directory as usize * 512;
        bytes[at..at + 4].copy_from_slice(&table.to_le_bytes());
        let at = table as usize * 512 + 3 * 4;
        bytes[at..at + 4].copy_from_slice(&128_u32.to_le_bytes());
    }
    bytes[128 * 512..].fill(7);
    bytes
}

fn states(bytes: Vec<u8>) -> (Vec<BlockState>, Arc<MemoryStore>, Vec<String>) {
    let store = Arc::new(MemoryStore::with_bytes("bare.vmdk", bytes));
    let image = open(vec![store.clone()], false).unwrap();
    let mut states = vec![BlockState::Absent; 16];
    image.block_states(0, &mut states).unwrap();
    (states, store, image.info().remarks.clone())
}

#[test]
fn the_second_directory_serves_where_the_first_is_damaged() {
    let expected = BlockState::data(128 * SECTOR_BYTES);
    for damage in [6 * 512, 7 * 512 + 12] {
        let mut bytes = bare();
        bytes[damage..damage + 4].copy_from_slice(&0xfff_fff0_u32.to_le_bytes());
        let (states, store, remarks) = states(bytes);
        assert_eq!((states[3], states[4]), (expected, BlockState::Absent));
        assert_eq!(remarks.iter().any(|remark| remark.contains("redundant directory")), damage == 6 * 512);
        let report = examine(&[Some(store as Arc<dyn Store>)], false).unwrap().report;
        assert!(!report.findings.is_empty());
    }
    let mut bytes = bare();
    for table in [2, 7] {
        bytes[table * 512 + 12..table * 512 + 16].copy_from_slice(&0xfff_fff0_u32.to_le_bytes());
    }
    let (states, store, _) = states(bytes);
    assert_eq!(states[3], BlockState::Damaged);
    let report = examine(&[Some(store as Arc<dyn Store>)], false).unwrap().report;
    assert_eq!(report.worst(), Some(Severity::Corrupt));
}

#[test]
fn overlaps_and_writing_are_refused_by_name() {
    let mut bytes = bare();
    for table in [2, 7] {
        bytes[table * 512 + 20..table * 512 + 24].copy_from_slice(&128_u32.to_le_bytes());
    }
    let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("bare.vmdk", bytes));
    let report = examine(&[Some(Arc::clone(&store))], false).unwrap().report;
    assert!(report.findings.iter().any(|finding| finding.message.contains("two grains overlap")), "{report:?}");
    let error = open(vec![store], true).unwrap_err().to_string();
    assert!(error.contains("writing to an extent without a descriptor is not supported"), "{error}");
}

/// A stream whose only grain is this, compressed by RFC 1950.
fn stream_of(grain: &[u8]) -> Arc<dyn Image> {
    use diskwright_format::vmdk::{Access, Descriptor, Extent, ExtentKind, StreamWriter};
    let extent =
        Extent { access: Access::ReadWrite, sectors: 256, kind: ExtentKind::Sparse, file: None, first_sector: 0 };
    let extent = Extent { file: Some("x.vmdk".into()), ..extent };
    let mut packed = vec![0; grain.len() + 1024];
    let mut compressor = libdeflater::Compressor::new(libdeflater::CompressionLvl::new(12).unwrap());
    let len = compressor.zlib_compress(grain, &mut packed).unwrap();
    let mut bytes = Vec::new();
    let descriptor = Descriptor::new(1, "streamOptimized", vec![extent], &[]);
    let mut writer = StreamWriter::new(256, &descriptor, &mut bytes).unwrap();
    writer.grain(1, &packed[..len], &mut bytes).unwrap();
    writer.finish(&mut bytes);
    Format::Vmdk.driver().open(Arc::new(MemoryStore::with_bytes("x.vmdk", bytes)), false, 512).unwrap()
}

#[test]
fn a_grain_never_decompresses_to_more_or_less_than_its_length() {
    let mut bytes = vec![0; 65_536];
    stream_of(&[7; 65_536]).read_compressed(1, 0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 7));
    for (len, what) in [(65_537, "do not decompress"), (64 << 20, "do not decompress"), (65_535, "65535 bytes")] {
        let error = stream_of(&vec![7; len]).read_compressed(1, 0, &mut bytes).unwrap_err().to_string();
        assert!(error.contains(what), "{len}: {error}");
    }
}

/// The text is refused by its length before it is read.
#[test]
fn a_descriptor_of_gigabytes_is_refused_and_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("huge.vmdk");
    fs_with_hole(&path, b"# Disk DescriptorFile\nversion=1\nCID=1\n", 8 << 30);
    let error = open(vec![store(&path)], false).unwrap_err().to_string();
    assert!(error.contains("a text of 8589934592 bytes, expected at most 1 MiB"), "{error}");
    // Embedded: the header claims the space.
    let mut bytes = bare();
    bytes[28..36].copy_from_slice(&1_u64.to_le_bytes());
    bytes[36..44].copy_from_slice(&(8_u64 << 21).to_le_bytes());
    let error = open(vec![Arc::new(MemoryStore::with_bytes("x.vmdk", bytes))], false).unwrap_err().to_string();
    assert!(error.contains("# Disk DescriptorFile"), "{error}");
}

fn fs_with_hole(path: &Path, start: &[u8], len_bytes: u64) {
    std::fs::write(path, start).unwrap();
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len_bytes).unwrap();
}
