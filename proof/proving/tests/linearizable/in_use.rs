//! Disks that change while they are in use: images join, are merged, compacted and moved.

use super::{PLAN, made, new_file, soak_on, soak_rounds};
use diskwright_disk::{AbsorbOptions, CreateRequest, Disk, Layer, Movable, MoveOptions};
use diskwright_image::{CreateOptions, DiskType, Format, ParentLink, probe, vhd, vhdx};
use diskwright_proving::linear::Plan;
use diskwright_store::BlockDevice;
use std::{sync::Arc, thread, time::Duration};
use uuid::Uuid;

/// Images are added while the disk is in use: with the same block size, and with a smaller one, for
/// which the map is rebuilt.
fn soak_with_snapshots(format: Format, size_bytes: u64, block_bytes: [u32; 2]) {
    let dir = tempfile::tempdir().unwrap();
    let request =
        CreateRequest { size_bytes: Some(size_bytes), block_bytes: Some(block_bytes[0]), ..CreateRequest::default() };
    let disk = made(&dir.path().join(format!("disk.{format}")), &request);
    let mut joined = 0;
    let mut beside = |disk: &Disk| {
        for block_bytes in block_bytes {
            thread::sleep(Duration::from_millis(10));
            joined += 1;
            let path = dir.path().join(format!("disk-{joined}.{format}"));
            let parent = ParentLink {
                relative_path: Some(r".\below".into()),
                linkage: Some(Uuid::from_u128(1).into()),
                ..ParentLink::default()
            };
            let options = CreateOptions {
                disk_type: DiskType::Differencing,
                size_bytes,
                block_bytes: Some(block_bytes),
                logical_sector_bytes: 512,
                physical_sector_bytes: 512,
                parent: Some(parent),
                preallocate: false,
                disk_id: None,
                own: Default::default(),
            };
            let store = new_file(&path);
            let made = match format {
                Format::Vhd => vhd::create(Arc::clone(&store), &options),
                _ => vhdx::create(Arc::clone(&store), &options),
            };
            made.map_err(|error| error.to_string())?;
            let image = probe::open(store, Some(format), true, 512).map_err(|error| error.to_string())?;
            disk.push_layer(Layer { path, image }).map_err(|error| error.to_string())?;
        }
        Ok(())
    };
    let plan = Plan { block_sectors: u64::from(block_bytes[0]) / 512, ..PLAN };
    soak_on(&format!("{format} dynamic, with snapshots"), &disk, plan, &mut beside);
    assert!(disk.layers().len() > 2);
}

#[test]
fn vhd_with_snapshots() {
    soak_with_snapshots(Format::Vhd, 1 << 20, [32 << 10, 16 << 10]);
}

#[test]
fn vhdx_with_snapshots() {
    soak_with_snapshots(Format::Vhdx, 4 << 20, [2 << 20, 1 << 20]);
}

/// The disk is frozen and merged again while it is in use, each time with the same names.
fn soak_with_merges(format: Format, size_bytes: u64, block_bytes: u32) {
    let dir = tempfile::tempdir().unwrap();
    let request =
        CreateRequest { size_bytes: Some(size_bytes), block_bytes: Some(block_bytes), ..CreateRequest::default() };
    let disk = made(&dir.path().join(format!("disk.{format}")), &request);
    let mut merged_bytes = 0;
    let mut beside = |disk: &Disk| {
        for _ in 0..2 {
            thread::sleep(Duration::from_millis(5));
            disk.snapshot("frozen", false, &mut ()).map_err(|error| error.to_string())?;
            thread::sleep(Duration::from_millis(5));
            let absorbed = disk.absorb(&AbsorbOptions::default(), &mut |_, _| true);
            merged_bytes += absorbed.map_err(|error| error.to_string())?.data_bytes;
        }
        Ok(())
    };
    let plan = Plan { block_sectors: u64::from(block_bytes) / 512, ..PLAN };
    soak_on(&format!("{format} dynamic, merged in use"), &disk, plan, &mut beside);
    assert!(disk.layers().len() == 1 && merged_bytes > 0);
}

#[test]
fn vhd_merged_in_use() {
    soak_with_merges(Format::Vhd, 1 << 20, 32 << 10);
}

#[test]
fn vhdx_merged_in_use() {
    soak_with_merges(Format::Vhdx, 4 << 20, 1 << 20);
}

#[test]
fn raw_growing() {
    let dir = tempfile::tempdir().unwrap();
    let disk =
        made(&dir.path().join("disk.raw"), &CreateRequest { size_bytes: Some(512 << 10), ..CreateRequest::default() });
    let mut beside = |disk: &Disk| {
        for _ in 0..4 {
            thread::sleep(Duration::from_millis(5));
            disk.grow(disk.geometry().size_bytes + (24 << 10)).map_err(|error| error.to_string())?;
        }
        Ok(())
    };
    soak_on("raw, growing", &disk, PLAN, &mut beside);
}

/// The blocks of the disk move down in its file, again and again, while the threads discard and
/// write.
fn soak_with_compactions(format: Format, size_bytes: u64, block_bytes: u32) {
    let dir = tempfile::tempdir().unwrap();
    let request =
        CreateRequest { size_bytes: Some(size_bytes), block_bytes: Some(block_bytes), ..CreateRequest::default() };
    let disk = made(&dir.path().join(format!("disk.{format}")), &request);
    let (mut zero_bytes, mut moved_bytes) = (0, 0);
    let mut beside = |disk: &Disk| {
        for _ in 0..4 {
            thread::sleep(Duration::from_millis(3));
            let done = disk.compact(false, &mut |_, _| true).map_err(|error| error.to_string())?;
            (zero_bytes, moved_bytes) = (zero_bytes + done.zero_bytes, moved_bytes + done.moved_bytes);
        }
        Ok(())
    };
    let plan = Plan { block_sectors: u64::from(block_bytes) / 512, sectors_max: 160, ..PLAN };
    soak_on(&format!("{format} dynamic, compacted in use"), &disk, plan, &mut beside);
    println!("soak: {format}: {zero_bytes} bytes of zeros were given back, {moved_bytes} bytes moved");
    assert!(moved_bytes > 0, "no block was moved");
}

#[test]
fn vhd_compacted_in_use() {
    soak_with_compactions(Format::Vhd, 1 << 20, 16 << 10);
}

#[test]
fn vhdx_compacted_in_use() {
    soak_with_compactions(Format::Vhdx, 6 << 20, 1 << 20);
}

#[test]
fn qcow2_compacted_in_use() {
    soak_with_compactions(Format::Qcow2, 1 << 20, 16 << 10);
}

/// The disk goes from one format to the next while the threads use it.
#[test]
fn moved_in_use() {
    const SIZE_BYTES: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = |number: usize, format: Format| dir.path().join(format!("disk-{number}.{format}"));
    let request = CreateRequest { size_bytes: Some(SIZE_BYTES), ..CreateRequest::default() };
    let movable = Movable::new(made(&path(0, Format::Vhd), &request));
    let mut formats = [Format::Vhdx, Format::Raw, Format::Qcow2, Format::Vhd].into_iter().cycle();
    let mut moves = 0;
    let mut beside = || {
        for _ in 0..2 {
            thread::sleep(Duration::from_millis(3));
            moves += 1;
            let to = path(moves, formats.next().unwrap_or(Format::Raw));
            let moved = movable.move_to(&to, &MoveOptions::default(), &mut ()).map_err(|error| error.to_string())?;
            if moved.old_is_kept {
                return Err("the old file is there".into());
            }
        }
        Ok(())
    };
    soak_rounds("moved in use", &movable, PLAN, &mut beside);
    movable.close().unwrap();
    assert!(moves >= 2);
}
