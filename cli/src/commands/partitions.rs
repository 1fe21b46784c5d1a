//! `diskwright partitions FILE...`: the partitions and file systems of disks.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Codes, Failure, Outcome},
    json::{self, Document},
    options::{OvaArgs, ShareArgs, SnapshotArgs},
    several::{self, Between},
    sizes::Human,
    switches,
    table::{Align, Columns},
};
use clap::Args;
use diskwright_disk::{OpenOptions, layout, volume::Place};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Arguments of `partitions`.
#[derive(Debug, Args)]
#[command(after_help = "\
Nothing is mounted, and root is not needed. Free space is read from the maps of the file system itself (ext2/3/4, NTFS, XFS, FAT, exFAT, \
btrfs); where a map cannot be trusted, a note below the table says why.

EXAMPLES
  diskwright partitions disk.vhdx
  diskwright partitions *.vhdx
  diskwright partitions ext4.vhdx --json
  diskwright partitions nbd://backup.example.com/disk")]
pub struct PartitionsArgs {
    /// The disks: files, or NBD URIs.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    ova: OvaArgs,
    #[command(flatten)]
    of: SnapshotArgs,
    #[command(flatten)]
    share: ShareArgs,
}

/// What `partitions --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk.
    file: String,
    /// Size of the disk in bytes.
    virtual_size: u64,
    /// The partition table: `none`, `MBR` or `GPT`.
    table: String,
    /// What is wrong with the partition table, or on the whole disk.
    problem: Option<String>,
    /// The volumes, in the order of the table.
    volumes: Vec<VolumeReport>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.partitions/1";
}

/// A partition, a logical volume, or the whole disk.
#[derive(Debug, Serialize, JsonSchema)]
pub struct VolumeReport {
    /// Where it lies: `disk`, `partition 2`, `group/name` of a logical volume.
    place: String,
    /// Number of the partition, as Linux counts.
    partition: Option<u32>,
    /// First byte of the volume on the disk.
    start: u64,
    /// Length of the volume in bytes.
    length: u64,
    /// Name of the partition (GPT).
    partition_name: Option<String>,
    /// Type of the partition: hexadecimal (MBR) or a UUID (GPT).
    partition_type: Option<String>,
    /// The file system, or what else it holds; `null` if nothing known.
    contents: Option<String>,
    /// Label of the file system.
    label: Option<String>,
    /// UUID or serial number of the file system.
    uuid: Option<String>,
    /// Bytes that are certainly free; `null` where that is not known.
    free: Option<u64>,
    /// Why it is not known what is free.
    free_unknown_because: Option<String>,
}

/// Where a volume lies: `disk`, `partition 2`, `group/name` of a logical volume.
pub(crate) fn place_text(place: &Place) -> String {
    match place {
        Place::Partition(number) => format!("partition {number}"),
        Place::Logical { group, name } => format!("{group}/{name}"),
        _ => "disk".to_owned(),
    }
}

pub fn run(context: &mut Context, args: &PartitionsArgs) -> Outcome {
    let one = |context: &mut Context, file: &Path| one(context, args, file);
    several::each(context, &args.files, Codes::USUAL, Between::EmptyLine, one)
}

fn one(context: &mut Context, args: &PartitionsArgs, file: &Path) -> Outcome {
    let options = OpenOptions {
        force_share: args.share.force_share,
        ova_disk: args.ova.ova_disk.clone(),
        snapshot: args.of.snapshot.clone(),
        ..context.global.open_options(false)
    };
    let disk = context.open(file, &options)?;
    let layout = layout(disk.device(), context.global.engine())
        .map_err(|error| Failure::doing(format!("{}: cannot open a queue", file.display()), error))?;
    let volumes: Vec<VolumeReport> = layout
        .volumes
        .iter()
        .map(|volume| VolumeReport {
            place: place_text(&volume.place),
            partition: if let Place::Partition(number) = volume.place { Some(number) } else { None },
            start: volume.extents.first().map_or(0, |extent| extent.disk_offset_bytes),
            length: volume.size_bytes(),
            partition_name: volume.partition_name.clone(),
            partition_type: volume.partition_type.clone(),
            contents: volume.contents.map(str::to_owned),
            label: volume.label.clone(),
            uuid: volume.uuid.clone(),
            free: volume.free_bytes.as_ref().ok().copied(),
            free_unknown_because: volume.free_bytes.as_ref().err().map(ToString::to_string),
        })
        .collect();
    let problem = layout.problem.as_ref().map(ToString::to_string);
    if context.global.json {
        context.print_json(&Report {
            file: json::path(file),
            virtual_size: disk.device().geometry().size_bytes,
            table: layout.table.to_string(),
            problem,
            volumes,
            warnings: switches::all_with_switches(disk.warnings()),
        })?;
        return Ok(exit::OK);
    }
    let size = Human(disk.device().geometry().size_bytes);
    writeln!(context.text(), "{}: {size}, partition table: {}", printable(&json::path(file)), layout.table)?;
    let heads = [
        ("volume", Align::Left),
        ("start", Align::Right),
        ("size", Align::Right),
        ("free", Align::Right),
        ("contents", Align::Left),
        ("label", Align::Left),
    ];
    let mut table = Columns::new(&heads);
    let mut notes: Vec<String> = problem.into_iter().collect();
    for volume in &volumes {
        table.row(vec![
            printable(&volume.place),
            volume.start.to_string(),
            Human(volume.length).to_string(),
            volume.free.map_or_else(|| "?".to_owned(), |bytes| Human(bytes).to_string()),
            volume.contents.clone().unwrap_or_else(|| "-".to_owned()),
            printable(volume.label.as_deref().or(volume.partition_name.as_deref()).unwrap_or_default()),
        ]);
        let why = volume.free_unknown_because.as_ref().filter(|why| !notes.iter().any(|note| note.ends_with(*why)));
        notes.extend(why.map(|why| format!("{}: {why}", volume.place)));
    }
    if !volumes.is_empty() {
        writeln!(context.out)?;
        table.within(context.style.limit()).write(&mut context.out)?;
    }
    if !notes.is_empty() {
        writeln!(context.out)?;
    }
    for note in notes {
        writeln!(context.text(), "{}", printable(&note))?;
    }
    Ok(exit::OK)
}
