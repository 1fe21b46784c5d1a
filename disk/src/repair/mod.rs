//! Repairs one image, and undoes a repair.
//!
//! ```text
//!   image (locked) ─▶ Draft ─▶ image::mend: checks and changes the draft ─▶ phases, report
//!                                                                            │ dry run: the end
//!                     undo file: ARMED, durable with its name ◀──────────────┘
//!                              │
//!                     phases ─▶ image, a sync after each ─▶ undo file: COMPLETE
//! ```
//!
//! Modules: `draft.rs` records changes, `apply.rs` makes them, `journal.rs` is the undo file byte
//! by byte, `undo_file.rs` its names.
//!
//! What must hold:
//!
//! - No byte of the image changes before the undo file is durable. A repair that fails, or that the
//!   caller stops, puts the image back at once. One that was killed is put back by the next repair
//!   or undo.
//! - Without loss the identities stay by which children know the image: the DataWriteGuid of a
//!   VHDX, the unique id of a VHD and the time of the last change of its file, which its children
//!   have recorded. A repair that gives up data changes the DataWriteGuid and the time, so that
//!   children are refused instead of showing a mixture, and it names the children in the folder.
//! - The image has the exclusive lock from the first look to the end. No lock of this process is
//!   held while files are read or written.
//!
//! Rejected: a copy of the whole image as the undo file. It would need the room of the image. Also
//! rejected: changes that are ordered so that no undo file is needed after a power cut. They are
//! ordered so (`image/src/mending.rs`), but the user may want the old bytes back.

mod apply;
mod draft;
mod journal;
mod undo_file;

pub use undo_file::interrupted_repair;
pub(crate) use undo_file::refuse_unfinished;

use crate::{DiskError, OpenOptions, Progress, Result, error::file_error, siblings};
use apply::apply_phase;
use diskwright_image::{CheckReport, Format, Mended, Repair, mend, probe};
use diskwright_store::{CacheMode, Files, LockMode, OpenOptions as StoreOptions, Store};
use draft::{Draft, Phase};
use journal::{Head, JournalState};
use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Listed steps; further ones are counted.
const STEPS_MAX: usize = 10_000;
/// By how much the time of the last change is set back: more than a tick of the clock of any file
/// system that has sub-second times.
const SET_BACK: Duration = Duration::from_millis(20);

/// How an image is repaired, or a repair undone.
#[derive(Debug, Clone, Default)]
pub struct RepairOptions {
    /// The format, and the file system. Everything else is ignored.
    pub open: OpenOptions,
    /// Also give up what cannot be read, so that the rest of the disk can be read and written. Each
    /// range of the disk that is given up is in [`Repaired::lost`].
    pub accept_loss: bool,
    /// The undo file. `None` for a name that follows from the image's.
    pub undo_file: Option<PathBuf>,
    /// Plans and checks everything, and changes nothing.
    pub dry_run: bool,
}

/// The result of [`repair`].
#[derive(Debug, Clone)]
pub struct Repaired {
    /// The image's format.
    pub format: Format,
    /// What was found before.
    pub before: CheckReport,
    /// The steps, in order.
    pub steps: Vec<Mended>,
    /// Number of steps that are not listed.
    pub steps_left_out: u64,
    /// The changes of the file, in order.
    pub writes: Vec<PlannedWrite>,
    /// What is left. [`CheckReport::worst`] is `None` or a note after a complete repair.
    pub after: CheckReport,
    /// Length of the file before and after, in bytes.
    pub len_bytes: (u64, u64),
    /// The ranges of the disk that were given up, sorted, without overlaps.
    pub lost: Vec<Range<u64>>,
    /// Where the undo file is. `None` if nothing was changed.
    pub undo_file: Option<PathBuf>,
    /// The undo file of an interrupted repair, which was rolled back first.
    pub rolled_back: Option<PathBuf>,
    /// What the user should know, a sentence each.
    pub warnings: Vec<String>,
}

/// A change of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlannedWrite {
    /// Bytes are written.
    Write {
        /// Offset in the file.
        offset_bytes: u64,
        /// Number of bytes.
        len_bytes: u64,
    },
    /// A range becomes zeros, and a hole if the file system has holes.
    Zero {
        /// Offset in the file.
        offset_bytes: u64,
        /// Number of bytes.
        len_bytes: u64,
    },
    /// The file gets this length.
    SetLen {
        /// The length in bytes.
        len_bytes: u64,
    },
}

/// The result of [`undo_repair`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undone {
    /// The undo file, which was removed.
    pub undo_file: PathBuf,
    /// Length of the image now, in bytes.
    pub len_bytes: u64,
    /// Whether the repair had been interrupted.
    pub was_interrupted: bool,
}

/// Repairs the image at `path` alone: neither its parents nor its links to them. Durable on return.
/// `progress` counts the bytes that are saved in the undo file and those that are written.
///
/// # Errors
/// [`DiskError::InUse`] if any other program has the image open; [`DiskError::File`] if the undo
/// file cannot be written (no space) or the image cannot, [`DiskError::Exists`] if the undo file
/// exists; [`DiskError::BadOptions`] for a block device; [`DiskError::Stopped`] if `progress`
/// returned `false`. The image is as before then. Errors of the check.
pub fn repair(path: impl AsRef<Path>, options: &RepairOptions, progress: &mut Progress<'_>) -> Result<Repaired> {
    let image = Image::open(path.as_ref(), options, options.dry_run)?;
    let files = &options.open.files;
    let mut rolled_back = None;
    let unfinished = match &options.undo_file {
        Some(named) if files.facts(named).is_ok() => Some(named.clone()),
        _ => undo_file::unfinished(files, &image.real)?.map(|(undo, _)| undo),
    };
    if let Some(undo) = unfinished {
        let (_, head) = undo_file::open(files, &undo, false)?;
        if head.state == JournalState::Complete {
            return Err(DiskError::Exists { path: undo });
        }
        if options.dry_run {
            return Err(DiskError::BadChain { path: image.path, what: undo_file::interrupted(&undo) });
        }
        image.put_back(files, &undo)?;
        rolled_back = Some(undo);
    }
    let Plan { before, steps, steps_left_out, after, phases, len_bytes, lost, costs_data } =
        image.plan(options, progress)?;
    let mut repaired = Repaired {
        format: image.format,
        before,
        steps,
        steps_left_out,
        writes: phases.iter().flat_map(planned).collect(),
        after,
        len_bytes,
        lost,
        undo_file: None,
        rolled_back,
        warnings: Vec::new(),
    };
    if phases.is_empty() {
        return Ok(repaired);
    }
    if costs_data {
        repaired.warnings = image.warn_children(files);
    }
    if options.dry_run {
        return Ok(repaired);
    }
    let undo = match &options.undo_file {
        Some(named) => named.clone(),
        None => undo_file::next_free(files, &image.real)?,
    };
    image.carry_out(files, &undo, &phases, costs_data, progress)?;
    repaired.undo_file = Some(undo);
    Ok(repaired)
}

/// Puts the image at `path` back as it was before its last repair, byte for byte. Durable on
/// return.
///
/// # Errors
/// [`DiskError::BadOptions`] if there is no undo file, if it is damaged or names another image, or
/// if any program has written to the image since the repair; [`DiskError::InUse`];
/// [`DiskError::File`]. Unless it is an error of a write, the image is unchanged; the same call
/// finishes what was begun.
pub fn undo_repair(path: impl AsRef<Path>, options: &RepairOptions) -> Result<Undone> {
    let path = path.as_ref();
    let files = &options.open.files;
    let real = files.canonical(path).map_err(|source| file_error("find", path, source))?;
    let undo = match &options.undo_file {
        Some(named) => named.clone(),
        None => undo_file::existing(files, &real).pop().ok_or_else(|| DiskError::BadOptions {
            what: format!("{}: it has no undo file, so no repair can be undone", path.display()),
            hint: format!(
                "if the undo file has another name than {}, name it",
                undo_file::numbered(&real, 1).display()
            ),
        })?,
    };
    let store = open_store(path, files, LockMode::Exclusive)?;
    let was_interrupted = put_back(path, &*store, files, &undo)?;
    let len_bytes = store.len_bytes().map_err(|source| file_error("get the length of", path, source))?;
    Ok(Undone { undo_file: undo, len_bytes, was_interrupted })
}

fn planned(phase: &Phase) -> Vec<PlannedWrite> {
    let zeros = phase
        .zeros
        .iter()
        .map(|range| PlannedWrite::Zero { offset_bytes: range.start, len_bytes: range.end - range.start });
    let writes = phase.writes.iter().map(|(offset_bytes, bytes)| PlannedWrite::Write {
        offset_bytes: *offset_bytes,
        len_bytes: bytes.len() as u64,
    });
    let length = |len_bytes: Option<u64>| len_bytes.map(|len_bytes| PlannedWrite::SetLen { len_bytes });
    length(phase.grow_to_bytes).into_iter().chain(zeros).chain(writes).chain(length(phase.cut_to_bytes)).collect()
}

fn open_store(path: &Path, files: &Files, lock: LockMode) -> Result<Arc<dyn Store>> {
    let writable = lock == LockMode::Exclusive;
    let options = StoreOptions { writable, create_new: false, cache: CacheMode::PageCache, lock };
    let store = files.open(path, &options)?;
    if store.is_block_device() {
        return Err(DiskError::BadOptions {
            what: format!(
                "{}: an image on a block device cannot be repaired, as its length cannot change",
                path.display()
            ),
            hint: "copy it to a file first".into(),
        });
    }
    Ok(store)
}

/// Time of the last change in nanoseconds since 1970; 0 if it is not known.
fn time_ns(files: &Files, path: &Path) -> i64 {
    let modified = files.facts(path).ok().and_then(|facts| facts.modified);
    let since = modified.and_then(|modified| modified.duration_since(UNIX_EPOCH).ok());
    since.and_then(|since| i64::try_from(since.as_nanos()).ok()).unwrap_or(0)
}

fn set_time(store: &dyn Store, time_ns: i64) {
    if let Ok(nanos @ 1..) = u64::try_from(time_ns) {
        // A file system that cannot set times has no children that recorded one.
        let _ = store.set_modified(UNIX_EPOCH + Duration::from_nanos(nanos));
    }
}

fn inode(store: &dyn Store) -> u64 {
    store.identity().map_or(0, |(_, inode)| inode)
}

/// A locked image.
struct Image {
    path: PathBuf,
    /// The path without symbolic links.
    real: PathBuf,
    store: Arc<dyn Store>,
    format: Format,
}

/// What a repair would do.
struct Plan {
    before: CheckReport,
    steps: Vec<Mended>,
    steps_left_out: u64,
    after: CheckReport,
    phases: Vec<Phase>,
    len_bytes: (u64, u64),
    lost: Vec<Range<u64>>,
    costs_data: bool,
}

impl Image {
    fn open(path: &Path, options: &RepairOptions, only_reads: bool) -> Result<Self> {
        let files = &options.open.files;
        let real = files.canonical(path).map_err(|source| file_error("find", path, source))?;
        let store = open_store(path, files, if only_reads { LockMode::Shared } else { LockMode::Exclusive })?;
        let format =
            options.open.format.map_or_else(|| probe::probe(&*store, !only_reads).map(|found| found.format), Ok)?;
        Ok(Self { path: path.to_owned(), real, store, format })
    }

    fn plan(&self, options: &RepairOptions, progress: &mut Progress<'_>) -> Result<Plan> {
        let io = |source| file_error("read it", &self.path, source);
        let before = self.format.driver().check(Arc::clone(&self.store))?;
        let draft = Arc::new(Draft::new(Arc::clone(&self.store)).map_err(io)?);
        let old_bytes = draft.len_bytes().map_err(io)?;
        let (mut steps, mut steps_left_out) = (Vec::new(), 0);
        let (mut lost, mut costs_data): (Vec<Range<u64>>, bool) = (Vec::new(), false);
        let shown: Arc<dyn Store> = Arc::clone(&draft) as Arc<dyn Store>;
        let after = mend(self.format, &shown, options.accept_loss, &mut |step| {
            let Some(step) = step else { return progress(0, 1) };
            costs_data |= step.finding.repair == Repair::CostsData;
            lost.extend(step.finding.costs.clone());
            if steps.len() < STEPS_MAX {
                steps.push(step)
            } else {
                steps_left_out += 1
            }
            progress(0, 1)
        })?;
        let after = after.ok_or(DiskError::Stopped)?;
        let (phases, new_bytes) = draft.phases().map_err(io)?;
        Ok(Plan {
            before,
            steps,
            steps_left_out,
            after,
            phases,
            len_bytes: (old_bytes, new_bytes),
            lost: merged(lost),
            costs_data,
        })
    }

    /// Names the children in the folder.
    fn warn_children(&self, files: &Files) -> Vec<String> {
        let path = self.path.display();
        let Ok(image) = probe::open(Arc::clone(&self.store), Some(self.format), false, 512) else {
            return vec![format!(
                "{path}: whether the image has children could not be found out, as it cannot be opened before the repair; children of it read other data afterwards"
            )];
        };
        let found = siblings::children_of(files, &self.real, image.info());
        let mut warnings: Vec<String> = found
            .children
            .iter()
            .map(|child| {
                format!(
                    "{}: it is a child of {path}, which gives up data: what it reads through its parent changes",
                    child.display()
                )
            })
            .collect();
        if found.not_asked > 0 {
            warnings
                .push(format!("{path}: {} images in its folder were not checked for children of it", found.not_asked));
        }
        warnings
    }

    /// Writes the undo file, then the image.
    fn carry_out(
        &self,
        files: &Files,
        undo: &Path,
        phases: &[Phase],
        costs_data: bool,
        progress: &mut Progress<'_>,
    ) -> Result<()> {
        let store = &*self.store;
        let old_bytes = store.len_bytes().map_err(|source| file_error("get the length of", &self.path, source))?;
        let old_time_ns = time_ns(files, &self.path);
        let written = |phase: &Phase| phase.writes.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
        let saved: u64 = journal::changed_ranges(phases, old_bytes).iter().map(|range| range.end - range.start).sum();
        let total = saved + phases.iter().map(written).sum::<u64>();
        let mut done = 0;
        let mut stopped = false;
        let mut count = |bytes: u64| {
            done += bytes;
            stopped |= !progress(done, total);
            if stopped { Err(io::Error::from(io::ErrorKind::Interrupted)) } else { Ok(()) }
        };
        let options =
            StoreOptions { writable: true, create_new: true, cache: CacheMode::PageCache, lock: LockMode::Exclusive };
        let journal = files.open(undo, &options).map_err(|error| match DiskError::from(error) {
            DiskError::File { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => {
                DiskError::Exists { path: undo.to_owned() }
            }
            other => other,
        })?;
        // It holds bytes of the image, so nobody else may read it.
        let owned = journal.take_access_of(store);
        owned.map_err(|source| file_error("give it the permissions of the image", undo, source))?;
        let head = Head {
            state: JournalState::Writing,
            inode: inode(store),
            journal_bytes: 0,
            old_bytes,
            shortest_bytes: old_bytes,
            longest_bytes: old_bytes,
            old_time_ns,
            new_bytes: old_bytes,
            new_time_ns: 0,
            changed_crc: 0,
        };
        // The image is only read meanwhile; the name is durable before it is written.
        let armed = journal::write(&*journal, store, phases, head, &mut count)
            .and_then(|head| files.sync_directory_of(undo).map(|()| head));
        let head = match armed {
            Ok(head) => head,
            Err(error) => {
                let _ = files.remove(undo);
                let doing = "write the undo file, so nothing was changed";
                return Err(if stopped { DiskError::Stopped } else { file_error(doing, undo, error) });
            }
        };
        let applied = phases.iter().try_for_each(|phase| {
            apply_phase(store, phase)?;
            store.sync_data()?;
            count(written(phase))
        });
        if let Err(error) = applied {
            return Err(self.after_failure(files, undo, &*journal, &head, stopped, error));
        }
        self.complete(files, undo, &*journal, head, costs_data)
    }

    /// Puts the image back after a failed write. Returns the error to report.
    fn after_failure(
        &self,
        files: &Files,
        undo: &Path,
        journal: &dyn Store,
        head: &Head,
        stopped: bool,
        error: io::Error,
    ) -> DiskError {
        match journal::roll_back(journal, head, &*self.store) {
            Ok(()) => {
                set_time(&*self.store, head.old_time_ns);
                let removed = files.remove(undo).and_then(|()| files.sync_directory_of(undo));
                match removed {
                    Ok(()) if stopped => DiskError::Stopped,
                    Ok(()) => file_error("repair it; it was put back as it was", &self.path, error),
                    Err(error) => file_error("remove it; the image was put back as it was", undo, error),
                }
            }
            Err(second) => DiskError::BadChain {
                path: self.path.clone(),
                what: format!(
                    "the repair failed ({error}), and so did putting it back ({second}); {} has the old bytes: when the cause is removed, undo the repair",
                    undo.display()
                ),
            },
        }
    }

    /// Makes the undo file recognise later writes.
    fn complete(&self, files: &Files, undo: &Path, journal: &dyn Store, head: Head, costs_data: bool) -> Result<()> {
        let store = &*self.store;
        // The children of a VHD have recorded the time.
        let keeps_time = self.format.driver().child_records_time && !costs_data && head.old_time_ns > 0;
        let set_back = || {
            let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(SET_BACK);
            i64::try_from(time.as_nanos()).unwrap_or(0)
        };
        set_time(store, if keeps_time { head.old_time_ns } else { set_back() });
        let sealed = || {
            let mut head = Head {
                state: JournalState::Complete,
                new_bytes: store.len_bytes()?,
                new_time_ns: time_ns(files, &self.path),
                ..head
            };
            head.changed_crc = journal::changed_crc(journal, &head, store)?;
            head.write(journal)
        };
        sealed().map_err(|source| {
            file_error(
                "complete the undo file; the image is repaired, but the next repair puts it back first",
                undo,
                source,
            )
        })
    }

    fn put_back(&self, files: &Files, undo: &Path) -> Result<()> {
        put_back(&self.path, &*self.store, files, undo).map(drop)
    }
}

/// Sorted, without overlaps.
fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges.into_iter().filter(|range| range.start < range.end) {
        match merged.last_mut().filter(|last| last.end >= range.start) {
            Some(last) => last.end = last.end.max(range.end),
            None => merged.push(range),
        }
    }
    merged
}

/// Rolls back the repair of the image in `store`, and removes the undo file. Returns whether the
/// repair had been interrupted.
fn put_back(path: &Path, store: &dyn Store, files: &Files, undo: &Path) -> Result<bool> {
    let (journal, mut head) = undo_file::open(files, undo, true)?;
    let refused = |what: String| DiskError::BadOptions {
        what: format!("{}: the repair cannot be undone: {what}", path.display()),
        hint: format!("the image was left as it is; {} still has the old bytes", undo.display()),
    };
    if head.inode != inode(store) {
        return Err(refused(format!("{} was written for another file", undo.display())));
    }
    let judged = |result: io::Result<()>| {
        result.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => undo_file::damaged(undo, &error.to_string()),
            io::ErrorKind::InvalidInput => refused(format!("the image was written to since: {error}")),
            _ => file_error("undo the repair", path, error),
        })
    };
    let was_interrupted = head.state != JournalState::Complete;
    if head.state == JournalState::Complete {
        judged(is_unchanged(path, store, files, &*journal, &head))?;
        // From here on an interrupted undo is finished like an interrupted repair.
        head.state = JournalState::Armed;
        head.write(&*journal).map_err(|source| file_error("begin to undo the repair in", undo, source))?;
    } else if head.state == JournalState::Armed {
        judged(journal::check_versions(&*journal, &head, store))?;
    }
    if head.state == JournalState::Armed {
        judged(journal::roll_back(&*journal, &head, store))?;
        set_time(store, head.old_time_ns);
    }
    drop(journal);
    files
        .remove(undo)
        .and_then(|()| files.sync_directory_of(undo))
        .map_err(|source| file_error("remove it; the image is as it was before the repair", undo, source))?;
    Ok(was_interrupted)
}

/// Whether the image is as a complete repair has left it.
fn is_unchanged(path: &Path, store: &dyn Store, files: &Files, journal: &dyn Store, head: &Head) -> io::Result<()> {
    let changed = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let (len_bytes, time_ns) = (store.len_bytes()?, time_ns(files, path));
    if len_bytes != head.new_bytes {
        return changed(format!("it has {len_bytes} bytes, expected {}", head.new_bytes));
    }
    if time_ns != head.new_time_ns {
        let expected = head.new_time_ns;
        return changed(format!("it was last changed {time_ns} ns after 1970, expected {expected}"));
    }
    if journal::changed_crc(journal, head, store)? != head.changed_crc {
        return changed("the repaired places hold other bytes".into());
    }
    Ok(())
}
