//! A guest works on a disk that we serve, while the disk is changed under it: it writes, deletes
//! and trims files; meanwhile the disk is frozen, enlarged, merged, compacted and moved. Afterwards
//! the file system is clean, and every file holds what the guest wrote.

use crate::control::Place;
use crate::guest_machine::{Guest, HOST, find};
use nix::sys::signal::Signal;
use std::{
    collections::BTreeMap,
    net::TcpListener,
    panic::AssertUnwindSafe,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// A virtio network card, NBD, ext4.
const MODULES: [&str; 6] = ["virtio_pci", "virtio_net", "nbd", "crc32c_generic", "crc32c_intel", "ext4"];

/// How long the guest may take until it writes, also when its kernel is started a second time. The
/// whole test takes 26 s on a quiet machine.
const PATIENCE: Duration = Duration::from_secs(300);
/// The next operation begins after so many more writes, or after this time.
const WRITES_BETWEEN: u64 = 40;
const TIME_BETWEEN: Duration = Duration::from_secs(6);

/// What is done to the disk while the guest works, as the user types it; and its file afterwards.
const OPERATIONS: [(&str, &str); 7] = [
    ("snapshot disk.vhdx --name first", "disk.vhdx"),
    ("resize disk.vhdx +64M", "disk.vhdx"),
    ("snapshot disk.vhdx --name second", "disk.vhdx"),
    ("merge disk_second.avhdx", "disk.vhdx"),
    ("snapshot delete disk_first.avhdx", "disk.vhdx"),
    ("compact disk.vhdx", "disk.vhdx"),
    ("move disk.vhdx moved.vhdx", "moved.vhdx"),
];

/// The guest connects to the first port when it begins to work. It keeps at most sixteen files, and
/// goes on until this machine listens at the second port. Its `nc` waits without end for a server
/// that has not accepted, hence the limit of time.
fn script(disk_port: u16, start_port: u16, stop_port: u16) -> String {
    format!(
        "/programs/nbd-client -N disk.vhdx -C 2 -b 512 {HOST} {disk_port} /dev/nbd0 >/tmp/nbd.log 2>&1 || {{ cat /tmp/nbd.log; false; }}\n\
         /programs/mke2fs -q -t ext4 -b 4096 /dev/nbd0\n\
         mount -t ext4 /dev/nbd0 /mnt\n\
         timeout 20 nc -w 1 {HOST} {start_port} </dev/null >/dev/null 2>&1 || true\n\
         i=0\n\
         until [ $i -gt 4 ] && timeout 20 nc -w 1 {HOST} {stop_port} </dev/null >/dev/null 2>&1; do\n\
           dd if=/dev/urandom of=/mnt/f$((i%16)) bs=4097 count=$((i%7*60+1)) 2>/dev/null\n\
           [ $((i%3)) -ne 2 ] || sync\n\
           [ $((i%5)) -ne 4 ] || {{ rm -f /mnt/f$(((i+3)%16)); fstrim /mnt; }}\n\
           i=$((i+1))\n\
         done\n\
         sync\n\
         cd /mnt; find . -type f | sort | xargs sha256sum | sed 's/^/GUEST: sum /'; cd /\n\
         echo GUEST: rounds $i\n\
         umount /mnt\n\
         /programs/nbd-client -d /dev/nbd0 >/dev/null\n"
    )
}

#[test]
fn a_guest_works_on_while_its_disk_is_changed() {
    let Some(guest) = Guest::new(&MODULES, &["nbd-client", "mke2fs"]) else { return };
    for program in ["e2fsck", "debugfs", "sha256sum"] {
        if find(program).is_none() {
            println!("skipped: a guest: {program} is not installed");
            return;
        }
    }
    let place = Place::with(&[]);
    place.ok("create disk.vhdx --size 128M");
    let free_port = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (disk_port, stop_port) = (free_port(), free_port());
    let Some(server) = place.serve(&format!("disk.vhdx --nbd 127.0.0.1:{disk_port} --insecure-writes")) else {
        return;
    };
    // The writes of mke2fs are none of the guest's work.
    let start = TcpListener::bind("127.0.0.1:0").unwrap();
    start.set_nonblocking(true).unwrap();
    let script = script(disk_port, start.local_addr().unwrap().port(), stop_port);
    let console = thread::scope(|scope| {
        let works = scope.spawn(|| guest.run(&script));
        // A panic here must not leave the guest at work until its time is over.
        let changed = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let writes = |file: &str| {
                let statistics = place.json(&format!("serve-ctl {file} statistics"));
                let commands = statistics["traffic"]["commands"].as_array().unwrap();
                let writes = commands.iter().find(|command| command["command"] == "write");
                writes.map_or(0, |write| write["requests"].as_u64().unwrap())
            };
            let goes_on = |file: &str, patience: Duration| {
                let (from, begun) = (writes(file), Instant::now());
                while writes(file) < from + WRITES_BETWEEN && !works.is_finished() && begun.elapsed() < patience {
                    thread::sleep(Duration::from_millis(50));
                }
            };
            let begun = Instant::now();
            while start.accept().is_err() && !works.is_finished() {
                assert!(begun.elapsed() < PATIENCE, "the guest did not begin to work within {PATIENCE:?}");
                thread::sleep(Duration::from_millis(50));
            }
            goes_on("disk.vhdx", TIME_BETWEEN);
            for (operation, file) in OPERATIONS.iter().filter(|_| !works.is_finished()) {
                let begun = Instant::now();
                place.ok(operation);
                println!("{operation}: {:?}", begun.elapsed());
                goes_on(file, TIME_BETWEEN);
            }
        }));
        // The guest stops when it is let in.
        let stop = TcpListener::bind(("127.0.0.1", stop_port)).unwrap();
        stop.set_nonblocking(true).unwrap();
        while !works.is_finished() {
            drop(stop.accept());
            thread::sleep(Duration::from_millis(50));
        }
        let console = works.join().unwrap();
        changed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        console
    });
    let Some(console) = console else { return };
    println!("{console}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    let said = |word: &str| -> Vec<Vec<String>> {
        let lines = console.lines().filter_map(|line| line.split_once("GUEST: ")?.1.strip_prefix(word));
        lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
    };
    println!("{} rounds in the guest", said("rounds")[0][0]);
    let sums: BTreeMap<String, String> =
        said("sum").into_iter().map(|words| (words[1].clone(), words[0].clone())).collect();
    assert!(sums.len() > 2, "{console}");
    place.ok("check moved.vhdx");
    place.ok("convert moved.vhdx disk.raw");
    let raw = place.shop.path("disk.raw");
    tool("e2fsck", &["-fn"], &raw);
    for (name, sum) in &sums {
        let copy = place.shop.path("copy");
        tool("debugfs", &["-R", &format!("dump {} {}", name.trim_start_matches('.'), copy.display())], &raw);
        let output = Command::new("sha256sum").arg(&copy).output().unwrap();
        let found = String::from_utf8_lossy(&output.stdout);
        assert_eq!(found.split_whitespace().next(), Some(sum.as_str()), "{name} differs");
        std::fs::remove_file(&copy).unwrap();
    }
}

#[track_caller]
fn tool(name: &str, args: &[&str], file: &Path) {
    let output = Command::new(find(name).unwrap()).args(args).arg(file).output().unwrap();
    assert!(output.status.success(), "{name} {args:?}: {output:?}");
}
