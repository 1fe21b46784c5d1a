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
//! All files are filled side by side, because their place on the disk alone can make a tenth: a raw
//! file made last had 0.87 of the first one's large writes. A second raw file is the control: its
//! ratio to the first is what place and chance do. It decides nothing. It is told beside every
//! check that did not pass, and in the notes with the number of bars that it would have missed: a
//! virtual disk cannot be judged more surely than the control.
//!
//! The page cache is filled by reading, as after a start of the machine. When a VHD is written
//! through the page cache, its blocks lie at odd multiples of 4 KiB, the kernel caches them in
//! smaller folios, and later reads are slower; docs/measurements.md has the figures. Some clouds
//! take idle pages from the page cache though memory is free (DAMON), and a later read goes to the
//! disk. So each file is read through right before each window on it, and the kernel's account of
//! the process says whether a window read from the disk.

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

/// A figure that is judged: its name, its bar, and where it is in the record of a round.
type Figure = (&'static str, Bar, fn(&Figures) -> f64);
const FIGURES: [Figure; 2] =
    [("IOPS", IOPS_BAR, |round| round.iops), ("CPU per I/O", CPU_BAR, |round| round.cpu_ns_per_io)];
const CACHED: [Figure; 1] = [("IOPS", CACHED_BAR, |round| round.iops)];

/// A disk and the raw file, round by round.
#[derive(Debug, Default)]
struct Pair {
    name: String,
    ours: Vec<Figures>,
    base: Vec<Figures>,
}

impl Pair {
    fn ratio(&self, figure: fn(&Figures) -> f64) -> Option<Ratio> {
        let of = |rounds: &[Figures]| -> Vec<f64> { rounds.iter().map(figure).collect() };
        Ratio::of(&of(&self.ours), &of(&self.base))
    }

    fn check(&self, what: &str, (figure_name, bar, figure): Figure) -> Check {
        let name = format!("{}, {what}: {figure_name}", self.name);
        match self.ratio(figure) {
            Some(ratio) => Check::of_interval(name, &ratio, bar),
            None => Check::broken(&name, "nothing was measured"),
        }
    }

    fn is_open(&self, figures: &[Figure]) -> bool {
        figures.iter().any(|figure| self.check("", *figure).outcome == Outcome::Unsure)
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
    let mut controls = [Vec::new(), Vec::new()];
    let (mut judged, mut missed, mut rounds_most) = (0, 0, 0);
    let mut found = RowOutcome::default();
    note_conditions(&mut found, context, &targets, size_bytes);
    let all = paper_monolithic(QUEUE_DEPTH);
    for (index, workload) in all.iter().enumerate() {
        let pairs = compare(context, &targets, workload, &FIGURES, (index, all.len()), progress, &mut |_| Ok(()))?;
        let Some((control, pairs)) = pairs.split_last() else { continue };
        for pair in pairs {
            rounds_most = rounds_most.max(pair.ours.len());
            for figure in FIGURES {
                let (mut check, raw) = (pair.check(&workload.name, figure), control.ratio(figure.2));
                if let Some(raw) = raw.filter(|_| check.outcome != Outcome::Pass) {
                    let said = format!("a second raw file measured {:.2} of the first", raw.median());
                    check.why.get_or_insert(said);
                }
                found.checks.push(check);
            }
        }
        for (medians, figure) in controls.iter_mut().zip(FIGURES) {
            medians.extend(control.ratio(figure.2).map(|ratio| ratio.median()));
            judged += 1;
            missed += usize::from(control.check("", figure).outcome != Outcome::Pass);
        }
    }
    found.may_miss = found.checks.len() / ONE_MAY_BE_MISSED_OF;
    for ((what, ..), medians) in FIGURES.iter().zip(&controls) {
        if let Some(summary) = Summary::of(medians) {
            found.notes.push(format!(
                "a second raw file against the first, over the workloads: {what} {:.2} ({:.2}..{:.2})",
                summary.median, summary.min, summary.max
            ));
        }
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
    let pairs = compare(context, &targets, &workload, &CACHED, (0, 1), progress, &mut warm)?;
    from_disk.window_ended()?;
    found.notes.extend(from_disk.note(&workload, &pairs));
    let what = format!("{} from the page cache", workload.name);
    found.checks.extend(pairs.iter().map(|pair| pair.check(&what, CACHED[0])));
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
    fn note(&self, workload: &Workload, pairs: &[Pair]) -> Option<String> {
        let block_bytes = u64::from(workload.block_bytes);
        let all: u64 = pairs.iter().flat_map(|pair| &pair.ours).map(|round| round.reads * block_bytes).sum();
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

/// Measures the targets in turns until no comparison with the first is open or the rounds are used
/// up. `before` is called before each window with the index of its target.
fn compare(
    context: &Context<'_>,
    targets: &[Target],
    workload: &Workload,
    figures: &[Figure],
    (index, count): (usize, usize),
    progress: &mut dyn Progress,
    before: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<Vec<Pair>> {
    let (usual, most) = (rounds(context), rounds_max(context));
    let mut pairs: Vec<Pair> =
        targets[1..].iter().map(|target| Pair { name: target.name().to_owned(), ..Pair::default() }).collect();
    let mut open: Vec<usize> = (1..targets.len()).collect();
    let cells = (targets.len() * most) as u64;
    let mut done = index as u64 * cells;
    let mut batch = 0;
    while !open.is_empty() && batch * usual < most {
        let chosen: Vec<usize> = iter::once(0).chain(open.iter().copied()).collect();
        let to_measure: Vec<OpenTarget> = chosen.iter().map(|&number| targets[number].to_measure()).collect();
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
            measure::interleaved(&to_measure, workload, &plan, &mut steps, &mut |place| before(chosen[place]))?
                .into_iter();
        done = steps.done;
        let base = all.next().unwrap_or_default();
        for (&number, ours) in open.iter().zip(all) {
            let pair = &mut pairs[number - 1];
            pair.ours.extend(ours);
            pair.base.extend(base.iter().cloned());
        }
        open.retain(|&number| pairs[number - 1].is_open(figures));
        batch += 1;
    }
    Ok(pairs)
}
