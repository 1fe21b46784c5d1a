//! `diskwright compact FILE...`: gives back the space that disks do not need.

use crate::{
    commands::partitions::place_text,
    context::Context,
    describe::printable,
    exit::{self, Codes, Outcome},
    in_use,
    json::{self, Document},
    progress, several,
    sizes::Human,
    space::Space,
    switches,
    table::{Align, Columns},
};
use clap::Args;
use diskwright_disk::{CompactOptions, Compacted, compact, require_file};
use diskwright_serve::control::{Client, Done, Operation};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

/// Arguments of `compact`.
#[derive(Debug, Args)]
#[command(after_help = "\
Blocks that the file system inside has free are given back, by its own map (ext2/3/4, NTFS, XFS, FAT, exFAT, btrfs, swap areas), and so \
are blocks of zeros. Then the last blocks of the file move into its gaps, and the file is cut. Nothing is mounted, and root is not needed. \
No second copy of the disk is made. After a power cut or Ctrl-C the disk is whole: run the command again, and it goes on.

A file system that is not unmounted, damaged, encrypted or unknown is left alone, and named: there only zeros are given back. That is so \
for a disk with children too (a VHD with children is refused). Fixed and raw disks are refused: they keep their space.

A disk that `serve` or `attach` has open is compacted by that process, while its clients go on: a write to a block that moves waits some \
milliseconds. File systems' maps are not read then. So run fstrim inside first, or mount with the option discard: blocks that are \
discarded are given back at once, and compact makes the file small. Blocks of zeros are given back too.

EXAMPLES
  diskwright compact vm.vhdx
  diskwright compact vm.vhdx --estimate
  diskwright compact *.vhdx --dry-run
  fstrim /mnt && diskwright compact vm.vhdx")]
pub struct CompactArgs {
    /// The disks: dynamic and differencing images.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Show what would be gained, for each partition. Only reads the disk.
    #[arg(long, conflicts_with = "dry_run")]
    estimate: bool,
    /// Check whether it can be done and what would be gained, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// What `compact --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disks that were compacted.
    disks: Vec<DiskReport>,
    /// The disks that could not be compacted.
    failed: Vec<FailedReport>,
    /// Whether it was only estimated.
    estimate: bool,
    /// Whether it was only checked what would be done.
    dry_run: bool,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.compact/1";
}

/// A disk.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DiskReport {
    /// The disk.
    file: String,
    /// Size of the disk in bytes.
    virtual_size: u64,
    /// Length of a block in bytes.
    block_size: u64,
    /// Length of its file before, in bytes.
    old_file_size: u64,
    /// Length of its file after, in bytes; predicted if nothing was changed.
    new_file_size: u64,
    /// Bytes of blocks that were given back because a file system has them free.
    free_bytes: u64,
    /// Bytes of blocks that were given back because they read as zeros.
    zero_bytes: u64,
    /// Bytes of blocks that were moved; at least so many if nothing was changed.
    moved_bytes: u64,
    /// A child of the disk: because of it only zeros were given back.
    child: Option<String>,
    /// Whether it was compacted in use, by the process that has it open.
    in_use: bool,
    /// The volumes on the disk; none are looked for if it has a child or is in use.
    volumes: Vec<VolumeReport>,
    /// With `--dry-run` and `--estimate`: the space that it needs. It needs none: blocks move into
    /// gaps of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    space: Option<Space>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// Seconds that it took.
    seconds: f64,
}

/// A partition, a logical volume, or the whole disk.
#[derive(Debug, Serialize, JsonSchema)]
pub struct VolumeReport {
    /// Where it lies: `disk`, `partition 2`, `group/name` of a logical volume.
    place: String,
    /// The file system, or what else it holds; `null` if nothing known.
    contents: Option<String>,
    /// Label of the file system.
    label: Option<String>,
    /// Length of the volume in bytes.
    length: u64,
    /// Bytes of the blocks in it that were given back.
    given_back_bytes: u64,
    /// Why its free space was left alone.
    left_alone_because: Option<String>,
}

/// A disk that could not be compacted.
#[derive(Debug, Serialize, JsonSchema)]
pub struct FailedReport {
    /// The disk.
    file: String,
    /// Why it could not be compacted.
    error: String,
}

/// Compacts the disks one after the other.
pub fn run(context: &mut Context, args: &CompactArgs) -> Outcome {
    let mut disks = Vec::new();
    let turns = several::in_turn(context, &args.files, Codes::USUAL, |context, file| {
        disks.push(one(context, args, file)?);
        Ok(exit::OK)
    })?;
    let outcome = turns.outcome();
    if context.global.json {
        let failed =
            turns.ended.into_iter().filter_map(|file| Some(FailedReport { file: file.file, error: file.error? }));
        let failed = failed.collect();
        context.print_json(&Report { disks, failed, estimate: args.estimate, dry_run: args.dry_run })?;
    }
    outcome
}

fn one(context: &mut Context, args: &CompactArgs, file: &Path) -> Outcome<DiskReport> {
    require_file(file, "compact")?;
    let changed = !(args.estimate || args.dry_run);
    if let Some(client) = in_use::client(file)? {
        return compact_in_use(context, file, &client, !changed);
    }
    let open = context.global.open_options(false);
    let options = CompactOptions { open, estimate: args.estimate, dry_run: args.dry_run };
    let mut display = context.progress("examining").then("moving");
    let done = compact(file, &options, &mut |done, total| display.update(done, total)).map_err(in_use::explain)?;
    let elapsed = display.elapsed();
    drop(display);
    done.warnings.iter().for_each(|warning| context.warn(warning));
    print_and_return(context, report_of(file, &done, (false, changed), elapsed), changed, elapsed)
}

/// Compacts a disk that `serve-ctl` names.
pub fn one_in_use(context: &mut Context, file: &Path, client: &Client, dry_run: bool) -> Outcome {
    let disk = compact_in_use(context, file, client, dry_run)?;
    if context.global.json {
        context.print_json(&Report { disks: vec![disk], failed: Vec::new(), estimate: false, dry_run })?;
    }
    Ok(exit::OK)
}

/// Lets the process that has the disk open compact it.
fn compact_in_use(context: &mut Context, file: &Path, client: &Client, dry_run: bool) -> Outcome<DiskReport> {
    let mut display = context.progress("examining").then("moving");
    let answer = client.call(Operation::Compact { dry_run }, &mut |done, total| display.update(done, total));
    let elapsed = display.elapsed();
    drop(display);
    let Done::Compacted(done) = answer? else { return Err(in_use::unexpected(client)) };
    let done = Compacted {
        size_bytes: done.virtual_size,
        block_bytes: done.block_size,
        old_file_bytes: done.old_file_size,
        new_file_bytes: done.new_file_size,
        zero_bytes: done.zero_bytes,
        moved_bytes: done.moved_bytes,
        warnings: done.warnings,
        ..Compacted::default()
    };
    done.warnings.iter().for_each(|warning| context.warn(warning));
    print_and_return(context, report_of(file, &done, (true, !dry_run), elapsed), !dry_run, elapsed)
}

fn print_and_return(
    context: &mut Context,
    report: DiskReport,
    changed: bool,
    elapsed: Duration,
) -> Outcome<DiskReport> {
    if !context.global.json && !context.global.quiet {
        show(context, &report, changed, elapsed)?;
    }
    Ok(report)
}

fn report_of(file: &Path, done: &Compacted, (in_use, changed): (bool, bool), elapsed: Duration) -> DiskReport {
    let volumes = done.volumes.iter().map(|gain| VolumeReport {
        place: place_text(&gain.volume.place),
        contents: gain.volume.contents.map(str::to_owned),
        label: gain.volume.label.clone(),
        length: gain.volume.size_bytes(),
        given_back_bytes: gain.given_back_bytes,
        left_alone_because: gain.volume.free_bytes.as_ref().err().map(ToString::to_string),
    });
    DiskReport {
        file: json::path(file),
        virtual_size: done.size_bytes,
        block_size: done.block_bytes,
        old_file_size: done.old_file_bytes,
        new_file_size: done.new_file_bytes,
        free_bytes: done.free_bytes,
        zero_bytes: done.zero_bytes,
        moved_bytes: done.moved_bytes,
        child: done.child.as_deref().map(json::path),
        in_use,
        volumes: volumes.collect(),
        space: (!changed).then(|| Space::on(file, 0)),
        warnings: switches::all_with_switches(&done.warnings),
        seconds: elapsed.as_secs_f64(),
    }
}

/// `vm.vhdx: compacted from 40 GiB to 5 GiB: ...`, then a table of the volumes, then notes.
fn show(context: &mut Context, disk: &DiskReport, changed: bool, elapsed: Duration) -> Outcome<()> {
    let file = printable(&disk.file);
    writeln!(context.text(), "{file}: {}", summary(disk, changed, elapsed))?;
    if !disk.volumes.is_empty() {
        let heads = [
            ("volume", Align::Left),
            ("size", Align::Right),
            ("given back", Align::Right),
            ("contents", Align::Left),
            ("label", Align::Left),
        ];
        let mut table = Columns::new(&heads);
        for volume in &disk.volumes {
            table.row(vec![
                printable(&volume.place),
                Human(volume.length).to_string(),
                Human(volume.given_back_bytes).to_string(),
                volume.contents.clone().unwrap_or_else(|| "-".to_owned()),
                printable(volume.label.as_deref().unwrap_or_default()),
            ]);
        }
        writeln!(context.out)?;
        table.within(context.style.limit()).write(&mut context.out)?;
    }
    let mut notes: Vec<String> = disk
        .volumes
        .iter()
        .filter_map(|volume| Some(format!("{}: left alone: {}", volume.place, volume.left_alone_because.as_ref()?)))
        .collect();
    notes.extend(disk.child.as_ref().map(|child| {
        format!("{child} is a child of this disk, so only blocks of zeros are given back: the contents must not change")
    }));
    if disk.in_use {
        notes.push(
            "the disk is in use, so file systems' maps were not read: fstrim inside lets more be given back".to_owned(),
        );
    }
    if !notes.is_empty() {
        writeln!(context.out)?;
    }
    for note in notes {
        writeln!(context.text(), "{}", printable(&note))?;
    }
    Ok(())
}

fn summary(disk: &DiskReport, changed: bool, elapsed: Duration) -> String {
    let (old, new) = (Human(disk.old_file_size), Human(disk.new_file_size));
    let details = format!(
        "{} free in file systems, {} zeros, {} moved",
        Human(disk.free_bytes),
        Human(disk.zero_bytes),
        Human(disk.moved_bytes)
    );
    if changed {
        format!("compacted from {old} to {new} in {}: {details}", progress::duration(elapsed))
    } else {
        format!("would be compacted from {old} to {new}: {details}; it needs no space; nothing was changed")
    }
}
