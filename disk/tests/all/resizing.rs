//! Disks that grow and shrink: what lies below the new end stays, what comes back reads as zeros,
//! and the file gives back its space.

use crate::common::{Kind, Step, Twin};
use diskwright_disk::{
    CreateRequest, Disk, DiskError, NewSize, OpenOptions, ResizeOptions, check_image, create, resize,
};
use diskwright_image::{DiskType, Format, Severity};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use proptest::prelude::*;
use std::{fs, os::unix::fs::MetadataExt, path::Path};

const MIB: u64 = 1 << 20;

fn kinds() -> Vec<Kind> {
    let with_blocks = |format, disk_type, block_bytes| Kind::new(format, disk_type, Some(block_bytes));
    vec![
        Kind::new(Format::Raw, DiskType::Fixed, None),
        Kind::new(Format::Vhd, DiskType::Fixed, None),
        with_blocks(Format::Vhd, DiskType::Dynamic, 16 << 10),
        with_blocks(Format::Vhd, DiskType::Dynamic, 512 << 10),
        with_blocks(Format::Vhd, DiskType::Differencing, 64 << 10),
        with_blocks(Format::Vhdx, DiskType::Fixed, 1 << 20),
        with_blocks(Format::Vhdx, DiskType::Dynamic, 1 << 20),
        with_blocks(Format::Vhdx, DiskType::Differencing, 1 << 20),
        Kind { sector_bytes: 4096, ..with_blocks(Format::Vhdx, DiskType::Dynamic, 2 << 20) },
    ]
}

/// These, and kinds whose tables lie before their blocks, or in several places.
fn kinds_with_models() -> Vec<Kind> {
    let with_blocks = |format, disk_type, block_bytes| Kind::new(format, disk_type, Some(block_bytes));
    let more = [
        with_blocks(Format::Vmdk, DiskType::Dynamic, 8 << 10),
        with_blocks(Format::Vmdk, DiskType::Differencing, 64 << 10),
        Kind::new(Format::Vmdk, DiskType::Fixed, None),
        with_blocks(Format::Qcow2, DiskType::Dynamic, 4 << 10),
        with_blocks(Format::Qcow2, DiskType::Differencing, 64 << 10),
        with_blocks(Format::Vdi, DiskType::Dynamic, 16 << 10),
        with_blocks(Format::Vdi, DiskType::Differencing, 64 << 10),
    ];
    kinds().into_iter().chain(more).collect()
}

fn writable() -> OpenOptions {
    OpenOptions { writable: true, ..OpenOptions::default() }
}

/// Makes the top image of a closed disk smaller, whatever lies on it.
fn shrink(path: &Path, size_bytes: u64) {
    let disk = Disk::open(path, &writable()).unwrap();
    let layers = disk.layers();
    let writer = layers[0].image.writer().unwrap();
    writer.begin_writing().unwrap();
    writer.shrink(size_bytes).unwrap();
    assert_eq!(layers[0].image.size_bytes(), size_bytes);
    disk.close().unwrap();
}

fn assert_sound(path: &Path, what: &str) {
    let (_, report) = check_image(path, &OpenOptions::default()).unwrap();
    // Holes between blocks count as leaks.
    assert!(report.worst() < Some(Severity::Corrupt), "{what}: {:#?}", report.findings);
}

/// A change of a disk, in sectors of 4096 bytes.
#[derive(Debug, Clone)]
enum Change {
    Write { at: u64, len: u64, seed: u8 },
    Resize(u64),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let write = (0_u64..2048, 1_u64..300, 1_u8..255).prop_map(|(at, len, seed)| Change::Write { at, len, seed });
    prop::collection::vec(prop_oneof![3 => write, 2 => (1_u64..2048).prop_map(Change::Resize)], 1..14)
}

fn play(kind: Kind, changes: &[Change]) {
    let mut twin = Twin::new(kind, 4 * MIB);
    let what = format!("{} {}: {changes:?}", kind.format, kind.disk_type);
    let per = 4096 / u64::from(kind.sector_bytes);
    let parent_bytes = if kind.disk_type == DiskType::Differencing { 4 * MIB } else { 0 };
    for change in changes {
        match *change {
            Change::Write { at, len, seed } => {
                let sector = at * per % (twin.model.len() as u64 / 4096 * per);
                twin.apply(Step::Write { sector, sectors: len * per, seed, fua: seed % 4 == 0 });
            }
            Change::Resize(sectors) => {
                let (old, new) = (twin.model.len() as u64, sectors * 4096);
                if new <= old {
                    twin.close();
                    shrink(twin.chain.last().unwrap(), new);
                    assert_sound(twin.chain.last().unwrap(), &what);
                    twin.open();
                } else if old < parent_bytes {
                    // The parent's data would become visible.
                    assert!(matches!(twin.disk().grow(new), Err(DiskError::BadOptions { .. })));
                    continue;
                } else {
                    twin.disk().grow(new).unwrap();
                }
                twin.model.resize(new as usize, 0);
                assert_eq!(twin.disk().geometry().size_bytes, new, "{what}");
                twin.verify();
            }
        }
    }
    twin.verify();
    twin.apply(Step::Reopen);
    twin.verify();
    twin.close();
    assert_sound(twin.chain.last().unwrap(), &what);
}

macro_rules! models {
    ($($name:ident: $index:literal,)*) => {
        proptest! {
            #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
            $(
                #[test]
                fn $name(changes in changes()) {
                    play(kinds_with_models()[$index], &changes);
                }
            )*
        }

        #[test]
        fn every_kind_has_a_model() {
            assert_eq!(kinds_with_models().len(), [$($index),*].len());
        }
    };
}

models! {
    raw: 0,
    vhd_fixed: 1,
    vhd_dynamic_of_small_blocks: 2,
    vhd_dynamic: 3,
    vhd_differencing: 4,
    vhdx_fixed: 5,
    vhdx_dynamic: 6,
    vhdx_differencing: 7,
    vhdx_of_4k_sectors: 8,
    vmdk_sparse: 9,
    vmdk_child: 10,
    vmdk_flat: 11,
    qcow2: 12,
    qcow2_child: 13,
    vdi_dynamic: 14,
    vdi_child: 15,
}

fn written(path: &Path, size_bytes: u64, kind: Kind, preallocate: bool) {
    let request = CreateRequest {
        size_bytes: Some(size_bytes),
        disk_type: Some(kind.disk_type),
        block_bytes: kind.block_bytes,
        preallocate,
        ..CreateRequest::default()
    };
    create(path, &request).unwrap();
    let disk = Disk::open(path, &writable()).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    // The last part first, so that the space of blocks does not ascend with the disk.
    for at in (0..size_bytes / MIB).rev() {
        io.write(at * MIB, &vec![at as u8 | 1; MIB as usize], false).unwrap();
    }
    drop(io);
    disk.close().unwrap();
}

#[test]
fn the_space_of_lost_blocks_goes_back_to_the_file_system() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for kind in kinds().into_iter().filter(|kind| kind.disk_type != DiskType::Differencing) {
        for preallocate in [false, true] {
            let what = format!("{} {} {:?} {preallocate}", kind.format, kind.disk_type, kind.block_bytes);
            let path = dir.path().join(format!("disk.{}", kind.format));
            written(&path, 40 * MIB, kind, preallocate);
            let before = fs::metadata(&path).unwrap();
            shrink(&path, 10 * MIB);
            let after = fs::metadata(&path).unwrap();
            let gained = (before.blocks() - after.blocks()) * 512;
            assert!(gained >= 29 * MIB, "{what}: {gained} bytes were gained");
            assert_sound(&path, &what);
            fs::remove_file(&path).unwrap();
        }
    }
}

/// The first block of the file goes. Its pad is a part of a page of its own, behind the table.
#[test]
fn a_vhd_that_was_made_smaller_has_leaked_nothing() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.vhd");
    let request =
        CreateRequest { size_bytes: Some(304 * MIB), block_bytes: Some(512 << 10), ..CreateRequest::default() };
    create(&path, &request).unwrap();
    let disk = Disk::open(&path, &writable()).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
    for at in [303 * MIB, 0] {
        io.write(at, &[1; 4096], false).unwrap();
    }
    drop(io);
    disk.close().unwrap();
    drop(disk);
    shrink(&path, 257 * MIB);
    let (_, report) = check_image(&path, &OpenOptions::default()).unwrap();
    assert!(report.worst() < Some(Severity::Leak), "{:#?}", report.findings);
}

/// A disk that was created with room for all its blocks keeps room for those that are left.
#[test]
fn a_preallocated_disk_stays_preallocated() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for kind in kinds().into_iter().filter(|kind| kind.disk_type == DiskType::Dynamic) {
        let path = dir.path().join(format!("disk.{}", kind.format));
        let request = CreateRequest {
            size_bytes: Some(64 * MIB),
            disk_type: Some(kind.disk_type),
            block_bytes: kind.block_bytes,
            preallocate: true,
            ..CreateRequest::default()
        };
        create(&path, &request).unwrap();
        shrink(&path, 16 * MIB);
        let len = fs::metadata(&path).unwrap().len();
        assert!((16 * MIB..32 * MIB).contains(&len), "{}: {len} bytes", kind.format);
        let disk = Disk::open(&path, &writable()).unwrap();
        Blocking::open(&*disk, EngineKind::Auto).unwrap().write(9 * MIB, &[7; 4096], false).unwrap();
        disk.close().unwrap();
        drop(disk);
        assert_eq!(fs::metadata(&path).unwrap().len(), len, "{}: the write has taken kept room", kind.format);
        assert_sound(&path, "preallocated");
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_size_without_sense_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for kind in kinds().into_iter().filter(|kind| kind.disk_type != DiskType::Differencing) {
        let path = dir.path().join(format!("disk.{}", kind.format));
        written(&path, 8 * MIB, kind, false);
        let before = fs::read(&path).unwrap();
        let sized = |size| {
            let options = ResizeOptions { size, ..ResizeOptions::default() };
            resize(&path, &options, &mut |_, _| true)
        };
        for size in [NewSize::Bytes(0), NewSize::Bytes(MIB + 1), NewSize::Bytes(4 * MIB), NewSize::Minimum] {
            assert!(sized(size).is_err(), "{} {size:?}", kind.format);
        }
        assert!(fs::read(&path).unwrap() == before, "{}", kind.format);
        let open = Disk::open(&path, &writable()).unwrap();
        assert!(matches!(sized(NewSize::More(MIB)), Err(DiskError::InUse { .. })));
        drop(open);
        fs::remove_file(&path).unwrap();
    }
}
