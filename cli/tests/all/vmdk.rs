//! VMDK as a user meets it: `info`, `check`, `compare`, `convert`, `create`, `snapshot`, and by
//! name what is not supported.

use crate::common::Workshop;
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
    for (command, sentence) in [
        ("merge monolithicSparse.vmdk", "an in-place merge of vmdk images is not supported"),
        (
            "reconnect monolithicSparse.vmdk --parent monolithicSparse_monday.vmdk --dry-run",
            "a new link to the parent of vmdk images is not supported",
        ),
        ("resize monolithicFlat.vmdk 20M", "a new size of 20971520 bytes for a VMDK is not supported"),
        ("rescue monolithicFlat.vmdk saved.vhdx", "the rescue of a VMDK is not supported"),
    ] {
        let told = shop.fails(1, command);
        assert!(told.contains(sentence), "{command}: {told}");
    }
    shop.ok(&format!("snapshot revert {name} --discard"));
    shop.ok(&format!("compare {name} monolithicSparse.raw"));
}
