//! What Azure takes as a managed disk.
//!
//! Sources: "Prepare a Windows VHD or VHDX to upload to Azure" and "Information for Linux
//! distributions" (fixed VHD, whole MiB, generation 1 to 2 TiB); `uploadSizeBytes` of the REST
//! interface `Microsoft.Compute/disks` (20 MiB to 32 TiB, each with a footer of 512 bytes);
//! "Introduction to Azure managed disks" (4,095 GiB for a disk with an operating system).
//!
//! The CHS geometry does not matter to Azure, which takes the size of the blob. But programs that
//! take the size from the geometry (qemu-img without `force_size`) write images of odd sizes, and
//! such an image has two sizes: `one-size` and `size-unit` find both.

use super::{
    facts::{ChainFacts, ImageFacts},
    gpt,
    rule::{Rule, Verdict},
};
use diskwright_image::{DiskType, Format};
use diskwright_volume::Boot;

/// The size of the disk is a multiple of this.
pub(crate) const UNIT_BYTES: u64 = 1 << 20;
/// Smallest virtual size, in bytes.
pub(crate) const MIN_BYTES: u64 = 20 << 20;
/// Largest virtual size, in bytes.
pub(crate) const MAX_BYTES: u64 = 32 << 40;
/// Largest disk from which a machine of generation 2 starts.
const MAX_SYSTEM_BYTES: u64 = 4095 << 30;
/// Largest disk from which a machine of generation 1 starts.
const MAX_SYSTEM_BIOS_BYTES: u64 = 2 << 40;
/// Length of the footer.
const FOOTER_BYTES: u64 = 512;

const CONVERT: &str = "`convert` it with `ConvertOptions::azure`";

pub(super) static RULES: &[Rule] = &[
    Rule { name: "format", expected: "VHD", judge: |facts| of_top(facts, format) },
    Rule { name: "extension", expected: ".vhd", judge: |facts| of_top(facts, extension) },
    Rule { name: "type", expected: "fixed", judge: |facts| of_top(facts, disk_type) },
    Rule { name: "size-unit", expected: "a whole number of MiB", judge: |facts| of_top(facts, size_unit) },
    Rule { name: "size", expected: "20 MiB to 32 TiB", judge: |facts| of_top(facts, size) },
    Rule {
        name: "system-size",
        expected: "at most 4095 GiB to start a machine from, and 2 TiB for generation 1 (BIOS)",
        judge: system_size,
    },
    Rule {
        name: "one-size",
        expected: "a file that is 512 bytes longer than the disk",
        judge: |facts| of_top(facts, one_size),
    },
    Rule { name: "gpt-end", expected: "the second copy of a GPT at the end of the disk", judge: gpt::end },
];

fn of_top(facts: &ChainFacts, judge: fn(&ImageFacts) -> Verdict) -> Verdict {
    facts.top().map_or_else(|| Verdict::not_applicable("there is no image"), judge)
}

fn format(image: &ImageFacts) -> Verdict {
    Verdict::either(image.info.format == Format::Vhd, image.info.format, CONVERT)
}

fn extension(image: &ImageFacts) -> Verdict {
    if image.info.format != Format::Vhd {
        return Verdict::not_applicable("it is not a VHD");
    }
    let extension = image.path.extension().map(|extension| extension.to_string_lossy().into_owned());
    let is_right = extension.as_ref().is_some_and(|extension| extension.eq_ignore_ascii_case("vhd"));
    let found = extension.map_or_else(|| "none".into(), |extension| format!(".{extension}"));
    Verdict::either(is_right, found, "give the file a name that ends in .vhd")
}

fn disk_type(image: &ImageFacts) -> Verdict {
    Verdict::either(image.info.disk_type == DiskType::Fixed, image.info.disk_type, CONVERT)
}

fn size_unit(image: &ImageFacts) -> Verdict {
    let bytes = image.size_bytes;
    let remedy = format!("{CONVERT}, or `resize` it to {} bytes", bytes.next_multiple_of(UNIT_BYTES));
    Verdict::either(bytes.is_multiple_of(UNIT_BYTES), format!("{bytes} bytes"), &remedy)
}

fn size(image: &ImageFacts) -> Verdict {
    let bytes = image.size_bytes;
    let remedy = if bytes < MIN_BYTES { CONVERT } else { "divide what is on it among several disks" };
    Verdict::either((MIN_BYTES..=MAX_BYTES).contains(&bytes), format!("{bytes} bytes"), remedy)
}

fn system_size(facts: &ChainFacts) -> Verdict {
    let (Some(image), Some(table)) = (facts.top(), &facts.table) else {
        return Verdict::not_applicable("the disk cannot be read");
    };
    let (most_bytes, by) = match table.boot {
        None => return Verdict::not_applicable("no partition is marked to start a machine from"),
        Some(Boot::Bios) => (MAX_SYSTEM_BIOS_BYTES, "BIOS"),
        Some(Boot::Uefi) => (MAX_SYSTEM_BYTES, "UEFI"),
    };
    let found = format!("starts by {by}, {} bytes", image.size_bytes);
    let remedy = format!("make it smaller with `resize`, to at most {most_bytes} bytes, and put data on another disk");
    Verdict::either(image.size_bytes <= most_bytes, found, &remedy)
}

fn one_size(image: &ImageFacts) -> Verdict {
    if (image.info.format, image.info.disk_type) != (Format::Vhd, DiskType::Fixed) {
        return Verdict::not_applicable("it is not a fixed VHD");
    }
    let Some(file_bytes) = image.file_bytes else { return Verdict::not_applicable("the length is not known") };
    let found = format!("a disk of {} bytes in a file of {file_bytes}", image.size_bytes);
    Verdict::either(image.size_bytes.checked_add(FOOTER_BYTES) == Some(file_bytes), found, CONVERT)
}
