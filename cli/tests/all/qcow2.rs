//! qcow2 as a user meets it, judged by qemu-img: `create`, `convert`, `io`, `snapshot`, `merge`,
//! `resize`, `compact`, and by name what is only read.

use crate::common::{Workshop, flat};
use std::process::Command;

/// Runs qemu-img; false if it is not installed.
fn qemu_img(shop: &Workshop, arguments: &str) -> bool {
    let ran = Command::new("qemu-img").args(arguments.split(' ')).current_dir(shop.path("")).output();
    let Ok(ran) = ran else {
        println!("skipped: qemu-img is not installed");
        return false;
    };
    assert!(ran.status.success(), "{arguments}: {}", String::from_utf8_lossy(&ran.stderr));
    true
}

#[test]
fn a_qcow2_lives_the_life_of_a_disk() {
    let shop = Workshop::new();
    for (name, options) in [("usual.qcow2", ""), ("small.qcow2", " --block-size 4K"), ("whole.qcow2", " --preallocate")]
    {
        let stem = name.trim_end_matches(".qcow2");
        shop.ok(&format!("create {name} --size 10M{options}"));
        shop.ok(&format!("io {name} -c 'write -P 7 1M 300k' -c 'write -P 9 5M 4k' -c 'discard 1M 128k'"));
        shop.ok(&format!("convert {name} {stem}.raw --verify"));
        qemu_img(&shop, &format!("compare -f qcow2 -F raw {name} {stem}.raw"));
        // Frozen, written, merged again.
        shop.ok(&format!("snapshot {name} --name monday"));
        shop.ok(&format!("io {name} -c 'write -P 5 2M 700k' -c 'discard 5M 64k' -c 'write -P 6 1300k 3k'"));
        let tree = shop.ok("snapshot list .");
        assert!(tree.contains(&format!("└─ {name}")), "{tree}");
        shop.ok(&format!("convert {name} {stem}-after.raw --verify"));
        qemu_img(&shop, &format!("compare -f qcow2 -F raw {name} {stem}-after.raw"));
        shop.ok(&format!("merge {name} --keep-name"));
        assert!(!shop.path(&format!("{stem}_monday.qcow2")).exists());
        qemu_img(&shop, &format!("compare -f qcow2 -F raw {name} {stem}-after.raw"));
        // Packed, copied, and larger.
        shop.ok(&format!("compact {name}"));
        assert!(shop.ok(&format!("check {name}")).contains("sound"));
        qemu_img(&shop, &format!("check -q -f qcow2 {name}"));
        qemu_img(&shop, &format!("compare -f qcow2 -F raw {name} {stem}-after.raw"));
        shop.ok(&format!("convert {name} {stem}.vhdx --verify"));
        shop.ok(&format!("convert {stem}.vhdx again-{name} --verify"));
        qemu_img(&shop, &format!("compare -f qcow2 -F raw again-{name} {stem}-after.raw"));
        shop.ok(&format!("resize {name} 900M"));
        shop.ok(&format!("io {name} -c 'write -P 3 890M 1M' -c 'discard 890M 512k' -c 'read -P 3 911900k 100k'"));
        qemu_img(&shop, &format!("check -q -f qcow2 {name}"));
    }
}

#[test]
fn a_compressed_qcow2_is_read_by_qemu_and_written_by_us() {
    let shop = Workshop::new();
    let bytes: Vec<u8> = (0..5_000_000_u32)
        .map(|at| if at % 700_000 < 200_000 { (at.wrapping_mul(at) >> 7) as u8 } else { (at / 900) as u8 })
        .collect();
    std::fs::write(shop.path("disk.raw"), [bytes, vec![0; 3_000_320]].concat()).unwrap();
    shop.ok("convert disk.raw small.qcow2 --subformat compressed --verify");
    assert!(std::fs::metadata(shop.path("small.qcow2")).unwrap().len() < 3_000_000);
    assert!(shop.ok("check small.qcow2").contains("sound"));
    qemu_img(&shop, "check -q -f qcow2 small.qcow2");
    qemu_img(&shop, "compare -f qcow2 -F raw small.qcow2 disk.raw");
    let writes = "-c 'write -P 5 1M 100k' -c 'write -P 6 3000k 512' -c 'discard 0 256k'";
    shop.ok(&format!("io small.qcow2 {writes}"));
    shop.ok(&format!("io disk.raw {writes}"));
    qemu_img(&shop, "check -q -f qcow2 small.qcow2");
    qemu_img(&shop, "compare -f qcow2 -F raw small.qcow2 disk.raw");
    let told = shop.fails(2, "convert disk.raw level.qcow2 --subformat compressed --compress-level 12");
    assert!(told.contains("1 to 9"), "{told}");
}

#[test]
fn a_qcow2_has_a_parent_of_any_format() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 8M");
    shop.ok("io base.vhdx -c 'write -P 1 0 8M'");
    shop.ok("create child.qcow2 --parent base.vhdx");
    shop.ok("io child.qcow2 -c 'write -P 2 1M 64k' -c 'discard 4M 1M' -c 'read -P 1 0 64k' -c 'read -P 0 4M 1M'");
    shop.ok("convert child.qcow2 all.raw --verify");
    qemu_img(&shop, "compare -f qcow2 -F raw child.qcow2 all.raw");
    // Its parent is not written by accident, and does not take it in place.
    let told = shop.fails(1, "io base.vhdx -c 'write 0 4k'");
    assert!(told.contains("child.qcow2"), "{told}");
    let told = shop.fails(1, "merge child.qcow2");
    assert!(told.contains("cannot be merged into") && told.contains("vhdx"), "{told}");
    shop.ok("merge child.qcow2 --to whole.qcow2");
    shop.ok("compare whole.qcow2 all.raw");
    // A raw parent too.
    shop.ok("convert base.vhdx base.raw");
    shop.ok("create other.qcow2 --parent base.raw");
    let told = shop.fails(1, "io base.raw -c 'write 0 4k'");
    assert!(told.contains("other.qcow2"), "{told}");
}

#[test]
fn bitmaps_are_dropped_by_name() {
    let shop = Workshop::new();
    shop.ok("create disk.qcow2 --size 1M");
    if !qemu_img(&shop, "bitmap --add disk.qcow2 monday") {
        return;
    }
    let told = "The first write drops the bitmaps of the image (\"monday\")";
    assert!(shop.ok("info disk.qcow2").contains("monday"));
    let warned = flat(&shop.run("io disk.qcow2 -c 'write -P 1 0 4k'").stderr);
    assert!(warned.contains(told), "{warned}");
    let listed = shop.ok("info disk.qcow2");
    assert!(listed.contains("monday  granularity 64 KiB  in use (not saved)"), "{listed}");
    assert!(!listed.contains("drops the bitmaps"), "it is no longer up to date: {listed}");
}

#[test]
fn internal_snapshots_are_listed_read_and_kept() {
    let shop = Workshop::new();
    shop.ok("create disk.qcow2 --size 8M");
    shop.ok("io disk.qcow2 -c 'write -P 1 0 4M'");
    if !qemu_img(&shop, "snapshot -c monday disk.qcow2") {
        return;
    }
    shop.ok("convert disk.qcow2 monday.raw");
    shop.ok("io disk.qcow2 -c 'write -P 2 1M 100k' -c 'discard 2M 1M' -c 'write -P 3 6M 4k' -c 'read -P 1 0 1M'");
    qemu_img(&shop, "check -q -f qcow2 disk.qcow2");
    let listed = shop.ok("info disk.qcow2");
    assert!(listed.contains("1 snapshot") && listed.contains("monday") && listed.contains("8 MiB"), "{listed}");
    assert!(shop.ok("info disk.qcow2 --json").contains("\"vm_state_size\": 0"));
    for name in ["monday", "1"] {
        shop.ok(&format!("io disk.qcow2 --read-only --snapshot {name} -c 'read -P 1 0 4M' -c 'read -P 0 4M 4M'"));
        shop.ok(&format!("compare monday.raw disk.qcow2 --second-snapshot {name}"));
    }
    assert_eq!(shop.run("compare disk.qcow2 disk.qcow2 --snapshot monday").code, Some(1));
    shop.ok("convert disk.qcow2 copy.vhdx --snapshot monday");
    shop.ok("compare copy.vhdx monday.raw");
    shop.ok("map disk.qcow2 --snapshot monday");
    let told = shop.fails(1, "io disk.qcow2 --snapshot monday -c 'write 0 4k'");
    assert!(told.contains("cannot be written"), "{told}");
    let told = shop.fails(1, "info disk.qcow2 --snapshot tuesday");
    assert!(told.contains("monday"), "{told}");
    let told = shop.fails(1, "info copy.vhdx --snapshot monday");
    assert!(told.contains("only qcow2 has internal snapshots"), "{told}");
    // Two views of one file have no common image, so their bytes are compared.
    for line in ["diff disk.qcow2 disk.qcow2 --second-snapshot monday", "diff disk.qcow2 disk.qcow2 --snapshot 1"] {
        let ended = shop.run(&format!("{line} --json"));
        assert_eq!(ended.code, Some(1), "{line}: {ended:?}");
        let told: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        let changed = told["ranges"].as_array().unwrap().iter().map(|range| range["length"].as_u64().unwrap());
        assert_eq!(changed.sum::<u64>(), (100 << 10) + (1 << 20) + (4 << 10), "{line}: {told}");
    }
    assert_eq!(shop.run("diff disk.qcow2 disk.qcow2 --snapshot 1 --second-snapshot monday").code, Some(0));
    shop.ok("diff monday.raw disk.qcow2 --second-snapshot monday");
    shop.ok("check disk.qcow2 --snapshot monday");
    assert!(shop.fails(1, "check disk.qcow2 --snapshot monday --repair").contains("cannot be used with"));
    let ended = shop.run("check disk.qcow2 --snapshot tuesday");
    assert!(ended.code == Some(1) && ended.stdout.contains("monday"), "{ended:?}");
    let told = shop.fails(2, "attach disk.qcow2 --snapshot monday");
    assert!(told.contains("--read-only or --ephemeral"), "{told}");
    // The disk lives on, and the snapshot stays.
    shop.ok("compact disk.qcow2");
    shop.ok("resize disk.qcow2 16M");
    let told = shop.fails(1, "move disk.qcow2 moved.vhdx");
    assert!(told.contains("would be lost") && told.contains("monday"), "{told}");
    qemu_img(&shop, "check -q -f qcow2 disk.qcow2");
    shop.ok("compare monday.raw disk.qcow2 --second-snapshot monday");
    qemu_img(&shop, "snapshot -a monday disk.qcow2");
    qemu_img(&shop, "compare -f raw -F qcow2 monday.raw disk.qcow2");
}

#[test]
fn a_data_file_is_written_and_none_outside_the_folder() {
    let shop = Workshop::new();
    if !qemu_img(&shop, "create -q -f qcow2 -o data_file=disk.data,data_file_raw=on disk.qcow2 8M") {
        return;
    }
    shop.ok("io disk.qcow2 -c 'write -P 1 0 4M' -c 'discard 1M 1M' -c 'write -P 2 7M 4k' -c 'read -P 0 1M 1M'");
    qemu_img(&shop, "check -q -f qcow2 disk.qcow2");
    qemu_img(&shop, "compare -f qcow2 -F raw disk.qcow2 disk.data");
    let told = shop.fails(1, "compact disk.qcow2");
    assert!(told.contains("external data file"), "{told}");
    std::fs::create_dir(shop.path("other")).unwrap();
    std::fs::rename(shop.path("disk.qcow2"), shop.path("other/disk.qcow2")).unwrap();
    let outside = shop.path("disk.data");
    qemu_img(&shop, &format!("amend -f qcow2 -o data_file={} other/disk.qcow2", outside.display()));
    let told = shop.fails(1, "io other/disk.qcow2 -c 'write 0 4k'");
    assert!(told.contains("disk.data"), "{told}");
}

#[test]
fn subclusters_are_written_and_what_is_not_supported_is_refused_by_name() {
    let shop = Workshop::new();
    if !qemu_img(&shop, "create -q -f qcow2 -o extended_l2=on disk.qcow2 1M") {
        return;
    }
    shop.ok("io disk.qcow2 -c 'write -P 5 4k 4k' -c 'read -P 5 4k 4k' -c 'read -P 0 0 4k'");
    assert!(qemu_img(&shop, "check -q disk.qcow2"));
    shop.ok("io disk.qcow2 -c 'write -P 6 64k 512k' -c 'discard 64k 448k'");
    shop.ok("compact disk.qcow2");
    assert!(qemu_img(&shop, "check -q disk.qcow2"));
    shop.ok("io disk.qcow2 -c 'read -P 5 4k 4k' -c 'read -P 0 64k 448k' -c 'read -P 6 512k 64k'");
    let told = shop.fails(2, "create fixed.qcow2 --size 1M --type fixed");
    assert!(told.contains("no fixed type"), "{told}");
}
