//! Threads under the scheduler shuttle. At every lock, atomic, channel and store operation it
//! chooses by a seed which thread continues. Tested are the map's lock-free look-ups, allocation,
//! the grace period of freed space, the VHDX log, and shared flushes. The threads' reads must be
//! possible on a linearizable disk, and a power cut at any point must keep flushed data. Then rules
//! are broken on purpose, and the scheduler must find each.
//!
//! Only with `--features shuttle` (as in `./test`): the locks of the code under test are then
//! shuttle's, see `store/src/sync.rs`. `DISKWRIGHT_SHUTTLE_RUNS` is the number of schedules of each
//! test (some run only a share), `DISKWRIGHT_SHUTTLE_SEED` the first seed. Shuttle simulates
//! sequentially consistent memory. Weaker memory orderings are tested with the thread sanitizer
//! (`.ci/tsan`).
#![cfg(feature = "shuttle")]

use diskwright_disk::Disk;
use diskwright_image::{BlockState, Commit, ImageWriter};
use diskwright_proving::{
    campaign::{Tally, Thoroughness, cut_one, panic_message},
    crowd::{Crowd, crowds},
    cut::{CutMode, Cutter},
    dice::Dice,
    disk::{DiskCase, named},
    history::Snapshot,
    ledger::{Version, Window, stamp},
    linear::{Clock, Effect, Event, Mix, Plan, drive, judge},
    stage::Outcome,
    world::World,
};
use diskwright_store::{
    BlockDevice, Blocking, EngineKind,
    sync::{
        broken::{Rule, break_rule, use_loaders},
        thread,
    },
};
use shuttle::{
    Config, MaxSteps, Runner,
    scheduler::{PctScheduler, RandomScheduler, Scheduler},
};
use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
};

/// Number of scenes within which a broken rule must be found.
const PATIENCE: u64 = 1_000;
/// Number of schedules of each scene.
const BATCH: usize = 6;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

fn run_under(scheduler: impl Scheduler + 'static, body: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.max_steps = MaxSteps::None;
    // Complete parsers and writers run on the stack of a thread.
    config.stack_size = 1 << 20;
    config.failure_persistence = shuttle::FailurePersistence::None;
    Runner::new(scheduler, config).run(body);
}

/// Runs one scene under several schedules. Every third seed uses random schedules. The others use
/// thread priorities that change once or twice (PCT), which find defects that occur only if one
/// thread runs for long. (PCT learns the length of the scene from its first schedule.)
fn schedule(seed: u64, body: impl Fn() -> Outcome<u64> + Send + Sync + 'static) -> Outcome<u64> {
    let outcome: Arc<Mutex<Outcome<u64>>> = Arc::new(Mutex::new(Ok(0)));
    let told = Arc::clone(&outcome);
    let body = move || {
        let found = body();
        let mut told = told.lock().unwrap();
        *told = told.clone().and_then(|before| Ok(before + found?));
    };
    let ran = catch_unwind(AssertUnwindSafe(|| match seed % 3 {
        0 => run_under(PctScheduler::new_from_seed(seed, 2, BATCH), body),
        1 => run_under(PctScheduler::new_from_seed(seed, 3, BATCH), body),
        _ => run_under(RandomScheduler::new_from_seed(seed, BATCH), body),
    }));
    let outcome = outcome.lock().unwrap().clone();
    // An error of the scene comes first: shuttle panics if one ends before its threads begin.
    let judged = outcome?;
    ran.map_err(|panic| format!("panic: {}", panic_message(&*panic)))?;
    Ok(judged)
}

/// Something to schedule: it gets a seed and returns how many units it has judged.
trait Scene: Fn(u64) -> Outcome<u64> + Clone + Send + Sync + 'static {}
impl<F: Fn(u64) -> Outcome<u64> + Clone + Send + Sync + 'static> Scene for F {}

/// Runs scenes until one fails. Returns the number of units judged, the seed, and the error.
fn hunt(seeds: Range<u64>, scene: &impl Scene) -> (u64, Option<(u64, String)>) {
    let mut judged = 0;
    for seed in seeds {
        let scene = scene.clone();
        match schedule(seed, move || scene(seed)) {
            Ok(more) => judged += more,
            Err(error) => return (judged, Some((seed, error))),
        }
    }
    (judged, None)
}

/// `share` divides the number of schedules, for scenes that take longer; at least one batch is
/// run.
fn all_schedules_are_right(what: &str, share: u64, units: &str, scene: impl Scene) {
    let (first, runs) =
        (number("DISKWRIGHT_SHUTTLE_SEED", 1), number("DISKWRIGHT_SHUTTLE_RUNS", 120).div_ceil(BATCH as u64 * share));
    let (judged, wrong) = hunt(first..first + runs, &scene);
    if let Some((seed, error)) = wrong {
        panic!(
            "{what}, seed {seed}: {error}\n  again: DISKWRIGHT_SHUTTLE_SEED={seed} DISKWRIGHT_SHUTTLE_RUNS=1 cargo test -p diskwright-proving --features shuttle --test interleavings"
        );
    }
    assert!(judged > 0, "{what}: nothing was judged");
    let schedules = runs * BATCH as u64;
    println!(
        "schedules: {what}: {schedules} schedules, {judged} {units} judged (seeds {first} to {})",
        first + runs - 1
    );
}

fn must_be_found(rule: Rule, what: &str, scene: impl Scene) {
    break_rule(Some(rule));
    let (_, wrong) = hunt(1..PATIENCE, &scene);
    break_rule(None);
    let (seed, how) =
        wrong.unwrap_or_else(|| panic!("{rule:?} is broken in {what}, and {PATIENCE} scenes did not find it"));
    // The scene itself is right: with all rules kept, the same seed finds nothing.
    assert_eq!(hunt(seed..seed + 1, &scene).1, None, "{what}");
    println!("schedules: caught: {rule:?} ({what}, seed {seed}): {}", how.lines().next().unwrap_or_default());
}

const PLAN: Plan = Plan {
    threads: 3,
    steps: 20,
    depth: 2,
    engine: EngineKind::Sync,
    block_sectors: 8,
    sectors_max: 16,
    shared_rings: false,
    sweeps: false,
    mix: Mix::CHURNING,
    seed: 1,
};

/// A disk of a few blocks, all of them watched.
fn small(name: &str, blocks: u64) -> DiskCase {
    let kind = named(name);
    let block_sectors = u64::from(kind.block_bytes.unwrap_or(64 << 10)) / 512;
    let windows = (0..blocks).map(|block| Window { first: block * block_sectors, count: block_sectors }).collect();
    DiskCase { size_bytes: blocks * block_sectors * 512, windows, ..kind }
}

/// Runs the threads of a plan. Returns their writes and reads.
fn driven(disk: &Arc<Disk>, plan: Plan, clock: &Arc<Clock>) -> Outcome<Vec<Event>> {
    let threads: Vec<_> = (0..plan.threads)
        .map(|me| {
            let (disk, clock) = (Arc::clone(disk), Arc::clone(clock));
            thread::spawn(move || drive(&*disk, &plan, me, &clock))
        })
        .collect();
    let mut events = Vec::new();
    for thread in threads {
        events.extend(thread.join().map_err(|panic| panic_message(&*panic))??);
    }
    Ok(events)
}

/// Threads issue all kinds of requests to the same sectors. Their reads are judged, sector by
/// sector.
fn all_kinds_of_requests(case: DiskCase) -> impl Scene {
    move |seed| {
        let world = World::default();
        case.make(&world)?;
        let disk = case.open_disk(&world, true)?;
        let mut base = vec![0; case.size_bytes as usize];
        let text = |error: std::io::Error| error.to_string();
        Blocking::open(&*disk, EngineKind::Sync).and_then(|mut queue| queue.read(0, &mut base)).map_err(text)?;
        let block_sectors = case.windows[0].count;
        let plan = Plan { block_sectors, sectors_max: block_sectors.min(64), seed, ..PLAN };
        let clock = Arc::new(Clock::default());
        let mut events = driven(&disk, plan, &clock)?;
        let look = |events: &mut Vec<Event>, disk: &dyn BlockDevice| -> Outcome {
            let mut shown = vec![0; base.len()];
            let begin = clock.tick();
            Blocking::open(disk, EngineKind::Sync).and_then(|mut queue| queue.read(0, &mut shown)).map_err(text)?;
            let count = shown.len() as u64 / 512;
            events.push(Event { act: Effect::Read(shown), first: 0, count, begin, end: clock.tick() });
            Ok(())
        };
        look(&mut events, &*disk)?;
        disk.close().map_err(|error| error.to_string())?;
        drop(disk);
        case.check(&world, &case.path())?;
        let again = case.open_disk(&world, false)?;
        look(&mut events, &*again)?;
        judge(&base, events)
    }
}

/// The same scene, in which every second queue passes work that must wait to the disk's loader.
fn with_loaders(scene: impl Scene) -> impl Scene {
    move |seed| {
        use_loaders(true);
        let judged = scene(seed);
        use_loaders(false);
        judged
    }
}

/// Images are added on top while threads issue all kinds of requests to the same sectors. Their
/// reads are judged. A former top must not be written any more, and the chain must open again.
fn images_are_added(case: DiskCase) -> impl Scene {
    move |seed| {
        let world = World::default();
        case.make(&world)?;
        let disk = case.open_disk(&world, true)?;
        let base = vec![0; case.size_bytes as usize];
        let block_sectors = case.windows[0].count;
        let plan = Plan { block_sectors, sectors_max: block_sectors.min(64), seed, steps: 12, ..PLAN };
        let clock = Arc::new(Clock::default());
        let joins = {
            let (case, world, disk) = (case.clone(), world.clone(), Arc::clone(&disk));
            move || -> Outcome<Vec<_>> {
                let mut formers = Vec::new();
                for number in 1..=2 {
                    let layer = case.make_next_top(&world, &disk, number)?;
                    disk.push_layer(layer).map_err(|error| error.to_string())?;
                    let path = case.path_of(number - 1);
                    formers.push((world.snapshot().file(&path).cloned(), path));
                }
                Ok(formers)
            }
        };
        let joined = thread::spawn(joins);
        let mut events = driven(&disk, plan, &clock)?;
        let formers = joined.join().map_err(|panic| panic_message(&*panic))??;
        disk.close().map_err(|error| error.to_string())?;
        drop(disk);
        for (then, path) in formers {
            if world.snapshot().file(&path) != then.as_ref() {
                return Err(format!("{} was written after another image had become the top", path.display()));
            }
        }
        (0..=2).try_for_each(|number| case.check(&world, &case.path_of(number)))?;
        let again = case.open_disk(&world, false)?;
        let mut shown = vec![0; base.len()];
        let begin = clock.tick();
        let read = Blocking::open(&*again, EngineKind::Sync).and_then(|mut queue| queue.read(0, &mut shown));
        read.map_err(|error| error.to_string())?;
        let count = shown.len() as u64 / 512;
        events.push(Event { act: Effect::Read(shown), first: 0, count, begin, end: clock.tick() });
        judge(&base, events)
    }
}

/// An image joins and takes a write of one sector or of a whole block, while another thread reads
/// the same block with the former chain: its tables, or its words in the map.
fn an_image_joins_during_reads(case: DiskCase, whole_block: bool) -> impl Scene {
    move |_| {
        let text = |error: std::io::Error| error.to_string();
        let world = World::default();
        case.make(&world)?;
        let before = case.open_disk(&world, true)?;
        let former = case.make_next_top(&world, &before, 1)?;
        before.push_layer(former).map_err(|error| error.to_string())?;
        let mut base = vec![0; case.size_bytes as usize];
        let block_sectors = case.windows[0].count;
        let sectors = block_sectors.min(16);
        let owned = &mut base[512..(sectors as usize / 2) * 512];
        stamp(owned, 1, 1);
        Blocking::open(&*before, EngineKind::Sync)
            .and_then(|mut queue| queue.write(512, owned, false))
            .map_err(text)?;
        before.close().map_err(|error| error.to_string())?;
        drop(before);
        // Opened again, its map is empty.
        let disk = case.open_disk(&world, true)?;
        let clock = Arc::new(Clock::default());
        let top = case.make_next_top(&world, &disk, 2)?;
        let read = move |queue: &mut Blocking, clock: &Clock| {
            let begin = clock.tick();
            let mut bytes = vec![0; (sectors * 512) as usize];
            queue.read(0, &mut bytes).map_err(text)?;
            Ok::<_, String>(Event { act: Effect::Read(bytes), first: 0, count: sectors, begin, end: clock.tick() })
        };
        let joins = {
            let disk = Arc::clone(&disk);
            move || disk.push_layer(top).map(|()| Vec::new()).map_err(|error| error.to_string())
        };
        // It does not wait for the requests of the former chain, as the joining thread does.
        let writes = {
            let (disk, clock) = (Arc::clone(&disk), Arc::clone(&clock));
            move || -> Outcome<Vec<Event>> {
                let mut queue = Blocking::open(&*disk, EngineKind::Sync).map_err(text)?;
                let (first, count) = if whole_block { (0, block_sectors) } else { (2, 1) };
                let mut bytes = vec![0; (count * 512) as usize];
                stamp(&mut bytes, first, 2);
                let begin = clock.tick();
                queue.write(first * 512, &bytes, false).map_err(text)?;
                let written = Event { act: Effect::Write(2), first, count, begin, end: clock.tick() };
                Ok(vec![written, read(&mut queue, &clock)?])
            }
        };
        let reads = {
            let (disk, clock) = (Arc::clone(&disk), Arc::clone(&clock));
            move || -> Outcome<Vec<Event>> {
                let mut queue = Blocking::open(&*disk, EngineKind::Sync).map_err(text)?;
                (0..2).map(|_| read(&mut queue, &clock)).collect()
            }
        };
        let threads = [thread::spawn(joins), thread::spawn(writes), thread::spawn(reads)];
        let mut events = Vec::new();
        for thread in threads {
            events.extend(thread.join().map_err(|panic| panic_message(&*panic))??);
        }
        let mut queue = Blocking::open(&*disk, EngineKind::Sync).map_err(text)?;
        events.push(read(&mut queue, &clock)?);
        judge(&base, events)
    }
}

/// One thread allocates and frees blocks, which reuse the same space; others read and write them.
fn space_is_reused(case: DiskCase) -> impl Scene {
    move |seed| {
        let world = World::default();
        case.make(&world)?;
        let disk = case.open_disk(&world, true)?;
        let text = |error: std::io::Error| error.to_string();
        let clock = Arc::new(Clock::default());
        let block_sectors = case.windows[0].count;
        let block_bytes = block_sectors * 512;
        let mut base = vec![0; case.size_bytes as usize];
        Blocking::open(&*disk, EngineKind::Sync).and_then(|mut queue| queue.read(0, &mut base)).map_err(text)?;
        let act = move |queue: &mut Blocking, clock: &Clock, version: Option<Version>, first: u64, count: u64| {
            let begin = clock.tick();
            let mut bytes = vec![0; (count * 512) as usize];
            let act = match version {
                None => queue.read(first * 512, &mut bytes).map(|()| Effect::Read(bytes)),
                Some(0) => queue.discard(first * 512, count * 512).map(|()| Effect::Write(0)),
                Some(version) => {
                    stamp(&mut bytes, first, version);
                    queue.write(first * 512, &bytes, false).map(|()| Effect::Write(version))
                }
            };
            act.map(|act| Event { act, first, count, begin, end: clock.tick() }).map_err(text)
        };
        let allocates_and_frees = {
            let (disk, clock) = (Arc::clone(&disk), Arc::clone(&clock));
            move || -> Outcome<Vec<Event>> {
                let mut queue = Blocking::open(&*disk, EngineKind::Sync).map_err(text)?;
                let mut events = Vec::new();
                for turn in 0..4 {
                    let first = turn % 2 * block_sectors;
                    events.push(act(&mut queue, &clock, Some(1 + turn as Version), first, block_sectors)?);
                    events.push(act(&mut queue, &clock, Some(0), first, block_sectors)?);
                    queue.flush().map_err(text)?;
                }
                Ok(events)
            }
        };
        let visits = |me: u64| {
            let (disk, clock) = (Arc::clone(&disk), Arc::clone(&clock));
            move || -> Outcome<Vec<Event>> {
                let mut dice = Dice::new(seed, me);
                let mut queue = Blocking::open(&*disk, EngineKind::Sync).map_err(text)?;
                let mut visit = |turn: Version| {
                    let version = (turn % 4 == 3).then_some(100 * me as Version + turn);
                    act(&mut queue, &clock, version, dice.below(2 * block_sectors), 1)
                };
                (0..8).map(&mut visit).collect()
            }
        };
        let threads = [thread::spawn(allocates_and_frees), thread::spawn(visits(1)), thread::spawn(visits(2))];
        let mut events = Vec::new();
        for thread in threads {
            events.extend(thread.join().map_err(|panic| panic_message(&*panic))??);
        }
        let mut queue = Blocking::open(&*disk, EngineKind::Sync).map_err(text)?;
        events.push(act(&mut queue, &clock, None, 0, case.size_bytes / block_bytes * block_sectors)?);
        judge(&base, events)
    }
}

/// Several queues, and power cuts at all points of their history.
fn power_cuts(crowd: Crowd, modes: usize, resume: bool) -> impl Scene {
    move |seed| {
        let mut tally = Tally::default();
        cut_one(&crowd, seed, None, &mut tally, Thoroughness { modes, resume, opinions: 0 })?;
        Ok(tally.states)
    }
}

/// The state after a power cut that loses everything that is not durable.
fn what_is_durable(world: &World) -> Snapshot {
    let (start, history) = world.history();
    let mut cutter = Cutter::new(start, &history, 1);
    while cutter.next().is_some() {
        cutter.step();
    }
    cutter.state_after_cut(CutMode::Nothing, &mut Dice::new(1, 1))
}

/// Threads that allocate in an image and flush it themselves, without a flusher thread that
/// serializes them. After each flush the power fails: what its thread has committed must be there.
fn flushes_of_an_image(case: DiskCase) -> impl Scene {
    move |seed| {
        let world = World::default();
        case.make(&world)?;
        world.settle();
        let disk = case.open_disk(&world, true)?;
        let block_bytes = disk.layers()[0].image.info().block_bytes;
        let text = |error: diskwright_image::ImageError| error.to_string();
        let writing = |disk: &Disk| disk.layers()[0].image.writer().map(ImageWriter::begin_writing);
        writing(&disk).ok_or("the image is not writable")?.map_err(text)?;
        let threads: Vec<_> = (0..3_u64)
            .map(|me| {
                let (disk, world) = (Arc::clone(&disk), world.clone());
                thread::spawn(move || -> Outcome<Vec<_>> {
                    let image = &disk.layers()[0].image;
                    let writer = image.writer().ok_or("the image is not writable")?;
                    let mut after = Vec::new();
                    for block in [me, me + 3] {
                        let reservation = writer.reserve_waiting(block).map_err(text)?;
                        if let Some((at, bytes)) = reservation.init {
                            image.store().write_at(&bytes, at).map_err(|error| error.to_string())?;
                            writer.initialised(block);
                        }
                        image
                            .store()
                            .write_at(&[me as u8 + 1; 512], reservation.offset_bytes)
                            .map_err(|error| error.to_string())?;
                        writer.commit_waiting(block, Commit::Whole).map_err(text)?;
                        writer.flush().map_err(text)?;
                        after.push((block, what_is_durable(&world)));
                    }
                    Ok(after)
                })
            })
            .collect();
        let mut judged = 0;
        for thread in threads {
            for (block, left) in thread.join().map_err(|panic| panic_message(&*panic))?? {
                let world = World::of(left);
                let disk = case.open_disk(&world, false)?;
                let mut first = [0; 512];
                let mut queue = Blocking::open(&*disk, EngineKind::Sync).map_err(|error| error.to_string())?;
                queue.read(block * block_bytes, &mut first).map_err(|error| error.to_string())?;
                let mut state = [BlockState::Absent];
                disk.layers()[0].image.block_states(block, &mut state).map_err(text)?;
                if first != [(block % 3) as u8 + 1; 512] {
                    return Err(format!(
                        "seed {seed}: block {block} was flushed, but shows {:#04x} ({:?}) after a power cut",
                        first[0], state[0]
                    ));
                }
                judged += 1;
            }
        }
        Ok(judged)
    }
}

#[test]
fn vhd_dynamic() {
    all_schedules_are_right("vhd dynamic 16K", 1, "sectors", all_kinds_of_requests(small("vhd dynamic 16K", 4)));
}

#[test]
fn vhd_differencing() {
    all_schedules_are_right(
        "vhd differencing 16K",
        1,
        "sectors",
        all_kinds_of_requests(small("vhd differencing 16K", 4)),
    );
}

#[test]
fn vhdx_dynamic() {
    all_schedules_are_right("vhdx dynamic 1M", 4, "sectors", all_kinds_of_requests(small("vhdx dynamic 1M", 3)));
}

#[test]
fn vhdx_differencing() {
    all_schedules_are_right(
        "vhdx differencing 1M",
        4,
        "sectors",
        all_kinds_of_requests(small("vhdx differencing 1M", 3)),
    );
}

#[test]
fn requests_that_wait() {
    let packed = "packed 16K, over a parent";
    all_schedules_are_right("packed 16K", 1, "sectors", all_kinds_of_requests(small(packed, 4)));
    all_schedules_are_right("packed 16K, loaders", 1, "sectors", with_loaders(all_kinds_of_requests(small(packed, 4))));
    for name in ["vhd dynamic 16K", "vhd differencing 16K"] {
        let scene = with_loaders(all_kinds_of_requests(small(name, 4)));
        all_schedules_are_right(&format!("{name}, loaders"), 2, "sectors", scene);
    }
}

#[test]
fn images_added_on_top() {
    let scene = images_are_added(small("vhd dynamic 16K, with snapshots", 4));
    all_schedules_are_right("vhd dynamic 16K, with snapshots", 1, "sectors", scene);
    let scene = with_loaders(images_are_added(small("vhdx dynamic 1M, with snapshots", 2)));
    all_schedules_are_right("vhdx dynamic 1M, with snapshots, loaders", 6, "sectors", scene);
}

#[test]
fn an_image_added_during_reads() {
    for name in ["vhd dynamic 16K, with snapshots", "vhdx dynamic 1M, with snapshots"] {
        for (what, whole_block) in [("sector", false), ("block", true)] {
            let scene = an_image_joins_during_reads(small(name, 2), whole_block);
            all_schedules_are_right(&format!("{name}, a {what}"), 1, "sectors", scene.clone());
            all_schedules_are_right(&format!("{name}, a {what}, loaders"), 2, "sectors", with_loaders(scene));
        }
    }
}

#[test]
fn broken_rules_of_waiting_requests_are_found() {
    let scene = || with_loaders(all_kinds_of_requests(small("packed 16K, over a parent", 4)));
    for rule in [Rule::WaitersAreWoken, Rule::EveryJobIsDone, Rule::ExclusionEnds] {
        must_be_found(rule, "packed 16K, loaders", scene());
    }
}

#[test]
fn broken_rules_of_chain_changes_are_found() {
    for rule in [Rule::ChainIsFetchedAnew, Rule::FormerTopIsAtRest] {
        // Few blocks, so that the threads often meet.
        let scene = images_are_added(small("vhdx dynamic 1M, with snapshots", 2));
        must_be_found(rule, "vhdx dynamic 1M, with snapshots", scene);
    }
    for name in ["vhd dynamic 16K, with snapshots", "vhdx dynamic 1M, with snapshots"] {
        let scene = |whole_block| an_image_joins_during_reads(small(name, 2), whole_block);
        must_be_found(Rule::TablesOfTheCurrentChain, name, scene(false));
        must_be_found(Rule::MapMayBeAhead, name, scene(true));
    }
}

#[test]
fn power_cuts_in_every_schedule() {
    // Stores that answer late need a ring, which a scheduled thread does not have. A merge in use
    // copies with threads of the system (`disk/src/copying/copy.rs`).
    let fits = |crowd: &Crowd| crowd.disk.engine() == EngineKind::Sync && !crowd.disk.name.contains("merged in use");
    for crowd in crowds().into_iter().filter(fits) {
        let what = format!("power cuts of {}", crowd.disk.name);
        all_schedules_are_right(&what, 20, "states", power_cuts(crowd, 3, true));
    }
}

#[test]
fn shared_flushes() {
    for (name, blocks) in [("vhd dynamic 16K", 6), ("vhdx dynamic 1M", 6)] {
        let scene = flushes_of_an_image(small(name, blocks));
        all_schedules_are_right(&format!("flushes of {name}"), 2, "flushed blocks", scene);
    }
}

#[test]
fn space_in_use_is_not_reused() {
    for (name, share) in [("vhd dynamic 16K", 1), ("vhdx dynamic 1M", 4)] {
        all_schedules_are_right(&format!("space of {name}"), share, "sectors", space_is_reused(small(name, 3)));
    }
}

#[test]
fn broken_rules_of_lock_free_lookups_are_found() {
    must_be_found(Rule::GraceIsWaitedFor, "vhd dynamic 16K", space_is_reused(small("vhd dynamic 16K", 3)));
    must_be_found(
        Rule::MappedAfterPayload,
        "vhd differencing 16K",
        all_kinds_of_requests(small("vhd differencing 16K", 4)),
    );
}

#[test]
fn broken_rules_of_shared_flushes_are_found() {
    let crowd = |name: &str| crowds().into_iter().find(|crowd| crowd.disk.name == name).expect("a crowd of that name");
    for name in ["vhd dynamic 16K", "vhdx dynamic 1M"] {
        must_be_found(Rule::AnsweredByALaterCycle, name, power_cuts(crowd(name), 2, false));
        must_be_found(Rule::WaitsForALaterCycle, name, flushes_of_an_image(small(name, 6)));
    }
    must_be_found(Rule::FreedBeforeTheFlush, "vhd dynamic 16K", power_cuts(crowd("vhd dynamic 16K"), 2, false));
    must_be_found(Rule::DirtyUntilLanded, "vhdx dynamic 1M", power_cuts(crowd("vhdx dynamic 1M"), 2, false));
}
