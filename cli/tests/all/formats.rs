//! Formats are never guessed to the user's harm, by any command; and who reads a disk is told what
//! to doubt.

use crate::common::Workshop;
use crate::serving::Serving;

/// Every command that opens a disk refuses a container that it does not know, by the container's
/// name, and changes nothing.
#[test]
fn a_qed_is_no_raw_disk_for_any_command() {
    let shop = Workshop::new();
    let mut bytes = b"QED\0\0\0\x01\0".to_vec();
    bytes.resize(1 << 20, 0);
    for name in ["q.qed", "cloud.img"] {
        std::fs::write(shop.path(name), &bytes).unwrap();
        for (code, line) in [
            (1, format!("io {name} -c 'write 0 4k'")),
            (1, format!("io {name} -c 'read 0 4k'")),
            (1, format!("info {name}")),
            (1, format!("info {name} --chain")),
            (1, format!("map {name}")),
            (1, format!("check {name}")),
            (1, format!("convert {name} copy.vhdx --verify")),
            (2, format!("compare {name} {name}")),
            (1, format!("serve {name} --nbd {}", shop.path("s").display())),
            (1, format!("attach {name}")),
            (1, format!("lab run {name} --duration 1s --destroy-data")),
            (1, format!("diskspd -d1 -W0 {name}")),
        ] {
            let error = shop.fails(code, &line);
            assert!(error.contains("is a qed image; qed is not supported"), "{line}: {error}");
            assert_eq!(std::fs::read(shop.path(name)).unwrap(), bytes, "{line}");
        }
        // The user decides.
        shop.ok(&format!("io {name} --format raw -c 'read -P 0 64k 4k'"));
        assert!(shop.ok(&format!("check {name} --format raw")).contains("raw disk"));
        shop.ok(&format!("convert {name} copy.vhdx --source-format raw --verify"));
        std::fs::remove_file(shop.path("copy.vhdx")).unwrap();
    }
    let error = shop.fails(2, "create new.qed --size 1G");
    assert!(error.contains("qed is not supported"), "{error}");
}

/// The guest of `disk.img` writes a VHDX over its front. Reading by the guess is told; writing
/// needs the user's word.
#[test]
fn a_guess_reads_with_a_warning_and_never_writes() {
    let shop = Workshop::new();
    shop.ok("create x.vhdx --size 8M");
    let mut bytes = std::fs::read(shop.path("x.vhdx")).unwrap();
    bytes.resize(16 << 20, 0x77);
    std::fs::write(shop.path("disk.img"), &bytes).unwrap();
    for line in ["io disk.img -c 'write 0 4k'", "attach disk.img", "serve disk.img"] {
        let error = shop.fails(1, line);
        assert!(error.contains("with --format vhdx or raw"), "{line}: {error}");
    }
    assert_eq!(std::fs::read(shop.path("disk.img")).unwrap(), bytes);
    let read = shop.run("map disk.img");
    assert!(read.code == Some(0) && read.stderr.contains("does not say so"), "{read:#?}");
    assert!(shop.json("info disk.img")["warnings"][0].as_str().unwrap().contains("does not say so"));
    shop.ok("io disk.img --format raw -c 'read -P 0x77 15M 4k' -c 'write 15M 4k'");
    // The extension is that of another format than the contents.
    std::fs::rename(shop.path("x.vhdx"), shop.path("x.vhd")).unwrap();
    let error = shop.fails(1, "info x.vhd");
    assert!(error.contains("is that of vhd") && error.contains("vhdx") && error.contains("--format"), "{error}");
    assert_eq!(shop.json("info x.vhd --format vhdx")["format"], "vhdx");
}

/// Two disks of one server, each with its own format.
#[test]
fn serve_takes_a_format_for_each_disk() {
    let shop = Workshop::new();
    shop.ok("create x.vhdx --size 8M");
    let mut bytes = std::fs::read(shop.path("x.vhdx")).unwrap();
    bytes.resize(16 << 20, 0);
    std::fs::write(shop.path("guest.img"), &bytes).unwrap();
    std::fs::write(shop.path("image.img"), &bytes).unwrap();
    let socket = shop.path("s").display().to_string();
    let line = format!("serve a=guest.img,format=raw image.img,format=vhdx x.vhdx --nbd {socket}");
    let Some(server) = Serving::start(&shop, &line) else { return };
    let exports = server.said["exports"].as_array().unwrap();
    let found: Vec<_> =
        exports.iter().map(|export| (export["name"].as_str().unwrap(), export["virtual_size"].as_u64())).collect();
    assert_eq!(found, [("a", Some(16 << 20)), ("image.img", Some(8 << 20)), ("x.vhdx", Some(8 << 20))]);
}

/// A VHD's parent was changed after its child was made: everybody who reads the child says so, in
/// words and in JSON.
#[test]
fn a_doubtful_parent_is_told_by_all_who_read_through_it() {
    let shop = Workshop::new();
    shop.ok("create base.vhd --size 8M");
    shop.ok("create child.vhd --parent base.vhd");
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(3600);
    std::fs::File::open(shop.path("base.vhd")).unwrap().set_modified(later).unwrap();
    for line in [
        "info child.vhd",
        "map child.vhd",
        "map child.vhd --draw",
        "compare child.vhd base.vhd",
        "io child.vhd -c 'read 0 4k'",
        "convert child.vhd flat.vhd",
    ] {
        let ended = shop.run(line);
        assert!(ended.code == Some(0) && ended.stderr.contains("was last changed"), "{line}: {ended:#?}");
        let _ = std::fs::remove_file(shop.path("flat.vhd"));
        let json = shop.json(line);
        assert!(json["warnings"].to_string().contains("was last changed"), "{line}: {json}");
    }
    let drawn = shop.ok("info child.vhd --chain");
    assert!(drawn.contains("identity ok, but changed or copied since"), "{drawn}");
    assert_eq!(shop.json("info child.vhd --chain")["chain"][1]["timestamp_ok"], false);
}

/// As `qemu-img -U`: a disk that a server has open for writing is looked at, copied and compared
/// without its lock.
#[test]
fn a_disk_in_use_is_read_with_force_share() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 8M");
    shop.ok("io disk.vhdx -c 'write -P 7 0 1M'");
    let socket = shop.path("s").display().to_string();
    let Some(_server) = Serving::start(&shop, &format!("serve disk.vhdx --nbd {socket}")) else { return };
    for (code, line) in [
        (1, "info disk.vhdx"),
        (1, "map disk.vhdx"),
        (1, "check disk.vhdx"),
        (2, "compare disk.vhdx disk.vhdx"),
        (1, "convert disk.vhdx copy.raw"),
    ] {
        let error = shop.fails(code, line);
        assert!(error.contains("in use"), "{line}: {error}");
        let ended = shop.run(&format!("{line} -U"));
        assert!(ended.code == Some(0) && ended.stderr.contains("without a lock"), "{line}: {ended:#?}");
        let _ = std::fs::remove_file(shop.path("copy.raw"));
        let json = shop.json(&format!("{line} --force-share"));
        assert!(json["warnings"].to_string().contains("without a lock"), "{line}: {json}");
    }
    shop.fails(2, "io disk.vhdx -U -c 'read 0 4k'");
}
