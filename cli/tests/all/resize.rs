//! resize as a user types it, on disks with real tables and file systems. After each change the
//! tables and file systems are clean by their own tools, and other readers see the same size.

use crate::common::Workshop;
use std::{
    fs,
    io::Write,
    os::unix::fs::FileExt,
    process::{Command, Stdio},
};

const MIB: u64 = 1 << 20;

/// Runs a tool in the folder of `shop`. Returns what it printed; `None` if it is not installed.
pub(crate) fn tool(shop: &Workshop, line: &str, stdin: &str) -> Option<String> {
    let mut words = line.split_whitespace();
    let spawned = Command::new(words.next().unwrap())
        .args(words)
        .current_dir(shop.path(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut child) = spawned else {
        println!("skipped: resize: {line:?} cannot be run");
        return None;
    };
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{line}: {said}");
    Some(said)
}

pub(crate) fn have(tools: &[&str]) -> bool {
    let places = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    let missing = tools.iter().find(|tool| !places.iter().any(|place| fs::exists(format!("{place}/{tool}")).unwrap()));
    if let Some(tool) = missing {
        println!("skipped: resize: {tool} is not installed");
    }
    missing.is_none()
}

/// Copies the disk into `flat.raw` and asks the tools of the tables about it.
pub(crate) fn verify_table(shop: &Workshop, disk: &str, gpt: bool) {
    let flat = shop.path("flat.raw");
    let _ = fs::remove_file(&flat);
    shop.ok(&format!("convert {disk} flat.raw"));
    assert_eq!(fs::metadata(&flat).unwrap().len(), shop.json(&format!("info {disk}"))["virtual_size"]);
    // sfdisk --verify prints "No errors detected."; what it says about gaps is not an error.
    let said = tool(shop, "sfdisk --verify flat.raw", "").unwrap();
    assert!(said.contains("No errors detected") || !gpt && !said.contains("rror"), "{said}");
    if gpt && have(&["sgdisk"]) {
        let said = tool(shop, "sgdisk -v flat.raw", "").unwrap();
        assert!(said.contains("No problems found") && !said.contains("Caution"), "{said}");
    }
}

/// Checks the ext4 that begins at `start` of `flat.raw`.
pub(crate) fn verify_ext4(shop: &Workshop, start: u64, len: u64) {
    let mut piece = vec![0; len as usize];
    fs::File::open(shop.path("flat.raw")).unwrap().read_exact_at(&mut piece, start).unwrap();
    fs::write(shop.path("part.raw"), piece).unwrap();
    tool(shop, "e2fsck -fn part.raw", "").unwrap();
}

/// Other programs agree about the size of the disk.
pub(crate) fn verify_size(shop: &Workshop, disk: &str, size: u64) {
    let format = match disk.rsplit('.').next().unwrap() {
        "vhd" => "vpc",
        "vhdx" => "vhdx",
        _ => return,
    };
    if have(&["qemu-img"]) {
        let said = tool(shop, &format!("qemu-img info -f {format} --output json {disk}"), "").unwrap();
        let found: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(found["virtual-size"], size, "qemu-img: {said}");
        if format == "vhdx" {
            tool(shop, &format!("qemu-img check -f vhdx {disk}"), "").unwrap();
        }
        tool(shop, &format!("qemu-img compare -f {format} -F raw {disk} flat.raw"), "").unwrap();
    }
    // libvhdi 20210425 uses the original size of a VHD (original_size) as its size.
    if format == "vhdx" && have(&["vhdiinfo"]) {
        let said = tool(shop, &format!("vhdiinfo {disk}"), "").unwrap();
        assert!(said.contains(&format!("({size} bytes)")), "vhdiinfo: {said}");
    }
}

/// A disk of 64 MiB: `label` with two partitions, the second an ext4 that ends at 40 MiB.
pub(crate) fn partitioned(shop: &Workshop, label: &str) {
    shop.ok("create disk.raw --size 64M");
    let script = format!("label: {label}\nstart=2048, size=16384\nstart=18432, size=63488\n");
    tool(shop, "sfdisk -q disk.raw", &script).unwrap();
    tool(shop, &format!("mke2fs -q -F -t ext4 -E offset={} disk.raw 31M", 18432 * 512), "").unwrap();
}

const TOOLS: [&str; 4] = ["sfdisk", "sgdisk", "mke2fs", "e2fsck"];

/// Formats and types: extension and arguments of convert.
pub(crate) const KINDS: [(&str, &str); 5] =
    [("raw", ""), ("vhd", "--type fixed"), ("vhd", "--type dynamic"), ("vhdx", "--type fixed"), ("vhdx", "")];

#[test]
fn a_gpt_moves_with_the_end_of_the_disk() {
    if !have(&TOOLS) {
        return;
    }
    for (extension, how) in KINDS {
        let shop = Workshop::new();
        partitioned(&shop, "gpt");
        let disk = format!("vm.{extension}");
        shop.ok(&format!("convert disk.raw {disk} {how}"));
        // 33 sectors for the second copy.
        let least = 40 * MIB + 33 * 512;
        let said = shop.fails(1, &format!("resize {disk} 40M"));
        assert!(said.contains(&format!("partition 2 (ext4) lies there; the smallest size is {least} bytes")), "{said}");
        let planned = shop.json(&format!("resize {disk} --to-minimum --dry-run"));
        assert_eq!((&planned["new_size"], &planned["new_file_size"]), (&least.into(), &serde_json::Value::Null));
        verify_table(&shop, &disk, true);

        let done = shop.json(&format!("resize {disk} --to-minimum"));
        assert_eq!((&done["new_size"], &done["changed_table"]), (&least.into(), &"GPT".into()));
        // The block of the new second copy is the last one in the file of a dynamic disk.
        let is_fixed = extension == "raw" || how.contains("fixed");
        assert!(!is_fixed || done["new_file_size"].as_u64() < done["old_file_size"].as_u64(), "{done}");
        verify_table(&shop, &disk, true);
        verify_ext4(&shop, 9 * MIB, 31 * MIB);
        verify_size(&shop, &disk, least);

        shop.ok(&format!("resize {disk} 100M"));
        verify_table(&shop, &disk, true);
        let said = shop.ok(&format!("resize {disk} +20M --grow-partition 2"));
        assert!(said.contains("partition 2 (ext4) was enlarged from 31 MiB to"), "{said}");
        assert!(said.contains("enlarge it with resize2fs"), "{said}");
        verify_table(&shop, &disk, true);
        verify_ext4(&shop, 9 * MIB, 31 * MIB);
        verify_size(&shop, &disk, 120 * MIB);
        let partitions = shop.json(&format!("partitions {disk}"));
        assert_eq!(partitions["problem"], serde_json::Value::Null);
        assert_eq!(partitions["volumes"][1]["length"], 110 * MIB);
        // Once more: nothing is left to do.
        let again = shop.json(&format!("resize {disk} --grow-partition 2"));
        assert_eq!((&again["changed_table"], &again["enlarged_partition"]), (&().into(), &().into()), "{again}");
        shop.ok(&format!("check {disk}"));
    }
}

#[test]
fn an_mbr_ends_with_its_last_partition() {
    if !have(&TOOLS) {
        return;
    }
    for (extension, how) in KINDS {
        let shop = Workshop::new();
        partitioned(&shop, "dos");
        let disk = format!("vm.{extension}");
        shop.ok(&format!("convert disk.raw {disk} {how}"));
        assert!(shop.fails(1, &format!("resize {disk} 39M")).contains(&format!("{} bytes", 40 * MIB)));
        let done = shop.json(&format!("resize {disk} --to-minimum"));
        assert_eq!((&done["new_size"], &done["changed_table"]), (&(40 * MIB).into(), &().into()));
        verify_table(&shop, &disk, false);
        verify_ext4(&shop, 9 * MIB, 31 * MIB);
        verify_size(&shop, &disk, 40 * MIB);
        assert!(shop.fails(1, &format!("resize {disk} 80M --grow-partition 1")).contains("partition 2 follows it"));
        assert!(shop.fails(1, &format!("resize {disk} 80M --grow-partition 3")).contains("no partition 3"));
        assert_eq!(shop.json(&format!("info {disk}"))["virtual_size"], 40 * MIB);
        let done = shop.json(&format!("resize {disk} 80M --grow-partition 2"));
        assert_eq!(done["enlarged_partition"]["new_size"], 71 * MIB);
        verify_table(&shop, &disk, false);
        verify_ext4(&shop, 9 * MIB, 31 * MIB);
        verify_size(&shop, &disk, 80 * MIB);
    }
}

#[test]
fn logical_partitions_count_and_are_not_enlarged() {
    if !have(&TOOLS) {
        return;
    }
    let shop = Workshop::new();
    shop.ok("create disk.raw --size 64M");
    let script = "label: dos\nstart=2048, size=16384\nstart=18432, size=40960, type=f\nstart=20480, size=16384\n";
    tool(&shop, "sfdisk -q disk.raw", script).unwrap();
    // The extended partition ends at 29 MiB, the logical one before that.
    assert_eq!(shop.json("resize disk.raw --to-minimum")["new_size"], 29 * MIB);
    for (number, what) in [(5, "a logical partition"), (2, "an extended partition"), (1, "follows it")] {
        let said = shop.fails(1, &format!("resize disk.raw 64M --grow-partition {number}"));
        assert!(said.contains(what), "{said}");
    }
}

#[test]
fn a_differencing_disk_shrinks_below_its_parent() {
    if !have(&TOOLS) {
        return;
    }
    for extension in ["vhd", "vhdx"] {
        let shop = Workshop::new();
        partitioned(&shop, "gpt");
        shop.ok(&format!("convert disk.raw base.{extension}"));
        shop.ok(&format!("create vm.{extension} --parent base.{extension}"));
        let disk = format!("vm.{extension}");
        assert!(shop.fails(1, &format!("resize base.{extension} --to-minimum")).contains(&disk));
        let least = 40 * MIB + 33 * 512;
        assert_eq!(shop.json(&format!("resize {disk} --to-minimum"))["new_size"], least);
        verify_table(&shop, &disk, true);
        verify_ext4(&shop, 9 * MIB, 31 * MIB);
        assert!(shop.fails(1, &format!("resize {disk} 64M")).contains("would become visible"));
        shop.ok(&format!("check {disk} --chain"));
    }
}

/// A file system without a table: it ends where its superblock says.
#[test]
fn a_bare_file_system_ends_by_its_superblock() {
    let cases = [
        ("mke2fs", "mke2fs -q -F -t ext4 disk.raw 40M", 40 * MIB, "e2fsck -fn disk.raw"),
        ("mkfs.xfs", "mkfs.xfs -q -d size=320m disk.raw", 320 * MIB, "xfs_repair -n disk.raw"),
        ("mkntfs", "mkntfs -q -F -Q -s 512 -p 0 -H 255 -S 63 disk.raw 81920", 40 * MIB, "ntfsfix -n disk.raw"),
        ("mkfs.btrfs", "mkfs.btrfs -q -b 160m disk.raw", 160 * MIB, "btrfs check disk.raw"),
        ("mkfs.vfat", "mkfs.vfat -F 32 disk.raw 40960", 40 * MIB, "fsck.vfat -n disk.raw"),
        ("mkswap", "mkswap -q disk.raw 40960", 40 * MIB, "true"),
    ];
    for (make, line, least, check) in cases {
        if !have(&[make]) {
            continue;
        }
        let shop = Workshop::new();
        shop.ok("create disk.raw --size 400M");
        let said = tool(&shop, line, "").unwrap();
        let found = shop.json("resize disk.raw --to-minimum")["new_size"].as_u64().unwrap();
        // mkfs.vfat rounds down to whole tracks.
        assert!(found == least || make == "mkfs.vfat" && found + 64 * 512 > least, "{line}: {found}, {said}");
        tool(&shop, check, "").unwrap();
        let said = shop.fails(1, "resize disk.raw 16M");
        assert!(said.contains("on the whole disk lies there"), "{line}: {said}");
        assert_eq!(fs::metadata(shop.path("disk.raw")).unwrap().len(), found);
    }
}

#[test]
fn what_is_in_doubt_keeps_its_size() {
    if !have(&TOOLS) {
        return;
    }
    let refused = |what: &str, told: &str, make: &dyn Fn(&Workshop)| {
        let shop = Workshop::new();
        make(&shop);
        let before = fs::read(shop.path("disk.raw")).unwrap();
        for line in ["resize disk.raw --to-minimum", "resize disk.raw 50M"] {
            let said = shop.fails(1, line);
            assert!(said.contains(told), "{what}: {said}");
        }
        assert!(fs::read(shop.path("disk.raw")).unwrap() == before, "{what}: something was changed");
    };
    let put = |shop: &Workshop, at: u64, bytes: &[u8]| {
        let file = fs::OpenOptions::new().write(true).open(shop.path("disk.raw")).unwrap();
        file.write_all_at(bytes, at).unwrap();
    };
    refused("nothing", "no known file system", &|shop| drop(shop.ok("create disk.raw --size 64M")));
    refused("encrypted", "LUKS", &|shop| {
        shop.ok("create disk.raw --size 64M");
        put(shop, 0, b"LUKS\xba\xbe\0\x02");
    });
    refused("not clean", "not unmounted cleanly", &|shop| {
        shop.ok("create disk.raw --size 64M");
        tool(shop, "mke2fs -q -F -t ext2 disk.raw 40M", "").unwrap();
        put(shop, 1024 + 0x3a, &[0, 0]);
    });
    refused("the first GPT", "GPT header in sector 1", &|shop| {
        partitioned(shop, "gpt");
        put(shop, 512 + 24, &[9]);
    });
    refused("its entries", "checksum of the GPT's entries", &|shop| {
        partitioned(shop, "gpt");
        put(shop, 1024 + 40, &[9]);
    });
    refused("a hybrid MBR", "hybrid", &|shop| {
        partitioned(shop, "gpt");
        put(shop, 462, &[0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0]);
    });
    refused("a partition beyond the disk", "reaches beyond the disk", &|shop| {
        partitioned(shop, "dos");
        put(shop, 462 + 12, &400_000_u32.to_le_bytes());
    });
    refused("overlapping partitions", "overlaps", &|shop| {
        partitioned(shop, "dos");
        put(shop, 446 + 12, &40_000_u32.to_le_bytes());
    });
    refused("a RAID over the whole disk", "Linux RAID member", &|shop| {
        partitioned(shop, "gpt");
        put(shop, 64 * MIB - 65_536, b"\xfc\x4e\x2b\xa9");
    });
}

/// A GPT that is in doubt does not keep a disk from growing, but stays as it is.
#[test]
fn a_disk_with_a_gpt_in_doubt_grows() {
    if !have(&TOOLS) {
        return;
    }
    let shop = Workshop::new();
    partitioned(&shop, "gpt");
    let before = {
        let file = fs::OpenOptions::new().read(true).write(true).open(shop.path("disk.raw")).unwrap();
        file.write_all_at(&[9], 512 + 24).unwrap();
        fs::read(shop.path("disk.raw")).unwrap()
    };
    let ended = shop.json("resize disk.raw 80M");
    assert!(ended["table_left_because"].as_str().unwrap().contains("GPT header in sector 1"), "{ended}");
    assert!(fs::read(shop.path("disk.raw")).unwrap()[..64 << 20] == before);
    assert!(shop.fails(1, "resize disk.raw 90M --grow-partition 2").contains("GPT header in sector 1"));
}

/// A second copy that is not valid is written again.
#[test]
fn a_lost_second_copy_is_restored() {
    if !have(&TOOLS) {
        return;
    }
    let shop = Workshop::new();
    partitioned(&shop, "gpt");
    let file = fs::OpenOptions::new().write(true).open(shop.path("disk.raw")).unwrap();
    file.write_all_at(&[0; 33 * 512], 64 * MIB - 33 * 512).unwrap();
    shop.ok("resize disk.raw --to-minimum");
    verify_table(&shop, "disk.raw", true);
}

#[test]
fn arguments_that_do_not_fit_are_usage_errors() {
    let shop = Workshop::new();
    shop.ok("create disk.raw --size 64M");
    shop.fails(2, "resize disk.raw");
    shop.fails(2, "resize disk.raw 32M --to-minimum");
    shop.fails(2, "resize disk.raw --to-minimum --grow-partition 1");
    shop.fails(2, "resize nbd://localhost/x 32M");
    assert!(shop.fails(1, "resize disk.raw --grow-partition 1").contains("no partition table"));
    assert!(shop.ok("resize disk.raw 64M").starts_with("disk.raw: has 64 MiB"));
}
