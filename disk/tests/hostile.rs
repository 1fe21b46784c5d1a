//! Thousands of random damages to images of every type, in a process with limited memory. No open
//! may panic, hang, or allocate memory sized by a header's claim. Reads must not change the file,
//! and an image without findings must be readable to its end.

mod damage;

use damage::*;
use diskwright_disk::{ChainScope, Disk, OpenOptions};
use diskwright_image::{Format, Severity};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};
use tempfile::tempdir;

/// Set in the child process that runs the test.
const INNER: &str = "DISKWRIGHT_HOSTILE_SEED";
const ROUNDS_PER_SAMPLE: u32 = 300;
/// Address space of the child process in KiB: stacks, libraries, and a few copies of an image.
const LIMIT_KIB: u32 = 768 << 10;
/// After this time the child process counts as hanging.
const PATIENCE: Duration = Duration::from_secs(300);

fn below(random: &mut Xoshiro256PlusPlus, limit: usize) -> usize {
    (random.next_u64() % limit.max(1) as u64) as usize
}

/// The structures of a format: (offset, length).
fn places(sample: &Sample) -> Vec<(usize, usize)> {
    let len = sample.bytes.len();
    match sample.format {
        Format::Vhd => {
            vec![(0, 96), (len - 512, 96), (512, 64), (512 + 576, 96), (4096, 128), (0, 8192.min(len)), (0, len)]
        }
        Format::Vhdx => vec![
            (0, 600),
            (HEADERS[0], 96),
            (HEADERS[1], 96),
            (REGION_TABLES[0], 128),
            (REGION_TABLES[1], 128),
            (LOG, 256),
            (LOG, 12 * KIB),
            (METADATA, 256),
            (FILE_PARAMETERS, 512),
            (BAT, 128),
            (BITMAP_ENTRY, 32),
            (BITMAP_ENTRY, 8),
            (0, len),
        ],
        _ => vec![(0, len)],
    }
}

/// A typical hostile value: single bits, powers of two and their neighbours, sums that overflow.
fn value(random: &mut Xoshiro256PlusPlus) -> u64 {
    let power = 1_u64 << (random.next_u64() % 64);
    match random.next_u64() % 8 {
        0 => 0,
        1 => u64::MAX,
        2 => power,
        3 => power.wrapping_sub(1),
        4 => power.wrapping_neg(),
        5 => random.next_u64() % 64,
        6 => ((random.next_u64() % 32) << 20) | (random.next_u64() % 8),
        _ => random.next_u64(),
    }
}

fn mutate(random: &mut Xoshiro256PlusPlus, sample: &Sample, bytes: &mut Vec<u8>) {
    let places = places(sample);
    for _ in 0..1 + random.next_u64() % 3 {
        let (start, len) = places[below(random, places.len())];
        let width = 1 << (random.next_u64() % 4);
        // Nearly all fields lie at multiples of their width.
        let at = start + below(random, len) / width * width;
        let value = value(random);
        let raw = if sample.format == Format::Vhd { value.to_be_bytes() } else { value.to_le_bytes() };
        let from = if sample.format == Format::Vhd { 8 - width } else { 0 };
        match bytes.get_mut(at..at + width) {
            Some(field) if below(random, 4) > 0 => field.copy_from_slice(&raw[from..from + width]),
            Some(field) => field[0] ^= 1 << (random.next_u64() % 8),
            None => {}
        }
    }
    if below(random, 8) == 0 {
        let len = bytes.len();
        match random.next_u64() % 3 {
            0 => bytes.truncate(below(random, len)),
            1 => bytes.truncate(len - below(random, 4096).min(len)),
            _ => bytes.resize(len + below(random, 2 * MIB), random.next_u64() as u8),
        }
    }
    if below(random, 8) > 0 {
        reseal(bytes, sample.format);
    }
}

/// Writes at several offsets. All may fail, none may panic.
fn scribble(path: &Path) {
    let options = OpenOptions { writable: true, allow_parent_write: true, ..OpenOptions::default() };
    let Ok(disk) = Disk::open(path, &options) else { return };
    let size = disk.geometry().size_bytes;
    let sector = u64::from(disk.geometry().logical_sector_bytes);
    if let Ok(mut io) = Blocking::open(&*disk, EngineKind::Sync) {
        for at in [0, size / 3, size / 2, size.saturating_sub(8192)] {
            let at = at / sector * sector;
            let len = (size - at).min(8192) / sector * sector;
            let _ = io.write(at, &vec![5; len as usize], false);
        }
        let _ = io.discard(0, size.min(3 << 20) / sector * sector);
        let _ = io.write_zeroes(size / 2 / sector * sector, sector);
        let _ = io.flush();
    }
    let _ = disk.close();
}

fn one_round(random: &mut Xoshiro256PlusPlus, sample: &Sample) {
    let mut bytes = sample.bytes.clone();
    mutate(random, sample, &mut bytes);
    let file = std::fs::OpenOptions::new().write(true).open(&sample.path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    // Only the differences are written, as the files are large and the damage is small.
    for (index, piece) in bytes.chunks(4096).enumerate() {
        let at = index * 4096;
        if sample.bytes.get(at..at + piece.len()) != Some(piece) {
            file.write_all_at(piece, at as u64).unwrap();
        }
    }
    let with_parents = read_all(&sample.path, &OpenOptions::default());
    let alone = OpenOptions { scope: ChainScope::Top, ..OpenOptions::default() };
    let alone = if with_parents.is_ok() { Ok(Vec::new()) } else { read_all(&sample.path, &alone) };
    let checked = check(&sample.path, sample.format);
    let sound = checked.as_ref().is_ok_and(|report| report.worst() < Some(Severity::Corrupt));
    if let (true, Err(error)) = (sound, &alone)
        // A limit of this program, not damage of the file; or a limit that the image cannot know.
        && !error.contains("with a size of")
    {
        panic!("{}: the check finds no damage ({checked:?}), but: {error}", sample.name);
    }
    for error in [with_parents.err(), alone.err(), checked.err()].into_iter().flatten() {
        assert!(
            error.contains(&*sample.path.to_string_lossy()) || error.contains("parent.vhd"),
            "the error names no file: {error}"
        );
    }
    assert!(std::fs::read(&sample.path).unwrap() == bytes, "{}: reading has changed the file", sample.name);
    if below(random, 3) == 0 {
        scribble(&sample.path);
    }
    drop(file);
    std::fs::write(&sample.path, &sample.bytes).unwrap();
}

fn inner(seed: u64) {
    // In memory if possible: there are thousands of flushes, whose durability does not matter.
    let shared = Path::new("/dev/shm");
    let dir = if shared.is_dir() { tempfile::tempdir_in(shared).unwrap() } else { tempdir().unwrap() };
    let samples = samples(dir.path());
    for (index, sample) in samples.iter().enumerate() {
        for round in 0..ROUNDS_PER_SAMPLE {
            let seed = seed << 32 | (index as u64) << 24 | u64::from(round);
            // If the process dies, the last line identifies the failing case.
            println!("{} round {round} seed {seed:#x}", sample.name);
            one_round(&mut Xoshiro256PlusPlus::seed_from_u64(seed), sample);
        }
    }
}

#[test]
fn random_damage_causes_no_panic_and_needs_little_memory() {
    if let Some(seed) = std::env::var(INNER).ok().and_then(|seed| seed.parse().ok()) {
        return inner(seed);
    }
    let dir = tempdir().unwrap();
    let log = dir.path().join("log");
    let output = std::fs::File::create(&log).unwrap();
    let mut worker = Command::new("sh")
        .args([
            "-c",
            &format!(
                "ulimit -v {LIMIT_KIB}; exec \"$0\" --exact random_damage_causes_no_panic_and_needs_little_memory --nocapture"
            ),
        ])
        .arg(std::env::current_exe().unwrap())
        .env(INNER, "1")
        .env("RUST_BACKTRACE", "0")
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .spawn()
        .unwrap();
    let start = Instant::now();
    let status = loop {
        match worker.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if start.elapsed() > PATIENCE => {
                worker.kill().unwrap();
                worker.wait().unwrap();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    let told = std::fs::read_to_string(&log).unwrap();
    let last: Vec<&str> = told.lines().rev().take(8).collect();
    let last: Vec<&str> = last.into_iter().rev().collect();
    assert!(status.is_some_and(|status| status.success()), "{status:?}:\n{}", last.join("\n"));
}

#[test]
fn a_huge_claimed_size_costs_little_memory() {
    if std::env::var(INNER).is_ok() {
        return;
    }
    let dir = tempdir().unwrap();
    let samples = samples(dir.path());
    let child = samples.iter().find(|sample| sample.name == "diff.vhd").unwrap();
    let (path, parent) = (&child.path, dir.path().join("parent.vhd"));
    // A child of 2040 GiB in blocks of 2 GiB, over a parent in blocks of 512 bytes: four billion
    // units.
    let mut bytes = child.bytes.clone();
    in_footers(&mut bytes, 48, &(2040_u64 << 30).to_be_bytes());
    in_header(&mut bytes, 28, &1020_u32.to_be_bytes());
    in_header(&mut bytes, 32, &(1_u32 << 31).to_be_bytes());
    let table = get_u64_be(&bytes, 512 + 16) as usize;
    bytes[table..table + 4 * 1020].fill(0xff);
    std::fs::write(path, &bytes).unwrap();
    let mut bytes = std::fs::read(&parent).unwrap();
    let units = 16_u32;
    in_footers(&mut bytes, 48, &(u64::from(units) * 512).to_be_bytes());
    in_header(&mut bytes, 28, &units.to_be_bytes());
    in_header(&mut bytes, 32, &512_u32.to_be_bytes());
    std::fs::write(&parent, &bytes).unwrap();
    let kept = peak_kib();
    let disk = Disk::open(path, &OpenOptions::default()).unwrap();
    assert_eq!(disk.geometry().size_bytes, 2040 << 30);
    let mut found = [1; 4096];
    Blocking::open(&*disk, EngineKind::Sync).unwrap().read((2040 << 30) - 4096, &mut found).unwrap();
    assert_eq!(found, [0; 4096]);
    assert!(peak_kib() - kept < 64 << 10, "{} KiB", peak_kib() - kept);
}

/// Peak memory of this process in KiB.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
