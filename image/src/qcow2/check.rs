//! Reports damage in a qcow2 image, and how it is repaired.
//!
//! ```text
//!   header, extensions      a file that cannot be opened has one finding, which says why
//!   snapshots, bitmaps      their records; their tables
//!   check_walk.rs           every reference to a cluster, and entries that are invalid
//!   check_counts.rs         how often each cluster is referred to, in bounded memory
//!   check_refcounts.rs      refcounts against references, COPIED flags, overlaps
//!   check_contents.rs       compressed clusters; a cluster that the end of the file cuts
//! ```
//!
//! If the snapshots or the bitmaps cannot be read, what only they refer to looks leaked. Then
//! nothing is reported as leaked, and no refcount is lowered.

use super::{
    check_contents, check_refcounts::Refcounts, check_walk::Walk, corrupt, header::HeaderCluster, layout::Layout,
    records, tables::Tables,
};
use crate::{
    error::{ImageError, Result},
    findings::{Change, CheckOutcome, CheckReport, Finding, Findings, Severity, corruption},
};
use diskwright_format::qcow2::{Invalid, features};
use diskwright_store::Store;
use std::{io, sync::Arc};

pub(super) use super::check_refcounts::Usage;

/// Offset of the incompatible features in the header.
const INCOMPATIBLE_AT: u64 = 72;

/// Checks an image: its file, and its external data file; `None` for one that could not be opened.
///
/// # Errors
/// `NotAnImage` if the file is not qcow2; `Io`.
pub fn examine(stores: &[Option<Arc<dyn Store>>], for_repair: bool) -> Result<CheckOutcome> {
    run(stores, Findings::new(for_repair), None)
}

/// Checks an image in one file that is about to be written, and says which of its clusters are
/// used.
///
/// # Errors
/// `NotAnImage` if the file is not qcow2; `Io`.
pub(super) fn examine_for_use(store: &Arc<dyn Store>, usage: &mut Usage) -> Result<CheckReport> {
    Ok(run(&[Some(Arc::clone(store))], Findings::new(false), Some(usage))?.report)
}

fn run(stores: &[Option<Arc<dyn Store>>], mut findings: Findings, usage: Option<&mut Usage>) -> Result<CheckOutcome> {
    let Some(Some(store)) = stores.first() else {
        let none = io::Error::new(io::ErrorKind::InvalidInput, "an image needs a file");
        return Err(ImageError::Io { doing: "check it", path: Default::default(), offset_bytes: 0, source: none });
    };
    let store = &**store;
    let mut report = CheckReport::default();
    let front = match HeaderCluster::read(store) {
        Ok(front) => front,
        Err(error) => {
            findings.add(corruption(error)?);
            return Ok(findings.finish(report));
        }
    };
    let header = &front.header;
    let geometry = header.geometry();
    report.total_blocks = header.size_bytes.div_ceil(geometry.unit_bytes());
    if header.l1.offset_bytes.checked_add(header.l1.len_bytes).is_none_or(|end| end > front.file_bytes) {
        let found = format!("an L1 table of {} bytes at offset {}", header.l1.len_bytes, header.l1.offset_bytes);
        let expected = format!("a place in the file of {} bytes", front.file_bytes);
        findings.add(corruption(corrupt(store, 0, Invalid::new("qcow2 header", 40, found, expected)))?);
        return Ok(findings.finish(report));
    }
    let mut knows_all = true;
    let (snapshots, snapshot_table_bytes) = match records::snapshots(store, header, front.file_bytes) {
        Ok(read) => read,
        Err(error) => {
            knows_all = false;
            findings.add(corruption(error)?);
            (Vec::new(), 0)
        }
    };
    let mut l1_tables = Vec::new();
    for snapshot in &snapshots {
        match records::fault_of_snapshot(snapshot, header, front.file_bytes) {
            None => l1_tables.push(snapshot.l1),
            Some(invalid) => {
                knows_all = false;
                let finding = corruption(corrupt(store, header.snapshots_offset_bytes, invalid))?;
                let message = format!("Snapshot {:?}: {}", snapshot.name, finding.message);
                findings.add(finding.says(message));
            }
        }
    }
    let bitmaps = match &front.extensions.bitmaps {
        None => Vec::new(),
        Some(extension) if header.features.autoclear & features::BITMAPS == 0 => {
            let found = format!("{} bitmaps that were not kept up to date", extension.count);
            let finding = Finding::new(Severity::Note, extension.offset_bytes, "bitmaps extension", found, "");
            findings.add(finding.says(
                "The bitmaps were not kept up to date by the last program that wrote the image; they count as unused.",
            ));
            Vec::new()
        }
        Some(extension) => match records::bitmaps(store, extension, &geometry, front.file_bytes) {
            Ok(bitmaps) => bitmaps,
            Err(error) => {
                knows_all = false;
                findings.add(corruption(error)?);
                Vec::new()
            }
        },
    };
    let walk = Walk::new(store, &front, &l1_tables, snapshot_table_bytes, &bitmaps, &mut findings)?;
    let is_for_use = usage.is_some();
    Refcounts::new(&walk, knows_all, usage).check(&mut findings, &mut report)?;
    if !is_for_use && (walk.has_packed.get() || !front.file_bytes.is_multiple_of(geometry.cluster_bytes())) {
        check_contents::check(store, &mut findings)?;
    }
    if geometry.has_data_file {
        check_data_file(store, stores.get(1).and_then(Option::as_ref), &mut findings)?;
    }
    check_marks(&front, knows_all, &mut findings);
    Ok(findings.finish(report))
}

/// Clusters of a data file have one place each, which is their offset on the disk.
fn check_data_file(store: &dyn Store, data_file: Option<&Arc<dyn Store>>, findings: &mut Findings) -> Result<()> {
    let layout = match Layout::read(store, data_file.map(|data| &**data), None) {
        Ok(layout) => layout,
        Err(error) => {
            findings.add(corruption(error)?);
            return Ok(());
        }
    };
    let tables = Tables { store, layout: &layout };
    tables.each_entry(0, u64::MAX, &mut |cluster, found| {
        // The walk has reported invalid entries.
        if let Ok(entry) = found {
            let subclusters = 0..layout.geometry.subclusters();
            if let Some(invalid) = subclusters.filter_map(|sub| layout.place(cluster, sub, entry).err()).next() {
                let (_, entry_at) = tables.entry(cluster)?;
                findings.add(corruption(corrupt(store, entry_at, invalid))?);
            }
        }
        Ok(true)
    })
}

/// The bits by which a program says that an image was not closed, or is damaged.
fn check_marks(front: &HeaderCluster, knows_all: bool, findings: &mut Findings) {
    let features = front.header.features;
    let may_clear = knows_all && !findings.has_faults();
    let mut left = features.incompatible;
    for (bit, severity, name, message) in [
        (
            features::DIRTY,
            Severity::Note,
            "dirty bit",
            "The image is marked dirty: it was not closed, and its refcounts may be wrong. Its contents are not affected.",
        ),
        (
            features::CORRUPT,
            Severity::Corrupt,
            "corrupt bit",
            "The image is marked corrupt: a program that wrote it found damaged structures.",
        ),
    ] {
        if !features.has(bit) {
            continue;
        }
        let finding = Finding::new(severity, INCOMPATIBLE_AT, name, "set", "clear").says(message);
        if may_clear {
            left &= !bit;
            let cleared = Change::Write(INCOMPATIBLE_AT, left.to_be_bytes().to_vec());
            findings.add_repairable(finding, "the bit is cleared, as the structures are right now", vec![cleared]);
        } else {
            findings.add(finding);
        }
    }
}
