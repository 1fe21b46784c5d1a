//! `diskwright resize FILE SIZE`: a larger disk.

use crate::{
    commands::serve_ctl,
    context::Context,
    describe::printable,
    exit::{self, Outcome},
    in_use,
    json::{self, Document},
    sizes::{self, Exact, Human},
};
use clap::Args;
use diskwright_disk::{Disk, OpenOptions, Reach, require_file, resize};
use schemars::JsonSchema;
use serde::Serialize;
use std::{io::Write, path::PathBuf};

/// Arguments of `resize`.
#[derive(Debug, Args)]
#[command(after_help = "\
The disk is enlarged in place. The new range reads as zeros, and takes space only where it is written (a fixed disk gets its whole \
length). Partitions and file systems keep their size: enlarge them in the guest, for example by growpart and resize2fs.

A disk that `serve` or `attach` has open is enlarged by that process, in use. A disk that any other program has open is refused, and so is a disk with children: they would keep the old size. Disks cannot be made \
smaller yet.

EXAMPLES
  diskwright resize disk.vhdx 80G
  diskwright resize disk.vhdx +20G
  diskwright resize disk.vhdx 80G --dry-run")]
pub struct ResizeArgs {
    /// The disk.
    file: PathBuf,
    /// The new virtual size, or with + in front what is added to it.
    #[arg(value_name = "[+]SIZE", value_parser = new_size)]
    size: NewSize,
    /// Check whether it can be done, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// A size as it is written on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewSize {
    /// The new size, in bytes.
    Whole(u64),
    /// Bytes to add to the present size.
    Added(u64),
}

/// Reads `80G` or `+20G`.
///
/// # Errors
/// A sentence for clap.
pub fn new_size(text: &str) -> Result<NewSize, String> {
    match text.strip_prefix('+') {
        Some(added) => sizes::parse(added).map(NewSize::Added),
        None => sizes::parse(text).map(NewSize::Whole),
    }
}

/// What `resize --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk.
    pub(crate) file: String,
    /// Virtual size before, in bytes.
    pub(crate) old_size: u64,
    /// Virtual size after, in bytes.
    pub(crate) new_size: u64,
    /// Length of its file before, in bytes.
    pub(crate) old_file_size: u64,
    /// Length of its file after, in bytes; `null` if nothing was changed.
    pub(crate) new_file_size: Option<u64>,
    /// Whether it was only checked what would be done.
    pub(crate) dry_run: bool,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.resize/1";
}

/// Enlarges.
pub fn run(context: &mut Context, args: &ResizeArgs) -> Outcome {
    require_file(&args.file, "resize")?;
    if let Some(client) = in_use::client(&args.file)? {
        return serve_ctl::enlarge(context, &args.file, &client, args.size, args.dry_run);
    }
    let options = context.global.open_options(true);
    let size = match args.size {
        NewSize::Whole(size) => size,
        NewSize::Added(added) => {
            let present =
                Disk::open(&args.file, &OpenOptions { writable: false, reach: Reach::Top, ..options.clone() })
                    .map_err(in_use::explain)?
                    .layers()[0]
                    .image
                    .size_bytes();
            present.saturating_add(added)
        }
    };
    let resized = resize(&args.file, size, &options, args.dry_run).map_err(in_use::explain)?;
    tell(
        context,
        Report {
            file: json::path(&args.file),
            old_size: resized.old_bytes,
            new_size: resized.new_bytes,
            old_file_size: resized.old_file_bytes,
            new_file_size: resized.new_file_bytes,
            dry_run: args.dry_run,
        },
    )
}

/// Prints what was done.
pub(crate) fn tell(context: &mut Context, report: Report) -> Outcome {
    if context.global.json {
        context.print_json(&report)?;
    } else if !context.global.quiet {
        let file = printable(&report.file);
        let (old, new) = (Exact(report.old_size), Exact(report.new_size));
        match report.new_file_size {
            None => writeln!(context.out, "{file}: would be enlarged from {old} to {new}; nothing was changed")?,
            Some(bytes) => {
                writeln!(context.out, "{file}: enlarged from {old} to {new}; its file has {}", Human(bytes))?
            }
        }
    }
    Ok(exit::OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_whole_or_added() {
        assert_eq!(new_size("80G"), Ok(NewSize::Whole(80 << 30)));
        assert_eq!(new_size("+1G"), Ok(NewSize::Added(1 << 30)));
        assert!(new_size("-1G").is_err() && new_size("+").is_err());
    }
}
