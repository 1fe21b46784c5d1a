//! A load: offsets, sizes, queue depth and rate of the requests of some threads.
//!
//! Threads and depth multiply as in DiskSpd: each target has `threads` threads, and each thread has
//! `queue_depth` requests in flight. With `across_targets` there are `threads` threads in all
//! (DiskSpd's `-F`), and each has `queue_depth` requests in flight on every target.

use super::{Bytes, JobError, Span};
use serde::{Deserialize, Serialize};

/// Sizes of requests: one size, or several with weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(untagged)]
pub enum Blocks {
    /// All requests have this size.
    One(Bytes),
    /// The size of each request is drawn by weight.
    Mix(Vec<SizeShare>),
}

/// One size of a mix.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SizeShare {
    /// Bytes of one request.
    pub size: Bytes,
    /// Weight relative to the other sizes, above 0.
    pub weight: f64,
    /// Share of reads among the requests of this size, in percent; `None`: that of the load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_percent: Option<f64>,
    /// Share of random requests among those of this size, in percent; `None`: that of the load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random_percent: Option<f64>,
}

impl Blocks {
    /// The largest size.
    pub fn largest_bytes(&self) -> u64 {
        match self {
            Self::One(size) => size.0,
            Self::Mix(shares) => shares.iter().map(|share| share.size.0).max().unwrap_or(0),
        }
    }

    /// The sizes and their weights.
    pub fn shares(&self) -> Vec<SizeShare> {
        match self {
            Self::One(size) => vec![SizeShare { size: *size, weight: 1.0, read_percent: None, random_percent: None }],
            Self::Mix(shares) => shares.clone(),
        }
    }
}

/// Distribution of the offsets of random requests over the working set.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, tag = "kind")]
pub enum Distribution {
    /// Every block with the same probability.
    #[default]
    Uniform,
    /// Zipf: the n-th most popular block has a probability proportional to n^-theta. Popular blocks
    /// are scattered over the working set.
    Zipf {
        /// Above 0 and not 1; 0.99 and 1.2 are usual.
        theta: f64,
    },
    /// Pareto, as fio's `random_distribution=pareto`.
    Pareto {
        /// Between 0 and 1; 0.2 is the 80/20 rule.
        h: f64,
    },
    /// Hot and cold ranges, as DiskSpd's `-rdpct` and fio's `zoned`: each spot gets a share of the
    /// requests. Spots follow each other from the start of the working set.
    Spots {
        /// The spots. Shares add up to 100 or less; the remaining requests go to the remaining
        /// range.
        spots: Vec<Spot>,
    },
}

/// One range of [`Distribution::Spots`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Spot {
    /// Share of the requests, percent.
    pub io_percent: f64,
    /// Length as a share of the working set, percent; ignored when there is a `length`.
    #[serde(default)]
    pub target_percent: f64,
    /// Length in bytes, as in DiskSpd's `-rdabs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<Bytes>,
}

/// A request rate, kept by an absolute schedule. The intended start of each request is fixed before
/// the run, so that a stall of the target counts for all requests that were due during the stall.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, tag = "kind")]
pub enum Rate {
    /// Requests per second.
    Iops {
        /// Requests per second of each thread, above 0.
        per_thread: f64,
    },
    /// Bytes per second.
    Throughput {
        /// Bytes per second of each thread, above 0.
        per_thread: Bytes,
    },
}

/// Bursts: a thread makes `requests` requests without a limit, then none for `pause`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Burst {
    /// Requests of a burst, at least 1.
    pub requests: u32,
    /// Pause between bursts.
    pub pause: Span,
}

/// A load of a phase: the requests of some threads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Load {
    /// Name in reports; when it is empty, [`Load::title`] makes one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Sizes of requests.
    pub block: Blocks,
    /// Share of reads, percent; the other requests are writes.
    pub read_percent: f64,
    /// Share of random requests, percent; the others are sequential: each follows the request
    /// before it.
    pub random_percent: f64,
    /// Offsets of random requests are multiples of this, from the start of the working set; `None`:
    /// multiples of the block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub align: Option<Bytes>,
    /// Distance between the offsets of sequential requests; `None`: the block, so that there is no
    /// gap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stride: Option<Bytes>,
    /// Whether the threads of one target share one sequential stream (DiskSpd's `-si`); else each
    /// thread has its own.
    pub interlocked: bool,
    /// Whether each request in flight has a sequential stream of its own, all with the same start
    /// (DiskSpd's `-p`); else the requests of a thread share one stream.
    #[serde(skip_serializing_if = "is_false")]
    pub parallel: bool,
    /// Threads for each target, or in all with `across_targets`.
    pub threads: u32,
    /// Whether every thread drives all targets; else each thread drives one.
    #[serde(skip_serializing_if = "is_false")]
    pub across_targets: bool,
    /// Processors to which the threads of the phase are bound, round-robin; an empty list: all that
    /// the process may use; `None`: threads are not bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Vec<u32>>,
    /// Requests in flight for each thread on each target that it drives.
    pub queue_depth: u32,
    /// Completions that a thread waits for before it makes new requests (fio's
    /// `iodepth_batch_complete_min`). A value above 1 saves system calls, and fewer requests are in
    /// flight on average.
    #[serde(skip_serializing_if = "is_one")]
    pub batch: u32,
    /// Offset of the working set on the target.
    pub start: Bytes,
    /// Distance between the starts of the sequential streams of consecutive threads (DiskSpd's
    /// `-T`).
    pub thread_start: Bytes,
    /// Offset in the working set at which sequential streams start. At the end of the working set a
    /// stream continues at its beginning.
    #[serde(skip_serializing_if = "is_nothing")]
    pub stream_start: Bytes,
    /// Length of the working set; 0: to the end of the target.
    pub working_set: Bytes,
    /// Distribution of the offsets of random requests.
    pub distribution: Distribution,
    /// Pause between a completion and the next request in the same slot of the queue.
    #[serde(skip_serializing_if = "Span::is_zero")]
    pub think_time: Span,
    /// Bursts and pauses; `None`: no bursts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<Burst>,
    /// Request rate; `None`: as fast as the target answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<Rate>,
    /// A thread flushes after this many writes; 0: never.
    pub flush_every: u64,
    /// Numbers of the targets, from 0; empty: all targets.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<usize>,
}

impl Default for Load {
    /// 4K random reads over the whole target, one thread, 32 in flight.
    fn default() -> Self {
        Self {
            name: String::new(),
            block: Blocks::One(Bytes(4096)),
            read_percent: 100.0,
            random_percent: 100.0,
            align: None,
            stride: None,
            interlocked: false,
            parallel: false,
            threads: 1,
            across_targets: false,
            cpus: None,
            queue_depth: 32,
            batch: 1,
            start: Bytes(0),
            thread_start: Bytes(0),
            stream_start: Bytes(0),
            working_set: Bytes(0),
            distribution: Distribution::Uniform,
            think_time: Span::default(),
            burst: None,
            rate: None,
            flush_every: 0,
            targets: Vec::new(),
        }
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_nothing(value: &Bytes) -> bool {
    value.0 == 0
}

fn is_one(value: &u32) -> bool {
    *value == 1
}

/// Largest `queue_depth` of a load.
pub const QUEUE_DEPTH_MAX: u32 = 16_384;
/// Largest `threads` of a load.
pub const THREADS_MAX: u32 = 1024;
/// Largest request.
const BLOCK_MAX_BYTES: u64 = 64 << 20;

impl Load {
    /// The name of the load, or a summary: `8K random 70 % read, 4 x 8` (threads x queue depth).
    pub fn title(&self) -> String {
        if !self.name.is_empty() {
            return self.name.clone();
        }
        let block = match &self.block {
            Blocks::One(size) => size.to_string(),
            Blocks::Mix(shares) => shares.iter().map(|share| share.size.to_string()).collect::<Vec<_>>().join("/"),
        };
        let tenth = |percent: f64| (percent * 10.0).round() / 10.0;
        let share = |percent: f64, whole: &str, none: &str| match percent {
            100.0 => whole.to_owned(),
            0.0 => none.to_owned(),
            some => format!("{some} % {whole}"),
        };
        let random_percent = self.mean_percent(|share| share.random_percent, self.random_percent);
        let pattern = share(tenth(random_percent), "random", "sequential");
        let direction = share(tenth(self.mean_read_percent()), "read", "write");
        format!("{block} {pattern} {direction}, {} x {}", self.threads, self.queue_depth)
    }

    /// Share of reads over all sizes of the mix, percent.
    pub(crate) fn mean_read_percent(&self) -> f64 {
        self.mean_percent(|share| share.read_percent, self.read_percent)
    }

    /// Weighted mean of a percentage over all sizes of the mix. `whole` counts for sizes without a
    /// percentage of their own.
    fn mean_percent(&self, of: impl Fn(&SizeShare) -> Option<f64>, whole: f64) -> f64 {
        let shares = self.block.shares();
        if shares.iter().all(|share| of(share).is_none()) {
            return whole;
        }
        let weight: f64 = shares.iter().map(|share| share.weight).sum();
        let sum: f64 = shares.iter().map(|share| share.weight * of(share).unwrap_or(whole)).sum();
        sum / weight
    }

    /// Whether any request of the load is a read.
    pub fn reads(&self) -> bool {
        self.block.shares().iter().any(|share| share.read_percent.unwrap_or(self.read_percent) > 0.0)
    }

    /// Whether any request of the load is a write. A size of a mix may write although the load's
    /// own share of reads is 100 %.
    pub fn writes(&self) -> bool {
        self.block.shares().iter().any(|share| share.read_percent.unwrap_or(self.read_percent) < 100.0)
    }

    /// Whether any request of the load is sequential.
    pub(crate) fn is_partly_sequential(&self) -> bool {
        self.block.shares().iter().any(|share| share.random_percent.unwrap_or(self.random_percent) < 100.0)
    }

    /// Whether the load has a rate, bursts or think time. Without them a completion is at once
    /// followed by the next request.
    pub(crate) fn is_paced(&self) -> bool {
        self.rate.is_some() || self.burst.is_some() || !self.think_time.is_zero()
    }

    /// Checks the load without a target. `place` names the load in errors: `phase "main", load 2`.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn validate(&self, place: &str) -> Result<(), JobError> {
        let wrong = |field: &str, what: &str, hint: &str| {
            Err(JobError { place: format!("{place}, {field}"), what: what.into(), hint: hint.into() })
        };
        let percent = |value: f64| (0.0..=100.0).contains(&value);
        let positive = |value: f64| value > 0.0 && value.is_finite();
        if !percent(self.read_percent) {
            return wrong("read_percent", "outside 0 to 100", "give a percentage");
        }
        if !percent(self.random_percent) {
            return wrong("random_percent", "outside 0 to 100", "give a percentage");
        }
        if !(1..=QUEUE_DEPTH_MAX).contains(&self.queue_depth) {
            return wrong("queue_depth", "not between 1 and 16384", "32 is a usual depth");
        }
        if !(1..=THREADS_MAX).contains(&self.threads) {
            return wrong("threads", "not between 1 and 1024", "give as many as the machine has cores, or fewer");
        }
        let sizes = self.block.shares();
        let is_random = |share: &SizeShare| share.random_percent.unwrap_or(self.random_percent) > 0.0;
        if self.parallel && (self.interlocked || sizes.iter().any(is_random)) {
            return wrong(
                "parallel",
                "the requests are random, or the threads are interlocked",
                "use sequential requests without interlocked threads",
            );
        }
        if !(1..=self.queue_depth).contains(&self.batch) {
            return wrong("batch", "not between 1 and the queue depth", "omit it for 1");
        }
        let shares = self.block.shares();
        if shares.is_empty() || shares.iter().any(|share| !positive(share.weight)) {
            return wrong("block", "a mix needs sizes with weights above 0", "for example [{size='4K', weight=1}]");
        }
        if shares.iter().any(|share| share.size.0 == 0 || share.size.0 % 512 != 0 || share.size.0 > BLOCK_MAX_BYTES) {
            return wrong("block", "not a multiple of 512 bytes up to 64M", "for example 4K");
        }
        if shares.iter().any(|share| [share.read_percent, share.random_percent].iter().flatten().any(|p| !percent(*p)))
        {
            return wrong("block", "a share is outside 0 to 100", "give percentages");
        }
        for (field, value) in [("align", self.align), ("stride", self.stride)] {
            if value.is_some_and(|value| value.0 == 0 || value.0 % 512 != 0) {
                return wrong(field, "not a multiple of 512 bytes", "omit it for the size of the block");
            }
        }
        let places = [("start", self.start), ("thread_start", self.thread_start), ("stream_start", self.stream_start)];
        for (field, value) in places.into_iter().chain([("working_set", self.working_set)]) {
            if value.0 % 512 != 0 {
                return wrong(field, "not a multiple of 512 bytes", "give whole sectors");
            }
        }
        if self.burst.is_some_and(|burst| burst.requests == 0) {
            return wrong("burst", "a burst of 0 requests", "give at least 1");
        }
        match self.rate {
            Some(Rate::Iops { per_thread }) if !positive(per_thread) => {
                return wrong("rate", "not above 0", "omit it for no limit");
            }
            Some(Rate::Throughput { per_thread }) if per_thread.0 == 0 => {
                return wrong("rate", "not above 0", "omit it for no limit");
            }
            _ => {}
        }
        match &self.distribution {
            Distribution::Zipf { theta } if !positive(*theta) || (theta - 1.0).abs() < 1e-9 => {
                wrong("distribution", "theta is not above 0, or is 1", "0.99 and 1.2 are usual")
            }
            Distribution::Pareto { h } if !(*h > 0.0 && *h < 1.0) => {
                wrong("distribution", "h is not between 0 and 1", "0.2 is the 80/20 rule")
            }
            Distribution::Spots { spots } => {
                let io: f64 = spots.iter().map(|spot| spot.io_percent).sum();
                let target: f64 = spots.iter().map(|spot| spot.target_percent).sum();
                let each = spots.iter().all(|spot| percent(spot.io_percent) && percent(spot.target_percent));
                if spots.is_empty() || !each || io > 100.0 + 1e-9 || target > 100.0 + 1e-9 {
                    return wrong(
                        "distribution",
                        "shares are outside 0 to 100 or add up to more",
                        "for example 90/10:10/90",
                    );
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
