//! `diskwright compare A B`: whether two disks hold the same bytes, whatever their formats.

use crate::{
    context::Context,
    exit::{self, Outcome},
    json,
    options::{FormatArg, ShareArgs},
    sizes::Exact,
    switches,
};
use clap::Args;
use diskwright_disk::{CompareOutcome, OpenOptions};
use serde::Serialize;
use std::{io::Write, path::PathBuf};

/// Arguments of `compare`.
#[derive(Debug, Args)]
#[command(after_help = "\
Disks of different sizes are the same when the longer one ends in zeros; a warning tells the sizes.

EXIT CODES  0 same, 1 different, 2 could not compare

EXAMPLES
  diskwright compare disk.vhdx disk.raw
  diskwright compare --quiet a.vhd b.vhdx && echo same
  diskwright compare disk.vhdx copy.bin --second-format raw
  diskwright compare disk.vhdx nbd://backup.example.com/disk")]
pub struct CompareArgs {
    /// One disk: a file, or an NBD URI.
    #[arg(value_name = "A")]
    first: PathBuf,
    /// The other disk: a file, or an NBD URI.
    #[arg(value_name = "B")]
    second: PathBuf,
    /// Take B as this format; --format then holds for A alone.
    #[arg(long, value_enum, value_name = "FORMAT")]
    second_format: Option<FormatArg>,
    #[command(flatten)]
    share: ShareArgs,
}

#[derive(Debug, Serialize)]
struct Report {
    first: String,
    second: String,
    same: bool,
    first_difference: Option<u64>,
    first_size: u64,
    second_size: u64,
    warnings: Vec<String>,
}

/// Compares.
pub fn run(context: &mut Context, args: &CompareArgs) -> Outcome {
    let options = OpenOptions { force_share: args.share.force_share, ..context.global.bulk_options() };
    let second_format = args.second_format.map(FormatArg::format).or(options.format);
    let first = context.open(&args.first, &options)?;
    let second = context.open(&args.second, &OpenOptions { format: second_format, ..options })?;
    let (first_size, second_size) = (first.device().geometry().size_bytes, second.device().geometry().size_bytes);
    if first_size != second_size {
        context.warn(&format!("the disks differ in size: {} and {}", Exact(first_size), Exact(second_size)));
    }
    let warnings = switches::all_told(&[first.warnings(), second.warnings()].concat());
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
        context.print_json("diskwright.compare/1", report)?;
    } else if !context.global.quiet {
        // The words of qemu-img, for scripts that read them.
        match first_difference {
            None => writeln!(context.out, "Images are identical.")?,
            Some(offset_bytes) => writeln!(context.out, "Content mismatch at offset {offset_bytes}!")?,
        }
    }
    Ok(if first_difference.is_some() { exit::DIFFERENT } else { exit::OK })
}
