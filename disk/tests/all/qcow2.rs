//! Chains of qcow2 images by qemu-img: backing files of a recorded format, data files, and names
//! that lead out of the folder. Skipped by name without qemu-img and qemu-io.

use diskwright_disk::{CompactOptions, Disk, DiskError, OpenOptions, compact};
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
    // Subclusters are written, but not beside compressed clusters.
    let options = OpenOptions { writable: true, ..OpenOptions::default() };
    let disk = Disk::open(dir.join("packed.qcow2"), &options).unwrap();
    let told = Blocking::open(&*disk, EngineKind::Auto).unwrap().write(0, &[1; 512], false).unwrap_err().to_string();
    assert!(told.contains("(subclusters) and compressed clusters"), "{told}");
}

#[test]
fn two_disks_that_name_each_other_as_their_backing_file_are_refused() {
    let folder = TempDir::new().unwrap();
    let dir = folder.path();
    if !run(dir, "qemu-img", &["create", "-q", "-f", "qcow2", "a.qcow2", "1M"]) {
        return;
    }
    run(dir, "qemu-img", &["create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "b.qcow2"]);
    run(dir, "qemu-img", &["rebase", "-u", "-b", "b.qcow2", "-F", "qcow2", "a.qcow2"]);
    for name in ["a.qcow2", "b.qcow2"] {
        let told = open(&dir.join(name)).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(told.contains("loop"), "{name}: {told}");
    }
}

/// Writes, discards and reads a disk at random, by us and by QEMU in turns.
#[test]
fn clusters_in_a_data_file_and_subclusters_are_written() {
    let folder = TempDir::new().unwrap();
    let dir = folder.path();
    fs::write(dir.join("base.raw"), vec![9; 3 << 20]).unwrap();
    let kinds: [(&str, &[&str]); 7] = [
        ("plain", &["-o", "data_file=plain.data"]),
        ("raw", &["-o", "data_file=raw.data,data_file_raw=on"]),
        ("small", &["-o", "data_file=small.data,cluster_size=4k"]),
        ("child", &["-o", "data_file=child.data", "-b", "base.raw", "-F", "raw"]),
        ("parts", &["-o", "extended_l2=on"]),
        ("parts of 512", &["-o", "extended_l2=on,cluster_size=16k"]),
        ("child in parts", &["-o", "extended_l2=on,cluster_size=32k", "-b", "base.raw", "-F", "raw"]),
    ];
    for (name, options) in kinds {
        let file = format!("{name}.qcow2");
        // The last cluster is cut.
        if !run(dir, "qemu-img", &[&["create", "-q", "-f", "qcow2"], options, &[&file, "4100k"]].concat()) {
            return;
        }
        let mut model = vec![0; 4100 << 10];
        if name.starts_with("child") {
            model[..3 << 20].fill(9);
        }
        let mut seed = 1_u64;
        let mut dice = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        let compacts = name.contains("parts");
        let estimate = CompactOptions { estimate: true, ..CompactOptions::default() };
        for round in 0..6 {
            let options = OpenOptions { writable: true, ..OpenOptions::default() };
            let disk = Disk::open(dir.join(&file), &options).unwrap_or_else(|error| panic!("{error}"));
            let mut queue = Blocking::open(&*disk, EngineKind::Auto).unwrap();
            for turn in 0..40 {
                let at = dice(8200);
                let sectors = (1 + dice([8, 300, 40][turn % 3])).min(8200 - at);
                let (at, len) = (at * 512, sectors * 512);
                let range = at as usize..(at + len) as usize;
                match dice(5) {
                    0 => queue.discard(at, len).unwrap(),
                    1 => queue.write_zeroes(at, len).unwrap(),
                    _ => queue.write(at, &vec![1 + turn as u8; len as usize], false).unwrap(),
                }
                let byte = contents_at(&mut queue, at);
                assert!(byte == 0 || byte == 1 + turn as u8);
                model[range].fill(byte);
                if dice(9) == 0 {
                    queue.flush().unwrap();
                }
                if turn == 25 && compacts {
                    disk.compact(false, &mut |_, _| true).unwrap();
                }
            }
            drop(queue);
            disk.close().unwrap();
            drop(disk);
            if compacts && round % 2 == 0 {
                let before = fs::metadata(dir.join(&file)).unwrap().len();
                let foretold = compact(dir.join(&file), &estimate, &mut |_, _| true).unwrap().new_file_bytes;
                let done = compact(dir.join(&file), &CompactOptions::default(), &mut |_, _| true).unwrap();
                assert!(done.new_file_bytes <= foretold && foretold <= before, "{name}: {foretold} {done:?}");
                let image = Arc::clone(&open(&dir.join(&file)).unwrap().layers()[0].image);
                let smallest = image.packed_len_bytes(u64::MAX).unwrap();
                assert_eq!(Some(done.new_file_bytes), smallest, "{name}, round {round}");
            }
            run(dir, "qemu-img", &["check", "-q", "-f", "qcow2", &file]);
            assert!(contents(&open(&dir.join(&file)).unwrap()) == model, "{name}, round {round}");
            run(dir, "qemu-img", &["convert", "-O", "raw", &file, "expected.raw"]);
            assert!(fs::read(dir.join("expected.raw")).unwrap() == model, "{name}, round {round}, by QEMU");
            if name == "raw" {
                // QEMU makes it as long as whole clusters.
                let mut bytes = fs::read(dir.join("raw.data")).unwrap();
                assert!(bytes.drain(model.len()..).all(|byte| byte == 0));
                let differs = bytes.iter().zip(&model).position(|(is, should)| is != should);
                assert_eq!((bytes.len(), differs), (model.len(), None), "round {round}: the data file is the disk");
            }
            let at = dice(60);
            run(dir, "qemu-io", &["-f", "qcow2", "-c", &format!("write -P {round} {}k 40k", at * 64), &file]);
            model[(at as usize) << 16..][..40 << 10].fill(round as u8);
            // QEMU's discard leaves the bytes in the data file.
            let nothing = if name == "raw" { "write -z 1M 128k" } else { "discard 1M 128k" };
            run(dir, "qemu-io", &["-f", "qcow2", "-c", nothing, &file]);
            model = contents(&open(&dir.join(&file)).unwrap());
        }
        let told = Disk::open(dir.join(&file), &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
        if name.contains("parts") {
            told.grow(8 << 20).unwrap();
            told.close().unwrap();
            drop(told);
            run(dir, "qemu-img", &["check", "-q", "-f", "qcow2", &file]);
            model.resize(8 << 20, 0);
            run(dir, "qemu-img", &["convert", "-O", "raw", &file, "expected.raw"]);
            assert!(fs::read(dir.join("expected.raw")).unwrap() == model, "{name}, larger");
            continue;
        }
        let told = told.grow(8 << 20).unwrap_err().to_string();
        assert!(told.contains("a new size of a qcow2 image with an external data file"), "{told}");
    }
}

/// One byte of the disk.
fn contents_at(queue: &mut Blocking, at: u64) -> u8 {
    let mut sector = [0; 512];
    queue.read(at, &mut sector).unwrap();
    sector[0]
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
