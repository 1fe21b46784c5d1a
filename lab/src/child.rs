//! Runs one operation in a fresh process to measure its cost: opening a disk, or a long run.
//!
//! Time and memory of one operation can be measured only in a process that does nothing else: an
//! allocator keeps freed memory, and the peak memory of a process never falls. So the program
//! starts itself again with a hidden argument. The child process runs one operation and prints its
//! cost as JSON.
//!
//! ```text
//!   ChildLauncher::open ──────▶ PROGRAM ARGS... open PATH OFFSET LENGTH direct|page ─┐
//!   ChildLauncher::long_run ──▶ PROGRAM ARGS... run REQUESTS ────────────────────────┴▶ child_main
//!   guest/ (/init of a guest) ▶ PROGRAM ARGS... guest        see `guest::agent`
//!   ChildLauncher::ask ───────▶ PROGRAM ARGS... WORDS...     a caller's own child process; returns
//!                                                            its JSON
//! ```

use crate::{
    LabError, Result,
    guest::agent,
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

/// Largest read of a child process.
const READ_MAX_BYTES: u64 = 64 << 20;

/// The command that starts a program which calls [`child_main`].
#[derive(Debug, Clone)]
pub struct ChildLauncher {
    program: PathBuf,
    args: Vec<OsString>,
}

impl ChildLauncher {
    /// The running program, with `args` before the arguments of the child: `["measuring-child"]`.
    ///
    /// # Errors
    /// [`LabError::File`] if the system does not report which program is running.
    pub fn current_exe<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Result<Self> {
        let program = std::env::current_exe().map_err(LabError::file("find the running program", "/proc/self/exe"))?;
        Ok(Self { program, args: args.into_iter().map(Into::into).collect() })
    }

    /// The program, and the arguments before those of the child.
    pub(crate) fn command_line(&self) -> (&Path, &[OsString]) {
        (&self.program, &self.args)
    }

    /// Opens `path` read-only in a child process and reads `len_bytes` at `offset_bytes`.
    ///
    /// # Errors
    /// [`LabError::Program`] with the output of a child process that fails.
    pub fn open(&self, path: &Path, offset_bytes: u64, len_bytes: u64, cache: CacheMode) -> Result<OpenCost> {
        let place = [offset_bytes, len_bytes].map(|number| number.to_string());
        self.ask(["open".as_ref(), path.as_os_str(), place[0].as_ref(), place[1].as_ref(), cache_word(cache).as_ref()])
    }

    /// Makes this many requests to `null:` in a child process, with one thread that records every
    /// latency.
    ///
    /// # Errors
    /// As [`ChildLauncher::open`].
    pub fn long_run(&self, requests: u64) -> Result<RunCost> {
        self.ask(["run", &requests.to_string()])
    }

    /// Runs a child process with `words` as arguments, and parses the JSON that it prints.
    ///
    /// # Errors
    /// As [`ChildLauncher::open`].
    pub fn ask<T: DeserializeOwned, W: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = W>) -> Result<T> {
        let mut command = Command::new(&self.program);
        command.args(&self.args).args(words);
        peer::answer(&mut command, |output| {
            serde_json::from_str(output.trim()).map_err(|error| format!("its output cannot be parsed ({error}):"))
        })
    }
}

/// Cost of opening a disk and reading from it once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct OpenCost {
    /// Images in the chain.
    pub images: u32,
    /// Virtual size, bytes.
    pub size_bytes: u64,
    /// Time of opening, nanoseconds.
    pub open_ns: u64,
    /// Time of opening a queue and reading, nanoseconds.
    pub read_ns: u64,
    /// Resident memory of the process before opening, bytes.
    pub resident_before_bytes: u64,
    /// Peak resident memory of the process (`VmHWM`), bytes; includes the program itself.
    pub resident_peak_bytes: u64,
}

/// Opens `path` in this process and reads `len_bytes` from it.
///
/// # Errors
/// [`LabError::Disk`] if it cannot be opened, [`LabError::File`] if it cannot be read.
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

/// Cost of many requests to `null:`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct RunCost {
    /// Requests with a recorded latency.
    pub requests: u64,
    /// Nines of percentiles that this number of requests supports.
    pub nines: u32,
    /// Points of the time series that was written: the largest possible number.
    pub points: u64,
    /// Time of the requests, nanoseconds.
    pub took_ns: u64,
    /// Peak resident memory of the process (`VmHWM`), bytes; includes the program itself.
    pub resident_peak_bytes: u64,
}

/// Makes `requests` requests to `null:` in this process, with one thread that records every
/// latency. Then writes the result like a run does, with the longest possible time series.
///
/// # Errors
/// Any error of the run.
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

/// Runs the hidden command. Returns the JSON to print on standard output.
///
/// # Errors
/// [`LabError::BadOptions`] for arguments that [`ChildLauncher`] does not pass; any error of the
/// operation.
pub fn child_main(args: &[OsString]) -> Result<String> {
    let bad = || LabError::BadOptions {
        what: "the arguments of the measuring child process are invalid".into(),
        hint: "this command is for internal use".into(),
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
        [verb] if verb == OsStr::new(agent::WORD) => serde_json::to_string(&agent::guest_main()?),
        _ => return Err(bad()),
    };
    cost.map_err(|error| LabError::BadOptions {
        what: format!("the result cannot be serialised: {error}"),
        hint: "please report this".into(),
    })
}

/// The name of a cache mode in results and in arguments of child processes.
pub fn cache_word(cache: CacheMode) -> &'static str {
    match cache {
        CacheMode::Direct => "direct",
        CacheMode::PageCache => "page",
    }
}

/// The name of an engine in results.
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
    fn the_cost_of_an_open_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = create_empty(Container::VhdxDifferencing, dir.path(), 64 << 20).unwrap();
        let args: Vec<OsString> = ["open".into(), path.into(), "1048576".into(), "4096".into(), "page".into()].to_vec();
        let cost: OpenCost = serde_json::from_str(&child_main(&args).unwrap()).unwrap();
        assert_eq!((cost.images, cost.size_bytes), (2, 64 << 20));
        assert!(cost.resident_peak_bytes > 0 && cost.open_ns > 0);
    }

    #[test]
    fn the_cost_of_a_long_run_is_reported() {
        let args = ["run", "2000"].map(OsString::from);
        let cost: RunCost = serde_json::from_str(&child_main(&args).unwrap()).unwrap();
        assert_eq!((cost.requests, cost.nines, cost.points), (2000, 2, run::POINTS_MAX as u64));
        assert!(cost.resident_peak_bytes > 0 && cost.took_ns > 0);
    }

    #[test]
    fn a_child_that_fails_is_reported_with_its_output() {
        let launcher = ChildLauncher {
            program: "/bin/sh".into(),
            args: ["-c", "echo broken >&2; exit 3"].map(Into::into).to_vec(),
        };
        let error = launcher.open(Path::new("x"), 0, 512, CacheMode::Direct).unwrap_err().to_string();
        assert!(error.contains("broken") && error.contains('3'), "{error}");
    }
}
