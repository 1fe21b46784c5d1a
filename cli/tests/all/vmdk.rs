//! VMDK as a user meets it: `info`, `check`, `compare`, `convert`, `create`, `resize`, `snapshot`,
//! `merge`, `reconnect`, and by name what is not supported.

use crate::{common::Workshop, loops::Loop};
use std::{fs, process::Command};

#[test]
fn a_vmdk_of_qemu_img_is_read() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        return println!("skipped: qemu-img is not installed");
    }
    let shop = Workshop::new();
    let raw: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 700) as u8).collect();
    fs::write(shop.path("disk.raw"), raw).unwrap();
    for kind in ["monolithicSparse", "twoGbMaxExtentFlat", "streamOptimized"] {
        let name = format!("{kind}.vmdk");
        let made = Command::new("qemu-img")
            .args(["convert", "-f", "raw", "-O", "vmdk", "-o", &format!("subformat={kind}"), "disk.raw", &name])
            .current_dir(shop.path(""))
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let info = shop.json(&format!("info {name}"));
        assert_eq!((&info["format"], &info["subformat"]), (&"vmdk".into(), &kind.into()));
        assert!(shop.ok(&format!("info {name}")).contains(kind));
        shop.ok(&format!("check {name}"));
        shop.ok(&format!("compare {name} disk.raw"));
        shop.ok(&format!("convert {name} {kind}.vhdx"));
        shop.ok(&format!("compare {kind}.vhdx disk.raw"));
        if kind == "streamOptimized" {
            let told = shop.fails(1, &format!("io {name} -c 'write 0 4k'"));
            assert!(told.contains("compressed"), "{told}");
        }
    }
}

/// The life of a disk as far as it is supported, judged by qemu-img; the rest is refused by name.
#[test]
fn a_vmdk_is_created_written_and_frozen() {
    let shop = Workshop::new();
    let qemu = |arguments: &str| {
        let Ok(ran) = Command::new("qemu-img").args(arguments.split(' ')).current_dir(shop.path("")).output() else {
            return println!("skipped: qemu-img is not installed");
        };
        assert!(ran.status.success(), "{arguments}: {}", String::from_utf8_lossy(&ran.stderr));
    };
    for kind in ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat"] {
        let name = format!("{kind}.vmdk");
        shop.ok(&format!("create {name} --size 10M --subformat {kind}"));
        shop.ok(&format!("io {name} -c 'write -P 7 1M 100k' -c 'write -P 9 5M 4k' -c 'discard 1M 64k'"));
        shop.ok(&format!("check {name}"));
        shop.ok(&format!("convert {name} {kind}.raw --verify"));
        qemu(&format!("compare -f vmdk -F raw {name} {kind}.raw"));
        let resized = shop.json(&format!("resize {name} 20M"));
        assert_eq!(resized["new_size"], 20 << 20, "{resized}");
        shop.ok(&format!("io {name} -c 'write -P 5 19M 1M' -c 'read -P 7 1100k 4k' -c 'read -P 0 12M 1M'"));
        shop.ok(&format!("check {name}"));
        fs::OpenOptions::new().write(true).open(shop.path(&format!("{kind}.raw"))).unwrap().set_len(20 << 20).unwrap();
        shop.ok(&format!("io {kind}.raw -c 'write -P 5 19M 1M'"));
        qemu(&format!("compare -f vmdk -F raw {name} {kind}.raw"));
        shop.ok(&format!("convert {kind}.raw again-{name} --subformat {kind} --verify"));
        qemu(&format!("compare -f vmdk -F raw again-{name} {kind}.raw"));
    }
    let told = shop.fails(2, "create new.vmdk --size 10M --subformat split");
    assert!(told.contains("use monolithicSparse, monolithicFlat"), "{told}");
    let name = "monolithicSparse.vmdk";
    shop.ok(&format!("snapshot {name} --name monday"));
    shop.ok(&format!("io {name} -c 'write -P 1 0 1M'"));
    let tree = shop.ok("snapshot list .");
    assert!(tree.contains("└─ monolithicSparse.vmdk") && !tree.contains("-flat") && !tree.contains("-s001"), "{tree}");
    qemu(&format!("check {name}"));
    let told = shop.fails(1, "rescue monolithicFlat.vmdk saved.vhdx");
    assert!(told.contains("the rescue of a VMDK by its descriptor is not supported"), "{told}");
    shop.ok(&format!("snapshot revert {name} --discard"));
    shop.ok(&format!("compare {name} monolithicSparse.raw"));
}

/// A base of each kind, two snapshots: merged from the middle, from the top, and reconnected after
/// a move. qemu-img reads the same before and after.
#[test]
fn a_vmdk_chain_is_merged_reverted_and_reconnected() {
    let shop = Workshop::new();
    let qemu = |arguments: &str| {
        let Ok(ran) = Command::new("qemu-img").args(arguments.split(' ')).current_dir(shop.path("")).output() else {
            return println!("skipped: qemu-img is not installed");
        };
        assert!(ran.status.success(), "{arguments}: {}", String::from_utf8_lossy(&ran.stderr));
    };
    for kind in ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat"] {
        shop.ok(&format!("create vm.vmdk --size 10M --subformat {kind}"));
        shop.ok("io vm.vmdk -c 'write -P 7 1M 4M'");
        shop.ok("snapshot vm.vmdk --name monday");
        shop.ok("io vm.vmdk -c 'write -P 8 2M 100k' -c 'discard 4M 512k'");
        shop.ok("snapshot vm.vmdk --name tuesday");
        shop.ok("io vm.vmdk -c 'write -P 9 2050k 5k' -c 'write -P 9 9M 1M'");
        shop.ok("convert vm.vmdk expected.raw --verify");
        let is_right = || {
            shop.ok("compare vm.vmdk expected.raw");
            qemu("compare -f vmdk -F raw vm.vmdk expected.raw");
            shop.ok("check vm.vmdk");
        };
        shop.ok("merge vm_tuesday.vmdk");
        assert!(!shop.path("vm_tuesday.vmdk").exists());
        is_right();
        fs::create_dir(shop.path("base")).unwrap();
        for file in fs::read_dir(shop.path("")).unwrap().map(|file| file.unwrap().path()) {
            let name = file.file_name().unwrap().to_str().unwrap().to_owned();
            if name == "vm_monday.vmdk" || name.starts_with("vm-") {
                fs::rename(&file, shop.path("base").join(name)).unwrap();
            }
        }
        shop.ok("reconnect vm.vmdk --parent base/vm_monday.vmdk");
        is_right();
        shop.ok("snapshot vm.vmdk --name wednesday");
        shop.ok("io vm.vmdk -c 'write -P 1 0 10M'");
        shop.ok("snapshot revert vm.vmdk --discard");
        is_right();
        let merged = shop.ok("merge vm.vmdk --into base/vm_monday.vmdk");
        assert!(merged.contains("vm_monday.vmdk"), "{merged}");
        qemu("compare -f vmdk -F raw base/vm_monday.vmdk expected.raw");
        shop.ok("compare base/vm_monday.vmdk expected.raw");
        let mut left: Vec<_> = fs::read_dir(shop.path("")).unwrap().map(|file| file.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["base", "expected.raw"]);
        fs::remove_dir_all(shop.path("base")).unwrap();
        fs::remove_file(shop.path("expected.raw")).unwrap();
    }
}

/// Raw device mappings as a user meets them, and what is refused by name.
#[test]
fn a_device_is_mapped_shown_written_and_frozen() {
    let shop = Workshop::new();
    fs::write(shop.path("backing.raw"), vec![3; 8 << 20]).unwrap();
    let Some(device) = Loop::over(&shop.path("backing.raw"), 512) else { return };
    let device = &device.0;
    let told = shop.fails(2, &format!("create lun.vmdk --device {device} --subformat rdm-virtual"));
    assert!(told.contains("--allow-devices"), "{told}");
    let told = shop.fails(2, &format!("create lun.vhdx --device {device} --subformat rdm-virtual --allow-devices"));
    assert!(told.contains("a vhdx image cannot map a device"), "{told}");
    let made = shop.run(&format!("create lun.vmdk --device {device} --subformat rdm-virtual --allow-devices"));
    assert_eq!(made.code, Some(0), "{made:#?}");
    assert!(made.stdout.contains("8 MiB") && made.stderr.contains("/dev/disk/by-id"), "{made:#?}");
    let told = shop.fails(1, "info lun.vmdk");
    assert!(told.contains("it is a block device") && told.contains("--allow-devices"), "{told}");
    let info = shop.json("info lun.vmdk --allow-devices");
    assert_eq!(info["subformat"], "vmfsRawDeviceMap", "{info}");
    let shown = info["files"][1]["device"].as_str().unwrap();
    assert!(shown.contains("backing.raw") && info["files"][1]["file"] == **device, "{info}");
    assert!(shop.ok("info lun.vmdk --allow-devices").contains("a device: serial number"));
    let rules = shop.run("info lun.vmdk --vmware --allow-devices");
    assert!(rules.code == Some(3) && rules.stdout.contains("made by ESXi itself"), "{rules:#?}");
    shop.ok("io lun.vmdk --allow-devices -c 'write -P 7 1M 100k'");
    shop.ok("snapshot lun.vmdk --name monday --allow-devices");
    shop.ok("io lun.vmdk --allow-devices -c 'write -P 8 2M 100k' -c 'read -P 7 1M 100k' -c 'read -P 3 4M 64k'");
    assert!(fs::read(shop.path("backing.raw")).unwrap()[2 << 20..].iter().all(|&byte| byte == 3));
    shop.ok("merge lun.vmdk --into lun_monday.vmdk --allow-devices");
    shop.ok("check lun_monday.vmdk --allow-devices");
    assert!(
        fs::read(shop.path("backing.raw")).unwrap()[2 << 20..(2 << 20) + (100 << 10)].iter().all(|&byte| byte == 8)
    );
    shop.ok("convert lun_monday.vmdk copy.vhdx --verify --allow-devices");
    shop.ok(&format!("create phys.vmdk --device {device} --subformat rdm-physical --allow-devices --quiet"));
    let told = shop.fails(1, "snapshot phys.vmdk --name monday --allow-devices");
    assert!(told.contains("physical compatibility") && told.contains("vmfsRawDeviceMap"), "{told}");
    assert!(shop.ok("info phys.vmdk --allow-devices").contains("SCSI pass-through"));
    // qemu-img reads what Workstation would: the descriptor names the device.
    shop.ok(&format!("create full.vmdk --device {device} --subformat device --allow-devices --quiet"));
    let text = fs::read_to_string(shop.path("full.vmdk")).unwrap();
    assert!(text.contains(&format!("RW 16384 FLAT \"{device}\" 0")) && text.contains("ddb.device.size"), "{text}");
    let mut qemu = Command::new("qemu-img");
    qemu.args(["convert", "-f", "vmdk", "-O", "raw", "full.vmdk", "qemu.raw"]).current_dir(shop.path(""));
    match qemu.output() {
        Ok(ran) if ran.status.success() => {
            assert!(fs::read(shop.path("qemu.raw")).unwrap() == fs::read(shop.path("backing.raw")).unwrap());
        }
        ran => println!("skipped: qemu-img does not read a device: {ran:?}"),
    }
}

/// Flat files as ESX makes them: they differ by their space.
#[test]
fn flat_files_of_vmfs_differ_by_their_space() {
    let shop = Workshop::new();
    for (kind, space) in [("thin", 0), ("zeroedthick", 8 << 20), ("eagerzeroedthick", 8 << 20), ("vmfs", 8 << 20)] {
        shop.ok(&format!("create {kind}.vmdk --size 8M --subformat {kind}"));
        let info = shop.json(&format!("info {kind}.vmdk"));
        assert_eq!((&info["subformat"], &info["type"]), (&"vmfs".into(), &"fixed".into()), "{info}");
        let on_disk = info["files"][1]["size_on_disk"].as_u64().unwrap();
        assert!(on_disk >= space && (space > 0 || on_disk < 1 << 20), "{kind}: {info}");
        let text = fs::read_to_string(shop.path(&format!("{kind}.vmdk"))).unwrap();
        assert_eq!(text.contains("ddb.thinProvisioned"), kind == "thin", "{text}");
        assert!(text.contains(&format!("RW 16384 VMFS \"{kind}-flat.vmdk\" 0")), "{text}");
        shop.ok(&format!("io {kind}.vmdk -c 'write -P 7 1M 100k' -c 'read -P 0 5M 64k'"));
        shop.ok(&format!("check {kind}.vmdk"));
    }
    let told = shop.fails(2, "create x.vmdk --size 8M --subformat thick");
    assert!(told.contains("zeroedthick") && told.contains("vmfsRawDeviceMap"), "{told}");
}
