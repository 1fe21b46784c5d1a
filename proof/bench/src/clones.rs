//! Opening a thousand clones of one golden image in one process, for writing.
//!
//! The process is a fresh child (as in `touch.rs`), since memory can only be measured in a process
//! that does nothing else. It opens every clone with a queue, reads 4 KiB of the golden image's
//! data through each, and tells the time of the opens and its highest resident memory.

use crate::{touch, turns::in_turns};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, clone_disk};
use diskwright_lab::{
    ChildLauncher, LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    progress::{Progress, report},
    targets::{Container, Target, create_empty},
};
use diskwright_load::machine;
use diskwright_store::{BlockDevice, Blocking, CacheMode, EngineKind, IoBuf, QueueOptions, Request};
use serde::{Deserialize, Serialize};
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

/// First word of a child's command line; the folder of the clones follows.
pub(crate) const CHILD: &str = "clones-child";

const CLONES: usize = 1000;
const GOLDEN_BYTES: u64 = 40 << 30;
const DATA_BYTES: usize = 64 << 20;
const OPEN_NS: f64 = 2e9;
const MEMORY_BYTES: f64 = 1024.0 * 1024.0 * 1024.0;

/// What the child tells.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Cost {
    /// Time of all opens, nanoseconds.
    open_ns: u64,
    /// Resident memory with all of them open.
    resident_open_bytes: u64,
    /// Highest resident memory (`VmHWM`) after the opens and a read from each.
    resident_peak_bytes: u64,
}

pub(crate) fn open(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    context.scratch.need("a golden image and its clones", 2 << 30)?;
    let dir = context.scratch.folder("clones")?;
    let golden = create_empty(Container::VhdxDynamic, &dir, GOLDEN_BYTES)?;
    let target = Target::open(Container::VhdxDynamic, golden.clone(), CacheMode::PageCache, context.options.engine)?;
    {
        let failed = || LabError::file("write to", &golden);
        let mut data = vec![0; DATA_BYTES];
        diskwright_load::data::fill(1, 0, &mut data);
        let mut device = Blocking::open(target.device(), context.options.engine).map_err(failed())?;
        device.write(0, &data, false).map_err(failed())?;
    }
    target.close()?;
    let clones: Vec<PathBuf> = (0..CLONES).map(|number| dir.join(format!("clone-{number}.vhdx"))).collect();
    let mut tell = |done, total| report(progress, "clone", done, total, "clones").is_ok();
    clone_disk(&golden, &clones, &CreateRequest::default(), false, &mut tell)?;
    let rounds = context.rounds(context.pick(3, 9));
    let (mut times, mut opened, mut peaks) = (Vec::new(), Vec::new(), Vec::new());
    in_turns("open", &["1,000 clones"], (rounds, 0), progress, &mut |_, _| {
        let cost: Cost = ChildLauncher::current_exe([CHILD])?.ask([dir.as_os_str()])?;
        times.push(cost.open_ns as f64);
        opened.push(cost.resident_open_bytes as f64);
        peaks.push(cost.resident_peak_bytes as f64);
        Ok(())
    })?;
    Ok(RowOutcome {
        checks: vec![
            Check::absolute("open 1,000 clones for writing", "ns", &times, Bar::AtMost(OPEN_NS)),
            Check::absolute("resident memory with all of them open", "bytes", &opened, Bar::AtMost(MEMORY_BYTES)),
            Check::absolute("peak resident memory of the process", "bytes", &peaks, Bar::AtMost(MEMORY_BYTES)),
        ],
        notes: vec![format!("{rounds} fresh processes; each clone with a queue, and 4 KiB read through it")],
        ..RowOutcome::default()
    })
}

/// What the child does: `words` are those of [`open`].
pub(crate) fn child(words: &[OsString]) -> ExitCode {
    let Some(dir) = words.first() else {
        eprintln!("diskwright-bench: {CHILD} is for this program's own use: it takes a folder");
        return ExitCode::from(2);
    };
    touch::answer(open_all(Path::new(dir)))
}

fn open_all(dir: &Path) -> Result<Cost> {
    let options = OpenOptions { writable: true, engine: EngineKind::Sync, ..OpenOptions::default() };
    let start = Instant::now();
    let mut disks = Vec::new();
    for number in 0..CLONES {
        disks.push(Disk::open(dir.join(format!("clone-{number}.vhdx")), &options)?);
    }
    let open_ns = start.elapsed().as_nanos() as u64;
    let (resident_open_bytes, _) = machine::resident_bytes();
    let (mut queues, mut buf) = (Vec::new(), Some(IoBuf::new(4096)));
    let options = QueueOptions { depth: 1, engine: EngineKind::Sync, slab: None, ring: None };
    for (number, disk) in disks.iter().enumerate() {
        let failed = || LabError::file("read from", dir);
        let mut queue = disk.open_queue(&options).map_err(failed())?;
        let buffer = buf.take().unwrap_or_else(|| IoBuf::new(4096));
        let request = Request::read((number as u64 % 1024) << 16, 4096, buffer, 0);
        queue.push(request).map_err(|refused| refused.reason).map_err(failed())?;
        let mut done = Vec::new();
        queue.reap(1, &mut done).map_err(failed())?;
        for completion in done {
            completion.result.map_err(failed())?;
            buf = completion.buf;
        }
        queues.push(queue);
    }
    let (_, resident_peak_bytes) = machine::resident_bytes();
    Ok(Cost { open_ns, resident_open_bytes, resident_peak_bytes })
}
