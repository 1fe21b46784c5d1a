//! `serve-ctl`, and the commands that reach a disk in use by its control channel.

mod common;
mod serving;

use common::{Running, Workshop};
use nix::sys::signal::Signal;
use serving::{PATIENCE, Serving, program, wait_until};
use std::{
    fs,
    os::unix::net::UnixStream,
    process::{Command, Stdio},
    time::Instant,
};

/// A shop whose processes have a run-time folder of their own.
struct Place {
    shop: Workshop,
}

impl Place {
    fn with(names: &[&str]) -> Self {
        let shop = Workshop::new();
        for name in names {
            shop.ok(&format!("create {name} --size 64M"));
        }
        Self { shop }
    }

    fn run_dir(&self) -> String {
        self.shop.path("run").to_str().unwrap().to_owned()
    }

    fn command(&self, line: &str) -> Command {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut command = self.shop.command(&words);
        command.env("DISKWRIGHT_RUN_DIR", self.run_dir());
        command
    }

    fn serve(&self, line: &str) -> Option<Serving> {
        Serving::started(&self.shop, self.command(&format!("serve {line}")))
    }

    fn run(&self, line: &str) -> (Option<i32>, String, String) {
        let output = self.command(line).stdin(Stdio::null()).output().expect("diskwright starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let printed = text(&output.stdout);
        if line.contains("--json") && !printed.is_empty() {
            common::schemas::validate(&printed);
        }
        (output.status.code(), printed, text(&output.stderr))
    }

    #[track_caller]
    fn ok(&self, line: &str) -> String {
        let (code, printed, errors) = self.run(line);
        assert_eq!(code, Some(0), "`diskwright {line}` failed: {errors}");
        printed
    }

    #[track_caller]
    fn json(&self, line: &str) -> serde_json::Value {
        serde_json::from_str(&self.ok(&format!("{line} --json"))).expect("one JSON document")
    }

    #[track_caller]
    fn fails(&self, line: &str) -> String {
        let (code, _, errors) = self.run(line);
        assert_eq!(code, Some(1), "`diskwright {line}`: {errors}");
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
        "db.vhdx: would be enlarged from 64 MiB (67108864 bytes) to 128 MiB (134217728 bytes); nothing was changed\n"
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
