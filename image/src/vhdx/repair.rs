//! What a repair of a VHDX needs besides the writes that `check.rs` names: the identities of the
//! file, its log, and proofs for changes of structures without which the file cannot be opened.
//!
//! - A repair begins with a new FileWriteGuid in both headers (MS-VHDX 2.2.2.1). That repairs a
//!   damaged header too. The DataWriteGuid stays, and with it the link of children, unless data is
//!   given up.
//! - The log is replayed by the code that opens a disk for writing (`open.rs`): its entries are
//!   validated in memory before the first page is written.
//! - Two valid region tables that differ: readers use the first. Only if the file cannot be opened
//!   with the first but with the second, the second is the right one. The proof is made in memory,
//!   by opening the file with the second laid over the first.
//! - A log without a valid sequence is emptied only if the caller gives up data, and if the file
//!   can be opened without its log, again in memory.

use super::{
    header::Headers,
    open::{load, read_headers},
};
use crate::{
    error::Result,
    findings::{Finding, Repair},
};
use diskwright_format::vhdx::{Header, Slot, region::REGION_TABLE_OFFSETS};
use diskwright_store::{Barrier, OverlayStore, Store};
use std::{collections::BTreeMap, sync::Arc};
use uuid::Uuid;

/// Size of a page of an [`OverlayStore`] in bytes.
const PAGE_BYTES: usize = 4096;

/// Writes the identities that must change before a repair. Durable on return.
///
/// # Errors
/// `Corrupt` if no header is valid; `Io`.
pub(crate) fn begin_repair(store: &Arc<dyn Store>, costs_data: bool) -> Result<()> {
    let (barrier, mut headers) = open_headers(store)?;
    if costs_data { headers.begin_data_write(&barrier) } else { headers.begin_file_write(&barrier) }
}

/// Replays the log, or drops its entries. The log is empty then, durably.
///
/// # Errors
/// As an open for writing.
pub(crate) fn settle_log(store: &Arc<dyn Store>, replays: bool) -> Result<()> {
    if replays {
        return load(Arc::clone(store), true).map(drop);
    }
    let (barrier, mut headers) = open_headers(store)?;
    headers.set_log_guid(&barrier, Uuid::nil())
}

fn open_headers(store: &Arc<dyn Store>) -> Result<(Barrier, Headers)> {
    let (slot, header) = read_headers(&**store, &mut Vec::new())?;
    Ok((Barrier::new(Arc::clone(store)), Headers::new(slot, header)))
}

/// Whether the file can be opened with these bytes as its first region table.
///
/// # Errors
/// `Io`.
pub(super) fn other_region_table_opens(store: &Arc<dyn Store>, second: &[u8]) -> Result<bool> {
    let pages = second.chunks_exact(PAGE_BYTES).zip((REGION_TABLE_OFFSETS[0]..).step_by(PAGE_BYTES));
    opens_with(store, pages.map(|(page, offset_bytes)| (offset_bytes, page.into())).collect())
        .map(|size| size.is_some())
}

/// The size of the disk in bytes if `finding` is about the log and the file can be opened without
/// it.
///
/// # Errors
/// `Io`.
pub(super) fn size_without_log(store: &Arc<dyn Store>, finding: &Finding) -> Result<Option<u64>> {
    if !finding.structure.starts_with("log") || finding.repair != Repair::Impossible {
        return Ok(None);
    }
    let Ok((_, header)) = read_headers(&**store, &mut Vec::new()) else { return Ok(None) };
    let without_log = Header { log_guid: Uuid::nil(), ..header }.to_bytes();
    // Two equal headers are valid.
    let slots = [Slot::First, Slot::Second].map(|slot| (slot.offset_bytes(), without_log.clone().into()));
    opens_with(store, slots.into_iter().collect())
}

/// The size of the disk in bytes if the file can be opened with these pages laid over it.
fn opens_with(store: &Arc<dyn Store>, pages: BTreeMap<u64, Box<[u8]>>) -> Result<Option<u64>> {
    let io = |error| crate::ImageError::io("lay pages over the file", &**store, 0, error);
    let overlay = OverlayStore::new(Arc::clone(store), pages, 0).map_err(io)?;
    Ok(load(Arc::new(overlay), false).ok().map(|opened| opened.info.size_bytes))
}
