//! Copies what can be read. Runs of lost blocks and of blocks that no layer has are skipped at
//! once, so that a huge disk in a small file takes no time. A range that fails is read again by
//! halves, down to a sector of 512 or 4096 bytes; what still fails is lost.

use super::{
    options::RescueOptions,
    outcome::Rescued,
    ranges::{RangeKind, RangeList},
};
use crate::{
    Disk, DiskError, OpenOptions, Progress, Result,
    copying::copy::damage_of,
    engine::holes::next_known,
    error::{from_io, to_io, with_whole_need},
};
use diskwright_image::{
    Format,
    salvage::{BlockTable, Fault},
};
use diskwright_store::{BlockDevice, Blocking, CacheMode, ExtentKind, all_zero};
use std::path::Path;

/// Bytes of the disk whose extents are asked for at once.
const WINDOW_BYTES: u64 = 64 << 20;
/// Bytes that are read at once.
const CHUNK_BYTES: u64 = 1 << 20;

/// The damaged disk that is copied.
pub(super) struct Source<'a> {
    pub(super) disk: &'a Disk,
    pub(super) path: &'a Path,
    /// The blocks of the top layer.
    pub(super) table: &'a BlockTable,
    /// Blocks that no layer has may have lost their table entries.
    pub(super) is_doubted: bool,
    /// Length of a file whose bytes are those of the disk.
    pub(super) end_bytes: Option<u64>,
}

/// Copies the source into the image at `dest`, which is empty; without `dest` only reads it.
pub(super) fn copy(
    source: &Source<'_>,
    dest: Option<&Path>,
    (format, options): (Format, &RescueOptions),
    progress: &mut Progress<'_>,
) -> Result<Rescued> {
    let &Source { disk, path: source_path, table, is_doubted, .. } = source;
    let block_bytes = disk.layers()[0].image.info().block_bytes;
    let engine = options.source.engine;
    let open = OpenOptions {
        writable: true,
        format: Some(format),
        cache: CacheMode::PageCache,
        engine,
        files: options.dest.files.clone(),
        ..OpenOptions::default()
    };
    let new = dest.map(|dest| Disk::open(dest, &open)).transpose()?;
    let geometry = disk.geometry();
    let free_bytes = dest.and_then(diskwright_store::free_bytes);
    let source_error = |error| from_io("read it", source_path, error);
    let dest_error = |error| {
        let dest = dest.unwrap_or(source_path);
        let error = from_io("copy into it", dest, error);
        with_whole_need(error, ("copy into it", dest), || Some(readable_bytes(source)), free_bytes)
    };
    let mut copier = Copier {
        read: Blocking::open(disk, engine).map_err(source_error)?,
        write: new.as_ref().map(|new| Blocking::open(&**new, engine)).transpose().map_err(dest_error)?,
        sector_bytes: u64::from(geometry.logical_sector_bytes),
        dest_sector_bytes: new.as_ref().map_or(1, |new| u64::from(new.geometry().logical_sector_bytes)),
        list: RangeList::default(),
        buf: vec![0; CHUNK_BYTES as usize],
    };
    let size_bytes = geometry.size_bytes;
    let mut extents = Vec::new();
    let mut at = 0;
    while at < size_bytes {
        if !progress(at, size_bytes) {
            return Err(DiskError::Stopped);
        }
        if let Some((end_block, fault)) = table.lost_run(at / block_bytes) {
            let end = end_block.saturating_mul(block_bytes).min(size_bytes);
            copier.list.add(at, end - at, RangeKind::Lost, || Some(fault.to_string()));
            at = end;
            continue;
        }
        // A parent whose tables cannot be read has no holes.
        let known = next_known(&disk.layers(), at, size_bytes).unwrap_or(at);
        if at < known {
            let kind = if is_doubted { RangeKind::Doubted } else { RangeKind::Zero };
            copier.list.add(at, known - at, kind, || None);
            at = known;
            continue;
        }
        let len = WINDOW_BYTES.min(size_bytes - at);
        extents.clear();
        if let Err(error) = disk.extents(at, len, &mut extents) {
            // A parent whose tables cannot be read.
            copier.list.add(at, len, RangeKind::Lost, || Some(error.to_string()));
            extents.clear();
        }
        for extent in &extents {
            let (start, len) = (extent.offset_bytes, extent.len_bytes);
            match extent.kind {
                ExtentKind::Data => {
                    let mut from = start;
                    while from < start + len {
                        let until = ((from / CHUNK_BYTES + 1) * CHUNK_BYTES).min(start + len);
                        if !progress(from, size_bytes) {
                            return Err(DiskError::Stopped);
                        }
                        copier.chunk(from, until - from).map_err(dest_error)?;
                        from = until;
                    }
                }
                ExtentKind::Damaged => {
                    copier.list.add(start, len, RangeKind::Lost, || Some(reason_of(&damage_of(disk, extent))));
                }
                ExtentKind::Unallocated if is_doubted => copier.list.add(start, len, RangeKind::Doubted, || None),
                // A file without a table: what lies behind its end reads like a hole.
                _ => {
                    let held = source.end_bytes.unwrap_or(u64::MAX).clamp(start, start + len);
                    let held = held - held % copier.sector_bytes;
                    if start < held {
                        copier.list.add(start, held - start, RangeKind::Zero, || None);
                    }
                    if held < start + len {
                        let reason = || Some(Fault::BeyondEnd.to_string());
                        copier.list.add(held, start + len - held, RangeKind::Lost, reason);
                    }
                }
            }
        }
        at += len;
    }
    if !progress(size_bytes, size_bytes) {
        return Err(DiskError::Stopped);
    }
    let Copier { list, read, write, .. } = copier;
    drop((read, write));
    if let Some(new) = new {
        new.close().map_err(|error| dest_error(to_io(error)))?;
    }
    Ok(Rescued {
        data_bytes: list.bytes(RangeKind::Data),
        zero_bytes: list.bytes(RangeKind::Zero),
        lost_bytes: list.bytes(RangeKind::Lost),
        doubted_bytes: list.bytes(RangeKind::Doubted),
        unlisted_bytes: list.unlisted_bytes,
        ranges: list.ranges,
        ..Rescued::default()
    })
}

/// Bytes of the disk that hold data which can be read, by the tables.
fn readable_bytes(source: &Source<'_>) -> u64 {
    let (disk, size_bytes) = (source.disk, source.disk.geometry().size_bytes);
    let block_bytes = disk.layers()[0].image.info().block_bytes;
    let (mut at, mut found_bytes, mut extents) = (0, 0, Vec::new());
    while at < size_bytes {
        if let Some((end_block, _)) = source.table.lost_run(at / block_bytes) {
            at = end_block.saturating_mul(block_bytes).min(size_bytes);
            continue;
        }
        let known = next_known(&disk.layers(), at, size_bytes).unwrap_or(at);
        if at < known {
            at = known;
            continue;
        }
        let len = WINDOW_BYTES.min(size_bytes - at);
        extents.clear();
        // A parent whose tables cannot be read.
        let _ = disk.extents(at, len, &mut extents);
        found_bytes +=
            extents.iter().filter(|found| found.kind == ExtentKind::Data).map(|found| found.len_bytes).sum::<u64>();
        at += len;
    }
    found_bytes
}

/// The part of an error that says what was found.
fn reason_of(error: &DiskError) -> String {
    match error {
        DiskError::Image(diskwright_image::ImageError::Corrupt { found, .. }) => found.clone(),
        other => other.to_string(),
    }
}

struct Copier {
    read: Blocking,
    /// `None` if nothing is to be written.
    write: Option<Blocking>,
    sector_bytes: u64,
    dest_sector_bytes: u64,
    list: RangeList,
    buf: Vec<u8>,
}

impl Copier {
    /// Copies a chunk of data. Returns errors of the destination only.
    fn chunk(&mut self, start: u64, len: u64) -> std::io::Result<()> {
        let mut buf = std::mem::take(&mut self.buf);
        let part = &mut buf[..len as usize];
        part.fill(0);
        self.halves(start, part);
        let result = self.store(start, part);
        self.buf = buf;
        result
    }

    /// Reads what can be read. Lost parts stay zeros.
    fn halves(&mut self, start: u64, part: &mut [u8]) {
        let Err(error) = self.read.read(start, part) else {
            return self.list.add(start, part.len() as u64, RangeKind::Data, || None);
        };
        part.fill(0);
        let sector = self.sector_bytes as usize;
        if part.len() <= sector {
            return self.list.add(start, part.len() as u64, RangeKind::Lost, || Some(error.to_string()));
        }
        let half = (part.len() / 2).next_multiple_of(sector).min(part.len() - 1) / sector * sector;
        let (first, second) = part.split_at_mut(half.max(sector));
        let middle = start + first.len() as u64;
        self.halves(start, first);
        self.halves(middle, second);
    }

    /// Writes a chunk, unless it is all zeros. A destination with larger sectors than the source
    /// gets whole ones: the rest was written before, or follows and is written again.
    fn store(&mut self, start: u64, part: &[u8]) -> std::io::Result<()> {
        let Some(write) = self.write.as_mut().filter(|_| !all_zero(part)) else { return Ok(()) };
        let sector = self.dest_sector_bytes;
        let (from, until) = (start - start % sector, (start + part.len() as u64).next_multiple_of(sector));
        if (from, until) == (start, start + part.len() as u64) {
            return write.write(start, part, false);
        }
        let mut whole = vec![0; (until - from) as usize];
        write.read(from, &mut whole)?;
        whole[(start - from) as usize..][..part.len()].copy_from_slice(part);
        write.write(from, &whole, false)
    }
}
