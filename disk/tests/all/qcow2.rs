//! Chains of qcow2 images by qemu-img: backing files of a recorded format, data files, and names
//! that lead out of the folder. Skipped by name without qemu-img and qemu-io.

use diskwright_disk::{Disk, DiskError, OpenOptions};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::sync::Arc;
use std::{fs, path::Path, process::Command};
use tempfile::TempDir;

/// Runs a tool in the folder. False if it is missing.
fn run(dir: &Path, name: &str, arguments: &[&str]) -> bool {
    match Command::new(name).current_dir(dir).args(arguments).output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{name} {arguments:?}: {text}");
            true
        }
        Err(_) => {
            println!("skipped: {name} is not installed");
            false
        }
    }
}

fn open(path: &Path) -> Result<Arc<Disk>, DiskError> {
    Disk::open(path, &OpenOptions::default())
}

fn contents(disk: &Disk) -> Vec<u8> {
    let mut bytes = vec![0; disk.geometry().size_bytes as usize];
    let mut queue = Blocking::open(disk, EngineKind::Auto).unwrap();
    for (index, piece) in bytes.chunks_mut(1 << 20).enumerate() {
        queue.read((index as u64) << 20, piece).unwrap();
    }
    bytes
}

#[test]
fn a_chain_reads_as_qemu_reads_it() {
    let folder = TempDir::new().unwrap();
    let dir = folder.path();
    let create = |arguments: &[&str]| run(dir, "qemu-img", &[&["create", "-q", "-f", "qcow2"], arguments].concat());
    let io = |file: &str, writes: &[&str]| {
        let commands = writes.iter().flat_map(|write| ["-c", write]);
        run(dir, "qemu-io", &commands.chain([file]).collect::<Vec<_>>())
    };
    fs::write(dir.join("base.raw"), vec![1; 5 << 20]).unwrap();
    // The disk is longer than its backing file, which reads as zeros beyond its end.
    if !create(&["-b", "base.raw", "-F", "raw", "-o", "extended_l2=on", "middle.qcow2", "8M"]) {
        return;
    }
    if !io("middle.qcow2", &["write -P 2 1M 3k", "write -z 2M 100k", "write -P 9 7M 1k", "discard 3M 64k"]) {
        return;
    }
    create(&["-b", "middle.qcow2", "-F", "qcow2", "-o", "data_file=top.data", "top.qcow2", "9M"]);
    io("top.qcow2", &["write -P 3 4M 5k", "write -z -u 0 64k", "write -P 4 9215k 1k"]);
    run(dir, "qemu-img", &["convert", "-c", "-O", "qcow2", "-o", "extended_l2=on", "top.qcow2", "packed.qcow2"]);
    for name in ["middle.qcow2", "top.qcow2", "packed.qcow2"] {
        run(dir, "qemu-img", &["convert", "-O", "raw", name, "expected.raw"]);
        let disk = open(&dir.join(name)).unwrap_or_else(|error| panic!("{error}"));
        assert!(contents(&disk) == fs::read(dir.join("expected.raw")).unwrap(), "{name}");
    }
    let told = Disk::open(dir.join("top.qcow2"), &OpenOptions { writable: true, ..OpenOptions::default() });
    let told = told.map(drop).unwrap_err().to_string();
    assert!(told.contains("writing to a qcow2 image with an external data file is not supported"), "{told}");
}

#[test]
fn names_that_lead_out_of_the_folder_are_refused() {
    let folder = TempDir::new().unwrap();
    let (dir, secret) = (folder.path().join("inside"), folder.path().join("secret.raw"));
    fs::create_dir(&dir).unwrap();
    fs::write(&secret, vec![7; 1 << 20]).unwrap();
    let secret = secret.to_str().unwrap();
    let create = |arguments: &[&str]| run(&dir, "qemu-img", &[&["create", "-q", "-f", "qcow2"], arguments].concat());
    if !create(&["-b", secret, "-F", "raw", "backing.qcow2", "1M"]) {
        return;
    }
    create(&["-b", "../secret.raw", "-F", "raw", "relative.qcow2", "1M"]);
    create(&["-o", &format!("data_file={secret}"), "data.qcow2", "1M"]);
    create(&["-u", "-b", "json:{}", "-F", "raw", "json.qcow2", "1M"]);
    create(&["-u", "-b", "nbd://host/disk", "-F", "raw", "nbd.qcow2", "1M"]);
    create(&["-u", "-b", "loop.qcow2", "-F", "qcow2", "other.qcow2", "1M"]);
    create(&["-u", "-b", "other.qcow2", "-F", "qcow2", "loop.qcow2", "1M"]);
    for name in ["backing", "relative", "data", "json", "nbd", "loop"] {
        let told = open(&dir.join(format!("{name}.qcow2"))).map(drop).expect_err(name).to_string();
        println!("{name}: {told}");
    }
    // An image that does not record the format of its backing file.
    create(&["-u", "-b", "base.img", "-F", "raw", "unnamed.qcow2", "1M"]);
    let path = dir.join("unnamed.qcow2");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(4).position(|word| word == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
    bytes[at] = 0;
    fs::write(&path, bytes).unwrap();
    let told = open(&path).map(drop).unwrap_err().to_string();
    assert!(told.contains("whose format the image does not record"), "{told}");
}
