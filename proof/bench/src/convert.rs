//! Converting against qemu-img: copying, and on XFS sharing extents.
//!
//! Both run with their defaults (`race.rs`). Our first conversion is read back and compared with
//! what was generated.

use crate::{race::Race, xfs::Xfs};
use diskwright_disk::{ConvertOptions, CreateRequest, OpenOptions, convert};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Context, RowOutcome},
    fill,
    peer::{self, Cost},
    progress::{Progress, report},
    targets::{self, Container, Target},
};
use diskwright_load::clock;
use diskwright_stats::numbers::bytes;
use diskwright_store::CacheMode;
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

pub(crate) fn copied(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let Some(qemu_img) = peer::find("qemu-img") else {
        return Ok(RowOutcome::skipped("converting", peer::missing("qemu-img", "qemu-utils")));
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

pub(crate) fn shared(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let Some(qemu_img) = peer::find("qemu-img") else {
        return Ok(RowOutcome::skipped("converting on XFS", peer::missing("qemu-img", "qemu-utils")));
    };
    let size_bytes: u64 = context.pick(1 << 30, 4 << 30);
    let image_bytes = 4 * size_bytes + (2 << 30);
    context.scratch.need("an XFS in a file", image_bytes)?;
    let home = context.scratch.folder("xfs")?;
    report(progress, "prepare", 0, 1, "an XFS in a loop device")?;
    let xfs = match Xfs::mount(&home, image_bytes)? {
        Ok(xfs) => xfs,
        Err(why) => return Ok(RowOutcome::skipped("converting on XFS", why)),
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
    fn run(&self, heats: &[bool], bar: Bar, progress: &mut dyn Progress) -> Result<RowOutcome> {
        let how = self.context.preparation(self.size_bytes, CacheMode::PageCache);
        let mut sources = Vec::new();
        for container in [Container::Raw, Container::VhdxDynamic] {
            let mut tick = |done| report(progress, "prepare", done, self.size_bytes, container.name());
            sources.push((container, targets::make_filled(container, &self.dir, &how, &mut tick)?));
        }
        let mut found = RowOutcome::default();
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
        found: &mut RowOutcome,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let dest = self.dir.join(format!("copy.{}", to.format()));
        Race {
            name: &format!("{} to {}", from.name(), to.name()),
            source,
            dest: &dest,
            size_bytes: self.size_bytes,
            rounds: self.rounds,
            ours: &|| self.ours(from, to, source, &dest),
            theirs: &|| self.theirs(from, to, source, &dest),
            speed_bar: bar,
            cpu_bar: Some(CPU_BAR),
        }
        .run(hot, found, progress)
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
