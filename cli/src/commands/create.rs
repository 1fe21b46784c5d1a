//! `diskwright create FILE`: creates a disk.

use crate::{
    context::Context,
    describe::{Description, printable},
    exit::{self, Outcome},
    json::{self, Document},
    ntfs,
    options::{FormatArg, TypeArg},
    sizes::{self, Human},
    switches,
};
use clap::Args;
use diskwright_disk::{ChainScope, CreateRequest, Disk, OpenOptions, require_file, size_note};
use schemars::JsonSchema;
use serde::Serialize;
use std::{io::Write, path::PathBuf};

/// Arguments of `create`.
#[derive(Debug, Args)]
#[command(after_help = "\
The format comes from the extension (.vhdx .avhdx .vhd .avhd .vmdk .qcow2 .vdi .raw .img .bin .dd) unless --format says it. FILE must not exist. A disk with a \
parent is a differencing disk: it reads as its parent, and stores only what is written to it. From now on the \
parent must not change.

A VMDK over a --device moves no data: reads and writes go to the device. It is recorded by a name that stays (/dev/disk/by-id) with its \
serial number, world wide name and size, and refused when another device has that name. rdm-virtual and rdm-physical are the raw device \
mappings of ESX; only the first takes snapshots. SCSI pass-through is not supported.

A fixed disk or a raw file has its whole length at once, but takes space only where something is written, unless --preallocate is \
given. Windows does not attach a file that is sparse on NTFS (0xC03A001A): a copy by most programs has no holes; made directly on NTFS, \
use --preallocate.

EXAMPLES
  diskwright create disk.vhdx --size 40G
  diskwright create disk.vhd --size 127G --type fixed --preallocate
  diskwright create child.vhdx --parent golden.vhdx
  diskwright create big.vhdx --size 64T --block-size 32M --sector-size 4096
  diskwright create disk.vmdk --size 40G
  diskwright create disk.vdi --size 40G
  diskwright create disk.qcow2 --size 40G
  diskwright create split.vmdk --size 40G --subformat twoGbMaxExtentFlat
  diskwright create esx.vmdk --size 40G --subformat thin
  diskwright create x.vmdk --device /dev/sdb --subformat device --allow-devices
  diskwright create disk.bin --size 1G --format raw --preallocate")]
pub struct CreateArgs {
    /// The file to create.
    file: PathBuf,
    /// Virtual size. [default: the parent's, with --parent]
    #[arg(long, short, value_name = "SIZE", value_parser = sizes::parse, required_unless_present_any = ["parent", "device"])]
    size: Option<u64>,
    /// How the disk allocates its space. [default: dynamic; raw: fixed; with --parent:
    /// differencing]
    #[arg(long = "type", short = 't', value_enum, value_name = "TYPE")]
    disk_type: Option<TypeArg>,
    /// The kind of VMDK, by qemu-img's names: monolithicSparse, monolithicFlat,
    /// twoGbMaxExtentSparse or twoGbMaxExtentFlat; of ESX, by vmkfstools' names: thin, zeroedthick
    /// or eagerzeroedthick; with --device: device, partitions, rdm-virtual or rdm-physical.
    /// [default: monolithicSparse; of a fixed disk monolithicFlat]
    #[arg(long, value_name = "SUBFORMAT")]
    subformat: Option<String>,
    /// The block device that a VMDK maps; needs --allow-devices.
    #[arg(long, value_name = "DEVICE", requires = "subformat", conflicts_with_all = ["parent", "size"])]
    device: Option<PathBuf>,
    /// The partitions of the device that the disk shows, for --subformat partitions.
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', requires = "device")]
    partitions: Vec<u32>,
    /// The parent of a differencing disk.
    #[arg(long, short, value_name = "FILE")]
    parent: Option<PathBuf>,
    /// Size of a payload block, the unit of allocation. [default: 2M, or the parent's]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_u32)]
    block_size: Option<u32>,
    /// Logical sector size: 512 or 4096. [default: 512, or the parent's]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_u32)]
    sector_size: Option<u32>,
    /// Physical sector size: 512 or 4096. [default: 4096 (VHD: 512), or the parent's]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_u32)]
    physical_sector_size: Option<u32>,
    /// Reserve the space of the whole disk now, so that later writes cannot fail for lack of it.
    #[arg(long)]
    preallocate: bool,
}

/// What `create --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    #[serde(flatten)]
    made: Description,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.create/1";
}

/// Creates the disk, and prints what was made.
pub fn run(context: &mut Context, args: &CreateArgs) -> Outcome {
    require_file(&args.file, "create")?;
    let request = CreateRequest {
        size_bytes: args.size,
        format: context.global.format.map(FormatArg::format),
        disk_type: args.disk_type.map(TypeArg::disk_type),
        subformat: args.subformat.clone(),
        device: args.device.clone(),
        partitions: args.partitions.clone(),
        parent: args.parent.clone(),
        block_bytes: args.block_size,
        logical_sector_bytes: args.sector_size,
        physical_sector_bytes: args.physical_sector_size,
        preallocate: args.preallocate,
        parents: context.global.parents(),
        ..CreateRequest::default()
    };
    let mut warnings = diskwright_disk::create(&args.file, &request)?;
    if args.disk_type == Some(TypeArg::Fixed) && !args.preallocate {
        warnings.extend(ntfs::note(&args.file));
    }
    warnings.iter().for_each(|warning| context.warn(warning));
    if context.global.quiet && !context.global.json {
        return Ok(exit::OK);
    }
    let options = OpenOptions { scope: ChainScope::Top, ..context.global.open_options(false) };
    let disk = Disk::open(&args.file, &options)?;
    let layers = disk.layers();
    let Some(layer) = layers.first() else { return Ok(exit::OK) };
    let mut made = Description::from(layer);
    if let Some(note) = size_note(&args.file, layer.image.info()) {
        context.warn(&note);
        made.remarks.push(note);
    }
    if context.global.json {
        context.print_json(&Report { made, warnings: switches::all_with_switches(&warnings) })?;
    } else {
        let blocks = made.block_size.map(|bytes| format!(", blocks of {}", Human(bytes))).unwrap_or_default();
        let file = printable(&json::path(&args.file));
        writeln!(context.text(), "{file}: {}, {}{blocks}", made.kind(), Human(made.virtual_size))?;
    }
    Ok(exit::OK)
}
