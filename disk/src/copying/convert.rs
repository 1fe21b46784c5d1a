//! Copies one disk into another. Shares data by reflink where possible and skips zeros.
//!
//! ```text
//!   window of the source ─▶ extents ─┬─ zero, unallocated ─▶ skipped (an export is zeroed)
//!                                    ├─ data ─▶ reflink whole blocks, if both files can
//!                                    └─ data ─▶ read ─▶ all zero? skip : write
//! ```
//!
//! `copy.rs` does the copying. With `verify`, the new file is reopened and compared with the
//! source.
//!
//! The copy is written under a temporary name (`DEST.partial`) and renamed, durably, when it is
//! complete and durable. So after a power cut or a `kill -9` no incomplete copy exists under the
//! final name, and the same command replaces what is left. If anything fails, or the user stops it,
//! the file is removed again. With `resume` it stays, and is used again if it is what would be
//! created (`leftover.rs`): each byte of it is compared with the source, so it does not matter
//! which command has left it, and in what state.
//!
//! A range whose table entry is damaged (`ExtentKind::Damaged`) ends the conversion. With
//! `skip_damaged` the range stays zero in the copy and is listed (`copy/lost.rs`).
//!
//! An export is written in place (`export.rs`). It has its size and old contents, so ranges that
//! are zero in the source are zeroed there.
//!
//! A file with compressed blocks is written in one pass, without an image that could be written
//! (`stream.rs`).
//!
//! A copy of another size gets its data first, then is verified, and then its partition table is
//! changed as by `resize` (`new_size.rs`). An identity that says what the contents are is set last.

mod azure;
mod export;
mod identity;
mod leftover;
mod notes;
mod options;
mod plan;
mod stream;
mod transfer;

use crate::{
    CompareOutcome, Disk, DiskError, OpenOptions, Opened, Place, Progress, Result,
    copying::{
        compare::compare_with,
        create::{create_as, is_there},
        new_size::write_table,
        partial::PartialFile,
        room::{data_bytes, empty_image_bytes},
    },
    error::from_io,
};
use diskwright_store::{BlockDevice, Blocking, CacheMode};
use diskwright_volume::Step;
pub use identity::Identity;
pub use notes::size_note;
pub use options::{ConvertOptions, ConvertOutcome, ConvertPlan};
use plan::Plan;
use std::path::Path;
use transfer::{copy, verify_failed};

/// Copies a disk into a new image, or into an existing export. Either side may be a URI (see
/// [`Place`]). `progress` counts bytes of the virtual disk; verification counts them a second time.
///
/// # Errors
/// Errors of opening, creating, reading or writing; [`DiskError::DamagedSource`];
/// [`DiskError::VerifyFailed`]; [`DiskError::Stopped`]. A new image is removed on errors, except
/// with [`ConvertOptions::resume`], and after a failed verification: then the copy is kept under
/// its partial name, for inspection. An export keeps what was copied so far.
pub fn convert(
    source: impl AsRef<Path>,
    dest: impl AsRef<Path>,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<ConvertOutcome> {
    let (source_path, dest_path) = (source.as_ref(), dest.as_ref());
    refuse_parent(options)?;
    let into_export = !matches!(Place::parse(dest_path)?, Place::File(_));
    let source = open_source(source_path, options)?;
    if into_export {
        return export::convert((&source, source_path), dest_path, options, progress);
    }
    if let Some(kind) = stream::asked(dest_path, &options.dest) {
        leftover::refuse_stream(dest_path, options)?;
        return stream::convert((&source, source_path), dest_path, kind, options, progress);
    }
    let files = &options.dest.files;
    if files.facts(dest_path).is_ok() {
        return Err(is_there(dest_path));
    }
    let mut plan = Plan::new((&source, source_path), dest_path, options, progress)?;
    let partial = PartialFile::new(files, dest_path, "conversion");
    let shown = |error| partial.shown(error);
    let is_leftover = options.resume && leftover::fits(&partial, &plan, options)?;
    if !is_leftover {
        partial.clear()?;
        create_as(dest_path, partial.path(), &plan.request).map_err(shown)?;
    }
    partial.created();
    let discard = |_: &DiskError| {
        if !options.resume {
            partial.discard();
        }
    };
    let mut outcome = fill((&source, source_path), (&partial, dest_path), &plan, options, is_leftover, progress)
        .map_err(shown)
        .inspect_err(discard)?;
    let again = OpenOptions { format: Some(plan.format), ..options.open_dest() };
    if options.verify {
        let compared = Disk::open(partial.path(), &again).and_then(|written| {
            let sides = [(source.device(), source_path), (&*written as &dyn BlockDevice, dest_path)];
            compare_with(sides, plan.size.new_bytes, options.source.engine, progress, options.damage())
        });
        match compared.map_err(shown).inspect_err(discard)? {
            CompareOutcome::Same => {
                outcome.verified_bytes = outcome.size_bytes.min(outcome.dest_bytes) - outcome.lost.bytes;
            }
            CompareOutcome::Different { offset_bytes } => {
                return Err(verify_failed(partial.path(), source_path, offset_bytes));
            }
        }
    }
    if outcome.lost.bytes > 0 {
        plan.kept.give_up_contents(source_path, dest_path);
    }
    finish(partial.path(), &plan, &again, options.verify).map_err(shown).inspect_err(discard)?;
    outcome.table = plan.size.changed_table();
    (outcome.kept_disk_id, outcome.kept_linkage_id) = (plan.kept.disk_id.is_some(), plan.kept.is_for_children);
    outcome.warnings.extend(plan.notes.into_iter().chain(plan.kept.notes));
    partial.give_name().inspect_err(discard)?;
    Ok(outcome)
}

/// Finds out what [`convert`] would do. Opens the source, and changes nothing.
///
/// # Errors
/// As [`convert`], as far as the options and the source alone show.
pub fn plan_convert(
    source: impl AsRef<Path>,
    dest: impl AsRef<Path>,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<ConvertPlan> {
    let (source_path, dest_path) = (source.as_ref(), dest.as_ref());
    refuse_parent(options)?;
    let into_export = !matches!(Place::parse(dest_path)?, Place::File(_));
    let source = open_source(source_path, options)?;
    let size_bytes = source.device().geometry().size_bytes;
    let data_bytes =
        data_bytes(&source, size_bytes).map_err(|error| from_io("find what it holds", source_path, error))?;
    let planned = ConvertPlan {
        size_bytes,
        dest_bytes: size_bytes,
        data_bytes,
        warnings: source.warnings().to_vec(),
        ..ConvertPlan::default()
    };
    if into_export {
        export::open(&source, dest_path, options)?;
        return Ok(planned);
    }
    if options.dest.files.facts(dest_path).is_ok() {
        return Err(is_there(dest_path));
    }
    if let Some(kind) = stream::asked(dest_path, &options.dest) {
        leftover::refuse_stream(dest_path, options)?;
        stream::check((&source, source_path), dest_path, kind, options)?;
        return Ok(ConvertPlan { needed_bytes: data_bytes, ..planned });
    }
    let plan = Plan::new((&source, source_path), dest_path, options, progress)?;
    let dest_bytes = plan.size.new_bytes;
    let tables_bytes = empty_image_bytes(plan.format, dest_bytes, plan.request.block_bytes).unwrap_or(0);
    let payload_bytes = if plan.request.preallocate { dest_bytes } else { data_bytes.min(dest_bytes) };
    Ok(ConvertPlan {
        dest_bytes,
        table: plan.size.changed_table(),
        needed_bytes: tables_bytes + payload_bytes,
        warnings: [planned.warnings, plan.notes, plan.kept.notes].concat(),
        ..planned
    })
}

/// Refuses a copy with a parent: zeros of the source are not written, so the parent's data would be
/// visible there.
fn refuse_parent(options: &ConvertOptions) -> Result<()> {
    let Some(parent) = &options.dest.parent else { return Ok(()) };
    Err(DiskError::Usage {
        what: format!(
            "cannot convert into a child of {}: a conversion creates a disk without a parent",
            parent.display()
        ),
        hint: "leave out the parent".into(),
    })
}

/// Copies the data into the new file `partial`, which will be called `dest`.
fn fill(
    (source, source_path): (&Opened, &Path),
    (partial, dest): (&PartialFile<'_>, &Path),
    plan: &Plan,
    options: &ConvertOptions,
    is_leftover: bool,
    progress: &mut Progress<'_>,
) -> Result<ConvertOutcome> {
    let open = OpenOptions { writable: true, format: Some(plan.format), ..options.open_dest() };
    let copy_disk = Disk::open(partial.path(), &open)?;
    partial.check(&**copy_disk.layers()[0].image.store())?;
    if options.azure {
        let start = azure::start_of(source, options.source.engine)
            .map_err(|error| from_io("read its partition table", source_path, error))?;
        azure::check(&copy_disk.layers()[0], dest, start, &plan.size)?;
    }
    let warnings = notes::of_copy(source.device().geometry(), dest, &copy_disk);
    let opened = Opened::Disk(copy_disk);
    let sides = ((source, source_path), (&opened, partial.path()));
    let outcome = copy(sides.0, sides.1, plan.size.new_bytes, options, is_leftover, progress)?;
    Ok(ConvertOutcome { warnings: [outcome.warnings.clone(), warnings].concat(), ..outcome })
}

/// Changes the partition table for the size of the copy, and gives it the identity of its contents.
fn finish(partial: &Path, plan: &Plan, open: &OpenOptions, verify: bool) -> Result<()> {
    let steps = plan.size.steps();
    if steps.is_empty() && plan.kept.contents_id.is_none() {
        return Ok(());
    }
    let disk = Disk::open(partial, &OpenOptions { writable: true, ..open.clone() })?;
    write_table(&*disk, partial, open.engine, steps)?;
    if let (Some(id), Some(writer)) = (plan.kept.contents_id, disk.layers()[0].image.writer()) {
        writer.set_linkage_id(id)?;
    }
    disk.close()?;
    drop(disk);
    if verify { verify_table(&*Disk::open(partial, open)?, partial, open, steps) } else { Ok(()) }
}

/// Reads the changed partition table back.
fn verify_table(disk: &dyn BlockDevice, path: &Path, open: &OpenOptions, steps: &[Step]) -> Result<()> {
    let read = |step: &Step| {
        let mut bytes = vec![0; step.bytes.len()];
        Blocking::open(disk, open.engine)?.read(step.offset_bytes, &mut bytes)?;
        Ok(bytes)
    };
    for (index, step) in steps.iter().enumerate() {
        let found = read(step).map_err(|error| from_io("read its partition table back", path, error))?;
        // A later step may lie over this one.
        let is_last = steps[index + 1..].iter().all(|later| later.offset_bytes != step.offset_bytes);
        if is_last && found != step.bytes {
            return Err(DiskError::BadOptions {
                what: format!(
                    "{}: the partition table at byte {} was not written as it should be",
                    path.display(),
                    step.offset_bytes
                ),
                hint: "check the storage below, and repeat the conversion".into(),
            });
        }
    }
    Ok(())
}

/// Opens the source, through the page cache if most of its data is cached there.
fn open_source(path: &Path, options: &ConvertOptions) -> Result<Opened> {
    let open = |cache| Opened::open(path, &OpenOptions { writable: false, cache, ..options.source.clone() });
    let source = open(options.cache.unwrap_or(CacheMode::Direct))?;
    let (mut held_bytes, mut all_bytes) = (0.0, 0.0);
    let layers = source.disk().map(|disk| disk.layers());
    for store in layers.iter().flat_map(|layers| layers.iter()).flat_map(|layer| layer.image.stores()) {
        let allocated_bytes = store.allocated_bytes().unwrap_or(0) as f64;
        all_bytes += allocated_bytes;
        held_bytes += allocated_bytes * store.cached_share();
    }
    if options.cache.is_none() && held_bytes > all_bytes / 2.0 { open(CacheMode::PageCache) } else { Ok(source) }
}
