//! The volumes of a disk: finds them, names them, and asks their readers what is free.
//!
//! ```text
//!   table::find ─▶ partitions ─▶ signature::find ─┬─ none      left alone: unknown
//!                                                 ├─ one       its reader: identity, then the map
//!                                                 └─ several   left alone: ambiguous
//! ```
//!
//! Rules between volumes:
//! - If the partition table is in doubt, all volumes are left alone for its reason.
//! - If a suspended system is saved on the disk (in a swap area, or in hiberfil.sys), all volumes
//!   are left alone: the system may have any of them mounted, and may have frozen it before.
//! - A swap area does not show whether its system runs. (The system may be saved or paused in a way
//!   that leaves no mark in the area.) So the area is free only if a file system beside it, other
//!   than a FAT, is marked as unmounted, and none is marked as mounted.
//! - A btrfs does not record whether it is mounted. It is left alone if another volume is marked as
//!   mounted. The map of a btrfs alone on its disk is trusted.

use crate::{
    identity, lvm,
    read::{Extent, ReadAt, Window, one_extent, size_of},
    reason::{LeftAlone, ReasonKind, Stop},
    signature::{self, Kind},
    sink::Sink,
    table::{self, Place, TableKind},
};
use std::ops::{ControlFlow, Range};

/// What a disk consists of.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The partition table.
    pub table: TableKind,
    /// Why nothing on the whole disk may be given up. `None` if each volume is judged by itself.
    pub problem: Option<LeftAlone>,
    /// The volumes, in the order of the table; logical volumes follow their physical volume.
    pub volumes: Vec<Volume>,
}

/// A volume of a disk, and what is free in it.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Where it lies.
    pub place: Place,
    /// Its bytes on the disk, in the order of the volume.
    pub extents: Vec<Extent>,
    /// Name of the partition in a GPT.
    pub partition_name: Option<String>,
    /// Type in the partition table: hexadecimal for an MBR, a UUID for a GPT.
    pub partition_type: Option<String>,
    /// The file system, or what else the signature names: "ext4", "NTFS", "LUKS". `None` if there
    /// is no known signature, or more than one.
    pub contents: Option<&'static str>,
    /// Label of the file system.
    pub label: Option<String>,
    /// UUID or serial number of the file system, as `blkid` writes it.
    pub uuid: Option<String>,
    /// Bytes that are certainly free, or why the volume is left alone.
    pub free_bytes: Result<u64, LeftAlone>,
}

impl Volume {
    /// Size of the volume in bytes.
    pub fn size_bytes(&self) -> u64 {
        size_of(&self.extents)
    }

    /// The volume in words: `partition 2: ext4 'root'`.
    pub fn name(&self) -> String {
        let place = match &self.place {
            Place::Disk => "whole disk".to_owned(),
            Place::Partition(number) => format!("partition {number}"),
            Place::Logical { group, name } => format!("logical volume {group}/{name}"),
        };
        let contents = self.contents.unwrap_or("no known file system");
        match &self.label {
            Some(label) => format!("{place}: {contents} '{}'", label.escape_debug()),
            None => format!("{place}: {contents}"),
        }
    }
}

/// Finds the volumes of `disk`, and counts what is free in each. Reads all free-space maps once.
pub fn volumes(disk: &dyn ReadAt) -> Layout {
    let found = table::find(disk);
    let mut problem = found.problem;
    if found.kind != TableKind::None && problem.is_none() {
        problem = beside_the_table(disk, found.kind);
    }
    let mut volumes = Vec::new();
    for partition in found.partitions {
        let mut volume = Volume {
            place: partition.place,
            extents: one_extent(partition.range_bytes),
            partition_name: partition.name,
            partition_type: partition.type_text,
            contents: None,
            label: None,
            uuid: None,
            free_bytes: Ok(0),
        };
        let refused = problem.clone().or(partition.problem);
        let kind = examine(disk, &mut volume, refused.as_ref());
        let inner = if kind == Some(Kind::Lvm) { see_through(disk, &mut volume) } else { Vec::new() };
        volumes.push(volume);
        volumes.extend(inner);
    }
    judge_by_the_others(&mut volumes);
    Layout { table: found.kind, problem, volumes }
}

/// Passes the free ranges of `volume` to `give`: bytes of the disk, ascending, merged. Stops early
/// where `give` answers with `Break`. Returns the sum of what was passed on, in bytes. The map is
/// read twice; nothing is passed on unless the first pass finds no fault in it.
///
/// `volume` must be from [`volumes`] of the same disk, which has not changed since.
///
/// # Errors
/// If the volume is left alone. If the second pass fails where the first did not, the disk has
/// changed meanwhile, and what was passed on must not be used either.
pub fn free_ranges(
    disk: &dyn ReadAt,
    volume: &Volume,
    give: &mut dyn FnMut(Range<u64>) -> ControlFlow<()>,
) -> Result<u64, LeftAlone> {
    volume.free_bytes.clone()?;
    let window = Window::new(disk, &volume.extents);
    let kind = one_signature(&window)?;
    count(&window, kind)?;
    let mut total_bytes = 0;
    let mut end_bytes = 0;
    for run in ascending_runs(&volume.extents) {
        let mut cut = |range: Range<u64>| {
            for extent in run {
                let start = range.start.max(extent.volume_offset_bytes);
                let end = range.end.min(extent.volume_offset_bytes + extent.len_bytes);
                if start >= end {
                    continue;
                }
                let moved = start - extent.volume_offset_bytes + extent.disk_offset_bytes;
                total_bytes += end - start;
                end_bytes = moved + (end - start);
                give(moved..end_bytes)?;
            }
            ControlFlow::Continue(())
        };
        let mut sink = Sink::new(window.size_bytes(), &mut cut);
        match signature::scan(&window, kind, &mut sink).and_then(|()| sink.finish()) {
            Ok(_) => {}
            Err(Stop::Cancelled) => break,
            Err(Stop::LeftAlone(reason)) => return Err(reason),
        }
    }
    Ok(total_bytes)
}

/// The extents in groups, in each of which the disk's offsets ascend, as in the volume.
fn ascending_runs(extents: &[Extent]) -> impl Iterator<Item = &[Extent]> {
    extents.chunk_by(|one, next| one.disk_offset_bytes < next.disk_offset_bytes)
}

/// A disk with a partition table must have no other signature outside of its partitions.
pub(crate) fn beside_the_table(disk: &dyn ReadAt, kind: TableKind) -> Option<LeftAlone> {
    let whole = one_extent(0..disk.size_bytes());
    let found = signature::find(&Window::new(disk, &whole));
    let name = found.iter().find(|kind| !signature::INNER_TABLES.contains(kind))?.name();
    Some(LeftAlone::new(
        ReasonKind::Ambiguous,
        format!("the disk has a partition table ({kind}) and, over all of the disk, the signature of {name}"),
    ))
}

/// The logical volumes of a physical volume. They are left alone for the reason of the physical
/// one, if it has one.
fn see_through(disk: &dyn ReadAt, physical: &mut Volume) -> Vec<Volume> {
    let extents = physical.extents.clone();
    let window = Window::new(disk, &extents);
    let found = lvm::logical_volumes(&window).unwrap_or_else(|reason| {
        physical.free_bytes = physical.free_bytes.clone().and(Err(reason));
        Vec::new()
    });
    let start_bytes = extents.first().map_or(0, |extent| extent.disk_offset_bytes);
    let mut volumes = Vec::new();
    for logical in found {
        let problem = logical.extents.as_ref().err().cloned();
        let moved = logical.extents.unwrap_or_default().into_iter();
        let mut volume = Volume {
            place: Place::Logical { group: logical.group, name: logical.name },
            extents: moved
                .map(|extent| Extent { disk_offset_bytes: extent.disk_offset_bytes + start_bytes, ..extent })
                .collect(),
            partition_name: None,
            partition_type: None,
            contents: None,
            label: None,
            uuid: None,
            free_bytes: Ok(0),
        };
        examine(disk, &mut volume, physical.free_bytes.as_ref().err().or(problem.as_ref()));
        volumes.push(volume);
    }
    volumes
}

/// Fills in what lies in the volume, and what is free. Returns the kind of its contents.
fn examine(disk: &dyn ReadAt, volume: &mut Volume, refused: Option<&LeftAlone>) -> Option<Kind> {
    let extents = volume.extents.clone();
    let window = Window::new(disk, &extents);
    let kind = one_signature(&window);
    if let Ok(kind) = &kind {
        let identity = signature::identify(&window, *kind);
        (volume.contents, volume.label, volume.uuid) = (Some(identity.name), identity.label, identity.uuid);
    }
    volume.free_bytes = match refused {
        Some(reason) => Err(reason.clone()),
        None => kind.clone().and_then(|kind| count(&window, kind)),
    };
    kind.ok()
}

/// The only signature of a volume.
pub(crate) fn one_signature(window: &Window<'_>) -> Result<Kind, LeftAlone> {
    match signature::find(window).as_slice() {
        [] => Err(LeftAlone::new(ReasonKind::Unknown, "no known file system: all of it counts as used")),
        [kind] => Ok(*kind),
        [one, other, ..] => Err(LeftAlone::new(
            ReasonKind::Ambiguous,
            format!(
                "signatures of {} and of {} in one place: remove the wrong one with wipefs",
                one.name(),
                other.name()
            ),
        )),
    }
}

/// Reads the map from one end to the other. Returns the number of free bytes.
pub(crate) fn count(window: &Window<'_>, kind: Kind) -> Result<u64, LeftAlone> {
    let mut give = |_| ControlFlow::Continue(());
    let mut sink = Sink::new(window.size_bytes(), &mut give);
    match signature::scan(window, kind, &mut sink).and_then(|()| sink.finish()) {
        Ok(free_bytes) => Ok(free_bytes),
        Err(Stop::LeftAlone(reason)) => Err(reason),
        Err(Stop::Cancelled) => Ok(0),
    }
}

/// Applies the rules between volumes: suspended systems, swap areas, btrfs.
fn judge_by_the_others(volumes: &mut [Volume]) {
    let is = |volume: &Volume, why: ReasonKind| matches!(&volume.free_bytes, Err(reason) if reason.why == why);
    let suspended = volumes.iter().find(|volume| is(volume, ReasonKind::Hibernated)).map(Volume::name);
    if let Some(name) = suspended {
        for volume in volumes.iter_mut().filter(|volume| volume.free_bytes.is_ok()) {
            let sentence = format!("a suspended system may have it mounted, because one is saved in {name}");
            volume.free_bytes = Err(LeftAlone::new(ReasonKind::Hibernated, sentence));
        }
        return;
    }
    let is_silent = |volume: &Volume| matches!(volume.contents, Some(identity::SWAP | identity::BTRFS));
    let running = volumes.iter().find(|volume| is(volume, ReasonKind::Dirty)).map(Volume::name);
    // The FAT of the firmware (ESP) is not mounted most of the time, so its mark does not count.
    let is_witness = |name: &str| !name.starts_with("FAT") && name != identity::LVM;
    let says_shut_down =
        |volume: &Volume| volume.free_bytes.is_ok() && !is_silent(volume) && volume.contents.is_some_and(is_witness);
    let shut_down = volumes.iter().any(says_shut_down);
    for volume in volumes.iter_mut().filter(|volume| is_silent(volume) && volume.free_bytes.is_ok()) {
        let sentence = match &running {
            Some(name) => format!("it may be in use, because {name} was not unmounted cleanly"),
            None if volume.contents == Some(identity::SWAP) && !shut_down => {
                "the swap area may be in use by a system that is saved or paused: \
                 no file system on this disk shows that the system was shut down"
                    .to_owned()
            }
            None => continue,
        };
        volume.free_bytes = Err(LeftAlone::new(ReasonKind::Hibernated, sentence));
    }
}
