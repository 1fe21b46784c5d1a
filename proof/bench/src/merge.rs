//! Merging a child into its parent, against `cp` of as much data, and with reflinks on XFS against
//! merging by copying.
//!
//! A child of which every block was changed is merged into a full parent, and `cp` copies a full
//! raw file of the same size to a new one, in turns. The file system is synced before each. A merge
//! is durable when it ends; speed *until durable* includes the sync of the file system after `cp`.
//! The first merged disk is read back and compared with what was written into the child.

use crate::{race::warm_or_cool, turns::in_turns, xfs::Xfs};
use diskwright_disk::{CreateRequest, Disk, MergeOptions, OpenOptions, create, merge};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    fill, peer,
    progress::{Progress, report},
    rounds::Window,
    scratch::settle,
    targets::{self, Container, Preparation, Target},
};
use diskwright_load::clock;
use diskwright_stats::numbers::bytes;
use diskwright_store::CacheMode;
use std::path::{Path, PathBuf};

const COPY_BAR: Bar = Bar::AtLeast(0.8);
const SHARE_BAR: Bar = Bar::AtLeast(20.0);

/// A full parent in a folder, and how children of it are made.
struct Bed<'a> {
    dir: &'a Path,
    parent: PathBuf,
    how: Preparation,
    rounds: usize,
}

pub(crate) fn copied(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let Some(cp) = peer::find("cp") else {
        return Ok(RowOutcome::skipped("merging", peer::missing("cp", "coreutils")));
    };
    let size_bytes: u64 = context.pick(1 << 30, 4 << 30);
    context.scratch.need("the disks and copies", 4 * size_bytes + (1 << 30))?;
    let dir = context.scratch.folder("merge")?;
    let bed = Bed::new(context, &dir, size_bytes, progress)?;
    let raw = targets::make_filled(Container::Raw, &dir, &bed.how, &mut |_| Ok(()))?;
    bed.prove(progress)?;
    let mut found = RowOutcome::default();
    for is_hot in [true, false] {
        let name = if is_hot { "hot" } else { "cold" };
        let (mut speeds, mut durable) = ([vec![], vec![]], [vec![], vec![]]);
        let subjects = ["diskwright", "cp"].map(|tool| format!("{name}, {tool}"));
        in_turns(
            "merge",
            &[&*subjects[0], &*subjects[1]],
            (bed.rounds, 5),
            progress,
            &mut |Window { cell: who, round }, _| {
                let wall_ns = if who == 0 {
                    let child = bed.make_child(round as u64)?;
                    warm_or_cool(&child, is_hot)?;
                    settle(&dir)?;
                    bed.merge(&child, false)?
                } else {
                    warm_or_cool(&raw, is_hot)?;
                    settle(&dir)?;
                    let paths = [raw.to_string_lossy(), bed.copy_path().to_string_lossy().into_owned().into()];
                    peer::run(&cp, &["--reflink=never", &*paths[0], &*paths[1]], None)?.wall_ns as f64
                };
                let (settled, settle_ns, _) = clock::timed(|| settle(&dir));
                settled?;
                speeds[who].push(size_bytes as f64 * 1e3 / wall_ns);
                durable[who].push(size_bytes as f64 * 1e3 / (wall_ns + settle_ns as f64));
                if who == 1 {
                    std::fs::remove_file(bed.copy_path()).map_err(LabError::file("remove", &bed.copy_path()))?;
                }
                Ok(())
            },
        )?;
        let check = |what: &str, figures: &[Vec<f64>; 2]| {
            Check::ratio(format!("{name}: {what}"), "MB/s", &figures[0], &figures[1], COPY_BAR)
        };
        found.checks.push(check("speed", &speeds));
        found.checks.push(check("speed until durable", &durable));
    }
    found.notes.push(format!(
        "{} of incompressible data, all changed; {} rounds in turns",
        bytes(size_bytes),
        bed.rounds
    ));
    Ok(found)
}

pub(crate) fn shared(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes: u64 = context.pick(1 << 30, 4 << 30);
    let image_bytes = 3 * size_bytes + (2 << 30);
    context.scratch.need("an XFS in a file", image_bytes)?;
    let home = context.scratch.folder("xfs")?;
    report(progress, "prepare", 0, 1, "an XFS in a loop device")?;
    let xfs = match Xfs::mount(&home, image_bytes)? {
        Ok(xfs) => xfs,
        Err(why) => return Ok(RowOutcome::skipped("merging on XFS", why)),
    };
    let outcome = (|| {
        let bed = Bed::new(context, xfs.mount_point(), size_bytes, progress)?;
        let mut speeds = [vec![], vec![]];
        in_turns(
            "merge",
            &["sharing", "copying"],
            (bed.rounds, 7),
            progress,
            &mut |Window { cell: who, round }, _| {
                let child = bed.make_child(round as u64)?;
                settle(bed.dir)?;
                speeds[who].push(size_bytes as f64 * 1e3 / bed.merge(&child, who == 0)?);
                Ok(())
            },
        )?;
        Ok(RowOutcome {
            checks: vec![Check::ratio("sharing against copying: speed", "MB/s", &speeds[0], &speeds[1], SHARE_BAR)],
            notes: vec![format!("{} of changed data on an XFS in a loop device", bytes(size_bytes))],
            ..RowOutcome::default()
        })
    })();
    xfs.unmount()?;
    outcome
}

impl<'a> Bed<'a> {
    fn new(context: &Context<'_>, dir: &'a Path, size_bytes: u64, progress: &mut dyn Progress) -> Result<Self> {
        let how = context.preparation(size_bytes, CacheMode::PageCache);
        let mut tick = |done| report(progress, "prepare", done, size_bytes, "the parent");
        let parent = targets::make_filled(Container::VhdxDynamic, dir, &how, &mut tick)?;
        Ok(Self { dir, parent, how, rounds: context.rounds(context.pick(3, 5)) })
    }

    fn copy_path(&self) -> PathBuf {
        self.dir.join("copy.raw")
    }

    /// A child of the parent of which every byte was written.
    fn make_child(&self, number: u64) -> Result<PathBuf> {
        let path = self.dir.join("child.vhdx");
        create(&path, &CreateRequest { parent: Some(self.parent.clone()), ..CreateRequest::default() })?;
        let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() })?;
        fill::fill("child", &*disk, self.how.seed ^ (number + 1), self.how.engine, &mut |_| Ok(()))?;
        disk.close()?;
        Ok(path)
    }

    /// Merges, and returns the time in nanoseconds.
    fn merge(&self, child: &Path, shares: bool) -> Result<f64> {
        let options = MergeOptions {
            no_reflink: !shares,
            open: OpenOptions { cache: CacheMode::Direct, engine: self.how.engine, ..OpenOptions::default() },
            ..MergeOptions::default()
        };
        let (merged, wall_ns, _) = clock::timed(|| merge(child, &options, &mut |_, _| true));
        merged?;
        Ok(wall_ns as f64)
    }

    /// Merges once, and compares the parent with what the child held.
    fn prove(&self, progress: &mut dyn Progress) -> Result<()> {
        let child = self.make_child(0)?;
        self.merge(&child, true)?;
        let how = &self.how;
        let target = Target::open_with(Container::VhdxDynamic, self.parent.clone(), how.cache, how.engine, false)?;
        fill::verify("the merged disk", target.device(), how.seed ^ 1, how.engine, &mut |done| {
            report(progress, "verify", done, how.size_bytes, "the merged disk")
        })?;
        target.close()
    }
}
