//! The gaps of the file: space that no table entry names. Reads it in windows, and lists what is
//! left in it.
//!
//! Holes are skipped, so a pass costs what the file stores, not its length.

use super::outcome::Leftover;
use crate::{DiskError, Progress, Result, error::file_error};
use diskwright_image::salvage::{Salvaged, read_what_can_be};
use diskwright_store::{all_zero, is_full};
use std::{collections::HashMap, fs, ops::Range, os::unix::fs::FileExt, path::Path};

/// Unit of structures: no block of a file system that is understood is larger, and none lies across
/// two such units of a payload block.
pub(super) const UNIT_BYTES: u64 = 4096;
/// Why most leftovers have no place.
pub(super) const SILENT: &str = "nothing in it states where it belongs";
/// Bytes that are looked at at once.
const WINDOW_BYTES: u64 = 1 << 20;
/// Most leftovers that are listed.
const LEFTOVERS_MAX: usize = 65_536;

/// Whether any gap holds data.
pub(super) fn has_data(salvaged: &Salvaged, gaps: &[Range<u64>], progress: &mut Progress<'_>) -> Result<bool> {
    let mut found = false;
    for gap in gaps {
        each_window(salvaged, gap, gap.start, progress, &mut |_, bytes| {
            found |= !all_zero(bytes);
            !found
        })?;
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads a range of the file from `from` on in windows, without its holes. Windows begin at
/// multiples of [`UNIT_BYTES`] from `from`. Bytes that cannot be read are zeros. `visit` answers
/// whether to go on.
pub(super) fn each_window(
    salvaged: &Salvaged,
    range: &Range<u64>,
    from: u64,
    progress: &mut Progress<'_>,
    visit: &mut dyn FnMut(u64, &[u8]) -> bool,
) -> Result<()> {
    let store = &*salvaged.store;
    let mut buf = vec![0; WINDOW_BYTES.min(range.end.saturating_sub(from)) as usize];
    let mut at = from;
    while at < range.end {
        let mut end = range.end;
        // A store that cannot name its holes has none.
        if let Ok(data) = store.next_data(at) {
            match data {
                Some(data) if data.offset_bytes < range.end => {
                    at = at.max(data.offset_bytes - (data.offset_bytes.saturating_sub(from)) % UNIT_BYTES);
                    // What follows the data is a hole, but for the rest of the unit.
                    let data_end = data.offset_bytes.saturating_add(data.len_bytes).max(at + 1);
                    end = end.min(data_end.saturating_add(UNIT_BYTES - 1) - (data_end - 1 - at) % UNIT_BYTES);
                }
                _ => break,
            }
        }
        if !progress(at, salvaged.file_bytes) {
            return Err(DiskError::Stopped);
        }
        let len = (end - at).min(WINDOW_BYTES) as usize;
        let bytes = &mut buf[..len];
        bytes.fill(0);
        read_what_can_be(store, at, bytes);
        if !visit(at, bytes) {
            break;
        }
        at += len as u64;
    }
    Ok(())
}

/// Lists the data that is left in the gaps, and writes it into a folder if the user wants it.
/// Returns also the bytes that are not listed.
pub(super) fn list_leftovers(
    salvaged: &Salvaged,
    refused: &HashMap<u64, &'static str>,
    folder: Option<&Path>,
    progress: &mut Progress<'_>,
) -> Result<(Vec<Leftover>, u64)> {
    let (mut leftovers, mut unlisted_bytes) = (Vec::new(), 0);
    let mut refused: Vec<(u64, &'static str)> = refused.iter().map(|(&at, &why)| (at, why)).collect();
    refused.sort_unstable();
    let reason = |range: &Range<u64>| {
        let from = refused.partition_point(|&(at, _)| at < range.start);
        refused.get(from).filter(|&&(at, _)| at < range.end).map_or(SILENT, |&(_, why)| why)
    };
    if let Some(folder) = folder {
        fs::create_dir_all(folder).map_err(|error| file_error("create it", folder, error))?;
    }
    // A piece is as long as a payload block at most, so that each has its own reason.
    let most_bytes = salvaged.info.block_bytes.max(WINDOW_BYTES);
    for gap in salvaged.gaps() {
        let mut run: Option<Range<u64>> = None;
        let mut runs = Vec::new();
        each_window(salvaged, &gap, gap.start, progress, &mut |at, bytes| {
            for (index, unit) in bytes.chunks(UNIT_BYTES as usize).enumerate() {
                if all_zero(unit) {
                    continue;
                }
                let start = at + index as u64 * UNIT_BYTES;
                let end = start + unit.len() as u64;
                match &mut run {
                    // Zeros between data of one block belong to it.
                    Some(run) if end - run.start <= most_bytes => run.end = end,
                    other => runs.extend(other.replace(start..end)),
                }
            }
            true
        })?;
        runs.extend(run);
        for range in runs {
            let len_bytes = range.end - range.start;
            if let Some(folder) = folder {
                save(salvaged, &range, folder)?;
            }
            if leftovers.len() >= LEFTOVERS_MAX {
                unlisted_bytes += len_bytes;
                continue;
            }
            let reason = reason(&range);
            leftovers.push(Leftover { file_offset_bytes: range.start, len_bytes, reason });
        }
    }
    Ok((leftovers, unlisted_bytes))
}

/// Writes a piece of the file into a file of its own. Bytes that cannot be read are zeros, and
/// zeros are holes.
fn save(salvaged: &Salvaged, range: &Range<u64>, folder: &Path) -> Result<()> {
    let path = folder.join(format!("{:016x}.bin", range.start));
    let written = fs::OpenOptions::new().write(true).create_new(true).open(&path).and_then(|file| {
        file.set_len(range.end - range.start)?;
        let mut written = Ok(());
        let read = each_window(salvaged, range, range.start, &mut |_, _| true, &mut |at, bytes| {
            if !all_zero(bytes) {
                written = file.write_all_at(bytes, at - range.start);
            }
            written.is_ok()
        });
        debug_assert!(read.is_ok(), "nothing stops it");
        written
    });
    written.map_err(|error| {
        let doing = if is_full(&error) { "save a leftover (the file system is full)" } else { "save a leftover" };
        file_error(doing, &path, error)
    })
}
