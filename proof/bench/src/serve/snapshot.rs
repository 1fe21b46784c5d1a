//! A snapshot of a disk while a client writes to it by NBD: how long the client's longest request
//! is, against a window of the same length without a snapshot.
//!
//! The client writes 4 KiB at random at QD 8 for a second. Three kinds of windows take turns, each
//! after a snapshot of its own, so that all of them write into a young child:
//!
//! - nothing happens in its middle;
//! - `diskwright snapshot` freezes the disk;
//! - another file in the same folder is written, synced, linked and renamed, with a sync of the
//!   folder after each, as a snapshot does. No code of ours has a part in it, so what the client
//!   waits for then is the file system's and the device's.
//!
//! A round has a server of its own. Between two rounds the disk becomes what it was: its children
//! are removed, as each of them grows to the size of the disk.

use super::{Exported, ServerProgram, serve};
use crate::{discard::drive, ours};
use diskwright_disk::{Disk, OpenOptions, Opened};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    progress::{Progress, report},
    targets::{self, Container},
};
use diskwright_stats::{
    numbers::{bytes, duration, grouped},
    summary::round_order,
};
use diskwright_store::{CacheMode, Request};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{
    fs,
    os::unix::fs::FileExt,
    path::Path,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

const WRITE_BYTES: u64 = 4096;
const QUEUE_DEPTH: usize = 8;
/// The clients' pause beyond their longest request, in milliseconds.
const BAR: Bar = Bar::AtMost(10.0);

/// What happens in the middle of a window.
const KINDS: [&str; 3] = ["without a snapshot", "with a snapshot", "beside syncs of another file"];

pub(crate) fn pause(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes: u64 = context.pick(256 << 20, 2 << 30);
    // Four snapshots in a round.
    context.scratch.need("this disk and its children", 6 * size_bytes + (2 << 30))?;
    let rounds = context.rounds(context.pick(5, 15));
    let window = context.options.cell.unwrap_or(Duration::from_secs(1));
    let dir = context.scratch.folder("frozen")?;
    let how = context.preparation(size_bytes, CacheMode::Direct);
    let mut tick = |done| report(progress, "prepare", done, size_bytes, "filling the disk");
    let path = targets::make_filled(Container::VhdxDynamic, &dir, &how, &mut tick)?;
    let mut longest_ms: [Vec<f64>; 3] = Default::default();
    let mut took = Vec::new();
    let mut requests = 0;
    for round in 0..rounds {
        let served = serve(ServerProgram::Ours, &Exported::of(Container::VhdxDynamic, &path, CacheMode::Direct), &dir)?;
        let opened = Opened::open(Path::new(&served.uri), &OpenOptions { writable: true, ..OpenOptions::default() });
        let device = opened?.shared();
        for index in round_order(KINDS.len(), round, 9) {
            report(progress, "measure", round as u64, rounds as u64, KINDS[index])?;
            freeze(&path, &format!("r{round}-{index}"))?;
            context.scratch.settle()?;
            let freezing = (index > 0).then(|| {
                let (path, name) = (path.clone(), format!("r{round}"));
                thread::spawn(move || {
                    thread::sleep(window / 2);
                    if index == 1 { freeze(&path, &name) } else { only_sync(&path) }
                })
            });
            let mut dice = Xoshiro256PlusPlus::seed_from_u64(SEED + 3 * round as u64 + index as u64);
            let end = Instant::now() + window;
            let mut next = |buf, tag| {
                let offset_bytes = dice.next_u64() % (size_bytes / WRITE_BYTES) * WRITE_BYTES;
                (Instant::now() < end).then(|| Request::write(offset_bytes, WRITE_BYTES as usize, buf, tag))
            };
            let written = drive(&*device, context.options.engine, QUEUE_DEPTH, &mut next);
            if let Some(freezing) = freezing {
                let time = freezing.join().expect("a snapshot does not panic")?;
                took.extend((index == 1).then_some(time.as_secs_f64() * 1e3));
            }
            let latencies_ns = written.map_err(LabError::file("write to", &path))?;
            requests += latencies_ns.len();
            longest_ms[index].push(latencies_ns.iter().max().map_or(0.0, |ns| *ns as f64 / 1e6));
            context.scratch.settle()?;
        }
        drop(device);
        served.server.stop()?;
        remove_children(&path)?;
        context.scratch.settle()?;
    }
    let [without, with, synced] = longest_ms;
    let beyond: Vec<f64> = with.iter().zip(&without).map(|(with, without)| with - without).collect();
    let median = |values: &[f64]| diskwright_stats::summary::median(values).unwrap_or(0.0) * 1e6;
    let name = "longest 4K random write at QD 8 by NBD while the disk is frozen, beyond the longest without";
    Ok(RowOutcome {
        checks: vec![Check::absolute(name, "ms", &beyond, BAR)],
        notes: vec![
            format!(
                "VHDX dynamic of {}, O_DIRECT, one connection; {rounds} rounds in turns, windows of {}, {} writes",
                bytes(size_bytes),
                duration(window.as_nanos() as f64),
                grouped(requests as f64)
            ),
            format!(
                "longest request, median of the rounds: {} with a snapshot, {} without, {} beside the same syncs of another \
                 file; the command took {}",
                duration(median(&with)),
                duration(median(&without)),
                duration(median(&synced)),
                duration(median(&took))
            ),
        ],
        ..RowOutcome::default()
    })
}

/// What a snapshot asks of the file system, for a file that is not the disk. Returns its time.
fn only_sync(path: &Path) -> Result<Duration> {
    let at = |name: &str| path.with_file_name(name);
    let (new, kept, last) = (at("synced.new"), at("synced.kept"), at("synced"));
    let sync_folder = || fs::File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all();
    let start = Instant::now();
    let done = (|| {
        let file = fs::File::create(&new)?;
        for offset_bytes in [0, 1 << 20, 4 << 20] {
            file.write_all_at(&[1; 1 << 16], offset_bytes)?;
            file.sync_data()?;
        }
        sync_folder()?;
        fs::hard_link(&new, &kept)?;
        sync_folder()?;
        fs::rename(&new, &last)?;
        sync_folder()?;
        file.write_all_at(&[2; 1 << 16], 0)?;
        file.sync_data()?;
        [kept, last].iter().try_for_each(fs::remove_file)
    })();
    done.map_err(LabError::file("sync another file beside", path))?;
    Ok(start.elapsed())
}

/// Gives the lowest image the disk's name again, and removes all others.
fn remove_children(path: &Path) -> Result<()> {
    let failed = || LabError::file("remove the children of", path);
    let disk = Disk::open(path, &OpenOptions::default())?;
    let files: Vec<_> = disk.layers().iter().map(|layer| layer.path.clone()).collect();
    drop(disk);
    if let [children @ .., lowest] = &files[..]
        && !children.is_empty()
    {
        children.iter().try_for_each(fs::remove_file).map_err(failed())?;
        fs::rename(lowest, path).map_err(failed())?;
    }
    Ok(())
}

/// Runs `diskwright snapshot`. Returns its time.
fn freeze(path: &Path, name: &str) -> Result<Duration> {
    let mut command = ours::command()?;
    command.arg("snapshot").arg(path).args(["--name", name, "--quiet"]).stdin(Stdio::null());
    let start = Instant::now();
    let output = command.output().map_err(LabError::file("freeze", path))?;
    if !output.status.success() {
        let what = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(LabError::BadOptions { what, hint: "see why the disk cannot be frozen".into() });
    }
    Ok(start.elapsed())
}
