//! Computes warnings from the inspected contents of the targets and from the job.
//!
//! Small shares are normal: a formatted disk has holes, and a database has pages of zeros. So each
//! share has a threshold. Zeros in unallocated space are reported only as unallocated space.

use diskwright_load::{
    job::{Caching, Contents, Job, Load},
    record::ContentsRecord,
    warning::Warning,
};
use std::ops::Range;

/// Below this allocated share, a warning says that reads are answered from metadata.
const ALLOCATED_MIN: f64 = 0.99;
/// Above this share of the sample, zeros and copies give a warning.
const ODD_MAX: f64 = 0.05;

/// The ranges of target number `target` that the loads selected by `which` use, ascending and
/// without overlaps. They end at the target's end; the run itself reports a working set that does
/// not fit.
pub fn working_sets(job: &Job, target: usize, size_bytes: u64, which: impl Fn(&Load) -> bool) -> Vec<Range<u64>> {
    let loads = job.phases.iter().flat_map(|phase| &phase.loads);
    let mut sets: Vec<Range<u64>> = loads
        .filter(|load| (load.targets.is_empty() || load.targets.contains(&target)) && which(load))
        .map(|load| {
            let len_bytes = if load.working_set.0 == 0 { u64::MAX } else { load.working_set.0 };
            let start = load.start.0.min(size_bytes);
            start..load.start.0.saturating_add(len_bytes).min(size_bytes)
        })
        .filter(|set| !set.is_empty())
        .collect();
    sets.sort_by_key(|set| set.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for set in sets {
        match merged.last_mut() {
            Some(last) if set.start <= last.end => last.end = last.end.max(set.end),
            _ => merged.push(set),
        }
    }
    merged
}

/// Warnings about one target.
pub fn of_target(job: &Job, target: usize, name: &str, contents: &ContentsRecord) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let name = || name.to_owned();
    if contents.allocated < ALLOCATED_MIN {
        warnings.push(Warning::Unallocated { target: name(), allocated: contents.allocated });
    }
    let for_it = |load: &&Load| load.targets.is_empty() || load.targets.contains(&target);
    let is_read = job.phases.iter().flat_map(|phase| &phase.loads).filter(for_it).any(Load::reads);
    if is_read {
        if contents.zero > (1.0 - contents.allocated) + ODD_MAX {
            warnings.push(Warning::Zeros { target: name(), zero: contents.zero });
        }
        if contents.repeated > ODD_MAX {
            warnings.push(Warning::Repeated { target: name(), repeated: contents.repeated });
        }
    }
    warnings
}

/// Warnings about the job. `working_set_bytes` is the sum over all targets.
pub fn of_job(job: &Job, working_set_bytes: u64, memory_bytes: u64) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if job.contents == Contents::Zero && job.writes() {
        warnings.push(Warning::ZeroPayload);
    }
    let through_cache = matches!(job.cache, Caching::Cached | Caching::WriteThrough);
    // Durable writes reach the device even through the page cache. Reads do not.
    let is_hidden = job.cache == Caching::Cached || job.phases.iter().flat_map(|phase| &phase.loads).any(Load::reads);
    if through_cache && is_hidden && working_set_bytes > 0 && working_set_bytes < memory_bytes {
        warnings.push(Warning::Memory { working_set_bytes, memory_bytes });
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_load::job::{Bytes, Span};

    fn job(loads: Vec<Load>) -> Job {
        let mut job = Job::simple("test", Load::default(), Span::default(), Span::from_secs(1));
        job.phases[0].loads = loads;
        job
    }

    fn load(start: u64, len: u64) -> Load {
        Load { start: Bytes(start), working_set: Bytes(len), ..Load::default() }
    }

    #[test]
    fn working_sets_are_joined_and_end_where_the_target_does() {
        let job = job(vec![
            load(4 << 20, 2 << 20),
            load(0, 1 << 20),
            load(5 << 20, 2 << 20),
            Load { targets: vec![1], ..load(8 << 20, 0) },
            Load { read_percent: 50.0, ..load(1 << 20, 1 << 20) },
        ]);
        assert_eq!(working_sets(&job, 0, 100 << 20, |_| true), [0..2 << 20, 4 << 20..7 << 20]);
        assert_eq!(working_sets(&job, 1, 100 << 20, |_| true), [0..2 << 20, 4 << 20..7 << 20, 8 << 20..100 << 20]);
        assert_eq!(working_sets(&job, 0, 6 << 20, |_| true), [0..2 << 20, 4 << 20..6 << 20]);
        assert_eq!(working_sets(&job, 0, 100 << 20, Load::writes), [Range { start: 1 << 20, end: 2 << 20 }].to_vec());
        assert_eq!(working_sets(&job, 0, 0, |_| true), Vec::<Range<u64>>::new());
    }

    #[test]
    fn missing_space_zeros_and_copies_are_reported_and_only_once() {
        let reading = job(vec![Load::default()]);
        let writing = job(vec![Load { read_percent: 0.0, ..Load::default() }]);
        let seen =
            |allocated, zero, repeated| ContentsRecord { allocated, zero, repeated, sampled: 256, filled_bytes: 0 };
        let kinds = |job: &Job, contents| of_target(job, 0, "disk", &contents);
        assert_eq!(kinds(&reading, seen(1.0, 0.0, 0.0)), []);
        assert_eq!(kinds(&reading, seen(0.995, 0.03, 0.02)), []);
        assert_eq!(
            kinds(&reading, seen(0.2, 0.81, 0.0)),
            [Warning::Unallocated { target: "disk".into(), allocated: 0.2 }]
        );
        assert_eq!(kinds(&reading, seen(1.0, 0.9, 0.0)), [Warning::Zeros { target: "disk".into(), zero: 0.9 }]);
        assert_eq!(kinds(&reading, seen(1.0, 0.0, 0.5)), [Warning::Repeated { target: "disk".into(), repeated: 0.5 }]);
        // For writes the contents do not matter, but the allocated space does.
        assert_eq!(kinds(&writing, seen(1.0, 0.9, 0.5)), []);
        assert_eq!(kinds(&writing, seen(0.0, 1.0, 0.0)).len(), 1);
    }

    #[test]
    fn zeros_as_payload_and_memory_under_test_are_reported() {
        let mut job = job(vec![Load { read_percent: 0.0, ..Load::default() }]);
        assert_eq!(of_job(&job, 1 << 30, 8 << 30), []);
        job.contents = Contents::Zero;
        assert_eq!(of_job(&job, 1 << 30, 8 << 30), [Warning::ZeroPayload]);
        job.contents = Contents::Incompressible;
        job.cache = Caching::Cached;
        assert_eq!(of_job(&job, 1 << 30, 8 << 30).len(), 1);
        assert_eq!(of_job(&job, 16 << 30, 8 << 30), []);
        job.cache = Caching::WriteThrough;
        assert_eq!(of_job(&job, 1 << 30, 8 << 30), [], "durable writes are not hidden by the cache");
    }
}
