//! Moves a disk in use, for the control channel: the new file leads to this process before it is
//! the disk, and the old one no longer does afterwards.

use super::{
    answer::Moved,
    host::Change,
    message::{FileId, NewImage},
    shared::{Entry, Shared},
};
use diskwright_disk::{CreateRequest, DiskError, MoveOptions, MoveWatch};
use diskwright_image::{DiskType, Format};
use std::path::Path;

/// Publishes the new file.
struct Watch<'a> {
    shared: &'a Shared,
    report: &'a mut dyn FnMut(u64, u64) -> bool,
    new: Option<FileId>,
}

impl MoveWatch for Watch<'_> {
    fn goes_on(&mut self, done: u64, total: u64) -> bool {
        (self.report)(done, total)
    }

    fn new_disk_is_made(&mut self, identity: Option<(u64, u64)>) -> diskwright_disk::Result<()> {
        let Some(id) = identity.map(FileId::from) else { return Ok(()) };
        self.shared.folder.publish(id, &self.shared.socket).map_err(|error| DiskError::BadOptions {
            what: format!("the new disk would not be reached by the control channel: {error}"),
            hint: "nothing was changed; make the run-time folder writable".into(),
        })?;
        self.new = Some(id);
        Ok(())
    }
}

/// Moves a disk.
pub(super) fn move_disk(
    shared: &Shared,
    entry: &Entry,
    to: &Path,
    options: &MoveOptions,
    report: &mut dyn FnMut(u64, u64) -> bool,
) -> diskwright_disk::Result<Moved> {
    let before = entry.id();
    let mut watch = Watch { shared, report, new: None };
    let done = entry.held.disk.move_to(to, options, &mut watch);
    let new = watch.new;
    let now = entry.id();
    for left in [before, new].into_iter().flatten().filter(|id| Some(*id) != now) {
        shared.folder.withdraw(left, &shared.socket);
    }
    let done = done?;
    if let (false, Some(tell)) = (options.dry_run, &shared.host.on_change) {
        tell(Change::Moved(done.to.clone()));
    }
    Ok(Moved {
        from: done.from,
        to: done.to,
        format: done.format.to_string(),
        virtual_size: done.size_bytes,
        data_bytes: done.data_bytes,
        copied_bytes: done.copied_bytes,
        free_bytes: done.free_bytes,
        pause_ns: u64::try_from(done.pause.as_nanos()).unwrap_or(u64::MAX),
        warnings: done.warnings,
    })
}

/// The options of a request.
pub(super) fn options_of(new: &NewImage, keep_old: bool, dry_run: bool) -> diskwright_disk::Result<MoveOptions> {
    let unknown = |what: &str, word: &str| DiskError::Usage {
        what: format!("{word:?} is no {what} of an image into which a disk can move"),
        hint: "use the program that the process runs".into(),
    };
    let format = new.format.as_deref().map(|word| {
        let known = Format::ALL.iter().copied().find(|format| format.to_string() == word);
        known.ok_or_else(|| unknown("format", word))
    });
    let disk_type = new.disk_type.as_deref().map(|word| {
        let known = [DiskType::Fixed, DiskType::Dynamic].into_iter().find(|kind| kind.to_string() == word);
        known.ok_or_else(|| unknown("type", word))
    });
    let dest = CreateRequest {
        format: format.transpose()?,
        disk_type: disk_type.transpose()?,
        block_bytes: new.block_size,
        preallocate: new.preallocate,
        ..CreateRequest::default()
    };
    Ok(MoveOptions { dest, keep_old, dry_run })
}
