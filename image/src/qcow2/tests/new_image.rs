//! The metadata of new images (`diskwright_format::qcow2::NewImage`), checked by us and by QEMU,
//! which then writes into them.

use super::{
    qemu::{self, tool, wrote},
    *,
};
use diskwright_format::qcow2::{Backing, NewImage, NewMetadata, RefcountWidth};
use std::path::Path;

fn bytes(made: &NewMetadata) -> Vec<u8> {
    let mut bytes = vec![0; made.file_bytes as usize];
    bytes[..made.front.len()].copy_from_slice(&made.front);
    let at = made.header.refcount_table.offset_bytes as usize;
    bytes[at..at + made.refcounts.len()].copy_from_slice(&made.refcounts);
    bytes
}

fn assert_sound(bytes: Vec<u8>, what: &str) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("disk.qcow2", bytes));
    let report = super::super::examine(&[Some(store)], false).unwrap().report;
    assert!(report.findings.is_empty() && report.leaked_bytes == 0, "{what}: {:?}", report.findings);
}

/// `None` without QEMU.
fn is_sound_for_qemu(path: &Path, what: &str) -> Option<()> {
    let output = tool("qemu-img", &["check", "-q", "-f", "qcow2", path.to_str()?])?;
    assert!(output.status.success(), "{what}: {output:?}");
    Some(())
}

#[test]
fn every_cluster_size_and_refcount_width_is_sound_for_us_and_for_qemu() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("disk.qcow2");
    for cluster_bits in 9..=21 {
        for order in 0..=6 {
            let refcount_width = RefcountWidth::of_order(order).unwrap();
            let new = NewImage { size_bytes: (6 << 20) + 512, cluster_bits, refcount_width, backing: None };
            let what = format!("{cluster_bits} cluster bits, refcount order {order}");
            let made = bytes(&new.metadata().unwrap());
            assert_sound(made.clone(), &what);
            std::fs::write(&path, made).unwrap();
            let Some(()) = is_sound_for_qemu(&path, &what) else { return };
            // Growth of the refcounts differs with their width; two widths show both ends.
            if ![0, 6].contains(&order) {
                continue;
            }
            let Some(()) = wrote(&path, "write -P 7 1m 4m") else { return };
            is_sound_for_qemu(&path, &what).unwrap();
            assert_sound(std::fs::read(&path).unwrap(), &what);
            let disk = contents(&open(vec![qemu::store(&path)], false, None).unwrap()).unwrap();
            let expected = |at: usize| if (1 << 20..5 << 20).contains(&at) { 7 } else { 0 };
            assert!(disk.iter().enumerate().all(|(at, &byte)| byte == expected(at)), "{what}");
        }
    }
}

#[test]
fn the_backing_file_is_found_by_us_and_by_qemu() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("disk.qcow2");
    std::fs::write(folder.path().join("base.raw"), vec![9; 1 << 20]).unwrap();
    let backing = Some(Backing { name: "base.raw".into(), format: "raw".into() });
    let refcount_width = RefcountWidth::of_order(4).unwrap();
    let made = NewImage { size_bytes: 1 << 20, cluster_bits: 16, refcount_width, backing }.metadata().unwrap();
    std::fs::write(&path, bytes(&made)).unwrap();
    assert_sound(bytes(&made), "over a raw file");
    let link = super::super::parent_link(&*qemu::store(&path)).unwrap().unwrap();
    assert_eq!((link.relative_path.as_deref(), link.format), (Some("base.raw"), Some(crate::Format::Raw)));
    // Fails if the bytes are not those of the backing file.
    let Some(()) = wrote(&path, "read -P 9 0 1m") else { return };
    is_sound_for_qemu(&path, "over a raw file").unwrap();
}
