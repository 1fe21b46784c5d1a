//! `diskwright convert SOURCE DEST`: copies a disk into a new image.
//!
//! With `--skip-damaged` the lost ranges are printed on standard error, because they are the reason
//! of the exit code, and are in the JSON.

use crate::{
    commands::resize::new_size,
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    ntfs,
    options::{CacheArg, FormatArg, OvaArgs, ShareArgs, SnapshotArgs},
    progress, sizes,
    sizes::{Exact, Human},
    space::Space,
    switches,
};
use clap::{Args, ValueEnum};
use diskwright_disk::{
    ConvertOptions, ConvertOutcome, CreateRequest, Identity, LostRange, LostRanges, NewSize, Progress, is_ova,
    plan_convert,
};
use diskwright_image::{DiskType, Format};
use diskwright_store::ErrorCode;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    cmp::Ordering,
    io::Write,
    path::{Path, PathBuf},
};

/// Arguments of `convert`.
#[derive(Debug, Args)]
#[command(after_help = "\
DEST must not exist, unless it is an export. Its format comes from its extension, or from --format. A SOURCE with parents is read through its whole chain, \
so DEST has no parent. Ranges that read as zeros are skipped, and extents are shared instead of copied where the file system has reflinks. \
When the conversion is stopped or fails, DEST is removed. A copy that --verify finds to be wrong is kept.

With --resume what was copied stays, as DEST.partial, and the same command goes on with it. It reads what is there and compares it with SOURCE, so it does not matter how the last one ended, or whether SOURCE has changed since. A partial copy with other properties than DEST would have is replaced.

A fixed disk or a raw file has its full length, with holes where SOURCE is zero unless --preallocate is given. Windows does not attach a file that is sparse on NTFS (0xC03A001A): \
use --preallocate when DEST is on NTFS. A copy of DEST by most programs has no holes.

A damaged table in SOURCE ends the conversion at the first range that cannot be found. --skip-damaged copies everything else, leaves zeros there, and lists the lost ranges.

--size gives DEST another size than SOURCE. Added space reads as zeros. A smaller DEST must hold the last partition, or on a disk without partitions \
the file system: data are never cut off. The second copy of a GPT moves to the new end.

DEST is another disk than SOURCE, with an identity of its own. --identity keep gives it the disk id of SOURCE (VHD unique id, VHDX virtual disk id), \
so that guests see the same disk, and a VHDX with the same contents also the identity by which children name their parent (DataWriteGuid). \
Use it where DEST takes the place of SOURCE: two disks with one identity must not be attached to one machine. A warning names each id that DEST cannot keep.

--azure makes a disk that Azure accepts: a fixed VHD, its size rounded up to whole MiB and to 20 MiB at least. A disk that Azure would refuse \
all the same is refused here, before anything is copied, with the rule. `info --azure` checks any image.

A VMDK with --subformat streamOptimized and a qcow2 with --subformat compressed are compressed on all processors, and written in one pass. A DEST that ends in .ova is an archive with such a disk, \
the description of a virtual machine (OVF 1.1: 2 processors, 4 GiB of memory, LSI Logic SAS, E1000, BIOS or UEFI as the disk starts) and a manifest of SHA-256 digests; \
VMware and VirtualBox import it. A SOURCE that ends in .ova is read in place: --disk names one of several disks.

EXIT CODES  0 done, 1 failed, 2 used wrongly, 3 done with --skip-damaged, but ranges were lost

An export (nbd://HOST/EXPORT, nbd+unix:///EXPORT?socket=PATH, nbds:// for TLS) is read and written as a raw disk. Ranges that the server reports as zero are not read. \
An export that is written must be as large as SOURCE or larger; ranges that are zero in SOURCE, and everything behind its end, are zeroed. When the conversion is stopped or fails, the export is left partly written.

EXAMPLES
  diskwright convert disk.vhdx disk.raw --verify
  diskwright convert golden.raw golden.vhdx --block-size 4M
  diskwright convert disk.vhdx disk.vhd --dry-run
  diskwright convert machine.avhdx machine.vhd --azure --verify
  diskwright convert small.vhd large.vhdx --size 80G
  diskwright convert old.vhdx new.vhdx --identity keep --to-minimum
  diskwright convert damaged.vhdx saved.vhdx --skip-damaged --verify
  diskwright convert machine.vhdx machine.vmdk --subformat streamOptimized
  diskwright convert machine.raw machine.qcow2 --subformat compressed
  diskwright convert machine.vhdx machine.ova
  diskwright convert appliance.ova data.vhdx --disk 2
  diskwright convert vm.qcow2 before.qcow2 --snapshot before-update
  diskwright convert nbd://host/disk backup.vhdx --resume --verify
  diskwright convert disk.vhdx 'nbd+unix:///?socket=/run/disk.sock'")]
pub struct ConvertArgs {
    /// The disk to copy: a file, or an NBD URI.
    source: PathBuf,
    /// The image to create, or the NBD URI of an export to write into.
    dest: PathBuf,
    /// The kind of image, by qemu-img's names. Of a VMDK: monolithicSparse, monolithicFlat,
    /// twoGbMaxExtentSparse, twoGbMaxExtentFlat or streamOptimized (compressed, written in one
    /// pass). Of a qcow2: compressed. [default of a VMDK: monolithicSparse, fixed monolithicFlat]
    #[arg(long, value_name = "SUBFORMAT")]
    subformat: Option<String>,
    /// Level of compression, from 1 (fastest) to 12 (smallest; 9 for a qcow2): of an OVA, and with
    /// --subformat streamOptimized or compressed. [default: 6]
    #[arg(long, value_name = "LEVEL")]
    compress_level: Option<u8>,
    /// How DEST allocates its space. [default: dynamic; raw is always fixed]
    #[arg(long = "type", value_enum, value_name = "TYPE")]
    disk_type: Option<StandaloneType>,
    /// Size of a payload block of DEST. [default: 2M]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_u32)]
    block_size: Option<u32>,
    /// Logical sector size of DEST: 512 or 4096. [default: SOURCE's for VHDX, else 512]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_u32)]
    sector_size: Option<u32>,
    /// Physical sector size of DEST: 512 or 4096. [default: SOURCE's for VHDX]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_u32)]
    physical_sector_size: Option<u32>,
    /// Virtual size of DEST, or with + in front what is added to that of SOURCE.
    #[arg(long, value_name = "[+]SIZE", value_parser = new_size)]
    size: Option<NewSize>,
    /// Make DEST as small as it can be without losing anything.
    #[arg(long, conflicts_with = "size")]
    to_minimum: bool,
    /// Which identity DEST has.
    #[arg(long, value_enum, value_name = "IDENTITY", default_value_t = IdentityArg::New)]
    identity: IdentityArg,
    /// Make a fixed VHD that Azure accepts.
    #[arg(long)]
    azure: bool,
    /// Format of SOURCE, instead of probing it.
    #[arg(long, value_enum, value_name = "FORMAT")]
    source_format: Option<FormatArg>,
    /// Reserve the space of the whole DEST now. Without it DEST has holes where SOURCE is zero,
    /// also when DEST is fixed.
    #[arg(long)]
    preallocate: bool,
    /// Read DEST back and compare it with SOURCE.
    #[arg(long)]
    verify: bool,
    /// Copy every byte, even where the file system could share it.
    #[arg(long)]
    no_reflink: bool,
    #[command(flatten)]
    ova: OvaArgs,
    #[command(flatten)]
    of: SnapshotArgs,
    #[command(flatten)]
    share: ShareArgs,
    /// Leave zeros for what is damaged in SOURCE, and list it; the exit code is 3.
    #[arg(long)]
    skip_damaged: bool,
    /// Go on with an interrupted conversion.
    #[arg(long)]
    resume: bool,
    /// Show what would be copied and what space is needed, and make nothing.
    #[arg(long, conflicts_with = "verify")]
    dry_run: bool,
}

impl ConvertArgs {
    /// Whether the command line asks for a destination with compressed data.
    fn is_compressed(&self, format: Option<Format>) -> bool {
        let names = |kind: &str| self.subformat.as_deref().is_some_and(|given| given.eq_ignore_ascii_case(kind));
        names("streamOptimized") || names("compressed") || format.is_none() && is_ova(&self.dest)
    }
}

/// Disk types without a parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StandaloneType {
    /// Full length from the start; with --preallocate also its space.
    Fixed,
    /// Space is allocated when a block is first written.
    Dynamic,
}

impl StandaloneType {
    /// The type.
    pub fn disk_type(self) -> DiskType {
        match self {
            Self::Fixed => DiskType::Fixed,
            Self::Dynamic => DiskType::Dynamic,
        }
    }
}

/// The value of `--identity`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum IdentityArg {
    /// DEST is another disk.
    New,
    /// DEST takes the place of SOURCE.
    Keep,
}

impl IdentityArg {
    fn identity(self) -> Identity {
        match self {
            Self::New => Identity::New,
            Self::Keep => Identity::Keep,
        }
    }
}

/// What `convert --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk that was copied.
    source: String,
    /// The new disk.
    dest: String,
    /// Size of the disk that was copied, in bytes.
    virtual_size: u64,
    /// Size of the new disk in bytes.
    dest_virtual_size: u64,
    /// Kind of the partition table that was changed for another size: `MBR` or `GPT`; `null` if
    /// none was.
    changed_table: Option<String>,
    /// Whether the new disk has the disk id of the source (`--identity keep`).
    kept_disk_id: bool,
    /// Whether children of the source accept the new disk as their parent.
    kept_linkage_id: bool,
    /// Bytes that were copied.
    copied_bytes: u64,
    /// Bytes that the file system shares between both files (reflinks).
    cloned_bytes: u64,
    /// Bytes that read as zeros and take no space in the new disk.
    zero_bytes: u64,
    /// Bytes that the new disk held already (`--resume`).
    held_bytes: u64,
    /// Length of the file, of a copy that was written compressed in one pass.
    stream_file_size: Option<u64>,
    /// Whether the new disk was read back and compared (`--verify`).
    verified: bool,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// Bytes that could not be read and are zeros in the new disk (`--skip-damaged`).
    lost_bytes: u64,
    /// The ranges that could not be read.
    lost: Vec<LostReport>,
    /// Lost bytes in further ranges, which are too many to list.
    lost_unlisted_bytes: u64,
    /// With `--dry-run`: the space that it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    space: Option<Space>,
    /// Whether it was only checked what would be done; `copied_bytes` is then what would be copied.
    dry_run: bool,
    /// Time of the copy without the verification.
    copy_seconds: f64,
    /// Time of the whole command.
    seconds: f64,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.convert/1";
}

/// A range that could not be read.
#[derive(Debug, Serialize, JsonSchema)]
pub struct LostReport {
    /// Offset on the disk in bytes.
    start: u64,
    /// Length in bytes.
    length: u64,
    /// Why the range could not be read.
    reason: String,
}

/// Maximum number of lost ranges that are printed; the JSON has all that are known.
const LOST_PRINTED: usize = 20;

/// Converts, and prints what was copied.
pub fn run(context: &mut Context, args: &ConvertArgs) -> Outcome {
    if [&args.source, &args.dest].into_iter().any(|name| name.as_os_str() == "-") {
        return Err(Failure::usage(
            "standard input and output are not supported: a disk is read and written at many offsets at once; give a file or an NBD URI, or ./- for a file named -",
        ));
    }
    let format = context.global.format.map(FormatArg::format);
    if args.compress_level.is_some() && !args.is_compressed(format) {
        return Err(Failure::usage(
            "--compress-level needs a compressed destination: add --subformat streamOptimized for a VMDK or --subformat compressed for a qcow2, or name the destination .ova",
        ));
    }
    let mut source = context.global.open_options(false);
    source.format = args.source_format.map(FormatArg::format);
    source.force_share = args.share.force_share;
    source.ova_disk.clone_from(&args.ova.ova_disk);
    source.snapshot.clone_from(&args.of.snapshot);
    let options = ConvertOptions {
        source,
        cache: context.global.cache.map(CacheArg::mode),
        dest: CreateRequest {
            format,
            disk_type: args.disk_type.map(StandaloneType::disk_type),
            subformat: args.subformat.clone(),
            block_bytes: args.block_size,
            logical_sector_bytes: args.sector_size,
            physical_sector_bytes: args.physical_sector_size,
            preallocate: args.preallocate,
            ..CreateRequest::default()
        },
        size: if args.to_minimum { NewSize::Minimum } else { args.size.unwrap_or_default() },
        identity: args.identity.identity(),
        azure: args.azure,
        compress_level: args.compress_level,
        verify: args.verify,
        no_reflink: args.no_reflink,
        skip_damaged: args.skip_damaged,
        resume: args.resume,
    };
    let mut display = context.progress("converting").then("verifying");
    let mut progress = |done, total| display.update(done, total);
    let (done, space) = match args.dry_run {
        true => plan(&args.source, &args.dest, &options, &mut progress)?,
        false => match diskwright_disk::convert(&args.source, &args.dest, &options, &mut progress) {
            Ok(done) => (done, None),
            Err(error) => {
                drop(display);
                // Wrong usage has copied nothing.
                if args.resume && error.code() != ErrorCode::InvalidInput {
                    context.warn("what was copied is kept; the same command goes on from there");
                }
                return Err(error.into());
            }
        },
    };
    let (elapsed, copying) = (display.elapsed(), display.first_phase());
    drop(display);
    let fixed = args.azure || args.disk_type == Some(StandaloneType::Fixed);
    let holes = (fixed && !args.preallocate && !args.dry_run).then(|| ntfs::note(&args.dest)).flatten();
    let warnings: Vec<String> = done.warnings.iter().cloned().chain(holes).collect();
    warnings.iter().for_each(|warning| context.warn(warning));
    if context.global.json {
        let report = Report {
            source: json::path(&args.source),
            dest: json::path(&args.dest),
            virtual_size: done.size_bytes,
            dest_virtual_size: done.dest_bytes,
            changed_table: done.table.map(|table| table.to_string()),
            kept_disk_id: done.kept_disk_id,
            kept_linkage_id: done.kept_linkage_id,
            copied_bytes: done.copied_bytes,
            cloned_bytes: done.cloned_bytes,
            zero_bytes: done.zero_bytes,
            held_bytes: done.held_bytes,
            stream_file_size: done.stream_bytes,
            verified: args.verify,
            warnings: switches::all_with_switches(&warnings),
            lost_bytes: done.lost.bytes,
            lost: lost_reports(&done.lost),
            lost_unlisted_bytes: done.lost.unlisted_bytes,
            space,
            dry_run: args.dry_run,
            copy_seconds: copying.as_secs_f64(),
            seconds: elapsed.as_secs_f64(),
        };
        context.print_json(&report)?;
    } else if !context.global.quiet {
        let dest = printable(&json::path(&args.dest));
        let line = summary(&done, args.verify);
        let rate = Human(progress::rate(done.copied_bytes + done.cloned_bytes, copying));
        match &space {
            Some(space) => writeln!(
                context.text(),
                "{dest}: would be a disk of {} with {} of data; it {space}; nothing was changed",
                Human(done.dest_bytes),
                Human(done.copied_bytes)
            )?,
            None => {
                writeln!(context.text(), "{dest}: {line}, in {} (copied at {rate}/s)", progress::duration(elapsed))?
            }
        }
        if let Some(line) = size_line(&done) {
            writeln!(context.text(), "{line}")?;
        }
    }
    if done.lost.bytes == 0 {
        return Ok(exit::OK);
    }
    print_lost(context, &args.source, &done.lost);
    Ok(exit::COPIED_WITH_LOSSES)
}

/// What the conversion would do, as if it were done, and the space that it needs.
fn plan(
    source: &Path,
    dest: &Path,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Outcome<(ConvertOutcome, Option<Space>)> {
    let planned = plan_convert(source, dest, options, progress)?;
    let done = ConvertOutcome {
        size_bytes: planned.size_bytes,
        dest_bytes: planned.dest_bytes,
        table: planned.table,
        copied_bytes: planned.data_bytes,
        zero_bytes: planned.size_bytes.saturating_sub(planned.data_bytes),
        warnings: planned.warnings,
        ..ConvertOutcome::default()
    };
    Ok((done, Some(Space::on(dest, planned.needed_bytes))))
}

fn lost_reports(lost: &LostRanges) -> Vec<LostReport> {
    let report = |range: &LostRange| LostReport {
        start: range.offset_bytes,
        length: range.len_bytes,
        reason: switches::with_switches(&range.reason),
    };
    lost.ranges.iter().map(report).collect()
}

/// Prints the lost ranges, one a line.
fn print_lost(context: &mut Context, source: &Path, lost: &LostRanges) {
    let source = source.display();
    for range in lost.ranges.iter().take(LOST_PRINTED) {
        let end = range.offset_bytes + range.len_bytes;
        context.warn_always(&format!("lost: bytes {} to {end}: {}", range.offset_bytes, range.reason));
    }
    if let Some(rest) = lost.ranges.get(LOST_PRINTED..).filter(|rest| !rest.is_empty()) {
        let more = if lost.unlisted_bytes > 0 { "at least " } else { "" };
        context.warn_always(&format!("lost: {more}{} more ranges; --json lists them", rest.len()));
    }
    context.warn_always(&format!("{source}: {} are damaged; they are zeros in the copy", Exact(lost.bytes)));
}

/// The line about the size, if the copy has another size than the source.
fn size_line(done: &ConvertOutcome) -> Option<String> {
    let (old, new) = (Exact(done.size_bytes), Exact(done.dest_bytes));
    let size = match done.dest_bytes.cmp(&done.size_bytes) {
        Ordering::Greater => Some(format!("enlarged from {old} to {new}")),
        Ordering::Less => Some(format!("made smaller, from {old} to {new}")),
        Ordering::Equal => None,
    };
    let table = done.table.map(|table| format!("the partition table ({table}) was changed for this size"));
    let parts: Vec<String> = size.into_iter().chain(table).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn summary(done: &ConvertOutcome, verified: bool) -> String {
    let mut line = format!("{}; {} copied", Human(done.size_bytes), Human(done.copied_bytes));
    if done.cloned_bytes > 0 {
        line.push_str(&format!(", {} shared with the source", Human(done.cloned_bytes)));
    }
    if done.held_bytes > 0 {
        line.push_str(&format!(", {} were there", Human(done.held_bytes)));
    }
    line.push_str(&format!(", {} of zeros skipped", Human(done.zero_bytes)));
    if let Some(bytes) = done.stream_bytes {
        line.push_str(&format!(", compressed to {}", Human(bytes)));
    }
    if done.lost.bytes > 0 {
        line.push_str(&format!(", {} lost", Human(done.lost.bytes)));
    }
    if verified {
        line.push_str(", verified");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_leaves_out_what_was_not() {
        let done = ConvertOutcome {
            size_bytes: 40 << 30,
            dest_bytes: 40 << 30,
            copied_bytes: 4 << 30,
            zero_bytes: 36 << 30,
            ..ConvertOutcome::default()
        };
        assert_eq!(size_line(&done), None);
        let larger = ConvertOutcome { dest_bytes: 41 << 30, ..done.clone() };
        let line = "enlarged from 40 GiB (42949672960 bytes) to 41 GiB (44023414784 bytes)";
        assert_eq!(size_line(&larger).as_deref(), Some(line));
        assert_eq!(summary(&done, false), "40 GiB; 4 GiB copied, 36 GiB of zeros skipped");
        let shared = ConvertOutcome { copied_bytes: 0, cloned_bytes: 4 << 30, ..done.clone() };
        assert_eq!(
            summary(&shared, true),
            "40 GiB; 0 bytes copied, 4 GiB shared with the source, 36 GiB of zeros skipped, verified"
        );
        let lost = ConvertOutcome { lost: LostRanges { bytes: 1 << 20, ..LostRanges::default() }, ..done };
        assert_eq!(summary(&lost, true), "40 GiB; 4 GiB copied, 36 GiB of zeros skipped, 1 MiB lost, verified");
    }
}
