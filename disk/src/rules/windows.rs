//! What Windows and Hyper-V take: `Mount-VHD`, a disk of a virtual machine.
//!
//! Sources: `CREATE_VIRTUAL_DISK_PARAMETERS` (block and sector sizes); the errors of the virtual
//! disk service in `winerror.h` (0xC03A....); "Hyper-V Support for Large Sector Disks"; MS-VHDX
//! 1.5 and 2.2 (sizes) and 2.6.2.6 (paths of a parent).
//!
//! Whether a file is compressed or encrypted by NTFS cannot be seen from Linux, and has no rule.

use super::{
    facts::{ChainFacts, ImageFacts},
    gpt,
    rule::{Rule, Verdict},
};
use diskwright_format::vhd::MAX_DYNAMIC_BYTES;
use diskwright_image::{DiskType, Format, LogState, ParentLink, probe::known};
use diskwright_store::Files;

/// Largest VHDX, by MS-VHDX 1.5.
const MAX_VHDX_BYTES: u64 = 64 << 40;
/// Smallest VHD that Windows attaches.
const MIN_VHD_BYTES: u64 = 3 << 20;
/// Block sizes of a VHD that is not fixed.
const VHD_BLOCKS_BYTES: [u64; 2] = [512 << 10, 2 << 20];
/// Alignment of payload that storage with sectors of 4 KiB needs to be fast.
const LARGE_SECTOR_BYTES: u32 = 4096;

pub(super) static RULES: &[Rule] = &[
    Rule { name: "format", expected: "VHD or VHDX", judge: |facts| each(facts, format) },
    Rule {
        name: "extension",
        expected: "that of the format: .vhd, .avhd; .vhdx, .avhdx",
        judge: |facts| each(facts, extension),
    },
    Rule { name: "size", expected: "VHD: 3 MiB to 2040 GiB; VHDX: to 64 TiB", judge: |facts| each(facts, size) },
    Rule {
        name: "block-size",
        expected: "VHD: 512 KiB or 2 MiB; VHDX: 1 to 256 MiB",
        judge: |facts| each(facts, block_size),
    },
    Rule {
        name: "sector-size",
        expected: "512 bytes; VHDX also 4096, but not to start a machine of generation 1",
        judge: |facts| each(facts, sector_size),
    },
    Rule {
        name: "alignment",
        expected: "any; data at multiples of 4096 bytes are fast on storage with sectors of 4 KiB",
        judge: |facts| each(facts, alignment),
    },
    Rule {
        name: "remarks",
        expected: "nothing odd in footers, headers and tables",
        judge: |facts| each(facts, remarks),
    },
    Rule { name: "log", expected: "an empty log", judge: |facts| each(facts, log) },
    Rule { name: "sparse-file", expected: "no holes in a file on NTFS", judge: |facts| each(facts, sparse_file) },
    Rule { name: "chain", expected: "each parent at hand, with the identity that its child names", judge: chain },
    Rule {
        name: "parent-path",
        expected: "a relative path to the parent, or an absolute one of Windows",
        judge: |facts| each(facts, parent_path),
    },
    Rule {
        name: "parent-time",
        expected: "VHD: the parent's file last changed when its child recorded it",
        judge: |facts| each(facts, parent_time),
    },
    Rule { name: "parent-size", expected: "VHD: a child as large as its parent", judge: parent_size },
    Rule { name: "gpt-end", expected: "the second copy of a GPT at the end of the disk", judge: gpt::end },
];

/// The verdict on the whole chain: that on the first image for which the rule is broken, else that
/// on the first for which it holds, else that on the top.
fn each(facts: &ChainFacts, judge: fn(&ImageFacts) -> Verdict) -> Verdict {
    let mut best: Option<Verdict> = None;
    for (depth, image) in facts.images.iter().enumerate() {
        match judge(image) {
            Verdict::Broken { found, remedy } if depth > 0 => {
                return Verdict::broken(format!("{}: {found}", image.path.display()), remedy);
            }
            broken @ Verdict::Broken { .. } => return broken,
            holds @ Verdict::Holds { .. } if !matches!(best, Some(Verdict::Holds { .. })) => best = Some(holds),
            other => drop(best.get_or_insert(other)),
        }
    }
    best.unwrap_or_else(|| Verdict::not_applicable("there is no image"))
}

fn format(image: &ImageFacts) -> Verdict {
    let format = image.info.format;
    Verdict::either(matches!(format, Format::Vhd | Format::Vhdx), format, "`convert` it to a .vhdx")
}

fn extension(image: &ImageFacts) -> Verdict {
    let format = image.info.format;
    if !matches!(format, Format::Vhd | Format::Vhdx) {
        return Verdict::not_applicable("it is not a VHD or VHDX");
    }
    // Of an object the version follows.
    if Files::has_scheme(&image.path) {
        return Verdict::not_applicable("it is not a file of this machine");
    }
    let found = image.path.extension().map_or_else(|| "none".into(), |found| format!(".{}", found.to_string_lossy()));
    let is_right = known::by_extension(&image.path).and_then(|known| known.format) == Some(format);
    let remedy = format!("rename it to .{format}, and `reconnect` its children if it has any");
    Verdict::either(is_right, format!("{found} of a {format}"), &remedy)
}

fn size(image: &ImageFacts) -> Verdict {
    let bytes = image.size_bytes;
    let (sizes, remedy) = match image.info.format {
        Format::Vhd if bytes < MIN_VHD_BYTES => (MIN_VHD_BYTES..=MAX_DYNAMIC_BYTES, "`resize` it to 3 MiB"),
        Format::Vhd => (MIN_VHD_BYTES..=MAX_DYNAMIC_BYTES, "`convert` it to a .vhdx"),
        Format::Vhdx => (1..=MAX_VHDX_BYTES, "make it smaller with `resize`"),
        _ => return Verdict::not_applicable("it is not a VHD or VHDX"),
    };
    Verdict::either(sizes.contains(&bytes), format!("{bytes} bytes"), remedy)
}

fn block_size(image: &ImageFacts) -> Verdict {
    let bytes = image.info.block_bytes;
    let is_right = match image.info.format {
        _ if !image.info.has_blocks => return Verdict::not_applicable("it has no blocks"),
        Format::Vhdx => bytes.is_power_of_two() && (1 << 20..=256 << 20).contains(&bytes),
        _ => VHD_BLOCKS_BYTES.contains(&bytes),
    };
    let remedy = "`convert` it with `CreateRequest::block_bytes` = 2097152";
    Verdict::either(is_right, format!("{bytes} bytes"), remedy)
}

fn sector_size(image: &ImageFacts) -> Verdict {
    let bytes = image.info.logical_sector_bytes;
    let is_right = image.info.format.driver().logical_sectors_bytes.contains(&bytes);
    Verdict::either(is_right, format!("{bytes} bytes"), "`convert` it to a .vhdx")
}

fn alignment(image: &ImageFacts) -> Verdict {
    let bytes = image.info.payload_alignment_bytes;
    let slow = if bytes < LARGE_SECTOR_BYTES { "; a copy by `convert` is aligned" } else { "" };
    Verdict::holds(format!("multiples of {bytes} bytes{slow}"))
}

fn remarks(image: &ImageFacts) -> Verdict {
    if image.info.format == Format::Raw {
        return Verdict::not_applicable("a raw disk has none");
    }
    let remarks = &image.info.remarks;
    if remarks.is_empty() {
        return Verdict::holds("nothing odd");
    }
    Verdict::broken(remarks.join(" "), "`check` shows what is wrong, and can repair most of it")
}

fn log(image: &ImageFacts) -> Verdict {
    match image.info.log {
        LogState::None => Verdict::not_applicable("the format has no log"),
        LogState::Clean => Verdict::holds("empty"),
        LogState::Replayed { entries } => Verdict::broken(
            format!("{entries} entries: Windows cannot replay them where it may not write, as in a parent"),
            "repair it with `check`, which replays them",
        ),
    }
}

fn sparse_file(image: &ImageFacts) -> Verdict {
    let (Some(file_bytes), Some(allocated_bytes)) = (image.file_bytes, image.allocated_bytes) else {
        return Verdict::not_applicable("the space of the file is not known");
    };
    let has_holes = allocated_bytes < file_bytes;
    match (has_holes, image.is_on_ntfs) {
        (false, _) => Verdict::holds("no holes"),
        (true, Some(true)) => Verdict::broken(
            format!("{allocated_bytes} of {file_bytes} bytes have space: Windows refuses it (0xC03A001A)"),
            "`convert` it with `CreateRequest::preallocate`",
        ),
        (true, _) => Verdict::not_applicable("it is not on NTFS; copy it there with a program that makes no holes"),
    }
}

fn chain(facts: &ChainFacts) -> Verdict {
    match (&facts.broken_link, facts.images.len()) {
        (Some(why), _) => Verdict::broken(why, "`reconnect` finds lost parents by their identity"),
        (None, 0 | 1) => Verdict::not_applicable("it has no parent"),
        (None, count) => Verdict::holds(format!("a chain of {count} disks")),
    }
}

fn parent_path(image: &ImageFacts) -> Verdict {
    let Some(link) = &image.parent else { return Verdict::not_applicable("it has no parent") };
    match known_to_windows(link) {
        Some(path) => Verdict::holds(path),
        None => {
            let paths = [&link.relative_path, &link.volume_path, &link.absolute_path, &link.name];
            let found: Vec<&str> = paths.into_iter().flatten().map(String::as_str).collect();
            Verdict::broken(
                if found.is_empty() { "no path".to_owned() } else { found.join(", ") },
                "put both into one folder, and `reconnect` it there: that writes a relative path",
            )
        }
    }
}

/// The first path by which Windows can find the parent.
fn known_to_windows(link: &ParentLink) -> Option<&str> {
    let is_relative = |path: &&str| !path.is_empty() && !path.contains(['/', ':']) && !path.starts_with('\\');
    let is_absolute = |path: &&str| {
        let bytes = path.as_bytes();
        let has_drive = bytes.first().is_some_and(u8::is_ascii_alphabetic) && bytes[1..].starts_with(br":\");
        has_drive || (path.starts_with(r"\\") && path.len() > 2)
    };
    let relative = link.relative_path.as_deref().filter(is_relative);
    let volume = link.volume_path.as_deref().filter(is_absolute);
    relative.or(volume).or(link.absolute_path.as_deref().filter(is_absolute))
}

fn parent_time(image: &ImageFacts) -> Verdict {
    let recorded = image.parent.as_ref().and_then(|link| link.modified_seconds).is_some_and(|seconds| seconds != 0);
    match &image.parent_time {
        _ if !recorded => Verdict::not_applicable("no time is recorded"),
        None => Verdict::holds("the same time"),
        Some(why) => Verdict::broken(
            format!("{why} (0xC03A000F)"),
            "if the parent's contents are the same, `reconnect` the child to it: that records its time",
        ),
    }
}

fn parent_size(facts: &ChainFacts) -> Verdict {
    let is_child =
        |image: &ImageFacts| (image.info.format, image.info.disk_type) == (Format::Vhd, DiskType::Differencing);
    if facts.images.len() < 2 || !is_child(&facts.images[0]) {
        return Verdict::not_applicable("it is not a VHD whose parent was opened");
    }
    let odd = facts.images.windows(2).find(|pair| pair[0].size_bytes != pair[1].size_bytes);
    match odd {
        None => Verdict::holds(format!("{} bytes", facts.images[0].size_bytes)),
        Some(pair) => Verdict::broken(
            format!(
                "{} has {} bytes, its parent {} (0xC03A0017)",
                pair[0].path.display(),
                pair[0].size_bytes,
                pair[1].size_bytes
            ),
            "`convert` the chain to one disk",
        ),
    }
}
