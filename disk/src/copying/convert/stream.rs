//! Copies into a file that is written compressed, in one pass: a streamOptimized VMDK, an OVA with
//! one inside, or a qcow2.
//!
//! ```text
//!   source ─▶ packing (all processors) ─┬─▶ vmdk.rs: markers, grains, tables ─┬─▶ DEST.partial
//!                                       └─▶ qcow2.rs: clusters, tables ───────┘       │
//!                                                                                     ▼ DEST
//! ```
//!
//! As for every copy, the file gets its name when it is complete and durable, and is removed if
//! anything fails. It cannot be written afterwards, so whatever changes a copy after its data
//! (another size, an identity of its contents) is refused.

mod encode;
mod ova;
mod qcow2;
mod vmdk;

use super::{
    identity::{Identity, cannot_keep},
    options::{ConvertOptions, ConvertOutcome},
    transfer::verify_failed,
};
use crate::{
    CompareOutcome, CreateRequest, Disk, DiskError, NewSize, Opened, Progress, Result,
    copying::{
        compare::compare_with,
        create::is_there,
        packing::{Deflate, Output, Zlib},
        partial::PartialFile,
    },
    error::file_error,
    opening::ova::{Ova, is_ova},
};
use diskwright_image::{DiskType, Format, probe::known};
use diskwright_store::{BlockDevice, CacheMode, LockMode, OpenOptions, Store};
use encode::Written;
use std::{path::Path, sync::Arc};

/// The subformat of a VMDK with compressed grains, as qemu-img names it.
const STREAM_OPTIMIZED: &str = "streamOptimized";
/// What a qcow2 with compressed clusters is called here.
const COMPRESSED: &str = "compressed";

/// A file that is written compressed, in one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamKind {
    /// A VMDK whose grains are compressed.
    Vmdk,
    /// A qcow2 whose clusters are compressed.
    Qcow2,
    /// An archive with such a VMDK, the description of a virtual machine (OVF 1.1) and a manifest.
    Ova,
}

/// The kind of stream that is asked for; `None` for a copy that is an ordinary image.
pub(super) fn asked(dest: &Path, asked: &CreateRequest) -> Option<StreamKind> {
    let is_named = |kind: &str| asked.subformat.as_ref().is_some_and(|name| name.eq_ignore_ascii_case(kind));
    let format = asked.format.or_else(|| known::by_extension(dest).and_then(|known| known.format));
    match format {
        _ if asked.format.is_none() && is_ova(dest) => Some(StreamKind::Ova),
        Some(Format::Vmdk) if is_named(STREAM_OPTIMIZED) => Some(StreamKind::Vmdk),
        Some(Format::Qcow2) if is_named(COMPRESSED) => Some(StreamKind::Qcow2),
        _ => None,
    }
}

/// Copies the source into the new file `dest`.
pub(super) fn convert(
    source: (&Opened, &Path),
    dest: &Path,
    kind: StreamKind,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<ConvertOutcome> {
    check(source, dest, kind, options)?;
    let files = &options.dest.files;
    if files.facts(dest).is_ok() {
        return Err(is_there(dest));
    }
    let partial = PartialFile::new(files, dest, "conversion");
    let shown = |error| partial.shown(error);
    partial.clear()?;
    let open = OpenOptions {
        writable: true,
        create_new: true,
        cache: options.cache.unwrap_or(CacheMode::Direct),
        lock: LockMode::Exclusive,
    };
    let store = files.open(partial.path(), &open).map_err(|error| shown(error.into()))?;
    partial.created();
    let written = match kind {
        StreamKind::Vmdk => vmdk_alone(source, &store, dest, options, progress),
        StreamKind::Qcow2 => qcow2::write(source, (&store, dest), options, progress),
        StreamKind::Ova => ova::write(source, (&store, dest), options, progress),
    };
    let written = written.and_then(|written| {
        store.sync_data().map_err(|error| file_error("make it durable", dest, error))?;
        Ok(written)
    });
    drop(store);
    let written = written.and_then(|mut written| {
        if options.verify {
            let same_bytes = verify(source, (partial.path(), dest), kind, options, progress)?;
            written.outcome.verified_bytes = same_bytes - written.outcome.lost.bytes;
        }
        Ok(written)
    });
    // A copy that differs is kept under its temporary name, for inspection.
    if let Err(error @ DiskError::VerifyFailed { .. }) = written {
        return Err(error);
    }
    let discard = |_: &DiskError| partial.discard();
    let Written { mut outcome, file_bytes } = written.map_err(shown).inspect_err(discard)?;
    outcome.stream_bytes = Some(file_bytes);
    outcome.warnings.splice(0..0, source.0.warnings().iter().cloned());
    partial.give_name().inspect_err(discard)?;
    Ok(outcome)
}

fn vmdk_alone(
    source: (&Opened, &Path),
    store: &Arc<dyn Store>,
    dest: &Path,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<Written> {
    let mut output = Output::new(Arc::clone(store), 0, None);
    let name = dest.file_name().unwrap_or_default().to_string_lossy().into_owned();
    vmdk::write(source, (&mut output, dest), &name, options, progress)
}

/// Reads the new file back and compares it with the source. Returns how many bytes are the same,
/// with those of lost ranges.
fn verify(
    (source, source_path): (&Opened, &Path),
    (partial, dest): (&Path, &Path),
    kind: StreamKind,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<u64> {
    let format = if kind == StreamKind::Qcow2 { Format::Qcow2 } else { Format::Vmdk };
    let open = crate::OpenOptions { format: Some(format), ..options.open_dest() };
    let written = match kind {
        StreamKind::Vmdk | StreamKind::Qcow2 => Disk::open(partial, &open)?,
        StreamKind::Ova => Ova::open(partial, &options.dest.files)?.open_disk(&open)?,
    };
    let sides = [(source.device(), source_path), (&*written as &dyn BlockDevice, dest)];
    match compare_with(sides, u64::MAX, options.source.engine, progress, options.damage())? {
        CompareOutcome::Same => Ok(source.device().geometry().size_bytes),
        CompareOutcome::Different { offset_bytes } => Err(verify_failed(partial, source_path, offset_bytes)),
    }
}

/// Refuses what a stream cannot be or have.
pub(super) fn check(
    (source, source_path): (&Opened, &Path),
    dest: &Path,
    kind: StreamKind,
    options: &ConvertOptions,
) -> Result<()> {
    let is_qcow2 = kind == StreamKind::Qcow2;
    let refuse = |what: &str, hint: &str| {
        let what = format!("{}: {what}", dest.display());
        Err(DiskError::Usage { what, hint: hint.into() })
    };
    let asked = &options.dest;
    if asked.disk_type.is_some_and(|disk_type| disk_type != DiskType::Dynamic) {
        return refuse("its data is compressed, so it is never fixed", "leave out `CreateRequest::disk_type`");
    }
    let is_other = |name: &String| !name.eq_ignore_ascii_case(STREAM_OPTIMIZED);
    if !is_qcow2 && asked.subformat.as_ref().is_some_and(is_other) {
        return refuse("the disk in an OVA is streamOptimized", "leave out `CreateRequest::subformat`");
    }
    if asked.preallocate {
        return refuse("its length is known when it is complete", "leave out `CreateRequest::preallocate`");
    }
    if asked.block_bytes.is_some() {
        return refuse(
            "its blocks have 64 KiB, the only size that all programs read",
            "leave out `CreateRequest::block_bytes`",
        );
    }
    let sectors = [asked.logical_sector_bytes, asked.physical_sector_bytes];
    if sectors.into_iter().flatten().any(|bytes| bytes != 512) {
        return refuse("it has sectors of 512 bytes", "leave out `CreateRequest::logical_sector_bytes`");
    }
    if options.azure {
        return refuse("Azure accepts only a fixed VHD", "leave out `ConvertOptions::azure`, or name the copy .vhd");
    }
    if options.size != NewSize::Present {
        return refuse(
            "it is written in one pass, and its partition table cannot be changed afterwards",
            "leave out `ConvertOptions::size`, and `resize` the source or an intermediate copy",
        );
    }
    if options.identity == Identity::Keep {
        return Err(cannot_keep(dest, "a disk that is written in one pass gets a new one"));
    }
    let levels = if is_qcow2 { Deflate::LEVELS } else { Zlib::LEVELS };
    if options.compress_level.is_some_and(|level| !levels.contains(&level)) {
        let what = format!("its levels of compression are 1 to {}", levels.end());
        return refuse(&what, "use another `ConvertOptions::compress_level`");
    }
    let size_bytes = source.device().geometry().size_bytes;
    if !is_qcow2 && size_bytes > diskwright_format::vmdk::STREAM_SIZE_MAX_BYTES {
        return Err(DiskError::BadOptions {
            what: format!(
                "{}: a streamOptimized VMDK can have 64 TiB, and {} has {size_bytes} bytes",
                dest.display(),
                source_path.display()
            ),
            hint: "divide what is on it among several disks".into(),
        });
    }
    Ok(())
}
