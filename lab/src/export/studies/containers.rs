//! The study `containers`: a row is one round of a workload on a target, in one of its experiments.

use crate::export::csv::{Rows, put, put_all};
use crate::{Result, measure::WorkloadResult, result::ContainersResult};

const HEADS: [&str; 21] = [
    "result",
    "started_utc",
    "workload",
    "block_bytes",
    "direction",
    "pattern",
    "queue_depth",
    "target",
    "round",
    "ios",
    "bytes",
    "wall_ns",
    "iops",
    "mb_per_s",
    "mean_ns",
    "p50_ns",
    "p99_ns",
    "max_ns",
    "cpu_ns_per_io",
    "depth_reached",
    "experiment",
];

pub(super) fn rows(rows: &mut Rows, name: &str, result: &ContainersResult, head: bool) -> Result<()> {
    if head {
        put(rows, HEADS)?;
    }
    let main = result.workloads.iter().map(|compared| ("containers", &compared.result));
    let chain = result.chain.iter().flat_map(|chain| &chain.reads).map(|result| ("chain", result));
    let expanding = result.expanding.iter().map(|record| ("expanding", &record.result));
    let blocks = result.block_sizes.iter().flat_map(|record| &record.workloads).map(|result| ("block size", result));
    for (experiment, measured) in main.chain(chain).chain(expanding).chain(blocks) {
        put_rounds(rows, [name, &result.started_utc, experiment], measured)?;
    }
    Ok(())
}

fn put_rounds(
    rows: &mut Rows,
    [name, started_utc, experiment]: [&str; 3],
    WorkloadResult { workload, cells, .. }: &WorkloadResult,
) -> Result<()> {
    for cell in cells {
        for (round, measured) in cell.rounds.iter().enumerate() {
            let row = [
                name.to_owned(),
                started_utc.to_owned(),
                workload.name.clone(),
                workload.block_bytes.to_string(),
                workload.direction(),
                workload.pattern(),
                workload.queue_depth.to_string(),
                cell.target.clone(),
                (round + 1).to_string(),
                measured.ios().to_string(),
                measured.ios().saturating_mul(u64::from(workload.block_bytes)).to_string(),
                measured.window_ns.to_string(),
                measured.iops.to_string(),
                measured.mb_per_s.to_string(),
                measured.mean_ns.to_string(),
                measured.p50_ns.to_string(),
                measured.p99_ns.to_string(),
                measured.max_ns.to_string(),
                measured.cpu_ns_per_io.to_string(),
                measured.depth_reached.to_string(),
                experiment.to_owned(),
            ];
            put_all(rows, &row)?;
        }
    }
    Ok(())
}
