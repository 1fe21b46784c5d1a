//! libqcow and libvmdk, which share no code with QEMU or with us, read what we write. `./test`
//! installs them for Python in `target/second-readers`; without them the tests are skipped by name.

use crate::rescuing::{MIB, folder, image, noise, tool, write};
use diskwright_disk::{ConvertOptions, CreateRequest, convert, create};
use diskwright_image::{DiskType, Format};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Reads a disk by a library, and compares it with a raw file. Arguments: the library, the raw
/// file, the image, its parents.
const SCRIPT: &str = r#"
import sys
library, raw, *paths = sys.argv[1:]
def opened(path):
    if library == "pyqcow":
        import pyqcow
        disk = pyqcow.file()
        disk.open(path)
    else:
        import pyvmdk
        disk = pyvmdk.handle()
        disk.open(path)
        disk.open_extent_data_files()
    return disk
disks = [opened(path) for path in paths]
for child, parent in zip(disks, disks[1:]):
    child.set_parent(parent)
expected = open(raw, "rb").read()
disk = disks[0]
assert disk.get_media_size() == len(expected), (disk.get_media_size(), len(expected))
for at in range(0, len(expected), 1 << 20):
    piece = disk.read_buffer_at_offset(min(1 << 20, len(expected) - at), at)
    assert piece == expected[at:at + (1 << 20)], f"different at {at}"
"#;

/// The Python with a library; `None` if it is not installed.
fn python(library: &str) -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/second-readers/bin/python3");
    let found = [own, PathBuf::from("python3")].into_iter().find(|python| {
        let tried = Command::new(python).args(["-c", &format!("import {library}")]).output();
        tried.is_ok_and(|output| output.status.success())
    });
    if found.is_none() {
        println!("skipped: {library} for Python is not installed");
    }
    found
}

/// What is wrong with a reading.
fn fault(python: &Path, library: &str, raw: &Path, images: &[&Path]) -> Option<String> {
    let output = Command::new(python).args(["-c", SCRIPT, library]).arg(raw).args(images).output().unwrap();
    (!output.status.success()).then(|| format!("{images:?}: {}", String::from_utf8_lossy(&output.stderr)))
}

#[track_caller]
fn reads(python: &Path, library: &str, raw: &Path, images: &[&Path]) {
    assert_eq!(fault(python, library, raw, images), None);
}

/// Noise with a block of zeros, and a last block that is no whole cluster.
fn contents(seed: u64) -> Vec<u8> {
    let mut contents = noise(seed, 5 * MIB + 70 * 512);
    contents[MIB as usize..3 * MIB as usize].fill(0);
    contents[3 * MIB as usize..4 * MIB as usize].fill(7);
    contents
}

fn child_of(parent: &Path, child: &Path) {
    create(child, &CreateRequest { parent: Some(parent.to_owned()), ..CreateRequest::default() }).unwrap();
}

fn copied(source: &Path, dest: &Path, subformat: &str) {
    let dest_request = CreateRequest { subformat: Some(subformat.into()), ..CreateRequest::default() };
    let options = ConvertOptions { dest: dest_request, ..ConvertOptions::default() };
    convert(source, dest, &options, &mut |_, _| true).unwrap();
}

#[test]
fn libqcow_reads_what_we_write() {
    let Some(python) = python("pyqcow") else { return };
    let dir = folder();
    let path = |name: &str| dir.path().join(name);
    let model = contents(51);
    fs::write(path("model.raw"), &model).unwrap();
    for cluster_bytes in [512, 4 << 10, 64 << 10, 2 << 20] {
        let disk = path(&format!("{cluster_bytes}.qcow2"));
        image(&disk, Some(cluster_bytes), DiskType::Dynamic, &model);
        reads(&python, "pyqcow", &path("model.raw"), &[&disk]);
    }
    // libqcow 20260703 reads some compressed clusters of version 3 wrongly, whoever made them.
    copied(&path("model.raw"), &path("packed.qcow2"), "compressed");
    if tool(dir.path(), "qemu-img convert -c -O qcow2 model.raw theirs.qcow2").is_some() {
        match fault(&python, "pyqcow", &path("model.raw"), &[&path("theirs.qcow2")]) {
            None => reads(&python, "pyqcow", &path("model.raw"), &[&path("packed.qcow2")]),
            Some(_) => println!("skipped: libqcow misreads compressed clusters, also those of qemu-img"),
        }
    }
    // Version 2 is made by qemu-img, and written by us.
    if tool(dir.path(), &format!("qemu-img create -q -f qcow2 -o compat=0.10 old.qcow2 {}", model.len())).is_some() {
        write(&path("old.qcow2"), &model);
        reads(&python, "pyqcow", &path("model.raw"), &[&path("old.qcow2")]);
    }
    let mut above = model;
    above[0..64 << 10].copy_from_slice(&noise(52, 64 << 10));
    child_of(&path("65536.qcow2"), &path("child.qcow2"));
    write(&path("child.qcow2"), &above[..64 << 10]);
    fs::write(path("above.raw"), &above).unwrap();
    reads(&python, "pyqcow", &path("above.raw"), &[&path("child.qcow2"), &path("65536.qcow2")]);
}

#[test]
fn libvmdk_reads_what_we_write() {
    let Some(python) = python("pyvmdk") else { return };
    let dir = folder();
    let path = |name: &str| dir.path().join(name);
    let model = contents(53);
    fs::write(path("model.raw"), &model).unwrap();
    let subformats = Format::Vmdk.driver().subformats.iter().chain(&["streamOptimized"]);
    for subformat in subformats {
        let disk = path(&format!("{subformat}.vmdk"));
        copied(&path("model.raw"), &disk, subformat);
        reads(&python, "pyvmdk", &path("model.raw"), &[&disk]);
    }
    let mut above = model;
    above[0..64 << 10].copy_from_slice(&noise(54, 64 << 10));
    child_of(&path("monolithicSparse.vmdk"), &path("child.vmdk"));
    write(&path("child.vmdk"), &above[..64 << 10]);
    fs::write(path("above.raw"), &above).unwrap();
    reads(&python, "pyvmdk", &path("above.raw"), &[&path("child.vmdk"), &path("monolithicSparse.vmdk")]);
}
