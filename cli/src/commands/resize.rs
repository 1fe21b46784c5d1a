//! `diskwright resize FILE SIZE`: a larger disk.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Outcome},
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

A disk that another program has open is refused, and so is a disk with children: they would keep the old size. Disks cannot be made \
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NewSize {
    Whole(u64),
    Added(u64),
}

fn new_size(text: &str) -> Result<NewSize, String> {
    match text.strip_prefix('+') {
        Some(added) => sizes::parse(added).map(NewSize::Added),
        None => sizes::parse(text).map(NewSize::Whole),
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
    /// Whether it was only checked what would be done.
    dry_run: bool,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.resize/1";
}

/// Enlarges.
pub fn run(context: &mut Context, args: &ResizeArgs) -> Outcome {
    require_file(&args.file, "resize")?;
    let options = context.global.open_options(true);
    let size = match args.size {
        NewSize::Whole(size) => size,
        NewSize::Added(added) => {
            let present =
                Disk::open(&args.file, &OpenOptions { writable: false, reach: Reach::Top, ..options.clone() })?
                    .layers()[0]
                    .image
                    .size_bytes();
            present.saturating_add(added)
        }
    };
    let resized = resize(&args.file, size, &options, args.dry_run)?;
    if context.global.json {
        context.print_json(&Report {
            file: json::path(&args.file),
            old_size: resized.old_bytes,
            new_size: resized.new_bytes,
            old_file_size: resized.old_file_bytes,
            new_file_size: resized.new_file_bytes,
            dry_run: args.dry_run,
        })?;
    } else if !context.global.quiet {
        let file = printable(&json::path(&args.file));
        let (old, new) = (Exact(resized.old_bytes), Exact(resized.new_bytes));
        match resized.new_file_bytes {
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
