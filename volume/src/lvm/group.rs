//! A volume group: which logical volumes are linear, and where they lie.

use super::text::Value;
use crate::{read::Extent, reason::LeftAlone};
use std::ops::Range;

/// The unit of LVM's figures.
pub(super) const SECTOR_BYTES: u64 = 512;
/// Maximum number of pieces of one logical volume.
const SEGMENTS_MAX: u64 = 256;

/// A logical volume: its extents on the physical volume, or why it is left alone.
#[derive(Debug)]
pub(crate) struct Logical {
    pub(crate) group: String,
    pub(crate) name: String,
    pub(crate) extents: Result<Vec<Extent>, LeftAlone>,
}

/// The physical volume, as the group describes it.
struct Physical<'a> {
    /// Its name within the text.
    name: &'a str,
    extent_bytes: u64,
    /// First byte of extent 0.
    start_bytes: u64,
    extents: u64,
}

/// The logical volumes of the only group in `root`. `areas` are the metadata areas.
pub(super) fn logical_volumes(
    root: &Value,
    uuid: &[u8; 32],
    areas: &[Range<u64>],
    size_bytes: u64,
) -> Result<Vec<Logical>, LeftAlone> {
    let (group_name, group) = only_group(root)?;
    let physical = physical_of(group_name, group, uuid, areas, size_bytes)?;
    let volumes = group.get("logical_volumes").map_or(&[][..], Value::fields);
    let mut found: Vec<Logical> = volumes
        .iter()
        .map(|(name, volume)| Logical {
            group: group_name.clone(),
            name: name.clone(),
            extents: linear(name, volume, volumes, &physical),
        })
        .collect();
    refuse_overlaps(&mut found);
    Ok(found)
}

/// First byte after the extents of the physical volume, and after the size that LVM gives it.
pub(super) fn end_bytes(
    root: &Value,
    uuid: &[u8; 32],
    areas: &[Range<u64>],
    size_bytes: u64,
) -> Result<u64, LeftAlone> {
    let (name, group) = only_group(root)?;
    let physical = physical_of(name, group, uuid, areas, size_bytes)?;
    let fields = group.get("physical_volumes").map_or(&[][..], Value::fields);
    let sectors = fields.first().and_then(|(_, volume)| volume.number("dev_size")).unwrap_or(0);
    let device_end = sectors.saturating_mul(SECTOR_BYTES);
    Ok(device_end.max(physical.start_bytes + physical.extents * physical.extent_bytes))
}

/// The group, if it is the only one.
fn only_group(root: &Value) -> Result<(&String, &Value), LeftAlone> {
    let mut groups = root.fields().iter().filter(|(_, value)| matches!(value, Value::Section(_)));
    match (groups.next(), groups.next()) {
        (Some((name, group)), None) => Ok((name, group)),
        _ => Err(LeftAlone::damaged("the metadata of LVM has no group, or two")),
    }
}

/// The physical volume of a group that no other system uses.
fn physical_of<'a>(
    name: &str,
    group: &'a Value,
    uuid: &[u8; 32],
    areas: &[Range<u64>],
    size_bytes: u64,
) -> Result<Physical<'a>, LeftAlone> {
    if group.get("lock_type").is_some() || group.lists("status", "CLUSTERED") || group.lists("status", "EXPORTED") {
        return Err(LeftAlone::unsupported(format!("the group {name} of LVM, which other systems share,")));
    }
    Physical::find(group, uuid, areas, size_bytes)
}

impl<'a> Physical<'a> {
    fn find(group: &'a Value, uuid: &[u8; 32], areas: &[Range<u64>], size_bytes: u64) -> Result<Self, LeftAlone> {
        let wrong = |what: &str| LeftAlone::damaged(format!("the group of LVM {what}"));
        let all = group.get("physical_volumes").map_or(&[][..], Value::fields);
        let [(name, volume)] = all else {
            return Err(LeftAlone::unsupported(format!("a group of LVM with {} physical volumes", all.len())));
        };
        let id: Vec<u8> = volume.text("id").unwrap_or_default().bytes().filter(|byte| *byte != b'-').collect();
        if id != uuid {
            return Err(wrong("does not name this physical volume"));
        }
        let bytes = |sectors: Option<u64>| sectors.and_then(|sectors| sectors.checked_mul(SECTOR_BYTES));
        let (Some(extent_bytes), Some(start_bytes), Some(extents)) =
            (bytes(group.number("extent_size")), bytes(volume.number("pe_start")), volume.number("pe_count"))
        else {
            return Err(wrong("names no size of extents"));
        };
        let end = extents.checked_mul(extent_bytes).and_then(|len| len.checked_add(start_bytes));
        if extent_bytes == 0 || end.is_none_or(|end| end > size_bytes) {
            return Err(wrong("reaches beyond its physical volume"));
        }
        if areas.iter().any(|area| area.end > start_bytes && end.is_none_or(|end| area.start < end)) {
            return Err(wrong("has extents where its metadata are"));
        }
        Ok(Self { name, extent_bytes, start_bytes, extents })
    }
}

/// The extents of a logical volume, if it is linear and nothing else depends on it.
fn linear(
    name: &str,
    volume: &Value,
    others: &[(String, Value)],
    physical: &Physical<'_>,
) -> Result<Vec<Extent>, LeftAlone> {
    let wrong = |what: &str| LeftAlone::damaged(format!("the logical volume {name} {what}"));
    let unknown = |what: &str| LeftAlone::unsupported(format!("the logical volume {name}, which {what},"));
    if !volume.lists("status", "VISIBLE") || !volume.lists("status", "WRITE") || volume.lists("status", "PVMOVE") {
        return Err(unknown("is hidden, read-only or being moved"));
    }
    let segments_of = |value: &'_ Value| -> Vec<Value> {
        value
            .fields()
            .iter()
            .filter(|(_, value)| matches!(value, Value::Section(_)))
            .map(|(_, value)| value.clone())
            .collect()
    };
    // A snapshot, a cache or a pool names the volumes that it is made of.
    if others.iter().any(|(other, value)| other != name && segments_of(value).iter().any(|one| one.mentions(name))) {
        return Err(unknown("is a part of another volume, or has snapshots"));
    }
    let mut segments = segments_of(volume);
    let count = segments.len() as u64;
    if count == 0 || count > SEGMENTS_MAX || volume.number("segment_count") != Some(count) {
        return Err(wrong("has not the number of segments that it names"));
    }
    segments.sort_by_key(|segment| segment.number("start_extent"));
    let mut next_extent = 0;
    let mut extents = Vec::new();
    for segment in &segments {
        if segment.text("type") != Some("striped") || segment.number("stripe_count") != Some(1) {
            return Err(unknown("is not linear"));
        }
        let Some(Value::List(stripe)) = segment.get("stripes") else {
            return Err(wrong("has a segment without place"));
        };
        let [Value::Text(on), Value::Number(first)] = stripe.as_slice() else {
            return Err(wrong("has a segment of unknown shape"));
        };
        let (start, len) = (segment.number("start_extent"), segment.number("extent_count").unwrap_or(0));
        if on != physical.name || start != Some(next_extent) || len == 0 {
            return Err(wrong("has segments that do not follow each other, or lie elsewhere"));
        }
        if first.checked_add(len).is_none_or(|end| end > physical.extents) {
            return Err(wrong("reaches beyond the physical volume"));
        }
        extents.push(Extent {
            volume_offset_bytes: next_extent * physical.extent_bytes,
            disk_offset_bytes: physical.start_bytes + first * physical.extent_bytes,
            len_bytes: len * physical.extent_bytes,
        });
        next_extent += len;
        if next_extent > physical.extents {
            return Err(wrong("is larger than the physical volume"));
        }
    }
    Ok(extents)
}

/// Leaves all volumes alone if two of them share an extent.
fn refuse_overlaps(volumes: &mut [Logical]) {
    let mut all: Vec<Extent> =
        volumes.iter().filter_map(|volume| volume.extents.as_ref().ok()).flatten().copied().collect();
    all.sort_by_key(|extent| extent.disk_offset_bytes);
    let overlap = all.windows(2).any(|pair| pair[0].disk_offset_bytes + pair[0].len_bytes > pair[1].disk_offset_bytes);
    if overlap {
        for volume in volumes {
            volume.extents = Err(LeftAlone::damaged("two logical volumes have the same extents"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{lvm::text::parse, reason::ReasonKind};

    const UUID: [u8; 32] = *b"Y37P86at4PxdWtwrbFOwC5UvEZUsbO6M";

    /// A group with these logical volumes.
    fn group(volumes: &str) -> Result<Vec<Logical>, LeftAlone> {
        let text = format!(
            "vg {{ extent_size = 8\nstatus = [\"RESIZEABLE\", \"READ\", \"WRITE\"]\nphysical_volumes {{ pv0 {{ \
             id = \"Y37P86-at4P-xdWt-wrbF-OwC5-UvEZ-UsbO6M\"\npe_start = 2048\npe_count = 100 }} }}\n\
             logical_volumes {{ {volumes} }} }}\nversion = 1\n"
        );
        let area = 4096..1 << 20;
        logical_volumes(&parse(text.as_bytes()).unwrap(), &UUID, &[area], 2 << 20)
    }

    fn volume(name: &str, segments: &[&str]) -> String {
        let body: String =
            segments.iter().enumerate().map(|(index, one)| format!("segment{index} {{ {one} }}\n")).collect();
        let count = segments.len();
        format!("{name} {{ status = [\"READ\", \"WRITE\", \"VISIBLE\"]\nsegment_count = {count}\n{body} }}\n")
    }

    fn linear(start: u64, len: u64, place: u64) -> String {
        format!(
            "start_extent = {start}\nextent_count = {len}\ntype = \"striped\"\nstripe_count = 1\nstripes = [\"pv0\", {place}]"
        )
    }

    fn why(found: &Logical) -> Option<ReasonKind> {
        found.extents.as_ref().err().map(|reason| reason.why)
    }

    #[test]
    fn linear_volumes_have_extents() {
        let found = group(&volume("root", &[&linear(0, 3, 7), &linear(3, 2, 1)])).unwrap();
        let extents = found[0].extents.as_ref().unwrap();
        assert_eq!((extents[0].disk_offset_bytes, extents[0].len_bytes), ((2048 + 7 * 8) * 512, 3 * 4096));
        assert_eq!((extents[1].volume_offset_bytes, extents[1].disk_offset_bytes), (3 * 4096, (2048 + 8) * 512));
    }

    #[test]
    fn what_is_not_only_linear_is_left_alone() {
        let snapshot =
            "start_extent = 0\nextent_count = 3\ntype = \"snapshot\"\norigin = \"root\"\ncow_store = \"cow\"";
        let all = [
            volume("root", &[&linear(0, 3, 7)]),
            volume("cow", &[&linear(0, 3, 20)]),
            volume("snapshot0", &[snapshot]),
        ];
        let found = group(&all.concat()).unwrap();
        assert!(found.iter().all(|volume| why(volume) == Some(ReasonKind::Unsupported)), "{found:?}");
        let two = "start_extent = 0\nextent_count = 4\ntype = \"striped\"\nstripe_count = 2\nstripes = [\"pv0\", 0, \"pv0\", 9]";
        assert_eq!(why(&group(&volume("root", &[two])).unwrap()[0]), Some(ReasonKind::Unsupported));
        let hidden = volume("root", &[&linear(0, 3, 7)]).replace(", \"VISIBLE\"", "");
        assert_eq!(why(&group(&hidden).unwrap()[0]), Some(ReasonKind::Unsupported));
        let moving = linear(0, 3, 0).replace("pv0", "pvmove0");
        assert_eq!(why(&group(&volume("root", &[&moving])).unwrap()[0]), Some(ReasonKind::Damaged));
    }

    #[test]
    fn impossible_places_are_refused() {
        for segments in [
            [linear(0, 3, 98), linear(3, 1, 0)],
            [linear(0, 3, 0), linear(4, 1, 9)],
            [linear(0, 3, u64::MAX), linear(3, 1, 0)],
        ] {
            let found = group(&volume("root", &[&segments[0], &segments[1]])).unwrap();
            assert_eq!(why(&found[0]), Some(ReasonKind::Damaged));
        }
        let shared = [volume("root", &[&linear(0, 3, 7)]), volume("other", &[&linear(0, 3, 9)])].concat();
        assert!(group(&shared).unwrap().iter().all(|volume| why(volume) == Some(ReasonKind::Damaged)));
    }
}
