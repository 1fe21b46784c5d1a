//! Disks whose program is killed again and again, and those who write to them meanwhile.

#![allow(dead_code, reason = "each test file uses its own part")]

use crate::common::{Ended, Running, Workshop};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_image::{DiskType, Format};
use diskwright_proving::{
    dice::Dice,
    ledger::{PARENT, Version},
    player::{Player, Told, share_out},
};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    io,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

pub const PLAYERS: u64 = 3;
const SIZE_BYTES: u64 = 64 << 20;
/// How long something may take that another process does.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

/// How often each program is killed, and with which seed that begins.
pub fn rounds(default: u64) -> std::ops::Range<u64> {
    let first = number("DISKWRIGHT_KILL_SEED", 1);
    first..first + number("DISKWRIGHT_KILL_ROUNDS", default)
}

#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    pub format: Format,
    pub disk_type: DiskType,
    pub block_bytes: u64,
}

const fn kind(name: &'static str, format: Format, disk_type: DiskType, block_bytes: u64) -> Kind {
    Kind { name, format, disk_type, block_bytes }
}

pub const KINDS: [Kind; 5] = [
    kind("raw", Format::Raw, DiskType::Fixed, 64 << 10),
    kind("vhd-dynamic", Format::Vhd, DiskType::Dynamic, 512 << 10),
    kind("vhd-differencing", Format::Vhd, DiskType::Differencing, 256 << 10),
    kind("vhdx-dynamic", Format::Vhdx, DiskType::Dynamic, 1 << 20),
    kind("vhdx-differencing", Format::Vhdx, DiskType::Differencing, 1 << 20),
];

/// What the parent of a child holds: something in every other 4 KiB.
pub fn untouched(kind: Kind, sector: u64) -> Version {
    if kind.disk_type == DiskType::Differencing && (sector / 8).is_multiple_of(2) { PARENT } else { 0 }
}

/// A disk, and those who write to it.
pub struct Victim {
    pub kind: Kind,
    pub path: PathBuf,
    pub players: Vec<Player>,
}

impl Victim {
    /// A new disk in a folder.
    pub fn new(dir: &Path, kind: Kind, seed: u64) -> Self {
        let path = dir.join(format!("disk.{}", kind.format));
        let windows = share_out(PLAYERS, kind.block_bytes / 512, &[0, 1, 7, 31], 40);
        let has_blocks = kind.format != Format::Raw;
        let block_bytes = has_blocks.then_some(kind.block_bytes as u32);
        let new = |path: &Path, parent: Option<PathBuf>, disk_type| {
            let size_bytes = parent.is_none().then_some(SIZE_BYTES);
            let request = CreateRequest {
                size_bytes,
                parent,
                block_bytes,
                disk_type: Some(disk_type),
                ..CreateRequest::default()
            };
            create(path, &request).unwrap();
        };
        if kind.disk_type == DiskType::Differencing {
            let parent = dir.join(format!("parent.{}", kind.format));
            new(&parent, None, DiskType::Dynamic);
            let disk = Disk::open(&parent, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
            let mut queue = Blocking::open(&*disk, EngineKind::Auto).unwrap();
            for window in windows.iter().flatten() {
                for sector in (window.first..window.first + window.count).filter(|&sector| untouched(kind, sector) != 0)
                {
                    let mut bytes = [0; 512];
                    diskwright_proving::ledger::stamp(&mut bytes, sector, PARENT);
                    queue.write(sector * 512, &bytes, false).unwrap();
                }
            }
            drop(queue);
            disk.close().unwrap();
            drop(disk);
            new(&path, Some(parent), kind.disk_type);
        } else {
            new(&path, None, kind.disk_type);
        }
        let player = |(number, windows): (u64, &Vec<_>)| {
            Player::new(windows, |sector| untouched(kind, sector), seed << 8 | number)
        };
        let players = (0..).zip(&windows).map(player).collect();
        Self { kind, path, players }
    }

    /// All play on devices of their own; `end` is called when `target` requests have been
    /// acknowledged, and must end the play. Returns how many were.
    pub fn play(
        &mut self,
        target: u64,
        open: &(dyn Fn() -> io::Result<Box<dyn BlockDevice>> + Sync),
        end: impl FnOnce(&AtomicBool),
    ) -> u64 {
        let (acknowledged, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let playing = AtomicU64::new(self.players.len() as u64);
        thread::scope(|scope| {
            for player in &mut self.players {
                let (acknowledged, stop, playing) = (&acknowledged, &stop, &playing);
                scope.spawn(move || {
                    let mut goes_on = |told: Told, _: &_| {
                        if let Told::After(done) = told {
                            acknowledged.fetch_add(done, Ordering::Relaxed);
                        }
                        !stop.load(Ordering::Relaxed)
                    };
                    // It is taken from under them.
                    let _ = open().and_then(|device| player.play(&*device, EngineKind::Auto, &mut goes_on));
                    playing.fetch_sub(1, Ordering::Relaxed);
                });
            }
            let start = Instant::now();
            while acknowledged.load(Ordering::Relaxed) < target && start.elapsed() < PATIENCE {
                assert!(playing.load(Ordering::Relaxed) > 0, "the device failed before anybody was killed");
                thread::sleep(Duration::from_micros(200));
            }
            end(&stop);
        });
        acknowledged.into_inner()
    }

    /// What is there now: sound, and nothing that was flushed is lost; without a kill, nothing at
    /// all.
    pub fn judge(&mut self, shop: &Workshop, after_kill: bool) {
        let name = self.kind.name;
        let checked = check(shop, &self.path);
        // A close gives back what its own session left over, not what a kill did; that is done by
        // the next allocation.
        let sound = [Some(0), Some(3)];
        assert!(sound.contains(&checked.code), "{name}: {checked:?}");
        let disk = Disk::open(&self.path, &OpenOptions::default()).unwrap_or_else(|error| panic!("{name}: {error}"));
        for (number, player) in self.players.iter_mut().enumerate() {
            if let Err(error) = player.look(&*disk, EngineKind::Auto, after_kill) {
                panic!("{name}, player {number}: {error}");
            }
        }
    }
}

/// Starts serving a disk; with `wait`, until it can be connected to.
pub fn serve(shop: &Workshop, disk: &Path, wait: bool) -> Running {
    let socket = shop.path("sock");
    // That of one that was killed may still take connections, which would look like those of the
    // new one.
    let _ = std::fs::remove_file(&socket);
    let file = format!("d={}", disk.display());
    let mut command = shop.command(&["serve", &file, "--nbd", "unix:sock", "--quiet"]);
    let mut child = Running::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
    let start = Instant::now();
    while wait && std::os::unix::net::UnixStream::connect(&socket).is_err() {
        assert!(child.try_wait().unwrap().is_none(), "it does not serve {}", disk.display());
        assert!(start.elapsed() < PATIENCE, "it does not listen");
        thread::sleep(Duration::from_millis(1));
    }
    child
}

/// Checks a disk as soon as nobody has it: the kernel lets go of the files of a killed io_uring a
/// moment after the process has gone.
pub fn check(shop: &Workshop, disk: &Path) -> Ended {
    let start = Instant::now();
    loop {
        let checked = shop.run(&format!("check {}", disk.display()));
        if !checked.stderr.contains("it is in use") || start.elapsed() > PATIENCE {
            return checked;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Kills a program of ours, and sees it dead.
pub fn kill_now(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Now, mostly soon, sometimes a while later.
pub fn linger(dice: &mut Dice) {
    let most_us = if dice.percent(80) { 2_000 } else { 20_000 };
    thread::sleep(Duration::from_micros(dice.below(most_us)));
}
