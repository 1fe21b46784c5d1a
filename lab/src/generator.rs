//! The generator: keeps a workload's depth in flight on a device, and takes the time of every request.
//!
//! One thread, one queue, one slab of buffers that the kernel knows.
//!
//! ```text
//!        ┌────────────── push(next offset, buffer) ◀──────────────┐
//!        ▼                                                        │
//!   BlockQueue ── reap(1) ──▶ completions ──▶ clock once ──▶ record each latency, its buffer is free
//! ```
//!
//! **What is measured.** After the warm-up the window opens; it closes at the first completion behind its end. Requests that complete inside
//! count, those still in flight at the end do not: as many were in flight when it opened, so neither rate nor latency is biased.
//! A latency runs from the moment the request was made to the moment its completion was seen, so the generator's own
//! time is in it; `null:` shows how much that is. With a count instead of a duration, exactly that many requests are made and
//! the window closes with the last of them.
//!
//! **Cost.** The loop takes the clock once for each reap, not for each request, and allocates nothing: buffers, tags, the
//! completion list and the histogram live in the [`Generator`] and are used again by the next run.
//!
//! A failed request ends the run with an error that names its offset. There is no average over a device that fails.

use crate::{
    LabError, Result,
    clock::CpuTime,
    data,
    workload::{Direction, Pattern, Workload},
};
use diskwright_store::{
    BlockDevice, BlockQueue, Completion, EngineKind, IoBuf, Operation, QueueOptions, Request, Slab,
};
use hdrhistogram::Histogram;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use serde::{Deserialize, Serialize};
use std::{
    io,
    time::{Duration, Instant},
};

/// Longest latency that is told apart, in nanoseconds: an hour. Longer ones count as this.
const LATENCY_MAX_NS: u64 = 3_600_000_000_000;

/// Largest memory for buffers, so that a mistyped depth is an error and not a dead machine.
const BUFFERS_MAX_BYTES: u64 = 4 << 30;

/// How long to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Warm up, then measure, each for about this long.
    Elapsed {
        /// Not measured.
        warm_up: Duration,
        /// Measured.
        measured: Duration,
    },
    /// Exactly this many requests, all of them measured.
    Count(u64),
}

/// Latencies in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Arithmetic mean.
    pub mean_ns: f64,
    /// Standard deviation.
    pub deviation_ns: f64,
    /// Shortest.
    pub min_ns: u64,
    /// Median.
    pub p50_ns: u64,
    /// 90 of 100 are shorter.
    pub p90_ns: u64,
    /// 99 of 100 are shorter.
    pub p99_ns: u64,
    /// 999 of 1,000 are shorter.
    pub p999_ns: u64,
    /// Longest.
    pub max_ns: u64,
}

/// What one run found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Requests completed in the window.
    pub ios: u64,
    /// Bytes they moved.
    pub bytes: u64,
    /// Length of the window.
    pub wall_ns: u64,
    /// CPU time of the process in the window, user mode.
    pub user_cpu_ns: u64,
    /// CPU time of the process in the window, kernel.
    pub system_cpu_ns: u64,
    /// Times of the requests.
    pub latency: Latency,
    /// Requests in flight on average, by Little's law: rate times mean latency.
    pub depth_reached: f64,
}

impl Measurement {
    /// Requests a second.
    pub fn iops(&self) -> f64 {
        self.ios as f64 * 1e9 / self.wall_ns.max(1) as f64
    }

    /// Millions of bytes (10^6) a second.
    pub fn mb_per_s(&self) -> f64 {
        self.bytes as f64 * 1e3 / self.wall_ns.max(1) as f64
    }

    /// CPU time for each request, user and kernel, in nanoseconds.
    pub fn cpu_ns_per_io(&self) -> f64 {
        (self.user_cpu_ns + self.system_cpu_ns) as f64 / self.ios.max(1) as f64
    }
}

/// Runs workloads of one block size and one depth. See the module.
#[derive(Debug)]
pub struct Generator {
    slab: Slab,
    free: Vec<IoBuf>,
    block_bytes: u32,
    depth: usize,
    seed: u64,
    flights: Vec<Flight>,
    done: Vec<Completion>,
    histogram: Histogram<u64>,
}

/// When and where a tag's request was made.
#[derive(Debug, Clone, Copy, Default)]
struct Flight {
    made_ns: u64,
    offset_bytes: u64,
}

impl Generator {
    /// A generator with `queue_depth` buffers of `block_bytes`, filled with contents of `seed` that cannot be compressed.
    ///
    /// # Errors
    /// [`LabError::BadOptions`] for a depth or block of 0, a block that is no multiple of 512, or more than 4 GiB of buffers.
    pub fn new(block_bytes: u32, queue_depth: u32, seed: u64) -> Result<Self> {
        let bad = |what: String, hint: &str| Err(LabError::BadOptions { what, hint: hint.into() });
        if block_bytes == 0 || !block_bytes.is_multiple_of(512) {
            return bad(format!("a block of {block_bytes} bytes cannot be asked for"), "use a multiple of 512");
        }
        if queue_depth == 0 {
            return bad("a queue depth of 0 moves nothing".into(), "use at least 1");
        }
        if u64::from(block_bytes) * u64::from(queue_depth) > BUFFERS_MAX_BYTES {
            return bad(
                format!("{queue_depth} requests of {block_bytes} bytes need more than 4 GiB of buffers"),
                "use a smaller depth or block",
            );
        }
        let depth = queue_depth as usize;
        let histogram = Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3).map_err(|error| LabError::BadOptions {
            what: format!("the latency histogram cannot be made: {error}"),
            hint: "please report this".into(),
        })?;
        let mut generator = Self {
            slab: Slab::new(depth, block_bytes as usize),
            free: Vec::new(),
            block_bytes,
            depth,
            seed,
            flights: vec![Flight::default(); depth],
            done: Vec::with_capacity(depth),
            histogram,
        };
        generator.take_buffers();
        Ok(generator)
    }

    /// A generator for `workload`.
    ///
    /// # Errors
    /// As [`Generator::new`].
    pub fn for_workload(workload: &Workload, seed: u64) -> Result<Self> {
        Self::new(workload.block_bytes, workload.queue_depth, seed)
    }

    fn take_buffers(&mut self) {
        self.free = self.slab.take_all();
        let step_bytes = self.block_bytes as usize;
        for (index, buf) in self.free.iter_mut().enumerate() {
            // Far from any offset of a target, so that what a workload writes is nowhere what was prepared.
            let offset_bytes = (1 << 62) + (index * step_bytes.next_multiple_of(data::SECTOR_BYTES)) as u64;
            data::fill(self.seed, offset_bytes, buf);
        }
    }

    /// Runs `workload` on `device`, whose name is for messages. `round` varies where random requests go and where sequential ones
    /// begin; the same round does the same on every device.
    ///
    /// # Errors
    /// [`LabError::BadOptions`] when the workload is not of this generator's block size and depth, or the working set holds no
    /// block; [`LabError::Queue`] and [`LabError::Request`] when the device fails.
    pub fn run(
        &mut self,
        name: &str,
        device: &dyn BlockDevice,
        workload: &Workload,
        until: Until,
        engine: EngineKind,
        round: u64,
    ) -> Result<Measurement> {
        if workload.block_bytes != self.block_bytes || workload.queue_depth as usize != self.depth {
            return Err(LabError::BadOptions {
                what: format!("the generator is not made for {} at depth {}", workload.name, workload.queue_depth),
                hint: "make one with Generator::for_workload".into(),
            });
        }
        let blocks = workload.blocks_on(device.geometry().size_bytes);
        if blocks == 0 {
            return Err(LabError::BadOptions {
                what: format!("{name}: its working set holds not one block of {} bytes", self.block_bytes),
                hint: "use a larger disk or a smaller block".into(),
            });
        }
        if self.free.len() != self.depth {
            // A queue that failed in an earlier run kept some buffers.
            self.slab = Slab::new(self.depth, self.block_bytes as usize);
            self.take_buffers();
        }
        self.histogram.reset();
        self.done.clear();
        let options = QueueOptions { depth: self.depth, engine, slab: Some(&self.slab), ring: None };
        let queue = device.open_queue(&options).map_err(|source| LabError::Queue {
            target: name.to_owned(),
            doing: format!("open a queue of depth {}", self.depth),
            source,
        })?;
        let mut run = Run {
            generator: self,
            name,
            queue,
            operation: if workload.direction == Direction::Read { Operation::Read } else { Operation::Write },
            offsets: Offsets::new(workload.pattern, blocks, round),
            start: Instant::now(),
            completed: 0,
            histogram_on: false,
        };
        let measured = run.measure(until);
        let drained = run.drain();
        let measurement = measured?;
        drained?;
        Ok(measurement)
    }
}

/// Where requests go, in blocks.
#[derive(Debug)]
struct Offsets {
    pattern: Pattern,
    blocks: u64,
    next: u64,
    rng: Xoshiro256PlusPlus,
}

impl Offsets {
    fn new(pattern: Pattern, blocks: u64, round: u64) -> Self {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(round);
        let next = below(&mut rng, blocks);
        Self { pattern, blocks, next, rng }
    }

    #[inline]
    fn next_block(&mut self) -> u64 {
        match self.pattern {
            Pattern::Random => below(&mut self.rng, self.blocks),
            Pattern::Sequential => {
                let block = self.next;
                self.next = if block + 1 == self.blocks { 0 } else { block + 1 };
                block
            }
        }
    }
}

/// A number below `bound`: the high half of a product. Its bias is below `bound` / 2^64, which nobody can measure.
#[inline]
fn below(rng: &mut Xoshiro256PlusPlus, bound: u64) -> u64 {
    ((u128::from(rng.next_u64()) * u128::from(bound)) >> 64) as u64
}

/// One run in progress.
struct Run<'a> {
    generator: &'a mut Generator,
    name: &'a str,
    queue: Box<dyn BlockQueue>,
    operation: Operation,
    offsets: Offsets,
    start: Instant,
    completed: u64,
    histogram_on: bool,
}

impl Run<'_> {
    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn measure(&mut self, until: Until) -> Result<Measurement> {
        let depth = self.generator.depth as u64;
        let (warm_up_ns, measured_ns, count) = match until {
            Until::Elapsed { warm_up, measured } => (warm_up.as_nanos() as u64, measured.as_nanos() as u64, u64::MAX),
            Until::Count(count) => (0, u64::MAX, count),
        };
        let mut now_ns = self.now_ns();
        let mut cpu = CpuTime::of_process();
        self.histogram_on = warm_up_ns == 0;
        for tag in 0..depth.min(count) {
            let Some(buf) = self.generator.free.pop() else { break };
            self.push(tag, buf, now_ns)?;
        }
        // Requests that may still be made: in time mode never exhausted.
        let mut to_make = count.saturating_sub(depth);
        let mut window_start_ns = 0;
        if warm_up_ns > 0 {
            while now_ns < warm_up_ns {
                now_ns = self.turn(&mut to_make)?;
            }
            self.completed = 0;
            self.histogram_on = true;
            cpu = CpuTime::of_process();
            now_ns = self.now_ns();
            window_start_ns = now_ns;
        }
        let window_end_ns = window_start_ns.saturating_add(measured_ns);
        while now_ns < window_end_ns && self.completed < count {
            now_ns = self.turn(&mut to_make)?;
        }
        let cpu = CpuTime::of_process() - cpu;
        self.histogram_on = false;
        Ok(self.summary(now_ns - window_start_ns, cpu))
    }

    /// Waits for a completion, records all that have come, and puts new requests in their places. Returns the time.
    fn turn(&mut self, to_make: &mut u64) -> Result<u64> {
        let mut done = std::mem::take(&mut self.generator.done);
        let reaped = self.queue.reap(1, &mut done);
        let now_ns = self.now_ns();
        let mut outcome = reaped.map_err(|source| self.queue_error("reap completions", source));
        for completion in done.drain(..) {
            let Some(buf) = completion.buf else { continue };
            let flight = self.generator.flights[completion.tag as usize];
            match completion.result {
                Err(source) if outcome.is_ok() => outcome = Err(self.request_error(flight.offset_bytes, source)),
                Ok(()) if outcome.is_ok() => {
                    self.completed += 1;
                    if self.histogram_on {
                        self.generator.histogram.saturating_record((now_ns - flight.made_ns).max(1));
                    }
                    if *to_make > 0 {
                        *to_make -= 1;
                        outcome = self.push(completion.tag, buf, now_ns);
                        continue;
                    }
                }
                _ => {}
            }
            self.generator.free.push(buf);
        }
        self.generator.done = done;
        outcome.map(|()| now_ns)
    }

    #[inline]
    fn push(&mut self, tag: u64, buf: IoBuf, now_ns: u64) -> Result<()> {
        let len_bytes = u64::from(self.generator.block_bytes);
        let offset_bytes = self.offsets.next_block() * len_bytes;
        self.generator.flights[tag as usize] = Flight { made_ns: now_ns, offset_bytes };
        let request =
            Request { operation: self.operation, ..Request::read(offset_bytes, len_bytes as usize, buf, tag) };
        self.queue.push(request).map_err(|error| {
            self.generator.free.extend(error.request.buf);
            self.request_error(offset_bytes, error.reason)
        })
    }

    /// Waits for everything in flight, so that every buffer comes home.
    fn drain(&mut self) -> Result<()> {
        while self.queue.in_flight() > 0 {
            let mut done = std::mem::take(&mut self.generator.done);
            let reaped = self.queue.reap(1, &mut done);
            let mut outcome = reaped.map_err(|source| self.queue_error("reap the last completions", source));
            for completion in done.drain(..) {
                let flight = self.generator.flights[completion.tag as usize];
                self.generator.free.extend(completion.buf);
                if let (Err(source), true) = (completion.result, outcome.is_ok()) {
                    outcome = Err(self.request_error(flight.offset_bytes, source));
                }
            }
            self.generator.done = done;
            outcome?;
        }
        Ok(())
    }

    fn request_error(&self, offset_bytes: u64, source: io::Error) -> LabError {
        LabError::Request {
            target: self.name.to_owned(),
            operation: self.operation,
            offset_bytes,
            len_bytes: u64::from(self.generator.block_bytes),
            completed: self.completed,
            source,
        }
    }

    fn queue_error(&self, doing: &str, source: io::Error) -> LabError {
        LabError::Queue { target: self.name.to_owned(), doing: doing.into(), source }
    }

    fn summary(&self, wall_ns: u64, cpu: CpuTime) -> Measurement {
        let histogram = &self.generator.histogram;
        let latency = if histogram.is_empty() {
            Latency::default()
        } else {
            Latency {
                mean_ns: histogram.mean(),
                deviation_ns: histogram.stdev(),
                min_ns: histogram.min(),
                p50_ns: histogram.value_at_quantile(0.5),
                p90_ns: histogram.value_at_quantile(0.9),
                p99_ns: histogram.value_at_quantile(0.99),
                p999_ns: histogram.value_at_quantile(0.999),
                max_ns: histogram.max(),
            }
        };
        Measurement {
            ios: self.completed,
            bytes: self.completed * u64::from(self.generator.block_bytes),
            wall_ns,
            user_cpu_ns: cpu.user_ns,
            system_cpu_ns: cpu.system_ns,
            depth_reached: self.completed as f64 * latency.mean_ns / wall_ns.max(1) as f64,
            latency,
        }
    }
}

#[cfg(test)]
#[path = "generator_tests.rs"]
mod tests;
