//! What has changed in a disk in use from one point of its change tracking to a later one.
//!
//! The process that has the disk open reports its points, the ranges and the images of its chain.
//! The contents of the later point are in an image that a snapshot has frozen, which is opened
//! here.

use crate::{
    exit::{Failure, Outcome},
    in_use, json,
};
use diskwright_disk::{Changed, Disk, OpenOptions, SincePoint, TrackPoint};
use diskwright_serve::control::{Client, Done, Operation, TrackedPoint};
use std::{
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

/// The changes of the disk at `file` from a point to a later one.
pub(super) fn of_disk_in_use(
    client: &Client,
    file: &Path,
    options: &OpenOptions,
    (from, to): (&str, &str),
) -> Outcome<SincePoint> {
    let Done::Points { points } = in_use::call(client, Operation::TrackList)? else {
        return Err(in_use::unexpected(client));
    };
    let point = |name: &str| {
        let found = points.iter().find(|point| point.name == name);
        found.ok_or_else(|| {
            Failure::new(format!("{}: it has no point {name:?} (`track list` shows its points)", json::path(file)))
        })
    };
    let (point, end) = (track_point(point(from)?), track_point(point(to)?));
    let changed = ranges(client, (from, to))?;
    for path in in_use::statistics(client)?.chain.iter().skip(1) {
        let disk = Disk::open(path, options)?;
        if end.linkage_id.is_some() && disk.layers()[0].image.linkage_id() == end.linkage_id {
            return Ok(SincePoint::of_frozen((disk, path.clone()), file, point, (&end, changed))?);
        }
    }
    Err(Failure::new(format!(
        "{}: no frozen image of it has the contents that it had at the point {to:?}; start the point by `snapshot --track`, and keep the frozen image until the changes are exported",
        json::path(file)
    )))
}

fn track_point(point: &TrackedPoint) -> TrackPoint {
    TrackPoint {
        name: point.name.clone(),
        // The process does not report the id, and nothing here uses it.
        id: 0,
        started: UNIX_EPOCH + Duration::from_secs(point.started.min(u64::from(u32::MAX) * 4)),
        changed_bytes: point.changed,
        everything: point.everything_because.clone(),
        linkage_id: point.linkage_id.as_ref().and_then(|id| id.parse().ok()),
        size_bytes: point.virtual_size,
    }
}

/// The changed ranges, which the process reports in pages.
fn ranges(client: &Client, (name, to): (&str, &str)) -> Outcome<Changed> {
    let mut ranges = Vec::new();
    let (mut from, mut shape, mut everything) = (Some(0), (0, 0), None);
    while let Some(offset) = from {
        let operation = Operation::TrackShow { name: name.into(), from: offset, to: Some(to.into()) };
        let Done::Changed(page) = in_use::call(client, operation)? else { return Err(in_use::unexpected(client)) };
        // A process that repeats an offset must not keep this loop running.
        from = page.next.filter(|next| *next > offset);
        shape = (page.grain_size, page.virtual_size);
        everything = everything.or(page.everything_because);
        ranges.extend(page.ranges.into_iter().map(|range| range.start..range.start.saturating_add(range.length)));
    }
    Ok(Changed::of_ranges(ranges, shape.0, shape.1, everything)?)
}
