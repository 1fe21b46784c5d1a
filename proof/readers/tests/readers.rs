//! What this program writes, read by imago and vmdk-core; and what imago writes, read here.

use diskwright_disk::{ConvertOptions, CreateRequest, Disk, OpenOptions, convert, create};
use diskwright_image::Format;
use diskwright_readers::{flat_vmdk_by_imago, qcow2_by_imago, vmdk_by_vmdk_core, write_qcow2_by_imago};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{fs, path::Path};
use tempfile::TempDir;

const MIB: usize = 1 << 20;

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Noise with zeros, text that compresses, and an end within a cluster.
fn contents(seed: u64) -> Vec<u8> {
    let mut contents = noise(seed, 5 * MIB + 70 * 512);
    contents[MIB..3 * MIB].fill(0);
    contents[3 * MIB..4 * MIB].fill(7);
    contents
}

fn copied(source: &Path, dest: &Path, subformat: Option<&str>, block_bytes: Option<u32>) {
    let dest_request = CreateRequest { subformat: subformat.map(str::to_owned), block_bytes, ..Default::default() };
    let options = ConvertOptions { dest: dest_request, ..ConvertOptions::default() };
    convert(source, dest, &options, &mut |_, _| true).unwrap();
}

fn write(path: &Path, at: usize, bytes: &[u8]) {
    let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
    io.write(at as u64, bytes, false).unwrap();
    drop(io);
    disk.close().unwrap();
}

fn read(path: &Path) -> Vec<u8> {
    let disk = Disk::open(path, &OpenOptions::default()).unwrap();
    let mut bytes = vec![0; disk.geometry().size_bytes as usize];
    Blocking::open(&*disk, EngineKind::Sync).unwrap().read(0, &mut bytes).unwrap();
    bytes
}

fn folder_with(model: &[u8]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("model.raw"), model).unwrap();
    dir
}

/// A child of `parent`, in which some of the disk is written again. Returns the new contents.
fn child(parent: &Path, path: &Path, model: &[u8]) -> Vec<u8> {
    create(path, &CreateRequest { parent: Some(parent.to_owned()), ..CreateRequest::default() }).unwrap();
    let mut above = model.to_vec();
    for (seed, at, len) in [(91, 0, 4096), (92, MIB + 512, 69_632), (93, 3 * MIB - 1024, 2048)] {
        above[at..at + len].copy_from_slice(&noise(seed, len));
        write(path, at, &above[at..at + len]);
    }
    above
}

#[test]
fn imago_reads_our_qcow2_images_of_every_kind() {
    let model = contents(61);
    let dir = folder_with(&model);
    let path = |name: &str| dir.path().join(name);
    for cluster_bytes in [512, 4 << 10, 64 << 10, 2 << 20] {
        let image = path(&format!("{cluster_bytes}.qcow2"));
        copied(&path("model.raw"), &image, None, Some(cluster_bytes));
        assert!(qcow2_by_imago(&image).unwrap() == model, "clusters of {cluster_bytes}");
        let above = path(&format!("child of {cluster_bytes}.qcow2"));
        let expected = child(&image, &above, &model);
        assert!(qcow2_by_imago(&above).unwrap() == expected, "a child of clusters of {cluster_bytes}");
    }
    copied(&path("model.raw"), &path("packed.qcow2"), Some("compressed"), None);
    assert!(qcow2_by_imago(&path("packed.qcow2")).unwrap() == model);
    // Compressed clusters of which one is written again.
    let mut changed = model;
    changed[3 * MIB + 5000..3 * MIB + 9000].copy_from_slice(&noise(62, 4000));
    write(&path("packed.qcow2"), 3 * MIB + 4608, &changed[3 * MIB + 4608..3 * MIB + 9216]);
    assert!(qcow2_by_imago(&path("packed.qcow2")).unwrap() == changed);
}

#[test]
fn imago_and_this_program_write_to_a_qcow2_in_turns() {
    let mut model = contents(63);
    let dir = folder_with(&model);
    for cluster_bytes in [512, 64 << 10] {
        let image = dir.path().join(format!("{cluster_bytes}.qcow2"));
        copied(&dir.path().join("model.raw"), &image, None, Some(cluster_bytes));
        model = fs::read(dir.path().join("model.raw")).unwrap();
        for turn in 0..6 {
            let (at, len) = (turn * 700 * 1024 + 1536, 40_960 + turn * 512);
            let bytes = noise(64 + turn as u64, len);
            model[at..at + len].copy_from_slice(&bytes);
            if turn % 2 == 0 {
                write_qcow2_by_imago(&image, &[(at as u64, bytes)]).unwrap();
            } else {
                write(&image, at, &bytes);
            }
            assert!(read(&image) == model, "after turn {turn}");
            assert!(qcow2_by_imago(&image).unwrap() == model, "after turn {turn}");
            let found = diskwright_disk::check(&image, &OpenOptions::default()).unwrap();
            assert!(found.is_sound(), "after turn {turn}: {:?}", found.report.findings);
        }
    }
}

#[test]
fn vmdk_core_reads_our_vmdks_of_every_kind() {
    let model = contents(65);
    let dir = folder_with(&model);
    let path = |name: &str| dir.path().join(name);
    for subformat in Format::Vmdk.driver().subformats.iter().chain(&["streamOptimized"]) {
        let image = path(&format!("{subformat}.vmdk"));
        copied(&path("model.raw"), &image, Some(subformat), None);
        assert!(vmdk_by_vmdk_core(&image).unwrap() == model, "{subformat}");
        if subformat.to_lowercase().ends_with("flat") {
            assert!(flat_vmdk_by_imago(&image).unwrap() == model, "{subformat}, by imago");
        }
    }
    let expected = child(&path("monolithicSparse.vmdk"), &path("child.vmdk"), &model);
    assert!(vmdk_by_vmdk_core(&path("child.vmdk")).unwrap() == expected);
}
