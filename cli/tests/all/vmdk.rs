//! VMDK as a user meets it: `info`, `check`, `compare`, `convert` from it, and by name what is not
//! supported.

use crate::common::Workshop;
use std::{fs, process::Command};

#[test]
fn a_vmdk_of_qemu_img_is_read_and_not_written() {
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
        let told = shop.fails(1, &format!("snapshot {name} --name monday"));
        assert!(told.contains("VMDK"), "{told}");
    }
    let told = shop.fails(2, "create new.vmdk --size 10M");
    assert!(told.contains("VMDK is only read"), "{told}");
}
