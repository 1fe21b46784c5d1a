//! A load: where the requests of some threads go, how large they are, how many are in flight, and
//! how fast they come.
//!
//! Threads and depth multiply as in DiskSpd: `threads` for each target, each with `queue_depth` in
//! flight on it. With `across_targets` there are `threads` in all (DiskSpd's `-F`), and each has
//! `queue_depth` in flight on every target.

use super::{Bytes, JobError, Span};
use serde::{Deserialize, Serialize};

/// Sizes of requests: one, or several with weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Blocks {
    /// All alike.
    One(Bytes),
    /// Drawn by weight for each request.
    Mix(Vec<SizeShare>),
}

/// One size of a mix.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SizeShare {
    /// Bytes of one request.
    pub size: Bytes,
    /// How often, relative to the others.
    pub weight: f64,
    /// Share of reads among the requests of this size, in percent; the load's own where there is
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_percent: Option<f64>,
    /// Share of random requests among those of this size, in percent; the load's own where there is
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random_percent: Option<f64>,
}

impl Blocks {
    /// Bytes of the largest.
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

/// Where random requests go in the working set.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, tag = "kind")]
pub enum Distribution {
    /// Anywhere alike.
    #[default]
    Uniform,
    /// Zipf's law: the n-th most popular block is drawn in proportion to n^-theta. Popular blocks
    /// are scattered over the working set.
    Zipf {
        /// Above 0 and not 1; 0.99 and 1.2 are usual.
        theta: f64,
    },
    /// Pareto's law, as fio has it.
    Pareto {
        /// Between 0 and 1; 0.2 is the 80/20 rule.
        h: f64,
    },
    /// Shares of the requests to shares of the working set, from its beginning, as DiskSpd's
    /// `-rdpct`: 90/10 then 10/90.
    Spots {
        /// One after the other; both shares add up to 100 or less, and the rest goes to the rest.
        spots: Vec<Spot>,
    },
}

/// One piece of [`Distribution::Spots`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spot {
    /// Share of the requests, percent.
    pub io_percent: f64,
    /// Length: a share of the working set in percent, when `length` is not given.
    #[serde(default)]
    pub target_percent: f64,
    /// Length in bytes, as DiskSpd's `-rdabs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<Bytes>,
}

/// A rate that is kept by an absolute schedule: a request's intended start is fixed beforehand, and
/// a target that stalls has to answer for all that should have started meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, tag = "kind")]
pub enum Rate {
    /// So many requests a second for each thread.
    Iops {
        /// Above 0.
        per_thread: f64,
    },
    /// So many bytes a second for each thread.
    Throughput {
        /// Above 0.
        per_thread: Bytes,
    },
}

/// Bursts: `requests` one after the other as fast as they go, then nothing for `pause`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Burst {
    /// At least 1.
    pub requests: u32,
    /// Between bursts.
    pub pause: Span,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Load {
    /// As shown to people; empty: made up from what it is.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Sizes of requests.
    pub block: Blocks,
    /// Share of reads, percent; the rest are writes.
    pub read_percent: f64,
    /// Share of requests that go to a random place, percent; the rest go on behind the request
    /// before.
    pub random_percent: f64,
    /// Random places are multiples of this from the start; none: of the block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub align: Option<Bytes>,
    /// Distance between the beginnings of sequential requests; none: the block (they touch).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stride: Option<Bytes>,
    /// Whether the threads of one target share one sequential stream (DiskSpd's `-si`); else each
    /// has its own.
    pub interlocked: bool,
    /// Whether each request in flight has a sequential stream of its own, all with the same
    /// beginning (DiskSpd's `-p`); else a thread's requests share one.
    #[serde(skip_serializing_if = "is_false")]
    pub parallel: bool,
    /// Threads for each target, or in all with `across_targets`.
    pub threads: u32,
    /// Whether every thread drives all targets; else each drives one.
    #[serde(skip_serializing_if = "is_false")]
    pub across_targets: bool,
    /// Processors that the threads of the phase take in turns; an empty list: all that the process
    /// may use; none: the kernel places them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Vec<u32>>,
    /// Requests in flight for each thread on its target, or on each of them.
    pub queue_depth: u32,
    /// Completions that a thread waits for before it makes new requests (fio's
    /// `iodepth_batch_complete_min`). More than 1 saves system calls and lets the depth sag.
    #[serde(skip_serializing_if = "is_one")]
    pub batch: u32,
    /// Where the working set begins on the target.
    pub start: Bytes,
    /// How far each next thread starts behind the one before (DiskSpd's `-T`); sequential streams
    /// only.
    pub thread_start: Bytes,
    /// Where in the working set sequential streams begin; from the end of the set they go on at its
    /// beginning.
    #[serde(skip_serializing_if = "is_nothing")]
    pub stream_start: Bytes,
    /// Length of the working set; 0: to the end of the target.
    pub working_set: Bytes,
    /// Where random requests go.
    pub distribution: Distribution,
    /// Pause of a thread's slot between a completion and its next request.
    #[serde(skip_serializing_if = "Span::is_zero")]
    pub think_time: Span,
    /// Bursts and pauses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<Burst>,
    /// A limit by an absolute schedule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<Rate>,
    /// A flush after so many writes of a thread; 0: none.
    pub flush_every: u64,
    /// Which targets, by their number from 0; empty: all.
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

/// Most requests in flight for one thread.
pub const QUEUE_DEPTH_MAX: u32 = 16_384;
/// Most threads for each target.
pub const THREADS_MAX: u32 = 1024;
/// Largest request.
pub const BLOCK_MAX_BYTES: u64 = 64 << 20;

impl Load {
    /// Its name, or what it is: `8K random 70 % read, 4 threads x 8`.
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
    pub fn mean_read_percent(&self) -> f64 {
        self.mean_percent(|share| share.read_percent, self.read_percent)
    }

    /// A percentage over all sizes of the mix, by their weights. `whole` is the load's own, for
    /// sizes without one.
    fn mean_percent(&self, of: impl Fn(&SizeShare) -> Option<f64>, whole: f64) -> f64 {
        let shares = self.block.shares();
        if shares.iter().all(|share| of(share).is_none()) {
            return whole;
        }
        let weight: f64 = shares.iter().map(|share| share.weight).sum();
        let sum: f64 = shares.iter().map(|share| share.weight * of(share).unwrap_or(whole)).sum();
        sum / weight
    }

    /// Whether any request of it reads.
    pub fn reads(&self) -> bool {
        self.block.shares().iter().any(|share| share.read_percent.unwrap_or(self.read_percent) > 0.0)
    }

    /// Whether any request of it writes. A size of a mix may write although the load's own share of
    /// reads is 100 %.
    pub fn writes(&self) -> bool {
        self.block.shares().iter().any(|share| share.read_percent.unwrap_or(self.read_percent) < 100.0)
    }

    /// Whether any request of it goes on behind the one before.
    pub fn is_partly_sequential(&self) -> bool {
        self.block.shares().iter().any(|share| share.random_percent.unwrap_or(self.random_percent) < 100.0)
    }

    /// Whether something else than a completion decides when requests are made: a rate, pauses,
    /// bursts.
    pub fn is_paced(&self) -> bool {
        self.rate.is_some() || self.burst.is_some() || !self.think_time.is_zero()
    }

    /// Checks what can be checked without a target. `place` says which load this is.
    ///
    /// # Errors
    /// The first thing that is wrong.
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
            return wrong("threads", "not between 1 and 1024", "as many as cores, or fewer");
        }
        let sizes = self.block.shares();
        let is_random = |share: &SizeShare| share.random_percent.unwrap_or(self.random_percent) > 0.0;
        if self.parallel && (self.interlocked || sizes.iter().any(is_random)) {
            return wrong(
                "parallel",
                "the requests are random, or the threads are interlocked",
                "make them sequential",
            );
        }
        if !(1..=self.queue_depth).contains(&self.batch) {
            return wrong("batch", "not between 1 and the queue depth", "leave it out for 1");
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
                return wrong(field, "not a multiple of 512 bytes", "leave it out for the block");
            }
        }
        let places = [("start", self.start), ("thread_start", self.thread_start), ("stream_start", self.stream_start)];
        for (field, value) in places.into_iter().chain([("working_set", self.working_set)]) {
            if value.0 % 512 != 0 {
                return wrong(field, "not a multiple of 512 bytes", "give sectors");
            }
        }
        if self.burst.is_some_and(|burst| burst.requests == 0) {
            return wrong("burst", "a burst of 0 requests", "give at least 1");
        }
        match self.rate {
            Some(Rate::Iops { per_thread }) if !positive(per_thread) => {
                return wrong("rate", "not above 0", "leave it out for no limit");
            }
            Some(Rate::Throughput { per_thread }) if per_thread.0 == 0 => {
                return wrong("rate", "not above 0", "leave it out for no limit");
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
