//! Runs fio as a peer with its io_uring engine, and parses its JSON output.

use crate::{Result, acceptance::SEED, peer};
use diskwright_load::{run::SUBMIT_EVERY, seeds};
use serde::Deserialize;
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// A load that fio and our load generator can run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FioLoad {
    /// fio's name of the direction: `randread`, `write`, `randrw`.
    pub rw: &'static str,
    /// Percentage of reads, for `rw` and `randrw`.
    pub read_percent: u32,
    /// Bytes per request.
    pub block_bytes: u32,
    /// Requests in flight.
    pub queue_depth: u32,
    /// Whether to use direct I/O.
    pub direct: bool,
    /// How fio is set up.
    pub setup: Setup,
}

/// fio's settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Setup {
    /// fio's defaults.
    Defaults,
    /// Registered files and buffers; this many requests are submitted and completed at once.
    Batched(u32),
    /// Like our load generator in everything that a device can notice: registered files, registered
    /// buffers in huge pages (so a megabyte is one segment, not 256), the same number of requests
    /// submitted together. Each run draws different offsets, all equally likely. fio by default
    /// repeats the offsets, which a cache below would then hold.
    AsOurs {
        /// Seed of the offsets.
        seed: u64,
    },
}

impl FioLoad {
    /// Seed of this load in `round`, for fio and for our generator.
    pub fn seed(&self, round: usize) -> u64 {
        let Self { rw, block_bytes, read_percent, queue_depth, .. } = self;
        seeds::of_window(SEED, &format!("{rw} of {block_bytes}, {read_percent} % read, at QD {queue_depth}"), round)
    }
}

impl Setup {
    /// Completions that each wait requests.
    pub fn batch(self) -> u32 {
        if let Self::Batched(batch) = self { batch } else { 1 }
    }
}

/// Figures that fio measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FioFound {
    /// Requests per second.
    pub iops: f64,
    /// Number of requests.
    pub requests: f64,
    /// Mean latency from submission to completion, nanoseconds.
    pub mean_ns: f64,
    /// CPU time of the job per request, user and kernel, nanoseconds.
    pub cpu_ns_per_io: f64,
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<JobOutput>,
}

#[derive(Deserialize)]
struct JobOutput {
    read: Direction,
    write: Direction,
    usr_cpu: f64,
    sys_cpu: f64,
    job_runtime: f64,
    error: i64,
}

#[derive(Deserialize)]
struct Direction {
    iops: f64,
    total_ios: f64,
    lat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    mean: f64,
}

/// Runs fio on `file` for about `length`.
///
/// # Errors
/// [`LabError::Program`](crate::LabError::Program) if fio fails or its output cannot be parsed.
pub fn run(program: &Path, file: &Path, load: &FioLoad, length: Duration) -> Result<FioFound> {
    let mut command = Command::new(program);
    command.arg("--name=diskwright").arg(format!("--filename={}", file.display()));
    command.args(["--ioengine=io_uring", "--invalidate=0", "--time_based=1", "--output-format=json"]);
    command.arg(format!("--rw={}", load.rw)).arg(format!("--rwmixread={}", load.read_percent));
    command.arg(format!("--bs={}", load.block_bytes)).arg(format!("--iodepth={}", load.queue_depth));
    command.arg(format!("--direct={}", u8::from(load.direct))).arg(format!("--runtime={}ms", length.as_millis()));
    if load.setup != Setup::Defaults {
        command.args(["--registerfiles=1", "--fixedbufs=1"]);
    }
    match load.setup {
        Setup::Defaults => {}
        Setup::Batched(batch) => {
            command.arg(format!("--iodepth_batch_submit={batch}")).arg(format!("--iodepth_batch_complete_min={batch}"));
        }
        Setup::AsOurs { seed } => {
            let depth = load.queue_depth;
            command.arg(format!("--randseed={seed}")).args(["--norandommap=1", "--iomem_align=2m"]);
            command
                .arg(format!("--iodepth_batch_submit={}", depth.min(SUBMIT_EVERY)))
                .arg("--iodepth_batch_complete_min=1");
            command.arg(format!("--iodepth_batch_complete_max={depth}"));
            command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
        }
    }
    finish(command)
}

/// Runs a `command` of fio, which must request JSON output.
///
/// # Errors
/// As [`run`].
pub fn finish(mut command: Command) -> Result<FioFound> {
    peer::answer(&mut command, |output| parse(output).ok_or_else(|| "its output cannot be parsed".into()))
}

/// Parses fio's JSON. fio may print warnings before it.
fn parse(text: &str) -> Option<FioFound> {
    let output: Output = serde_json::from_str(&text[text.find('{')?..]).ok()?;
    let job = output.jobs.first().filter(|job| job.error == 0)?;
    let ios = job.read.total_ios + job.write.total_ios;
    let sum_ns = job.read.lat_ns.mean * job.read.total_ios + job.write.lat_ns.mean * job.write.total_ios;
    let cpu_ns = (job.usr_cpu + job.sys_cpu) / 100.0 * job.job_runtime * 1e6;
    (ios > 0.0).then(|| FioFound {
        iops: job.read.iops + job.write.iops,
        requests: ios,
        mean_ns: sum_ns / ios,
        cpu_ns_per_io: cpu_ns / ios,
    })
}

/// Path of fio; `None` if it is not installed.
pub fn find() -> Option<PathBuf> {
    peer::find("fio")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LabError;

    #[test]
    fn its_json_is_understood_also_behind_a_warning() {
        let said = r#"fio: this is a warning
{"fio version": "fio-3.33", "jobs": [{"error": 0, "usr_cpu": 10.0, "sys_cpu": 30.0, "job_runtime": 2000,
 "read": {"iops": 300.0, "total_ios": 600, "lat_ns": {"mean": 1000.0}}, "write": {"iops": 100.0, "total_ios": 200, "lat_ns": {"mean": 5000.0}}}]}"#;
        let found = parse(said).unwrap();
        assert_eq!(found, FioFound { iops: 400.0, requests: 800.0, mean_ns: 2000.0, cpu_ns_per_io: 1_000_000.0 });
        assert_eq!(parse("no json at all"), None);
        assert_eq!(parse(&said.replace("\"error\": 0", "\"error\": 5")), None);
    }

    #[test]
    fn a_real_fio_is_driven_where_there_is_one() {
        let Some(program) = find() else {
            eprintln!("skipped: {}", peer::missing("fio", "fio"));
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, vec![1; 1 << 20]).unwrap();
        let load = FioLoad {
            rw: "randrw",
            read_percent: 70,
            block_bytes: 4096,
            queue_depth: 4,
            direct: false,
            setup: Setup::Defaults,
        };
        for setup in [Setup::Defaults, Setup::Batched(2), Setup::AsOurs { seed: 7 }] {
            let found = run(&program, &file, &FioLoad { setup, ..load }, Duration::from_millis(50)).unwrap();
            assert!(found.iops > 0.0 && found.mean_ns > 0.0, "{setup:?}: {found:?}");
        }
        let gone = run(&program, Path::new("/nonexistent/file"), &load, Duration::from_millis(50)).unwrap_err();
        assert!(matches!(gone, LabError::Program { .. }), "{gone}");
    }
}
