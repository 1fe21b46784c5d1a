//! A long run of the real program: clients come, work and go, one stays; memory, open files and
//! latency stay where they were, and what was flushed is there at the end.
//!
//! `DISKWRIGHT_SOAK_SECONDS` says how long (some seconds in `./test`, an hour in
//! `./test --nightly`). Latency is judged only where the run is long enough for a median of many
//! minutes at each end.

mod common;
mod killing;

use common::Workshop;
use diskwright_nbd::{NbdDevice, NbdUri};
use diskwright_proving::player::Told;
use diskwright_store::{BlockDevice, EngineKind};
use killing::{KINDS, Victim, number, serve};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs,
    path::Path,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

/// Clients come and go so often.
const LAP: Duration = Duration::from_secs(2);
/// From this length on latency is judged.
const LONG: Duration = Duration::from_secs(600);

/// How a program is, while no client but one is connected.
#[derive(Debug, Clone, Copy)]
struct State {
    resident_kib: u64,
    files: usize,
    threads: usize,
    median: Duration,
    slowest: Duration,
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { resident_kib, files, threads, median, slowest } = self;
        write!(f, "{resident_kib} KiB, {files} files, {threads} threads, median {median:?}, slowest {slowest:?}")
    }
}

fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {status}"));
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Threads of its own: the kernel's workers of an io_uring, which stand among them, come and go.
fn threads_of(pid: u32) -> usize {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| !name.starts_with("iou-")).count()
}

fn state_of(pid: u32, mut latencies: Vec<Duration>) -> State {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    latencies.sort_unstable();
    State {
        resident_kib: field(&status, "VmRSS:"),
        files: fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(),
        threads: threads_of(pid),
        median: latencies[latencies.len() / 2],
        slowest: *latencies.last().unwrap(),
    }
}

/// Waits until no more than `files` are open: a server notices that a client has gone a moment
/// later. How many there are then.
fn settle(pid: u32, files: usize) -> usize {
    let start = Instant::now();
    loop {
        let now = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        if now <= files || start.elapsed() > Duration::from_secs(10) {
            return now;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// One lap: all players come, play for a while, and go. How long each batch or flush took.
fn lap(victim: &mut Victim, socket: &Path) -> Vec<Duration> {
    let latencies = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for player in &mut victim.players {
            let latencies = &latencies;
            scope.spawn(move || {
                let device = NbdDevice::open(&NbdUri::unix(socket, "d"), true).unwrap();
                let (end, mut began, mut mine) = (Instant::now() + LAP, Instant::now(), Vec::new());
                let mut goes_on = |told: Told, _: &_| {
                    match told {
                        Told::Before | Told::After(0) => began = Instant::now(),
                        Told::After(_) => mine.push(began.elapsed()),
                    }
                    Instant::now() < end
                };
                player.play(&device, EngineKind::Auto, &mut goes_on).unwrap();
                latencies.lock().unwrap().append(&mut mine);
            });
        }
    });
    latencies.into_inner().unwrap()
}

#[test]
fn nothing_grows() {
    let length = Duration::from_secs(number("DISKWRIGHT_SOAK_SECONDS", 8));
    let shop = Workshop::new();
    let mut victim = Victim::new(&shop.path(""), KINDS[4], 1);
    let socket = shop.path("sock");
    let mut server = serve(&shop, &victim.path, true);
    // One that stays, and says nothing.
    let idle = NbdDevice::open(&NbdUri::unix(&socket, "d"), false).unwrap();
    let start = Instant::now();
    // The first lap makes what is made once: rings, buffers, the map.
    let mut latencies = lap(&mut victim, &socket);
    thread::sleep(Duration::from_secs(1));
    let files = settle(server.id(), usize::MAX);
    let mut states = vec![state_of(server.id(), latencies)];
    while start.elapsed() < length {
        latencies = lap(&mut victim, &socket);
        settle(server.id(), files);
        states.push(state_of(server.id(), latencies));
        if states.len().is_multiple_of(150) {
            println!("soak: after {} s: {}", start.elapsed().as_secs(), states.last().unwrap());
        }
    }
    let (first, last) = (states[0], states[states.len() - 1]);
    println!("soak: {} s of {} laps: first {first}; last {last}", start.elapsed().as_secs(), states.len());
    assert!(last.files <= files, "open files grew from {files} to {}", last.files);
    assert!(last.threads <= first.threads, "threads grew: {first}; {last}");
    let allowed_kib = first.resident_kib + first.resident_kib / 10 + (8 << 10);
    assert!(last.resident_kib <= allowed_kib, "memory grew from {} to {} KiB", first.resident_kib, last.resident_kib);
    if length >= LONG {
        let median = |states: &[State]| {
            let mut medians: Vec<Duration> = states.iter().map(|state| state.median).collect();
            medians.sort_unstable();
            medians[medians.len() / 2]
        };
        let third = states.len() / 3;
        let (early, late) = (median(&states[..third]), median(&states[states.len() - third..]));
        assert!(
            late <= early * 3 / 2,
            "the median latency grew from {early:?} in the first third to {late:?} in the last"
        );
    }
    assert_eq!(idle.geometry().size_bytes, 64 << 20);
    drop(idle);
    kill(Pid::from_raw(server.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(server.wait().unwrap().code(), Some(0));
    victim.judge(&shop, false);
}
