//! What can be asked for over a control channel: the one table, and how each operation is carried
//! out.
//!
//! A further operation needs a variant of [`Operation`], a row in [`rule`], an arm in
//! [`carry_out`], and a variant of [`Done`] for its result.

use super::{
    ControlError,
    answer::{
        ChangedRanges, CommandCount, CompactedInUse, DiskChange, DiskReport, Door, Frozen, ProcessReport, Resized,
        Statistics, TrackedPoint, TrackedRange, Traffic,
    },
    folder,
    host::{Change, DoorKeeper, FrozenFileSystems},
    message::{Done, FileId, NewDisk, Operation},
    moving,
    shared::{Entry, Shared, id_of},
};
use crate::metrics::{COMMANDS, Metrics, Totals};
use diskwright_disk::{Disk, DiskError, KeptName, Layer, MergeOptions, SnapshotWatch};
use diskwright_store::{BlockDevice, ErrorCode};
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Minimum interval between two reports of progress to a client.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// Maximum number of ranges in an answer, so that it fits in a line.
const RANGES_MAX: usize = 500;

/// What the channel must know of an operation before it carries it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rule {
    /// Its name, for messages.
    pub(super) name: &'static str,
    /// Whether the request must name a disk.
    pub(super) needs_disk: bool,
    /// Whether it changes the disk, so that no other such operation may run on the same disk.
    pub(super) changes_disk: bool,
    /// Whether it is stopped when its client goes away or the process ends, at a point where
    /// nothing is half done.
    pub(super) ends_with_client: bool,
}

/// The table of operations.
pub(super) fn rule(operation: &Operation) -> Rule {
    let rule =
        |name, needs_disk, changes_disk, ends_with_client| Rule { name, needs_disk, changes_disk, ends_with_client };
    match operation {
        Operation::List => rule("list", false, false, false),
        Operation::Statistics => rule("statistics", true, false, false),
        Operation::Drain => rule("drain", true, false, false),
        // Short, and durable as a whole: the image is enlarged whether or not the client waits.
        Operation::Resize { .. } => rule("resize", true, true, false),
        Operation::Limit(_) => rule("limit", true, false, false),
        Operation::AddDisk(_) => rule("add", true, false, false),
        // Nothing else may be under way on a disk that is closed.
        Operation::RemoveDisk => rule("remove", true, true, false),
        // A door is open or not, whatever else happens to the disk.
        Operation::OpenDoor { .. } => rule("open door", true, false, false),
        Operation::CloseDoor { .. } => rule("close door", true, false, false),
        // Until the names change, everything is undone when the operation stops.
        Operation::Snapshot { .. } => rule("snapshot", true, true, true),
        // Short, and complete whether or not the client waits.
        Operation::TrackStart { .. } => rule("track start", true, true, false),
        Operation::TrackStop { .. } => rule("track stop", true, true, false),
        Operation::TrackList => rule("track list", true, false, false),
        Operation::TrackShow { .. } => rule("track show", true, false, false),
        // A disk that is merged in part reads correctly, and the same operation finishes the merge.
        Operation::Merge { .. } => rule("merge", true, true, true),
        // Each batch of blocks is complete in itself.
        Operation::Compact { .. } => rule("compact", true, true, true),
        // Until the new disk is complete, the old one is whole.
        Operation::Move { .. } => rule("move", true, true, true),
    }
}

/// Reports progress to the client. Returns whether the operation is to continue.
pub(super) type Report<'a> = dyn FnMut(u64, u64) -> bool + 'a;

/// Carries out an operation on this disk. The caller has checked the [`Rule`].
pub(super) fn carry_out(
    shared: &Shared,
    disk: Option<&Arc<Entry>>,
    operation: Operation,
    report: &mut Report<'_>,
) -> Result<Done, ControlError> {
    let missing = || refused(ErrorCode::InvalidInput, "the request names no disk");
    match (operation, disk) {
        (Operation::List, _) => Ok(Done::Listed(process(shared))),
        (_, None) => Err(missing()),
        (Operation::Statistics, Some(entry)) => Ok(Done::Counted(statistics(shared, entry))),
        (Operation::Drain, Some(_)) => shared.drain(),
        (Operation::Limit(limits), Some(entry)) => {
            entry.held.limiter.set(limits.into());
            if let Some(tell) = &shared.host.on_change {
                tell(Change::Limited(limits));
            }
            Ok(Done::Limited(limits))
        }
        (Operation::OpenDoor { socket, queues }, Some(entry)) => {
            let disk = &entry.held.name;
            shared.doors()?.open(disk, &socket, queues)?;
            Ok(Done::Door(Door { name: disk.clone(), socket, queues, is_open: true }))
        }
        (Operation::CloseDoor { socket }, Some(entry)) => {
            let disk = &entry.held.name;
            let queues = shared.doors()?.close(disk, &socket)?;
            Ok(Done::Door(Door { name: disk.clone(), socket, queues, is_open: false }))
        }
        (Operation::AddDisk(wanted), Some(_)) => add_disk(shared, &wanted),
        (Operation::RemoveDisk, Some(entry)) => remove_disk(shared, entry),
        (Operation::Snapshot { name, track, dry_run }, Some(entry)) => {
            snapshot(shared, entry, &name, track.as_deref(), dry_run, report)
        }
        (Operation::TrackStart { name }, Some(entry)) => {
            let disk = entry.disk();
            disk.start_tracking(&name).and_then(|()| points(&disk)).map_err(of_disk)
        }
        (Operation::TrackStop { name }, Some(entry)) => {
            let disk = entry.disk();
            disk.stop_tracking(&name).and_then(|()| points(&disk)).map_err(of_disk)
        }
        (Operation::TrackList, Some(entry)) => points(&entry.disk()).map_err(of_disk),
        (Operation::TrackShow { name, from, to }, Some(entry)) => {
            changed(&entry.disk(), &name, to.as_deref(), from).map_err(of_disk)
        }
        (Operation::Merge { child, into, keep_name, search, no_reflink, dry_run }, Some(entry)) => {
            let keep = if keep_name { KeptName::Childs } else { KeptName::Parents };
            let options =
                MergeOptions { into, keep, search_dirs: search, no_reflink, dry_run, ..MergeOptions::default() };
            merge(shared, entry, &child, &options, report)
        }
        (Operation::Compact { dry_run }, Some(entry)) => compact(&entry.disk(), dry_run, report),
        (Operation::Move { to, new, keep_old, dry_run }, Some(entry)) => {
            let options = moving::options_of(&new, keep_old, dry_run).map_err(of_disk)?;
            moving::move_disk(shared, entry, &to, &options, report).map(Done::Moved).map_err(of_disk)
        }
        (Operation::Resize { size, dry_run }, Some(entry)) => resize(&entry.disk(), size, dry_run),
    }
}

pub(super) fn refused(code: ErrorCode, message: impl Into<String>) -> ControlError {
    ControlError::Refused { code, message: message.into() }
}

fn of_disk(error: DiskError) -> ControlError {
    refused(error.code(), error.to_string())
}

impl Shared {
    fn doors(&self) -> Result<&dyn DoorKeeper, ControlError> {
        self.host.doors.as_deref().map_err(|sentence| refused(ErrorCode::Unsupported, sentence.clone()))
    }
}

fn add_disk(shared: &Shared, wanted: &NewDisk) -> Result<Done, ControlError> {
    let held = shared.doors()?.add(wanted)?;
    let (name, disk) = (held.name.clone(), held.disk.disk());
    let file = disk.file().map_or_else(|| wanted.file.clone(), Into::into);
    // Only the process that may write to a file is reached by it.
    if let Some(id) = id_of(&disk).filter(|_| !disk.geometry().read_only) {
        if let Err(error) = shared.folder.publish(id, &shared.socket) {
            drop((held, disk));
            let _ = shared.doors()?.remove(&name);
            return Err(error);
        }
        shared.add_disk(held);
    }
    Ok(Done::Disk(DiskChange { name, file, is_served: true }))
}

fn remove_disk(shared: &Shared, entry: &Arc<Entry>) -> Result<Done, ControlError> {
    let name = entry.held.name.clone();
    let doors = shared.doors()?;
    if !shared.forget_unless_last(entry) {
        let sentence =
            format!("{name}: it is the only disk that the process has open for writing; drain ends the process");
        return Err(refused(ErrorCode::InvalidInput, sentence));
    }
    let file = entry.disk().file().map(Into::into).unwrap_or_default();
    // Before the lock of the file is given up.
    if let Some(id) = entry.id() {
        shared.folder.withdraw(id, &shared.socket);
    }
    doors.remove(&name)?;
    Ok(Done::Disk(DiskChange { name, file, is_served: false }))
}

fn process(shared: &Shared) -> ProcessReport {
    ProcessReport {
        pid: std::process::id(),
        command: shared.host.command.into(),
        version: env!("CARGO_PKG_VERSION").into(),
        disks: shared.disks().iter().map(|entry| disk_report(entry)).collect(),
    }
}

fn disk_report(entry: &Entry) -> DiskReport {
    let disk = entry.disk();
    DiskReport {
        name: entry.held.name.clone(),
        file: disk.file().map(Into::into).unwrap_or_default(),
        virtual_size: disk.geometry().size_bytes,
        busy_with: entry.busy_with().map(Into::into),
    }
}

fn statistics(shared: &Shared, entry: &Entry) -> Statistics {
    let layers = entry.disk().layers();
    let limiter = &entry.held.limiter;
    Statistics {
        process: process(shared),
        disk: disk_report(entry),
        chain: layers.iter().map(|layer| layer.path.clone()).collect(),
        size_on_disk: layers.first().and_then(|top| top.allocated_bytes().ok()),
        open_seconds: shared.opened_at.elapsed().as_secs(),
        limits: limiter.is_limited().then(|| limiter.limits().into()),
        delayed_requests: limiter.delayed(),
        traffic: Some((shared.host.metrics)()).filter(|metrics| !metrics.is_empty()).map(|metrics| traffic(&metrics)),
    }
}

fn traffic(metrics: &[Arc<Metrics>]) -> Traffic {
    let totals = metrics.iter().fold(Totals::default(), |sum, metrics| sum.and(&metrics.totals()));
    let commands = COMMANDS.iter().zip(&totals.commands).map(|(name, count)| CommandCount {
        command: (*name).into(),
        requests: count.requests,
        bytes: count.bytes,
        errors: count.errors,
        mean_latency_ns: count.latency_ns.checked_div(count.requests),
    });
    Traffic {
        connections: totals.connections,
        in_flight: totals.in_flight,
        accepted: totals.accepted,
        refused: totals.refused,
        commands: commands.collect(),
    }
}

fn resize(disk: &Disk, size: u64, dry_run: bool) -> Result<Done, ControlError> {
    let layers = disk.layers();
    let file_size =
        || layers[0].files_len_bytes().map_err(|error| refused(ErrorCode::of_system(&error), error.to_string()));
    let old_file_size = file_size()?;
    let old_size = disk.check_growth(size).map_err(of_disk)?;
    let mut new_file_size = None;
    if !dry_run {
        disk.grow(size).map_err(of_disk)?;
        new_file_size = Some(file_size()?);
    }
    Ok(Done::Resized(Resized { old_size, new_size: size, old_file_size, new_file_size }))
}

fn compact(disk: &Disk, dry_run: bool, report: &mut Report<'_>) -> Result<Done, ControlError> {
    let mut next = Instant::now();
    let mut goes_on = true;
    let done = disk.compact(dry_run, &mut |done, total| {
        let now = Instant::now();
        if now >= next || done == total {
            next = now + REPORT_EVERY;
            goes_on = report(done, total);
        }
        goes_on
    });
    let done = done.map_err(of_disk)?;
    Ok(Done::Compacted(CompactedInUse {
        virtual_size: done.size_bytes,
        block_size: done.block_bytes,
        old_file_size: done.old_file_bytes,
        new_file_size: done.new_file_bytes,
        zero_bytes: done.zero_bytes,
        moved_bytes: done.moved_bytes,
        warnings: done.warnings,
    }))
}

/// Hooks of a snapshot: the file of the child leads to this process before it has the disk's name,
/// and file systems on the disk are frozen for the moment of the snapshot.
struct Watch<'a, 'r> {
    shared: &'a Shared,
    report: &'a mut Report<'r>,
    child: Option<FileId>,
    quiet: FrozenFileSystems,
}

impl SnapshotWatch for Watch<'_, '_> {
    fn goes_on(&mut self, done: u64, total: u64) -> bool {
        (self.report)(done, total)
    }

    fn child_is_made(&mut self, identity: Option<(u64, u64)>) -> diskwright_disk::Result<()> {
        let Some(id) = identity.map(FileId::from) else { return Ok(()) };
        self.shared.folder.publish(id, &self.shared.socket).map_err(|error| DiskError::BadOptions {
            what: format!("the new child would not be reached by the control channel: {error}"),
            hint: "nothing was changed; make the run-time folder writable".into(),
        })?;
        self.child = Some(id);
        Ok(())
    }

    fn quiesce(&mut self) {
        if let Some(freezer) = &self.shared.host.freezer {
            self.quiet = freezer.freeze();
        }
    }

    fn resume(&mut self) {
        if let Some(freezer) = &self.shared.host.freezer {
            self.quiet.warnings.extend(freezer.thaw());
        }
    }
}

fn points(disk: &Disk) -> diskwright_disk::Result<Done> {
    Ok(Done::Points { points: disk.points()?.into_iter().map(TrackedPoint::from).collect() })
}

fn changed(disk: &Disk, name: &str, to: Option<&str>, from: u64) -> diskwright_disk::Result<Done> {
    let changed = match to {
        Some(to) => disk.changed_between(name, to)?,
        None => disk.changed_since(name)?,
    };
    let mut all = changed.ranges_from(from);
    let told = all.by_ref().take(RANGES_MAX);
    let ranges: Vec<_> =
        told.map(|range| TrackedRange { start: range.start, length: range.end - range.start }).collect();
    Ok(Done::Changed(ChangedRanges {
        virtual_size: changed.size_bytes(),
        grain_size: changed.grain_bytes(),
        everything_because: changed.everything().map(str::to_owned),
        next: all.next().map(|range| range.start),
        ranges,
    }))
}

fn snapshot(
    shared: &Shared,
    entry: &Entry,
    name: &str,
    track: Option<&str>,
    dry_run: bool,
    report: &mut Report<'_>,
) -> Result<Done, ControlError> {
    let disk = &entry.disk();
    let before = id_of(disk);
    let mut watch = Watch { shared, report, child: None, quiet: FrozenFileSystems::default() };
    let done = disk.snapshot_tracked(name, track, dry_run, &mut watch);
    let Watch { child, quiet, .. } = watch;
    // Also after an error the disk may have its child.
    withdraw_former(shared, disk, [before, child]);
    let done = done.map_err(of_disk)?;
    let FrozenFileSystems { file_systems, mut warnings } = quiet;
    warnings.extend(done.warnings);
    Ok(Done::Frozen(Frozen { disk: done.disk, frozen: done.parent, file_systems, warnings }))
}

/// Those of `files` that are not the disk's file any more no longer lead to this process.
fn withdraw_former(shared: &Shared, disk: &Disk, files: [Option<FileId>; 2]) {
    let now = id_of(disk);
    for left in files.into_iter().flatten().filter(|id| Some(*id) != now) {
        shared.folder.withdraw(left, &shared.socket);
    }
}

/// Merges an image of the chain. If it is the one that is written, the disk goes on in an
/// ancestor's file, which leads to this process before it has the disk's name.
fn merge(
    shared: &Shared,
    entry: &Entry,
    child: &Path,
    options: &MergeOptions,
    report: &mut Report<'_>,
) -> Result<Done, ControlError> {
    let disk = &*entry.disk();
    let before = id_of(disk);
    let id_of_layer = |layer: &Layer| layer.image.store().identity().map(FileId::from);
    let candidates: Vec<FileId> = if folder::identity(child).ok() == before {
        disk.layers().iter().skip(1).filter_map(id_of_layer).collect()
    } else {
        Vec::new()
    };
    for id in &candidates {
        shared.folder.publish(*id, &shared.socket).map_err(|error| {
            let text = format!(
                "the merged disk would not be reached by the control channel: {error}; nothing was changed; make the run-time folder writable"
            );
            refused(ErrorCode::Io, text)
        })?;
    }
    let merged = disk.merge(child, options, report);
    // Also after an error the disk may have another file.
    let now = id_of(disk);
    for left in candidates.into_iter().chain(before).filter(|id| Some(*id) != now) {
        shared.folder.withdraw(left, &shared.socket);
    }
    merged.map(|merged| Done::Merged(merged.into())).map_err(of_disk)
}
