//! DiskSpd's own model of a test: a profile of time spans, each with targets that carry their own
//! settings. Switches and XML profiles are both turned into it; jobs and reports are both made from
//! it.

use diskwright_load::job::{Caching, Spot};

/// Form of the results; DiskSpd's `-R`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ResultForm {
    /// Tables.
    #[default]
    Text,
    /// XML.
    Xml,
}

/// What is written; DiskSpd's `-Z`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WriteContents {
    /// Bytes 0, 1, 2 ... 255, again and again: DiskSpd's default. Here incompressible bytes are
    /// written in its place.
    #[default]
    Sequential,
    /// Zeros.
    Zero,
    /// Random bytes; from a buffer of this size in DiskSpd.
    Random {
        /// Size of that buffer.
        buffer_bytes: u64,
    },
}

/// Order of the requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Order {
    /// One behind the other.
    Sequential {
        /// Distance between beginnings; none: the block.
        stride_bytes: Option<u64>,
        /// Whether the threads share one stream.
        interlocked: bool,
    },
    /// Anywhere.
    Random {
        /// Offsets are multiples of it; none: of the block.
        align_bytes: Option<u64>,
        /// Share of random requests; the rest are sequential.
        percent: f64,
    },
}

/// A limit; DiskSpd's `-g`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Throughput {
    /// Bytes in each millisecond.
    BytesPerMs(u64),
    /// Requests in each second.
    Iops(u64),
}

/// One target of a time span.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// As given.
    pub path: String,
    /// `-b`.
    pub block_bytes: u64,
    /// `-B`: where the part in use begins.
    pub base_bytes: u64,
    /// `-f`: where it ends at most; 0: at the end of the target. Also from `-B`'s length.
    pub max_bytes: u64,
    /// `-c`: the file is made with this size.
    pub create_bytes: Option<u64>,
    /// `-r`, `-s`.
    pub order: Order,
    /// `-p`: every request in flight goes through the target by itself.
    pub parallel: bool,
    /// `-rd`.
    pub spots: Vec<Spot>,
    /// `-w`.
    pub write_percent: u32,
    /// `-o`.
    pub requests: u32,
    /// `-t`.
    pub threads: u32,
    /// `-T`.
    pub thread_stride_bytes: u64,
    /// `-S`, `-h`.
    pub cache: Caching,
    /// `-Z`.
    pub contents: WriteContents,
    /// `-i`.
    pub burst: u32,
    /// `-j`, milliseconds.
    pub think_ms: u64,
    /// `-g`.
    pub throughput: Option<Throughput>,
    /// `-I`: 1 very low to 3 normal. Told, not obeyed.
    pub priority: u32,
}

impl Target {
    /// A target with DiskSpd's defaults.
    pub fn new(path: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            block_bytes: 64 << 10,
            base_bytes: 0,
            max_bytes: 0,
            create_bytes: None,
            order: Order::Sequential { stride_bytes: None, interlocked: false },
            parallel: false,
            spots: Vec::new(),
            write_percent: 0,
            requests: 2,
            threads: 1,
            thread_stride_bytes: 0,
            cache: Caching::Cached,
            contents: WriteContents::Sequential,
            burst: 0,
            think_ms: 0,
            throughput: None,
            priority: 3,
        }
    }

    /// The number behind the `*` of a template: a place that a target of the command line takes.
    pub fn template(&self) -> Option<usize> {
        let digits = self.path.strip_prefix('*')?;
        let number: usize = digits.parse().ok()?;
        (number > 0 && digits.bytes().all(|digit| digit.is_ascii_digit())).then_some(number)
    }

    /// Alignment of random offsets, or distance of sequential ones.
    pub fn alignment_bytes(&self) -> u64 {
        match self.order {
            Order::Sequential { stride_bytes, .. } => stride_bytes.unwrap_or(self.block_bytes),
            Order::Random { align_bytes, .. } => align_bytes.unwrap_or(self.block_bytes),
        }
    }
}

/// A processor as `-a` names it. Linux has one group of them, number 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor {
    /// Its group.
    pub group: u32,
    /// Its number in the group.
    pub number: u32,
}

impl std::fmt::Display for Processor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.group, self.number)
    }
}

/// A stretch of time with its targets.
#[derive(Debug, Clone, PartialEq)]
pub struct TimeSpan {
    /// `-d`, seconds.
    pub duration_s: u64,
    /// `-W`, seconds.
    pub warm_up_s: u64,
    /// `-C`, seconds.
    pub cool_down_s: u64,
    /// `-L`: whether latencies are told.
    pub measure_latency: bool,
    /// `-D`: whether and in which steps the scatter of IOPS is told, milliseconds.
    pub iops_every_ms: Option<u64>,
    /// `-z`.
    pub seed: u64,
    /// `-F`: threads in all; 0: `-t` for each target.
    pub threads_in_all: u32,
    /// `-O`: requests for each thread over all targets; 0: `-o` on each.
    pub requests_in_all: u32,
    /// `-n`.
    pub affinity_disabled: bool,
    /// `-a`: the processors that threads take in turns; empty: all that there are.
    pub affinity: Vec<Processor>,
    /// `-Zr`.
    pub random_write_data: bool,
    /// The targets.
    pub targets: Vec<Target>,
}

impl Default for TimeSpan {
    fn default() -> Self {
        Self {
            duration_s: 10,
            warm_up_s: 5,
            cool_down_s: 0,
            measure_latency: false,
            iops_every_ms: None,
            seed: 0,
            threads_in_all: 0,
            requests_in_all: 0,
            affinity_disabled: false,
            affinity: Vec::new(),
            random_write_data: false,
            targets: Vec::new(),
        }
    }
}

/// A whole test.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Profile {
    /// As typed, for the report.
    pub command_line: String,
    /// `-v`.
    pub verbose: bool,
    /// `-R`.
    pub form: ResultForm,
    /// `-Rp`: the profile is told and nothing is run.
    pub profile_only: bool,
    /// One after the other.
    pub time_spans: Vec<TimeSpan>,
    /// What was accepted and has no effect here, and what is done otherwise than DiskSpd does it: a
    /// sentence each.
    pub notes: Vec<String>,
}
