//! `attach`, `attached` and `detach`, as the user types them, with real loop devices and real file
//! systems.

use crate::attaching;
use crate::attaching::{Place, first_line, mountpoint_of, run_ok, sh};
use crate::common::Running;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs::{self, File},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

/// An internal snapshot of a qcow2 image is attached, read-only or with writes that are dropped.
#[test]
fn an_internal_snapshot_is_attached() {
    let Some(place) = Place::as_root(&["qemu-img"]) else { return };
    place.ok("create disk.qcow2 --size 64M");
    place.ok("io disk.qcow2 -c 'write -P 1 0 1M'");
    sh(&format!("qemu-img snapshot -c monday {}", place.path("disk.qcow2").display()));
    place.ok("io disk.qcow2 -c 'write -P 2 0 1M'");
    let before = fs::read(place.path("disk.qcow2")).unwrap();
    for how in ["--read-only", "--ephemeral"] {
        let device = place.attach(&format!("disk.qcow2 --snapshot monday {how}"));
        let read = fs::read(&device).unwrap();
        assert!(read[..1 << 20].iter().all(|&byte| byte == 1), "{how}: it is not the snapshot");
        place.ok("detach disk.qcow2");
    }
    assert!(fs::read(place.path("disk.qcow2")).unwrap() == before, "the image was changed");
}

#[test]
fn a_disk_of_a_pool_is_attached() {
    let Some(place) = Place::as_root(&["mkfs.ext4"]) else { return };
    place.ok("space create vault --member a.img --member b.img --size 128M");
    place.ok("create space://vault/vm.vhdx --size 64M");
    let device = place.attach("space://vault/vm.vhdx");
    run_ok("mkfs.ext4", &["-q", &device]);
    let dir = place.dir("mnt");
    run_ok("mount", &[&device, &dir]);
    fs::write(Path::new(&dir).join("file"), b"in two copies").unwrap();
    run_ok("umount", &[&dir]);
    assert!(place.ok("attached").contains("space://vault/vm.vhdx"));
    place.ok("detach space://vault/vm.vhdx");
    assert_eq!(place.attached(), 0);
    let pools = place.json("space status vault");
    assert_eq!(
        (&pools["pools"][0]["degraded"], &pools["pools"][0]["in_use"]),
        (&false.into(), &serde_json::Value::Null)
    );
    place.ok(&format!("attach space://vault/vm.vhdx --read-only --mount {dir}"));
    assert_eq!(fs::read(Path::new(&dir).join("file")).unwrap(), b"in two copies");
    place.ok("detach space://vault/vm.vhdx --unmount");
}

#[test]
fn a_file_system_written_through_a_device_is_there_the_next_time() {
    let Some(place) = Place::as_root(&["mkfs.ext4"]) else { return };
    place.ok("create disk.vhdx --size 256M");
    let device = place.attach("disk.vhdx");
    run_ok("mkfs.ext4", &["-q", &device]);
    let dir = place.dir("mnt");
    run_ok("mount", &[&device, &dir]);
    let payload: Vec<u8> =
        (0..20_000_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).step_by(7).collect();
    fs::write(Path::new(&dir).join("payload"), &payload).unwrap();

    // While it is mounted nothing is let go.
    let refused = place.fails("detach disk.vhdx");
    assert!(refused.contains(&format!("{device} is mounted at {dir}")) && refused.contains("--unmount"), "{refused}");
    assert!(place.ok("attached").contains(&dir));
    run_ok("umount", &[&dir]);
    assert_eq!(place.json("detach disk.vhdx")["schema"], "diskwright.detach/1");
    assert_eq!(place.attached(), 0);

    // Attached read-only it reads the same, and stays the same in every byte.
    let before = fs::read(place.path("disk.vhdx")).unwrap();
    let said = place.json(&format!("attach disk.vhdx --read-only --mount {dir}"));
    assert_eq!((&said["read_only"], &said["mounts"][0]["file_system"]), (&true.into(), &"ext4".into()));
    assert!(fs::read(Path::new(&dir).join("payload")).unwrap() == payload, "the payload differs");
    assert!(fs::write(Path::new(&dir).join("more"), b"x").is_err());
    let device = said["device"].as_str().unwrap();
    assert!(
        fs::OpenOptions::new()
            .write(true)
            .open(device)
            .and_then(|mut file| std::io::Write::write_all(&mut file, &[0; 512]))
            .is_err()
    );
    place.ok(&format!("detach {dir} --unmount"));
    assert!(fs::read(place.path("disk.vhdx")).unwrap() == before, "a read-only attach has changed the image");
    place.ok("check disk.vhdx");
}

#[test]
fn partitions_have_devices_and_one_is_mounted() {
    let Some(place) = Place::as_root(&["sfdisk", "mkfs.ext4", "mkfs.xfs"]) else { return };
    for (label, name) in [("gpt", "gpt.vhd"), ("dos", "dos.vhdx")] {
        place.ok(&format!("create {name} --size 1G"));
        place.ok(&format!("convert {name} {label}.raw"));
        sh(&format!(
            "printf ',400M\\n,400M\\n' | sfdisk -q --label {label} {}",
            place.path(&format!("{label}.raw")).display()
        ));
        fs::remove_file(place.path(name)).unwrap();
        place.ok(&format!("convert {label}.raw {name}"));
        let said = place.json(&format!("attach {name}"));
        let device = |n: usize| said["partitions"][n]["device"].as_str().expect("a node").to_owned();
        assert_eq!(said["partitions"][1]["length"], 400 << 20);
        assert_eq!(device(1), format!("{}p2", said["device"].as_str().unwrap()));
        run_ok("mkfs.ext4", &["-q", &device(0)]);
        place.ok(&format!("detach {}", device(0)));

        let dir = place.dir("mnt");
        place.ok(&format!("attach {name} --mount {dir}"));
        assert_eq!(mountpoint_of(&dir).as_deref(), Some("ext4"));
        fs::write(Path::new(&dir).join("x"), b"first").unwrap();
        place.ok(&format!("detach {name} --unmount"));

        // With two file systems it must be said which.
        let said = place.json(&format!("attach {name}"));
        run_ok("mkfs.xfs", &["-q", "-f", said["partitions"][1]["device"].as_str().unwrap()]);
        place.ok(&format!("detach {name}"));
        let refused = place.fails(&format!("attach {name} --mount {dir}"));
        assert!(refused.contains("--partition") && refused.contains("partition 2 (xfs)"), "{refused}");
        let refused = place.fails(&format!("attach {name} --mount {dir} --partition 7"));
        assert!(refused.contains("no partition 7"), "{refused}");
        assert_eq!(place.attached(), 0, "a refused attach leaves nothing");
        place.ok(&format!("attach {name} --mount {dir} --partition 2"));
        assert_eq!(mountpoint_of(&dir).as_deref(), Some("xfs"));
        place.ok(&format!("detach {name} --unmount"));
    }
}

#[test]
fn a_disk_in_a_disk_in_a_disk() {
    let Some(place) = Place::as_root(&["mkfs.ext4"]) else { return };
    let mut images = Vec::new();
    let mut folder = place.path("");
    for depth in 0..3 {
        let image = folder.join(format!("disk{depth}.vhdx"));
        place.ok(&format!("create {} --size {}M", image.display(), 400 - 100 * depth));
        let device = place.attach(image.to_str().unwrap());
        run_ok("mkfs.ext4", &["-q", &device]);
        let dir = place.dir(&format!("mnt{depth}"));
        run_ok("mount", &[&device, &dir]);
        images.push((image, dir.clone()));
        folder = dir.into();
    }
    fs::write(folder.join("deep"), vec![7; 5_000_000]).unwrap();
    // From the outside in it is refused, and said what stands in the way.
    let refused = place.fails(&format!("detach {} --unmount", images[0].0.display()));
    assert!(refused.contains("mounted at"), "{refused}");
    assert!(fs::read(folder.join("deep")).unwrap() == vec![7; 5_000_000]);
    for (image, dir) in images.iter().rev() {
        run_ok("umount", &[dir]);
        place.ok(&format!("detach {}", image.display()));
    }
    for (image, dir) in &images {
        place.ok(&format!("attach {} --mount {dir}", image.display()));
    }
    assert!(fs::read(folder.join("deep")).unwrap() == vec![7; 5_000_000]);
    for (image, _) in images.iter().rev() {
        place.ok(&format!("detach {} --unmount", image.display()));
    }
    assert_eq!(place.attached(), 0);
}

#[test]
fn what_a_file_system_discards_is_given_back() {
    let Some(place) = Place::as_root(&["mkfs.ext4", "fstrim"]) else { return };
    place.ok("create disk.vhdx --size 512M");
    let device = place.attach("disk.vhdx");
    run_ok("mkfs.ext4", &["-q", &device]);
    let dir = place.dir("mnt");
    run_ok("mount", &[&device, &dir]);
    fs::write(Path::new(&dir).join("big"), vec![9; 128 << 20]).unwrap();
    run_ok("sync", &["-f", &dir]);
    let full = place.size_on_disk("disk.vhdx");
    assert!(full > 128 << 20, "{full}");
    fs::remove_file(Path::new(&dir).join("big")).unwrap();
    run_ok("sync", &["-f", &dir]);
    run_ok("fstrim", &[&dir]);
    run_ok("umount", &[&dir]);
    place.ok("detach disk.vhdx");
    let trimmed = place.size_on_disk("disk.vhdx");
    assert!(trimmed < full / 2, "{trimmed} of {full} bytes are left after fstrim");
    place.ok("check disk.vhdx");
}

#[test]
fn writes_to_an_ephemeral_disk_are_dropped() {
    let Some(place) = Place::as_root(&["mkfs.ext4"]) else { return };
    place.ok("create disk.vhdx --size 128M");
    let device = place.attach("disk.vhdx");
    run_ok("mkfs.ext4", &["-q", &device]);
    place.ok("detach disk.vhdx");
    let before = fs::read(place.path("disk.vhdx")).unwrap();
    let dir = place.dir("mnt");
    place.ok(&format!("attach disk.vhdx --ephemeral --mount {dir}"));
    fs::write(Path::new(&dir).join("x"), vec![5; 10 << 20]).unwrap();
    run_ok("sync", &["-f", &dir]);
    place.ok("detach disk.vhdx --unmount");
    assert!(fs::read(place.path("disk.vhdx")).unwrap() == before, "an ephemeral disk was changed");
}

#[test]
fn a_killed_server_leaves_no_device_that_hangs() {
    let Some(place) = Place::as_root(&["mkfs.ext4"]) else { return };
    place.ok("create disk.vhdx --size 128M");
    let device = place.attach("disk.vhdx");
    run_ok("mkfs.ext4", &["-q", &device]);
    let dir = place.dir("mnt");
    run_ok("mount", &[&device, &dir]);
    fs::write(Path::new(&dir).join("x"), vec![1; 1 << 20]).unwrap();
    let open = File::open(Path::new(&dir).join("x")).unwrap();
    let server = place.record("disk.vhdx")["server"]["pid"].as_i64().unwrap();
    kill(Pid::from_raw(server as i32), Signal::SIGKILL).unwrap();

    // The supervisor takes it apart, though a file is open in there.
    place.wait_until("the supervisor has cleared away", || {
        mountpoint_of(&dir).is_none() && !place.record_exists_unlost("disk.vhdx")
    });
    let read = attaching::within(Duration::from_secs(20), move || std::io::Read::read(&mut &open, &mut [0; 4096]));
    assert!(read.is_some(), "a read of a file that was open hangs");
    let ended = place.run("attached");
    assert!(ended.stderr.contains("killed by signal 9") && ended.stderr.contains("disk.vhdx"), "{ended:?}");
    assert_eq!(place.attached(), 0);
    // And the disk is sound, and free.
    assert_ne!(place.run("check disk.vhdx").code, Some(2));
    let device = place.attach("disk.vhdx");
    run_ok("dd", &[&format!("if={device}"), "of=/dev/null", "bs=1M", "count=4"]);
    place.ok("detach disk.vhdx");
}

#[test]
fn a_server_that_hangs_is_ended_by_force() {
    let Some(place) = Place::as_root(&["mkfs.ext4"]) else { return };
    place.ok("create disk.vhdx --size 128M");
    let device = place.attach("disk.vhdx");
    run_ok("mkfs.ext4", &["-q", &device]);
    let dir = place.dir("mnt");
    run_ok("mount", &[&device, &dir]);
    let server = Pid::from_raw(place.record("disk.vhdx")["server"]["pid"].as_i64().unwrap() as i32);
    // In the page cache, from where it cannot be written any more.
    fs::write(Path::new(&dir).join("x"), vec![1; 1 << 20]).unwrap();
    kill(server, Signal::SIGSTOP).unwrap();
    let refused = place.fails("detach disk.vhdx");
    assert!(refused.contains("mounted at"), "{refused}");
    let lost = place.fails("detach disk.vhdx --force");
    assert!(lost.contains("killed by signal 9") && lost.contains("may be lost"), "{lost}");
    assert_eq!((mountpoint_of(&dir), place.attached()), (None, 0));
    assert_ne!(place.run("check disk.vhdx").code, Some(2));
    place.attach("disk.vhdx");
    place.ok("detach disk.vhdx");
}

#[test]
fn without_a_supervisor_the_next_command_clears_away() {
    let Some(place) = Place::as_root(&[]) else { return };
    place.ok("create disk.vhdx --size 64M");
    let pid = |who: &str| Pid::from_raw(place.record("disk.vhdx")[who]["pid"].as_i64().unwrap() as i32);
    // The supervisor alone: everything works, and `detach` does its work.
    let device = place.attach("disk.vhdx");
    kill(pid("supervisor"), Signal::SIGKILL).unwrap();
    run_ok("dd", &["if=/dev/zero", &format!("of={device}"), "bs=1M", "count=4", "oflag=direct"]);
    assert_eq!(place.attached(), 1);
    place.ok("detach disk.vhdx");
    assert_eq!(place.attached(), 0);
    // Both.
    let device = place.attach("disk.vhdx");
    kill(pid("supervisor"), Signal::SIGKILL).unwrap();
    kill(pid("server"), Signal::SIGKILL).unwrap();
    let read = attaching::within(Duration::from_secs(20), move || {
        Command::new("dd").args([&format!("if={device}"), "of=/dev/null", "count=8", "iflag=direct"]).output()
    });
    assert!(!read.expect("a read of the device hangs").unwrap().status.success());
    place.wait_until("the server is gone", || place.run("attached").stderr.contains("disk.vhdx"));
    assert_eq!(place.attached(), 0);
    place.attach("disk.vhdx");
    place.ok("detach disk.vhdx");
}

#[test]
fn detaching_says_who_is_in_the_way() {
    let Some(place) = Place::as_root(&[]) else { return };
    place.ok("create disk.vhdx --size 64M");
    let device = place.attach("disk.vhdx");
    let open = File::open(&device).unwrap();
    let refused = place.fails("detach disk.vhdx");
    assert!(refused.contains(&format!("(process {}", std::process::id())), "{refused}");
    drop(open);
    let again = place.fails("attach disk.vhdx");
    assert!(again.contains("already attached") && again.contains(&device), "{again}");
    let locked = place.fails("io disk.vhdx -c 'write 0 4k'");
    assert!(locked.contains("in use"), "{locked}");
    place.ok(&format!("detach {device}"));
    let gone = place.fails("detach disk.vhdx");
    assert!(gone.contains("not attached"), "{gone}");
    let missing = place.fails("attach missing.vhdx");
    assert!(missing.contains("missing.vhdx") && missing.contains("No such file"), "{missing}");
    fs::write(place.path("broken.vhdx"), b"vhdxfile, and then nothing").unwrap();
    let broken = place.fails("attach broken.vhdx");
    assert!(broken.contains("broken.vhdx"), "{broken}");
    assert_eq!(place.attached(), 0);
}

#[test]
fn in_the_foreground_it_ends_with_a_signal() {
    let Some(place) = Place::as_root(&[]) else { return };
    place.ok("create disk.vhdx --size 64M");
    let mut child = place.spawn("attach disk.vhdx --by loop --foreground");
    let device = first_line(&mut child);
    assert!(device.starts_with("/dev/loop"), "{device}");
    run_ok("dd", &["if=/dev/urandom", &format!("of={device}"), "bs=1M", "count=2", "oflag=direct"]);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(place.attached(), 0);
    place.ok("check disk.vhdx");
}

#[test]
fn as_a_file_it_takes_bytes_of_any_length() {
    let Some(place) = Place::as_root(&[]) else { return };
    place.ok("create disk.vhd --size 64M");
    let dir = place.dir("view");
    let file = place.ok(&format!("attach disk.vhd --fuse {dir}")).trim_end().to_owned();
    assert_eq!(file, format!("{dir}/disk"));
    let size = fs::metadata(&file).unwrap().len();
    assert!(size >= 64 << 20);
    // By `cp`, which opens it with O_TRUNC, and by single bytes.
    let payload: Vec<u8> = (0..3_000_001u32).map(|n| (n % 253) as u8).collect();
    fs::write(place.path("payload"), &payload).unwrap();
    run_ok("cp", &[place.path("payload").to_str().unwrap(), &file]);
    let patch = |offset: u64, bytes: &[u8]| {
        use std::os::unix::fs::FileExt;
        fs::OpenOptions::new().write(true).open(&file).unwrap().write_all_at(bytes, offset).unwrap();
    };
    patch(1_234_567, b"hello");
    patch(size - 3, b"end");
    let mut expected = payload;
    expected[1_234_567..1_234_572].copy_from_slice(b"hello");
    expected.resize(size as usize, 0);
    expected[size as usize - 3..].copy_from_slice(b"end");
    assert!(fs::read(&file).unwrap() == expected, "the file differs");
    let open = File::open(&file).unwrap();
    let refused = place.fails("detach disk.vhd");
    assert!(refused.contains("open in"), "{refused}");
    drop(open);
    place.ok(&format!("detach {dir}"));
    place.ok("convert disk.vhd copy.raw");
    assert!(fs::read(place.path("copy.raw")).unwrap() == expected, "the disk differs");
}

#[test]
fn whoever_holds_what_was_unmounted_does_not_hold_up_the_others_for_ever() {
    let Some(place) = Place::as_root(&["mkfs.ext4", "unshare"]) else { return };
    place.ok("create disk.vhdx --size 64M");
    let device = place.attach("disk.vhdx");
    run_ok("mkfs.ext4", &["-q", &device]);
    place.ok("detach disk.vhdx");
    let dir = place.dir("mnt");
    // A program within, whose file system is taken away under it.
    place.ok(&format!("attach disk.vhdx --mount {dir}"));
    fs::write(Path::new(&dir).join("kept"), "kept").unwrap();
    let within = Running::start(Command::new("sleep").arg("600").current_dir(&dir));
    place.fails("detach disk.vhdx --unmount");
    place.run("detach disk.vhdx --force");
    let late = fs::write(format!("/proc/{}/cwd/late", within.id()), "late")
        .and_then(|()| File::open(format!("/proc/{}/cwd/late", within.id())).and_then(|file| file.sync_all()));
    assert!(late.is_err(), "what was taken away is still there");
    drop(within);
    // Another mount namespace, which has a copy of every mount.
    let said = place.ok(&format!("attach disk.vhdx --mount {dir}"));
    assert_eq!(fs::read(Path::new(&dir).join("kept")).unwrap(), b"kept", "{said}");
    place.ok("detach disk.vhdx --unmount");
    // Of a ublk device it would hold nothing.
    place.ok("attach disk.vhdx --by loop");
    let elsewhere = another_mount_namespace(&place);
    let refused = place.fails("detach disk.vhdx");
    assert!(refused.contains("mount namespace") && refused.contains("--force"), "{refused}");
    // Somebody who still waits does not keep another from ending it, and hears how it has ended.
    let waiting = place.spawn("detach disk.vhdx");
    place.run("detach disk.vhdx --force");
    let waited = waiting.output().unwrap();
    assert!(!waited.status.success(), "{waited:?}");
    assert!(!place.ok("attached").contains("disk.vhdx"));
    drop(elsewhere);
    place.ok("check disk.vhdx");
}

/// A process with a copy of all mounts that lie in this place. (Those of other tests, which run
/// meanwhile, it would hold up too.)
fn another_mount_namespace(place: &Place) -> Running {
    const SCRIPT: &str = r#"
        while read -r _ _ _ _ dir rest; do
            case "$dir" in "$0"*) continue ;; esac
            case "$rest" in *fuse.diskwright*|*/dev/loop*) umount -l "$dir" ;; esac
        done < /proc/self/mountinfo
        echo ready
        exec sleep 600"#;
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", SCRIPT]).arg(place.path("")).stdout(Stdio::piped());
    let mut elsewhere = Running::start(&mut command);
    assert_eq!(first_line(&mut elsewhere), "ready");
    elsewhere
}

#[test]
fn a_folder_that_another_has_taken_meanwhile_stays_his() {
    let Some(place) = Place::as_root(&["unshare"]) else { return };
    place.ok("create a.vhd --size 8M");
    place.ok("create b.vhd --size 16M");
    let dir = place.dir("view");
    place.ok(&format!("attach a.vhd --fuse {dir}"));
    let elsewhere = another_mount_namespace(&place);
    place.fails("detach a.vhd");
    place.ok(&format!("attach b.vhd --fuse {dir}"));
    place.run("detach a.vhd --force");
    assert_eq!(place.attached(), 1);
    assert!(fs::metadata(format!("{dir}/disk")).unwrap().len() > 9 << 20, "that of b was unmounted");
    drop(elsewhere);
    place.ok(&format!("detach {dir}"));
    assert_eq!(place.attached(), 0);
}

/// A process that was killed dies when the kernel gets to it.
fn wait_for_death(pid: i32) {
    let is_dead = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.is_empty() || status.contains("State:\tZ") || status.contains("State:\tX")
    };
    for _ in 0..1000 {
        if is_dead() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("process {pid} still runs 10 s after SIGKILL");
}

#[test]
fn what_killed_processes_left_is_in_nobodys_way() {
    let Some(place) = Place::as_root(&[]) else { return };
    place.ok("create a.vhd --size 8M");
    place.ok("create b.vhd --size 8M");
    let dir = place.dir("view");
    for next in ["a.vhd", "b.vhd"] {
        place.ok(&format!("attach a.vhd --fuse {dir}"));
        let twice = place.fails(&format!("attach a.vhd --fuse {dir}"));
        assert!(twice.contains("already attached"), "{twice}");
        let record = place.record("a.vhd");
        let pids = ["supervisor", "server"].map(|role| record[role]["pid"].as_i64().unwrap() as i32);
        pids.iter().for_each(|pid| kill(Pid::from_raw(*pid), Signal::SIGKILL).unwrap());
        pids.into_iter().for_each(wait_for_death);
        place.ok(&format!("attach {next} --fuse {dir}"));
        place.ok(&format!("detach {next}"));
        assert_eq!(place.attached(), 0);
    }
}

#[test]
fn a_folder_that_is_taken_is_refused() {
    let Some(place) = Place::as_root(&[]) else { return };
    place.ok("create a.vhd --size 8M");
    place.ok("create b.vhd --size 8M");
    let dir = place.dir("view");
    place.ok(&format!("attach a.vhd --fuse {dir}"));
    let refused = place.fails(&format!("attach b.vhd --fuse {dir}"));
    assert!(refused.contains("is already mounted at") && refused.contains("another folder"), "{refused}");
    place.ok("detach a.vhd");
    place.ok(&format!("attach b.vhd --fuse {dir}"));
    place.ok("detach b.vhd");
}

#[test]
fn a_user_gets_a_file_without_being_root() {
    let Some(place) = Place::as_user() else { return };
    place.ok("create disk.vhdx --size 64M");
    let refused = place.fails("attach disk.vhdx");
    assert!(refused.contains("need root") && refused.contains("--fuse"), "{refused}");
    assert_eq!(place.attached(), 0);
    let dir = place.dir("view");
    let file = place.ok(&format!("attach disk.vhdx --fuse {dir}")).trim_end().to_owned();
    assert_eq!(place.attached(), 1);
    place.user_sh(&format!("printf hello | dd of={file} bs=1 seek=1000 conv=notrunc 2>/dev/null"));
    assert_eq!(place.user_sh(&format!("dd if={file} bs=1 skip=1000 count=5 2>/dev/null")), "hello");
    place.ok("detach disk.vhdx");
    assert_eq!(place.attached(), 0);
    place.ok("io disk.vhdx -c 'read 0 4k'");
}

#[test]
fn fio_finds_what_it_wrote_at_every_depth() {
    let Some(place) = Place::as_root(&["fio"]) else { return };
    place.ok("create disk.vhdx --size 256M");
    for options in ["", "--io-engine pread"] {
        let device = place.ok(&format!("attach disk.vhdx {options}")).trim_end().to_owned();
        for depth in ["1", "8", "32", "128"] {
            for size in ["--bs=4k", "--bsrange=512-64k"] {
                run_ok(
                    "fio",
                    &[
                        "--name=verify",
                        &format!("--filename={device}"),
                        "--direct=1",
                        "--ioengine=libaio",
                        "--rw=randwrite",
                        size,
                        // Where writes in flight overlap, nobody knows which is the last.
                        "--serialize_overlap=1",
                        &format!("--iodepth={depth}"),
                        "--size=4M",
                        "--verify=crc32c",
                        "--verify_fatal=1",
                        "--randseed=7",
                        "--output-format=terse",
                    ],
                );
            }
        }
        place.ok("detach disk.vhdx");
    }
    place.ok("check disk.vhdx");
}

#[test]
fn machines_that_lack_something_say_what() {
    let Some(place) = Place::as_root(&["unshare", "sfdisk", "mkfs.ext4"]) else { return };
    place.ok("create disk.vhdx --size 64M");
    let dir = place.dir("view");
    // Another /dev, as in a container: with these nodes and no others.
    let in_container = |nodes: &str, command: &str| {
        let program = env!("CARGO_BIN_EXE_diskwright");
        place.sh_result(&format!(
            "unshare -m sh -ec 'mount -t tmpfs tmpfs /dev; mknod /dev/null c 1 3; {nodes}; {program} {command}'"
        ))
    };
    let fuse = "mknod /dev/fuse c 10 229";
    let control = "mknod /dev/loop-control c 10 237";

    let ended = in_container("true", &format!("attach disk.vhdx --fuse {dir}"));
    assert!(ended.stderr.contains("/dev/fuse") && ended.stderr.contains("modprobe fuse"), "{ended:?}");
    let ended = in_container(fuse, "attach disk.vhdx");
    assert!(ended.stderr.contains("there is no loop driver") && ended.stderr.contains("--fuse PATH"), "{ended:?}");
    let ended = in_container(&format!("{fuse}; {control}"), "attach disk.vhdx");
    assert!(ended.stderr.contains("the device node did not appear"), "{ended:?}");
    assert_eq!(place.attached(), 0);

    // Loop devices, but no nodes for partitions: a loop device of its own shows the partition.
    place.ok("convert disk.vhdx disk.raw");
    sh(&format!("printf ',40M\\n' | sfdisk -q --label gpt {}", place.path("disk.raw").display()));
    let said = place.json("attach disk.raw");
    run_ok("mkfs.ext4", &["-q", said["partitions"][0]["device"].as_str().unwrap()]);
    place.ok("detach disk.raw");
    let loops = "for n in $(seq 0 63); do mknod /dev/loop$n b 7 $n; done";
    let command = format!(
        "attach disk.raw --mount {dir}; touch {dir}/x; ls {dir}; {} attached --json; {} detach disk.raw --unmount",
        env!("CARGO_BIN_EXE_diskwright"),
        env!("CARGO_BIN_EXE_diskwright")
    );
    let ended = in_container(&format!("{fuse}; {control}; {loops}"), &command);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("partition 1 has no device node"), "{ended:?}");
    assert!(ended.stdout.contains("lost+found") && ended.stdout.contains("\"more_devices\": [\n"), "{ended:?}");
    assert_eq!(place.attached(), 0);
}
