//! `serve-ctl`, and the commands that reach a disk in use by its control channel.

use crate::attaching::{Place as Attaching, run_ok};
use crate::common::{Running, Workshop, hears_hangups};
use crate::serving::{PATIENCE, Serving, program, wait_until};
use diskwright_nbd::{NbdDevice, NbdUri};
use diskwright_store::{Blocking, EngineKind};
use nix::sys::signal::Signal;
use std::{
    fs,
    os::unix::net::UnixStream,
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// A shop whose processes have a run-time folder of their own.
pub struct Place {
    pub shop: Workshop,
}

impl Place {
    pub fn with(names: &[&str]) -> Self {
        let shop = Workshop::new();
        for name in names {
            shop.ok(&format!("create {name} --size 64M"));
        }
        Self { shop }
    }

    pub fn run_dir(&self) -> String {
        self.shop.path("run").to_str().unwrap().to_owned()
    }

    pub fn command(&self, line: &str) -> Command {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut command = self.shop.command(&words);
        command.env("DISKWRIGHT_RUN_DIR", self.run_dir());
        command
    }

    pub fn serve(&self, line: &str) -> Option<Serving> {
        Serving::started(&self.shop, self.command(&format!("serve {line}")))
    }

    pub fn run(&self, line: &str) -> (Option<i32>, String, String) {
        let output = self.command(line).stdin(Stdio::null()).output().expect("diskwright starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let printed = text(&output.stdout);
        if line.contains("--json") && !printed.is_empty() {
            crate::common::schemas::validate(&printed);
        }
        (output.status.code(), printed, text(&output.stderr))
    }

    #[track_caller]
    pub fn ok(&self, line: &str) -> String {
        let (code, printed, errors) = self.run(line);
        assert_eq!(code, Some(0), "`diskwright {line}` failed: {errors}");
        printed
    }

    #[track_caller]
    pub fn json(&self, line: &str) -> serde_json::Value {
        serde_json::from_str(&self.ok(&format!("{line} --json"))).expect("one JSON document")
    }

    #[track_caller]
    pub fn fails(&self, line: &str) -> String {
        self.fails_with(1, line)
    }

    #[track_caller]
    pub fn fails_with(&self, expected: i32, line: &str) -> String {
        let (code, _, errors) = self.run(line);
        assert_eq!(code, Some(expected), "`diskwright {line}`: {errors}");
        assert!(errors.starts_with("diskwright: "), "{errors}");
        errors
    }
}

#[test]
fn disks_in_use_are_listed_counted_and_closed() {
    let place = Place::with(&["db.vhdx", "log.vhd", "seen.vhdx"]);
    assert_eq!(place.ok("serve-ctl list"), "");
    let Some(server) = place.serve("data=db.vhdx log.vhd --nbd ./s") else { return };
    let reader = place.serve("seen.vhdx --read-only --nbd ./r").unwrap();
    let listed = place.json("serve-ctl list");
    let processes = listed["processes"].as_array().unwrap();
    assert_eq!((processes.len(), processes[0]["disks"].as_array().unwrap().len()), (1, 2), "{listed}");
    let pid = processes[0]["pid"].as_u64().unwrap();
    let table = place.ok("serve-ctl list");
    assert!(table.contains("data") && table.contains("log.vhd") && table.contains(&pid.to_string()), "{table}");
    assert!(!table.contains("seen.vhdx"), "a disk that is only read leads to no process: {table}");
    let uri = server.uri("data");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 1 0 1M' -c 'read 0 64k' -c flush"));
    // By the file, by the name of the export, through a link.
    std::os::unix::fs::symlink("db.vhdx", place.shop.path("link")).unwrap();
    for named in ["db.vhdx", "data", "link"] {
        let said = place.json(&format!("serve-ctl {named} statistics"));
        assert_eq!((&said["disk"]["name"], &said["process"]["command"]), (&"data".into(), &"serve".into()));
        assert_eq!(said["process"]["pid"], pid);
        let commands = said["traffic"]["commands"].as_array().unwrap();
        let of = |name: &str| commands.iter().find(|count| count["command"] == name).unwrap().clone();
        assert_eq!((&of("write")["bytes"], &of("read")["bytes"]), (&(1 << 20).into(), &(64 << 10).into()));
    }
    let text = place.ok("serve-ctl data statistics");
    assert!(text.contains("1 MiB") && text.contains("write") && text.contains(&format!("process {pid}")), "{text}");
    for (line, words) in [
        ("serve-ctl nothing statistics", "no disk that is open for writing has this name"),
        ("serve-ctl seen.vhdx statistics", "no process has it open for writing"),
    ] {
        let error = place.fails(line);
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(place.run("serve-ctl db.vhdx").0, Some(2), "what to do with it?");
    // A client has written and not flushed: the drain does.
    place.shop.ok(&format!("io '{uri}' -c 'write -P 9 5M 64k'"));
    let drained = place.json("serve-ctl log.vhd drain");
    assert_eq!((&drained["pid"], drained["files"].as_array().unwrap().len()), (&pid.into(), 2));
    // The disks are closed as soon as the command has ended.
    place.shop.ok("io db.vhdx -c 'read -P 9 5M 64k' -c 'read -P 1 0 1M' -c 'write -P 2 0 4k'");
    assert_eq!(server.wait(), Some(0));
    assert!(UnixStream::connect(place.shop.path("s")).is_err(), "new clients are refused");
    assert_eq!(place.ok("serve-ctl list"), "");
    assert_eq!(reader.stop(Signal::SIGTERM), Some(0));
    let left: Vec<_> =
        fs::read_dir(place.shop.path("run/control")).unwrap().map(|at| at.unwrap().file_name()).collect();
    assert_eq!(left, ["lock"]);
}

#[test]
fn a_disk_grows_while_it_is_served() {
    let place = Place::with(&["db.vhdx", "flat.vhd"]);
    let Some(server) = place.serve("db.vhdx flat.vhd --nbd ./s") else { return };
    let uri = server.uri("db.vhdx");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 1 0 1M'"));
    assert_eq!(
        place.ok("resize db.vhdx +64M --dry-run"),
        "db.vhdx: would be enlarged from 64 MiB (67108864 bytes) to 128 MiB (134217728 bytes); it needs no space; \
         nothing was changed\n"
    );
    assert!(place.ok("resize db.vhdx +64M").starts_with("db.vhdx: enlarged from 64 MiB"));
    assert_eq!(place.json("serve-ctl flat.vhd resize 80M")["new_size"], 80 << 20);
    place.shop.ok(&format!("io '{uri}' -c 'write -P 2 127M 1M' -c 'read -P 1 0 1M' -c flush"));
    let error = place.fails("resize db.vhdx 1M");
    assert!(error.contains("name a larger size"), "{error}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    assert_eq!(place.shop.json("info flat.vhd")["virtual_size"], 80 << 20);
    place.shop.ok("io db.vhdx -c 'read -P 2 127M 1M' -c 'read -P 1 0 1M'");
    place.shop.ok("check db.vhdx");
    place.shop.ok("check flat.vhd");
}

#[test]
fn a_program_without_a_channel_is_named_and_nothing_is_changed() {
    let place = Place::with(&["disk.vhdx", "disk.raw"]);
    // Our own `io`, which waits for its next command.
    let mut holder = place.command("io disk.vhdx");
    let holder = Running::start(holder.stdin(Stdio::piped()).stdout(Stdio::null()));
    wait_until("the disk is locked", || {
        place.run("io disk.vhdx -c flush").2.contains(&format!("process {}", holder.id()))
    });
    for line in ["resize disk.vhdx +1M", "serve-ctl disk.vhdx statistics", "serve-ctl disk.vhdx drain"] {
        let error = place.fails(line);
        assert!(error.contains(&format!("diskwright (process {})", holder.id())), "{error}");
        assert!(error.contains("only `diskwright serve` and"), "{error}");
    }
    drop(holder);
    // qemu-nbd, which takes QEMU's locks.
    let line =
        ["-f", "raw", "-k", place.shop.path("q").to_str().unwrap(), place.shop.path("disk.raw").to_str().unwrap()]
            .map(str::to_owned);
    let Some(_) = program(&place.shop, "qemu-nbd", &["--version"]) else { return };
    let other = Running::start(Command::new("qemu-nbd").args(line));
    wait_until("qemu-nbd listens", || place.shop.path("q").exists());
    let error = place.fails("resize disk.raw +1M");
    assert!(error.contains(&format!("qemu-nbd (process {})", other.id())), "{error}");
    drop(other);
    assert_eq!(place.shop.json("info disk.raw")["virtual_size"], 64 << 20);
}

#[test]
fn a_server_that_was_killed_is_gone_and_one_that_hangs_is_named() {
    let place = Place::with(&["disk.vhdx"]);
    let Some(server) = place.serve("disk.vhdx --nbd ./s") else { return };
    let pid = place.json("serve-ctl list")["processes"][0]["pid"].as_u64().unwrap();
    server.signal(Signal::SIGSTOP);
    let start = Instant::now();
    let error = place.fails("serve-ctl disk.vhdx statistics");
    assert!(error.contains(&format!("diskwright (process {pid}) does not answer")), "{error}");
    assert!(start.elapsed() < PATIENCE / 2);
    let (code, printed, errors) = place.run("serve-ctl list");
    assert_eq!((code, printed.as_str()), (Some(0), ""), "{errors}");
    assert!(errors.contains("does not answer"), "{errors}");
    server.signal(Signal::SIGCONT);
    wait_until("it answers again", || place.run("serve-ctl disk.vhdx statistics").0 == Some(0));
    server.stop(Signal::SIGKILL);
    assert!(place.shop.path("run/control").read_dir().unwrap().count() > 1, "it has left its socket and its link");
    wait_until("the kernel has closed its files", || place.run("resize disk.vhdx +1M").0 == Some(0));
    assert_eq!(place.ok("serve-ctl list"), "");
    let error = place.fails("serve-ctl disk.vhdx statistics");
    assert!(error.contains("no process has it open"), "{error}");
    // The next server of the disk is found.
    let server = place.serve("disk.vhdx --nbd ./t").unwrap();
    let said = place.json("serve-ctl disk.vhdx statistics");
    assert_ne!(said["process"]["pid"], pid);
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

#[test]
fn the_disk_of_another_user_is_refused_with_a_reason() {
    if !nix::unistd::geteuid().is_root() || Command::new("setpriv").arg("--version").output().is_err() {
        return println!("skipped: the disk of another user: not root, or no setpriv");
    }
    let place = Place::with(&["disk.vhdx"]);
    let Some(server) = place.serve("disk.vhdx --nbd ./s") else { return };
    // The other user may read and write the disk and run the program, but not reach the folder.
    let open = |path: std::path::PathBuf, mode: u32| {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    let program = place.shop.path("diskwright");
    if fs::hard_link(env!("CARGO_BIN_EXE_diskwright"), &program).is_err() {
        fs::copy(env!("CARGO_BIN_EXE_diskwright"), &program).unwrap();
    }
    open(place.shop.path(""), 0o777);
    open(place.shop.path("disk.vhdx"), 0o666);
    for line in ["serve-ctl disk.vhdx drain", "resize disk.vhdx +1M"] {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&program);
        command.args(line.split(' ')).current_dir(place.shop.path("")).env("DISKWRIGHT_RUN_DIR", place.run_dir());
        let output = command.stdin(Stdio::null()).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("disk.vhdx") && error.contains("in use"), "{error}");
    }
    place.ok("serve-ctl disk.vhdx statistics");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

/// A client that writes numbered blocks all the time: what the last number of each block is.
pub fn numbered_blocks(uri: &str, stop: &AtomicBool) -> Vec<u64> {
    let device = NbdDevice::open(&NbdUri::parse(uri).unwrap(), true).unwrap();
    let mut io = Blocking::open(&device, EngineKind::Auto).unwrap();
    let mut held = vec![0; 512];
    let mut number = 0u64;
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        let at = (number.wrapping_mul(2_654_435_761) % 512) as usize;
        held[at] = number;
        let bytes: Vec<u8> = number.to_le_bytes().repeat(512);
        io.write(at as u64 * 65_536, &bytes, number.is_multiple_of(32)).unwrap();
        let mut found = [0; 4096];
        io.read(at as u64 * 65_536, &mut found).unwrap();
        assert!(found[..] == bytes[..], "its own write");
    }
    io.flush().unwrap();
    held
}

/// The number of each block.
pub fn numbers_in(path: &Path) -> Vec<u64> {
    let disk = diskwright_disk::Disk::open(path, &diskwright_disk::OpenOptions::default()).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    let mut found = [0; 4096];
    let mut number_at = |at: u64| {
        io.read(at * 65_536, &mut found).unwrap();
        let number = u64::from_le_bytes(found[..8].try_into().unwrap());
        assert!(found[..] == number.to_le_bytes().repeat(512)[..], "block {at} is torn");
        number
    };
    (0..512).map(&mut number_at).collect()
}

#[test]
fn a_disk_is_frozen_while_a_client_writes() {
    let place = Place::with(&["disk.vhdx", "disk.vhd"]);
    let Some(server) = place.serve("disk.vhdx disk.vhd --nbd ./s") else { return };
    let stop = AtomicBool::new(false);
    let held: Vec<Vec<u64>> = thread::scope(|scope| {
        let clients = ["disk.vhdx", "disk.vhd"].map(|name| {
            let (uri, stop) = (server.uri(name), &stop);
            scope.spawn(move || numbered_blocks(&uri, stop))
        });
        for number in 0..3 {
            thread::sleep(Duration::from_millis(150));
            let said = place.json(&format!("snapshot disk.vhdx --name s{number}"));
            assert_eq!((&said["in_use"], &said["action"]), (&true.into(), &"snapshot".into()), "{said}");
            place.ok(&format!("serve-ctl disk.vhd snapshot s{number}"));
            // The disk's file leads to the same process, also by its new inode.
            place.ok("serve-ctl disk.vhdx statistics");
        }
        let error = place.fails("snapshot disk.vhdx --name s1");
        assert!(error.contains("file exists"), "{error}");
        let said = place.json("serve-ctl disk.vhd statistics");
        assert_eq!(said["chain"].as_array().unwrap().len(), 4, "{said}");
        stop.store(true, Ordering::Relaxed);
        clients.map(|client| client.join().unwrap()).into()
    });
    place.ok("serve-ctl disk.vhdx drain");
    assert_eq!(server.wait(), Some(0));
    for (extension, held) in ["vhdx", "vhd"].into_iter().zip(&held) {
        assert!(numbers_in(&place.shop.path(&format!("disk.{extension}"))) == *held, "{extension}: all is there");
        let frozen: Vec<Vec<u64>> =
            (0..3).map(|n| numbers_in(&place.shop.path(&format!("disk_s{n}.a{extension}")))).collect();
        // Each later one has more. And as the client waits for each write, a frozen image has all
        // writes up to one of them.
        for numbers in &frozen {
            let last = *numbers.iter().max().unwrap();
            let mut expected = vec![0; 512];
            (1..=last).for_each(|number: u64| expected[(number.wrapping_mul(2_654_435_761) % 512) as usize] = number);
            assert!(*numbers == expected, "{extension}: writes up to {last}, and no others");
        }
        assert!(frozen.windows(2).all(|two| two[0].iter().max() < two[1].iter().max()));
        place.shop.ok(&format!("check disk.{extension} --chain"));
        place.shop.ok(&format!("io disk.{extension} -c 'write 0 4k'"));
    }
}

#[test]
fn a_server_that_is_killed_during_snapshots_leaves_a_disk() {
    let place = Place::with(&["disk.vhdx"]);
    for round in 0..6u64 {
        let Some(server) = place.serve(&format!("disk.vhdx --nbd ./s{round}")) else { return };
        let uri = server.uri("disk.vhdx");
        place.shop.ok(&format!("io '{uri}' -c 'write -P {} {round}M 64k' -c flush", round + 1));
        let snapshots = thread::scope(|scope| {
            let snapshots = scope
                .spawn(|| (0..40).all(|n| place.run(&format!("snapshot disk.vhdx --name r{round}n{n}")).0 == Some(0)));
            thread::sleep(Duration::from_millis(15 + 17 * round));
            server.stop(Signal::SIGKILL);
            snapshots.join().unwrap()
        });
        assert!(snapshots || place.shop.path("disk.vhdx").exists());
        wait_until("the kernel has closed its files", || place.run("io disk.vhdx -c flush").0 == Some(0));
        for before in 0..=round {
            place.shop.ok(&format!("io disk.vhdx -c 'read -P {} {before}M 64k'", before + 1));
        }
        // Space may have leaked, as after any kill.
        let checked = place.shop.run("check disk.vhdx --chain");
        assert!(matches!(checked.code, Some(0 | 3)), "{checked:?}");
        // The next snapshot removes what is left of the one that was cut off.
        place.shop.ok(&format!("snapshot disk.vhdx --name round{round}"));
        let left = |name: &str| name.contains("new-child");
        let names = fs::read_dir(place.shop.path("")).unwrap().map(|at| at.unwrap().file_name());
        assert!(!names.into_iter().any(|name| left(&name.to_string_lossy())), "a temporary file is left");
    }
}

/// A frozen image whose file system was frozen first needs no repair and no replay.
#[test]
fn a_mounted_file_system_is_frozen_for_the_moment_of_a_snapshot() {
    let Some(place) = Attaching::as_root(&["mkfs.ext4", "fsck.ext4", "dumpe2fs"]) else { return };
    place.ok("create disk.vhdx --size 256M");
    let device = place.attach("disk.vhdx");
    run_ok("mkfs.ext4", &["-q", &device]);
    let dir = place.dir("mnt");
    run_ok("mount", &[&device, &dir]);
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (dir, stop) = (dir.clone(), Arc::clone(&stop));
        thread::spawn(move || {
            let mut number = 0u32;
            while !stop.load(Ordering::Relaxed) {
                number += 1;
                let path = Path::new(&dir).join(format!("file{}", number % 50));
                fs::write(&path, number.to_le_bytes().repeat(2000)).unwrap();
                if number.is_multiple_of(7) {
                    fs::remove_file(&path).unwrap();
                }
            }
        })
    };
    for number in 0..3 {
        thread::sleep(Duration::from_millis(200));
        let said = place.json(&format!("snapshot disk.vhdx --name s{number}"));
        assert_eq!(said["file_systems"], serde_json::json!([dir]), "{said}");
        // It is thawed: files can be written at once.
        let path = Path::new(&dir).join("after");
        let written = crate::attaching::within(Duration::from_secs(20), move || fs::write(path, b"x"));
        written.expect("the file system is thawed").unwrap();
    }
    assert_eq!(place.record("disk.vhdx")["frozen"], serde_json::json!([]));
    // A snapshot that fails thaws too, and one of a disk that the user has frozen leaves it frozen.
    assert!(place.fails("snapshot disk.vhdx --name s1").contains("file exists"));
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    run_ok("fsfreeze", &["-f", &dir]);
    let ended = place.run("snapshot disk.vhdx --name users");
    assert!(ended.code == Some(0) && ended.stderr.contains("was not frozen"), "{ended:?}");
    run_ok("fsfreeze", &["-u", &dir]);
    assert!(place.fails("serve-ctl disk.vhdx drain").contains("diskwright detach"));
    run_ok("umount", &[&dir]);
    place.ok("detach disk.vhdx");
    for name in ["disk_s0.avhdx", "disk_s1.avhdx", "disk_s2.avhdx", "disk.vhdx"] {
        let device = place.ok(&format!("attach {name} --read-only")).trim_end().to_owned();
        run_ok("fsck.ext4", &["-fn", &device]);
        let state = Command::new("dumpe2fs").args(["-h", &device]).output().unwrap();
        let state = String::from_utf8_lossy(&state.stdout).into_owned();
        assert!(!state.contains("needs_recovery"), "{name}: the journal is empty: {state}");
        place.ok(&format!("detach {name}"));
    }
}

/// The clones have what the disk had at one moment, and clients go on.
#[test]
fn a_disk_in_use_is_frozen_for_its_clones() {
    let place = Place::with(&["db.vhdx"]);
    let Some(server) = place.serve("db.vhdx --nbd ./s") else { return };
    let uri = server.uri("db.vhdx");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 1 0 1M'"));
    let planned = place.ok("clone db.vhdx a.vhdx b.vhdx --name tested --dry-run");
    assert!(
        planned.starts_with("db.vhdx is in use, and would become a new child of ")
            && planned.contains("2 clones of ")
            && planned.contains("it needs up to ")
            && planned.ends_with("nothing was changed\n"),
        "{planned}"
    );
    assert!(!place.shop.path("a.vhdx").exists() && !place.shop.path("db_tested.avhdx").exists());
    // Names that are taken are found before anything is frozen.
    place.shop.ok("create taken.vhdx --size 1M");
    assert!(place.fails("clone db.vhdx a.vhdx taken.vhdx").contains("taken.vhdx: file exists"));
    assert!(place.fails("clone db.vhdx nowhere/a.vhdx").contains("there is no folder nowhere"));
    assert!(place.fails("clone db.vhdx a.vhd").contains("a vhd disk can only have a vhd parent"));
    assert!(place.ok("snapshot list . --json").matches(".avhdx").count() == 0);
    let done = place.ok("clone db.vhdx a.vhdx b.vhdx --name tested");
    assert!(done.starts_with("db.vhdx is in use, and is now a new child of ") && done.ends_with("made\n"), "{done}");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 2 0 1M' -c 'read -P 2 0 1M'"));
    place.ok("serve-ctl db.vhdx clone c.vhdx --name second");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 3 0 1M' -c flush"));
    for (clone, pattern) in [("a.vhdx", 1), ("b.vhdx", 1), ("c.vhdx", 2)] {
        place.shop.ok(&format!("io {clone} -c 'read -P {pattern} 0 1M'"));
    }
    // A list of differences of what changes meanwhile would be of no moment.
    let refused = place.fails_with(2, "diff db.vhdx a.vhdx");
    assert!(refused.contains("has it open") && refused.contains("diskwright snapshot db.vhdx"), "{refused}");
    let refused = place.fails_with(2, "diff a.vhdx db.vhdx");
    assert!(refused.contains("db.vhdx: ") && refused.contains("freeze it first"), "{refused}");
    assert_eq!(place.shop.run("diff a.vhdx db_second.avhdx").code, Some(1));
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    place.shop.ok("io db.vhdx -c 'read -P 3 0 1M'");
    place.shop.ok("check db.vhdx a.vhdx b.vhdx c.vhdx");
}

#[test]
fn a_disk_is_limited_while_it_is_served() {
    let place = Place::with(&["db.vhdx", "log.vhd"]);
    for (line, part) in [
        ("serve db.vhdx --limit iops=0", "leave it out"),
        ("serve db.vhdx --client-limit 500", "KEY=VALUE"),
        ("serve-ctl db.vhdx limit mbps=1", "there are iops, bytes"),
    ] {
        let (code, _, errors) = place.run(line);
        assert!(code == Some(2) && errors.contains(part), "{line}: {code:?} {errors}");
    }
    let line = "db.vhdx log.vhd --nbd ./s --limit iops=50,iops-burst=1 --client-limit iops=1000000";
    let Some(server) = place.serve(line) else { return };
    let reads = |name: &str, count: usize| {
        let uri = NbdUri::parse(&server.uri(name)).unwrap();
        let mut disk = Blocking::open(&NbdDevice::open(&uri, true).unwrap(), EngineKind::Auto).unwrap();
        let began = Instant::now();
        (0..count).for_each(|_| disk.read(0, &mut [0; 4096]).unwrap());
        began.elapsed()
    };
    let took = reads("db.vhdx", 11);
    assert!(took >= Duration::from_millis(200), "{took:?}");
    let said = place.json("serve-ctl db.vhdx statistics");
    // On a busy machine a read may come so late that it need not wait.
    let delayed = said["delayed_requests"].as_u64().unwrap();
    assert!(said["limits"]["iops"] == 50 && (1..=10).contains(&delayed), "{said}");
    let text = place.ok("serve-ctl db.vhdx statistics");
    let words = format!("limited to 50 requests per second (bursts of 1); {delayed} requests had to wait");
    assert!(text.contains(&words), "{text}");
    assert_eq!(place.ok("serve-ctl db.vhdx limit none"), "db.vhdx: no limit\n");
    reads("db.vhdx", 2000);
    let said = place.json("serve-ctl db.vhdx statistics");
    assert_eq!((&said["limits"], &said["delayed_requests"]), (&serde_json::Value::Null, &delayed.into()), "{said}");
    let said = place.json("serve-ctl db.vhdx limit bytes=64K,bytes-burst=4K");
    assert_eq!((&said["limits"]["bytes_per_second"], &said["limits"]["burst_bytes"]), (&65536.into(), &4096.into()));
    let took = reads("db.vhdx", 6);
    assert!(took >= Duration::from_millis(250), "{took:?}");
    assert_eq!(place.json("serve-ctl log.vhd statistics")["limits"]["iops"], 50, "the other disk keeps its own");
}

#[test]
fn a_server_takes_its_disks_and_limits_from_a_file() {
    let place = Place::with(&["db.vhdx", "log.vhd"]);
    let file = place.shop.path("serve.toml");
    let config = |limit: &str, threads: u32| {
        let text = format!(
            "nbd = './s'\nthreads = {threads}\nlimit = 'iops=1000'\n\n[[disk]]\nname = 'data'\nfile = 'db.vhdx'\nlimit = '{limit}'\n\n[[disk]]\nfile = 'log.vhd'\nread-only = true\n"
        );
        fs::write(&file, text).unwrap();
    };
    for (text, part) in [
        ("nbd = './s'\n", "names no disk"),
        ("[[disk]]\nfile = 'db.vhdx'\nsize = '1G'\n", "unknown field `size`"),
        ("port = 5\n[[disk]]\nfile = 'db.vhdx'\n", "unknown key \"port\""),
    ] {
        fs::write(&file, text).unwrap();
        let error = place.fails("serve --config serve.toml");
        assert!(error.contains("configuration serve.toml: ") && error.contains(part), "{error}");
    }
    assert!(place.fails("serve --config none.toml").contains("configuration none.toml: cannot be read"));
    let (code, _, errors) = place.run("serve db.vhdx --config serve.toml");
    assert!(code == Some(2) && errors.contains("cannot be used with"), "{errors}");
    config("bytes=1M", 1);
    let Some(server) = place.serve("--config serve.toml") else { return };
    let limits = |place: &Place| place.json("serve-ctl data statistics")["limits"].clone();
    assert_eq!((&limits(&place)["bytes_per_second"], &limits(&place)["iops"]), (&(1 << 20).into(), &0.into()));
    let refused = place.shop.run(&format!("io '{}' -c 'write 0 4k'", server.uri("log.vhd")));
    assert!(refused.code == Some(1), "{}", refused.stderr);
    place.shop.ok(&format!("io '{}' -c 'write 0 4k'", server.uri("data")));
    // SIGHUP replaces the limits; a mistake changes nothing.
    if hears_hangups() {
        config("iops=7", 2);
        server.signal(Signal::SIGHUP);
        server.wait_for_log("of these needs a restart: threads");
        assert_eq!(limits(&place)["iops"], 7);
        fs::write(&file, "nonsense").unwrap();
        server.signal(Signal::SIGHUP);
        server.wait_for_log("configuration not reloaded");
        assert_eq!(limits(&place)["iops"], 7);
    }
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}
