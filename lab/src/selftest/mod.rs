//! Measures the cost and the accuracy of the load generator itself.
//!
//! The rows of `lab selftest`. `diskwright-bench` carries them out too.
//!
//! ```text
//!   generator.rs   IOPS and CPU time compared to fio, recording, null:, memory; agreement
//!   fio.rs         runs fio on a file or a device, and parses its output
//! ```

pub mod fio;
mod generator;

use crate::acceptance::Row;

/// The rows of `lab selftest`.
pub const ROWS: [Row; 5] = [
    Row {
        name: "generator",
        title: "compared to fio's io_uring engine, 4K random read from the page cache, QD 32, one core: 1.6 times the IOPS of fio's defaults, 1.3 times with registered files and buffers and batching in both",
        measure: generator::page_cache,
    },
    Row {
        name: "generator-cpu",
        title: "compared to fio's io_uring engine, 4K random read with O_DIRECT: at most 0.8 of the CPU time per I/O of fio's defaults, 0.9 with registered files and buffers and batching in both",
        measure: generator::direct,
    },
    Row {
        name: "recording",
        title: "recording every latency costs at most 5 % of CPU time per I/O",
        measure: generator::recording,
    },
    Row {
        name: "null",
        title: "the load generator on null: 10 million requests per second on one core",
        measure: generator::null,
    },
    Row {
        name: "memory",
        title: "memory of a run with eight nines, of any length: below 64 MiB per thread",
        measure: generator::memory,
    },
];

/// Whether the load generator and fio measure the same. It takes some minutes, so `lab selftest`
/// runs it only with `--full`.
pub const AGREEMENT: Row = Row {
    name: "agreement",
    title: "ten workloads on a raw file: IOPS and mean latency significantly within 5 % of fio's",
    measure: generator::agreement,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        acceptance::{self, AcceptanceOptions, Outcome},
        progress::Silent,
    };

    #[test]
    fn a_row_that_needs_a_fresh_process_is_skipped_by_name_without_one() {
        let home = tempfile::tempdir().unwrap();
        let options =
            AcceptanceOptions { quick: true, dir: Some(home.path().to_owned()), ..AcceptanceOptions::default() };
        let memory = ROWS.into_iter().find(|row| row.name == "memory").unwrap();
        let record = acceptance::run("Self-test", &[memory], &options, &mut Silent).unwrap();
        assert_eq!(record.rows[0].outcome, Outcome::Skipped);
        assert!(record.passed());
        let why = record.rows[0].checks[0].why.as_deref().unwrap_or_default();
        assert!(why.contains("start a fresh process"), "{why}");
    }
}
