//! `diskwright compare A B`: compares the contents of two disks of any formats.

use crate::{
    context::Context,
    exit::{self, Outcome},
    json::{self, Document},
    options::{FormatArg, OvaArgs, ShareArgs, SnapshotArgs},
    sizes::Exact,
    switches,
};
use clap::Args;
use diskwright_disk::{CompareOutcome, OpenOptions};
use schemars::JsonSchema;
use serde::Serialize;
use std::{io::Write, path::PathBuf};

/// Arguments of `compare`.
#[derive(Debug, Args)]
#[command(after_help = "\
Disks of different sizes are the same if the longer one has only zeros behind the end of the other; a warning names both sizes.

EXIT CODES  0 same, 1 different, 2 could not compare

EXAMPLES
  diskwright compare disk.vhdx disk.raw
  diskwright compare --quiet a.vhd b.vhdx && echo same
  diskwright compare disk.vhdx copy.bin --second-format raw
  diskwright compare vm.qcow2 vm.qcow2 --snapshot before-update
  diskwright compare disk.vhdx nbd://backup.example.com/disk")]
pub struct CompareArgs {
    /// One disk: a file, or an NBD URI.
    #[arg(value_name = "A")]
    first: PathBuf,
    /// The other disk: a file, or an NBD URI.
    #[arg(value_name = "B")]
    second: PathBuf,
    /// Format of B; --format then applies to A alone.
    #[arg(long, value_enum, value_name = "FORMAT")]
    second_format: Option<FormatArg>,
    #[command(flatten)]
    ova: OvaArgs,
    #[command(flatten)]
    of: SnapshotArgs,
    /// The same for B; --snapshot is for A alone.
    #[arg(long, value_name = "ID|NAME")]
    second_snapshot: Option<String>,
    #[command(flatten)]
    share: ShareArgs,
}

/// What `compare --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The first disk.
    first: String,
    /// The second disk.
    second: String,
    /// Whether the contents are the same. Beyond the end of the shorter disk, zeros are the same.
    same: bool,
    /// Offset of the first byte that differs.
    first_difference: Option<u64>,
    /// Size of the first disk in bytes.
    first_size: u64,
    /// Size of the second disk in bytes.
    second_size: u64,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.compare/1";
}

/// Compares, and prints the first difference.
pub fn run(context: &mut Context, args: &CompareArgs) -> Outcome {
    let options = OpenOptions {
        force_share: args.share.force_share,
        ova_disk: args.ova.ova_disk.clone(),
        snapshot: args.of.snapshot.clone(),
        ..context.global.bulk_options()
    };
    let second_format = args.second_format.map(FormatArg::format).or(options.format);
    let first = context.open(&args.first, &options)?;
    let of_second = OpenOptions { format: second_format, snapshot: args.second_snapshot.clone(), ..options };
    let second = context.open(&args.second, &of_second)?;
    let (first_size, second_size) = (first.device().geometry().size_bytes, second.device().geometry().size_bytes);
    if first_size != second_size {
        context.warn(&format!("the disks differ in size: {} and {}", Exact(first_size), Exact(second_size)));
    }
    let warnings = switches::all_with_switches(&[first.warnings(), second.warnings()].concat());
    let mut progress = context.progress("comparing");
    let sides = [(first.device(), args.first.as_path()), (second.device(), args.second.as_path())];
    let found =
        diskwright_disk::compare(sides, context.global.engine(), &mut |done, total| progress.update(done, total))?;
    drop(progress);
    let first_difference = match found {
        CompareOutcome::Same => None,
        CompareOutcome::Different { offset_bytes } => Some(offset_bytes),
    };
    if context.global.json {
        let (first, second) = (json::path(&args.first), json::path(&args.second));
        let same = first_difference.is_none();
        let report = Report { first, second, same, first_difference, first_size, second_size, warnings };
        context.print_json(&report)?;
    } else if !context.global.quiet {
        // The words of qemu-img, for scripts that read them.
        match first_difference {
            None => writeln!(context.out, "Images are identical.")?,
            Some(offset_bytes) => writeln!(context.out, "Content mismatch at offset {offset_bytes}!")?,
        }
    }
    Ok(if first_difference.is_some() { exit::DIFFERENT } else { exit::OK })
}
