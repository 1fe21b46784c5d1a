//! What makes the contents of an image doubtful is told by every command that reads through it, and
//! what a command says of a parent that it must not open names its own switches.

use crate::{common::Workshop, serving::Serving};
use nix::sys::signal::Signal;
use std::fs;

const MIB: u64 = 1 << 20;

/// Changes a file of the workshop.
fn change(shop: &Workshop, name: &str, edit: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(shop.path(name)).unwrap();
    edit(&mut bytes);
    fs::write(shop.path(name), bytes).unwrap();
}

/// Replaces the only place where `old` is.
fn replace(bytes: &mut [u8], old: &[u8], new: &[u8]) {
    let places: Vec<_> =
        bytes.windows(old.len()).enumerate().filter(|(_, window)| *window == old).map(|(at, _)| at).collect();
    let [at] = places[..] else { panic!("{} places with {old:?}", places.len()) };
    bytes[at..at + new.len()].copy_from_slice(new);
}

/// Changes a field of a VHD's footer, and its checksum.
fn change_footer(footer: &mut [u8], at: usize, field: &[u8]) {
    footer[at..at + field.len()].copy_from_slice(field);
    footer[64..68].fill(0);
    let sum: u32 = footer.iter().map(|&byte| u32::from(byte)).sum();
    footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
}

/// All commands that read `name` end with 0 and say `words`.
fn told_by_all(shop: &Workshop, name: &str, words: &str) {
    for line in [
        format!("info {name}"),
        format!("map {name}"),
        format!("map {name} --draw"),
        format!("compare {name} {name}"),
        format!("diff {name} {name}"),
        format!("io {name} --read-only -c 'read 0 4k'"),
        format!("convert {name} flat.raw"),
    ] {
        let ended = shop.run(&line);
        assert!(ended.code == Some(0) && ended.stderr.contains(words), "{line}: {ended:#?}");
        let _ = fs::remove_file(shop.path("flat.raw"));
        let json = shop.json(&line);
        assert!(json["warnings"].to_string().contains(words), "{line}: {json}");
        let _ = fs::remove_file(shop.path("flat.raw"));
    }
    let socket = shop.path("s").display().to_string();
    let Some(server) = Serving::start(shop, &format!("serve {name} --read-only --nbd {socket}")) else { return };
    assert!(server.said.to_string().contains(words), "{}", server.said);
    assert!(server.log().contains(words), "{}", server.log());
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

/// A base full of data, and its child.
fn family(extension: &str) -> (Workshop, String) {
    let shop = Workshop::new();
    shop.ok(&format!("create base.{extension} --size 8M"));
    shop.ok(&format!("io base.{extension} -c 'write -P 0x77 0 8M'"));
    let child = format!("child.{extension}");
    shop.ok(&format!("create {child} --parent base.{extension}"));
    (shop, child)
}

#[test]
fn a_vhd_whose_header_names_a_parent_that_its_footers_deny() {
    let (shop, child) = family("vhd");
    change(&shop, &child, |bytes| {
        let end = bytes.len() - 512;
        change_footer(&mut bytes[end..], 60, &3u32.to_be_bytes());
        change_footer(&mut bytes[..512], 60, &3u32.to_be_bytes());
    });
    assert_eq!(shop.run(&format!("check {child}")).code, Some(2));
    told_by_all(&shop, &child, "but its header names the parent");
}

#[test]
fn a_vhd_with_footers_of_two_sizes() {
    let shop = Workshop::new();
    shop.ok("create disk.vhd --size 64M");
    change(&shop, "disk.vhd", |bytes| {
        let end = bytes.len() - 512;
        change_footer(&mut bytes[end..], 48, &(32 * MIB).to_be_bytes());
    });
    told_by_all(&shop, "disk.vhd", "says 33554432 bytes, its copy at offset 0 says 67108864");
    // A child of it tells it too: the doubt is that of an image further down.
    shop.ok("create child.vhd --parent disk.vhd");
    told_by_all(&shop, "child.vhd", "says 33554432 bytes, its copy at offset 0 says 67108864");
}

#[test]
fn a_vhdx_with_a_parent_locator_that_is_not_marked_as_a_child() {
    let (shop, child) = family("vhdx");
    let block_bytes = shop.json(&format!("info {child}"))["block_size"].as_u64().unwrap() as u32;
    change(&shop, &child, |bytes| {
        let parameters = |flags: u32| [block_bytes.to_le_bytes(), flags.to_le_bytes()].concat();
        replace(bytes, &parameters(2), &parameters(0));
    });
    assert_eq!(shop.run(&format!("check {child}")).code, Some(2));
    told_by_all(&shop, &child, "but it has a parent locator");
}

#[test]
fn a_vdi_that_names_a_parent_and_is_not_differencing() {
    let (shop, child) = family("vdi");
    change(&shop, &child, |bytes| bytes[0x4c..0x50].copy_from_slice(&1u32.to_le_bytes()));
    assert!(shop.run(&format!("check {child}")).stdout.contains("but it names the parent"));
    told_by_all(&shop, &child, "but it names the parent");
}

#[test]
fn a_vmdk_with_a_parent_and_without_its_content_id() {
    let (shop, child) = family("vmdk");
    change(&shop, &child, |bytes| {
        let at = bytes.windows(10).position(|window| window == b"parentCID=").unwrap() + 10;
        bytes[at..at + 8].copy_from_slice(b"ffffffff");
    });
    told_by_all(&shop, &child, "but has no parentCID");
}

#[test]
fn a_qcow2_that_is_marked_corrupt() {
    let shop = Workshop::new();
    shop.ok("create disk.qcow2 --size 8M");
    change(&shop, "disk.qcow2", |bytes| bytes[79] |= 2);
    told_by_all(&shop, "disk.qcow2", "marked corrupt");
}

/// What every other image says is no doubt.
#[test]
fn harmless_remarks_are_no_warnings() {
    let shop = Workshop::new();
    shop.ok("create small.vhd --size 1M");
    let json = shop.json("info small.vhd");
    assert!(json["remarks"].to_string().contains("smaller than 3 MiB"), "{json}");
    assert_eq!(json["warnings"], serde_json::json!([]));
    assert_eq!(shop.run("convert small.vhd flat.raw").stderr, "");
}

/// A child whose parent lies outside its folder: whatever command says so, in words or in JSON,
/// names its switches and not the options of the library.
#[test]
fn a_parent_out_of_reach_is_told_with_the_switches_of_the_program() {
    let shop = Workshop::new();
    fs::create_dir(shop.path("a")).unwrap();
    fs::create_dir(shop.path("b")).unwrap();
    shop.ok("create a/base.vhdx --size 8M");
    shop.ok("create b/child.vhdx --parent a/base.vhdx --allow-parent-dir a");
    shop.ok("create b/other.vhdx --size 8M");
    let mut with_a_switch = 0;
    for line in [
        "info b/child.vhdx",
        "info b/child.vhdx --chain",
        "info b/child.vhdx --windows",
        "map b/child.vhdx",
        "partitions b/child.vhdx",
        "check b/child.vhdx --chain",
        "compare b/child.vhdx b/other.vhdx",
        "compare b/other.vhdx b/child.vhdx",
        "diff b/child.vhdx",
        "diff b/child.vhdx --export b/out.dwdiff",
        "io b/child.vhdx --read-only -c 'read 0 4k'",
        "convert b/child.vhdx b/flat.raw",
        "rescue b/child.vhdx b/saved.raw",
        "snapshot b/child.vhdx --name x",
        "snapshot revert b/child.vhdx --name x",
        "snapshot list b",
        "snapshot list b/child.vhdx",
        "clone b/child.vhdx b/clone.vhdx",
        "merge b/child.vhdx --dry-run",
        "resize b/child.vhdx 16M",
        "compact b/child.vhdx",
        "move b/child.vhdx a",
        "reconnect b/child.vhdx",
        "track start b/child.vhdx --point x",
        "serve b/child.vhdx --nbd ./s",
        "attach b/child.vhdx",
        "lab run b/child.vhdx",
        "diskspd b/child.vhdx",
    ] {
        for line in [line.to_owned(), format!("{line} --json")] {
            let ended = shop.run(&line);
            let told = format!("{}{}", ended.stdout, ended.stderr);
            for library in ["Policy::", "Options::", "Request::"] {
                assert!(!told.contains(library), "{line}: {told}");
            }
            with_a_switch += usize::from(told.contains("--allow-parent-dir"));
        }
        for made in ["b/flat.raw", "b/saved.raw", "b/out.dwdiff", "b/clone.vhdx"] {
            let _ = fs::remove_file(shop.path(made));
        }
    }
    assert!(with_a_switch >= 30, "{with_a_switch} of the commands name the switch");
}
