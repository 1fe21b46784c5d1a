//! Rescuing a disk of whose block table a third is destroyed.
//!
//! ```text
//!   mke2fs -d ─▶ ext4 in one half, noise in the other ─▶ VHDX ─▶ every third entry overwritten
//!     │                                                     rescue ─▶ raw ─▶ compared
//!     └─ dumpe2fs ─▶ superblocks and inode tables in use: the blocks that can be placed
//! ```
//!
//! Three rescues, so that each entry is destroyed once. What a copy calls readable is compared with
//! what was written.

use diskwright_disk::{CreateRequest, Disk, OpenOptions, RangeKind, RescueOptions, create, rescue};
use diskwright_image::DiskType;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    peer,
    progress::{Progress, report},
};
use diskwright_load::data;
use diskwright_stats::numbers::bytes;
use diskwright_store::{Blocking, CacheMode, EngineKind};
use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

const BLOCK_BYTES: u64 = 2 << 20;
/// Offset of the block table in a VHDX that this program has made.
const TABLE_BYTES: usize = 3 << 20;
const FILE_SYSTEM_BLOCK_BYTES: u64 = 4096;
const INODE_BYTES: usize = 256;
/// Files in the file system, 50 in each folder.
const FILES: u64 = 4000;

/// Counts of all rescues.
#[derive(Default)]
struct Counts {
    lost: u64,
    placeable: u64,
    placed: u64,
    placed_of_placeable: u64,
    wrong: u64,
    blocks: u64,
}

pub(crate) fn placed(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    for (program, package) in [("mke2fs", "e2fsprogs"), ("dumpe2fs", "e2fsprogs")] {
        if peer::find(program).is_none() {
            return Ok(RowOutcome::skipped("rescue", peer::missing(program, package)));
        }
    }
    let half_bytes: u64 = context.pick(256 << 20, 512 << 20);
    let dir = context.scratch.folder("rescue")?;
    let (model, placeable) = contents(&dir, half_bytes)?;
    let mut counts = Counts::default();
    for first in 0..3 {
        report(progress, "rescue", first, 3, "every third entry")?;
        one(&dir, &model, &placeable, first, &mut counts)?;
    }
    fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
    let share = counts.placed_of_placeable as f64 / counts.placeable.max(1) as f64;
    let mut found = RowOutcome::default();
    found.checks.push(Check::absolute("placed of what can be placed", "ratio", &[share], Bar::AtLeast(1.0)));
    let right = 1.0 - counts.wrong as f64 / counts.blocks.max(1) as f64;
    found.checks.push(Check::absolute("right blocks of all", "ratio", &[right], Bar::AtLeast(1.0)));
    found.notes.push(format!(
        "a disk of {}, half of it an ext4: {} lost blocks, {} placed, {} of {} that have a superblock or inodes in use",
        bytes(model.len() as u64),
        counts.lost,
        counts.placed,
        counts.placed_of_placeable,
        counts.placeable
    ));
    Ok(found)
}

/// The bytes of the disk, and the blocks that can be placed.
fn contents(dir: &Path, half_bytes: u64) -> Result<(Vec<u8>, BTreeSet<u64>)> {
    let tool = |name: &str| peer::find(name).unwrap_or_else(|| PathBuf::from(name));
    let (files, raw) = (dir.join("files"), dir.join("fs.raw"));
    let failed = || LabError::file("fill", &files);
    let mut contents = vec![0; 9000];
    for index in 0..FILES {
        let folder = files.join(format!("folder{}", index / 50));
        fs::create_dir_all(&folder).map_err(failed())?;
        data::fill(SEED, index * 12288, &mut contents);
        fs::write(folder.join(format!("file{index}")), &contents[..contents.len() - index as usize])
            .map_err(failed())?;
    }
    fs::File::create(&raw).and_then(|file| file.set_len(half_bytes)).map_err(LabError::file("create", &raw))?;
    let mut make = Command::new(tool("mke2fs"));
    // Groups of 32 MiB, each with a table of its own.
    make.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-g", "8192", "-I", "256", "-O", "^flex_bg"]);
    make.args(["-E", "nodiscard,lazy_itable_init=0", "-d"]).arg(&files).arg(&raw);
    peer::answer(&mut make, |_| Ok(()))?;
    let mut model = fs::read(&raw).map_err(LabError::file("read", &raw))?;
    let mut dump = Command::new(tool("dumpe2fs"));
    dump.arg(&raw);
    let placeable = peer::answer(&mut dump, |text| Ok(placeable(text, &model)))?;
    let mut noise = vec![0; half_bytes as usize];
    data::fill(SEED + 1, 0, &mut noise);
    model.extend(noise);
    Ok((model, placeable))
}

/// Blocks of the disk with a superblock, or with two inodes in use next to each other in a table.
fn placeable(text: &str, model: &[u8]) -> BTreeSet<u64> {
    let numbers = |text: &str| -> Vec<u64> {
        text.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect()
    };
    let block_of = |block: u64| block * FILE_SYSTEM_BLOCK_BYTES / BLOCK_BYTES;
    let mut found = BTreeSet::new();
    for line in text.lines().map(str::trim_start) {
        if let Some((_, rest)) = line.split_once(" superblock at ") {
            found.extend(numbers(rest).first().map(|&block| block_of(block)));
        }
        let Some(rest) = line.strip_prefix("Inode table at ") else { continue };
        if let [first, last, ..] = numbers(rest)[..] {
            for block in first..=last {
                let at = (block * FILE_SYSTEM_BLOCK_BYTES) as usize;
                let inodes = model[at..at + FILE_SYSTEM_BLOCK_BYTES as usize].chunks(INODE_BYTES);
                if inodes.filter(|inode| inode.iter().any(|byte| *byte != 0)).count() >= 2 {
                    found.insert(block_of(block));
                }
            }
        }
    }
    found
}

/// Destroys every third entry from `first` on, rescues, and counts.
fn one(dir: &Path, model: &[u8], placeable: &BTreeSet<u64>, first: u64, counts: &mut Counts) -> Result<()> {
    let (path, dest) = (dir.join(format!("disk{first}.vhdx")), dir.join(format!("saved{first}.raw")));
    let failed = || LabError::file("rescue", &path);
    let request = CreateRequest {
        size_bytes: Some(model.len() as u64),
        disk_type: Some(DiskType::Dynamic),
        block_bytes: Some(BLOCK_BYTES as u32),
        ..CreateRequest::default()
    };
    create(&path, &request)?;
    let disk =
        Disk::open(&path, &OpenOptions { writable: true, cache: CacheMode::PageCache, ..OpenOptions::default() })?;
    let mut io = Blocking::open(&*disk, EngineKind::Auto).map_err(failed())?;
    for (index, piece) in (0..).zip(model.chunks(1 << 20)) {
        io.write(index << 20, piece, false).map_err(failed())?;
    }
    drop(io);
    disk.close()?;
    // It holds the lock of the file.
    drop(disk);
    let mut file = fs::read(&path).map_err(failed())?;
    let blocks = model.len() as u64 / BLOCK_BYTES;
    let lost: BTreeSet<u64> = (first..blocks).step_by(3).collect();
    for block in &lost {
        let at = TABLE_BYTES + 8 * *block as usize;
        file[at..at + 8].fill(0xd7);
    }
    fs::write(&path, file).map_err(failed())?;
    let done = rescue(&path, &dest, &RescueOptions::default(), &mut |_, _| true)
        .map_err(|error| failed()(io::Error::other(error)))?;
    let copy = fs::read(&dest).map_err(failed())?;
    let placed: BTreeSet<u64> = done.placed.iter().map(|placed| placed.offset_bytes / BLOCK_BYTES).collect();
    let must: BTreeSet<u64> = lost.intersection(placeable).copied().collect();
    let mut wrong = BTreeSet::new();
    for range in done.ranges.iter().filter(|range| matches!(range.kind, RangeKind::Data | RangeKind::Zero)) {
        for at in (range.offset_bytes..range.offset_bytes + range.len_bytes).step_by(512) {
            let unit = at as usize..at as usize + 512;
            if copy[unit.clone()] != model[unit] {
                wrong.insert(at / BLOCK_BYTES);
            }
        }
    }
    counts.blocks += blocks;
    counts.lost += lost.len() as u64;
    counts.placeable += must.len() as u64;
    counts.placed += placed.len() as u64;
    counts.placed_of_placeable += must.intersection(&placed).count() as u64;
    counts.wrong += wrong.len() as u64 + placed.difference(&lost).count() as u64;
    for path in [&path, &dest] {
        fs::remove_file(path).map_err(LabError::file("remove", path))?;
    }
    Ok(())
}
