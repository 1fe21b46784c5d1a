//! Measuring in a fresh process: opening a disk, or a long run.
//!
//! Time and memory of one operation can only be measured in a process that does nothing else: an
//! allocator keeps the memory that earlier work freed, and the peak of a process never falls. So
//! the program starts itself again with a hidden argument, and the child does its one operation and
//! prints its cost as JSON.
//!
//! ```text
//!   ChildLauncher::open ──────▶ PROGRAM ARGS... open PATH OFFSET LENGTH direct|page ─┐
//!   ChildLauncher::long_run ──▶ PROGRAM ARGS... run REQUESTS ────────────────────────┴▶ child_main
//!   ChildLauncher::ask ───────▶ PROGRAM ARGS... WORDS...     a caller's own child; JSON comes back
//! ```

use crate::{
    LabError, Result,
    open::{self, OpenHow},
    peer,
};
use diskwright_disk::{Disk, OpenOptions};
use diskwright_load::{
    job::{Job, Load, Span},
    machine,
    run::{self, RunOptions, Unwatched},
};
use diskwright_store::{Blocking, CacheMode, EngineKind};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

/// Most that a child reads.
const READ_MAX_BYTES: u64 = 64 << 20;

/// How to start the program again such that it calls [`child_main`].
#[derive(Debug, Clone)]
pub struct ChildLauncher {
    program: PathBuf,
    args: Vec<OsString>,
}

impl ChildLauncher {
    /// The running program, with `args` before those of the child: `["measuring-child"]`.
    ///
    /// # Errors
    /// [`LabError::File`] when the system cannot tell which program is running.
    pub fn current_exe<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Result<Self> {
        let program = std::env::current_exe().map_err(LabError::file("find the running program", "/proc/self/exe"))?;
        Ok(Self { program, args: args.into_iter().map(Into::into).collect() })
    }

    /// Opens `path` read-only in a child and reads `len_bytes` at `offset_bytes`.
    ///
    /// # Errors
    /// [`LabError::Program`] with what the child said when it fails.
    pub fn open(&self, path: &Path, offset_bytes: u64, len_bytes: u64, cache: CacheMode) -> Result<OpenCost> {
        let place = [offset_bytes, len_bytes].map(|number| number.to_string());
        self.ask(["open".as_ref(), path.as_os_str(), place[0].as_ref(), place[1].as_ref(), cache_word(cache).as_ref()])
    }

    /// Makes so many requests of nothing in a child, by one thread that takes every latency.
    ///
    /// # Errors
    /// As [`ChildLauncher::open`].
    pub fn long_run(&self, requests: u64) -> Result<RunCost> {
        self.ask(["run", &requests.to_string()])
    }

    /// Runs a child with `words` to its end, and reads its answer.
    ///
    /// # Errors
    /// As [`ChildLauncher::open`].
    pub fn ask<T: DeserializeOwned, W: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = W>) -> Result<T> {
        let mut command = Command::new(&self.program);
        command.args(&self.args).args(words);
        peer::answer(&mut command, |said| {
            serde_json::from_str(said.trim()).map_err(|error| format!("its answer is not understood ({error}):"))
        })
    }
}

/// What it cost to open a disk and to read one piece of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct OpenCost {
    /// Images in the chain.
    pub images: u32,
    /// Virtual size.
    pub size_bytes: u64,
    /// Opening, nanoseconds.
    pub open_ns: u64,
    /// Opening a queue and reading the piece, nanoseconds.
    pub read_ns: u64,
    /// Resident memory of the process before.
    pub resident_before_bytes: u64,
    /// Its highest resident memory until the end (`VmHWM`), the program itself included.
    pub resident_peak_bytes: u64,
}

/// Opens `path` in this process and reads one piece of it.
///
/// # Errors
/// [`LabError::Disk`] when it cannot be opened, [`LabError::File`] when it cannot be read.
pub fn open_cost(path: &Path, offset_bytes: u64, len_bytes: u64, cache: CacheMode) -> Result<OpenCost> {
    let (resident_before_bytes, _) = machine::resident_bytes();
    let start = Instant::now();
    let disk = Disk::open(path, &OpenOptions { cache, ..OpenOptions::default() })?;
    let open_ns = start.elapsed().as_nanos() as u64;
    let start = Instant::now();
    let mut piece = vec![0; len_bytes.min(READ_MAX_BYTES) as usize];
    Blocking::open(&*disk, EngineKind::Auto)
        .and_then(|mut device| device.read(offset_bytes, &mut piece))
        .map_err(LabError::file("read", path))?;
    let read_ns = start.elapsed().as_nanos() as u64;
    let (_, resident_peak_bytes) = machine::resident_bytes();
    let size_bytes = diskwright_store::BlockDevice::geometry(&*disk).size_bytes;
    let images = disk.layers().len() as u32;
    Ok(OpenCost { images, size_bytes, open_ns, read_ns, resident_before_bytes, resident_peak_bytes })
}

/// What it cost to make many requests of nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct RunCost {
    /// Requests whose latency was taken.
    pub requests: u64,
    /// Nines that so many support.
    pub nines: u32,
    /// Points of the time series that was written: as many as a series ever has.
    pub points: u64,
    /// How long the requests took, nanoseconds.
    pub took_ns: u64,
    /// Highest resident memory of the process (`VmHWM`), the program itself included.
    pub resident_peak_bytes: u64,
}

/// Makes `requests` requests of `null:` in this process by one thread that takes every latency, and
/// writes what it found as a run does, with a time series as long as a run of weeks has it.
///
/// # Errors
/// Whatever the run fails with.
pub fn run_cost(requests: u64) -> Result<RunCost> {
    let mut job = Job::simple("long", Load::default(), Span::default(), Span::from_secs(1));
    job.phases[0].count = Some(requests);
    let target = open::open("null:", &OpenHow::default())?;
    let mut run = run::run(&job, &[target], &RunOptions::default(), &Unwatched)?;
    let phase = &mut run.phases[0];
    let took_ns = phase.window_ns;
    let latencies = phase.total().reads.service;
    phase.series.resize(run::POINTS_MAX, phase.series.last().copied().unwrap_or_default());
    let points = phase.series.len() as u64;
    diskwright_outline::json::write(&mut std::io::sink(), &run).map_err(LabError::file("write", "the result"))?;
    let (_, resident_peak_bytes) = machine::resident_bytes();
    Ok(RunCost { requests: latencies.count, nines: latencies.nines(), points, took_ns, resident_peak_bytes })
}

/// What the hidden command does with its arguments. Returns the JSON to print on standard output.
///
/// # Errors
/// [`LabError::BadOptions`] for arguments that a [`ChildLauncher`] does not give; whatever the open
/// fails with.
pub fn child_main(args: &[OsString]) -> Result<String> {
    let bad = || LabError::BadOptions {
        what: "these arguments are not those of a measuring child".into(),
        hint: "this command is for diskwright's own use".into(),
    };
    let number = |text: &OsString| text.to_str().and_then(|text| text.parse().ok()).ok_or_else(bad);
    let cost = match args {
        [verb, path, offset, len, cache] if verb == OsStr::new("open") => {
            let mode = [CacheMode::Direct, CacheMode::PageCache]
                .into_iter()
                .find(|mode| cache == OsStr::new(cache_word(*mode)))
                .ok_or_else(bad)?;
            serde_json::to_string(&open_cost(Path::new(path), number(offset)?, number(len)?, mode)?)
        }
        [verb, requests] if verb == OsStr::new("run") => serde_json::to_string(&run_cost(number(requests)?)?),
        _ => return Err(bad()),
    };
    cost.map_err(|error| LabError::BadOptions {
        what: format!("the result cannot be written: {error}"),
        hint: "please report this".into(),
    })
}

/// A cache mode in one word, for results and for children.
pub fn cache_word(cache: CacheMode) -> &'static str {
    match cache {
        CacheMode::Direct => "direct",
        CacheMode::PageCache => "page",
    }
}

/// An engine in one word, for results.
pub fn engine_word(engine: EngineKind) -> &'static str {
    match engine {
        EngineKind::Auto => "auto",
        EngineKind::Uring => "io_uring",
        EngineKind::Sync => "pread",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::{Container, create_empty};

    #[test]
    fn foreign_arguments_are_refused() {
        let args = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        for words in [
            &[][..],
            &["open", "x"],
            &["close", "x", "0", "512", "page"],
            &["open", "x", "0", "y", "page"],
            &["run", "x"],
        ] {
            assert!(matches!(child_main(&args(words)), Err(LabError::BadOptions { .. })), "{words:?}");
        }
        assert!(matches!(
            child_main(&args(&["open", "/nonexistent/x.vhdx", "0", "512", "page"])),
            Err(LabError::Disk(_))
        ));
    }

    #[test]
    fn the_cost_of_an_open_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = create_empty(Container::VhdxDifferencing, dir.path(), 64 << 20).unwrap();
        let args: Vec<OsString> = ["open".into(), path.into(), "1048576".into(), "4096".into(), "page".into()].to_vec();
        let cost: OpenCost = serde_json::from_str(&child_main(&args).unwrap()).unwrap();
        assert_eq!((cost.images, cost.size_bytes), (2, 64 << 20));
        assert!(cost.resident_peak_bytes > 0 && cost.open_ns > 0);
    }

    #[test]
    fn the_cost_of_a_long_run_is_told() {
        let args = ["run", "2000"].map(OsString::from);
        let cost: RunCost = serde_json::from_str(&child_main(&args).unwrap()).unwrap();
        assert_eq!((cost.requests, cost.nines, cost.points), (2000, 2, run::POINTS_MAX as u64));
        assert!(cost.resident_peak_bytes > 0 && cost.took_ns > 0);
    }

    #[test]
    fn a_child_that_fails_is_told_with_what_it_said() {
        let launcher = ChildLauncher {
            program: "/bin/sh".into(),
            args: ["-c", "echo broken >&2; exit 3"].map(Into::into).to_vec(),
        };
        let error = launcher.open(Path::new("x"), 0, 512, CacheMode::Direct).unwrap_err().to_string();
        assert!(error.contains("broken") && error.contains('3'), "{error}");
    }
}
