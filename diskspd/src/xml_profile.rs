//! Parses DiskSpd's XML profiles (`-X`) into the same model as the switches.
//!
//! ```text
//!   bytes ─▶ text (UTF-8, or UTF-16 as PowerShell writes it) ─▶ elements (xml_tree.rs) ─▶ Profile
//! ```
//!
//! An unknown or unsupported element is an error. Errors name the line, what was found and what was
//! expected.

use super::{
    profile::{Order, Processor, Profile, ResultForm, Target, Throughput, TimeSpan, WriteContents},
    profile_error::ProfileError,
    xml_tree::{self, Element, wrong},
};
use diskwright_load::job::{Bytes, Caching, QUEUE_DEPTH_MAX, Spot, THREADS_MAX};

type Result<T> = std::result::Result<T, ProfileError>;

const U32: u64 = u32::MAX as u64;
/// Longest time in seconds: a year.
const SECONDS_MAX: u64 = 366 * 24 * 3600;

/// Decodes the bytes of a profile, in UTF-8 or in UTF-16 with a byte order mark.
///
/// # Errors
/// [`ProfileError::Wrong`] for bytes that are not text.
pub fn text_of(bytes: &[u8]) -> Result<String> {
    let utf16 = |bytes: &[u8], unit: fn([u8; 2]) -> u16| {
        let units: Vec<u16> = bytes.chunks_exact(2).map(|pair| unit([pair[0], pair[1]])).collect();
        String::from_utf16(&units).map_err(|_| wrong(1, "a byte order mark that is not followed by UTF-16", "text"))
    };
    match bytes {
        [0xff, 0xfe, rest @ ..] => utf16(rest, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => utf16(rest, u16::from_be_bytes),
        [0xef, 0xbb, 0xbf, rest @ ..] => text_of_utf8(rest),
        all => text_of_utf8(all),
    }
}

fn text_of_utf8(bytes: &[u8]) -> Result<String> {
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        wrong(
            line,
            format!("the byte {:#04x}", bytes[error.valid_up_to()]),
            "text in UTF-8, or in UTF-16 with a byte order mark",
        )
    })
}

/// Parses an XML profile. `command_line` is for the report.
///
/// # Errors
/// [`ProfileError`], which names the line and the element.
pub fn read(text: &str, command_line: &str) -> Result<Profile> {
    let xml = xml_tree::parse(text, "Profile")?;
    let once = [
        "Verbose",
        "VerboseStats",
        "Progress",
        "ExperimentFlags",
        "ResultFormat",
        "ETW",
        "PrecreateFiles",
        "TimeSpans",
    ];
    xml.known(&[], &once, &[])?;
    if let Some(traced) = xml.child("ETW") {
        return refuse(traced, "ETW", "it is for Event Tracing for Windows; use `perf trace` or `blktrace`");
    }
    xml.number_of("Progress", U32)?;
    let form = match xml.child("ResultFormat") {
        None => ResultForm::Text,
        Some(form) => match form.text()? {
            "text" => ResultForm::Text,
            "xml" => ResultForm::Xml,
            other => return Err(form.not(other, "text or xml")),
        },
    };
    let mut notes = Vec::new();
    let spans =
        xml.child("TimeSpans").ok_or_else(|| wrong(xml.line(), "<Profile> without <TimeSpans>", "<TimeSpans>"))?;
    spans.known(&[], &[], &["TimeSpan"])?;
    let time_spans = spans.children("TimeSpan").map(|span| time_span(span, &mut notes)).collect::<Result<Vec<_>>>()?;
    if time_spans.is_empty() {
        return Err(wrong(spans.line(), "<TimeSpans> without <TimeSpan>", "<TimeSpan>"));
    }
    notes.dedup();
    Ok(Profile {
        command_line: command_line.to_owned(),
        verbose: xml.flag_of("Verbose")?,
        form,
        profile_only: false,
        time_spans,
        notes,
    })
}

fn refuse<T>(element: &Element, name: &'static str, why: &'static str) -> Result<T> {
    Err(ProfileError::Refused { line: element.line(), element: name, why })
}

fn time_span(xml: &Element, notes: &mut Vec<String>) -> Result<TimeSpan> {
    xml.known(
        &[],
        &[
            "CompletionRoutines",
            "MeasureLatency",
            "CalculateIopsStdDev",
            "DisableAffinity",
            "GroupAffinity",
            "Affinity",
            "Duration",
            "Warmup",
            "Cooldown",
            "ThreadCount",
            "RequestCount",
            "IoBucketDuration",
            "RandSeed",
            "RandomWriteData",
            "Targets",
        ],
        &[],
    )?;
    let defaults = TimeSpan::default();
    let list = xml.child("Targets").ok_or_else(|| wrong(xml.line(), "<TimeSpan> without <Targets>", "<Targets>"))?;
    list.known(&[], &[], &["Target"])?;
    let targets = list.children("Target").map(|xml| target(xml, notes)).collect::<Result<Vec<_>>>()?;
    if targets.is_empty() {
        return Err(wrong(list.line(), "<Targets> without <Target>", "<Target>"));
    }
    let affinity = xml.child("Affinity").map_or_else(|| Ok(Vec::new()), affinity)?;
    let affinity_disabled = xml.flag_of("DisableAffinity")?;
    if affinity_disabled && !affinity.is_empty() {
        return Err(wrong(xml.line(), "<DisableAffinity> beside <Affinity>", "one of them"));
    }
    xml.flag_of("CompletionRoutines")?;
    let iops_every_ms = xml.number_of("IoBucketDuration", 3_600_000)?.unwrap_or(1000);
    if let (0, Some(bucket)) = (iops_every_ms, xml.child("IoBucketDuration")) {
        return Err(bucket.not("0", "milliseconds, at least 1"));
    }
    Ok(TimeSpan {
        duration_s: xml.number_of("Duration", SECONDS_MAX)?.unwrap_or(defaults.duration_s),
        warm_up_s: xml.number_of("Warmup", SECONDS_MAX)?.unwrap_or(defaults.warm_up_s),
        cool_down_s: xml.number_of("Cooldown", SECONDS_MAX)?.unwrap_or(defaults.cool_down_s),
        measure_latency: xml.flag_of("MeasureLatency")?,
        iops_every_ms: xml.flag_of("CalculateIopsStdDev")?.then_some(iops_every_ms),
        seed: xml.number_of("RandSeed", u64::MAX)?.unwrap_or(defaults.seed),
        threads_in_all: xml.small_of("ThreadCount", THREADS_MAX)?.unwrap_or(0),
        requests_in_all: xml.small_of("RequestCount", QUEUE_DEPTH_MAX)?.unwrap_or(0),
        affinity_disabled,
        affinity,
        random_write_data: xml.flag_of("RandomWriteData")?,
        targets,
    })
}

fn affinity(xml: &Element) -> Result<Vec<Processor>> {
    xml.known(&[], &[], &["AffinityAssignment", "AffinityGroupAssignment"])?;
    let mut processors = Vec::new();
    for assigned in xml.children("AffinityAssignment") {
        processors.push(Processor { group: 0, number: assigned.number(U32)? as u32 });
    }
    for assigned in xml.children("AffinityGroupAssignment") {
        assigned.known(&["Group", "Processor"], &[], &[])?;
        let number = |name| assigned.attribute_number(name, U32).map(|value| value as u32);
        processors.push(Processor { group: number("Group")?, number: number("Processor")? });
    }
    Ok(processors)
}

fn target(xml: &Element, notes: &mut Vec<String>) -> Result<Target> {
    xml.known(
        &[],
        &[
            "Path",
            "BlockSize",
            "BaseFileOffset",
            "SequentialScan",
            "RandomAccess",
            "TemporaryFile",
            "UseLargePages",
            "DisableAllCache",
            "DisableOSCache",
            "DisableLocalCache",
            "WriteThrough",
            "WriteBufferContent",
            "ParallelAsyncIO",
            "MemoryMappedIo",
            "FlushType",
            "FileSize",
            "BurstSize",
            "ThinkTime",
            "Random",
            "RandomRatio",
            "StrideSize",
            "InterlockedSequential",
            "Distribution",
            "ThreadStride",
            "MaxFileSize",
            "RequestCount",
            "WriteRatio",
            "Throughput",
            "ThreadsPerFile",
            "IOPriority",
            "Weight",
            "ThreadTargets",
        ],
        &[],
    )?;
    let path = match xml.child("Path") {
        Some(path) if !path.text()?.is_empty() => path.text()?,
        Some(path) => {
            return Err(wrong(
                path.line(),
                "an empty <Path>",
                "the path of a target, or *1 for the first target of the command line",
            ));
        }
        None => return Err(wrong(xml.line(), "<Target> without <Path>", "<Path>")),
    };
    if path.starts_with('*') && Target::new(path).template().is_none() {
        let element = xml.child("Path").unwrap_or(xml);
        return Err(element.not(path, "a template as in *1, the first target of the command line"));
    }
    for name in ["SequentialScan", "RandomAccess", "TemporaryFile", "UseLargePages"] {
        xml.flag_of(name)?;
    }
    for (name, why) in [
        ("MemoryMappedIo", "files are not memory-mapped; set it to false"),
        ("DisableLocalCache", "Linux cannot disable only the cache of a remote file system; use DisableOSCache"),
    ] {
        if let (true, Some(element)) = (xml.flag_of(name)?, xml.child(name)) {
            return refuse(element, name, why);
        }
    }
    if let Some(shares) = xml.child("ThreadTargets") {
        return refuse(shares, "ThreadTargets", "every thread of <ThreadCount> drives all targets");
    }
    let contents = xml.child("WriteBufferContent").map_or(Ok(WriteContents::Sequential), contents)?;
    let defaults = Target::new(path);
    let write_percent = xml.small_of("WriteRatio", 100)?.unwrap_or(0);
    if write_percent > 0 && contents == WriteContents::Sequential {
        notes.push("incompressible bytes are written instead of DiskSpd's repeated bytes 0 to 255".into());
    }
    let all_cache = xml.flag_of("DisableAllCache")?;
    let direct = xml.flag_of("DisableOSCache")? || all_cache;
    let through = xml.flag_of("WriteThrough")? || all_cache;
    let order = order(xml)?;
    let parallel = xml.flag_of("ParallelAsyncIO")?;
    if let (true, Some(element)) = (parallel, xml.child("ParallelAsyncIO"))
        && !matches!(order, Order::Sequential { interlocked: false, .. })
    {
        return Err(element.not("true", "false, since the target is random or interlocked"));
    }
    Ok(Target {
        block_bytes: xml.number_of("BlockSize", U32)?.unwrap_or(defaults.block_bytes),
        base_bytes: xml.number_of("BaseFileOffset", u64::MAX)?.unwrap_or(0),
        max_bytes: xml.number_of("MaxFileSize", u64::MAX)?.unwrap_or(0),
        create_bytes: xml.number_of("FileSize", u64::MAX)?.filter(|size| *size > 0),
        order,
        parallel,
        spots: xml.child("Distribution").map_or_else(|| Ok(Vec::new()), spots)?,
        write_percent,
        requests: xml.small_of("RequestCount", QUEUE_DEPTH_MAX)?.unwrap_or(defaults.requests),
        threads: xml.small_of("ThreadsPerFile", THREADS_MAX)?.unwrap_or(defaults.threads),
        thread_stride_bytes: xml.number_of("ThreadStride", u64::MAX)?.unwrap_or(0),
        cache: match (direct, through) {
            (false, false) => Caching::Cached,
            (false, true) => Caching::WriteThrough,
            (true, false) => Caching::Direct,
            (true, true) => Caching::DirectWriteThrough,
        },
        contents,
        burst: xml.small_of("BurstSize", u32::MAX)?.unwrap_or(0),
        think_ms: xml.number_of("ThinkTime", U32)?.unwrap_or(0),
        throughput: xml.child("Throughput").map_or(Ok(None), throughput)?,
        priority: xml.small_of("IOPriority", u32::MAX)?.unwrap_or(defaults.priority),
        ..defaults
    })
}

fn order(xml: &Element) -> Result<Order> {
    let align = xml.number_of("Random", u64::MAX)?;
    let percent = xml.number_of("RandomRatio", 100)?;
    let stride = xml.number_of("StrideSize", u64::MAX)?;
    let interlocked = xml.flag_of("InterlockedSequential")?;
    Ok(match (align, percent) {
        (None, None) => Order::Sequential { stride_bytes: stride.filter(|stride| *stride > 0), interlocked },
        (align, percent) => {
            Order::Random { align_bytes: align.filter(|align| *align > 0), percent: percent.unwrap_or(100) as f64 }
        }
    })
}

fn contents(xml: &Element) -> Result<WriteContents> {
    xml.known(&[], &["Pattern", "RandomDataSource"], &[])?;
    let Some(pattern) = xml.child("Pattern") else {
        return Err(wrong(xml.line(), "<WriteBufferContent> without <Pattern>", "<Pattern>"));
    };
    match pattern.text()? {
        "sequential" => Ok(WriteContents::Sequential),
        "zero" => Ok(WriteContents::Zero),
        "random" => {
            let Some(source) = xml.child("RandomDataSource") else {
                return Ok(WriteContents::Random { buffer_bytes: 0 });
            };
            source.known(&[], &["SizeInBytes", "FilePath"], &[])?;
            if let Some(file) = source.child("FilePath") {
                return refuse(file, "FilePath", "write buffers are not read from a file; use SizeInBytes");
            }
            Ok(WriteContents::Random { buffer_bytes: source.number_of("SizeInBytes", u64::MAX)?.unwrap_or(0) })
        }
        other => Err(pattern.not(other, "sequential, zero or random")),
    }
}

fn spots(xml: &Element) -> Result<Vec<Spot>> {
    xml.known(&[], &["Percent", "Absolute"], &[])?;
    let (ranges, absolute) = match (xml.child("Percent"), xml.child("Absolute")) {
        (Some(percent), None) => (percent, false),
        (None, Some(absolute)) => (absolute, true),
        _ => return Err(wrong(xml.line(), "<Distribution>", "either <Percent> or <Absolute> in it")),
    };
    ranges.known(&[], &[], &["Range"])?;
    let spot = |range: &Element| {
        range.known(&["IO"], &[], &[])?;
        let length = range.number(if absolute { u64::MAX } else { 100 })?;
        Ok(Spot {
            io_percent: range.attribute_number("IO", 100)? as f64,
            target_percent: if absolute { 0.0 } else { length as f64 },
            length: absolute.then_some(Bytes(length)),
        })
    };
    ranges.children("Range").map(spot).collect()
}

fn throughput(xml: &Element) -> Result<Option<Throughput>> {
    xml.known(&["unit"], &[], &[])?;
    let limit = xml.number(U32)?;
    match xml.attribute("unit").unwrap_or("BPMS") {
        _ if limit == 0 => Ok(None),
        "IOPS" => Ok(Some(Throughput::Iops(limit))),
        "BPMS" => Ok(Some(Throughput::BytesPerMs(limit))),
        other => Err(wrong(xml.line(), format!("the unit {other:?} of <Throughput>"), "BPMS or IOPS")),
    }
}
