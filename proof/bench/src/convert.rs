//! Converting against qemu-img: copying, and on XFS sharing extents.
//!
//! Both run with their defaults and convert the same source to a new file, in turns. *Hot* means
//! that the source is in the page cache, *cold* that it was dropped from there. The file system is
//! synced before each conversion, so that neither tool's time includes write-back that the other
//! left behind. Speed is that of the command, as a user waits for it. Speed *until durable*
//! includes the sync of the file system after it. Our first conversion is read back and compared
//! with what was generated.

use crate::xfs::Xfs;
use diskwright_disk::{ConvertOptions, CreateRequest, OpenOptions, convert};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, Found},
    fill,
    peer::{self, Cost},
    progress::{Progress, report},
    scratch::settle,
    targets::{self, Container, Target},
};
use diskwright_load::clock;
use diskwright_stats::{numbers::bytes, summary::round_order};
use diskwright_store::{CacheMode, FileStore};
use std::path::{Path, PathBuf};

const COPY_BAR: Bar = Bar::AtLeast(1.2);
const CPU_BAR: Bar = Bar::AtMost(1.0);
const SHARE_BAR: Bar = Bar::AtLeast(20.0);

/// The conversions: source and destination.
const WAYS: [(Container, Container); 2] =
    [(Container::Raw, Container::VhdxDynamic), (Container::VhdxDynamic, Container::Raw)];

/// The files and settings of a comparison, in one folder.
struct Comparison<'a> {
    context: &'a Context<'a>,
    dir: PathBuf,
    qemu_img: PathBuf,
    size_bytes: u64,
    rounds: usize,
}

pub(crate) fn copied(context: &Context<'_>, progress: &mut dyn Progress) -> Result<Found> {
    let Some(qemu_img) = peer::find("qemu-img") else {
        return Ok(Found::skipped("converting", peer::missing("qemu-img", "qemu-utils")));
    };
    let size_bytes: u64 = context.pick(1 << 30, 4 << 30);
    context.scratch.need("the copies", 3 * size_bytes + (1 << 30))?;
    let dir = context.scratch.folder("convert")?;
    let comparison = Comparison { context, dir, qemu_img, size_bytes, rounds: context.rounds(context.pick(3, 5)) };
    let mut found = comparison.run(&[true, false], COPY_BAR, progress)?;
    found.notes.insert(
        0,
        format!(
            "{} of incompressible data; {} rounds in turns, both with their defaults",
            bytes(size_bytes),
            comparison.rounds
        ),
    );
    Ok(found)
}

pub(crate) fn shared(context: &Context<'_>, progress: &mut dyn Progress) -> Result<Found> {
    let Some(qemu_img) = peer::find("qemu-img") else {
        return Ok(Found::skipped("converting on XFS", peer::missing("qemu-img", "qemu-utils")));
    };
    let size_bytes: u64 = context.pick(1 << 30, 4 << 30);
    let image_bytes = 4 * size_bytes + (2 << 30);
    context.scratch.need("an XFS in a file", image_bytes)?;
    let home = context.scratch.folder("xfs")?;
    report(progress, "prepare", 0, 1, "an XFS in a loop device")?;
    let xfs = match Xfs::mount(&home, image_bytes)? {
        Ok(xfs) => xfs,
        Err(why) => return Ok(Found::skipped("converting on XFS", why)),
    };
    let comparison = Comparison {
        context,
        dir: xfs.mount_point().to_owned(),
        qemu_img,
        size_bytes,
        rounds: context.rounds(context.pick(3, 5)),
    };
    let outcome = comparison.run(&[true], SHARE_BAR, progress);
    drop(comparison);
    xfs.unmount()?;
    let mut found = outcome?;
    found.notes.insert(0, format!("{} of incompressible data on an XFS in a loop device", bytes(size_bytes)));
    Ok(found)
}

impl Comparison<'_> {
    fn run(&self, heats: &[bool], bar: Bar, progress: &mut dyn Progress) -> Result<Found> {
        let how = self.context.preparation(self.size_bytes, CacheMode::PageCache);
        let mut sources = Vec::new();
        for container in [Container::Raw, Container::VhdxDynamic] {
            let mut tick = |done| report(progress, "prepare", done, self.size_bytes, container.name());
            sources.push((container, targets::make_filled(container, &self.dir, &how, &mut tick)?));
        }
        let mut found = Found::default();
        for (from, to) in WAYS {
            let Some((_, source)) = sources.iter().find(|(container, _)| *container == from) else { continue };
            self.prove(from, to, source, progress)?;
            for hot in heats {
                self.compare((from, to), source, *hot, bar, &mut found, progress)?;
            }
        }
        Ok(found)
    }

    fn compare(
        &self,
        (from, to): (Container, Container),
        source: &Path,
        hot: bool,
        bar: Bar,
        found: &mut Found,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let name = format!("{} to {}, {}", from.name(), to.name(), if hot { "hot" } else { "cold" });
        let (mut wall, mut cpu, mut after) = ([vec![], vec![]], [vec![], vec![]], [vec![], vec![]]);
        for round in 0..self.rounds {
            for who in round_order(2, round, 3) {
                let message = format!("{name}, {}", if who == 0 { "diskwright" } else { "qemu-img" });
                report(progress, "convert", round as u64, self.rounds as u64, &message)?;
                settle(&self.dir)?;
                warm_or_cool(source, hot)?;
                let dest = self.dir.join(format!("copy.{}", to.format()));
                let cost =
                    if who == 0 { self.ours(from, to, source, &dest)? } else { self.theirs(from, to, source, &dest)? };
                wall[who].push(cost.wall_ns as f64);
                cpu[who].push(cost.cpu.total_ns() as f64);
                let (settled, settle_ns, _) = clock::timed(|| settle(&self.dir));
                settled?;
                after[who].push(settle_ns as f64);
                std::fs::remove_file(&dest).map_err(LabError::file("remove", &dest))?;
            }
        }
        // Speeds in MB/s, so that more is better.
        let speed =
            |times: &[f64]| -> Vec<f64> { times.iter().map(|ns| self.size_bytes as f64 * 1e3 / ns.max(1.0)).collect() };
        let durable = |who: usize| -> Vec<f64> {
            wall[who].iter().zip(&after[who]).map(|(wall, after): (&f64, &f64)| wall + after).collect()
        };
        let check = |what: &str, unit: &str, ours: &[f64], theirs: &[f64], bar| {
            Check::ratio(format!("{name}: {what}"), unit, ours, theirs, bar)
        };
        found.checks.push(check("speed", "MB/s", &speed(&wall[0]), &speed(&wall[1]), bar));
        found.checks.push(check("speed until durable", "MB/s", &speed(&durable(0)), &speed(&durable(1)), bar));
        found.checks.push(check("CPU time", "ns", &cpu[0], &cpu[1], CPU_BAR));
        Ok(())
    }

    fn options(&self, from: Container, to: Container) -> ConvertOptions {
        ConvertOptions {
            source: OpenOptions { format: Some(from.format()), ..OpenOptions::default() },
            dest: CreateRequest {
                format: Some(to.format()),
                disk_type: Some(to.disk_type()),
                ..CreateRequest::default()
            },
            ..ConvertOptions::default()
        }
    }

    fn ours(&self, from: Container, to: Container, source: &Path, dest: &Path) -> Result<Cost> {
        let options = self.options(from, to);
        let (outcome, wall_ns, cpu) = clock::timed(|| convert(source, dest, &options, &mut |_, _| true));
        outcome?;
        Ok(Cost { wall_ns, cpu })
    }

    fn theirs(&self, from: Container, to: Container, source: &Path, dest: &Path) -> Result<Cost> {
        let (from, to) = (from.format().to_string(), to.format().to_string());
        let (source, dest) = (source.to_string_lossy(), dest.to_string_lossy());
        peer::run(&self.qemu_img, &["convert", "-f", &from, "-O", &to, &*source, &*dest], None)
    }

    /// Converts once and compares the copy with what was generated.
    fn prove(&self, from: Container, to: Container, source: &Path, progress: &mut dyn Progress) -> Result<()> {
        let dest = self.dir.join(format!("proof.{}", to.format()));
        self.ours(from, to, source, &dest)?;
        let how = self.context.preparation(self.size_bytes, CacheMode::PageCache);
        let target = Target::open_with(to, dest.clone(), how.cache, how.engine, false)?;
        fill::verify(to.name(), target.device(), how.seed, how.engine, &mut |done| {
            report(progress, "verify", done, self.size_bytes, "the converted disk")
        })?;
        target.close()?;
        std::fs::remove_file(&dest).map_err(LabError::file("remove", &dest))
    }
}

/// Reads all of a file into the page cache, or drops it from there.
pub(crate) fn warm_or_cool(path: &Path, hot: bool) -> Result<()> {
    if hot {
        return peer::warm(path);
    }
    let store = FileStore::open(path, &diskwright_store::OpenOptions::default())?;
    store.drop_cache().map_err(LabError::file("drop from the page cache", path))
}
