//! Applies an export to a copy of its base, which then is a copy of the exported disk.
//!
//! ```text
//!   checked: identity, size, sectors, the whole export if it is a file     nothing is changed yet
//!     ─▶ identity: between base and result (mark.rs) ─▶ size, if larger
//!     ─▶ data and zeros ─▶ flush ─▶ size, if smaller ─▶ identity: that of the result
//! ```
//!
//! Every step is durable before the next one. A power cut at any moment leaves the base, a copy
//! with the identity between, or the result. The same call then applies everything, goes on, or
//! finds that nothing is left to do. An application that goes on writes everything again: what was
//! written is written with the same bytes.
//!
//! A raw disk has no identity. It is changed only with [`ApplyOptions::ignore_id_mismatch`], and an
//! application that was interrupted is repeated with it. A VHD keeps its identity when it is
//! written, so the identity shows which disk it is, but not that it was not written since.

use super::{
    change::Changes,
    mark,
    payload::{Padded, Payload, Pieces},
    sides::Difference,
    sink::{Written, write_into},
    state::DiskState,
    stream::{StoreBytes, StreamPieces},
};
use crate::{
    ChainScope, Disk, DiskError, OpenOptions, Opened, Progress, Result,
    engine::track::resume::are_beside,
    error::{braced, file_error},
    opening::{place::require_file, siblings},
};
use diskwright_format::dwdiff::MAGIC;
use diskwright_image::{DiskType, Format, LinkageId};
use diskwright_store::{BlockDevice, CacheMode, LockMode};
use std::{io::Read, ops::Range, path::Path, sync::Arc};
use uuid::Uuid;

/// In the place of the identity of a disk that has none.
const NONE: LinkageId = LinkageId::Guid(Uuid::nil());

/// The name of a stream that is not a file, in errors.
const UNNAMED_STREAM: &str = "the stream";

/// How an export is applied.
#[derive(Debug, Clone, Default)]
pub struct ApplyOptions {
    /// Applies the export also to a disk that has another identity than the export's base, or none.
    /// What the disk reads afterwards is wrong, unless it had the same contents as the base.
    pub ignore_id_mismatch: bool,
    /// How the copy is opened. `writable` and `reach` are ignored.
    pub open: OpenOptions,
    /// Checks everything and changes nothing.
    pub dry_run: bool,
}

/// An export that can be applied: a file, or a stream.
pub enum Increment<'a> {
    /// A file: a stream or a differencing image.
    File(&'a Path),
    /// A stream, which is read once.
    Stream(&'a mut dyn Read),
}

/// The result of [`apply_export`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// The identity of the exported disk, if the copy has it afterwards; `None` for a raw disk, and
    /// for one whose format has identities of another kind.
    pub result_id: Option<LinkageId>,
    /// Bytes that were written.
    pub data_bytes: u64,
    /// Bytes that were made zero.
    pub zero_bytes: u64,
    /// Virtual size of the copy before and after, in bytes.
    pub size_bytes: (u64, u64),
    /// Whether the export had been applied before, completely. Nothing was changed then.
    pub was_applied: bool,
    /// Whether this call finishes one that was interrupted.
    pub resumed: bool,
    /// Warnings for the user, one sentence each.
    pub warnings: Vec<String>,
}

/// What an export says of itself.
struct ExportHeader<'a> {
    path: &'a Path,
    base_id: Option<LinkageId>,
    /// Unknown for a differencing image.
    base_bytes: Option<u64>,
    result: DiskState,
    /// The unit of its ranges, in bytes.
    sector_bytes: u32,
    is_image: bool,
}

/// What there is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Begin,
    GoOn,
    Nothing,
}

/// Applies `export` to the disk at `copy`. Durable on return. `progress` counts bytes of the disk;
/// a file is read twice, first to check it.
///
/// # Errors
/// [`DiskError::WrongBase`] for a disk that is not the export's base; [`DiskError::BadOptions`] for
/// a disk or an export without an identity, another size or larger sectors;
/// [`DiskError::BadExport`]; [`DiskError::HasChildren`]; [`DiskError::InUse`]. Nothing has changed
/// then. [`DiskError::AppliedInPart`] and [`DiskError::Stopped`]: the same call finishes it.
pub fn apply_export(
    export: Increment<'_>,
    copy: &Path,
    options: &ApplyOptions,
    progress: &mut Progress<'_>,
) -> Result<Applied> {
    require_file(copy, "apply changes to")?;
    let path = match export {
        Increment::Stream(input) => return apply_stream(input, Path::new(UNNAMED_STREAM), copy, options, progress),
        Increment::File(path) => path,
    };
    let how = diskwright_store::OpenOptions {
        writable: false,
        create_new: false,
        cache: CacheMode::PageCache,
        lock: LockMode::Shared,
    };
    let store = options.open.files.open(path, &how)?;
    let mut magic = [0; MAGIC.len()];
    let is_stream = store.read_at(&mut magic, 0).is_ok() && magic == *MAGIC;
    if !is_stream {
        drop(store);
        return apply_image(path, copy, options, progress);
    }
    // A part of a stream must not be applied, so the whole of it is checked first.
    StreamPieces::open(&mut StoreBytes::new(Arc::clone(&store)), path)?.for_each(progress, &mut |_, _| Ok(()))?;
    apply_stream(&mut StoreBytes::new(store), path, copy, options, progress)
}

fn apply_stream(
    input: &mut dyn Read,
    path: &Path,
    copy: &Path,
    options: &ApplyOptions,
    progress: &mut Progress<'_>,
) -> Result<Applied> {
    let mut pieces = StreamPieces::open(input, path)?;
    let (base, result) = (pieces.base, pieces.result);
    let facts = ExportHeader {
        path,
        base_id: base.linkage_id,
        base_bytes: Some(base.size_bytes),
        result,
        sector_bytes: pieces.unit_bytes() as u32,
        is_image: false,
    };
    ApplyRun { facts: &facts, copy, options }.run(&mut pieces, progress)
}

fn apply_image(path: &Path, copy: &Path, options: &ApplyOptions, progress: &mut Progress<'_>) -> Result<Applied> {
    let open = OpenOptions { writable: false, scope: ChainScope::Top, format: None, ..options.open.clone() };
    let disk = Disk::open(path, &open)?;
    let layer = disk.layers()[0].clone();
    let result = DiskState::of_layer(&layer);
    let link = layer.image.parent_link().filter(|_| layer.image.info().disk_type == DiskType::Differencing);
    let Some(link) = link else {
        return Err(DiskError::BadExport {
            path: path.to_owned(),
            what: "it is neither a stream of changes nor a differencing image, so it cannot be applied; name a file that was exported".into(),
        });
    };
    let facts = ExportHeader {
        path,
        base_id: link.linkage,
        base_bytes: None,
        result,
        sector_bytes: result.sector_bytes,
        is_image: true,
    };
    let engine = options.open.engine;
    let mut changes = Difference::of_child(&disk, path, engine)?;
    // All tables first: damage is found before the copy is changed.
    changes.for_each(progress, &mut |_, _| Ok(()))?;
    let opened = Opened::Disk(Arc::clone(&disk));
    let mut pieces = Payload { disk: &opened, path, changes: &mut changes, engine };
    ApplyRun { facts: &facts, copy, options }.run(&mut pieces, progress)
}

struct ApplyRun<'a> {
    facts: &'a ExportHeader<'a>,
    copy: &'a Path,
    options: &'a ApplyOptions,
}

impl ApplyRun<'_> {
    fn run(&self, pieces: &mut dyn Pieces, progress: &mut Progress<'_>) -> Result<Applied> {
        let open = OpenOptions { writable: false, scope: ChainScope::Whole, ..self.options.open.clone() };
        // Opened for reading first: a copy that is refused is not changed, not even by a replay of
        // its log.
        let disk = Disk::open(self.copy, &open)?;
        let step = self.check(&disk)?;
        let present = DiskState::of_layer(&disk.layers()[0]);
        let mut done = Applied {
            result_id: self.facts.result.linkage_id.filter(|id| present.linkage_id.is_some_and(|of| id.is_kind_of(of))),
            data_bytes: 0,
            zero_bytes: 0,
            size_bytes: (present.size_bytes, self.size_afterwards(&present)),
            was_applied: step == Step::Nothing,
            resumed: step == Step::GoOn,
            warnings: self.identity_warning(&present).into_iter().collect(),
        };
        if step == Step::Nothing {
            if present.format == Format::Vhd {
                done.warnings.push("a VHD keeps its identity when it is written, so an older export of the same disk may be what was applied".into());
            }
            return Ok(done);
        }
        self.refuse_tracked()?;
        let allow_parent_write = self.may_write(&disk, &mut done.warnings)?;
        let pieces = &mut Padded { pieces, padding: self.padding(&present) };
        let mut written = Written::default();
        if self.options.dry_run {
            pieces.for_each(progress, &mut |piece, _| {
                written.count(&piece);
                Ok(())
            })?;
        } else {
            drop(disk);
            let disk = Disk::open(self.copy, &OpenOptions { writable: true, allow_parent_write, ..open })?;
            if self.check(&disk)? != step {
                return Err(DiskError::BadChain {
                    path: self.copy.to_owned(),
                    what: "another program has changed it meanwhile; try again".into(),
                });
            }
            done.warnings.extend_from_slice(disk.warnings());
            written = self.write(&disk, done.size_bytes.1, pieces, progress)?;
        }
        (done.data_bytes, done.zero_bytes) = (written.data_bytes, written.zero_bytes);
        Ok(done)
    }

    /// An application that goes on after an interruption could not keep its mark: the first tracked
    /// write gives the image another identity.
    fn refuse_tracked(&self) -> Result<()> {
        let files = &self.options.open.files;
        let real = files.canonical(self.copy).map_err(|source| file_error("find it", self.copy, source))?;
        if !are_beside(files, &real) {
            return Ok(());
        }
        Err(DiskError::BadOptions {
            what: format!(
                "{}: it has points of change tracking, for which everything would have changed",
                self.copy.display()
            ),
            hint: "stop its points first (`track stop`)".into(),
        })
    }

    /// The identity of the copy, which has `present` now, until everything is applied. `None` if
    /// neither state has one.
    fn mark(&self, present: LinkageId) -> Option<LinkageId> {
        let (base, result) = (self.facts.base_id, self.facts.result.linkage_id);
        let mark = base.or(result).map(|_| mark::between(base.unwrap_or(NONE), result.unwrap_or(NONE)))?;
        Some(if mark.is_kind_of(present) { mark } else { mark::of_kind(present, mark) })
    }

    /// The identity that the copy gets, which has `present` now. A disk without an identity gives
    /// its copy a new one, and so does one with an identity of another kind.
    fn result_id(&self, present: LinkageId) -> LinkageId {
        self.facts.result.linkage_id.filter(|id| id.is_kind_of(present)).unwrap_or_else(|| present.fresh())
    }

    /// What becomes of an identity that the copy cannot have.
    fn identity_warning(&self, present: &DiskState) -> Option<String> {
        let result = self.facts.result.linkage_id?;
        present.linkage_id.filter(|id| !result.is_kind_of(*id))?;
        Some(format!(
            "{}: a {} cannot have the identity {} of the exported disk, so it gets a new one; later exports of that disk apply to it only with `ApplyOptions::ignore_id_mismatch`",
            self.copy.display(),
            present.format,
            braced(result)
        ))
    }

    /// Whether the copy is the base of the export.
    fn check(&self, disk: &Disk) -> Result<Step> {
        let present = DiskState::of_layer(&disk.layers()[0]);
        let step = self.check_identity(&present)?;
        if step != Step::Nothing {
            self.check_shape(disk, &present, step)?;
        }
        Ok(step)
    }

    fn check_identity(&self, present: &DiskState) -> Result<Step> {
        let ExportHeader { path, base_id, result, .. } = self.facts;
        match present.linkage_id {
            Some(id) if self.mark(id) == Some(id) => Ok(Step::GoOn),
            Some(id) if *base_id == Some(id) => Ok(Step::Begin),
            Some(id) if result.linkage_id == Some(id) => Ok(Step::Nothing),
            _ if self.options.ignore_id_mismatch => Ok(Step::Begin),
            Some(found) if base_id.is_some() => Err(DiskError::WrongBase {
                copy: self.copy.to_owned(),
                export: path.to_path_buf(),
                found: braced(found),
                expected: base_id.map_or_else(String::new, braced),
            }),
            found => {
                let (what, whose) = match found {
                    None => (self.copy, "it is a raw disk and has no identity"),
                    Some(_) => (*path, "it was made from a raw disk, which has no identity"),
                };
                Err(DiskError::BadOptions {
                    what: format!(
                        "{}: {whose}, so nothing shows whether {} has the contents to which the changes apply; nothing was changed",
                        what.display(),
                        self.copy.display()
                    ),
                    hint: "if it has, apply them with `ApplyOptions::ignore_id_mismatch`; if it has not, the result is damaged".into(),
                })
            }
        }
    }

    /// Whether size and sectors of the copy fit.
    fn check_shape(&self, disk: &Disk, present: &DiskState, step: Step) -> Result<()> {
        let ExportHeader { path, base_bytes, result, sector_bytes, .. } = self.facts;
        let refused = |what: String, hint: &str| {
            Err(DiskError::BadOptions {
                what: format!("{}: {what}; nothing was changed", self.copy.display()),
                hint: hint.into(),
            })
        };
        if present.sector_bytes > *sector_bytes {
            return refused(
                format!(
                    "it has sectors of {} bytes, and the ranges of {} are multiples of {sector_bytes}",
                    present.sector_bytes,
                    path.display()
                ),
                "apply it to a copy with the sectors of the base",
            );
        }
        let now = present.size_bytes;
        if base_bytes.is_none()
            && step == Step::Begin
            && present.linkage_id != self.facts.base_id
            && now > result.size_bytes
        {
            return refused(
                format!(
                    "it has {now} bytes, and the disk in {} has {}; a differencing image does not say how long its base is, so it is not known which part of the copy belongs to it",
                    path.display(),
                    result.size_bytes
                ),
                "export the changes as a stream (.dwdiff), which says that",
            );
        }
        let padding = self.padding(present);
        let after = self.size_afterwards(present);
        let sector_bytes = u64::from(present.sector_bytes);
        if !padding.is_empty() && !padding.start.is_multiple_of(sector_bytes) || !after.is_multiple_of(sector_bytes) {
            return refused(
                format!(
                    "it has sectors of {sector_bytes} bytes, and {} is for a disk whose size is not a multiple of them",
                    path.display()
                ),
                "apply it to a copy with the sectors of the base",
            );
        }
        let base_bytes = base_bytes.unwrap_or(now);
        let is_base = now == base_bytes || step == Step::GoOn && now == result.size_bytes;
        // Without an identity an interrupted application cannot be recognised. A device may be
        // larger than the disk.
        let may_be = now == result.size_bytes || now >= base_bytes.max(result.size_bytes);
        if !(is_base || self.options.ignore_id_mismatch && may_be) {
            return refused(
                format!("it has {now} bytes, and {} applies to a disk of {base_bytes}", path.display()),
                "name a copy of the disk from which the export was made",
            );
        }
        let info = disk.layers()[0].image.info().clone();
        let most = if info.has_blocks { info.format.driver().size_max_bytes } else { u64::MAX };
        if after > most {
            return refused(
                format!("it would get {after} bytes, and a {} disk has at most {most}", info.format),
                "convert it to VHDX first",
            );
        }
        if after > now {
            disk.check_growth(after)?;
        }
        if after < now && !disk.geometry().read_only {
            disk.check_shrink(after)?;
        }
        Ok(())
    }

    /// The part of the copy behind the end of the base that the result has too. What a longer copy
    /// holds there is not known.
    fn padding(&self, present: &DiskState) -> Range<u64> {
        let base_bytes = self.facts.base_bytes.unwrap_or(u64::MAX);
        let end = self.facts.result.size_bytes.min(present.size_bytes);
        base_bytes.min(end)..end
    }

    /// The size of the copy when everything is applied. A copy that is larger than the base keeps
    /// its size.
    fn size_afterwards(&self, present: &DiskState) -> u64 {
        let result_bytes = self.facts.result.size_bytes;
        let id = present.linkage_id;
        let is_base = match self.facts.base_bytes {
            Some(base_bytes) => present.size_bytes <= base_bytes,
            None => id.is_some() && (id == self.facts.base_id || id == id.and_then(|id| self.mark(id))),
        };
        if is_base { result_bytes } else { result_bytes.max(present.size_bytes) }
    }

    /// Refuses a copy that another image has as its parent. The export itself may be the one that
    /// has: it loses its parent, as a merged child does. Whether it was exported or is a disk is
    /// not recorded in it, but a disk with children is certainly one. Returns whether the copy must
    /// be opened as one with a child.
    fn may_write(&self, disk: &Disk, warnings: &mut Vec<String>) -> Result<bool> {
        let OpenOptions { files, allow_parent_write, .. } = &self.options.open;
        if *allow_parent_write {
            return Ok(true);
        }
        let found = siblings::children_of(files, self.copy, disk.layers()[0].image.info());
        let export = files.canonical(self.facts.path).ok().filter(|_| self.facts.is_image && found.not_asked == 0);
        if let Some(child) = found.children.iter().find(|child| Some(*child) != export.as_ref()) {
            return Err(DiskError::HasChildren { path: self.copy.to_owned(), child: child.clone() });
        }
        let Some(export) = export.filter(|_| !found.children.is_empty()) else { return Ok(false) };
        let open = OpenOptions { writable: false, scope: ChainScope::Top, format: None, ..self.options.open.clone() };
        let child = Disk::open(&export, &open)?;
        if let Some(below) = siblings::children_of(files, &export, child.layers()[0].image.info()).children.first() {
            return Err(DiskError::BadOptions {
                what: format!(
                    "{}: it is a disk and not an export: {} has it as its parent; {} cannot be its parent any more once its changes are applied",
                    self.facts.path.display(),
                    below.display(),
                    self.copy.display()
                ),
                hint: "merge the disk into its parent, or export its changes and apply the export".into(),
            });
        }
        warnings.push(format!(
            "{}: it has {} as its parent, and cannot be opened once its changes are in it; a disk that is still needed is merged, not applied",
            self.facts.path.display(),
            self.copy.display()
        ));
        Ok(true)
    }

    /// Applies everything. The disk has `size_bytes` afterwards.
    fn write(
        &self,
        disk: &Arc<Disk>,
        size_bytes: u64,
        pieces: &mut dyn Pieces,
        progress: &mut Progress<'_>,
    ) -> Result<Written> {
        let image = Arc::clone(&disk.layers()[0].image);
        let set_identity = |id: LinkageId| match image.writer() {
            Some(writer) if image.linkage_id().is_some() => Ok(writer.set_linkage_id(id)?),
            _ => Ok::<_, DiskError>(()),
        };
        // Without a mark the copy is not what it was, whatever happens.
        let present = image.linkage_id().unwrap_or(NONE);
        set_identity(self.mark(present).unwrap_or_else(|| present.fresh()))?;
        let mut apply = |progress: &mut Progress<'_>| {
            let present_bytes = disk.geometry().size_bytes;
            if size_bytes > present_bytes {
                disk.grow(size_bytes)?;
            }
            let written = write_into(&**disk, self.copy, self.options.open.engine, pieces, progress)?;
            if size_bytes < present_bytes {
                disk.shrink(size_bytes)?;
            }
            set_identity(self.result_id(present))?;
            disk.close()?;
            Ok(written)
        };
        apply(progress).map_err(|error| match error {
            DiskError::Stopped => DiskError::Stopped,
            error => DiskError::AppliedInPart { copy: self.copy.to_owned(), error: Box::new(error) },
        })
    }
}
