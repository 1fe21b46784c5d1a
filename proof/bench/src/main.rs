//! `diskwright-bench`: whether the figures that Diskwright promises hold on this machine, side by
//! side with other programs.
//!
//! Each row is one promise ([`rows`]). The lab carries the rows out and judges them
//! (`diskwright_lab::acceptance`); this program has the rows about disks and servers, and takes
//! those about the load generator from the lab (`diskwright_lab::selftest`).
//!
//! ```text
//!   rows.rs        the table of all rows
//!   populated.rs   populated disks against the raw file; the same from the page cache
//!   same_blocks.rs a disk's own blocks as a raw file
//!   chains.rs      a chain of 1,024 against a chain of one; opening it; diff of a chain of 100
//!   check.rs       checking a large disk with all its blocks
//!   clones.rs      a thousand clones in one process
//!   large.rs       64 TiB: opening, and memory of the map; creating 40 GiB
//!   expand.rs      enlarging disks of each format and type
//!   discard.rs     reads during a discard of 1 TiB
//!   allocate.rs    unallocated blocks against qemu-io; random writes into an empty disk
//!   compact.rs     compacting disks with real file systems
//!   convert.rs     against qemu-img, and with reflinks on XFS (xfs.rs)
//!   vmdk.rs        the same to and from VMDK; race.rs: two programs in turns
//!   sesparse.rs    reading a chain with a redo log of ESXi
//!   merge.rs       merging against cp, and with reflinks on XFS
//!   rescue.rs      a disk of whose block table a third is destroyed
//!   space/         pools of members against the raw file and btrfs; opening them
//!   serve/         disks served by NBD, or attached, against other servers
//!   fio.rs         fio as a client of servers
//!   ours.rs        the program under test as a child
//!   turns.rs       rounds in which the subjects take turns
//!   tracking.rs    writes to a disk whose changes are tracked
//!   touch.rs       reading a disk everywhere, in a child
//! ```
//!
//! The program under test is this program itself, started again with the hidden word
//! [`ours::PROGRAM`]: it contains diskwright's whole command line, so what is measured is always
//! the code that was built with the bench.

#![forbid(unsafe_code)]

mod allocate;
mod chains;
mod check;
mod clones;
mod compact;
mod convert;
mod discard;
mod expand;
mod fio;
mod fleet;
mod large;
mod merge;
mod object;
mod ours;
mod populated;
mod race;
mod rbd;
mod rescue;
mod rows;
mod same_blocks;
mod serve;
mod sesparse;
mod space;
mod touch;
mod tracking;
mod turns;
mod vmdk;
mod xfs;

use clap::{
    Parser,
    builder::{PossibleValue, PossibleValuesParser, TypedValueParser},
};
use diskwright_cli::{Codes, EngineArg, ExperimentArgs, GlobalOptions, acceptance, conduct};
use diskwright_lab::acceptance::Row;
use std::{env, process::ExitCode};

/// Measure whether Diskwright keeps its promises on this machine, against other programs.
#[derive(Debug, Parser)]
#[command(
    name = "diskwright-bench",
    version,
    max_term_width = 120,
    mut_arg("quick", |arg| arg.help("Smaller disks and shorter cells: a look, not a proof")),
    mut_arg("rounds", |arg| arg.help("How often each comparison is made. [default: each row's own]")),
    mut_arg("cell", |arg| arg.help(
        "Seconds of a cell, where a row has cells. [default: each row's own: 0.25 to 3; 0.1 to 1 with --quick]"
    )),
    after_help = "\
Every promise is a row; without a ROW all are measured. A row whose peer (qemu-img, qemu-io, qemu-nbd, nbdkit, fio, mkfs.xfs and others) is not installed \
is skipped by name, and never counted as kept. Use a release build on a machine that does nothing else. `diskwright lab report` reads what --output saves.

EXIT CODES  0 no promise was broken, 1 one was, 2 used wrongly, 130 stopped by a signal

EXAMPLES
  cargo run --release -p diskwright-bench -- --quick
  cargo run --release -p diskwright-bench -- workloads page-cache --dir /mnt/nvme
  cargo run --release -p diskwright-bench -- nbd-io nbd-vhd attach --quick
  cargo run --release -p diskwright-bench -- convert --rounds 7 --output convert.json"
)]
struct Args {
    /// Which promises to measure. [default: all]
    #[arg(value_name = "ROW", value_parser = row_by_name())]
    rows: Vec<Row>,
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Print one JSON document, with a `schema` field, on standard output.
    #[arg(long)]
    json: bool,
    /// Show no progress and no warnings.
    #[arg(long, short)]
    quiet: bool,
    /// How our side submits I/O; auto is io_uring where the kernel has it.
    #[arg(long, value_enum, value_name = "ENGINE", default_value_t = EngineArg::Auto)]
    io_engine: EngineArg,
}

fn row_by_name() -> impl TypedValueParser<Value = Row> {
    let names = rows::all().into_iter().map(|row| PossibleValue::new(row.name).help(row.title));
    PossibleValuesParser::new(names).try_map(|name| rows::by_name(&name).ok_or("there is no such row"))
}

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args_os().collect();
    match arguments.get(1).and_then(|word| word.to_str()) {
        Some(ours::PROGRAM) => diskwright_cli::run(arguments.into_iter().skip(1)),
        Some(clones::CHILD) => clones::child(&arguments[2..]),
        Some(space::CHILD) => space::child(&arguments[2..]),
        Some(touch::CHILD) => touch::child(&arguments[2..]),
        _ => bench(Args::parse_from(arguments)),
    }
}

fn bench(args: Args) -> ExitCode {
    let Args { rows, experiment, json, quiet, io_engine } = args;
    let rows = if rows.is_empty() { rows::all() } else { rows };
    let global = GlobalOptions { json, quiet, io_engine, ..GlobalOptions::default() };
    conduct(global, Codes::USUAL, |context| {
        let launcher = ours::launcher()?;
        acceptance(context, "Bench", &rows, &experiment, launcher)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
        let args = Args::try_parse_from(["diskwright-bench", "null", "open-large", "--quick"]).unwrap();
        assert_eq!(args.rows.iter().map(|row| row.name).collect::<Vec<_>>(), ["null", "open-large"]);
        assert!(Args::try_parse_from(["diskwright-bench", "nonsense"]).is_err());
        assert!(Args::try_parse_from(["diskwright-bench", "--rounds", "0"]).is_err());
    }
}
