//! Repairs one image, and undoes a repair.
//!
//! ```text
//!   image (locked) ─▶ Draft ─▶ image::repair_image: checks and changes the draft ─▶ phases, report
//!                                                                            │ dry run: the end
//!                     undo file: ARMED, durable with its name ◀──────────────┘
//!                              │
//!                     phases ─▶ image, a sync after each ─▶ undo file: COMPLETE
//! ```
//!
//! Modules: `locked.rs` locks the file, `draft.rs` records changes, `apply.rs` makes them,
//! `journal.rs` is the undo file byte by byte and `replay.rs` reads it back, `undo_file.rs` says
//! which files count as undo files, `put_back.rs` undoes a repair, `time.rs` keeps the time of the
//! last change.
//!
//! What must hold:
//!
//! - No byte of the image changes before the undo file is durable. A repair that fails, or that the
//!   caller stops, puts the image back at once. One that was killed is put back by the next repair
//!   or undo, before anything of the image is read: its format may not be recognised until then.
//! - Without loss the identities stay by which children know the image: the DataWriteGuid of a
//!   VHDX, the unique id of a VHD and the time of the last change of its file, which its children
//!   have recorded. A repair that gives up data changes the DataWriteGuid and the time, so that
//!   children are refused instead of showing a mixture, and it names the children in the folder.
//! - The image has the exclusive lock from the first look to the end. No lock of this process is
//!   held while files are read or written.
//!
//! Rejected: a copy of the whole image as the undo file. It would need the room of the image. Also
//! rejected: changes that are ordered so that no undo file is needed after a power cut. They are
//! ordered so (`image/src/repair.rs`), but the user may want the old bytes back.

mod apply;
mod draft;
mod journal;
mod locked;
mod put_back;
mod replay;
mod time;
mod undo_file;

pub use undo_file::interrupted_repair;
pub(crate) use undo_file::refuse_unfinished;

use crate::{DiskError, OpenOptions, Progress, Result, error::file_error, opening::siblings};
use apply::apply_phase;
use diskwright_image::{CheckReport, Format, Repair, RepairStep, probe, repair_image};
use diskwright_store::{Files, Store};
use draft::{Draft, Phase};
use journal::{Head, JournalState};
use locked::{Locked, is_same};
use put_back::put_back;
use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};
use undo_file::{Candidate, Naming};

/// Listed steps; further ones are counted.
const STEPS_MAX: usize = 10_000;

/// How an image is repaired, or a repair undone.
#[derive(Debug, Clone, Default)]
pub struct RepairOptions {
    /// The format, and the file system. Everything else is ignored.
    pub open: OpenOptions,
    /// Also give up what cannot be read, so that the rest of the disk can be read and written. Each
    /// range of the disk that is given up is in [`Repaired::lost`].
    pub accept_loss: bool,
    /// The undo file. `None` for a name that follows from the image's. An interrupted repair is
    /// also looked for under the names that follow from the image's.
    pub undo_file: Option<PathBuf>,
    /// Plans and checks everything, and changes nothing.
    pub dry_run: bool,
}

/// The result of [`repair`].
#[derive(Debug, Clone)]
pub struct Repaired {
    /// The format that was repaired.
    pub format: Format,
    /// What was found before.
    pub before: CheckReport,
    /// The steps, in order.
    pub steps: Vec<RepairStep>,
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
    /// These bytes of the file are overwritten.
    Write {
        /// Offset in the file.
        offset_bytes: u64,
        /// Length in bytes.
        len_bytes: u64,
    },
    /// A range becomes zeros, and a hole if the file system has holes.
    Zero {
        /// Offset in the file.
        offset_bytes: u64,
        /// Length in bytes.
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
    /// What the user should know, a sentence each.
    pub warnings: Vec<String>,
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
    let files = &options.open.files;
    let locked = Locked::open(path.as_ref(), files, options.dry_run)?;
    let mut warnings = Vec::new();
    let mut rolled_back = None;
    if let Some((undo, state)) = locked.unfinished(files, options.undo_file.as_deref(), &mut warnings)? {
        if !options.dry_run {
            let done = put_back(&locked.path, &*locked.store, files, &undo, Naming::Found)?;
            warnings.extend(done.warnings);
            rolled_back = Some(undo);
        } else if state == JournalState::Armed {
            return Err(DiskError::BadChain { path: locked.path, what: undo_file::interrupted(&undo) });
        }
    }
    let image = Image::in_file(locked, options)?;
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
        warnings,
    };
    if phases.is_empty() {
        return Ok(repaired);
    }
    if costs_data {
        repaired.warnings.extend(image.warn_children(files, "gives up data: what it reads through its parent changes"));
    }
    if options.dry_run {
        return Ok(repaired);
    }
    let undo = match &options.undo_file {
        Some(named) => named.clone(),
        None => undo_file::next_name(files, &image.real, &*image.store)?,
    };
    repaired.warnings.extend(image.carry_out(files, &undo, &phases, costs_data, progress)?);
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
    let Locked { real, store, .. } = Locked::open(path, files, false)?;
    let (by_name, mut warnings) = match &options.undo_file {
        // What a later repair has left is found all the same.
        Some(_) => {
            let found = undo_file::unfinished(files, &real, &*store)?;
            (found.undo.filter(|(_, state)| *state == JournalState::Armed).map(|(undo, _)| undo), found.warnings)
        }
        None => undo_file::newest(files, &real, &*store)?,
    };
    let (undo, naming) = match (&options.undo_file, by_name) {
        (Some(named), Some(armed)) if !is_same(files, named, &armed) => {
            // Who undoes one after the other may begin with either of two that were interrupted.
            let is_armed = matches!(
                undo_file::examine(files, named, Naming::ByUser, &*store)?,
                Candidate::Undo(head) if head.state == JournalState::Armed
            );
            if !is_armed {
                return Err(DiskError::BadChain { path: path.to_owned(), what: undo_file::interrupted(&armed) });
            }
            (named.clone(), Naming::ByUser)
        }
        (Some(named), _) => (named.clone(), Naming::ByUser),
        (None, Some(newest)) => (newest, Naming::Found),
        (None, None) => {
            return Err(DiskError::BadOptions {
                what: match &warnings[..] {
                    [] => format!("{}: it has no undo file, so no repair can be undone", path.display()),
                    ignored => {
                        format!("{}: it has no undo file that can be used ({})", path.display(), ignored.join("; "))
                    }
                },
                hint: format!(
                    "if the undo file has another name than {}, name it",
                    undo_file::numbered(&real, 1).display()
                ),
            });
        }
    };
    let done = put_back(path, &*store, files, &undo, naming)?;
    warnings.extend(done.warnings);
    let len_bytes = store.len_bytes().map_err(|source| file_error("get the length of", path, source))?;
    Ok(Undone { undo_file: undo, len_bytes, was_interrupted: done.was_interrupted, warnings })
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

/// An image that is locked for writing.
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
    steps: Vec<RepairStep>,
    steps_left_out: u64,
    after: CheckReport,
    phases: Vec<Phase>,
    len_bytes: (u64, u64),
    lost: Vec<Range<u64>>,
    costs_data: bool,
}

impl Image {
    /// The image in a locked file, of the format that is asked for or found.
    fn in_file(locked: Locked, options: &RepairOptions) -> Result<Self> {
        let Locked { path, real, store } = locked;
        let probed = || probe::probe_damaged(&store, !options.dry_run).map(|found| found.format);
        let format = options.open.format.map_or_else(probed, Ok)?;
        // A file that begins wrongly is what the repair looks at.
        if !format.driver().references(&*store).unwrap_or_default().is_empty() {
            return Err(DiskError::BadOptions {
                what: format!("{}: a {format} image in several files cannot be repaired", path.display()),
                hint: "convert it to a disk in one file; if that fails, use `rescue`".into(),
            });
        }
        Ok(Self { path, real, store, format })
    }

    fn plan(&self, options: &RepairOptions, progress: &mut Progress<'_>) -> Result<Plan> {
        let io = |source| file_error("read it", &self.path, source);
        let before = self.format.driver().check(Arc::clone(&self.store))?;
        let draft = Arc::new(Draft::new(Arc::clone(&self.store)).map_err(io)?);
        let old_bytes = draft.len_bytes().map_err(io)?;
        let (mut steps, mut steps_left_out) = (Vec::new(), 0);
        let (mut lost, mut costs_data): (Vec<Range<u64>>, bool) = (Vec::new(), false);
        let shown: Arc<dyn Store> = Arc::clone(&draft) as Arc<dyn Store>;
        let after = repair_image(self.format, &shown, options.accept_loss, &mut |step| {
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
            lost: journal::merged(lost),
            costs_data,
        })
    }

    /// Names the children in the folder, of which the image `does` something.
    fn warn_children(&self, files: &Files, does: &str) -> Vec<String> {
        let path = self.path.display();
        let Ok(image) = probe::open(Arc::clone(&self.store), Some(self.format), false, 512) else {
            return vec![format!(
                "{path}: whether the image has children could not be found out, as it cannot be opened; for any child of it: the image {does}"
            )];
        };
        let found = siblings::children_of(files, &self.real, image.info());
        let mut warnings: Vec<String> = found
            .children
            .iter()
            .map(|child| format!("{}: it is a child of {path}, which {does}", child.display()))
            .collect();
        if found.not_asked > 0 {
            warnings
                .push(format!("{path}: {} images in its folder were not checked for children of it", found.not_asked));
        }
        warnings
    }

    /// Writes the undo file, then the image. Returns what the user should know.
    fn carry_out(
        &self,
        files: &Files,
        undo: &Path,
        phases: &[Phase],
        costs_data: bool,
        progress: &mut Progress<'_>,
    ) -> Result<Vec<String>> {
        let store = &*self.store;
        let old_bytes = store.len_bytes().map_err(|source| file_error("get the length of", &self.path, source))?;
        let old_time_ns = time::time_ns(files, &self.path);
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
        let mut warnings = Vec::new();
        let journal = undo_file::create(files, undo, store, &mut warnings)?;
        // It holds bytes of the image, so no other user may read it.
        let owned = journal.take_access_of(store);
        owned.map_err(|source| file_error("give it the permissions of the image", undo, source))?;
        let head = Head {
            state: JournalState::Writing,
            inode: undo_file::inode(store),
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
        warnings.extend(self.complete(files, undo, &*journal, head, costs_data)?);
        Ok(warnings)
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
        match replay::roll_back(journal, head, &*self.store) {
            Ok(()) => {
                let time = time::restore(files, &self.path, &*self.store, head.old_time_ns);
                let removed = files.remove(undo).and_then(|()| files.sync_directory_of(undo));
                match (removed, time) {
                    (Ok(()), Some(time)) => DiskError::BadChain {
                        path: self.path.clone(),
                        what: format!("the repair ended ({error}), and its bytes were put back as they were; {time}"),
                    },
                    (Ok(()), None) if stopped => DiskError::Stopped,
                    (Ok(()), None) => file_error("repair it; it was put back as it was", &self.path, error),
                    (Err(error), _) => file_error("remove it; the image was put back as it was", undo, error),
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

    /// Makes the undo file recognise later writes. Returns what the user should know.
    fn complete(
        &self,
        files: &Files,
        undo: &Path,
        journal: &dyn Store,
        head: Head,
        costs_data: bool,
    ) -> Result<Vec<String>> {
        let store = &*self.store;
        // The children of a VHD have recorded the time.
        let keeps_time = self.format.driver().child_records_time && !costs_data && head.old_time_ns > 0;
        let mut warnings = Vec::new();
        if !keeps_time {
            time::set_back(store);
        } else if let Some(lost) = time::restore(files, &self.path, store, head.old_time_ns) {
            warnings.push(lost);
            let does = "has another time of its last change than the child has recorded: it is refused for writing until it is reconnected";
            warnings.extend(self.warn_children(files, does));
        }
        let sealed = || {
            let mut head = Head {
                state: JournalState::Complete,
                new_bytes: store.len_bytes()?,
                new_time_ns: time::time_ns(files, &self.path),
                ..head
            };
            head.changed_crc = replay::changed_crc(journal, &head, store)?;
            head.write(journal)
        };
        sealed().map_err(|source| {
            file_error(
                "complete the undo file; the image is repaired, but the next repair puts it back first",
                undo,
                source,
            )
        })?;
        Ok(warnings)
    }
}
