//! Two copies on two files against btrfs with the profile raid1 on two files of the same size, made
//! side by side: both keep checksums, and both answer a flush when both files have everything.

use super::{create, disk, files, open};
use crate::turns::in_turns;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    fill, measure, peer,
    progress::{Progress, report},
    rounds::Window,
    targets::open_target,
};
use diskwright_load::{
    OpenTarget, data,
    job::{Job, Span},
    run::RunOptions,
    seeds,
    workload::{Direction, Pattern, Workload},
};
use diskwright_stats::numbers::bytes;
use diskwright_store::{BlockDevice, CacheMode, FileStore, LockMode, OpenOptions, RawDevice};
use std::{
    path::{Path, PathBuf},
    slice,
    sync::Arc,
};

const GIB: u64 = 1 << 30;
const QUEUE_DEPTH: u32 = 32;
const WRITES: Bar = Bar::AtLeast(2.0);
const READS: Bar = Bar::AtLeast(1.0);

pub(crate) fn against_btrfs(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes: u64 = context.pick(GIB / 2, GIB);
    let member_bytes = size_bytes * 3;
    context.scratch.need("two mirrors", 2 * size_bytes * 3 + GIB)?;
    let (ours_dir, peer_dir) = (context.scratch.folder("pool")?, context.scratch.folder("btrfs")?);
    let peer_files = files(&peer_dir, &[member_bytes; 2])?;
    let btrfs = match Btrfs::mount(&peer_dir, &peer_files)? {
        Ok(btrfs) => btrfs,
        Err(why) => return Ok(RowOutcome::skipped("a two-way mirror against btrfs", why)),
    };
    let paths = files(&ours_dir, &[member_bytes; 2])?;
    create(&paths)?;
    let pool = open(&paths, CacheMode::Direct)?;
    let file = disk(&pool, size_bytes, 2)?;
    let path = btrfs.mount_point.join("disk");
    let options = OpenOptions { writable: true, create_new: true, lock: LockMode::Exclusive, cache: CacheMode::Direct };
    let wrong = || LabError::file("use", &path);
    let store = FileStore::open(&path, &options).map_err(|error| wrong()(std::io::Error::other(error)))?;
    diskwright_store::Store::set_len(&store, size_bytes).map_err(wrong())?;
    let devices: [Arc<dyn BlockDevice>; 2] = [
        Arc::new(RawDevice::new(file, true, 512).map_err(wrong())?),
        Arc::new(RawDevice::new(Arc::new(store), true, 512).map_err(wrong())?),
    ];
    for (index, device) in devices.iter().enumerate() {
        let mut make = |offset, buf: &mut [u8]| data::fill(SEED, offset, buf);
        let mut tick = |done| report(progress, "fill", index as u64 * size_bytes + done, 2 * size_bytes, "filling");
        let ranges = 0..size_bytes;
        fill::fill_ranges("mirror", &**device, slice::from_ref(&ranges), context.options.engine, &mut make, &mut tick)?;
    }
    let names = ["pool", "btrfs"];
    let targets: Vec<OpenTarget> =
        names.iter().zip(devices).map(|(name, device)| open_target(name, name, device, CacheMode::Direct)).collect();
    let rounds = context.rounds(context.pick(5, 15));
    let mut checks = Vec::new();
    for (direction, bar, flush_every) in [(Direction::Write, WRITES, 32), (Direction::Read, READS, 0)] {
        if direction == Direction::Read {
            // Both compare what they read with checksums.
            pool.scrub(&mut |_| true).map_err(super::failed)?;
        }
        let workload = Workload::new(Pattern::Random, direction, 4096, QUEUE_DEPTH);
        let mut rates = [Vec::new(), Vec::new()];
        in_turns(&workload.name, &names, (rounds, SEED), progress, &mut |Window { cell: who, round }, watch| {
            let mut load = workload.load();
            load.flush_every = flush_every;
            let mut job = Job::simple(&workload.name, load, Span::default(), context.cell().into());
            job.engine = context.options.engine.into();
            job.seed = seeds::of_window(SEED, &workload.name, round);
            rates[who].push(measure::window(&job, &targets[who], &RunOptions::default(), watch)?.iops());
            Ok(())
        })?;
        let what = match flush_every {
            0 => "4K random read: IOPS",
            _ => "4K random write, a flush every 32: IOPS",
        };
        checks.push(Check::ratio(what, "IOPS", &rates[0], &rates[1], bar));
    }
    drop(targets);
    drop(pool);
    btrfs.unmount()?;
    let notes = vec![format!(
        "disks of {}, filled, QD {QUEUE_DEPTH}, O_DIRECT; {rounds} rounds in turns; btrfs on two loop devices with direct I/O",
        bytes(size_bytes)
    )];
    Ok(RowOutcome { checks, notes, ..RowOutcome::default() })
}

/// A btrfs on two files, mounted. Dropped, it is unmounted and its loop devices are gone.
struct Btrfs {
    mount_point: PathBuf,
    loops: Vec<String>,
    is_mounted: bool,
}

impl Btrfs {
    /// The inner error says what this machine lacks.
    fn mount(home: &Path, paths: &[PathBuf]) -> Result<Result<Self, String>> {
        if !nix::unistd::geteuid().is_root() {
            return Ok(Err("mounting a file system needs root".into()));
        }
        let (Some(mkfs), Some(mount), Some(losetup)) =
            (peer::find("mkfs.btrfs"), peer::find("mount"), peer::find("losetup"))
        else {
            return Ok(Err(peer::missing("mkfs.btrfs", "btrfs-progs")));
        };
        let mount_point = home.join("mnt");
        std::fs::create_dir(&mount_point).map_err(LabError::file("create", &mount_point))?;
        let mut btrfs = Self { mount_point, loops: Vec::new(), is_mounted: false };
        for path in paths {
            let mut command = std::process::Command::new(&losetup);
            command.args(["--find", "--show", "--direct-io=on"]).arg(path);
            let device = peer::answer(&mut command, |text| Ok(text.trim().to_owned()));
            match device {
                Ok(device) => btrfs.loops.push(device),
                Err(error) => return Ok(Err(format!("no loop device: {error}"))),
            }
        }
        let [first, second] = &btrfs.loops[..] else { return Ok(Err("two loop devices are needed".into())) };
        let point = btrfs.mount_point.to_string_lossy();
        let made = peer::run(&mkfs, &["-q", "-f", "-m", "raid1", "-d", "raid1", first, second], None)
            .and_then(|_| peer::run(&mount, &["-t", "btrfs", first, &point], None));
        match made {
            Ok(_) => {
                btrfs.is_mounted = true;
                Ok(Ok(btrfs))
            }
            Err(error) => Ok(Err(format!("no btrfs can be mounted here: {error}"))),
        }
    }

    fn unmount(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let program = |name: &str| peer::find(name).unwrap_or_else(|| PathBuf::from(name));
        if std::mem::take(&mut self.is_mounted) {
            peer::run(&program("umount"), &[&self.mount_point], None)?;
        }
        for device in std::mem::take(&mut self.loops) {
            peer::run(&program("losetup"), &["--detach", &device], None)?;
        }
        Ok(())
    }
}

impl Drop for Btrfs {
    fn drop(&mut self) {
        let _ = self.end();
    }
}
