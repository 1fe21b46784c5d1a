//! DiskSpd's text report. Scripts parse lines that start with `total:` and `avg.` and split them at
//! `|`, so the columns, their order and the starts of lines are those of DiskSpd.
//!
//! One difference is intended: a percentile is printed only where at least ten requests are above
//! it. DiskSpd prints all nines of any sample.

use super::profile::{Order, Profile, Target, Throughput, TimeSpan, WriteContents};
use diskwright_load::{
    job::Caching,
    record::{
        CpuRecord, DirectionRecord, IopsStdDev, LatencyRecord, PhaseRecord, Run, SeriesPoint, ThreadRecord, Total,
    },
};
use std::fmt::Write as _;

/// The text report of a run.
pub fn report(profile: &Profile, run: &Run) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = input(&mut text, profile);
    for (index, span) in profile.time_spans.iter().enumerate() {
        let _ = results(&mut text, index + 1, span, run.phases.get(index), run);
    }
    text
}

type Written = Result<(), std::fmt::Error>;

fn input(text: &mut String, profile: &Profile) -> Written {
    writeln!(text, "\nCommand Line: {}\n\nInput parameters:\n", profile.command_line)?;
    if profile.verbose {
        writeln!(text, "\tusing verbose mode")?;
    }
    for (index, span) in profile.time_spans.iter().enumerate() {
        writeln!(text, "\ttimespan: {:3}\n\t-------------", index + 1)?;
        time_span(text, span)?;
        writeln!(text)?;
    }
    Ok(())
}

fn time_span(text: &mut String, span: &TimeSpan) -> Written {
    writeln!(text, "\tduration: {}s", span.duration_s)?;
    writeln!(text, "\twarm up time: {}s", span.warm_up_s)?;
    writeln!(text, "\tcool down time: {}s", span.cool_down_s)?;
    if span.affinity_disabled {
        writeln!(text, "\taffinity disabled")?;
    }
    if span.measure_latency {
        writeln!(text, "\tmeasuring latency")?;
    }
    if let Some(ms) = span.iops_every_ms {
        writeln!(text, "\tgathering IOPS at intervals of {ms}ms")?;
    }
    writeln!(text, "\trandom seed: {}", span.seed)?;
    if span.threads_in_all > 0 {
        writeln!(text, "\tthread pool with {} threads", span.threads_in_all)?;
        writeln!(text, "\tnumber of outstanding I/O operations per thread: {}", span.requests_in_all)?;
    }
    if !span.affinity.is_empty() {
        let assigned: Vec<String> = span.affinity.iter().map(ToString::to_string).collect();
        writeln!(text, "\tadvanced affinity round robin (group/core): {}", assigned.join(", "))?;
    }
    if span.random_write_data {
        writeln!(text, "\tgenerating random data for each write IO")?;
    }
    span.targets.iter().try_for_each(|target_of_span| target(text, span, target_of_span))
}

fn target(text: &mut String, span: &TimeSpan, target: &Target) -> Written {
    match target.template() {
        Some(number) => writeln!(text, "\tpath: template target '{number}'")?,
        None => writeln!(text, "\tpath: '{}'", target.path)?,
    }
    writeln!(text, "\t\tthink time: {}ms", target.think_ms)?;
    writeln!(text, "\t\tburst size: {}", target.burst)?;
    let (cache, through) = match target.cache {
        Caching::Cached => ("using software cache", "using hardware write cache, writethrough off"),
        Caching::WriteThrough => {
            ("using software cache", "hardware and software write caches disabled, writethrough on")
        }
        Caching::Direct => ("software cache disabled", "using hardware write cache, writethrough off"),
        Caching::DirectWriteThrough => ("software cache disabled", "hardware write cache disabled, writethrough on"),
    };
    writeln!(text, "\t\t{cache}\n\t\t{through}")?;
    match target.contents {
        WriteContents::Zero => writeln!(text, "\t\tzeroing write buffers")?,
        WriteContents::Random { buffer_bytes } if buffer_bytes > 0 => {
            writeln!(text, "\t\twrite buffer size: {buffer_bytes}")?
        }
        _ => {}
    }
    if target.parallel {
        writeln!(text, "\t\tusing parallel async I/O")?;
    }
    match target.write_percent {
        0 => writeln!(text, "\t\tperforming read test")?,
        100 => writeln!(text, "\t\tperforming write test")?,
        writes => writeln!(text, "\t\tperforming mix test (read/write ratio: {}/{writes})", 100 - writes)?,
    }
    writeln!(text, "\t\tblock size: {}", target.block_bytes)?;
    let align = target.alignment_bytes();
    match target.order {
        Order::Random { percent, .. } if percent < 100.0 => {
            writeln!(text, "\t\tusing mixed random/sequential I/O ({percent}% random) (alignment/stride: {align})")?;
        }
        Order::Random { .. } => writeln!(text, "\t\tusing random I/O (alignment: {align})")?,
        Order::Sequential { interlocked: true, .. } => {
            writeln!(text, "\t\tusing interlocked sequential I/O (stride: {align})")?
        }
        Order::Sequential { .. } => writeln!(text, "\t\tusing sequential I/O (stride: {align})")?,
    }
    if span.threads_in_all == 0 || span.requests_in_all == 0 {
        writeln!(text, "\t\tnumber of outstanding I/O operations per thread: {}", target.requests)?;
    }
    if target.base_bytes > 0 {
        writeln!(text, "\t\tbase file offset: {}", target.base_bytes)?;
    }
    if target.max_bytes > 0 {
        writeln!(text, "\t\tmax file size: {}", target.max_bytes)?;
    }
    writeln!(text, "\t\tthread stride size: {}", target.thread_stride_bytes)?;
    if span.threads_in_all == 0 {
        writeln!(text, "\t\tthreads per file: {}", target.threads)?;
    }
    let priority = match target.priority {
        1 => "very low",
        2 => "low",
        _ => "normal",
    };
    writeln!(text, "\t\tIO priority: {priority}")?;
    match target.throughput {
        Some(Throughput::Iops(limit)) => writeln!(text, "\t\tthroughput rate-limited to {limit} IOPS")?,
        Some(Throughput::BytesPerMs(limit)) => writeln!(text, "\t\tthroughput rate-limited to {limit} B/ms")?,
        None => {}
    }
    distribution(text, target)
}

/// The shares of the requests for ranges of the target; DiskSpd's `-rd`.
fn distribution(text: &mut String, target: &Target) -> Written {
    if target.spots.is_empty() {
        return Ok(());
    }
    writeln!(text, "\t\tIO Distribution:")?;
    let (mut from_percent, mut from_bytes) = (0.0, 0_u64);
    for spot in &target.spots {
        write!(text, "\t\t   {:3}% of IO => [", spot.io_percent)?;
        match spot.length {
            None => {
                let to_percent = from_percent + spot.target_percent;
                writeln!(text, "{from_percent:2}% - {to_percent:3}%) of target")?;
                from_percent = to_percent;
            }
            Some(length) => {
                let from = if from_bytes == 0 { "     0   ".to_owned() } else { aligned_size(from_bytes) };
                let to_bytes = from_bytes.saturating_add(length.0);
                // A length of 0 stands for the rest of the target.
                let to = if length.0 == 0 { "      end".to_owned() } else { aligned_size(to_bytes) };
                writeln!(text, "{from} - {to})")?;
                from_bytes = to_bytes;
            }
        }
    }
    Ok(())
}

/// A size in the largest unit of which it has at least one, right-aligned in six columns.
fn aligned_size(bytes: u64) -> String {
    for (unit_bytes, name) in [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if bytes >= unit_bytes {
            return match bytes.is_multiple_of(unit_bytes) {
                true => format!("{:6}{name}", bytes / unit_bytes),
                false => format!("{:6.2}{name}", bytes as f64 / unit_bytes as f64),
            };
        }
    }
    bytes.to_string()
}

fn results(text: &mut String, number: usize, span: &TimeSpan, phase: Option<&PhaseRecord>, run: &Run) -> Written {
    writeln!(text, "\n\nResults for timespan {number}:\n{}\n", "*".repeat(79))?;
    let Some(phase) = phase.filter(|phase| phase.window_ns > 0) else {
        return writeln!(text, "The test was interrupted before the measurements began. No results are displayed.");
    };
    let threads = phase.threads.iter().map(|thread| thread.thread).max().map_or(0, |most| most + 1);
    writeln!(text, "actual test time:\t{:.2}s", phase.window_s())?;
    writeln!(text, "thread count:\t\t{threads}")?;
    if span.requests_in_all > 0 {
        writeln!(text, "request count:\t\t{}", span.requests_in_all)?;
    }
    writeln!(text, "proc count:\t\t{}", run.head.machine.logical_cpus)?;
    cpu(text, &phase.cpu)?;
    for (name, section) in [("Total IO", Section::Both), ("Read IO", Section::Reads), ("Write IO", Section::Writes)] {
        writeln!(text, "\n{name}")?;
        table(text, section, span, phase, run)?;
    }
    if span.measure_latency {
        writeln!(text, "\n")?;
        let used: Vec<usize> = (0..run.targets.len())
            .filter(|index| phase.threads.iter().any(|thread| thread.target as usize == *index))
            .collect();
        if used.len() > 1 {
            for index in used {
                writeln!(text, "\n{}", run.targets[index].name)?;
                percentiles(text, &phase.total_where(|thread| thread.target as usize == index))?;
            }
        }
        writeln!(text, "\ntotal:")?;
        percentiles(text, &phase.total())?;
    }
    Ok(())
}

/// Shares of the time of each core in percent: busy, user, kernel, idle. Stolen time is not
/// counted.
pub(super) fn core_shares(cpu: &CpuRecord) -> Vec<[f64; 4]> {
    let shares = |core: &diskwright_load::record::CoreRecord| {
        let (kernel, idle) = ((core.system_ns + core.irq_ns) as f64, (core.idle_ns + core.iowait_ns) as f64);
        let user = core.user_ns as f64;
        let all = (user + kernel + idle).max(1.0) / 100.0;
        [(user + kernel) / all, user / all, kernel / all, idle / all]
    };
    cpu.cores.iter().map(shares).collect()
}

/// The mean shares over all cores.
pub(super) fn mean_shares(shares: &[[f64; 4]]) -> [f64; 4] {
    [0, 1, 2, 3].map(|column| shares.iter().map(|row| row[column]).sum::<f64>() / shares.len().max(1) as f64)
}

fn cpu(text: &mut String, cpu: &CpuRecord) -> Written {
    const BORDER: &str = "-------------------------------------------";
    let shares = core_shares(cpu);
    let columns =
        |[busy, user, kernel, idle]: [f64; 4]| format!(" {busy:6.2}%| {user:6.2}%|  {kernel:6.2}%| {idle:6.2}%");
    writeln!(text, "\nCPU |  Usage |  User  |  Kernel |  Idle\n{BORDER}")?;
    for (number, core) in shares.iter().enumerate() {
        writeln!(text, "{number:4}|{}", columns(*core))?;
    }
    writeln!(text, "{BORDER}\navg.|{}", columns(mean_shares(&shares)))
}

#[derive(Clone, Copy)]
enum Section {
    Both,
    Reads,
    Writes,
}

impl Section {
    fn of(self, total: &Total) -> &DirectionRecord {
        match self {
            Self::Both => &total.both,
            Self::Reads => &total.reads,
            Self::Writes => &total.writes,
        }
    }

    fn std_dev(self, of: IopsStdDev) -> f64 {
        match self {
            Self::Both => of.both,
            Self::Reads => of.reads,
            Self::Writes => of.writes,
        }
    }

    fn ios(self, point: &SeriesPoint) -> u64 {
        match self {
            Self::Both => point.read_ios + point.write_ios,
            Self::Reads => point.read_ios,
            Self::Writes => point.write_ios,
        }
    }
}

fn table(text: &mut String, section: Section, span: &TimeSpan, phase: &PhaseRecord, run: &Run) -> Written {
    let (latency, scatter) = (span.measure_latency, span.iops_every_ms.is_some());
    let when = |wanted: bool, part: &'static str| if wanted { part } else { "" };
    writeln!(
        text,
        "thread |       bytes     |     I/Os     |    MiB/s   |  I/O per s {}{}{}|  file",
        when(latency, "|  AvgLat  "),
        when(scatter, "| IopsStdDev "),
        when(latency, "| LatStdDev ")
    )?;
    let border = format!(
        "{}{}{}{}{}",
        "-".repeat(66),
        when(latency, "-----------"),
        when(scatter, "-------------"),
        when(latency, "------------"),
        "-".repeat(12)
    );
    writeln!(text, "{border}")?;
    let row = |text: &mut String, direction: &DirectionRecord, deviation: Option<f64>| -> Written {
        let seconds = phase.window_s().max(1e-9);
        let (bytes, ios) = (direction.bytes, direction.ios);
        let mib = bytes as f64 / 1_048_576.0 / seconds;
        write!(text, " {bytes:15} | {ios:12} | {mib:10.2} | {:10.2}", ios as f64 / seconds)?;
        if latency {
            write!(text, " | {:8.3}", direction.service.mean_ns() / 1e6)?;
        }
        match deviation {
            Some(deviation) if scatter => write!(text, " | {deviation:10.2}")?,
            None if scatter => write!(text, " | {:>10}", "N/A")?,
            _ => {}
        }
        match (latency, direction.service.count) {
            (false, _) => Ok(()),
            (true, 0) => write!(text, " |       N/A"),
            (true, _) => write!(text, " |  {:8.3}", direction.service.std_dev_ns() / 1e6),
        }
    };
    let place = |thread: &ThreadRecord| {
        let target = run.targets.get(thread.target as usize);
        target.map_or_else(String::new, |target| format!("{} ({})", target.name, file_size(target.size_bytes)))
    };
    for thread in &phase.threads {
        write!(text, "{:6} |", thread.thread)?;
        row(text, section.of(&Total::of([thread])), thread.iops_std_dev.map(|std_dev| section.std_dev(std_dev)))?;
        writeln!(text, " | {}", place(thread))?;
    }
    write!(text, "{border}\ntotal:  ")?;
    row(text, section.of(&phase.total()), Some(iops_deviation(phase, |point| section.ios(point))))?;
    writeln!(text)
}

/// Standard deviation of the IOPS of the whole intervals inside the measured window.
fn iops_deviation(phase: &PhaseRecord, ios: impl Fn(&SeriesPoint) -> u64) -> f64 {
    let seconds = (phase.interval_ns as f64 / 1e9).max(1e-9);
    let rates: Vec<f64> = in_window(phase).map(|point| ios(point) as f64 / seconds).collect();
    let mean = rates.iter().sum::<f64>() / rates.len().max(1) as f64;
    (rates.iter().map(|rate| (rate - mean).powi(2)).sum::<f64>() / rates.len().max(1) as f64).sqrt()
}

/// The intervals that are wholly inside the measured window.
pub(super) fn in_window(phase: &PhaseRecord) -> impl Iterator<Item = &SeriesPoint> {
    let end = phase.window_start_ns.saturating_add(phase.window_ns);
    phase.series.iter().filter(move |point| {
        point.start_ns >= phase.window_start_ns && point.start_ns.saturating_add(phase.interval_ns) <= end
    })
}

fn file_size(bytes: u64) -> String {
    match bytes {
        size if size > 10 << 30 => format!("{}GiB", size >> 30),
        size if size > 10 << 20 => format!("{}MiB", size >> 20),
        size if size > 10 << 10 => format!("{}KiB", size >> 10),
        size => format!("{size}B"),
    }
}

/// The percentiles of DiskSpd's table, with their names.
const PERCENTILES: [(&str, f64); 13] = [
    ("25th", 0.25),
    ("50th", 0.50),
    ("75th", 0.75),
    ("90th", 0.90),
    ("95th", 0.95),
    ("99th", 0.99),
    ("3-nines", 0.999),
    ("4-nines", 0.9999),
    ("5-nines", 0.99999),
    ("6-nines", 0.999_999),
    ("7-nines", 0.999_999_9),
    ("8-nines", 0.999_999_99),
    ("9-nines", 0.999_999_999),
];

/// A percentile; `None` where fewer than ten requests are above it.
pub(super) fn supported_ns(latency: &LatencyRecord, share: f64) -> Option<u64> {
    // 9.999 instead of 10, because of the rounding of 1 - 0.99.
    let beyond = latency.count as f64 * (1.0 - share);
    latency.quantile_ns(share).filter(|_| beyond >= 9.999)
}

fn percentiles(text: &mut String, total: &Total) -> Written {
    let columns = [&total.reads.service, &total.writes.service, &total.both.service];
    let row = |text: &mut String, name: &str, values: [Option<u64>; 3]| {
        let cells = values.map(|ns| ns.map_or_else(|| "N/A".to_owned(), |ns| format!("{:.3}", ns as f64 / 1e6)));
        writeln!(text, "{name:>7} | {:>10} | {:>10} | {:>10}", cells[0], cells[1], cells[2])
    };
    writeln!(text, "  %-ile |  Read (ms) | Write (ms) | Total (ms)\n----------------------------------------------")?;
    row(text, "min", columns.map(|latency| (latency.count > 0).then_some(latency.min_ns)))?;
    for (name, share) in PERCENTILES {
        let values = columns.map(|latency| supported_ns(latency, share));
        if values.iter().any(Option::is_some) {
            row(text, name, values)?;
        }
    }
    row(text, "max", columns.map(|latency| (latency.count > 0).then_some(latency.max_ns)))
}
