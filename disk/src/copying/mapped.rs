//! The block device that a new image maps: how it is named, recognised and divided.
//!
//! ```text
//!   path ─▶ a stable name of it (/dev/disk/by-id) ─▶ DeviceId ─▶ partitions: parts of the disk
//!
//!   device  |table | part 1 | part 2 |        | copy of the table |
//!   shown    Copy    Nothing  Device   Nothing  Copy                     partitions = [2]
//! ```
//!
//! The device is only read, and only if the caller allows devices, as for parents. Of the space
//! outside of partitions the disk shows copies of the first and the last MiB at most: the
//! tables are there, and boot loaders. Logical partitions of an MBR have their tables between them,
//! so a device with such is refused.

use crate::{DiskError, OpenOptions, ParentPolicy, Result, engine::device::Disk, error::file_error, opening::volumes};
use diskwright_image::{DeviceOptions, DevicePart, Format, PartSource};
use diskwright_store::{Blocking, DeviceId, EngineKind, Files, stable_device_name};
use diskwright_volume::{Place, TableKind};
use std::{ops::Range, path::Path};

const SECTOR_BYTES: u64 = 512;
/// How much of the space before the first partition, and behind the last one, is copied.
const TABLE_MAX_SECTORS: u64 = (1 << 20) / SECTOR_BYTES;
/// Sectors that the second copy of a GPT takes at the end of a disk.
const GPT_TAIL_SECTORS: u64 = 33;
/// The first number of a logical partition.
const FIRST_LOGICAL: u32 = 5;

/// What a new image records of the device at `path`, and warnings.
pub(super) fn examine(
    (files, policy): (&Files, &ParentPolicy),
    shown: &Path,
    path: &Path,
    partitions: &[u32],
) -> Result<(DeviceOptions, Vec<String>)> {
    let refused = |what: String, hint: &str| DiskError::Usage {
        what: format!("cannot create {}: {what}", shown.display()),
        hint: hint.into(),
    };
    if !policy.allow_devices {
        let what = format!("{} would be opened as a device", path.display());
        return Err(refused(what, "allow it with `ParentPolicy::allow_devices`"));
    }
    let real = files.canonical(path).map_err(|source| file_error("find the device", path, source))?;
    let open = OpenOptions { format: Some(Format::Raw), files: files.clone(), ..OpenOptions::default() };
    let disk = Disk::open(&real, &open)?;
    let layers = disk.layers();
    let store = layers[0].image.store();
    let (true, Some((number, _))) = (store.is_block_device(), store.identity()) else {
        return Err(refused(format!("{} is not a block device", path.display()), "name a device, or leave it out"));
    };
    let size_bytes = store.len_bytes().map_err(|source| file_error("get its length", path, source))?;
    let id = DeviceId::of(number, size_bytes);
    let mut warnings = Vec::new();
    let stable = stable_device_name(path).map_err(|source| file_error("find its names", path, source))?;
    if stable.is_none() {
        warnings.push(format!(
            "{}: the system has no name in /dev/disk/by-id for this device; the image records {}, which may be another device after the next boot, and is refused then",
            path.display(),
            real.display()
        ));
    }
    if id.serial.is_none() && id.wwn.is_none() {
        warnings.push(format!(
            "{}: the device has neither a serial number nor a world wide name; it is recognised by its size only",
            path.display()
        ));
    }
    let name = stable.unwrap_or(real);
    let recorded = name.to_str().ok_or_else(|| refused("the device's name is not UTF-8".into(), "use another name"))?;
    let parts = match partitions {
        [] => Vec::new(),
        wanted => parts(&disk, size_bytes, wanted).map_err(|(what, hint)| refused(what, hint))?,
    };
    Ok((DeviceOptions { path: recorded.to_owned(), id, parts }, warnings))
}

/// What cannot be, and what to do.
type Refusal = (String, &'static str);

/// The parts of a disk that shows these partitions of `disk`.
fn parts(disk: &Disk, size_bytes: u64, wanted: &[u32]) -> std::result::Result<Vec<DevicePart>, Refusal> {
    let failed = |error: std::io::Error| (format!("its device cannot be read: {error}"), "check the device");
    let layout = volumes::layout(disk, EngineKind::Auto).map_err(failed)?;
    if layout.table == TableKind::None {
        return Err(("its device has no partition table".into(), "map all of it: leave out the partitions"));
    }
    if let Some(problem) = layout.problem.filter(|_| layout.volumes.is_empty()) {
        return Err((format!("the partition table of its device is in doubt: {problem}"), "repair the table first"));
    }
    let mut partitions: Vec<(u32, Range<u64>)> = Vec::new();
    for volume in &layout.volumes {
        let Place::Partition(number) = volume.place else { continue };
        if layout.table == TableKind::Mbr && number >= FIRST_LOGICAL {
            let what = "its device has logical partitions, whose tables lie between them".to_owned();
            return Err((what, "map all of the device: leave out the partitions"));
        }
        let Some(extent) = volume.extents.first() else { continue };
        let start = extent.disk_offset_bytes / SECTOR_BYTES;
        partitions.push((number, start..start + extent.len_bytes / SECTOR_BYTES));
    }
    partitions.sort_by_key(|(_, range)| range.start);
    if let Some(missing) = wanted.iter().find(|wanted| !partitions.iter().any(|(number, _)| number == *wanted)) {
        return Err((format!("its device has no partition {missing}"), "look at them with `partitions`"));
    }
    let read = |range: Range<u64>| {
        let mut queue = Blocking::open(disk, EngineKind::Auto).map_err(failed)?;
        let mut bytes = vec![0; ((range.end - range.start) * SECTOR_BYTES) as usize];
        queue.read(range.start * SECTOR_BYTES, &mut bytes).map_err(failed)?;
        Ok(DevicePart { sectors: range.end - range.start, shows: PartSource::Copy(bytes) })
    };
    divide(size_bytes / SECTOR_BYTES, &partitions, wanted, read)
}

/// Divides a disk at its partitions, which are sorted. `copy` reads a range of sectors.
fn divide(
    sectors: u64,
    partitions: &[(u32, Range<u64>)],
    wanted: &[u32],
    copy: impl Fn(Range<u64>) -> std::result::Result<DevicePart, Refusal>,
) -> std::result::Result<Vec<DevicePart>, Refusal> {
    let mut parts = Vec::new();
    let mut at = 0;
    let push = |parts: &mut Vec<DevicePart>, range: Range<u64>, shows: PartSource| {
        if !range.is_empty() {
            parts.push(DevicePart { sectors: range.end - range.start, shows });
        }
    };
    for (number, range) in partitions {
        if range.start < at || range.end > sectors || range.is_empty() {
            return Err((format!("partition {number} of its device overlaps another or the end"), "repair the table"));
        }
        if at == 0 {
            let table = 0..range.start.min(TABLE_MAX_SECTORS);
            at = table.end;
            if !table.is_empty() {
                parts.push(copy(table)?);
            }
        }
        push(&mut parts, at..range.start, PartSource::Nothing);
        let shows = if wanted.contains(number) { PartSource::Device } else { PartSource::Nothing };
        push(&mut parts, range.clone(), shows);
        at = range.end;
    }
    // From a multiple of a MiB on, so that the disk is not cut into single sectors.
    let tail = sectors.saturating_sub(GPT_TAIL_SECTORS) / TABLE_MAX_SECTORS * TABLE_MAX_SECTORS;
    let tail = tail.max(at);
    push(&mut parts, at..tail, PartSource::Nothing);
    if tail < sectors {
        parts.push(copy(tail..sectors)?);
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(sectors: u64, partitions: &[(u32, Range<u64>)], wanted: &[u32]) -> String {
        let copy = |range: Range<u64>| {
            let bytes = vec![0; ((range.end - range.start) * SECTOR_BYTES) as usize];
            Ok(DevicePart { sectors: range.end - range.start, shows: PartSource::Copy(bytes) })
        };
        let word = |part: DevicePart| match part.shows {
            PartSource::Device => format!("device {}", part.sectors),
            PartSource::Copy(_) => format!("copy {}", part.sectors),
            PartSource::Nothing => format!("zero {}", part.sectors),
        };
        match divide(sectors, partitions, wanted, copy) {
            Ok(parts) => parts.into_iter().map(word).collect::<Vec<_>>().join(", "),
            Err((what, _)) => what,
        }
    }

    #[test]
    fn a_disk_is_divided_at_its_partitions() {
        let two = [(1, 2048..10240), (2, 12288..20480)];
        assert_eq!(shown(22528, &two, &[2]), "copy 2048, zero 8192, zero 2048, device 8192, copy 2048");
        // The second copy of a GPT lies in the last 33 sectors.
        assert_eq!(shown(22530, &two, &[1, 2]), "copy 2048, device 8192, zero 2048, device 8192, copy 2050");
        // A table of an old MBR, and a partition to the very end.
        assert_eq!(shown(10000, &[(1, 63..10000)], &[1]), "copy 63, device 9937");
        assert_eq!(
            shown(100_000, &[(1, 50_000..60_000)], &[]),
            "copy 2048, zero 47952, zero 10000, zero 38304, copy 1696"
        );
        assert!(shown(100, &[(1, 1..60), (2, 50..70)], &[1]).contains("partition 2 of its device overlaps"));
        assert!(shown(100, &[(1, 1..101)], &[1]).contains("overlaps another or the end"));
    }
}
