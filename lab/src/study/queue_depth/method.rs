//! The method of the study `queue-depth` as one line of a report.

use super::QueueDepthResult;
use diskwright_load::job::Caching;
use diskwright_stats::numbers::duration;

/// Cache mode, threads, rounds and windows.
pub(crate) fn line(result: &QueueDepthResult) -> String {
    let settings = &result.settings;
    let cache = match settings.cache {
        Caching::Cached => "through the page cache",
        Caching::WriteThrough => "through the page cache, writes durable",
        Caching::Direct => "O_DIRECT",
        Caching::DirectWriteThrough => "O_DIRECT, writes durable (the paper's -h)",
    };
    let cells: Vec<u64> = result
        .stages
        .iter()
        .filter_map(|record| Some(record.sweep.options.job.phases.first()?.duration.as_nanos()))
        .collect();
    let windows = match (cells.iter().min(), cells.iter().max()) {
        (Some(min), Some(max)) if min == max => format!(", windows of {}", duration(*min as f64)),
        (Some(min), Some(max)) => format!(", windows of {} to {}", duration(*min as f64), duration(*max as f64)),
        _ => String::new(),
    };
    let each = if settings.is_fleet() { " on each agent" } else { "" };
    format!("{cache}; {} threads{each}; {} rounds{windows}", settings.threads, settings.rounds)
}
