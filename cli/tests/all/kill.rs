//! `kill -9` of the real program, on real files, again and again: what was flushed is there, the
//! rest is old or new, `check` finds nothing corrupt, and work goes on with the same disk.
//!
//! `DISKWRIGHT_KILL_ROUNDS` says how often each is killed (`./test --nightly` asks for many),
//! `DISKWRIGHT_KILL_SEED` with which seed that begins. A seed chooses what is written and when the
//! program is killed, as far as the machine lets it.

use crate::attaching::Place;
use crate::common::{Running, Workshop};
use crate::killing::{KINDS, Kind, PATIENCE, PLAYERS, Victim, check, kill_now, linger, rounds, serve, untouched};
use diskwright_nbd::{NbdDevice, NbdUri};
use diskwright_proving::{
    dice::Dice,
    ledger::{Ledger, PARENT, Version, Window, stamp},
};
use diskwright_store::{BlockDevice, Blocking, CacheMode, EngineKind, RawDevice};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::Stdio,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

fn serve_and_kill(kind: Kind) {
    let rounds = rounds(6);
    let shop = Workshop::new();
    let mut victim = Victim::new(&shop.path(""), kind, rounds.start);
    let socket = shop.path("sock");
    let mut total = 0;
    for seed in rounds.clone() {
        let mut dice = Dice::new(seed, 0x0dea);
        // Sometimes before it has opened the disk, so while what the last one left is put right.
        if dice.percent(20) {
            let mut server = serve(&shop, &victim.path, false);
            linger(&mut dice);
            kill_now(&mut server);
            check(&shop, &victim.path);
        }
        let mut server = serve(&shop, &victim.path, true);
        let connect = || {
            let mut uri = NbdUri::unix(&socket, "d");
            uri.timeout = Some(PATIENCE);
            let device = NbdDevice::open(&uri, true).map_err(std::io::Error::other)?;
            Ok(Box::new(device) as Box<dyn BlockDevice>)
        };
        let target = dice.below(400);
        total += victim.play(target, &connect, |_| {
            linger(&mut dice);
            kill_now(&mut server);
        });
        println!("{}, seed {seed}: killed", kind.name);
        victim.judge(&shop, true);
    }
    // And a proper end.
    let mut server = serve(&shop, &victim.path, true);
    let connect = || Ok(Box::new(NbdDevice::open(&NbdUri::unix(&socket, "d"), true).unwrap()) as Box<dyn BlockDevice>);
    total += victim.play(100, &connect, |stop| stop.store(true, Ordering::Relaxed));
    kill(Pid::from_raw(server.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(server.wait().unwrap().code(), Some(0));
    victim.judge(&shop, false);
    println!(
        "kills: serve, {}: {} kills, {total} requests acknowledged to {PLAYERS} clients (seeds {rounds:?})",
        kind.name,
        rounds.end - rounds.start
    );
}

#[test]
fn raw_served() {
    serve_and_kill(KINDS[0]);
}

#[test]
fn vhd_dynamic_served() {
    serve_and_kill(KINDS[1]);
}

#[test]
fn vhd_differencing_served() {
    serve_and_kill(KINDS[2]);
}

#[test]
fn vhdx_dynamic_served() {
    serve_and_kill(KINDS[3]);
}

#[test]
fn vhdx_differencing_served() {
    serve_and_kill(KINDS[4]);
}

/// One line for `io`.
#[derive(Debug, Clone, Copy)]
enum Line {
    Flush,
    /// The byte is the version.
    Write {
        first: u64,
        count: u64,
        byte: u8,
        durable: bool,
    },
    Discard {
        first: u64,
        count: u64,
    },
}

impl Line {
    fn some(dice: &mut Dice, windows: &[Window], number: u64) -> Self {
        let window = *dice.pick(windows);
        let (first, count) = if dice.percent(8) {
            (window.first, window.count)
        } else {
            let first = dice.below(window.count);
            (window.first + first, (1 + dice.below(64)).min(window.count - first))
        };
        match dice.below(100) {
            0..15 => Self::Flush,
            15..22 => Self::Discard { first, count },
            22..29 => Self::Write { first, count, byte: 0, durable: dice.percent(10) },
            _ => Self::Write { first, count, byte: 1 + (number % 250) as u8, durable: dice.percent(10) },
        }
    }

    fn words(self) -> String {
        let at = |first: u64, count: u64| format!("{} {}", first * 512, count * 512);
        match self {
            Self::Flush => "flush".into(),
            Self::Write { first, count, byte, durable } => {
                let how = if byte == 0 { "-z".into() } else { format!("-P {byte}") };
                format!("write {how}{} {}", if durable { " -f" } else { "" }, at(first, count))
            }
            Self::Discard { first, count } => format!("discard {}", at(first, count)),
        }
    }

    /// Into the ledger: begun, and where `done` ended well.
    fn book(self, ledger: &mut Ledger, done: bool) {
        let (first, count, byte, durable) = match self {
            Self::Flush if done => return ledger.flushed(ledger.mark()),
            Self::Flush => return,
            Self::Write { first, count, byte, durable } => (first, count, byte, durable),
            Self::Discard { first, count } => (first, count, 0, false),
        };
        let announced = ledger.announce(first, count, byte.into());
        if done {
            ledger.acknowledge(announced, durable);
        }
    }
}

/// A byte all over a sector, as a version; what a parent holds is stamped already.
fn stamped(mut shown: Vec<u8>, window: Window) -> Vec<u8> {
    for (sector, bytes) in (window.first..).zip(shown.chunks_mut(512)) {
        let byte = bytes[0];
        if byte != 0 && bytes.iter().all(|&other| other == byte) {
            stamp(bytes, sector, byte.into());
        }
    }
    shown
}

/// Commands ahead of the answers.
const AHEAD: usize = 4;

fn io_and_kill(kind: Kind) {
    let rounds = rounds(5);
    let shop = Workshop::new();
    let victim = Victim::new(&shop.path(""), kind, rounds.start);
    let windows: Vec<Window> = victim.players.iter().flat_map(|player| player.ledger().windows().to_vec()).collect();
    let mut ledger = Ledger::new(&windows, |sector| untouched(kind, sector));
    let mut total = 0;
    for seed in rounds.clone() {
        let mut dice = Dice::new(seed, 0x10);
        let file = victim.path.display().to_string();
        let mut command = shop.command(&["io", &file]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = Running::start(command);
        let mut stdin = child.stdin.take().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap()).lines();
        let target = dice.below(60) as usize;
        let (mut lines, mut done): (Vec<Line>, usize) = (Vec::new(), 0);
        while done < target {
            while lines.len() < done + AHEAD {
                let line = Line::some(&mut dice, &windows, lines.len() as u64);
                lines.push(line);
                writeln!(stdin, "{}", line.words()).unwrap();
            }
            answers.next().unwrap().unwrap();
            done += 1;
        }
        linger(&mut dice);
        kill_now(&mut child);
        // Answers that were on their way.
        done += answers.map_while(Result::ok).count();
        total += done;
        for (number, line) in lines.iter().enumerate() {
            line.book(&mut ledger, number < done);
        }
        let checked = check(&shop, &victim.path);
        assert!([Some(0), Some(3)].contains(&checked.code), "{}, seed {seed}: {checked:?}", kind.name);
        let disk = diskwright_disk::Disk::open(&victim.path, &diskwright_disk::OpenOptions::default()).unwrap();
        let mut queue = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        let mut shown = Vec::new();
        for window in &windows {
            let mut bytes = vec![0; (window.count * 512) as usize];
            queue.read(window.first * 512, &mut bytes).unwrap();
            shown.push(stamped(bytes, *window));
        }
        match ledger.judge(&shown, true) {
            Ok(versions) => ledger = ledger.settled(versions),
            Err(error) => panic!("{}, seed {seed}, after {done} commands: {error}", kind.name),
        }
    }
    assert!(total > 0);
    println!(
        "kills: io, {}: {} kills, {total} commands answered (seeds {rounds:?})",
        kind.name,
        rounds.end - rounds.start
    );
}

#[test]
fn io_by_hand() {
    KINDS.into_iter().for_each(io_and_kill);
}

/// How long a command takes when it is let be; it must succeed.
fn time_of(shop: &Workshop, line: &str) -> Duration {
    let start = Instant::now();
    shop.ok(line);
    start.elapsed()
}

/// Starts a command and kills it within the time that it takes, or a little later.
fn kill_within(shop: &Workshop, dice: &mut Dice, line: &str, takes: Duration) {
    let words: Vec<&str> = line.split(' ').collect();
    let mut child = Running::start(shop.command(&words).stdout(Stdio::null()).stderr(Stdio::null()));
    thread::sleep(takes.mul_f64(dice.below(1100) as f64 / 1000.0));
    kill_now(&mut child);
}

#[test]
fn a_conversion_is_whole_or_not_there() {
    let shop = Workshop::new();
    shop.ok("create source.vhdx --size 256M --block-size 1M");
    shop.ok(
        "io source.vhdx -c 'write -P 1 0 20M' -c 'write -P 2 70M 10M' -c 'write -P 3 255M 1M' -c 'write -P 4 120M 512'",
    );
    let (rounds, mut there, mut partial) = (rounds(4), 0, 0);
    for copy in ["copy.raw", "copy.vhd", "copy.vhdx", "fixed.vhdx --type fixed"] {
        let line = format!("convert source.vhdx {copy}");
        let name = copy.split(' ').next().unwrap();
        let remove = || [name.to_owned(), format!("{name}.partial")].map(|name| std::fs::remove_file(shop.path(&name)));
        let takes = time_of(&shop, &line);
        let _ = remove();
        for seed in rounds.clone() {
            kill_within(&shop, &mut Dice::new(seed, 0xc0), &line, takes);
            if shop.path(name).exists() {
                there += 1;
                shop.ok(&format!("compare source.vhdx {name}"));
                shop.ok(&format!("check {name}"));
            }
            if shop.path(&format!("{name}.partial")).exists() {
                partial += 1;
                // The same command replaces what is left of an interrupted one.
                if shop.path(name).exists() {
                    let error = shop.fails(1, &line);
                    assert!(error.contains("exists"), "{error}");
                } else {
                    shop.ok(&line);
                    shop.ok(&format!("compare source.vhdx {name}"));
                }
            }
            let left: Vec<_> =
                std::fs::read_dir(shop.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            let known = |left: &str| left == "source.vhdx" || left.strip_suffix(".partial").unwrap_or(left) == name;
            assert!(left.iter().all(|left| known(left.to_str().unwrap())), "{left:?}");
            let _ = remove();
            shop.ok("check source.vhdx");
        }
        shop.ok(&line);
        shop.ok(&format!("compare source.vhdx {name}"));
        remove()[0].as_ref().unwrap();
    }
    println!(
        "kills: convert: {} kills, {there} copies whole, {partial} partial (seeds {rounds:?})",
        4 * (rounds.end - rounds.start)
    );
}

/// The same for a file that is written in one pass: under its name it is complete.
#[test]
fn a_stream_is_whole_or_not_there() {
    let shop = Workshop::new();
    shop.ok("create source.vhdx --size 256M");
    shop.ok("io source.vhdx -c 'write -P 1 0 60M' -c 'write -P 2 70M 90M' -c 'write -P 3 255M 1M'");
    let line = "convert source.vhdx copy.ova";
    let takes = time_of(&shop, line);
    let remove = || ["copy.ova", "copy.ova.partial"].map(|name| std::fs::remove_file(shop.path(name)));
    let _ = remove();
    for seed in rounds(6) {
        kill_within(&shop, &mut Dice::new(seed, 0x0a), line, takes);
        if shop.path("copy.ova").exists() {
            shop.ok("info copy.ova --verify");
        }
        let left: Vec<_> = std::fs::read_dir(shop.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        let known = |left: &str| matches!(left, "source.vhdx" | "copy.ova" | "copy.ova.partial");
        assert!(left.iter().all(|left| known(left.to_str().unwrap())), "{left:?}");
        let _ = remove();
    }
}

#[test]
fn a_creation_is_whole_or_passes_for_nothing() {
    let shop = Workshop::new();
    shop.ok("create parent.vhdx --size 64M");
    let (rounds, mut there, mut broken) = (rounds(8), 0, 0);
    let kinds = [
        "new.vhd --size 64M",
        "new.vhdx --size 2T",
        "new.vhdx --size 64M --type fixed",
        "new.vhdx --parent parent.vhdx",
    ];
    for new in kinds {
        let line = format!("create {new}");
        let name = new.split(' ').next().unwrap();
        let takes = time_of(&shop, &line);
        std::fs::remove_file(shop.path(name)).unwrap();
        for seed in rounds.clone() {
            kill_within(&shop, &mut Dice::new(seed, 0xc1), &line, takes);
            if !shop.path(name).exists() {
                continue;
            }
            if shop.run(&format!("info {name}")).code == Some(0) {
                there += 1;
                shop.ok(&format!("check {name}"));
                shop.ok(&format!(
                    "io {name} -c 'read -P 0 0 1M' -c 'write -P 5 3M 64k' -c flush -c 'read -P 5 3M 64k'"
                ));
            } else {
                broken += 1;
            }
            std::fs::remove_file(shop.path(name)).unwrap();
        }
        shop.ok(&line);
        std::fs::remove_file(shop.path(name)).unwrap();
    }
    shop.ok("check parent.vhdx");
    println!(
        "kills: create: {} kills, {there} disks whole, {broken} files that pass for nothing (seeds {rounds:?})",
        4 * (rounds.end - rounds.start)
    );
}

#[test]
fn attached_disks() {
    let Some(place) = Place::as_root(&[]) else { return };
    let shop = Workshop::new();
    for kind in [KINDS[3], KINDS[2]] {
        let rounds = rounds(2);
        let dir = place.dir(kind.name);
        let mut victim = Victim::new(Path::new(&dir), kind, rounds.start);
        let file = victim.path.strip_prefix(place.path("")).unwrap().display().to_string();
        let mut total = 0;
        for seed in rounds.clone() {
            let mut dice = Dice::new(seed, 0xa77);
            let device = place.attach(&file);
            let server = place.record(&file)["server"]["pid"].as_i64().unwrap();
            let open = || {
                let device = RawDevice::open(&device, true, CacheMode::Direct).map_err(std::io::Error::other)?;
                Ok(Box::new(device) as Box<dyn BlockDevice>)
            };
            total += victim.play(dice.below(200), &open, |_| {
                linger(&mut dice);
                kill(Pid::from_raw(server as i32), Signal::SIGKILL).unwrap();
            });
            place.wait_until("the supervisor has cleared away", || !place.record_exists_unlost(&file));
            place.run("attached");
            assert_eq!(place.attached(), 0);
            victim.judge(&shop, true);
        }
        println!(
            "kills: attach, {}: {} kills, {total} requests acknowledged (seeds {rounds:?})",
            kind.name,
            rounds.end - rounds.start
        );
    }
}

#[test]
fn the_parents_stamp_is_no_byte() {
    assert!(PARENT > Version::from(u8::MAX));
}
