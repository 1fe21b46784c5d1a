//! Converts a DiskSpd profile into a job: one phase for each time span, one load for each target.

use super::profile::{Order, Profile, Target, Throughput, TimeSpan, WriteContents};
use diskwright_load::job::{
    Blocks, Burst, Bytes, Contents, Distribution, IoEngine, Job, JobError, Load, Phase, Rate, Span,
};

/// Returns the job, and the paths of its targets in the order of their numbers.
///
/// # Errors
/// A profile that a job cannot represent. The message names the switch where there is one.
pub fn job(profile: &Profile) -> Result<(Job, Vec<String>), JobError> {
    let wrong =
        |place: &str, what: &str, hint: &str| JobError { place: place.into(), what: what.into(), hint: hint.into() };
    let mut paths: Vec<String> = Vec::new();
    for target in profile.time_spans.iter().flat_map(|span| &span.targets) {
        if !paths.contains(&target.path) {
            paths.push(target.path.clone());
        }
    }
    let (Some(first_span), Some(first)) =
        (profile.time_spans.first(), profile.time_spans.iter().flat_map(|span| &span.targets).next())
    else {
        return Err(wrong("profile", "there is no time span or no target", "add a time span with a target"));
    };
    let all = || profile.time_spans.iter().flat_map(|span| &span.targets);
    if all().any(|target| target.cache != first.cache) {
        return Err(wrong("cache modes", "the targets have different modes", "give all targets the same mode"));
    }
    let writing: Vec<&Target> = all().filter(|target| target.write_percent > 0).collect();
    let zeros = |target: &&Target| target.contents == WriteContents::Zero;
    if writing.iter().any(zeros) && !writing.iter().all(zeros) {
        return Err(wrong(
            "write buffers",
            "zeros are written to some targets and not to others",
            "give all targets the same write buffer",
        ));
    }
    if let Some(number) = all().find_map(Target::template) {
        return Err(wrong(
            &format!("the profile's target *{number}"),
            "it is a template, and no target of the command line replaces it",
            "name the targets after the switches",
        ));
    }
    let phases = profile
        .time_spans
        .iter()
        .enumerate()
        .map(|(index, span)| phase(index, span, &paths))
        .collect::<Result<_, _>>()?;
    let job = Job {
        name: "diskspd".into(),
        description: profile.command_line.clone(),
        engine: IoEngine::Auto,
        cache: first.cache,
        seed: first_span.seed,
        interval: Span::from_millis(first_span.iops_every_ms.unwrap_or(1000)),
        contents: if writing.first().is_some_and(zeros) { Contents::Zero } else { Contents::Incompressible },
        phases,
    };
    job.validate()?;
    Ok((job, paths))
}

fn phase(index: usize, span: &TimeSpan, paths: &[String]) -> Result<Phase, JobError> {
    let mut loads: Vec<Load> = if span.threads_in_all > 0 {
        vec![across(span, paths)?]
    } else {
        span.targets.iter().map(|target| load(target, paths)).collect::<Result<_, _>>()?
    };
    if !span.affinity_disabled {
        let cpus = cpus(span)?;
        loads.iter_mut().for_each(|load| load.cpus = Some(cpus.clone()));
    }
    Ok(Phase {
        name: format!("timespan {}", index + 1),
        warm_up: Span::from_secs(span.warm_up_s),
        duration: Span::from_secs(span.duration_s),
        count: None,
        cool_down: Span::from_secs(span.cool_down_s),
        steady_within: None,
        loads,
    })
}

/// `-a`: the processors to which threads are bound, round-robin; empty: all processors.
fn cpus(span: &TimeSpan) -> Result<Vec<u32>, JobError> {
    match span.affinity.iter().find(|processor| processor.group > 0) {
        None => Ok(span.affinity.iter().map(|processor| processor.number).collect()),
        Some(processor) => Err(JobError {
            place: format!("-a, processor {processor} (group/core)"),
            what: "there is no such group: Linux has one group of processors, number 0".into(),
            hint: "give the processor's number in group 0, as in -a64".into(),
        }),
    }
}

/// `-F`: every thread drives all targets, which must differ only in their path.
fn across(span: &TimeSpan, paths: &[String]) -> Result<Load, JobError> {
    let wrong = |what: &str, hint: &str| JobError { place: "-F".into(), what: what.into(), hint: hint.into() };
    let Some(first) = span.targets.first() else {
        return Err(wrong("the time span has no target", "add a target"));
    };
    let like_first = |target: &Target| Target { path: first.path.clone(), ..target.clone() } == *first;
    if !span.targets.iter().all(like_first) {
        return Err(wrong(
            "the targets of one thread differ in more than their path",
            "use threads for each target (-t)",
        ));
    }
    let targets = span.targets.len() as u32;
    let depth = match span.requests_in_all {
        0 => first.requests,
        all if all % targets == 0 => all / targets,
        _ => {
            return Err(wrong(
                "the requests of a thread (-O) are not a multiple of its number of targets",
                "give a multiple",
            ));
        }
    };
    let mut load = load(first, paths)?;
    load.threads = span.threads_in_all;
    load.across_targets = true;
    load.queue_depth = depth;
    load.targets =
        span.targets.iter().filter_map(|target| paths.iter().position(|path| *path == target.path)).collect();
    Ok(load)
}

fn load(target: &Target, paths: &[String]) -> Result<Load, JobError> {
    let working_set = match target.max_bytes {
        0 => 0,
        end if end > target.base_bytes => end - target.base_bytes,
        _ => {
            return Err(JobError {
                place: format!("{}, -B and -f", target.path),
                what: "the working set ends before it starts".into(),
                hint: "give a larger -f".into(),
            });
        }
    };
    let mut load = Load {
        block: Blocks::One(Bytes(target.block_bytes)),
        read_percent: 100.0 - f64::from(target.write_percent),
        threads: target.threads,
        queue_depth: target.requests,
        start: Bytes(target.base_bytes),
        thread_start: Bytes(target.thread_stride_bytes),
        working_set: Bytes(working_set),
        targets: paths.iter().position(|path| *path == target.path).into_iter().collect(),
        ..Load::default()
    };
    match target.order {
        Order::Sequential { stride_bytes, interlocked } => {
            load.random_percent = 0.0;
            load.stride = stride_bytes.map(Bytes);
            load.interlocked = interlocked;
            load.parallel = target.parallel;
        }
        Order::Random { align_bytes, percent } => {
            load.random_percent = percent;
            load.align = align_bytes.map(Bytes);
        }
    }
    if !target.spots.is_empty() {
        load.distribution = Distribution::Spots { spots: target.spots.clone() };
    }
    let pause = Span::from_millis(target.think_ms);
    match target.burst {
        0 => load.think_time = pause,
        requests => load.burst = Some(Burst { requests, pause }),
    }
    load.rate = target.throughput.map(|limit| match limit {
        Throughput::Iops(each_second) => Rate::Iops { per_thread: each_second as f64 },
        Throughput::BytesPerMs(bytes) => Rate::Throughput { per_thread: Bytes(bytes.saturating_mul(1000)) },
    });
    Ok(load)
}
