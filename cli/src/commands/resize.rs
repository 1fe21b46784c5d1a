//! `diskwright resize FILE SIZE`: a larger or a smaller disk.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    in_use,
    json::{self, Document},
    sizes::{self, Exact, Human},
    space::Space,
};
use clap::Args;
use diskwright_disk::{NewSize, ResizeOptions, Resized, require_file, resize};
use diskwright_serve::control::{self, Client, Done, Operation};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    cmp::Ordering,
    io::Write,
    path::{Path, PathBuf},
};

/// Arguments of `resize`.
#[derive(Debug, Args)]
#[command(after_help = "\
LARGER: the disk is enlarged in place. The new range reads as zeros, and takes space only where it is written (a fixed disk gets its \
whole length). The second copy of a GPT moves to the new end, so that the guest can use it. Partitions keep their size, but \
--grow-partition N lets the last one reach the new end; the file system inside keeps its size, and the output names the tool that \
enlarges it.

SMALLER: only space behind the last partition goes. A smaller size is refused, and the error names the smallest possible one. The second copy of a GPT moves to \
the new end first. A file system, swap area or physical volume of LVM on a disk without partitions must end before the new end: make it \
smaller first, by its own tools. A disk whose contents are not known, not clean or in doubt keeps its size. A VMDK in several files does not lose its last extent.

A disk that `serve` or `attach` has open is enlarged by that process, in use; it is not made smaller, and its partition table stays as it is. \
A disk that any other program has open is refused, and so is a disk with children. A child may become smaller than its parent, but cannot \
be enlarged after that: the parent's data would become visible.

If the command is interrupted, the disk has its old size or the new one; the same command finishes the rest.

EXAMPLES
  diskwright resize disk.vhdx 80G
  diskwright resize disk.vhdx +20G --grow-partition 2
  diskwright resize disk.vhdx 30G --dry-run
  diskwright resize disk.vhdx --to-minimum")]
pub struct ResizeArgs {
    /// The disk.
    file: PathBuf,
    /// The new virtual size, or with + in front what is added to it.
    #[arg(value_name = "[+]SIZE", value_parser = new_size, required_unless_present_any = ["to_minimum", "grow_partition"])]
    size: Option<NewSize>,
    /// Make the disk as small as it can be without losing anything.
    #[arg(long, conflicts_with_all = ["size", "grow_partition"])]
    to_minimum: bool,
    /// Let partition N, the last one on the disk, reach the disk's end.
    #[arg(long, value_name = "N")]
    grow_partition: Option<u32>,
    /// Check whether it can be done, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Reads `80G` or `+20G`.
///
/// # Errors
/// A sentence for clap.
pub fn new_size(text: &str) -> Result<NewSize, String> {
    match text.strip_prefix('+') {
        Some(added) => sizes::parse(added).map(NewSize::More),
        None => match sizes::parse(text)? {
            0 => Err("a disk has at least one sector".into()),
            bytes => Ok(NewSize::Bytes(bytes)),
        },
    }
}

/// What `resize --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk.
    file: String,
    /// Virtual size before, in bytes.
    old_size: u64,
    /// Virtual size after, in bytes.
    new_size: u64,
    /// Length of its file before, in bytes.
    old_file_size: u64,
    /// Length of its file after, in bytes; `null` if nothing was changed.
    new_file_size: Option<u64>,
    /// With `--dry-run`: the space that it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    space: Option<Space>,
    /// Whether it was only checked what would be done.
    dry_run: bool,
    /// Kind of the partition table that was changed: `MBR` or `GPT`; `null` if none was.
    changed_table: Option<String>,
    /// Why the partition table of a disk that grows was left as it is.
    table_left_because: Option<String>,
    /// The partition that was enlarged.
    enlarged_partition: Option<PartitionReport>,
}

/// A partition that was enlarged.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PartitionReport {
    /// Number of the partition, as Linux counts.
    number: u32,
    /// Size of the partition before, in bytes.
    old_size: u64,
    /// Size of the partition after, in bytes.
    new_size: u64,
    /// The file system, or what else it holds; `null` if nothing known.
    contents: Option<String>,
    /// The tool that enlarges the contents; `null` if none is known.
    tool: Option<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.resize/1";
}

pub fn run(context: &mut Context, args: &ResizeArgs) -> Outcome {
    require_file(&args.file, "resize")?;
    let options = ResizeOptions {
        size: if args.to_minimum { NewSize::Minimum } else { args.size.unwrap_or_default() },
        grow_partition: args.grow_partition,
        open: context.global.open_options(true),
        dry_run: args.dry_run,
    };
    if let Some(client) = in_use::client(&args.file)? {
        if options.size == NewSize::Minimum || options.grow_partition.is_some() {
            return Err(Failure::new(format!(
                "{}: {} has the disk open; a disk in use can only be enlarged, and its partitions stay as they are: end that program first",
                args.file.display(),
                client.peer
            )));
        }
        return enlarge(context, &args.file, &client, options.size, args.dry_run);
    }
    let mut display = context.progress("examining");
    let resized = resize(&args.file, &options, &mut |done, total| display.update(done, total));
    drop(display);
    let report = report(args, &resized.map_err(in_use::explain)?);
    print_report(context, &args.file, report)
}

/// Enlarges a disk in use, for `serve-ctl` too.
pub fn enlarge(context: &mut Context, file: &Path, client: &Client, size: NewSize, dry_run: bool) -> Outcome {
    let size = match size {
        NewSize::Bytes(size) => size,
        NewSize::More(added) => in_use::statistics(client)?.disk.virtual_size.saturating_add(added),
        NewSize::Present | NewSize::Minimum => in_use::statistics(client)?.disk.virtual_size,
    };
    let Done::Resized(control::Resized { old_size, new_size, old_file_size, new_file_size }) =
        in_use::call(client, Operation::Resize { size, dry_run })?
    else {
        return Err(in_use::unexpected(client));
    };
    print_report(context, file, Report::of_size(file, (old_size, new_size), (old_file_size, new_file_size), dry_run))
}

/// Prints what was done.
fn print_report(context: &mut Context, file: &Path, mut report: Report) -> Outcome {
    if report.dry_run {
        report.space = Space::of_growth(file, (report.old_size, report.new_size), &context.global.open_options(false));
    }
    if let Some(reason) = &report.table_left_because {
        context.warn(&format!("{}: the partition table was left as it is: {reason}", report.file));
    }
    if context.global.json {
        context.print_json(&report)?;
    } else if !context.global.quiet {
        writeln!(context.text(), "{}: {}", printable(&report.file), summary(&report))?;
        let would = if report.dry_run { "would be" } else { "was" };
        if let Some(table) = &report.changed_table {
            writeln!(context.text(), "the partition table ({table}) {would} changed for the new size")?;
        }
        if let Some(partition) = &report.enlarged_partition {
            writeln!(context.text(), "{}", partition_line(partition, would))?;
        }
    }
    Ok(exit::OK)
}

fn summary(report: &Report) -> String {
    let (old, new) = (Exact(report.old_size), Exact(report.new_size));
    let space = report.space.as_ref().map_or_else(String::new, |space| format!("; it {space}"));
    match (report.new_size.cmp(&report.old_size), report.new_file_size) {
        (Ordering::Greater, None) => format!("would be enlarged from {old} to {new}{space}; nothing was changed"),
        (Ordering::Less, None) => format!("would be made smaller, from {old} to {new}{space}; nothing was changed"),
        (Ordering::Equal, None) => format!("would keep its size of {old}; nothing was changed"),
        (Ordering::Greater, Some(bytes)) => format!("enlarged from {old} to {new}; its file has {}", Human(bytes)),
        (Ordering::Less, Some(bytes)) => format!("made smaller, from {old} to {new}; its file has {}", Human(bytes)),
        (Ordering::Equal, Some(bytes)) => format!("has {old}; its file has {}", Human(bytes)),
    }
}

fn partition_line(partition: &PartitionReport, would: &str) -> String {
    let PartitionReport { number, old_size, new_size, contents, tool } = partition;
    let name = contents.as_ref().map_or_else(String::new, |contents| format!(" ({contents})"));
    let then = match (contents, tool) {
        (_, Some(tool)) => format!("; what is inside keeps its size: enlarge it with {tool}"),
        (Some(_), None) => "; what is inside keeps its size".to_owned(),
        (None, None) => String::new(),
    };
    format!("partition {number}{name} {would} enlarged from {} to {}{then}", Human(*old_size), Human(*new_size))
}

fn report(args: &ResizeArgs, resized: &Resized) -> Report {
    Report {
        changed_table: resized.table.map(|table| table.to_string()),
        table_left_because: resized.table_left.as_ref().map(ToString::to_string),
        enlarged_partition: resized.enlarged.map(|partition| PartitionReport {
            number: partition.number,
            old_size: partition.old_bytes,
            new_size: partition.new_bytes,
            contents: partition.contents.map(str::to_owned),
            tool: partition.tool.map(str::to_owned),
        }),
        ..Report::of_size(
            &args.file,
            (resized.old_bytes, resized.new_bytes),
            (resized.old_file_bytes, resized.new_file_bytes),
            args.dry_run,
        )
    }
}

impl Report {
    /// A disk whose size has changed from one to the other, and its file; no partition table was
    /// looked at.
    fn of_size(file: &Path, sizes: (u64, u64), file_sizes: (u64, Option<u64>), dry_run: bool) -> Self {
        Self {
            file: json::path(file),
            old_size: sizes.0,
            new_size: sizes.1,
            old_file_size: file_sizes.0,
            new_file_size: file_sizes.1,
            space: None,
            dry_run,
            changed_table: None,
            table_left_because: None,
            enlarged_partition: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_whole_or_added() {
        assert_eq!(new_size("80G"), Ok(NewSize::Bytes(80 << 30)));
        assert_eq!(new_size("+1G"), Ok(NewSize::More(1 << 30)));
        assert!(new_size("-1G").is_err() && new_size("+").is_err() && new_size("0").is_err());
    }
}
