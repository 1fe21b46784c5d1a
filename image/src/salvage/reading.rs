//! Reads of a file that may fail in places.

use crate::{ImageError, Result};
use diskwright_store::Store;
use std::ops::Range;

/// Reads what can be read of `buf.len()` bytes at `offset_bytes`, by ever smaller pieces where the
/// store fails. Returns the ranges of `buf` that cannot be read; they are filled with zeros.
pub fn read_what_can_be(store: &dyn Store, offset_bytes: u64, buf: &mut [u8]) -> Vec<Range<usize>> {
    let mut lost = Vec::new();
    // What lies behind the end is lost without a read of each piece.
    let held = match store.len_bytes() {
        Ok(len_bytes) => len_bytes.saturating_sub(offset_bytes).min(buf.len() as u64) as usize,
        Err(_) => buf.len(),
    };
    let (inside, behind) = buf.split_at_mut(held);
    read_pieces(store, offset_bytes, inside, 0, &mut lost);
    if !behind.is_empty() {
        behind.fill(0);
        match lost.last_mut().filter(|last| last.end == held) {
            Some(last) => last.end += behind.len(),
            None => lost.push(held..held + behind.len()),
        }
    }
    lost
}

fn read_pieces(store: &dyn Store, offset_bytes: u64, buf: &mut [u8], base: usize, lost: &mut Vec<Range<usize>>) {
    if buf.is_empty() || store.read_at(buf, offset_bytes).is_ok() {
        return;
    }
    let piece = match buf.len() {
        65_537.. => 65_536,
        4097.. => 4096,
        513.. => 512,
        _ => {
            // A file that ends within these bytes has given the first of them.
            let held =
                store.len_bytes().map_or(0, |len| len.saturating_sub(offset_bytes)).min(buf.len() as u64) as usize;
            let start = if held > 0 && held < buf.len() && store.read_at(&mut buf[..held], offset_bytes).is_ok() {
                held
            } else {
                0
            };
            buf[start..].fill(0);
            match lost.last_mut() {
                Some(last) if last.end == base + start => last.end = base + buf.len(),
                _ => lost.push(base + start..base + buf.len()),
            }
            return;
        }
    };
    for (index, part) in buf.chunks_mut(piece).enumerate() {
        let at = index * piece;
        read_pieces(store, offset_bytes + at as u64, part, base + at, lost);
    }
}

/// Takes an entry's index and its bytes.
type EachEntry<'a> = &'a mut dyn FnMut(u64, Option<&[u8]>) -> Result<()>;

/// Entries of a table that are read by one call.
const ENTRIES: u64 = 16_384;

/// Calls `each` for the entries of a table, each of `width` bytes, with `None` for one that cannot
/// be read. Returns the number of entries before the end of the file: `each` is not called for what
/// lies behind it.
pub(crate) fn each_entry(
    store: &dyn Store,
    table_bytes: u64,
    (count, width): (u64, usize),
    each: EachEntry<'_>,
) -> Result<u64> {
    let there = file_length(store)?.saturating_sub(table_bytes).div_ceil(width as u64).min(count);
    let mut bytes = vec![0; there.min(ENTRIES) as usize * width];
    for first in (0..there).step_by(ENTRIES as usize) {
        let bytes = &mut bytes[..(there - first).min(ENTRIES) as usize * width];
        let lost = read_what_can_be(store, table_bytes.saturating_add(first * width as u64), bytes);
        for (index, raw) in bytes.chunks_exact(width).enumerate() {
            let is_lost = lost.iter().any(|range| range.start < (index + 1) * width && index * width < range.end);
            each(first + index as u64, (!is_lost).then_some(raw))?;
        }
    }
    Ok(there)
}

pub(crate) fn file_length(store: &dyn Store) -> Result<u64> {
    store.len_bytes().map_err(|error| ImageError::io("get the file's length", store, 0, error))
}
