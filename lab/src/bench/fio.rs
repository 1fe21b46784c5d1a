//! fio: as a peer of the generator, the same load by its io_uring engine, and what it says of
//! itself; and as a client of servers, by its nbd engine.

use super::SEED;
use crate::{LabError, Result, bench::peer};
use diskwright_load::{run::SUBMIT_EVERY, seeds};
use serde::Deserialize;
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// A load for fio and for us.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct FioLoad {
    /// In fio's words: `randread`, `write`, `randrw`.
    pub(crate) rw: &'static str,
    /// Of reads, for `rw` and `randrw`.
    pub(crate) read_percent: u32,
    pub(crate) block_bytes: u32,
    pub(crate) queue_depth: u32,
    pub(crate) direct: bool,
    pub(crate) setup: Setup,
}

/// How fio goes about it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Setup {
    /// As it does by itself.
    Defaults,
    /// Registered files and buffers, and this many submitted and completed at once.
    Batched(u32),
    /// As our generator does: what matters to a device is the same, so that it must answer both
    /// alike. Files and buffers are registered, buffers lie in huge pages (a megabyte is one
    /// segment then, not 256), places are drawn anew in each run, each as likely as any other (by
    /// itself fio repeats the same ones, and whatever caches below has them), and as many requests
    /// are submitted together.
    AsOurs {
        /// Of the places.
        seed: u64,
    },
}

impl FioLoad {
    /// Seed of this load in `round`, for fio and for our generator.
    pub(crate) fn seed(&self, round: usize) -> u64 {
        let Self { rw, block_bytes, read_percent, queue_depth, .. } = self;
        seeds::of_window(SEED, &format!("{rw} of {block_bytes}, {read_percent} % read, at QD {queue_depth}"), round)
    }
}

impl NbdLoad {
    /// Seed of this load in `round`.
    pub(crate) fn seed(&self, round: usize) -> u64 {
        let Self { rw, connections, queue_depth, .. } = self;
        seeds::of_window(SEED, &format!("{rw} over {connections} connections at QD {queue_depth}"), round)
    }
}

impl Setup {
    /// Completions to wait for.
    pub(crate) fn batch(self) -> u32 {
        if let Self::Batched(batch) = self { batch } else { 1 }
    }
}

/// A load for a server: 4 KiB at random.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct NbdLoad {
    /// In fio's words: `randread`, `randwrite`.
    pub(crate) rw: &'static str,
    /// Connections, each with its own process.
    pub(crate) connections: u32,
    /// Of each connection.
    pub(crate) queue_depth: u32,
    pub(crate) until: FioUntil,
}

/// When fio ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum FioUntil {
    Elapsed(Duration),
    /// So many requests of each connection.
    Count(u64),
}

/// What fio measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct FioFound {
    pub(crate) iops: f64,
    /// All that it made.
    pub(crate) requests: f64,
    /// Submission to completion.
    pub(crate) mean_ns: f64,
    /// Of its job, user and kernel.
    pub(crate) cpu_ns_per_io: f64,
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
/// [`LabError::Program`] when it fails, or says what nobody understands.
pub(crate) fn run(program: &Path, file: &Path, load: &FioLoad, length: Duration) -> Result<FioFound> {
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

/// Runs fio on an NBD export, in the folder `dir`. Places are drawn anew each time, each as likely
/// as any other.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_nbd(program: &Path, uri: &str, load: &NbdLoad, seed: u64, dir: &Path) -> Result<FioFound> {
    let mut command = nbd_command(program, uri, dir);
    command.arg(format!("--rw={}", load.rw)).arg("--bs=4096").arg(format!("--iodepth={}", load.queue_depth));
    command.arg(format!("--numjobs={}", load.connections)).arg("--group_reporting=1");
    command.arg(format!("--randseed={seed}")).arg("--norandommap=1");
    match load.until {
        FioUntil::Elapsed(length) => {
            command.arg("--time_based=1").arg(format!("--runtime={}ms", length.as_millis()));
        }
        FioUntil::Count(count) => {
            command.arg(format!("--number_ios={count}"));
        }
    }
    finish(command)
}

/// Writes the first `len_bytes` of an NBD export in pieces of many sizes, out of order, reads them
/// back and compares.
///
/// # Errors
/// [`LabError::Program`] when something else comes back.
pub(crate) fn verify_nbd(program: &Path, uri: &str, len_bytes: u64, queue_depth: u32, dir: &Path) -> Result<()> {
    let mut command = nbd_command(program, uri, dir);
    verifying(&mut command, len_bytes, queue_depth);
    finish(command).map(|_| ())
}

/// The same on a block device, past the page cache.
///
/// # Errors
/// As [`verify_nbd`].
pub(crate) fn verify_device(program: &Path, device: &Path, len_bytes: u64, queue_depth: u32, dir: &Path) -> Result<()> {
    let mut command = Command::new(program);
    command.args(["--name=diskwright", "--ioengine=io_uring", "--direct=1", "--output-format=json"]).current_dir(dir);
    command.arg(format!("--filename={}", device.display()));
    verifying(&mut command, len_bytes, queue_depth);
    finish(command).map(|_| ())
}

fn nbd_command(program: &Path, uri: &str, dir: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["--name=diskwright", "--ioengine=nbd", "--output-format=json"]).current_dir(dir);
    command.arg(format!("--uri={uri}"));
    command
}

fn verifying(command: &mut Command, len_bytes: u64, queue_depth: u32) {
    command.arg(format!("--size={len_bytes}")).arg(format!("--iodepth={queue_depth}"));
    command.args(["--rw=randwrite", "--bsrange=4k-64k", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1"]);
    command.arg("--verify_state_save=0");
}

fn finish(mut command: Command) -> Result<FioFound> {
    let output = command.output().map_err(LabError::file("start", command.get_program()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = |why: &str| LabError::Program {
        command: format!("{command:?}"),
        status: output.status.to_string(),
        output: format!("{why} {}", String::from_utf8_lossy(&output.stderr).trim()),
    };
    if !output.status.success() {
        return Err(failed("it said:"));
    }
    parse(&said).ok_or_else(|| failed("its answer is not understood"))
}

/// Its JSON, before which it may print warnings.
fn parse(said: &str) -> Option<FioFound> {
    let output: Output = serde_json::from_str(&said[said.find('{')?..]).ok()?;
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

/// Where it is, if it is installed.
pub(crate) fn find() -> Option<PathBuf> {
    peer::find("fio")
}

/// The same, where it has its nbd engine; else what is missing.
pub(crate) fn find_with_nbd() -> std::result::Result<PathBuf, String> {
    let program = find().ok_or_else(|| peer::missing("fio", "fio"))?;
    match peer::run(&program, &["--enghelp=nbd"], None) {
        Ok(_) => Ok(program),
        Err(_) => Err("this fio has no nbd engine".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
