//! `move`: a disk goes to another file, offline, and in use while its clients go on.

use crate::attaching::{Place as Attaching, run_ok};
use crate::common::Running;
use crate::control::{Place, numbered_blocks, numbers_in};
use crate::serving::{program, wait_until};
use crate::small_fs::Small;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_disk_that_nobody_has_open_moves() {
    let place = Place::with(&["vm.vhdx"]);
    let shop = &place.shop;
    shop.ok("io vm.vhdx -c 'write -P 7 3M 1M'");
    fs::create_dir(shop.path("to")).unwrap();
    let inode = fs::metadata(shop.path("vm.vhdx")).unwrap().ino();
    // On the same file system, in the same format: a rename.
    let dry = place.ok("move vm.vhdx to --dry-run");
    assert!(
        dry.contains("to/vm.vhdx (vhdx): nothing has to be copied") && dry.ends_with("nothing was changed\n"),
        "{dry}"
    );
    assert!(shop.path("vm.vhdx").exists());
    let said = place.json("move vm.vhdx to");
    assert_eq!((&said["copied_bytes"], &said["in_use"], &said["old_kept"]), (&0.into(), &false.into(), &false.into()));
    assert_eq!(fs::metadata(shop.path("to/vm.vhdx")).unwrap().ino(), inode);
    assert!(!shop.path("vm.vhdx").exists());
    // Another format: a copy, which is compared.
    let dry = place.json("move to/vm.vhdx flat.vhd --dry-run");
    assert_eq!(
        (&dry["data_bytes"], &dry["copied_bytes"], &dry["format"]),
        (&(2 << 20).into(), &0.into(), &"vhd".into())
    );
    let private = |path: &str| fs::metadata(shop.path(path)).unwrap().mode() & 0o777;
    fs::set_permissions(shop.path("to/vm.vhdx"), fs::Permissions::from_mode(0o600)).unwrap();
    let told = place.ok("move to/vm.vhdx flat.vhd --type fixed");
    assert_eq!(private("flat.vhd"), 0o600, "who may not read the disk may not read it now");
    assert!(told.contains("flat.vhd (vhd); 2 MiB copied in "), "{told}");
    assert_eq!(names(&shop.path("to")), [""; 0]);
    assert_eq!(place.shop.json("info flat.vhd")["type"], "fixed");
    shop.ok("io flat.vhd --read-only -c 'read -P 7 3M 1M' -c 'read -P 0 0 3M'");
    // A chain becomes one disk; its parent stays. Fixed stays fixed.
    shop.ok("create child.vhd --parent flat.vhd");
    shop.ok("io child.vhd -c 'write -P 8 4M 512'");
    place.ok("move child.vhd one.vhdx --keep-old");
    shop.ok("io one.vhdx --read-only -c 'read -P 7 3M 1M' -c 'read -P 8 4M 512' -c 'read -P 0 4097k 1M'");
    let error = place.fails("move flat.vhd other.vhd");
    assert!(error.contains("child.vhd names this image as its parent"), "{error}");
    for (line, words) in [
        ("move child.vhd one.vhdx", "file exists; nothing was changed"),
        ("move child.vhd none/new.vhd", "cannot find the folder of the new disk"),
        ("move nothing.vhd new.vhd", "No such file"),
    ] {
        let error = place.fails(line);
        assert!(error.contains(words), "{line}: {error}");
    }
    assert_eq!(place.run("move child.vhd new.what").0, Some(2), "no known extension");
    assert_eq!(place.run("move nbd://host/x new.vhd").0, Some(2));
    assert!(shop.path("child.vhd").exists() && !shop.path("new.vhd").exists());
}

#[test]
fn a_served_disk_moves_while_its_client_writes() {
    let place = Place::with(&["vm.vhdx"]);
    let small = match Small::new("xfs", 400 << 20) {
        Ok(small) => Some(small),
        Err(missing) => {
            println!("skipped: another file system: {missing}");
            None
        }
    };
    let shop = &place.shop;
    let Some(server) = place.serve("vm.vhdx --nbd ./s") else { return };
    let stop = AtomicBool::new(false);
    let uri = server.uri("vm.vhdx");
    let held = thread::scope(|scope| {
        let client = scope.spawn(|| numbered_blocks(&uri, &stop));
        thread::sleep(Duration::from_millis(100));
        let dry = place.json("move vm.vhdx one.vhd --dry-run");
        assert_eq!((&dry["in_use"], &dry["dry_run"]), (&true.into(), &true.into()), "{dry}");
        let mut last = "vm.vhdx".to_owned();
        let mut places = vec!["one.vhd".to_owned(), "two.raw".to_owned()];
        places.extend(small.iter().map(|small| small.mount.to_str().unwrap().to_owned()));
        places.push("three.vhdx".to_owned());
        for to in places {
            // By the file, and by the name of the export.
            let line =
                if to == "two.raw" { format!("serve-ctl vm.vhdx move {to}") } else { format!("move {last} {to}") };
            let said = place.json(&line);
            assert_eq!((&said["in_use"], &said["old_kept"]), (&true.into(), &false.into()), "{said}");
            assert!(said["warnings"].as_array().unwrap().is_empty(), "{said}");
            println!("{to}: {} copied, pause {}", said["copied_bytes"], said["pause_seconds"]);
            let new = said["new"].as_str().unwrap().to_owned();
            assert!(!Path::new(&shop.path(&last)).exists(), "{last} is gone");
            let listed = place.json("serve-ctl list");
            assert_eq!(listed["processes"][0]["disks"][0]["file"], *new);
            let counted = place.json(&format!("serve-ctl {new} statistics"));
            assert_eq!(counted["chain"], serde_json::json!([new]));
            // Other operations act on the disk as it is now.
            assert_eq!(
                place.json(&format!("resize {new} +1M"))["new_size"],
                counted["disk"]["virtual_size"].as_u64().unwrap() + (1 << 20)
            );
            last = new;
        }
        stop.store(true, Ordering::Relaxed);
        client.join().unwrap()
    });
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    let disk = shop.path("three.vhdx");
    assert_eq!(numbers_in(&disk), held);
    shop.ok("check three.vhdx");
    shop.ok("convert three.vhdx copy.raw");
    if program(shop, "qemu-img", &["--version"]).is_some() {
        let words = ["compare", "-f", "vhdx", "-F", "raw", "three.vhdx", "copy.raw"];
        let output = program(shop, "qemu-img", &words).unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    assert!(!names(&shop.path("")).iter().any(|name| name.ends_with(".moving")));
}

/// A served disk with enough data for a move to be interrupted.
fn large() -> (Place, String) {
    let place = Place::with(&[]);
    place.shop.ok("create vm.vhdx --size 1G");
    place.shop.ok("io vm.vhdx -c 'write -P 5 64M 700M'");
    let moving = ".new.vhd.moving".to_owned();
    (place, moving)
}

#[test]
fn a_move_whose_server_is_killed_leaves_the_old_disk() {
    let (place, moving) = large();
    let shop = &place.shop;
    let Some(server) = place.serve("vm.vhdx --nbd ./s") else { return };
    shop.ok(&format!("io '{}' -c 'write -P 6 1M 1M' -c flush", server.uri("vm.vhdx")));
    let mut command = Running::start(place.command("move vm.vhdx new.vhd").stdout(Stdio::null()).stderr(Stdio::null()));
    wait_until("the move has begun", || fs::metadata(shop.path(&moving)).is_ok_and(|found| found.len() > 8 << 20));
    server.stop(Signal::SIGKILL);
    assert_eq!(command.wait().unwrap().code(), Some(1));
    assert!(!shop.path("new.vhd").exists() && shop.path(&moving).exists());
    wait_until("the kernel has closed its files", || place.run("io vm.vhdx -c flush").0 == Some(0));
    shop.ok("io vm.vhdx --read-only -c 'read -P 5 64M 700M' -c 'read -P 6 1M 1M' -c 'read -P 0 0 1M'");
    // Space that it had taken ahead of use is leaked, as after any kill.
    assert!(matches!(shop.run("check vm.vhdx").code, Some(0 | 3)));
    // The same command again, now that nobody has the disk.
    place.ok("move vm.vhdx new.vhd");
    shop.ok("io new.vhd --read-only -c 'read -P 5 64M 700M' -c 'read -P 6 1M 1M'");
    assert!(!shop.path("vm.vhdx").exists() && !shop.path(&moving).exists());
}

#[test]
fn a_move_that_is_stopped_is_undone() {
    let (place, moving) = large();
    let shop = &place.shop;
    let stop_it = || {
        let mut command =
            Running::start(place.command("move vm.vhdx new.vhd").stdout(Stdio::null()).stderr(Stdio::null()));
        wait_until("the move has begun", || fs::metadata(shop.path(&moving)).is_ok_and(|found| found.len() > 8 << 20));
        kill(Pid::from_raw(command.id() as i32), Signal::SIGINT).unwrap();
        assert_eq!(command.wait().unwrap().code(), Some(130));
        assert!(!shop.path("new.vhd").exists() && !shop.path(&moving).exists(), "what it began is removed");
        assert!(shop.path("vm.vhdx").exists());
    };
    stop_it();
    let Some(server) = place.serve("vm.vhdx --nbd ./s") else { return };
    stop_it();
    let uri = server.uri("vm.vhdx");
    shop.ok(&format!("io '{uri}' -c 'read -P 5 64M 700M' -c 'write -P 6 1M 1M' -c flush"));
    let said = place.json("serve-ctl vm.vhdx statistics");
    assert_eq!(said["disk"]["busy_with"], serde_json::Value::Null);
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    shop.ok("io vm.vhdx --read-only -c 'read -P 5 64M 700M' -c 'read -P 6 1M 1M'");
}

#[test]
fn an_attached_disk_moves_and_is_detached_by_its_new_name() {
    let Some(place) = Attaching::as_root(&["dd"]) else { return };
    place.ok("create disk.vhdx --size 64M");
    let device = place.attach("disk.vhdx");
    let write = |at: &str| {
        run_ok(
            "dd",
            &["if=/dev/urandom", &format!("of={device}"), "bs=64k", "count=16", at, "conv=fsync", "status=none"],
        );
    };
    write("seek=1");
    let said = place.json("move disk.vhdx new.raw");
    assert_eq!((&said["in_use"], &said["warnings"]), (&true.into(), &serde_json::json!([])), "{said}");
    write("seek=100");
    let copy = place.path("copy.raw");
    run_ok("dd", &[&format!("if={device}"), &format!("of={}", copy.display()), "bs=1M", "status=none"]);
    assert!(!place.path("disk.vhdx").exists());
    place.ok("detach new.raw");
    assert_eq!(place.attached(), 0);
    assert!(fs::read(place.path("new.raw")).unwrap() == fs::read(copy).unwrap());
}

/// The copy would wait for writes that wait for the copy.
#[test]
fn a_disk_is_not_moved_onto_a_file_system_on_itself() {
    let Some(place) = Attaching::as_root(&["mkfs.ext4", "mount", "umount"]) else { return };
    place.ok("create disk.vhdx --size 256M");
    let device = place.attach("disk.vhdx");
    run_ok("mkfs.ext4", &["-q", "-F", &device]);
    let point = place.path("mnt");
    fs::create_dir(&point).unwrap();
    let point = point.to_str().unwrap();
    run_ok("mount", &[&*device, point]);
    for to in ["mnt", "mnt/new.vhdx"] {
        let text = place.fails(&format!("move disk.vhdx {to}"));
        assert!(text.contains("on this very disk") && text.contains("nothing was changed"), "{text}");
    }
    assert_eq!(fs::read_dir(point).unwrap().count(), 1, "lost+found only");
    run_ok("umount", &[point]);
    place.ok("move disk.vhdx new.vhdx");
    place.ok("detach new.vhdx");
}

/// The file that the disk has left is another disk from then on.
#[test]
fn the_old_file_of_an_attached_disk_can_be_attached_too() {
    let Some(place) = Attaching::as_root(&[]) else { return };
    place.ok("create disk.vhdx --size 64M");
    let device = place.attach("disk.vhdx");
    place.ok("move disk.vhdx new.vhdx --keep-old");
    let other = place.attach("disk.vhdx");
    assert_ne!(device, other);
    assert_eq!(place.attached(), 2);
    place.ok("detach disk.vhdx");
    assert_eq!(place.attached(), 1);
    place.ok("detach new.vhdx");
    assert_eq!(place.attached(), 0);
}
