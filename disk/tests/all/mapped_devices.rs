//! VMDKs that map a block device: what is opened, written, frozen and merged, and devices that
//! became another one.

use crate::common::devices::{Loop, Zram};
use diskwright_disk::{
    AbsorbOptions, CreateRequest, Disk, DiskError, FormerImage, KeptName, MergeOptions, OpenOptions, ParentPolicy,
    SnapshotOptions, check, create, merge, remove_snapshot, revert, snapshot,
};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};
use tempfile::TempDir;

const SIZE: usize = 8 << 20;
const KINDS: [&str; 3] = ["fullDevice", "vmfsRawDeviceMap", "vmfsPassthroughRawDeviceMap"];

fn policy() -> ParentPolicy {
    ParentPolicy { allow_devices: true, ..ParentPolicy::default() }
}

fn options(writable: bool) -> OpenOptions {
    OpenOptions { writable, parents: policy(), ..OpenOptions::default() }
}

fn open(path: &Path, writable: bool) -> Result<Arc<Disk>, DiskError> {
    Disk::open(path, &options(writable))
}

/// Names without devices, so that the path in the message is the one of the test.
fn file(dir: &Path, name: &str, len: usize) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, vec![b'g'; len]).unwrap();
    path
}

fn map(dir: &Path, kind: &str, device: &Path) -> PathBuf {
    let path = dir.join("vm.vmdk");
    create(&path, &request(kind, device)).unwrap();
    path
}

fn request(kind: &str, device: &Path) -> CreateRequest {
    CreateRequest {
        subformat: Some(kind.into()),
        device: Some(device.to_owned()),
        parents: policy(),
        ..CreateRequest::default()
    }
}

fn read(path: &Path) -> Vec<u8> {
    let disk = open(path, false).unwrap();
    let mut all = vec![0; disk.geometry().size_bytes as usize];
    Blocking::open(&*disk, EngineKind::Sync).unwrap().read(0, &mut all).unwrap();
    all
}

fn write(path: &Path, at: u64, bytes: &[u8]) {
    let disk = open(path, true).unwrap();
    Blocking::open(&*disk, EngineKind::Sync).unwrap().write(at, bytes, false).unwrap();
    disk.close().unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".vmdk")).collect();
    names.sort();
    names
}

#[test]
fn a_mapping_moves_the_bytes_of_its_device() {
    for kind in KINDS {
        let dir = TempDir::new().unwrap();
        let backing = file(dir.path(), "backing", SIZE);
        let Some(device) = Loop::over(&backing) else { return };
        let refused = CreateRequest { parents: ParentPolicy::default(), ..request(kind, &device.0) };
        let error = create(dir.path().join("vm.vmdk"), &refused).unwrap_err().to_string();
        assert!(error.contains("`ParentPolicy::allow_devices`"), "{error}");
        let path = map(dir.path(), kind, &device.0);
        let further = match kind {
            "fullDevice" => vec!["vm.vmdk"],
            "vmfsRawDeviceMap" => vec!["vm-rdm.vmdk", "vm.vmdk"],
            _ => vec!["vm-rdmp.vmdk", "vm.vmdk"],
        };
        assert_eq!(names(dir.path()), further, "{kind}");
        let error = Disk::open(&path, &OpenOptions::default()).unwrap_err();
        assert!(matches!(error, DiskError::ParentIsDevice { .. }), "{kind}: {error}");
        write(&path, 4096, &[1; 70_144]);
        let mut expected = vec![b'g'; SIZE];
        expected[4096..4096 + 70_144].fill(1);
        assert!(read(&path) == expected, "{kind}");
        assert!(fs::read(&backing).unwrap() == expected, "{kind}: the device has other bytes");
        let info = open(&path, false).unwrap().layers()[0].image.info().clone();
        assert_eq!((info.subformat.as_deref(), info.size_bytes), (Some(kind), SIZE as u64));
        assert_eq!(info.remarks.iter().any(|remark| remark.contains("SCSI pass-through")), kind == KINDS[2]);
        assert!(check(&path, &options(false)).unwrap().is_sound());
        // A writer has the device for itself.
        let writer = open(&path, true).unwrap();
        assert!(Disk::open(&device.0, &OpenOptions::default()).is_err(), "{kind}: the device is not locked");
        drop(writer);
        let removing = SnapshotOptions { open: options(true), discard: true, ..SnapshotOptions::default() };
        remove_snapshot(&path, &removing, &mut |_, _| true).unwrap();
        assert_eq!(names(dir.path()), [""; 0], "{kind}");
        assert!(device.0.exists() && fs::read(&backing).unwrap() == expected, "{kind}");
    }
}

#[test]
fn a_virtual_mapping_takes_snapshots_and_a_physical_one_none() {
    let dir = TempDir::new().unwrap();
    let backing = file(dir.path(), "backing", SIZE);
    let Some(device) = Loop::over(&backing) else { return };
    let path = map(dir.path(), "rdm-physical", &device.0);
    let named = |name: &str| SnapshotOptions { name: name.into(), open: options(true), ..SnapshotOptions::default() };
    let child = CreateRequest { parent: Some(path.clone()), parents: policy(), ..CreateRequest::default() };
    let in_use = || open(&path, true).unwrap().snapshot("a", false, &mut ()).map(drop).unwrap_err();
    let attempts: [&dyn Fn() -> DiskError; 3] =
        [&|| snapshot(&path, &named("a")).map(drop).unwrap_err(), &in_use, &|| {
            create(dir.path().join("child.vmdk"), &child).map(drop).unwrap_err()
        }];
    for attempt in attempts {
        let error = attempt();
        assert!(error.to_string().contains("physical compatibility, which excludes snapshots"), "{error}");
    }
    for name in names(dir.path()) {
        fs::remove_file(dir.path().join(name)).unwrap();
    }
    let path = map(dir.path(), "rdm-virtual", &device.0);
    write(&path, 0, &[1; 1 << 20]);
    let frozen = snapshot(&path, &named("monday")).unwrap().frozen.unwrap();
    write(&path, 1 << 20, &[2; 299_008]);
    let mut before = vec![b'g'; SIZE];
    before[..1 << 20].fill(1);
    assert!(fs::read(&backing).unwrap() == before, "a snapshot was written through");
    let mut after = before.clone();
    after[1 << 20..(1 << 20) + 299_008].fill(2);
    assert!(read(&path) == after && read(&frozen) == before);
    revert(&path, None, FormerImage::Discarded, &named("")).unwrap();
    assert!(read(&path) == before);
    write(&path, 1 << 20, &[2; 299_008]);
    // Merged while nobody has it open, by the name of the child.
    let merging = MergeOptions { open: options(true), keep: KeptName::Childs, ..MergeOptions::default() };
    merge(&path, &merging, &mut |_, _| true).unwrap();
    assert!(read(&path) == after && fs::read(&backing).unwrap() == after);
    assert_eq!(names(dir.path()), ["vm-rdm.vmdk", "vm.vmdk"]);
    // In use: frozen images by the live merge, the last one by the device itself.
    let disk = open(&path, true).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    for (at, name) in [(3, "tuesday"), (4, "wednesday")] {
        disk.snapshot(name, false, &mut ()).unwrap();
        io.write(at << 20, &[at as u8; 5120], false).unwrap();
        after[(at as usize) << 20..][..5120].fill(at as u8);
    }
    disk.merge(dir.path().join("vm_wednesday.vmdk"), &MergeOptions::default(), &mut |_, _| true).unwrap();
    disk.absorb(&AbsorbOptions::default(), &mut |_, _| true).unwrap();
    drop(io);
    disk.close().unwrap();
    drop(disk);
    assert!(read(&path) == after && fs::read(&backing).unwrap() == after);
    assert_eq!(names(dir.path()), ["vm-rdm.vmdk", "vm.vmdk"]);
}

#[test]
fn a_device_that_became_another_one_is_refused() {
    for kind in KINDS {
        let dir = TempDir::new().unwrap();
        let (backing, other) = (file(dir.path(), "backing", SIZE), file(dir.path(), "other", SIZE));
        let small = file(dir.path(), "small", SIZE / 2);
        let Some(device) = Loop::over(&backing) else { return };
        let path = map(dir.path(), kind, &device.0);
        let refused = |what: &str| {
            for writable in [false, true] {
                let error = open(&path, writable).unwrap_err().to_string();
                assert!(error.contains("it is another device than the one that was mapped"), "{kind}: {error}");
                assert!(error.contains(what), "{kind}: {error}");
            }
            let found = check(&path, &options(false)).unwrap();
            assert!(!found.is_sound(), "{kind}: {found:?}");
        };
        device.change(&other);
        refused("serial number");
        device.change(&small);
        refused("serial number");
        device.change(&backing);
        fs::OpenOptions::new().write(true).open(&backing).unwrap().set_len(SIZE as u64 * 2).unwrap();
        device.change(&backing);
        assert_eq!(read(&path).len(), SIZE, "{kind}: a device that has grown is the same one");
        fs::OpenOptions::new().write(true).open(&backing).unwrap().set_len(SIZE as u64 / 2).unwrap();
        device.change(&backing);
        refused("it has 4194304 bytes, expected 8388608");
    }
}

#[test]
fn a_device_without_a_number_is_known_by_its_size() {
    let dir = TempDir::new().unwrap();
    let Some(device) = Zram::of(SIZE as u64) else { return };
    let path = dir.path().join("vm.vmdk");
    let warnings = create(&path, &request("rdm-virtual", &device.path())).unwrap();
    assert!(warnings.iter().any(|warning| warning.contains("recognised by its size only")), "{warnings:?}");
    assert!(warnings.iter().any(|warning| warning.contains("no name in /dev/disk/by-id")), "{warnings:?}");
    write(&path, 8192, &[7; 8192]);
    assert!(read(&path)[8192..16384].iter().all(|&byte| byte == 7));
    for size_bytes in [SIZE as u64 * 2, SIZE as u64 / 2] {
        device.resize(size_bytes);
        let error = open(&path, true).unwrap_err().to_string();
        assert!(error.contains(&format!("it has {size_bytes} bytes, expected 8388608")), "{error}");
    }
}

#[test]
fn some_partitions_of_a_device_are_shown() {
    let dir = TempDir::new().unwrap();
    let backing = file(dir.path(), "backing", SIZE);
    for label in ["dos", "gpt"] {
        fs::write(&backing, vec![0; SIZE]).unwrap();
        let mut table = match Command::new("sfdisk").arg(&backing).stdin(Stdio::piped()).stdout(Stdio::null()).spawn() {
            Ok(child) => child,
            Err(_) => return println!("skipped: sfdisk is not installed"),
        };
        let lines = format!("label: {label}\nstart=2048, size=4096\nstart=8192, size=4096\n");
        std::io::Write::write_all(&mut table.stdin.take().unwrap(), lines.as_bytes()).unwrap();
        assert!(table.wait().unwrap().success());
        let mut bytes = fs::read(&backing).unwrap();
        bytes[2048 * 512..6144 * 512].fill(1);
        bytes[8192 * 512..12288 * 512].fill(2);
        fs::write(&backing, &bytes).unwrap();
        let Some(device) = Loop::over(&backing) else { return };
        let path = dir.path().join("vm.vmdk");
        let asked = |partitions| CreateRequest { partitions, ..request("partitions", &device.0) };
        let error = create(&path, &asked(vec![2, 7])).unwrap_err().to_string();
        assert!(error.contains("no partition 7"), "{error}");
        let error = create(&path, &asked(Vec::new())).unwrap_err().to_string();
        assert!(error.contains("`CreateRequest::partitions`"), "{error}");
        create(&path, &asked(vec![2])).unwrap();
        let mut expected = bytes.clone();
        expected[2048 * 512..8192 * 512].fill(0);
        assert!(read(&path) == expected, "{label}");
        // A shown partition is written through, the table in its copy, and a hidden one not at all.
        let disk = open(&path, true).unwrap();
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        io.write(9000 * 512, &[9; 4096], false).unwrap();
        io.write(0, &[8; 512], false).unwrap();
        let error = io.write(3000 * 512, &[7; 4096], false).unwrap_err().to_string();
        assert!(error.contains("for which the descriptor names no file"), "{error}");
        io.write(9008 * 512, &[9; 4096], false).unwrap();
        drop(io);
        disk.close().unwrap();
        drop(disk);
        expected[9000 * 512..9016 * 512].fill(9);
        expected[..512].fill(8);
        bytes[9000 * 512..9016 * 512].fill(9);
        assert!(read(&path) == expected && fs::read(&backing).unwrap() == bytes, "{label}");
        assert_eq!(names(dir.path()), ["vm-pt.vmdk", "vm.vmdk"]);
        for name in names(dir.path()) {
            fs::remove_file(dir.path().join(name)).unwrap();
        }
    }
}

/// What a hostile image may write into its mapping: nothing but a block device is opened.
#[test]
fn a_mapping_leads_to_a_device_and_nothing_else() {
    let dir = TempDir::new().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let backing = file(&root, "backing", SIZE);
    let Some(device) = Loop::over(&backing) else { return };
    let path = map(&root, "vmfsRawDeviceMap", &device.0);
    let mapping = root.join("vm-rdm.vmdk");
    let good = fs::read_to_string(&mapping).unwrap();
    let node = format!("device={:?}", device.0);
    assert!(good.contains(&node), "{good}");
    let refused = |text: &str, what: &str| {
        fs::write(&mapping, text).unwrap();
        let error = open(&path, true).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refused(&good.replace(&node, "device=\"/dev/nowhere\""), "nothing is there");
    refused(&good.replace(&node, "device=\"/etc/passwd\""), "lies outside");
    refused(&good.replace(&node, &format!("device={backing:?}")), "it is not a block device");
    refused(&good.replace(&node, &format!("device={mapping:?}")), "it is not a block device");
    refused(&good.replace(&node, "device=\"/dev/null\""), "lies outside");
    refused("\0\0\0\0", "leads into VMFS");
    refused(&(good.clone() + &"#".repeat(70_000)), "at most 64 KiB");
    fs::write(&mapping, &good).unwrap();
    assert_eq!(read(&path).len(), SIZE);
    // A mapping elsewhere needs the permission of any other file.
    let text = fs::read_to_string(&path).unwrap();
    let elsewhere = TempDir::new().unwrap();
    fs::copy(&mapping, elsewhere.path().join("m.vmdk")).unwrap();
    fs::write(&path, text.replace("vm-rdm.vmdk", elsewhere.path().join("m.vmdk").to_str().unwrap())).unwrap();
    assert!(matches!(open(&path, false).unwrap_err(), DiskError::FileOutside { .. }));
}
