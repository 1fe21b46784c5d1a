//! A baseline for benchmarks: random reads by a bare io_uring, without the engine.
//!
//! One registered file, one registered buffer for each slot, and a loop that submits, waits and
//! counts. It reads the clock only every 64 turns, checks only the lengths of reads, and supports
//! only plain files. What the engine or the lab's generator takes above this baseline is their own
//! cost. What another program takes above it is the most that could be saved.

#![allow(unsafe_code)]

use crate::{CacheMode, Slab};
use io_uring::{IoUring, opcode, types};
use nix::libc;
use rustix::fs::{Mode, OFlags};
use std::{
    io,
    os::fd::AsRawFd,
    path::Path,
    time::{Duration, Instant},
};

/// Turns between two readings of the clock.
const TURNS: u32 = 64;

/// Parameters of the reads.
#[derive(Debug, Clone, Copy)]
pub struct BareLoad {
    /// Whether to read through the page cache or with O_DIRECT.
    pub cache: CacheMode,
    /// Bytes of each read; a power of two.
    pub block_bytes: usize,
    /// Reads in flight.
    pub depth: usize,
    /// Completions to wait for in one system call.
    pub batch: usize,
    /// How long new reads are started.
    pub time: Duration,
}

/// Counts and times of a run.
#[derive(Debug, Clone, Copy)]
pub struct BareFound {
    /// Completed reads.
    pub reads: u64,
    /// `io_uring_enter` calls.
    pub enters: u64,
    /// Time from the first submission to the last completion.
    pub elapsed: Duration,
    /// CPU time of this thread, including the kernel's share.
    pub cpu: Duration,
}

/// Reads random blocks of `file` in the calling thread.
///
/// # Errors
/// The errors of opening the file, setting up a ring, or reading; `InvalidInput` for a file shorter
/// than one block.
pub fn bare_ring(file: &Path, load: &BareLoad) -> io::Result<BareFound> {
    let direct = if load.cache == CacheMode::Direct { OFlags::DIRECT } else { OFlags::empty() };
    let file = rustix::fs::open(file, OFlags::RDONLY | OFlags::CLOEXEC | direct, Mode::empty())?;
    let blocks = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0) / load.block_bytes as u64;
    if blocks == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file is shorter than one block"));
    }
    let slab = Slab::new(load.depth, load.block_bytes);
    let mut bufs = slab.take_all();
    let iovecs: Vec<libc::iovec> = bufs
        .iter_mut()
        .map(|buf| libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: load.block_bytes })
        .collect();
    let mut ring: IoUring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_coop_taskrun()
        .setup_submit_all()
        .build((2 * load.depth).next_power_of_two() as u32)?;
    ring.submitter().register_files(&[file.as_raw_fd()])?;
    // SAFETY: the buffers are dropped when the loop has ended, when nothing is in flight any more.
    unsafe { ring.submitter().register_buffers(&iovecs)? };
    let outcome = run(&mut ring, &iovecs, blocks, load);
    if outcome.is_err() {
        // Reads may still be in flight: their memory must stay.
        std::mem::forget(bufs);
    }
    outcome
}

fn run(ring: &mut IoUring, iovecs: &[libc::iovec], blocks: u64, load: &BareLoad) -> io::Result<BareFound> {
    let (started, cpu_before) = (Instant::now(), cpu_time());
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut free: Vec<u16> = (0..load.depth as u16).collect();
    let (mut reads, mut enters, mut in_flight) = (0, 0, 0);
    loop {
        let going_on = started.elapsed() < load.time;
        for _ in 0..TURNS {
            while going_on && let Some(slot) = free.pop() {
                let iovec = &iovecs[usize::from(slot)];
                // xorshift64*: random enough to pick blocks, and almost free.
                random ^= random >> 12;
                random ^= random << 25;
                random ^= random >> 27;
                let block = (u128::from(random.wrapping_mul(0x2545_F491_4F6C_DD1D)) * u128::from(blocks)) >> 64;
                let len_bytes = load.block_bytes as u32;
                let read = opcode::ReadFixed::new(types::Fixed(0), iovec.iov_base.cast(), len_bytes, slot)
                    .offset(block as u64 * load.block_bytes as u64)
                    .build()
                    .user_data(u64::from(slot));
                // SAFETY: the buffer is registered, outlives the ring's use of it, and is this
                // slot's alone.
                unsafe { ring.submission().push(&read) }.map_err(io::Error::other)?;
                in_flight += 1;
            }
            if in_flight == 0 {
                return Ok(BareFound { reads, enters, elapsed: started.elapsed(), cpu: cpu_time() - cpu_before });
            }
            ring.submit_and_wait(load.batch.clamp(1, in_flight))?;
            enters += 1;
            for answer in ring.completion() {
                match answer.result() {
                    got if got < 0 => return Err(io::Error::from_raw_os_error(-got)),
                    got if got as usize != load.block_bytes => return Err(io::ErrorKind::UnexpectedEof.into()),
                    _ => free.push(answer.user_data() as u16),
                }
                reads += 1;
                in_flight -= 1;
            }
        }
    }
}

/// CPU time of this thread; zero if the kernel does not count it.
fn cpu_time() -> Duration {
    let said = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(said.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_and_an_empty_one_refused() {
        let load = BareLoad {
            cache: CacheMode::PageCache,
            block_bytes: 4096,
            depth: 4,
            batch: 2,
            time: Duration::from_millis(5),
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(bare_ring(file.path(), &load).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        file.as_file().set_len(64 << 10).unwrap();
        match bare_ring(file.path(), &load) {
            Ok(found) => assert!(found.reads >= 4 && found.enters > 0 && found.elapsed >= load.time, "{found:?}"),
            // The kernel has no io_uring, or lacks one of the flags.
            Err(refused) => eprintln!("skipped: no bare ring here: {refused}"),
        }
    }
}
