//! `diskwright rescue FILE DEST`: what can still be read of a damaged image, into a new one.
//!
//! The lost ranges are printed on standard error, because they are the reason of the exit code. The
//! whole map is in the JSON, which `--map` also writes into a file.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    options::FormatArg,
    sizes,
    sizes::{Exact, Human},
    space::Space,
    switches,
};
use clap::Args;
use diskwright_disk::{CreateRequest, RangeKind, RescueOptions, Rescued, rescue};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::PathBuf,
};

use super::convert::StandaloneType;

/// Arguments of `rescue`.
#[derive(Debug, Args)]
#[command(after_help = "\
FILE is only read: make a copy of a failing disk first. DEST must not exist; its format comes from its extension, or from --format. DEST has \
no parent. Where a block or a sector cannot be read, DEST has zeros, and the range is listed as lost.

Of headers, footers, region tables, and the directories and tables of a VMDK either copy is enough; the grains of a streamOptimized VMDK name themselves. \
A VMDK in several files is rescued file by file. A table entry is trusted only if nothing contradicts it: not if it points beyond \
the file, into a table, or to the space of another block. Data that no entry names are placed only where their own contents prove that they belong: \
copies of superblocks, inode tables, directories and extent trees of ext4 (with metadata_csum), metadata and inodes of XFS 5, records of an NTFS MFT, \
headers of a GPT. Two pieces that claim one place are both left over. Contents of files state no place, so they stay unplaced: --leftovers saves them.

If data are left that no entry names, an entry that says \"no data\" may be one that was wiped. In a disk without a parent such ranges are zeros, \
listed as doubted. In a child they are lost, since the parent's data there may be old; --trust-table reads the parent there. \
If the records of whether FILE has a parent are lost, all that FILE has no data for is lost, unless its name is that of a child (.avhd, .avhdx), or --parent or \
--no-parent is given.

EXIT CODES  0 everything was read, 1 failed, 2 used wrongly, 3 done, but ranges are lost or doubted

EXAMPLES
  diskwright rescue damaged.vhdx saved.vhdx
  diskwright rescue damaged.vhd saved.raw --map map.json --leftovers pieces
  diskwright rescue no-metadata.vhdx saved.vhdx --size 40G --block-size 2M")]
pub struct RescueArgs {
    /// The damaged image.
    file: PathBuf,
    /// The image to create.
    dest: PathBuf,
    /// Write the map of what was read and what is lost into this file, as JSON.
    #[arg(long, value_name = "FILE")]
    map: Option<PathBuf>,
    /// How DEST allocates its space. [default: dynamic; raw is always fixed]
    #[arg(long = "type", value_enum, value_name = "TYPE")]
    disk_type: Option<StandaloneType>,
    /// Format of FILE, instead of its extension.
    #[arg(long, value_enum, value_name = "FORMAT")]
    source_format: Option<FormatArg>,
    /// Size of the disk, if FILE's own record of it is lost.
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    /// Size of a payload block of FILE, if FILE's own record of it is lost.
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_u32)]
    block_size: Option<u32>,
    /// The parent of FILE, if FILE's own record of it is lost or names another place.
    #[arg(long, value_name = "FILE")]
    parent: Option<PathBuf>,
    /// FILE has no parent, if FILE's own record of that is lost.
    #[arg(long, conflicts_with = "parent")]
    no_parent: bool,
    /// Trust table entries that mark a block as unallocated, even if the file holds data that no
    /// entry refers to.
    #[arg(long)]
    trust_table: bool,
    /// Save the data that could not be placed into this folder, each piece in a file named by its
    /// offset in FILE.
    #[arg(long, value_name = "DIR")]
    leftovers: Option<PathBuf>,
    /// Read everything, show what would be lost and what space is needed, and make nothing.
    #[arg(long, conflicts_with_all = ["leftovers", "map"])]
    dry_run: bool,
}

/// What `rescue --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The damaged image.
    file: String,
    /// The new image.
    dest: String,
    /// Size of the disk in bytes.
    virtual_size: u64,
    /// Bytes that were read and copied.
    data_bytes: u64,
    /// Bytes that read as zeros.
    zero_bytes: u64,
    /// Bytes that are lost, and zeros in the new image.
    lost_bytes: u64,
    /// Bytes that read as zeros, but may belong to data that could not be placed.
    doubted_bytes: u64,
    /// The whole disk, in order.
    ranges: Vec<Range>,
    /// Bytes in further ranges, which are too many to list.
    unlisted_bytes: u64,
    /// Blocks without a valid table entry that their own contents have placed.
    placed: Vec<Placed>,
    /// Data in the file that could not be placed.
    leftovers: Vec<Leftover>,
    /// Bytes in further such pieces, which are too many to list.
    unlisted_leftover_bytes: u64,
    /// With `--dry-run`: the space that it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    space: Option<Space>,
    /// Whether it was only read what could be rescued.
    dry_run: bool,
    /// What was found of the tables, and warnings, a sentence each.
    remarks: Vec<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.rescue/1";
}

/// A range of the disk.
#[derive(Debug, Serialize, JsonSchema)]
struct Range {
    /// Offset on the disk in bytes.
    start: u64,
    /// Length in bytes.
    length: u64,
    /// Whether it was copied, is zero, or is lost.
    kind: Kind,
    /// Why the range could not be read.
    reason: Option<String>,
}

/// Result for a range.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// The range was read and copied.
    Data,
    /// The range reads as zeros.
    Zero,
    /// The range is lost.
    Lost,
    /// It reads as zeros, but may belong to data that could not be placed.
    Doubted,
}

/// A block that its own contents have placed.
#[derive(Debug, Serialize, JsonSchema)]
struct Placed {
    /// Offset on the disk in bytes.
    start: u64,
    /// Length in bytes.
    length: u64,
    /// Offset of its payload in the file in bytes.
    file_offset: u64,
    /// What proves the place.
    evidence: Vec<Evidence>,
}

/// Structures of a kind that prove a place.
#[derive(Debug, Serialize, JsonSchema)]
struct Evidence {
    /// The kind.
    structure: String,
    /// How many of them the block has.
    count: u64,
}

/// Data that could not be placed.
#[derive(Debug, Serialize, JsonSchema)]
struct Leftover {
    /// Offset in the file in bytes.
    file_offset: u64,
    /// Length in bytes.
    length: u64,
    /// Why the piece was not placed.
    reason: String,
}

/// Maximum number of ranges that are printed; the JSON has all that are known.
const PRINTED: usize = 20;

/// Rescues, and prints what is lost.
pub fn run(context: &mut Context, args: &RescueArgs) -> Outcome {
    let mut source = context.global.open_options(false);
    source.format = args.source_format.map(FormatArg::format);
    let options = RescueOptions {
        source,
        dest: CreateRequest {
            format: context.global.format.map(FormatArg::format),
            disk_type: args.disk_type.map(StandaloneType::disk_type),
            ..CreateRequest::default()
        },
        size_bytes: args.size,
        block_bytes: args.block_size,
        parent: args.parent.clone(),
        no_parent: args.no_parent,
        trust_absent: args.trust_table,
        leftovers: args.leftovers.clone(),
        dry_run: args.dry_run,
    };
    // A map that cannot be saved is known before anything is read.
    let map = args.map.as_ref().map(|path| {
        File::create_new(path)
            .map_err(|error| Failure::Sentence(format!("{}: cannot create the map: {error}", path.display())))
    });
    let map = map.transpose()?;
    let mut display = context.progress("searching").then("copying");
    let done = rescue(&args.file, &args.dest, &options, &mut |done, total| display.update(done, total));
    drop(display);
    let done = done.inspect_err(|_| {
        // The map is ours, created just now.
        args.map.iter().for_each(|path| drop(std::fs::remove_file(path)));
    })?;
    let report = report(args, &done);
    if let Some(file) = map {
        let mut out = BufWriter::new(file);
        json::write(&mut out, &report)?;
        out.flush()?;
    }
    done.remarks.iter().for_each(|remark| context.warn(remark));
    if context.global.json {
        context.print_json(&report)?;
    } else if !context.global.quiet {
        let end = report.space.as_ref().map_or_else(String::new, |space| format!("; it {space}; nothing was made"));
        writeln!(context.text(), "{}: {}{end}", printable(&json::path(&args.dest)), summary(&done))?;
    }
    if done.is_whole() {
        return Ok(exit::OK);
    }
    print_lost(context, &done);
    Ok(exit::COPIED_WITH_LOSSES)
}

fn summary(done: &Rescued) -> String {
    let mut line = format!("{}; {} of data read", Human(done.size_bytes), Human(done.data_bytes));
    let placed: u64 = done.placed.iter().map(|placed| placed.len_bytes).sum();
    if placed > 0 {
        line.push_str(&format!(", {} of it in {} blocks placed by their contents", Human(placed), done.placed.len()));
    }
    line.push_str(&format!(", {} lost", Human(done.lost_bytes)));
    if done.doubted_bytes > 0 {
        line.push_str(&format!(", {} doubted", Human(done.doubted_bytes)));
    }
    line
}

fn print_lost(context: &mut Context, done: &Rescued) {
    let mut lost = done.ranges.iter().filter(|range| range.kind == RangeKind::Lost);
    for range in lost.by_ref().take(PRINTED) {
        let end = range.offset_bytes + range.len_bytes;
        let reason = range.reason.as_deref().unwrap_or_default();
        context.warn_always(&format!("lost: bytes {} to {end}: {reason}", range.offset_bytes));
    }
    match lost.count() {
        0 => {}
        more => context.warn_always(&format!("lost: {more} more ranges; --json lists them")),
    }
    let left: u64 = done.leftovers.iter().map(|piece| piece.len_bytes).sum::<u64>() + done.unlisted_leftover_bytes;
    if left > 0 {
        let pieces = done.leftovers.len();
        context.warn_always(&format!("{} in {pieces} pieces of the file could not be placed", Exact(left)));
    }
}

fn report(args: &RescueArgs, done: &Rescued) -> Report {
    let kind = |kind| match kind {
        RangeKind::Data => Kind::Data,
        RangeKind::Zero => Kind::Zero,
        RangeKind::Lost => Kind::Lost,
        RangeKind::Doubted => Kind::Doubted,
    };
    Report {
        file: json::path(&args.file),
        dest: json::path(&args.dest),
        virtual_size: done.size_bytes,
        data_bytes: done.data_bytes,
        zero_bytes: done.zero_bytes,
        lost_bytes: done.lost_bytes,
        doubted_bytes: done.doubted_bytes,
        ranges: done
            .ranges
            .iter()
            .map(|range| Range {
                start: range.offset_bytes,
                length: range.len_bytes,
                kind: kind(range.kind),
                reason: range.reason.as_ref().map(switches::with_switches),
            })
            .collect(),
        unlisted_bytes: done.unlisted_bytes,
        placed: done
            .placed
            .iter()
            .map(|placed| Placed {
                start: placed.offset_bytes,
                length: placed.len_bytes,
                file_offset: placed.file_offset_bytes,
                evidence: placed
                    .evidence
                    .iter()
                    .map(|&(structure, count)| Evidence { structure: structure.into(), count })
                    .collect(),
            })
            .collect(),
        leftovers: done
            .leftovers
            .iter()
            .map(|piece| Leftover {
                file_offset: piece.file_offset_bytes,
                length: piece.len_bytes,
                reason: piece.reason.into(),
            })
            .collect(),
        unlisted_leftover_bytes: done.unlisted_leftover_bytes,
        space: args.dry_run.then(|| Space::on(&args.dest, done.data_bytes)),
        dry_run: args.dry_run,
        remarks: switches::all_with_switches(&done.remarks),
    }
}
