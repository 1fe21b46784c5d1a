//! A merge of a disk that is served, while a client reads or writes by NBD.
//!
//! ```text
//!   round: snapshot ─▶ the client rewrites all of the disk ─▶ reads alone ─▶ reads while
//!          `diskwright merge` runs ─▶ `cp` of as much data
//!   at the end: the same once more with a client that writes at random until the merge has ended
//! ```
//!
//! All rounds use one server. The merged disk is read back at the end of each round by the client's
//! reads only; that the contents are right is the tests' matter.

use super::{Exported, ServerProgram, serve};
use crate::{discard::drive, ours};
use diskwright_disk::{OpenOptions, Opened};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    fill, peer,
    progress::{Progress, report},
    scratch::settle,
    targets::{self, Container},
};
use diskwright_stats::numbers::{bytes, duration};
use diskwright_store::{BlockDevice, CacheMode, EngineKind, Request};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{
    path::Path,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

const REQUEST_BYTES: u64 = 4096;
const QUEUE_DEPTH: usize = 8;
/// The client's IOPS against those without a merge.
const CLIENT_BAR: Bar = Bar::AtLeast(0.7);
/// The speed of the merge against that of `cp`.
const MERGE_BAR: Bar = Bar::AtLeast(0.1);

/// Requests at random.
struct Client<'a> {
    device: &'a dyn BlockDevice,
    engine: EngineKind,
    size_bytes: u64,
    dice: Xoshiro256PlusPlus,
}

impl Client<'_> {
    /// Reads, or writes, as long as `goes_on` says so. Returns the IOPS.
    fn run(&mut self, writes: bool, goes_on: &dyn Fn() -> bool) -> Result<f64> {
        let (size_bytes, dice, start) = (self.size_bytes, &mut self.dice, Instant::now());
        let mut next = |buf, tag| {
            let offset_bytes = dice.next_u64() % (size_bytes / REQUEST_BYTES) * REQUEST_BYTES;
            let request = if writes { Request::write } else { Request::read };
            goes_on().then(|| request(offset_bytes, REQUEST_BYTES as usize, buf, tag))
        };
        let done = drive(self.device, self.engine, QUEUE_DEPTH, &mut next);
        let done = done.map_err(LabError::file("use", Path::new("the served disk")))?;
        Ok(done.len() as f64 / start.elapsed().as_secs_f64())
    }
}

pub(crate) fn beside_a_client(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let Some(cp) = peer::find("cp") else {
        return Ok(RowOutcome::skipped("merging", peer::missing("cp", "coreutils")));
    };
    let size_bytes: u64 = context.pick(1 << 30, 4 << 30);
    context.scratch.need("the disk, its child and copies", 4 * size_bytes + (1 << 30))?;
    let rounds = context.rounds(context.pick(3, 5));
    let window = context.options.cell.unwrap_or(Duration::from_secs(3));
    let dir = context.scratch.folder("merged")?;
    let how = context.preparation(size_bytes, CacheMode::Direct);
    let mut tick = |done| report(progress, "prepare", done, size_bytes, "filling the disk");
    let path = targets::make_filled(Container::VhdxDynamic, &dir, &how, &mut tick)?;
    let raw = targets::make_filled(Container::Raw, &dir, &how, &mut |_| Ok(()))?;
    let copy = dir.join("copy.raw");
    let served = serve(ServerProgram::Ours, &Exported::of(Container::VhdxDynamic, &path, CacheMode::Direct), &dir)?;
    let opened = Opened::open(Path::new(&served.uri), &OpenOptions { writable: true, ..OpenOptions::default() });
    let device = opened?.shared();
    let dice = Xoshiro256PlusPlus::seed_from_u64(SEED);
    let mut client = Client { device: &*device, engine: context.options.engine, size_bytes, dice };
    let (mut alone, mut beside, mut merging, mut copying) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut among_writes = 0.0;
    for round in 0..=rounds {
        let is_last = round == rounds;
        report(progress, "measure", round as u64, rounds as u64 + 1, "a child of which all is changed")?;
        ours_on(&path, &["snapshot", "--name", &format!("r{round}")])?;
        fill::fill("the disk", &*device, how.seed ^ (round as u64 + 1), context.options.engine, &mut |_| Ok(()))?;
        settle(&dir)?;
        let doing = if is_last { "merging while a client writes" } else { "merging while a client reads" };
        report(progress, "measure", round as u64, rounds as u64 + 1, doing)?;
        let end = Instant::now() + window;
        let iops = client.run(false, &|| Instant::now() < end)?;
        let merge = {
            let path = path.clone();
            thread::spawn(move || ours_on(&path, &["merge", "--no-reflink"]))
        };
        let iops_beside = client.run(is_last, &|| !merge.is_finished())?;
        let took = merge.join().expect("a merge does not panic")?;
        let speed = size_bytes as f64 / 1e6 / took.as_secs_f64();
        if is_last {
            among_writes = speed;
            continue;
        }
        alone.push(iops);
        beside.push(iops_beside);
        merging.push(speed);
        settle(&dir)?;
        let ran = peer::run(&cp, &["--reflink=never", &*raw.to_string_lossy(), &*copy.to_string_lossy()], None)?;
        copying.push(size_bytes as f64 * 1e3 / ran.wall_ns as f64);
        std::fs::remove_file(&copy).map_err(LabError::file("remove", &copy))?;
    }
    drop(device);
    served.server.stop()?;
    Ok(RowOutcome {
        checks: vec![
            Check::ratio(
                "4K random read at QD 8 beside a merge: the client's IOPS",
                "IOPS",
                &beside,
                &alone,
                CLIENT_BAR,
            ),
            Check::ratio("the merge beside that client: speed, against cp", "MB/s", &merging, &copying, MERGE_BAR),
        ],
        notes: vec![
            format!(
                "VHDX dynamic of {}, all changed, O_DIRECT, one NBD connection; {rounds} rounds; reads alone for {}",
                bytes(size_bytes),
                duration(window.as_nanos() as f64)
            ),
            format!(
                "beside a client that writes 4K at random at QD 8 all the time, the merge ended, at {among_writes:.0} MB/s"
            ),
        ],
        ..RowOutcome::default()
    })
}

/// Runs a command of ours on the disk. Returns its time.
fn ours_on(path: &Path, words: &[&str]) -> Result<Duration> {
    let mut command = ours::command()?;
    command.args(&words[..1]).arg(path).args(&words[1..]).arg("--quiet").stdin(Stdio::null());
    let start = Instant::now();
    let output = command.output().map_err(LabError::file("change", path))?;
    if !output.status.success() {
        let what = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(LabError::BadOptions { what, hint: "see why the disk cannot be changed".into() });
    }
    Ok(start.elapsed())
}
