//! What ESXi, Workstation, VirtualBox and importers of OVF take as a disk.
//!
//! Sources: "Virtual Disk Format 5.0" (kinds of disks); VMware's knowledge base about "Object type
//! requires hosted I/O" (ESXi opens only kinds of VMFS); vSphere's configuration maximums (62 TB);
//! Workstation's user guide (8 TB); VirtualBox's manual, "Disk image files", and its
//! `src/VBox/Storage` (no COWD and no SESPARSE, parents by UUIDs of its own, VHDX is only read);
//! DSP0243 and the importers of both (streamOptimized).

use super::{
    facts::{ChainFacts, ImageFacts},
    gpt,
    rule::{Rule, Verdict},
};
use diskwright_image::{DiskType, Format};

/// Without raw device mappings: those that can be opened here have a mapping file of ours, and ESXi
/// needs its own.
const ESXI_KINDS: &[&str] = &["vmfs", "vmfsSparse", "seSparse"];
const WORKSTATION_KINDS: &[&str] = &[
    "monolithicSparse",
    "monolithicFlat",
    "twoGbMaxExtentSparse",
    "twoGbMaxExtentFlat",
    "custom",
    "fullDevice",
    "partitionedDevice",
];
const VIRTUALBOX_KINDS: &[&str] = &[
    "monolithicSparse",
    "monolithicFlat",
    "twoGbMaxExtentSparse",
    "twoGbMaxExtentFlat",
    "streamOptimized",
    "vmfs",
    "custom",
    "fullDevice",
    "partitionedDevice",
];
const OVF_KINDS: &[&str] = &["streamOptimized"];

/// Largest virtual size of a disk, in bytes.
const ESXI_MAX_BYTES: u64 = 62 << 40;
const WORKSTATION_MAX_BYTES: u64 = 8 << 40;

const TO_VMFS: &str = "`convert` it to a file .ova and import that: ESXi makes a disk of VMFS from it";
const TO_HOSTED: &str = "`convert` it to a file .ova and import that";
const TO_VIRTUALBOX: &str =
    "`convert` it to a file .vhd, or to a .vmdk with `CreateRequest::subformat` = streamOptimized";
const TO_OVA: &str = "`convert` it to a file .ova";
const DIVIDE: &str = "divide what is on it among several disks";

const SECTORS: Rule = Rule { name: "sectors", expected: "sectors of 512 bytes", judge: sectors };
const GPT_END: Rule =
    Rule { name: "gpt-end", expected: "the second copy of a GPT at the end of the disk", judge: gpt::end };

pub(super) static ESXI: &[Rule] = &[
    Rule { name: "format", expected: "VMDK", judge: |facts| format(facts, TO_VMFS) },
    Rule {
        name: "kind",
        expected: "vmfs, vmfsSparse or seSparse, all along the chain; a raw device mapping is made by ESXi itself (vmkfstools -r, -z)",
        judge: |facts| kind(facts, ESXI_KINDS, TO_VMFS),
    },
    Rule { name: "size", expected: "at most 62 TiB", judge: |facts| size(facts, ESXI_MAX_BYTES) },
    SECTORS,
    Rule { name: "chain", expected: "all parents", judge: whole_chain },
    GPT_END,
];

pub(super) static WORKSTATION: &[Rule] = &[
    Rule { name: "format", expected: "VMDK", judge: |facts| format(facts, TO_HOSTED) },
    Rule {
        name: "kind",
        expected: "a hosted kind (monolithic, twoGbMaxExtent, a device), all along the chain; streamOptimized is only imported, as OVF",
        judge: |facts| kind(facts, WORKSTATION_KINDS, TO_HOSTED),
    },
    Rule { name: "size", expected: "at most 8 TiB", judge: |facts| size(facts, WORKSTATION_MAX_BYTES) },
    SECTORS,
    Rule { name: "chain", expected: "all parents", judge: whole_chain },
    GPT_END,
];

pub(super) static VIRTUALBOX: &[Rule] = &[
    Rule { name: "format", expected: "VMDK or VHD", judge: virtualbox_format },
    Rule {
        name: "kind",
        expected: "a VMDK other than vmfsSparse, seSparse and raw device mappings",
        judge: |facts| kind(facts, VIRTUALBOX_KINDS, TO_VIRTUALBOX),
    },
    SECTORS,
    Rule {
        name: "single",
        expected: "a VMDK without a parent: VirtualBox finds parents only by identities of its own",
        judge: |facts| single(facts, TO_VIRTUALBOX),
    },
    GPT_END,
];

pub(super) static OVF: &[Rule] = &[
    Rule { name: "format", expected: "VMDK", judge: |facts| format(facts, TO_OVA) },
    Rule { name: "kind", expected: "streamOptimized", judge: |facts| kind(facts, OVF_KINDS, TO_OVA) },
    Rule { name: "size", expected: "at most 62 TiB", judge: |facts| size(facts, ESXI_MAX_BYTES) },
    SECTORS,
    Rule { name: "single", expected: "a disk without a parent", judge: |facts| single(facts, TO_OVA) },
    GPT_END,
];

fn of_top(facts: &ChainFacts, judge: impl FnOnce(&ImageFacts) -> Verdict) -> Verdict {
    facts.top().map_or_else(|| Verdict::not_applicable("there is no image"), judge)
}

fn is_vmdk(image: &ImageFacts) -> bool {
    image.info.format == Format::Vmdk
}

fn format(facts: &ChainFacts, remedy: &str) -> Verdict {
    of_top(facts, |image| Verdict::either(is_vmdk(image), image.info.format, remedy))
}

fn virtualbox_format(facts: &ChainFacts) -> Verdict {
    of_top(facts, |image| {
        let is_taken = is_vmdk(image) || image.info.format == Format::Vhd;
        Verdict::either(is_taken, image.info.format, TO_VIRTUALBOX)
    })
}

/// Whether every image of the chain has one of these kinds.
fn kind(facts: &ChainFacts, taken: &[&str], remedy: &str) -> Verdict {
    of_top(facts, |top| {
        if !is_vmdk(top) {
            return Verdict::not_applicable("it is not a VMDK");
        }
        let kind_of = |image: &ImageFacts| image.kind.clone().unwrap_or_else(|| "an unknown kind".into());
        let is_taken = |image: &&ImageFacts| taken.iter().any(|kind| kind.eq_ignore_ascii_case(&kind_of(image)));
        match facts.images.iter().find(|image| !is_taken(image)) {
            None => Verdict::holds(kind_of(top)),
            Some(image) if std::ptr::eq(image, top) => Verdict::broken(kind_of(top), remedy),
            Some(image) => {
                Verdict::broken(format!("{} in its parent {}", kind_of(image), image.path.display()), remedy)
            }
        }
    })
}

fn size(facts: &ChainFacts, max_bytes: u64) -> Verdict {
    of_top(facts, |image| Verdict::either(image.size_bytes <= max_bytes, format!("{} bytes", image.size_bytes), DIVIDE))
}

fn sectors(facts: &ChainFacts) -> Verdict {
    of_top(facts, |image| {
        let bytes = image.info.logical_sector_bytes;
        let remedy = "copy the partitions onto a disk with sectors of 512 bytes, and convert that";
        Verdict::either(bytes == 512, format!("{bytes} bytes"), remedy)
    })
}

fn whole_chain(facts: &ChainFacts) -> Verdict {
    of_top(facts, |image| match &facts.broken_link {
        Some(why) => Verdict::broken(why, "put the parent back, or `reconnect` the image to it"),
        None if image.info.disk_type != DiskType::Differencing => Verdict::not_applicable("it has no parent"),
        None => Verdict::holds(format!("{} images", facts.images.len())),
    })
}

fn single(facts: &ChainFacts, remedy: &str) -> Verdict {
    of_top(facts, |image| {
        if !is_vmdk(image) {
            return Verdict::not_applicable("it is not a VMDK");
        }
        let has_parent = image.info.disk_type == DiskType::Differencing;
        Verdict::either(!has_parent, if has_parent { "a parent" } else { "no parent" }, remedy)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{Destination, Judgement};
    use diskwright_image::ImageInfo;

    fn facts(format: Format, kind: Option<&str>, sector_bytes: u32) -> ChainFacts {
        let info = ImageInfo {
            logical_sector_bytes: sector_bytes,
            physical_sector_bytes: 4096,
            ..ImageInfo::new(format, DiskType::Dynamic, 9 << 40, 65536)
        };
        let image = ImageFacts {
            path: "x.vmdk".into(),
            size_bytes: info.size_bytes,
            info,
            kind: kind.map(str::to_owned),
            files: 1,
            file_bytes: None,
            allocated_bytes: None,
            is_on_ntfs: None,
            parent: None,
            parent_time: None,
        };
        ChainFacts { images: vec![image], broken_link: None, table: None }
    }

    fn broken(place: Destination, facts: &ChainFacts) -> Vec<&'static str> {
        place.judge(facts).iter().filter(|judged| judged.is_broken()).map(|Judgement { rule, .. }| rule.name).collect()
    }

    #[test]
    fn a_vhdx_is_refused_everywhere_and_a_vhd_taken_by_virtualbox() {
        let vhdx = facts(Format::Vhdx, None, 4096);
        assert_eq!(broken(Destination::Esxi, &vhdx), ["format", "sectors"]);
        assert_eq!(broken(Destination::Workstation, &vhdx), ["format", "size", "sectors"]);
        assert_eq!(broken(Destination::VirtualBox, &vhdx), ["format", "sectors"]);
        assert_eq!(broken(Destination::Ovf, &vhdx), ["format", "sectors"]);
        let vhd = facts(Format::Vhd, None, 512);
        assert!(broken(Destination::VirtualBox, &vhd).is_empty());
        let judged = Destination::Esxi.judge(&vhd);
        assert!(matches!(&judged[0].verdict, Verdict::Broken { remedy, .. } if remedy.contains("VMFS")));
    }
}
