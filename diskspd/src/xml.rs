//! DiskSpd's XML report, with DiskSpd's element names, as VMFleet and other scripts parse it.
//!
//! As in the text report, a percentile is given only where at least ten requests are above it.

use super::{
    profile::{Order, Processor, Profile, ResultForm, Target, Throughput, TimeSpan, WriteContents},
    text::{core_shares, in_window, mean_shares, supported_ns},
};
use diskwright_load::{
    job::Caching,
    record::{DirectionRecord, PhaseRecord, Run, Total},
};
use diskwright_stats::numbers::moment;
use quick_xml::escape::escape;

/// The XML report of a run, with the system and the profile.
pub fn results(profile: &Profile, run: &Run) -> String {
    let mut xml = Xml::default();
    xml.within("Results", |xml| {
        system(xml, run);
        write_profile(xml, profile);
        for (index, span) in profile.time_spans.iter().enumerate() {
            xml.within("TimeSpan", |xml| time_span(xml, span, run.phases.get(index), run));
        }
    });
    xml.text
}

/// The profile as XML; DiskSpd's `-Rp`.
pub fn profile(profile: &Profile) -> String {
    let mut xml = Xml::default();
    write_profile(&mut xml, profile);
    xml.text
}

/// Writes elements, each on an indented line of its own.
#[derive(Default)]
struct Xml {
    text: String,
    depth: usize,
}

impl Xml {
    fn line(&mut self, line: &str) {
        self.text.push_str(&"  ".repeat(self.depth));
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// Writes an element with a value.
    fn value(&mut self, name: &str, value: impl std::fmt::Display) {
        let value = value.to_string();
        self.line(&format!("<{name}>{}</{name}>", escape(value.as_str())));
    }

    /// Writes an element with a time in milliseconds.
    fn ms(&mut self, name: &str, ns: f64) {
        self.value(name, format_args!("{:.3}", ns / 1e6));
    }

    /// Writes an element with children. `open` is its name, and may have attributes.
    fn within(&mut self, open: &str, inside: impl FnOnce(&mut Self)) {
        self.line(&format!("<{open}>"));
        self.depth += 1;
        inside(self);
        self.depth -= 1;
        let name = open.split(' ').next().unwrap_or(open);
        self.line(&format!("</{name}>"));
    }
}

fn system(xml: &mut Xml, run: &Run) {
    xml.within("System", |xml| {
        xml.value("ComputerName", std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim());
        xml.within("Tool", |xml| {
            xml.value("Name", "diskwright");
            xml.value("Version", &run.head.versions.diskwright);
        });
        xml.value("RunTime", moment(&run.head.started_utc));
        xml.within("ProcessorTopology", |xml| {
            xml.line(&format!(
                "<Group Group=\"0\" MaximumProcessors=\"{0}\" ActiveProcessors=\"{0}\"/>",
                run.head.machine.logical_cpus
            ));
        });
    });
}

fn write_profile(xml: &mut Xml, profile: &Profile) {
    xml.within("Profile", |xml| {
        xml.value("Progress", 0);
        xml.value("ResultFormat", if profile.form == ResultForm::Xml { "xml" } else { "text" });
        xml.value("Verbose", profile.verbose);
        xml.within("TimeSpans", |xml| {
            for span in &profile.time_spans {
                xml.within("TimeSpan", |xml| profile_span(xml, span));
            }
        });
    });
}

fn profile_span(xml: &mut Xml, span: &TimeSpan) {
    xml.value("CompletionRoutines", false);
    xml.value("MeasureLatency", span.measure_latency);
    xml.value("CalculateIopsStdDev", span.iops_every_ms.is_some());
    xml.value("DisableAffinity", span.affinity_disabled);
    xml.value("Duration", span.duration_s);
    xml.value("Warmup", span.warm_up_s);
    xml.value("Cooldown", span.cool_down_s);
    xml.value("ThreadCount", span.threads_in_all);
    xml.value("RequestCount", span.requests_in_all);
    xml.value("IoBucketDuration", span.iops_every_ms.unwrap_or(1000));
    xml.value("RandSeed", span.seed);
    if !span.affinity.is_empty() {
        xml.within("Affinity", |xml| {
            for Processor { group, number } in &span.affinity {
                xml.line(&format!("<AffinityGroupAssignment Group=\"{group}\" Processor=\"{number}\"/>"));
            }
        });
    }
    xml.within("Targets", |xml| {
        for target in &span.targets {
            xml.within("Target", |xml| profile_target(xml, target));
        }
    });
}

fn profile_target(xml: &mut Xml, target: &Target) {
    xml.value("Path", &target.path);
    xml.value("BlockSize", target.block_bytes);
    xml.value("BaseFileOffset", target.base_bytes);
    xml.value("SequentialScan", false);
    xml.value("RandomAccess", false);
    xml.value("TemporaryFile", false);
    xml.value("UseLargePages", false);
    if matches!(target.cache, Caching::Direct | Caching::DirectWriteThrough) {
        xml.value("DisableOSCache", true);
    }
    if target.cache.is_durable() {
        xml.value("WriteThrough", true);
    }
    xml.within("WriteBufferContent", |xml| match target.contents {
        WriteContents::Sequential => xml.value("Pattern", "sequential"),
        WriteContents::Zero => xml.value("Pattern", "zero"),
        WriteContents::Random { buffer_bytes } => {
            xml.value("Pattern", "random");
            xml.within("RandomDataSource", |xml| xml.value("SizeInBytes", buffer_bytes));
        }
    });
    xml.value("ParallelAsyncIO", target.parallel);
    if let Some(size) = target.create_bytes {
        xml.value("FileSize", size);
    }
    if target.burst > 0 {
        xml.value("BurstSize", target.burst);
    }
    if target.think_ms > 0 {
        xml.value("ThinkTime", target.think_ms);
    }
    match target.order {
        Order::Random { percent, .. } => {
            xml.value("Random", target.alignment_bytes());
            if percent < 100.0 {
                xml.value("RandomRatio", percent);
            }
        }
        Order::Sequential { interlocked, .. } => {
            xml.value("StrideSize", target.alignment_bytes());
            xml.value("InterlockedSequential", interlocked);
        }
    }
    if !target.spots.is_empty() {
        let absolute = target.spots.iter().any(|spot| spot.length.is_some());
        xml.within("Distribution", |xml| {
            xml.within(if absolute { "Absolute" } else { "Percent" }, |xml| {
                for spot in &target.spots {
                    let length = spot.length.map_or(spot.target_percent, |length| length.0 as f64);
                    xml.line(&format!("<Range IO=\"{}\">{length}</Range>", spot.io_percent));
                }
            });
        });
    }
    xml.value("ThreadStride", target.thread_stride_bytes);
    xml.value("MaxFileSize", target.max_bytes);
    xml.value("RequestCount", target.requests);
    xml.value("WriteRatio", target.write_percent);
    match target.throughput {
        None => xml.value("Throughput", 0),
        Some(Throughput::BytesPerMs(bytes)) => xml.value("Throughput", bytes),
        Some(Throughput::Iops(limit)) => xml.line(&format!("<Throughput unit=\"IOPS\">{limit}</Throughput>")),
    }
    xml.value("ThreadsPerFile", target.threads);
    xml.value("IOPriority", target.priority);
    xml.value("Weight", 1);
}

fn time_span(xml: &mut Xml, span: &TimeSpan, phase: Option<&PhaseRecord>, run: &Run) {
    let Some(phase) = phase.filter(|phase| phase.window_ns > 0) else {
        xml.value("Error", "The test was interrupted before the measurements began. No results are displayed.");
        return;
    };
    let threads = phase.threads.iter().map(|thread| thread.thread).max().map_or(0, |most| most + 1);
    xml.value("TestTimeSeconds", format_args!("{:.2}", phase.window_s()));
    xml.value("ThreadCount", threads);
    xml.value("RequestCount", span.requests_in_all);
    xml.value("ProcCount", run.head.machine.logical_cpus);
    cpu(xml, phase);
    if span.measure_latency {
        latency(xml, &phase.total());
    }
    if span.iops_every_ms.is_some() {
        iops(xml, phase);
    }
    for number in 0..threads {
        xml.within("Thread", |xml| {
            xml.value("Id", number);
            for thread in phase.threads.iter().filter(|thread| thread.thread == number) {
                xml.within("Target", |xml| target(xml, span, &Total::of([thread]), thread.target, run));
            }
        });
    }
}

fn cpu(xml: &mut Xml, phase: &PhaseRecord) {
    let shares = core_shares(&phase.cpu);
    let values = |xml: &mut Xml, shares: [f64; 4]| {
        for (name, share) in ["UsagePercent", "UserPercent", "KernelPercent", "IdlePercent"].into_iter().zip(shares) {
            xml.value(name, format_args!("{share:.2}"));
        }
    };
    xml.within("CpuUtilization", |xml| {
        for (number, core) in shares.iter().enumerate() {
            xml.within("CPU", |xml| {
                xml.value("Group", 0);
                xml.value("Id", number);
                values(xml, *core);
            });
        }
        xml.within("Average", |xml| values(xml, mean_shares(&shares)));
    });
}

/// Reads, writes and both together, each only where it has latencies.
fn sampled(total: &Total) -> impl Iterator<Item = (&'static str, &DirectionRecord)> {
    let all = [("Read", &total.reads), ("Write", &total.writes), ("Total", &total.both)];
    all.into_iter().filter(|(_, direction)| direction.service.count > 0)
}

fn latency(xml: &mut Xml, total: &Total) {
    xml.within("Latency", |xml| {
        for (name, direction) in sampled(total) {
            xml.ms(&format!("Average{name}Milliseconds"), direction.service.mean_ns());
            let deviation = if name == "Total" { "LatencyStdev".to_owned() } else { format!("{name}LatencyStdev") };
            xml.ms(&deviation, direction.service.std_dev_ns());
        }
        let mut bucket = |percentile: &str, ns: &dyn Fn(&DirectionRecord) -> Option<u64>| {
            if sampled(total).all(|(_, direction)| ns(direction).is_none()) {
                return;
            }
            xml.within("Bucket", |xml| {
                xml.value("Percentile", percentile);
                for (name, direction) in sampled(total) {
                    if let Some(ns) = ns(direction) {
                        xml.ms(&format!("{name}Milliseconds"), ns as f64);
                    }
                }
            });
        };
        bucket("0", &|direction| Some(direction.service.min_ns));
        for percent in 1..=99_u32 {
            bucket(&percent.to_string(), &|direction| supported_ns(&direction.service, f64::from(percent) / 100.0));
        }
        for nines in 3..=9_usize {
            let share = 1.0 - 10_f64.powi(-(nines as i32));
            bucket(&format!("99.{}", "9".repeat(nines - 2)), &|direction| supported_ns(&direction.service, share));
        }
        bucket("100", &|direction| Some(direction.service.max_ns));
    });
}

fn iops(xml: &mut Xml, phase: &PhaseRecord) {
    let seconds = (phase.interval_ns as f64 / 1e9).max(1e-9);
    let deviation = |rates: Vec<f64>| {
        let mean = rates.iter().sum::<f64>() / rates.len().max(1) as f64;
        (rates.iter().map(|rate| (rate - mean).powi(2)).sum::<f64>() / rates.len().max(1) as f64).sqrt()
    };
    xml.within("Iops", |xml| {
        let rates: Vec<[f64; 3]> = in_window(phase)
            .map(|point| {
                [point.read_ios, point.write_ios, point.read_ios + point.write_ios].map(|ios| ios as f64 / seconds)
            })
            .collect();
        for (column, name) in ["ReadIopsStdDev", "WriteIopsStdDev", "IopsStdDev"].into_iter().enumerate() {
            xml.value(name, format_args!("{:.3}", deviation(rates.iter().map(|row| row[column]).collect())));
        }
        for (number, [reads, writes, both]) in rates.iter().enumerate() {
            let at = (number as u64 + 1).saturating_mul(phase.interval_ns / 1_000_000);
            xml.line(&format!(
                "<Bucket SampleMillisecond=\"{at}\" Read=\"{reads:.0}\" Write=\"{writes:.0}\" Total=\"{both:.0}\"/>"
            ));
        }
    });
}

fn target(xml: &mut Xml, span: &TimeSpan, total: &Total, target: u32, run: &Run) {
    let record = run.targets.get(target as usize);
    xml.value("Path", record.map_or("", |target| &target.name));
    xml.value("BytesCount", total.both.bytes);
    xml.value("FileSize", record.map_or(0, |target| target.size_bytes));
    xml.value("IOCount", total.both.ios);
    xml.value("ReadBytes", total.reads.bytes);
    xml.value("ReadCount", total.reads.ios);
    xml.value("WriteBytes", total.writes.bytes);
    xml.value("WriteCount", total.writes.ios);
    if span.measure_latency {
        for (name, direction) in sampled(total) {
            let (average, deviation) = match name {
                "Total" => ("AverageLatencyMilliseconds".to_owned(), "LatencyStdev".to_owned()),
                name => (format!("Average{name}LatencyMilliseconds"), format!("{name}LatencyStdev")),
            };
            xml.ms(&average, direction.service.mean_ns());
            xml.ms(&deviation, direction.service.std_dev_ns());
        }
    }
}
