//! How the study `queue-depth` measured, in words.

use super::QueueDepthResult;
use diskwright_load::job::Caching;
use diskwright_stats::numbers::duration;

/// Cache mode, rounds and cells.
pub(crate) fn how(result: &QueueDepthResult) -> String {
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
        (Some(least), Some(most)) if least == most => format!(", windows of {}", duration(*least as f64)),
        (Some(least), Some(most)) => format!(", windows of {} to {}", duration(*least as f64), duration(*most as f64)),
        _ => String::new(),
    };
    format!("{cache}; {} threads; {} rounds{windows}", settings.threads, settings.rounds)
}
