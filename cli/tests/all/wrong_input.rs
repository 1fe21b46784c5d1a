//! What a new user gives to a command by mistake: each message names the file, what was found and
//! what to do, and nothing is changed.

use crate::common::Workshop;
use std::fs;

/// A file whose name says nothing and that has no signature is opened as a raw disk. It is not
/// enlarged unless something says that it is a disk.
#[test]
fn a_file_that_is_no_disk_is_not_resized() {
    let shop = Workshop::new();
    let text = "remember the milk\n".repeat(100);
    fs::write(shop.path("notes.txt"), &text).unwrap();
    for size in ["+1M", "512"] {
        let told = shop.fails(1, &format!("resize notes.txt {size}"));
        assert!(
            told.contains("notes.txt: nothing says that it is a disk, so it is not resized")
                && told.contains("--format raw"),
            "{told}"
        );
    }
    assert_eq!(fs::read_to_string(shop.path("notes.txt")).unwrap(), text);
    // Somebody says so: the user, the name, the contents, or that there are none.
    shop.ok("resize notes.txt +1M --format raw");
    fs::write(shop.path("disk.img"), &text).unwrap();
    shop.ok("resize disk.img +1M");
    fs::File::create(shop.path("new")).unwrap().set_len(1 << 20).unwrap();
    shop.ok("resize new +1M");
    let mut table = vec![0; 4 << 20];
    table[446..462].copy_from_slice(&[0, 0, 2, 0, 0x83, 0, 0, 0, 1, 0, 0, 0, 0, 8, 0, 0]);
    table[510..512].copy_from_slice(&[0x55, 0xaa]);
    fs::write(shop.path("disk"), table).unwrap();
    shop.ok("resize disk +1M");
}

/// A move removes the file that it leaves.
#[test]
fn a_file_that_is_no_disk_is_not_moved() {
    let shop = Workshop::new();
    fs::write(shop.path("notes.txt"), "remember the milk\n").unwrap();
    for line in ["move notes.txt notes.vhdx", "move notes.txt notes.vhdx --dry-run"] {
        let told = shop.fails(1, line);
        assert!(told.contains("so it is not moved") && told.contains("--source-format raw"), "{told}");
    }
    assert_eq!(fs::read_to_string(shop.path("notes.txt")).unwrap(), "remember the milk\n");
    shop.ok("move notes.txt kept.vhdx --keep-old");
    shop.ok("move notes.txt notes.vhdx --source-format raw");
    assert!(!shop.path("notes.txt").exists());
}

/// The points of a file that is no disk would be litter beside it.
#[test]
fn a_file_that_is_no_disk_is_not_tracked() {
    let shop = Workshop::new();
    fs::write(shop.path("notes.txt"), "remember the milk\n".repeat(100)).unwrap();
    let told = shop.fails(1, "track start notes.txt monday");
    assert!(told.contains("so it is not tracked") && told.contains("--format raw"), "{told}");
    assert!(!shop.path("notes.txt.tracks").exists());
    shop.ok("track start notes.txt monday --format raw");
    assert!(shop.path("notes.txt.tracks").exists());
}

/// Whoever names a pipe does not mean the folder in which it lies.
#[test]
fn the_images_beside_a_pipe_are_not_listed() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 1M");
    nix::unistd::mkfifo(&shop.path("pipe.vhdx"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::os::unix::fs::symlink("pipe.vhdx", shop.path("link.vhdx")).unwrap();
    for name in ["pipe.vhdx", "link.vhdx", "/dev/null"] {
        let told = shop.fails(1, &format!("snapshot list {name}"));
        let what = if name == "/dev/null" { "a character device" } else { "a named pipe" };
        assert!(told.contains(what) && !told.contains("disk.vhdx"), "{name}: {told}");
    }
    assert!(shop.ok("snapshot list disk.vhdx").contains("disk.vhdx"));
}

#[test]
fn what_is_missing_is_named() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 16M");
    fs::write(shop.path("empty.vhdx"), "").unwrap();
    for (code, line, words) in [
        (1, "info empty.vhdx", "empty.vhdx: the extension is that of vhdx, but the file is empty"),
        (1, r"info C:\vm\disk.vhdx", "this is a path of Windows"),
        (1, "info c:/vm/disk.vhdx", "/mnt/c/vm/disk.vhdx"),
        (1, "merge missing.vhdx", "missing.vhdx: cannot find it: No such file or directory"),
        (1, "snapshot missing.vhdx", "missing.vhdx: cannot find it: No such file or directory"),
        (1, "convert disk.vhdx nowhere/copy.vhdx", "nowhere/copy.vhdx: cannot create it: its folder does not exist"),
        (1, "create nowhere/new.vhdx --size 1M", "nowhere/new.vhdx: cannot create it: its folder does not exist"),
        (1, "move disk.vhdx nowhere/", "nowhere/: there is no such folder"),
        (2, "resize disk.vhdx 0", "at least one sector"),
    ] {
        let told = shop.fails(code, line);
        assert!(told.contains(words), "{line}: {told}");
    }
}

/// Who reads a disk in use is told how that can be done.
#[test]
fn a_disk_in_use_says_how_it_can_be_read() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 16M");
    shop.ok("create other.vhdx --size 16M");
    let _held = {
        use diskwright_store::{LockMode, OpenOptions, file::FileStore};
        let options = OpenOptions { writable: true, lock: LockMode::Exclusive, ..OpenOptions::default() };
        FileStore::open(shop.path("disk.vhdx"), &options).unwrap()
    };
    for (code, line) in [
        (1, "info disk.vhdx"),
        (1, "check disk.vhdx"),
        (1, "map disk.vhdx"),
        (1, "partitions disk.vhdx"),
        (1, "convert disk.vhdx copy.raw"),
        (2, "compare disk.vhdx other.vhdx"),
    ] {
        let told = shop.fails(code, line);
        assert!(told.contains("it is in use") && told.contains("--force-share"), "{line}: {told}");
    }
    // These have no such option.
    for line in ["rescue disk.vhdx copy.raw", "io disk.vhdx -c 'write 0 512'"] {
        let told = shop.fails(1, line);
        assert!(told.contains("it is in use") && !told.contains("--force-share"), "{line}: {told}");
    }
}

/// Commands and options of qemu-img, which users type out of habit.
#[test]
fn habits_are_answered() {
    let shop = Workshop::new();
    for (line, words) in [
        ("commit child.qcow2", "qemu-img's commit is `diskwright merge` here"),
        ("measure disk.raw", "convert SOURCE DEST --dry-run"),
        ("rebase -u -b x child.qcow2", "diskwright reconnect"),
        ("convert -O vhdx a.raw b.vhdx", "-O is --format here"),
        ("snapshot -l disk.qcow2", "-l is `diskwright info` here"),
        ("resize --shrink disk.qcow2 1G", "--shrink is not needed here"),
        ("create disk.qcow2 10G", "the size is an option here: --size 10G"),
    ] {
        let told = shop.fails(2, line);
        assert!(told.contains(words) && !told.contains("compact'") && !told.contains("measuring"), "{line}: {told}");
    }
}
