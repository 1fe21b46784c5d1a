//! Attached disks whose file systems show themselves differently in the table of mounts, and users
//! without a run-time folder.

use crate::attaching::{Place, mountpoint_of, run_ok, sh};
use std::{fs, path::Path};

/// Makes a disk with a file system, attached nowhere.
fn disk_with(place: &Place, file_system: &str) -> String {
    let name = format!("{file_system}.vhdx");
    place.ok(&format!("create {name} --size 400M"));
    let device = place.attach(&name);
    let force = if file_system == "ext4" { "-F" } else { "-f" };
    run_ok(&format!("mkfs.{file_system}"), &["-q", force, &device]);
    place.ok(&format!("detach {name}"));
    name
}

/// Mounted by `attach`, refused by a plain `detach`, unmounted and detached by `--unmount`; and
/// `--force` leaves no mount behind.
fn comes_and_goes(file_system: &str) {
    let Some(place) = Place::as_root(&[&format!("mkfs.{file_system}")]) else { return };
    let name = disk_with(&place, file_system);
    let (dir, second) = (place.dir("mnt"), place.dir("second"));
    for _ in 0..2 {
        place.ok(&format!("attach {name} --mount {dir}"));
        assert_eq!(mountpoint_of(&dir).as_deref(), Some(file_system));
        fs::write(Path::new(&dir).join("payload"), vec![7; 3 << 20]).unwrap();
        let mounted = place.record(&name)["mounted"].clone();
        assert_eq!(mounted, serde_json::json!([dir]));
        let refused = place.fails(&format!("detach {name}"));
        assert!(refused.contains(&format!("mounted at {dir}")) && refused.contains("--unmount"), "{refused}");
        place.ok(&format!("detach {name} -u"));
        assert_eq!((mountpoint_of(&dir), place.attached()), (None, 0));
    }
    // The same file system in two places, and a program that holds a file: only force helps.
    let device = place.ok(&format!("attach {name} --mount {dir}")).trim_end().to_owned();
    run_ok("mount", &[&device, &second]);
    let held = fs::File::open(Path::new(&dir).join("payload")).unwrap();
    place.fails(&format!("detach {name} -u"));
    place.run(&format!("detach {name} --force"));
    assert_eq!((mountpoint_of(&dir), mountpoint_of(&second)), (None, None), "a mount stays behind");
    drop(held);
    place.wait_until("nothing is attached any more", || place.attached() == 0);
    place.ok(&format!("check {name}"));
}

#[test]
fn btrfs() {
    comes_and_goes("btrfs");
}

#[test]
fn ext4() {
    comes_and_goes("ext4");
}

#[test]
fn xfs() {
    comes_and_goes("xfs");
}

#[test]
fn a_subvolume_counts_as_a_mount_of_its_disk() {
    let Some(place) = Place::as_root(&["mkfs.btrfs", "btrfs"]) else { return };
    let name = disk_with(&place, "btrfs");
    let (dir, sub) = (place.dir("mnt"), place.dir("sub"));
    let device = place.ok(&format!("attach {name} --mount {dir}")).trim_end().to_owned();
    sh(&format!("btrfs -q subvolume create {dir}/inner"));
    run_ok("umount", &[&dir]);
    run_ok("mount", &["-o", "subvol=inner", &device, &sub]);
    let refused = place.fails(&format!("detach {name}"));
    assert!(refused.contains(&format!("mounted at {sub}")), "{refused}");
    place.ok(&format!("detach {name} --unmount"));
    assert_eq!((mountpoint_of(&sub), place.attached()), (None, 0));
}

#[test]
fn a_btrfs_on_two_disks_is_in_the_way_of_both() {
    let Some(place) = Place::as_root(&["mkfs.btrfs"]) else { return };
    let mut devices = Vec::new();
    for name in ["a.vhdx", "b.vhdx"] {
        place.ok(&format!("create {name} --size 300M"));
        devices.push(place.attach(name));
    }
    run_ok("mkfs.btrfs", &["-q", "-f", "-m", "raid1", "-d", "raid1", &devices[0], &devices[1]]);
    let dir = place.dir("mnt");
    run_ok("mount", &[&devices[0], &dir]);
    for name in ["a.vhdx", "b.vhdx"] {
        let refused = place.fails(&format!("detach {name}"));
        assert!(refused.contains(&format!("mounted at {dir}")), "{name}: {refused}");
    }
    place.ok("detach b.vhdx --unmount");
    assert_eq!(mountpoint_of(&dir), None);
    place.ok("detach a.vhdx");
}

#[test]
fn a_user_needs_no_run_time_folder() {
    let Some(place) = Place::as_user() else { return };
    let records = Path::new("/tmp/diskwright-65534");
    if records.exists() {
        return println!("skipped: attaching without XDG_RUNTIME_DIR: {} is there", records.display());
    }
    place.ok("create disk.vhdx --size 8M");
    let dir = place.dir("view");
    let without = "env -u DISKWRIGHT_RUN_DIR -u XDG_RUNTIME_DIR ./diskwright";
    let file = place.user_sh(&format!("{without} attach disk.vhdx --fuse {dir}"));
    assert_eq!(file.trim_end(), format!("{dir}/disk"));
    assert!(place.user_sh(&format!("{without} attached")).contains("disk.vhdx"));
    // As `su` leaves it: the folder of another user.
    let as_su = "env -u DISKWRIGHT_RUN_DIR XDG_RUNTIME_DIR=/root ./diskwright";
    assert!(place.user_sh(&format!("{as_su} attached")).contains("disk.vhdx"));
    place.user_sh(&format!("{without} detach {dir}"));
    assert_eq!(place.user_sh(&format!("{without} attached")), "");
    fs::remove_dir_all(records).unwrap();
    // A folder that another user has made there is not used, and the user is told what to do.
    fs::create_dir(records).unwrap();
    let refused = place.sh_result(&format!("{without} attach disk.vhdx --fuse {dir}"));
    fs::remove_dir(records).unwrap();
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stderr.contains("another user") && refused.stderr.contains("DISKWRIGHT_RUN_DIR"), "{refused:?}");
}
