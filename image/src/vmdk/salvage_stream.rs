//! Compressed grains of a damaged streamOptimized extent. A marker before each of them names it.
//!
//! ```text
//!   entries of tables ─▶ a marker that names the same grain ─▶ held
//!   gaps of the file  ─▶ a marker, and data that decompress to a whole grain ─▶ placed
//! ```
//!
//! zlib ends with a checksum, so no other bytes pass for a grain. A grain that several markers
//! name is lost, unless a table names one of them. A stream without tables says of no grain that
//! it is absent: what no marker names is lost.

use crate::{
    Result,
    salvage::{Fault, Salvaged, SalvagedBlock, Unpack, read_what_can_be},
};
use diskwright_format::vmdk::{GRAIN_MARKER_BYTES, Marker, SECTOR_BYTES};
use diskwright_store::Store;
use std::{collections::BTreeMap, sync::Arc};

/// Bytes of the file that are read at once in the search for markers.
const WINDOW_BYTES: u64 = 1 << 20;

/// Decompresses grains: the data are a marker and what follows it.
#[derive(Debug)]
struct Grain {
    grain_bytes: u64,
}

pub(super) fn unpacker(grain_bytes: u64) -> Arc<dyn Unpack> {
    Arc::new(Grain { grain_bytes })
}

impl Unpack for Grain {
    fn unpack(&self, _: u64, packed: &[u8]) -> std::result::Result<Vec<u8>, String> {
        let data = packed.get(GRAIN_MARKER_BYTES as usize..).unwrap_or_default();
        let mut bytes = vec![0; self.grain_bytes as usize];
        let len = libdeflater::Decompressor::new().zlib_decompress(data, &mut bytes);
        let len = len.map_err(|error| format!("data that do not decompress ({error})"))?;
        bytes.truncate(len);
        Ok(bytes)
    }
}

/// The length of the data at `at`, their marker included, if it is the marker of this grain.
pub(super) fn marked(store: &dyn Store, at: u64, grain: u64, grain_bytes: u64) -> Option<u64> {
    let mut head = [0; 16];
    let lost = read_what_can_be(store, at, &mut head);
    // A short file may end within the data.
    if lost.first().is_some_and(|range| range.start < GRAIN_MARKER_BYTES as usize) {
        return None;
    }
    let (named, len_bytes) = named_by(&head, grain_bytes)?;
    (named == grain).then_some(len_bytes)
}

/// The grain that a marker names, and the length of the marker and its data.
fn named_by(head: &[u8], grain_bytes: u64) -> Option<(u64, u64)> {
    let Some(Marker::Grain(marker)) = Marker::parse(head) else { return None };
    let grain_sectors = grain_bytes / SECTOR_BYTES;
    // Deflate stores what it cannot compress, with 5 bytes for each 64 KiB.
    let fits = u64::from(marker.data_bytes) <= grain_bytes + grain_bytes / 8 + 512;
    (fits && marker.first_sector.is_multiple_of(grain_sectors))
        .then(|| (marker.first_sector / grain_sectors, GRAIN_MARKER_BYTES + u64::from(marker.data_bytes)))
}

/// Places the grains that no table names by their markers.
pub(super) fn place(salvaged: &mut Salvaged) -> Result<()> {
    let mut found: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
    for gap in salvaged.gaps() {
        let mut at = gap.start.next_multiple_of(SECTOR_BYTES);
        let mut window = Vec::new();
        let mut window_at = at;
        while at < gap.end {
            if at >= window_at + window.len() as u64 {
                match salvaged.store.next_data(at) {
                    Ok(Some(data)) => at = at.max(data.offset_bytes - data.offset_bytes % SECTOR_BYTES),
                    Ok(None) => break,
                    Err(_) => {}
                }
                if at >= gap.end {
                    break;
                }
                window_at = at;
                window.clear();
                window.resize((gap.end - at).min(WINDOW_BYTES) as usize, 0);
                read_what_can_be(&*salvaged.store, at, &mut window);
            }
            let within = (at - window_at) as usize;
            let head = &window[within..(within + 16).min(window.len())];
            at = match grain_at(salvaged, at, gap.end, head) {
                Some((grain, len_bytes)) => {
                    found.entry(grain).or_default().push((at, len_bytes));
                    (at + len_bytes).next_multiple_of(SECTOR_BYTES)
                }
                None => at + SECTOR_BYTES,
            };
        }
    }
    let store = Arc::clone(&salvaged.store);
    for (grain, places) in found {
        match (salvaged.table.get(grain), &places[..]) {
            (Ok(Some(_)), _) => {}
            (_, &[(offset_bytes, len_bytes)]) => {
                salvaged.table.hold(&*store, grain, SalvagedBlock::Packed { offset_bytes, len_bytes })?;
            }
            (Ok(None), _) => salvaged.table.lose(&*store, grain, grain + 1, Fault::Claimed)?,
            (Err(_), _) => {}
        }
    }
    Ok(())
}

/// The grain of the marker at `at`, if its data are whole, and their length with the marker.
fn grain_at(salvaged: &Salvaged, at: u64, end: u64, head: &[u8]) -> Option<(u64, u64)> {
    let (grain, len_bytes) = named_by(head, salvaged.info.block_bytes)?;
    if grain >= salvaged.table.count() || at + len_bytes > end {
        return None;
    }
    let mut packed = vec![0; len_bytes as usize];
    let is_read = read_what_can_be(&*salvaged.store, at, &mut packed).is_empty();
    let bytes = salvaged.unpack.as_ref()?.unpack(grain, &packed).ok().filter(|_| is_read)?;
    (bytes.len() as u64 >= salvaged.bytes_in_disk(grain)).then_some((grain, len_bytes))
}
