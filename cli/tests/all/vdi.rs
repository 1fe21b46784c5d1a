//! VDI as a user meets it, judged by qemu-img where it is installed: `create`, `io`, `convert`,
//! `snapshot`, `merge`, `compact`, `resize`, `reconnect`.

use crate::common::Workshop;
use std::{fs, process::Command};

fn qemu_img(shop: &Workshop, arguments: &str) {
    let Ok(ran) = Command::new("qemu-img").args(arguments.split(' ')).current_dir(shop.path("")).output() else {
        return println!("skipped: qemu-img is not installed");
    };
    let said = String::from_utf8_lossy(&ran.stderr).into_owned() + &String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{arguments}: {said}");
}

#[test]
fn a_vdi_is_created_written_and_converted() {
    let shop = Workshop::new();
    for (kind, options) in [("dynamic", ""), ("fixed", "--type fixed"), ("full", "--type fixed --preallocate")] {
        let name = format!("{kind}.vdi");
        shop.ok(&format!("create {name} --size 10M {options}"));
        shop.ok(&format!("io {name} -c 'write -P 7 1M 1100k' -c 'write -P 9 5M 4k' -c 'write -P 8 8M 1M'"));
        shop.ok(&format!("io {name} -c 'discard 1M 1M'"));
        let checked = shop.ok(&format!("check {name}"));
        assert!(!checked.contains("spaces"), "{checked}");
        qemu_img(&shop, &format!("check -f vdi {name}"));
        shop.ok(&format!("convert {name} {kind}.raw --verify"));
        qemu_img(&shop, &format!("compare -f vdi -F raw {name} {kind}.raw"));
        shop.ok(&format!("convert {kind}.raw again-{name} {options} --verify"));
        qemu_img(&shop, &format!("compare -f vdi -F raw again-{name} {kind}.raw"));
        qemu_img(&shop, &format!("check -f vdi again-{name}"));
    }
    assert_eq!(shop.json("info dynamic.vdi")["format"], "vdi");
    let told = shop.fails(2, "create new.vdi --size 10M --subformat split");
    assert!(told.contains("has no subformat"), "{told}");
}

/// A child names its parent by ids: the tree is found whatever the files are called.
#[test]
fn a_vdi_is_frozen_merged_compacted_and_enlarged() {
    let shop = Workshop::new();
    shop.ok("create disk.vdi --size 10M");
    shop.ok("io disk.vdi -c 'write -P 1 0 10M'");
    shop.ok("snapshot disk.vdi --name monday");
    shop.ok("io disk.vdi -c 'write -P 2 1M 1500k' -c 'discard 4M 1M'");
    let tree = shop.ok("snapshot list .");
    assert!(tree.contains("└─ disk.vdi"), "{tree}");
    shop.ok("snapshot disk.vdi --name tuesday");
    shop.ok("io disk.vdi -c 'write -P 3 7M 1M' -c 'read -P 2 1M 1500k' -c 'read -P 0 4M 1M' -c 'read -P 1 5M 1M'");
    shop.ok("convert disk.vdi whole.raw --verify");
    let told = shop.fails(1, "io disk_monday.vdi -c 'write 0 4k'");
    assert!(told.contains("disk_tuesday.vdi"), "{told}");
    fs::rename(shop.path("disk_monday.vdi"), shop.path("first.vdi")).unwrap();
    shop.ok("compare disk.vdi whole.raw");

    shop.ok("merge disk_tuesday.vdi");
    shop.ok("compare disk.vdi whole.raw");
    shop.ok("merge disk.vdi");
    fs::rename(shop.path("first.vdi"), shop.path("disk.vdi")).unwrap();
    shop.ok("compare disk.vdi whole.raw");
    assert_eq!(fs::read_dir(shop.path("")).unwrap().count(), 2, "the disk and the raw file");
    qemu_img(&shop, "compare -f vdi -F raw disk.vdi whole.raw");
    qemu_img(&shop, "check -f vdi disk.vdi");

    shop.ok("io disk.vdi -c 'write -z 0 3M'");
    shop.ok("compact disk.vdi");
    qemu_img(&shop, "check -f vdi disk.vdi");
    shop.ok("resize disk.vdi 20M");
    shop.ok("io disk.vdi -c 'read -P 0 10M 10M' -c 'write -P 5 19M 1M' -c 'read -P 1 9M 1M'");
    qemu_img(&shop, "check -f vdi disk.vdi");
}

/// VirtualBox keeps the images of snapshots in a folder of their own.
#[test]
fn a_child_elsewhere_needs_the_folder_of_its_parent() {
    let shop = Workshop::new();
    shop.ok("create base.vdi --size 4M");
    shop.ok("io base.vdi -c 'write -P 1 0 4M'");
    shop.ok("create child.vdi --parent base.vdi");
    fs::create_dir(shop.path("Snapshots")).unwrap();
    fs::copy(shop.path("base.vdi"), shop.path("Snapshots/other.vdi")).unwrap();
    let told = shop.run("create upper.vdi --parent Snapshots/other.vdi");
    assert!(told.stderr.contains("needs --allow-parent-dir"), "{told:?}");
    fs::remove_file(shop.path("upper.vdi")).unwrap();
    fs::remove_file(shop.path("Snapshots/other.vdi")).unwrap();
    fs::rename(shop.path("child.vdi"), shop.path("Snapshots/child.vdi")).unwrap();
    let told = shop.fails(1, "io Snapshots/child.vdi -c 'read 0 4k'");
    assert!(told.contains("an image with the id"), "{told}");
    shop.ok("io Snapshots/child.vdi --allow-parent-dir . -c 'read -P 1 0 4M' -c 'write -P 2 0 4k'");
    fs::copy(shop.path("base.vdi"), shop.path("copy.vdi")).unwrap();
    let told = shop.fails(1, "io Snapshots/child.vdi --allow-parent-dir . -c 'read 0 4k'");
    assert!(told.contains("2 files have the ids of its parent"), "{told}");
}
