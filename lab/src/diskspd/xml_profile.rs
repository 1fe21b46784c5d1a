//! DiskSpd's XML profiles (`-X`): read into the same model as the switches. An element that is not known, or that asks for what cannot be had
//! here, is an error that names it.

use super::profile::{Order, Profile, ResultForm, Target, Throughput, TimeSpan, WriteContents};
use crate::job::{Bytes, Caching, Spot};
use serde::Deserialize;

/// What is wrong with a profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Not XML, or an element that DiskSpd's profiles do not have, or a bad value.
    #[error("the XML profile cannot be read: {0}")]
    Xml(#[from] quick_xml::DeError),
    /// An element that cannot be had here.
    #[error("the XML profile has <{element}>, which cannot be had here: {why}")]
    Refused {
        /// Its name.
        element: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// Nothing to do.
    #[error("the XML profile has no {0}; it needs a <TimeSpan> with a <Target> that has a <Path>")]
    Missing(&'static str),
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields)]
struct XmlProfile {
    #[serde(default)]
    verbose: bool,
    #[serde(default)]
    result_format: Option<String>,
    time_spans: XmlTimeSpans,
    // Told nowhere here.
    #[serde(default, rename = "Progress")]
    _progress: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct XmlTimeSpans {
    #[serde(default, rename = "TimeSpan")]
    spans: Vec<XmlTimeSpan>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields, default)]
struct XmlTimeSpan {
    measure_latency: bool,
    calculate_iops_std_dev: bool,
    disable_affinity: bool,
    duration: u64,
    warmup: u64,
    cooldown: u64,
    thread_count: u32,
    request_count: u32,
    io_bucket_duration: u64,
    rand_seed: u64,
    random_write_data: bool,
    targets: XmlTargets,
    #[serde(rename = "CompletionRoutines")]
    _completion_routines: bool,
    #[serde(rename = "Affinity")]
    _affinity: serde::de::IgnoredAny,
}

impl Default for XmlTimeSpan {
    fn default() -> Self {
        Self {
            measure_latency: false,
            calculate_iops_std_dev: false,
            disable_affinity: false,
            duration: 10,
            warmup: 5,
            cooldown: 0,
            thread_count: 0,
            request_count: 0,
            io_bucket_duration: 1000,
            rand_seed: 0,
            random_write_data: false,
            targets: XmlTargets::default(),
            _completion_routines: false,
            _affinity: serde::de::IgnoredAny,
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct XmlTargets {
    #[serde(default, rename = "Target")]
    targets: Vec<XmlTarget>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields, default)]
struct XmlTarget {
    path: String,
    block_size: Option<u64>,
    base_file_offset: u64,
    #[serde(rename = "DisableOSCache")]
    disable_os_cache: bool,
    disable_all_cache: bool,
    disable_local_cache: bool,
    write_through: bool,
    write_buffer_content: Option<XmlContents>,
    #[serde(rename = "ParallelAsyncIO")]
    parallel_async_io: bool,
    memory_mapped_io: bool,
    file_size: Option<u64>,
    burst_size: u32,
    think_time: u64,
    random: Option<u64>,
    random_ratio: Option<f64>,
    stride_size: Option<u64>,
    interlocked_sequential: bool,
    distribution: Option<XmlDistribution>,
    thread_stride: u64,
    max_file_size: u64,
    request_count: Option<u32>,
    write_ratio: u32,
    throughput: Option<XmlThroughput>,
    threads_per_file: Option<u32>,
    #[serde(rename = "IOPriority")]
    io_priority: Option<u32>,
    #[serde(rename = "SequentialScan")]
    _sequential_scan: bool,
    #[serde(rename = "RandomAccess")]
    _random_access: bool,
    #[serde(rename = "TemporaryFile")]
    _temporary_file: bool,
    #[serde(rename = "UseLargePages")]
    _use_large_pages: bool,
    #[serde(rename = "Weight")]
    _weight: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields)]
struct XmlContents {
    pattern: String,
    #[serde(default)]
    random_data_source: Option<XmlSource>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields)]
struct XmlSource {
    size_in_bytes: u64,
    #[serde(default)]
    file_path: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields)]
struct XmlDistribution {
    #[serde(default)]
    percent: Option<XmlRanges>,
    #[serde(default)]
    absolute: Option<XmlRanges>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct XmlRanges {
    #[serde(rename = "Range")]
    ranges: Vec<XmlRange>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct XmlRange {
    #[serde(rename = "@IO")]
    io: u32,
    #[serde(rename = "$text")]
    length: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct XmlThroughput {
    #[serde(default, rename = "@unit")]
    unit: Option<String>,
    #[serde(rename = "$text")]
    value: u64,
}

/// Reads an XML profile. `command_line` is told in the report.
///
/// # Errors
/// [`ProfileError`], which names the element.
pub fn read(text: &str, command_line: &str) -> Result<Profile, ProfileError> {
    let xml: XmlProfile = quick_xml::de::from_str(text)?;
    let mut notes = Vec::new();
    let time_spans =
        xml.time_spans.spans.into_iter().map(|span| time_span(span, &mut notes)).collect::<Result<Vec<_>, _>>()?;
    if time_spans.is_empty() {
        return Err(ProfileError::Missing("<TimeSpan>"));
    }
    notes.dedup();
    Ok(Profile {
        command_line: command_line.to_owned(),
        verbose: xml.verbose,
        form: if xml.result_format.as_deref() == Some("xml") { ResultForm::Xml } else { ResultForm::Text },
        profile_only: false,
        time_spans,
        notes,
    })
}

fn time_span(xml: XmlTimeSpan, notes: &mut Vec<String>) -> Result<TimeSpan, ProfileError> {
    let targets = xml.targets.targets.into_iter().map(|xml| target(xml, notes)).collect::<Result<Vec<_>, _>>()?;
    if targets.is_empty() {
        return Err(ProfileError::Missing("<Target>"));
    }
    Ok(TimeSpan {
        duration_s: xml.duration,
        warm_up_s: xml.warmup,
        cool_down_s: xml.cooldown,
        measure_latency: xml.measure_latency,
        iops_every_ms: xml.calculate_iops_std_dev.then_some(xml.io_bucket_duration),
        seed: xml.rand_seed,
        threads_in_all: xml.thread_count,
        requests_in_all: xml.request_count,
        affinity_disabled: xml.disable_affinity,
        random_write_data: xml.random_write_data,
        targets,
    })
}

fn target(xml: XmlTarget, notes: &mut Vec<String>) -> Result<Target, ProfileError> {
    let refuse = |element, why| Err(ProfileError::Refused { element, why });
    if xml.path.is_empty() {
        return Err(ProfileError::Missing("<Path>"));
    }
    if xml.parallel_async_io {
        return refuse("ParallelAsyncIO", "a thread's requests have an offset each");
    }
    if xml.memory_mapped_io {
        return refuse("MemoryMappedIo", "files are not mapped into memory here");
    }
    if xml.disable_local_cache {
        return refuse("DisableLocalCache", "a remote file system's own cache cannot be told apart here");
    }
    let contents = match &xml.write_buffer_content {
        None => WriteContents::Sequential,
        Some(contents) => match (contents.pattern.as_str(), &contents.random_data_source) {
            ("zero", _) => WriteContents::Zero,
            ("random", Some(source)) if source.file_path.is_some() => {
                return refuse("FilePath", "contents are made, not read from a file");
            }
            ("random", source) => {
                WriteContents::Random { buffer_bytes: source.as_ref().map_or(0, |source| source.size_in_bytes) }
            }
            ("sequential", _) => WriteContents::Sequential,
            _ => return refuse("Pattern", "there are sequential, zero and random"),
        },
    };
    if xml.write_ratio > 0 && contents == WriteContents::Sequential {
        notes.push("incompressible bytes are written in place of DiskSpd's repeating pattern".into());
    }
    if xml.write_ratio > 100 {
        return refuse("WriteRatio", "a percentage is 100 at most");
    }
    let absolute = xml.distribution.as_ref().is_some_and(|distribution| distribution.absolute.is_some());
    let ranges = xml.distribution.and_then(|distribution| distribution.absolute.or(distribution.percent));
    let spot = |range: XmlRange| Spot {
        io_percent: f64::from(range.io),
        target_percent: if absolute { 0.0 } else { range.length as f64 },
        length: absolute.then_some(Bytes(range.length)),
    };
    let order = match xml.random {
        Some(align) => {
            Order::Random { align_bytes: (align > 0).then_some(align), percent: xml.random_ratio.unwrap_or(100.0) }
        }
        None => Order::Sequential {
            stride_bytes: xml.stride_size.filter(|stride| *stride > 0),
            interlocked: xml.interlocked_sequential,
        },
    };
    let direct = xml.disable_os_cache || xml.disable_all_cache;
    let defaults = Target::new(xml.path);
    Ok(Target {
        block_bytes: xml.block_size.unwrap_or(defaults.block_bytes),
        base_bytes: xml.base_file_offset,
        max_bytes: xml.max_file_size,
        create_bytes: xml.file_size.filter(|size| *size > 0),
        order,
        spots: ranges.map_or_else(Vec::new, |ranges| ranges.ranges.into_iter().map(spot).collect()),
        write_percent: xml.write_ratio,
        requests: xml.request_count.unwrap_or(defaults.requests),
        threads: xml.threads_per_file.unwrap_or(defaults.threads),
        thread_stride_bytes: xml.thread_stride,
        cache: match (direct, xml.write_through || xml.disable_all_cache) {
            (false, false) => Caching::Cached,
            (false, true) => Caching::WriteThrough,
            (true, false) => Caching::Direct,
            (true, true) => Caching::DirectWriteThrough,
        },
        contents,
        burst: xml.burst_size,
        think_ms: xml.think_time,
        throughput: xml.throughput.filter(|limit| limit.value > 0).map(|limit| match limit.unit.as_deref() {
            Some("IOPS") => Throughput::Iops(limit.value),
            _ => Throughput::BytesPerMs(limit.value),
        }),
        priority: xml.io_priority.unwrap_or(defaults.priority),
        ..defaults
    })
}
