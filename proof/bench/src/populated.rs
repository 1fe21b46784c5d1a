//! Populated disks against the raw file: sixteen workloads with O_DIRECT, and 4K random reads from
//! the page cache.
//!
//! Each comparison is judged by the confidence interval of its rounds, not by their median. A
//! comparison that stays open is measured in further rounds beside the raw file, up to twelve times
//! the usual number. So clear comparisons take little time, and close ones as many rounds as they
//! need.
//!
//! Windows are short and many: the device's speed drifts within a second, and only windows close to
//! each other can be compared. With 60 windows of 250 ms 38 of 128 comparisons stayed open, with
//! 160 of 100 ms in less time only 8.
//!
//! A file's place on the device can decide its speed: on one machine random 4K writes to plain
//! files differed by a factor of three, and files that grow lie elsewhere than files of a known
//! length. So all files are filled side by side, and a disk is judged against its own blocks, used
//! as a raw file (`same_blocks.rs`), which take their turns with the disk. The notes say how the
//! blocks of each disk compare with a raw file elsewhere.
//!
//! A second raw file is the control: its ratio to the first is what place and chance do. It decides
//! nothing. It is told beside every check that did not pass, and in the notes with the number of
//! bars that it would have missed.
//!
//! The page cache is filled by reading, as after a start of the machine. When a VHD is written
//! through the page cache, its blocks lie at odd multiples of 4 KiB, the kernel caches them in
//! smaller folios, and later reads are slower; docs/measurements.md has the figures. Some clouds
//! take idle pages from the page cache though memory is free (DAMON), and a later read goes to the
//! disk. So each file is read through right before each window on it, and the kernel's account of
//! the process says whether a window read from the disk.

use crate::same_blocks;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, Outcome, RowOutcome, SEED},
    child::cache_word,
    measure::{self, Plan, Ratio, Steps},
    peer,
    progress::{Progress, report},
    targets::{self, Container, Target},
    traffic::Traffic,
};
use diskwright_load::{
    OpenTarget,
    figures::Figures,
    machine::takes_idle_pages,
    seeds,
    workload::{Direction, Pattern, Workload, paper_monolithic},
};
use diskwright_stats::{
    numbers::{bytes, duration},
    summary::Summary,
};
use diskwright_store::CacheMode;
use std::{fs::File, iter, time::Duration};

const QUEUE_DEPTH: u32 = 32;
/// Largest requests of which a window of the usual length has many bursts.
const FINE_BLOCK_BYTES: u32 = 256 << 10;
const IOPS_BAR: Bar = Bar::AtLeast(0.95);
const CPU_BAR: Bar = Bar::AtMost(1.10);
/// Name of the control, a second raw file.
const CONTROL: &str = "second raw file";
const CACHED_BAR: Bar = Bar::AtLeast(0.95);
/// One of this many comparisons may be missed.
const ONE_MAY_BE_MISSED_OF: usize = 64;

/// The disks that are compared with the raw file.
const HYPER_V: &[Container] =
    &[Container::VhdDynamic, Container::VhdDifferencing, Container::VhdxDynamic, Container::VhdxDifferencing];
const VMDK: &[Container] = &[Container::VmdkFlat, Container::VmdkSparse, Container::VmdkChild];
const OTHERS: &[Container] = &[Container::Qcow2, Container::Qcow2Child, Container::VdiDynamic];

/// A figure that is judged.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Figure {
    name: &'static str,
    bar: Bar,
    /// Where it is in the record of a round.
    of: fn(&Figures) -> f64,
}

const IOPS: Figure = Figure { name: "IOPS", bar: IOPS_BAR, of: |round| round.iops };
const CPU: Figure = Figure { name: "CPU per I/O", bar: CPU_BAR, of: |round| round.cpu_ns_per_io };
pub(crate) const FIGURES: [Figure; 2] = [IOPS, CPU];
const CACHED: [Figure; 1] = [Figure { bar: CACHED_BAR, ..IOPS }];

/// A disk and its peers, round by round.
#[derive(Debug, Default)]
pub(crate) struct Compared {
    name: String,
    ours: Vec<Figures>,
    /// The raw file.
    raw: Vec<Figures>,
    /// The disk's own blocks as a raw file. Empty if there is no such peer.
    same_blocks: Vec<Figures>,
}

fn ratio(ours: &[Figures], base: &[Figures], of: fn(&Figures) -> f64) -> Option<Ratio> {
    let values = |rounds: &[Figures]| -> Vec<f64> { rounds.iter().map(of).collect() };
    Ratio::of(&values(ours), &values(base))
}

impl Compared {
    fn ratio(&self, figure: Figure) -> Option<Ratio> {
        let base = if self.same_blocks.is_empty() { &self.raw } else { &self.same_blocks };
        ratio(&self.ours, base, figure.of)
    }

    /// The disk's blocks against the raw file: what the place does.
    fn place(&self, figure: Figure) -> Option<Ratio> {
        ratio(&self.same_blocks, &self.raw, figure.of)
    }

    pub(crate) fn check(&self, what: &str, figure: Figure) -> Check {
        let name = format!("{}, {what}: {}", self.name, figure.name);
        match self.ratio(figure) {
            Some(ratio) => Check::of_interval(name, &ratio, figure.bar),
            None => Check::broken(&name, "nothing was measured"),
        }
    }

    /// The check, with a remark if it did not pass: the figures of the raw file and the control.
    fn check_beside(&self, control: &Self, what: &str, figure: Figure) -> Check {
        let mut check = self.check(what, figure);
        let elsewhere = ratio(&self.ours, &self.raw, figure.of).zip(control.ratio(figure));
        if let Some((ours, control)) = elsewhere.filter(|_| check.outcome != Outcome::Pass) {
            let (ours, control) = (ours.median(), control.median());
            check.why.get_or_insert(format!("against the raw file {ours:.2}, and a second raw file {control:.2}"));
        }
        check
    }

    fn is_open(&self, figures: &[Figure]) -> bool {
        figures.iter().any(|figure| self.check("", *figure).outcome == Outcome::Unsure)
    }
}

/// A target to compare with the first, and its blocks as a raw file, if they are a peer.
#[derive(Debug)]
pub(crate) struct Subject {
    target: OpenTarget,
    same_blocks: Option<OpenTarget>,
}

impl Subject {
    pub(crate) fn of(target: OpenTarget) -> Self {
        Self { target, same_blocks: None }
    }

    fn alone(target: &Target) -> Self {
        Self::of(target.to_measure())
    }

    fn with_its_blocks(target: &Target) -> Result<Self> {
        let device = same_blocks::device_of(target)?;
        let name = format!("blocks of {}", target.name());
        let same_blocks = device.map(|device| targets::open_target(&name, "raw file", device, target.cache));
        Ok(Self { target: target.to_measure(), same_blocks })
    }
}

/// VHD and VHDX.
pub(crate) fn workloads(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    workloads_of(HYPER_V, context, progress)
}

/// VMDK.
pub(crate) fn workloads_vmdk(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    workloads_of(VMDK, context, progress)
}

/// qcow2 and VDI.
pub(crate) fn workloads_others(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    workloads_of(OTHERS, context, progress)
}

fn workloads_of(disks: &[Container], context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes = context.pick(512 << 20, 2 << 30);
    let targets = prepare(disks, context, size_bytes, CacheMode::Direct, true, progress)?;
    let subjects = targets.iter().map(Subject::with_its_blocks).collect::<Result<Vec<_>>>()?;
    let (mut controls, mut places) = ([Vec::new(), Vec::new()], vec![Vec::new(); disks.len()]);
    let (mut judged, mut missed, mut rounds_most) = (0, 0, 0);
    let mut found = RowOutcome::default();
    note_conditions(&mut found, context, &targets, size_bytes);
    let all = paper_monolithic(QUEUE_DEPTH);
    for (index, workload) in all.iter().enumerate() {
        let compared = compare(context, &subjects, workload, &FIGURES, (index, all.len()), progress, &mut |_| Ok(()))?;
        let Some((control, disks)) = compared.split_last() else { continue };
        for (disk, places) in disks.iter().zip(&mut places) {
            rounds_most = rounds_most.max(disk.ours.len());
            found.checks.extend(FIGURES.map(|figure| disk.check_beside(control, &workload.name, figure)));
            places.extend(disk.place(IOPS).map(|ratio| ratio.median()));
        }
        for (medians, figure) in controls.iter_mut().zip(FIGURES) {
            medians.extend(control.ratio(figure).map(|ratio| ratio.median()));
            judged += 1;
            missed += usize::from(control.check("", figure).outcome != Outcome::Pass);
        }
    }
    found.may_miss = found.checks.len() / ONE_MAY_BE_MISSED_OF;
    let range = |what: String, medians: &[f64]| {
        Summary::of(medians).map(|found| format!("{what} {:.2} ({:.2}..{:.2})", found.median, found.min, found.max))
    };
    for (disk, medians) in disks.iter().zip(&places) {
        let what =
            format!("the blocks of {} as a raw file against the raw file, over the workloads: IOPS", disk.name());
        found.notes.extend(range(what, medians));
    }
    for (figure, medians) in FIGURES.iter().zip(&controls) {
        let what = format!("a second raw file against the first, over the workloads: {}", figure.name);
        found.notes.extend(range(what, medians));
    }
    found.notes.push(format!("the closest had {rounds_most} rounds"));
    found.notes.push(format!("a second raw file would have missed or left open {missed} of {judged} by the same bars"));
    Ok(found)
}

pub(crate) fn page_cache(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes = context.pick(256 << 20, 512 << 20);
    let targets = prepare(HYPER_V, context, size_bytes, CacheMode::PageCache, false, progress)?;
    context.scratch.settle()?;
    for target in &targets {
        forget(target)?;
    }
    let mut found = RowOutcome::default();
    note_conditions(&mut found, context, &targets, size_bytes);
    let workload = Workload::new(Pattern::Random, Direction::Read, 4096, QUEUE_DEPTH);
    let mut from_disk = FromDisk::default();
    let mut warm = |index: usize| {
        from_disk.window_ended()?;
        peer::warm(&targets[index].path)?;
        from_disk.window_begins()
    };
    let subjects: Vec<Subject> = targets.iter().map(Subject::alone).collect();
    let compared = compare(context, &subjects, &workload, &CACHED, (0, 1), progress, &mut warm)?;
    from_disk.window_ended()?;
    found.notes.extend(from_disk.note(&workload, &compared));
    let what = format!("{} from the page cache", workload.name);
    found.checks.extend(compared.iter().map(|disk| disk.check(&what, CACHED[0])));
    Ok(found)
}

/// Drops a target's file from the page cache, where writing has left it.
fn forget(target: &Target) -> Result<()> {
    let file = File::open(&target.path).map_err(LabError::file("open", &target.path))?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
        .map_err(|errno| LabError::file("take out of the page cache", &target.path)(errno.into()))
}

/// Bytes that windows read from the disk although all should come from the page cache.
#[derive(Default)]
struct FromDisk {
    begun: Option<Traffic>,
    read_bytes: u64,
}

impl FromDisk {
    fn window_begins(&mut self) -> Result<()> {
        self.begun = Some(Traffic::of_process()?);
        Ok(())
    }

    fn window_ended(&mut self) -> Result<()> {
        if let Some(begun) = self.begun.take() {
            self.read_bytes += (Traffic::of_process()? - begun).read_bytes;
        }
        Ok(())
    }

    /// A note, if more than a hundredth of what was read came from the disk.
    fn note(&self, workload: &Workload, disks: &[Compared]) -> Option<String> {
        let block_bytes = u64::from(workload.block_bytes);
        let all: u64 = disks.iter().flat_map(|disk| &disk.ours).map(|round| round.reads * block_bytes).sum();
        let why = if takes_idle_pages() { ": this machine takes idle pages out of it (DAMON)" } else { "" };
        (self.read_bytes > all / 100).then(|| {
            format!(
                "{} of {} were read from the disk and not from the page cache{why}",
                bytes(self.read_bytes),
                bytes(all)
            )
        })
    }
}

/// Makes the raw file, the disks, and with `control` another raw file at the end, all filled side
/// by side.
fn prepare(
    disks: &[Container],
    context: &Context<'_>,
    size_bytes: u64,
    cache: CacheMode,
    control: bool,
    progress: &mut dyn Progress,
) -> Result<Vec<Target>> {
    let how = context.preparation(size_bytes, cache);
    let (dir, control_dir) = (context.scratch.folder("disks")?, context.scratch.folder("control")?);
    let compared = iter::once(Container::Raw).chain(disks.iter().copied());
    let wanted: Vec<_> = compared
        .map(|container| (container, &*dir))
        .chain(control.then_some((Container::Raw, &*control_dir)))
        .collect();
    let all_bytes = wanted.len() as u64 * size_bytes;
    context.scratch.need("these disks", all_bytes + (1 << 30))?;
    let mut tick = |done| report(progress, "prepare", done, 2 * all_bytes, "filling");
    let filled = targets::make_filled_side_by_side(&wanted, &how, &mut tick)?;
    let mut targets = Vec::new();
    for (index, ((container, _), filled)) in wanted.iter().zip(filled).enumerate() {
        let before = all_bytes + index as u64 * size_bytes;
        let mut tick = |done| report(progress, "prepare", before + done, 2 * all_bytes, container.name());
        let target = targets::open_verified(*container, filled.path, &how, &mut tick)?;
        targets.push(if index <= disks.len() { target } else { target.named(CONTROL) });
    }
    Ok(targets)
}

/// Time of a window of small requests.
fn cell(context: &Context<'_>) -> Duration {
    context.options.cell.unwrap_or(Duration::from_millis(100))
}

/// Time of one window. Large requests complete in bursts of the whole queue, so a window of 100 ms
/// has only about nine of 1 MiB, and its figure is one of nine values: it is longer for them.
fn window(context: &Context<'_>, workload: &Workload) -> Duration {
    cell(context) * (workload.block_bytes / FINE_BLOCK_BYTES).max(1)
}

/// Rounds of a comparison: many and short, because a disturbance seldom lasts for all.
fn rounds(context: &Context<'_>) -> usize {
    context.rounds(context.pick(7, 40))
}

/// Most rounds of a comparison that stays open.
fn rounds_max(context: &Context<'_>) -> usize {
    rounds(context) * context.pick(2, 12)
}

fn note_conditions(found: &mut RowOutcome, context: &Context<'_>, targets: &[Target], size_bytes: u64) {
    found.notes.push(format!(
        "disks of {}, filled, read back and compared; {} rounds, up to {} while a comparison is open, cells of {}, longer for requests above {}",
        bytes(size_bytes),
        rounds(context),
        rounds_max(context),
        duration(cell(context).as_nanos() as f64),
        bytes(FINE_BLOCK_BYTES.into())
    ));
    for target in targets {
        let wanted = targets.first().map_or(target.cache, |first| first.cache);
        if target.cache != wanted {
            found.notes.push(format!(
                "{} is in cache mode {}, the raw file in {}: not like with like",
                target.name(),
                cache_word(target.cache),
                cache_word(wanted)
            ));
        }
    }
}

/// Measures the subjects in turns until no comparison is open or the rounds are used up. The first
/// is the raw file. `before` is called before each window with the index of its subject.
pub(crate) fn compare(
    context: &Context<'_>,
    subjects: &[Subject],
    workload: &Workload,
    figures: &[Figure],
    (index, count): (usize, usize),
    progress: &mut dyn Progress,
    before: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<Vec<Compared>> {
    let (usual, most) = (rounds(context), rounds_max(context));
    let mut compared: Vec<Compared> = subjects[1..]
        .iter()
        .map(|subject| Compared { name: subject.target.name.clone(), ..Compared::default() })
        .collect();
    let mut open: Vec<usize> = (1..subjects.len()).collect();
    let windows = subjects.iter().map(|subject| 1 + usize::from(subject.same_blocks.is_some())).sum::<usize>();
    let cells = (windows * most) as u64;
    let mut done = index as u64 * cells;
    let mut batch = 0;
    while !open.is_empty() && batch * usual < most {
        // Each window's target, and the subject that it belongs to.
        let mut places = vec![0];
        let mut to_measure = vec![subjects[0].target.clone()];
        for &number in &open {
            let subject = &subjects[number];
            for target in iter::once(&subject.target).chain(&subject.same_blocks) {
                places.push(number);
                to_measure.push(target.clone());
            }
        }
        let plan = Plan {
            rounds: usual,
            warm_up: Duration::ZERO,
            measured: Duration::ZERO,
            engine: context.options.engine,
            seed: seeds::of_window(SEED, "batch", batch),
        }
        .with_cell(window(context, workload));
        let mut steps = Steps { progress, phase: "measure", done, total: count as u64 * cells };
        let mut all =
            measure::interleaved(&to_measure, workload, &plan, &mut steps, &mut |place| before(places[place]))?
                .into_iter();
        done = steps.done;
        let raw = all.next().unwrap_or_default();
        for &number in &open {
            let disk = &mut compared[number - 1];
            disk.ours.extend(all.next().unwrap_or_default());
            disk.raw.extend(raw.iter().cloned());
            if subjects[number].same_blocks.is_some() {
                disk.same_blocks.extend(all.next().unwrap_or_default());
            }
        }
        open.retain(|&number| compared[number - 1].is_open(figures));
        batch += 1;
    }
    Ok(compared)
}
