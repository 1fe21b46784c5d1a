//! A raw disk in several files (`disk.001`, `disk.002`, ...) as one image with several stores.
//!
//! `split -d -a 3`, FTK Imager, ewfexport and others write such files. The first byte of a part
//! follows the last byte of the previous part:
//!
//! ```text
//!   disk   |0           5 MiB|5 MiB          12 MiB|12 MiB  13 MiB|
//!   part    disk.001          disk.002              disk.003
//!   block   0 1 2 3 4         5 6 7 8 9 10 11       12
//! ```
//!
//! Here a block has 1 MiB, the largest power of two that divides 5 MiB and 12 MiB.
//!
//! There is nothing to map. The disk is cut into pseudo-blocks so that each lies in one part. Their
//! size is the largest power of two up to 64 MiB that divides the start of each part on the disk.
//! Every block is always [`BlockState::Data`].
//!
//! Invariants: every part but the last has at least one sector and ends at a sector boundary. The
//! last part may end within a sector. As with a single raw file, the rest of that sector reads as
//! zeros, and the file is extended before the first write. No other length changes. At most
//! [`PARTS_MAX`] parts are opened.
//!
//! A flush syncs every part, one after the other, because the engine does not tell the image which
//! part a write reached. A failed sync of one part poisons the whole image
//! ([`SplitWriter::check_syncs`] checks every barrier, before and after the syncs). So a flush that
//! runs at the same time on another part fails too.
//!
//! [`part_number`] and [`part_path`] know the names of parts. The code that opens a disk decides
//! which files belong to it.

use crate::{
    BlockState, CheckReport, Commit, DiskType, Finding, Format, Image, ImageError, ImageInfo, ImageWriter, Reservation,
    Result, SectorBitmap, Severity,
    flat::{self, FLAT_ALIGNMENT_BYTES, PSEUDO_BLOCK_BYTES},
    raw::{Measured, check_sector_bytes, measure},
};
use diskwright_store::{Barrier, Store};
use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Maximum number of parts of a disk.
pub const PARTS_MAX: usize = 1024;

/// Maximum number of digits in a part's extension. Longer numbers are dates and the like.
const DIGITS_MAX: usize = 4;

/// The number in a part's extension: `.` and three digits, or four digits from 1000 on. `None` if
/// the file name is not that of a part.
pub fn part_number(path: &Path) -> Option<u32> {
    let digits = path.extension()?.to_str()?;
    let fits = digits.len() == 3 || digits.len() == DIGITS_MAX && !digits.starts_with('0');
    (fits && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.parse().ok()).flatten()
}

/// The path of part `number` of the disk, where `path` is any of its parts.
pub fn part_path(path: &Path, number: u32) -> PathBuf {
    path.with_extension(format!("{number:03}"))
}

/// A raw disk in several files.
#[derive(Debug)]
pub struct SplitRawImage {
    info: ImageInfo,
    parts: Vec<Arc<dyn Store>>,
    /// Offset on the disk at which each part begins, in bytes. The first is 0.
    starts: Arc<[u64]>,
    writer: Option<SplitWriter>,
}

impl SplitRawImage {
    /// Opens the disk that consists of `parts`, in this order, with sectors of
    /// `logical_sector_bytes`.
    ///
    /// # Errors
    /// `Io` if a length cannot be determined; `Corrupt` for a part that is not the last and is
    /// empty or ends within a sector; `Unsupported` for no parts or more than [`PARTS_MAX`], for a
    /// disk of more than 2^64 bytes, and for a sector size other than a power of two from 512 to
    /// 4096.
    pub fn new(parts: Vec<Arc<dyn Store>>, writable: bool, logical_sector_bytes: u32) -> Result<Self> {
        let Some((last, before)) = parts.split_last() else {
            return Err(unsupported(Path::new(""), "a raw disk of no files".into()));
        };
        let name = parts[0].name().to_owned();
        if parts.len() > PARTS_MAX {
            let what = format!("a raw disk of {} files (at most {PARTS_MAX})", parts.len());
            return Err(unsupported(&name, what));
        }
        check_sector_bytes(&**last, logical_sector_bytes)?;
        let (mut starts, mut at) = (vec![0], 0_u64);
        for (number, part) in before.iter().enumerate() {
            let len_bytes = len_of(&**part)?;
            if let Some(expected) = fault(len_bytes, logical_sector_bytes) {
                return Err(ImageError::Corrupt {
                    path: part.name().to_owned(),
                    structure: "the end of the file",
                    offset_bytes: len_bytes,
                    found: format!("a length of {len_bytes} bytes"),
                    expected: format!("{expected}, as {} continues the disk", parts[number + 1].name().display()),
                });
            }
            at = at.checked_add(len_bytes).ok_or_else(|| too_large(&name))?;
            starts.push(at);
        }
        let Measured { store: last, size_bytes: last_bytes, padding_end_bytes, remark } =
            measure(Arc::clone(last), logical_sector_bytes)?;
        let size_bytes = at.checked_add(last_bytes).ok_or_else(|| too_large(&name))?;
        let parts: Vec<_> = before.iter().cloned().chain([last]).collect();
        let block_bytes = block_bytes(&starts);
        let info = ImageInfo {
            has_blocks: false,
            logical_sector_bytes,
            physical_sector_bytes: logical_sector_bytes,
            payload_alignment_bytes: block_bytes.min(u64::from(FLAT_ALIGNMENT_BYTES)) as u32,
            remarks: remark.into_iter().collect(),
            ..ImageInfo::new(Format::Raw, DiskType::Fixed, size_bytes, block_bytes)
        };
        let starts: Arc<[u64]> = starts.into();
        let writer = writable.then(|| SplitWriter {
            barriers: parts.iter().map(|part| Barrier::new(Arc::clone(part))).collect(),
            starts: Arc::clone(&starts),
            size_bytes,
            block_bytes,
            padding_end_bytes,
        });
        Ok(Self { info, parts, starts, writer })
    }
}

/// Checks the lengths of `parts`. `missing` is the path of a part that does not exist although
/// later parts do.
///
/// # Errors
/// `Io` if a length cannot be determined.
pub fn check(parts: &[Arc<dyn Store>], missing: Option<&Path>, logical_sector_bytes: u32) -> Result<CheckReport> {
    let (mut findings, mut at) = (Vec::new(), 0_u64);
    let mut find = |offset_bytes, name: &Path, found: String, expected: &str, message| {
        let structure = name.display().to_string();
        findings.push(Finding::new(Severity::Corrupt, offset_bytes, structure, found, expected).says(message));
    };
    for (number, part) in parts.iter().enumerate() {
        let len_bytes = len_of(&**part)?;
        let is_last = number + 1 == parts.len() && missing.is_none();
        if let Some(expected) = fault(len_bytes, logical_sector_bytes).filter(|_| !is_last) {
            let name = part.name();
            let message = format!(
                "{}: found a length of {len_bytes} bytes, expected {expected}, as another file continues the disk",
                name.display()
            );
            find(at, name, format!("a length of {len_bytes} bytes"), &expected, message);
        }
        at = at.saturating_add(len_bytes);
    }
    if let Some(missing) = missing {
        let message = format!("{}: the file is missing, but later files of the disk are there", missing.display());
        find(at, missing, "no file".into(), "a file, as later files of the disk are there", message);
    }
    Ok(CheckReport { findings, ..CheckReport::default() })
}

/// The expected length of a part that is not the last; `None` if its length is valid.
fn fault(len_bytes: u64, sector_bytes: u32) -> Option<String> {
    match len_bytes {
        0 => Some("at least one sector".into()),
        _ if !len_bytes.is_multiple_of(u64::from(sector_bytes)) => {
            Some(format!("a multiple of the sector of {sector_bytes} bytes"))
        }
        _ => None,
    }
}

/// The largest pseudo-block size at which no block crosses a part boundary. The starts are
/// multiples of the sector, so the size is at least one sector.
fn block_bytes(starts: &[u64]) -> u64 {
    let common = starts.iter().fold(PSEUDO_BLOCK_BYTES, |common, start| common | start);
    1 << common.trailing_zeros()
}

fn len_of(part: &dyn Store) -> Result<u64> {
    part.len_bytes().map_err(|error| ImageError::io("get the length of the file", part, 0, error))
}

fn unsupported(path: &Path, what: String) -> ImageError {
    let hint = "join the files into one (`cat disk.0* > disk.raw`)".into();
    ImageError::Unsupported { path: path.to_owned(), what, hint }
}

fn too_large(name: &Path) -> ImageError {
    unsupported(name, "a raw disk of more than 2^64 bytes".into())
}

/// The part that holds byte `offset_bytes` of the disk, and the byte's offset in that part.
fn place_of(starts: &[u64], offset_bytes: u64) -> (u16, u64) {
    let part = starts.partition_point(|&start| start <= offset_bytes).saturating_sub(1);
    // There are at most PARTS_MAX parts.
    (part as u16, offset_bytes - starts[part])
}

fn state_of(starts: &[u64], offset_bytes: u64) -> BlockState {
    let (store, offset_bytes) = place_of(starts, offset_bytes);
    BlockState::Data { store, offset_bytes }
}

impl Image for SplitRawImage {
    fn info(&self) -> &ImageInfo {
        &self.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        &self.parts
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        for (block, state) in (first_block..=u64::MAX).zip(out) {
            *state = match block.checked_mul(self.info.block_bytes) {
                Some(offset_bytes) if offset_bytes < self.info.size_bytes => state_of(&self.starts, offset_bytes),
                _ => BlockState::Absent,
            };
        }
        Ok(())
    }

    fn sector_bitmap(&self, _block: u64) -> Result<SectorBitmap> {
        let sectors = (self.info.block_bytes / u64::from(self.info.logical_sector_bytes)) as u32;
        let mut bitmap = SectorBitmap::empty(sectors, self.info.logical_sector_bytes);
        bitmap.set(0, sectors);
        Ok(bitmap)
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        self.writer.as_ref().map(|writer| writer as &dyn ImageWriter)
    }
}

/// The interface for writes.
#[derive(Debug)]
struct SplitWriter {
    /// One barrier for each part.
    barriers: Vec<Barrier>,
    starts: Arc<[u64]>,
    size_bytes: u64,
    block_bytes: u64,
    /// Length in bytes to which the last part must be extended before the first write.
    padding_end_bytes: Option<u64>,
}

impl SplitWriter {
    fn name(&self) -> &Path {
        self.barriers[0].store().name()
    }

    fn place(&self, block: u64) -> Result<BlockState> {
        match block.checked_mul(self.block_bytes) {
            Some(offset_bytes) if offset_bytes < self.size_bytes => Ok(state_of(&self.starts, offset_bytes)),
            _ => Err(ImageError::Io {
                doing: "find a block",
                path: self.name().to_owned(),
                offset_bytes: self.size_bytes,
                source: io::Error::new(io::ErrorKind::InvalidInput, format!("the disk ends before block {block}")),
            }),
        }
    }
}

impl ImageWriter for SplitWriter {
    fn begin_writing(&self) -> Result<()> {
        let (Some(end_bytes), Some(last)) = (self.padding_end_bytes, self.barriers.last()) else { return Ok(()) };
        flat::extend_to_sector(last, end_bytes)
    }

    fn prepare(&self, _blocks: Range<u64>) -> Result<()> {
        Ok(())
    }

    fn reserve(&self, block: u64) -> Result<Option<Reservation>> {
        let BlockState::Data { store, offset_bytes } = self.place(block)? else { return Ok(None) };
        Ok(Some(Reservation { store, offset_bytes, init: None }))
    }

    fn initialised(&self, _block: u64) {}

    fn commit(&self, block: u64, change: Commit) -> Result<Option<BlockState>> {
        match change {
            Commit::Whole | Commit::Sectors { .. } => Ok(Some(self.place(block)?)),
            Commit::Zero | Commit::Discard | Commit::Absent | Commit::Moved => Err(ImageError::Unsupported {
                path: self.name().to_owned(),
                what: "a block without payload in a disk that has no block table".into(),
                hint: "write zeros over the range instead".into(),
            }),
        }
    }

    fn tracks_sectors(&self) -> bool {
        false
    }

    fn resize(&self, size_bytes: u64) -> Result<()> {
        Err(ImageError::Unsupported {
            path: self.name().to_owned(),
            what: format!("a new size of {size_bytes} bytes for a raw disk in several files"),
            hint: "convert the disk to an image of the wanted size".into(),
        })
    }

    fn check_growth(&self, size_bytes: u64) -> Result<()> {
        self.check_shrink(size_bytes)
    }

    fn check_shrink(&self, size_bytes: u64) -> Result<()> {
        if size_bytes == self.size_bytes { Ok(()) } else { self.resize(size_bytes) }
    }

    fn can_store_zero(&self) -> bool {
        false
    }

    fn is_dirty(&self) -> bool {
        false
    }

    fn check_syncs(&self) -> Result<()> {
        Ok(self.barriers.iter().try_for_each(Barrier::check)?)
    }

    fn flush(&self) -> Result<()> {
        self.barriers[0].share(|| {
            self.check_syncs()?;
            self.barriers.iter().try_for_each(|barrier| barrier.sync("make the written data durable"))?;
            // The sync of an earlier part may have failed elsewhere after this loop had passed it.
            self.check_syncs()
        })?;
        self.check_syncs()
    }

    fn freed_generation(&self) -> u64 {
        0
    }

    fn recycle(&self, _generation: u64) {}

    fn close(&self) -> Result<()> {
        self.flush()
    }
}

#[cfg(test)]
mod tests;
