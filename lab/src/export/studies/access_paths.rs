//! The study `access-paths` as CSV: a row is one round of a way at a load.

use super::{Rows, put, put_all};
use crate::{Result, study::access_paths::AccessPathsResult};

/// Appends the rows of a result, behind the names of the columns if `head`.
///
/// # Errors
/// What the CSV writer says.
pub(super) fn rows(rows: &mut Rows, name: &str, result: &AccessPathsResult, head: bool) -> Result<()> {
    if head {
        let heads = [
            "result",
            "started_utc",
            "load",
            "clients",
            "outstanding",
            "way",
            "round",
            "window_s",
            "ios",
            "iops",
            "mb_per_s",
            "mean_ns",
            "p50_ns",
            "p99_ns",
            "client_cpu_ns_per_io",
            "server_cpu_ns_per_io",
            "machine_cpu_ns_per_io",
        ];
        put(rows, heads)?;
    }
    for load in &result.loads {
        for cell in &load.cells {
            for (round, measured) in cell.rounds.iter().enumerate() {
                let row = [
                    name.to_owned(),
                    result.started_utc.clone(),
                    load.name.clone(),
                    load.clients.to_string(),
                    load.outstanding.to_string(),
                    cell.way.name().to_owned(),
                    (round + 1).to_string(),
                    (measured.window_ns as f64 / 1e9).to_string(),
                    measured.ios.to_string(),
                    measured.iops.to_string(),
                    measured.mb_per_s.to_string(),
                    measured.mean_ns.to_string(),
                    measured.p50_ns.to_string(),
                    measured.p99_ns.to_string(),
                    measured.client_cpu_ns.to_string(),
                    measured.server_cpu_ns.map_or_else(String::new, |ns| ns.to_string()),
                    measured.machine_cpu_ns.to_string(),
                ];
                put_all(rows, &row)?;
            }
        }
    }
    Ok(())
}
