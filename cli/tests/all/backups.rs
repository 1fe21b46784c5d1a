//! Incremental backups of a disk that is served and written: a full one, then ten increments, each
//! of the ranges that libnbd reads from the metadata context of the last point. Between them the
//! server is killed, and qemu-io writes to the disk. What is restored is the disk.

use crate::control::Place;
use crate::serving::{Serving, program, wait_until};
use diskwright_disk::{Disk, OpenOptions};
use diskwright_nbd::{NbdDevice, NbdUri};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use nix::sys::signal::Signal;
use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

const MIB: usize = 1 << 20;
const SIZE: usize = 64 * MIB;

fn client(uri: &str) -> Blocking {
    let device = NbdDevice::open(&NbdUri::parse(uri).unwrap(), true).unwrap();
    Blocking::open(&device, EngineKind::Auto).unwrap()
}

/// Writes, zeroes and discards at random places, until it is stopped or the server is gone.
fn load(uri: &str, seed: u64, stop: &AtomicBool) {
    let mut io = client(uri);
    let mut number = seed;
    while !stop.load(Ordering::Relaxed) {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = (number >> 33) % (SIZE as u64 / 4096) * 4096;
        let done: io::Result<()> = match number >> 60 {
            0 => io.discard(at, 4096),
            1 => io.write_zeroes(at, 4096),
            2 => io.flush(),
            _ => io.write(at, &[(number >> 50) as u8; 4096], false),
        };
        if done.is_err() {
            return;
        }
    }
}

/// The backup, and the point since which the next increment is.
struct Backup {
    copy: Vec<u8>,
    point: u32,
    read_bytes: Vec<usize>,
}

impl Backup {
    /// Starts a new point, and copies what has changed since the last one.
    fn step(&mut self, place: &Place, uri: &str) -> Option<()> {
        let (last, next) = (format!("p{}", self.point), format!("p{}", self.point + 1));
        place.ok(&format!("track start vm.vhdx {next}"));
        let map = format!("--map=qemu:dirty-bitmap:{last}");
        let output = program(&place.shop, "nbdinfo", &["--json", &map, uri])?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let map: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let mut io = client(uri);
        let mut read_bytes = 0;
        for run in map.as_array().unwrap().iter().filter(|run| run["type"] == 1) {
            let [start, len] = ["offset", "length"].map(|field| run[field].as_u64().unwrap() as usize);
            io.read(start as u64, &mut self.copy[start..start + len]).unwrap();
            read_bytes += len;
        }
        place.ok(&format!("track stop vm.vhdx {last}"));
        self.point += 1;
        self.read_bytes.push(read_bytes);
        Some(())
    }
}

#[test]
fn ten_increments_of_a_served_disk_restore_it() {
    let place = Place::with(&["vm.vhdx"]);
    let path = place.shop.path("vm.vhdx");
    let Some(mut server) = place.serve("vm=vm.vhdx --nbd ./s0") else { return };
    if program(&place.shop, "nbdinfo", &["--version"]).is_none() {
        return;
    }
    place.shop.ok(&format!("io '{}' -c 'write -P 1 0 8M' -c flush", server.uri("vm")));
    place.ok("track start vm.vhdx p0");
    let mut backup = Backup { copy: vec![0; SIZE], point: 0, read_bytes: Vec::new() };
    client(&server.uri("vm")).read(0, &mut backup.copy).unwrap();
    // Each server ends in its own way after its increments.
    for (number, (increments, end)) in
        [(3, Signal::SIGKILL), (2, Signal::SIGTERM), (3, Signal::SIGKILL), (2, Signal::SIGTERM)].into_iter().enumerate()
    {
        let (uri, stop) = (server.uri("vm"), AtomicBool::new(false));
        let is_last = number == 3;
        let done = thread::scope(|scope| {
            scope.spawn(|| load(&uri, number as u64 + 1, &stop));
            let all: Option<()> = (0..increments).try_for_each(|_| {
                thread::sleep(std::time::Duration::from_millis(60));
                backup.step(&place, &uri)
            });
            if end == Signal::SIGTERM {
                stop.store(true, Ordering::Relaxed);
            } else {
                // Requests are in flight.
                server.signal(end);
            }
            all
        });
        if done.is_none() {
            return;
        }
        if is_last {
            // Nobody writes any more.
            backup.step(&place, &uri);
        }
        end_of(server, end, &place);
        if is_last {
            break;
        }
        if number == 1 {
            // Another program writes: everything has changed, and the next increment reads it.
            let Some(written) = program(&place.shop, "qemu-io", &["-f", "vhdx", "-c", "write -P 9 30M 3M", "vm.vhdx"])
            else {
                return;
            };
            assert!(written.status.success(), "{written:?}");
        }
        server = place.serve(&format!("vm=vm.vhdx --nbd ./s{}", number + 1)).unwrap();
        if number == 1 {
            let told = place.json(&format!("track show vm.vhdx p{}", backup.point));
            assert!(told["everything_because"].is_string(), "{told}");
        }
    }
    println!("bytes of each increment: {:?}", backup.read_bytes);
    assert_eq!(backup.read_bytes.len(), 11);
    assert_eq!(backup.read_bytes[5], SIZE, "after another program everything was read");
    // How much is written between two of them depends on the machine.
    assert!(backup.read_bytes.iter().any(|bytes| *bytes < SIZE / 2), "an increment reads what has changed");
    let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
    let mut whole = vec![0; SIZE];
    assert_eq!(disk.geometry().size_bytes, SIZE as u64);
    Blocking::open(&*disk, EngineKind::Auto).unwrap().read(0, &mut whole).unwrap();
    let differs = whole.chunks(4096).zip(backup.copy.chunks(4096)).position(|(one, other)| one != other);
    assert_eq!(differs, None, "the increments are not the disk, by pages of 4 KiB");
}

fn end_of(server: Serving, end: Signal, place: &Place) {
    if end == Signal::SIGTERM {
        assert_eq!(server.stop(end), Some(0));
    } else {
        server.wait();
        wait_until("the kernel has closed its files", || place.run("io vm.vhdx -c flush").0 == Some(0));
    }
}
