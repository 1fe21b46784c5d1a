//! DiskSpd's model of a test: a profile of time spans, each with targets that have their own
//! settings. Switches and XML profiles are converted into this model. Jobs and reports are made
//! from it.

use diskwright_load::job::{Caching, Spot};

/// Format of the results; DiskSpd's `-R`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ResultForm {
    /// Tables.
    #[default]
    Text,
    /// XML.
    Xml,
}

/// Payload of writes; DiskSpd's `-Z`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WriteContents {
    /// The repeated bytes 0, 1, 2 ... 255, DiskSpd's default. Incompressible bytes are written
    /// instead.
    #[default]
    Sequential,
    /// Zeros.
    Zero,
    /// Random bytes.
    Random {
        /// Size of DiskSpd's source buffer; it is only reported. 0: none was given.
        buffer_bytes: u64,
    },
}

/// Order of the requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Order {
    /// Sequential requests; DiskSpd's `-s`.
    Sequential {
        /// Distance between the offsets of requests; `None`: the block.
        stride_bytes: Option<u64>,
        /// Whether the threads share one stream (`-si`).
        interlocked: bool,
    },
    /// Random requests; DiskSpd's `-r`.
    Random {
        /// Offsets are multiples of this; `None`: of the block.
        align_bytes: Option<u64>,
        /// Share of random requests in percent; the others are sequential.
        percent: f64,
    },
}

/// Rate limit of each thread; DiskSpd's `-g`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Throughput {
    /// Bytes per millisecond.
    BytesPerMs(u64),
    /// Requests per second.
    Iops(u64),
}

/// One target of a time span.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// Path of a file or device, or a template such as `*1`.
    pub path: String,
    /// `-b`: size of a request.
    pub block_bytes: u64,
    /// `-B`: start of the working set.
    pub base_bytes: u64,
    /// `-f`, or the length in `-B`: end of the working set; 0: the end of the target.
    pub max_bytes: u64,
    /// `-c`: the file is created with this size.
    pub create_bytes: Option<u64>,
    /// `-r`, `-s`: order of the requests.
    pub order: Order,
    /// `-p`: each request in flight has a sequential stream of its own.
    pub parallel: bool,
    /// `-rd`: shares of the requests for ranges of the target.
    pub spots: Vec<Spot>,
    /// `-w`: share of writes, percent.
    pub write_percent: u32,
    /// `-o`: requests in flight for each thread.
    pub requests: u32,
    /// `-t`: threads for each target.
    pub threads: u32,
    /// `-T`: distance between the starts of the threads' streams.
    pub thread_stride_bytes: u64,
    /// `-S`, `-h`: cache mode.
    pub cache: Caching,
    /// `-Z`: payload of writes.
    pub contents: WriteContents,
    /// `-i`: requests of a burst; 0: no bursts.
    pub burst: u32,
    /// `-j`: pause between bursts, or think time, milliseconds.
    pub think_ms: u64,
    /// `-g`: rate limit.
    pub throughput: Option<Throughput>,
    /// `-I`: 1 very low to 3 normal. It is reported and has no effect.
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

    /// The number of a template (`*1`), which a target of the command line replaces; `None` for a
    /// path.
    pub fn template(&self) -> Option<usize> {
        let digits = self.path.strip_prefix('*')?;
        let number: usize = digits.parse().ok()?;
        (number > 0 && digits.bytes().all(|digit| digit.is_ascii_digit())).then_some(number)
    }

    /// Alignment of random offsets, or stride of sequential ones.
    pub fn alignment_bytes(&self) -> u64 {
        match self.order {
            Order::Sequential { stride_bytes, .. } => stride_bytes.unwrap_or(self.block_bytes),
            Order::Random { align_bytes, .. } => align_bytes.unwrap_or(self.block_bytes),
        }
    }
}

/// A processor as `-a` names it. Linux has one processor group, number 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor {
    /// Number of the group.
    pub group: u32,
    /// Number of the processor in the group.
    pub number: u32,
}

impl std::fmt::Display for Processor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.group, self.number)
    }
}

/// A time span of a test, with its targets.
#[derive(Debug, Clone, PartialEq)]
pub struct TimeSpan {
    /// `-d`: measured time, seconds.
    pub duration_s: u64,
    /// `-W`: warm-up, seconds.
    pub warm_up_s: u64,
    /// `-C`: cool-down, seconds.
    pub cool_down_s: u64,
    /// `-L`: whether the report has latencies.
    pub measure_latency: bool,
    /// `-D`: interval of the standard deviation of IOPS, milliseconds; `None`: not in the report.
    pub iops_every_ms: Option<u64>,
    /// `-z`: seed of random offsets.
    pub seed: u64,
    /// `-F`: number of threads in all; 0: `-t` threads for each target.
    pub threads_in_all: u32,
    /// `-O`: requests in flight for each thread over all targets; 0: `-o` requests on each target.
    pub requests_in_all: u32,
    /// `-n`: threads are not bound to processors.
    pub affinity_disabled: bool,
    /// `-a`: processors to which threads are bound, round-robin; empty: all processors.
    pub affinity: Vec<Processor>,
    /// `-Zr`: random data for each write.
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

/// A test of one or more time spans.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Profile {
    /// The command line, for the report.
    pub command_line: String,
    /// `-v`: verbose report.
    pub verbose: bool,
    /// `-R`: format of the results.
    pub form: ResultForm,
    /// `-Rp`: the profile is printed and nothing is run.
    pub profile_only: bool,
    /// The time spans, which run one after the other.
    pub time_spans: Vec<TimeSpan>,
    /// One sentence for each switch that has no effect or differs from DiskSpd.
    pub notes: Vec<String>,
}
