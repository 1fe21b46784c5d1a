//! Converting to and from VMDK against qemu-img: streamOptimized, whose grains are compressed, and
//! monolithicSparse.
//!
//! The source of the compressed rows is half of random bytes and half of a text with a vocabulary
//! of 4,096 words, by the MiB, so that compression has work of both kinds. Both programs compress
//! at level 6, which is qemu-img's only one. Each first result of ours is compared with the source
//! by qemu-img, and qemu-img's by ours.

use crate::race::Race;
use diskwright_disk::{CompareOutcome, ConvertOptions, CreateRequest, OpenOptions, Opened, compare, convert};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Context, RowOutcome},
    peer::{self, Cost},
    progress::{Progress, report},
};
use diskwright_load::clock;
use diskwright_stats::numbers::bytes;
use diskwright_store::EngineKind;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

const PACK_BAR: Bar = Bar::AtLeast(2.5);
const UNPACK_BAR: Bar = Bar::AtLeast(1.5);
const COPY_BAR: Bar = Bar::AtLeast(1.2);
const CPU_BAR: Bar = Bar::AtMost(1.0);
/// How often both data of a source take turns.
const PIECE_BYTES: usize = 1 << 20;

struct Bench {
    qemu_img: PathBuf,
    dir: PathBuf,
    raw: PathBuf,
    size_bytes: u64,
    rounds: usize,
}

/// Raw to streamOptimized.
pub(crate) fn packed(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    with_bench(context, progress, Data::Mixed, |bench, found, progress| {
        let dest = bench.dir.join("packed.vmdk");
        let ours = || bench.ours(&bench.raw, &dest, Some("streamOptimized"));
        let theirs = || bench.theirs(&["-O", "vmdk", "-o", "subformat=streamOptimized"], &bench.raw, &dest);
        ours()?;
        peer::run(&bench.qemu_img, &["compare".as_ref(), bench.raw.as_os_str(), dest.as_os_str()], None)?;
        let our_bytes = remove(&dest)?;
        theirs()?;
        let their_bytes = remove(&dest)?;
        found.notes.push(format!("files of {} against {}", bytes(our_bytes), bytes(their_bytes)));
        bench
            .race("raw file to streamOptimized", (&bench.raw, &dest), (&ours, &theirs), (PACK_BAR, Some(CPU_BAR)))
            .run(true, found, progress)
    })
}

/// Raw to a compressed qcow2.
pub(crate) fn packed_qcow2(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    with_bench(context, progress, Data::Mixed, |bench, found, progress| {
        let dest = bench.dir.join("packed.qcow2");
        let ours = || bench.ours(&bench.raw, &dest, Some("compressed"));
        let one = || bench.theirs(&["-c", "-O", "qcow2"], &bench.raw, &dest);
        let many = || bench.theirs(&["-c", "-W", "-m", "16", "-O", "qcow2"], &bench.raw, &dest);
        ours()?;
        peer::run(&bench.qemu_img, &["compare".as_ref(), bench.raw.as_os_str(), dest.as_os_str()], None)?;
        let our_bytes = remove(&dest)?;
        one()?;
        let their_bytes = remove(&dest)?;
        found.notes.push(format!("files of {} against {}", bytes(our_bytes), bytes(their_bytes)));
        let ways = (&*bench.raw, &*dest);
        let name = "raw file to compressed qcow2, against one thread";
        bench.race(name, ways, (&ours, &one), (PACK_BAR, None)).run(true, found, progress)?;
        let name = "raw file to compressed qcow2, against -W -m 16";
        bench.race(name, ways, (&ours, &many), (COPY_BAR, None)).run(true, found, progress)
    })
}

/// From streamOptimized to raw.
pub(crate) fn unpacked(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    with_bench(context, progress, Data::Mixed, |bench, found, progress| {
        let (source, dest) = (bench.dir.join("packed.vmdk"), bench.dir.join("unpacked.raw"));
        bench.theirs(&["-O", "vmdk", "-o", "subformat=streamOptimized"], &bench.raw, &source)?;
        let ours = || bench.ours(&source, &dest, None);
        let theirs = || bench.theirs(&["-O", "raw"], &source, &dest);
        ours()?;
        bench.same(&dest)?;
        remove(&dest)?;
        bench
            .race("streamOptimized to raw file", (&source, &dest), (&ours, &theirs), (UNPACK_BAR, None))
            .run(true, found, progress)
    })
}

/// Raw to monolithicSparse and back.
pub(crate) fn sparse(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    there_and_back("vmdk", ["raw file to monolithicSparse", "monolithicSparse to raw file"], context, progress)
}

/// Raw to qcow2 and back.
pub(crate) fn qcow2(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    there_and_back("qcow2", ["raw file to qcow2", "qcow2 to raw file"], context, progress)
}

fn there_and_back(
    format: &str,
    names: [&str; 2],
    context: &Context<'_>,
    progress: &mut dyn Progress,
) -> Result<RowOutcome> {
    with_bench(context, progress, Data::Random, |bench, found, progress| {
        let (image, back) = (bench.dir.join(format!("image.{format}")), bench.dir.join("back.raw"));
        let ours = || bench.ours(&bench.raw, &image, None);
        let theirs = || bench.theirs(&["-O", format], &bench.raw, &image);
        let bars = (COPY_BAR, Some(CPU_BAR));
        let to = bench.race(names[0], (&bench.raw, &image), (&ours, &theirs), bars);
        for is_hot in [true, false] {
            to.run(is_hot, found, progress)?;
        }
        ours()?;
        peer::run(&bench.qemu_img, &["compare".as_ref(), bench.raw.as_os_str(), image.as_os_str()], None)?;
        let ours = || bench.ours(&image, &back, None);
        let theirs = || bench.theirs(&["-O", "raw"], &image, &back);
        let from = bench.race(names[1], (&image, &back), (&ours, &theirs), bars);
        for is_hot in [true, false] {
            from.run(is_hot, found, progress)?;
        }
        ours()?;
        bench.same(&back)
    })
}

/// What a source holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Data {
    Mixed,
    Random,
}

fn with_bench(
    context: &Context<'_>,
    progress: &mut dyn Progress,
    data: Data,
    measure: impl FnOnce(&Bench, &mut RowOutcome, &mut dyn Progress) -> Result<()>,
) -> Result<RowOutcome> {
    let Some(qemu_img) = peer::find("qemu-img") else {
        return Ok(RowOutcome::skipped("converting", peer::missing("qemu-img", "qemu-utils")));
    };
    let size_bytes: u64 = context.pick(256 << 20, 1 << 30);
    context.scratch.need("the copies", 4 * size_bytes)?;
    let dir = context.scratch.folder("vmdk")?;
    let raw = dir.join("source.raw");
    let bench = Bench { qemu_img, dir, raw, size_bytes, rounds: context.rounds(context.pick(3, 5)) };
    bench.make_source(data, progress)?;
    let mut found = RowOutcome::default();
    let what = if data == Data::Mixed { "half random, half text" } else { "random" };
    found.notes.push(format!("{} of data, {what}; {} rounds in turns", bytes(size_bytes), bench.rounds));
    measure(&bench, &mut found, progress)?;
    Ok(found)
}

fn remove(path: &Path) -> Result<u64> {
    let len = fs::metadata(path).map_err(LabError::file("measure", path))?.len();
    fs::remove_file(path).map_err(LabError::file("remove", path))?;
    Ok(len)
}

impl Bench {
    fn make_source(&self, data: Data, progress: &mut dyn Progress) -> Result<()> {
        let failed = || LabError::file("write", &self.raw);
        let mut file = File::create(&self.raw).map_err(failed())?;
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let words: Vec<String> =
            (0..4096).map(|_| format!("{:x} ", random.next_u64() >> (20 + random.next_u64() % 30))).collect();
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        for number in 0..self.size_bytes / PIECE_BYTES as u64 {
            report(progress, "prepare", number * PIECE_BYTES as u64, self.size_bytes, "source.raw")?;
            piece.clear();
            if data == Data::Mixed && number % 2 == 0 {
                while piece.len() < PIECE_BYTES {
                    piece.extend(words[random.next_u64() as usize % words.len()].as_bytes());
                }
                piece.truncate(PIECE_BYTES);
            } else {
                piece.resize(PIECE_BYTES, 0);
                random.fill_bytes(&mut piece);
            }
            file.write_all(&piece).map_err(failed())?;
        }
        file.sync_all().map_err(failed())
    }

    fn race<'a>(
        &'a self,
        name: &'a str,
        (source, dest): (&'a Path, &'a Path),
        (ours, theirs): (&'a dyn Fn() -> Result<Cost>, &'a dyn Fn() -> Result<Cost>),
        (speed_bar, cpu_bar): (Bar, Option<Bar>),
    ) -> Race<'a> {
        let &Self { size_bytes, rounds, .. } = self;
        Race { name, source, dest, size_bytes, rounds, ours, theirs, speed_bar, cpu_bar }
    }

    fn ours(&self, source: &Path, dest: &Path, subformat: Option<&str>) -> Result<Cost> {
        let dest_request = CreateRequest { subformat: subformat.map(str::to_owned), ..CreateRequest::default() };
        let options = ConvertOptions { dest: dest_request, ..ConvertOptions::default() };
        let (outcome, wall_ns, cpu) = clock::timed(|| convert(source, dest, &options, &mut |_, _| true));
        outcome?;
        Ok(Cost { wall_ns, cpu })
    }

    fn theirs(&self, options: &[&str], source: &Path, dest: &Path) -> Result<Cost> {
        let (source, dest) = (source.to_string_lossy(), dest.to_string_lossy());
        peer::run(&self.qemu_img, &[&["convert"], options, &[&*source, &*dest]].concat(), None)
    }

    /// Compares a copy with the source.
    fn same(&self, copy: &Path) -> Result<()> {
        let open = |path| Opened::open(path, &OpenOptions::default());
        let (source, opened) = (open(&self.raw)?, open(copy)?);
        let sides = [(source.device(), &*self.raw), (opened.device(), copy)];
        match compare(sides, EngineKind::Auto, &mut |_, _| true)? {
            CompareOutcome::Same => Ok(()),
            CompareOutcome::Different { offset_bytes } => Err(LabError::Program {
                command: format!("convert to {}", copy.display()),
                status: "done".into(),
                output: format!("the copy differs from the source at byte {offset_bytes}"),
            }),
        }
    }
}
