//! Checks the numbers of a record that was read from a file or came from another machine, before
//! they are added up or used as indices.

use super::{IntervalRecord, LatencyRecord, PhaseRecord, Run, SideRecord};

/// Sums of any real run stay far below this.
pub const SUM_MAX: u64 = 1 << 62;

/// Checks a run.
///
/// # Errors
/// The first contradiction.
pub fn check_run(run: &Run) -> Result<(), String> {
    let mut left = SUM_MAX;
    run.phases.iter().try_for_each(|phase| check_phase(phase, run.targets.len(), &mut left))
}

/// Takes a value from what sums may still reach.
fn take(left: &mut u64, value: u64) -> Option<()> {
    *left = left.checked_sub(value)?;
    Some(())
}

/// Checks a phase on this number of targets. Its counts and its times are taken from `left`, so
/// that sums over several phases cannot overflow.
///
/// # Errors
/// The first contradiction.
pub fn check_phase(phase: &PhaseRecord, targets: usize, left: &mut u64) -> Result<(), String> {
    let place = |what: &str| format!("phase \"{}\": {what}", phase.name);
    if phase.threads.iter().any(|thread| thread.target as usize >= targets) {
        return Err(place("a thread refers to a target that does not exist"));
    }
    let counts_too_large = || place("the sum of its counts is too large");
    for thread in &phase.threads {
        take(left, thread.overdue).ok_or_else(counts_too_large)?;
        for direction in [&thread.reads, &thread.writes, &thread.flushes] {
            let counts = [direction.ios, direction.bytes, direction.errors];
            counts.into_iter().try_for_each(|count| take(left, count)).ok_or_else(counts_too_large)?;
            for latencies in std::iter::once(&direction.service).chain(&direction.response) {
                check_latencies(latencies).map_err(&place)?;
                take(left, latencies.count).ok_or_else(counts_too_large)?;
            }
        }
    }
    let cores = phase
        .cpu
        .cores
        .iter()
        .flat_map(|core| [core.user_ns, core.system_ns, core.irq_ns, core.iowait_ns, core.idle_ns, core.stolen_ns]);
    let process = [phase.cpu.process_user_ns, phase.cpu.process_system_ns, phase.window_ns, phase.window_start_ns];
    let times = cores.chain(process).try_for_each(|time| take(left, time));
    times.ok_or_else(|| place("the sum of its times is too large"))?;
    for member in &phase.members {
        let counts = [member.reads, member.writes, member.read_bytes, member.written_bytes, member.syncs];
        counts.into_iter().try_for_each(|count| take(left, count)).ok_or_else(counts_too_large)?;
    }
    for point in &phase.series {
        let values = [point.start_ns, point.read_ios, point.write_ios, point.read_bytes, point.write_bytes];
        let mut left = SUM_MAX;
        let fits = values.into_iter().try_for_each(|value| take(&mut left, value));
        fits.ok_or_else(|| place("the values of its time series are too large"))?;
    }
    Ok(())
}

/// Checks an interval; its counts are taken from `left`.
///
/// # Errors
/// The first contradiction.
pub fn check_interval(interval: &IntervalRecord, left: &mut u64) -> Result<(), String> {
    interval.start_ns.checked_add(interval.len_ns).ok_or("an interval ends after the end of time")?;
    for SideRecord { ios, bytes, latency } in [&interval.reads, &interval.writes] {
        check_latencies(latency)?;
        let fits = [*ios, *bytes, latency.count].into_iter().try_for_each(|count| take(left, count));
        fits.ok_or("the sum of the counts of its intervals is too large")?;
    }
    Ok(())
}

fn check_latencies(latencies: &LatencyRecord) -> Result<(), &'static str> {
    let mut sum = 0_u64;
    for (_, count) in &latencies.buckets {
        sum = sum.checked_add(*count).ok_or("the sum of a histogram's counts is too large")?;
    }
    if !latencies.buckets.is_empty() && sum != latencies.count {
        return Err("a histogram's counts differ from its number of requests");
    }
    if latencies.buckets.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
        return Err("a histogram's buckets are not in ascending order");
    }
    Ok(())
}
