//! COWD and SESPARSE as ESX writes them: images made by the tests, judged by `qemu-img`.

use super::{contents, opened};
use diskwright_format::vmdk::{
    SECTOR_BYTES, SESPARSE_TABLE_ENTRIES, SeSparseGrain, SeSparseHeader, sesparse_directory_entry,
    sesparse_volatile_header,
};
use std::{fs, path::Path, process::Command};

const GRAIN: usize = 4096;

fn at(bytes: &mut Vec<u8>, offset: usize, part: &[u8]) {
    bytes.resize(bytes.len().max(offset + part.len()), 0);
    bytes[offset..][..part.len()].copy_from_slice(part);
}

/// A SESPARSE extent with these grains, in this order.
fn sesparse(grains: u64, written: &[(u64, u8)], zero: &[u64]) -> Vec<u8> {
    let header = SeSparseHeader {
        capacity_sectors: grains * 8,
        flags: 0,
        volatile_sector: 1,
        directory: (2, 1),
        tables_sector: 8,
        grains_sector: 8 + 64 * grains.div_ceil(SESPARSE_TABLE_ENTRIES),
    };
    let mut bytes = header.to_bytes().to_vec();
    at(&mut bytes, 512, &sesparse_volatile_header());
    at(&mut bytes, header.grains_sector as usize * 512, &[]);
    let data = written.iter().zip(0..).map(|((grain, _), number)| (*grain, SeSparseGrain::Number(number)));
    for (grain, entry) in data.chain(zero.iter().map(|grain| (*grain, SeSparseGrain::Zero))) {
        let table = (grain / SESPARSE_TABLE_ENTRIES) as u32;
        at(&mut bytes, 1024 + table as usize * 8, &sesparse_directory_entry(table).to_le_bytes());
        at(&mut bytes, 8 * 512 + grain as usize * 8, &entry.encode().to_le_bytes());
    }
    for ((_, byte), number) in written.iter().zip(0..) {
        at(&mut bytes, header.grains_sector as usize * 512 + number * GRAIN, &[*byte; GRAIN]);
    }
    bytes
}

/// A COWD extent in grains of 4 KiB.
fn cowd(grains: u64, written: &[(u64, u8)]) -> Vec<u8> {
    let mut bytes = vec![0; 2048];
    bytes[..4].copy_from_slice(b"COWD");
    let tables = grains.div_ceil(4096);
    // version, flags, capacity, grain, directory, its entries
    for (index, value) in [1, 3, grains * 8, 8, 4, tables].into_iter().enumerate() {
        at(&mut bytes, 4 + index * 4, &(value as u32).to_le_bytes());
    }
    let (first_table, first_grain) = (8, 8 + 32 * tables);
    at(&mut bytes, first_grain as usize * 512, &[]);
    for table in 0..tables {
        at(&mut bytes, 2048 + table as usize * 4, &((first_table + 32 * table) as u32).to_le_bytes());
    }
    for ((grain, byte), number) in written.iter().zip(0..) {
        let sector = first_grain + number * 8;
        at(&mut bytes, first_table as usize * 512 + *grain as usize * 4, &(sector as u32).to_le_bytes());
        at(&mut bytes, sector as usize * 512, &[*byte; GRAIN]);
    }
    bytes
}

fn read_by_qemu(path: &Path) -> Option<Vec<u8>> {
    let copy = path.with_extension("raw");
    let ran =
        Command::new("qemu-img").args(["convert", "-f", "vmdk", "-O", "raw"]).args([path, &*copy]).output().ok()?;
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    Some(fs::read(copy).unwrap())
}

#[test]
fn redo_logs_of_esx_read_as_qemu_img_reads_them() {
    let dir = tempfile::tempdir().unwrap();
    // Two tables, the last grains of a table, and an order that is not that of the disk.
    let (grains, written) = (4096 + 700, [(4096 + 3, 7), (0, 1), (4095, 2), (9, 3), (4096 + 699, 4)]);
    for (kind, create_type, extent) in [
        ("SESPARSE", "seSparse", sesparse(grains, &written, &[11, 4097])),
        ("VMFSSPARSE", "vmfsSparse", cowd(grains, &written)),
    ] {
        fs::write(dir.path().join("extent.bin"), extent).unwrap();
        let path = dir.path().join("disk.vmdk");
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\ncreateType=\"{create_type}\"\n\
             RW {} {kind} \"extent.bin\"\nddb.adapterType = \"lsilogic\"\n",
            grains * 8
        );
        fs::write(&path, text).unwrap();
        let mut expected = vec![0; grains as usize * GRAIN];
        for (grain, byte) in written {
            expected[grain as usize * GRAIN..][..GRAIN].fill(byte);
        }
        let image = opened(&path);
        assert_eq!(image.info().block_bytes, GRAIN as u64);
        assert!(contents(&*image) == expected, "{kind} reads other bytes");
        match read_by_qemu(&path) {
            Some(found) => assert!(found == expected, "{kind}: qemu-img reads other bytes"),
            None => println!("skipped: qemu-img is not installed"),
        }
    }
    assert_eq!(SECTOR_BYTES * 8, GRAIN as u64);
}
