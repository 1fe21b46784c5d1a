//! fio as a client of servers, by its nbd engine; and what it writes, read back and compared.

pub(crate) use diskwright_lab::selftest::fio::{FioLoad, Setup, run};
use diskwright_lab::{
    Result,
    acceptance::SEED,
    peer,
    selftest::fio::{self, FioFound},
};
use diskwright_load::seeds;
use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// A load for a server: 4 KiB at random.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct NbdLoad {
    /// fio's word for the direction: `randread`, `randwrite`.
    pub(crate) rw: &'static str,
    /// Connections, each with a fio process of its own.
    pub(crate) connections: u32,
    /// Requests in flight on each connection.
    pub(crate) queue_depth: u32,
    pub(crate) until: FioUntil,
}

/// When fio ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum FioUntil {
    Elapsed(Duration),
    /// Number of requests of each connection.
    Count(u64),
}

impl NbdLoad {
    /// Seed of this load in `round`.
    pub(crate) fn seed(&self, round: usize) -> u64 {
        let Self { rw, connections, queue_depth, .. } = self;
        seeds::of_window(SEED, &format!("{rw} over {connections} connections at QD {queue_depth}"), round)
    }
}

/// Runs fio on an NBD export, in the folder `dir`. Offsets are drawn by `seed`, each as likely as
/// any other.
///
/// # Errors
/// As [`fio::run`].
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
    fio::finish(command)
}

/// Writes the first `len_bytes` of an NBD export in pieces of many sizes, out of order, reads them
/// back and compares.
///
/// # Errors
/// [`diskwright_lab::LabError::Program`] when other bytes come back.
pub(crate) fn verify_nbd(program: &Path, uri: &str, len_bytes: u64, queue_depth: u32, dir: &Path) -> Result<()> {
    let mut command = nbd_command(program, uri, dir);
    verifying(&mut command, len_bytes, queue_depth);
    fio::finish(command).map(|_| ())
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
    fio::finish(command).map(|_| ())
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

/// Path of fio, if it is installed with its nbd engine; else a sentence about what is missing.
pub(crate) fn find_with_nbd() -> std::result::Result<PathBuf, String> {
    let program = fio::find().ok_or_else(|| peer::missing("fio", "fio"))?;
    match peer::run(&program, &["--enghelp=nbd"], None) {
        Ok(_) => Ok(program),
        Err(_) => Err("this fio has no nbd engine".into()),
    }
}
