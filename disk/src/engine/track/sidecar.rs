//! The file `NAME.tracks` beside an image: made, read and written. Its format is described in
//! `diskwright_format::tracks`.
//!
//! ```text
//!   append:      records behind the last one, durably (one write with RWF_DSYNC)
//!   checkpoint:  area that is not in use ─▶ fdatasync ─▶ header ─▶ fdatasync ─▶ its other copy
//! ```
//!
//! What must hold: until a new header is durable, the old header, its area and its log are whole.
//! From then on the old log counts for nothing, as its records name another sequence. The second
//! copy of the header protects against a sector that decays. It becomes durable with the next sync,
//! before which the older header in its place still leads to a whole area, but to no newer record.
//!
//! The log is written once with zeros when the file is made. So an append changes no metadata of
//! the file system: it is one system call, and for the device one write and one flush.

use super::bits::Bits;
use diskwright_format::tracks::{
    AREAS_OFFSET_BYTES, BadTracks, GrainRun, HEADER_BYTES, HEADER_OFFSETS_BYTES, Header, LOG_OFFSET_BYTES, LOG_RECORDS,
    RECORD_BYTES, RUNS_MAX, SEGMENT_BYTES, SegmentHead, area_bytes, bitmap_bytes, crc_of, parse_record, record_bytes,
};
use diskwright_image::LinkageId;
use diskwright_store::{CacheMode, Files, LockMode, OpenOptions, Store};
use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The time from one point to the next.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub(crate) name: String,
    /// Start of the point in seconds since 1970.
    pub(crate) started_seconds: u64,
    /// Nanoseconds of that second.
    pub(crate) started_ns: u32,
    /// The identity of an image that had the disk's contents at the start.
    pub(crate) linkage_id: Option<LinkageId>,
    /// Size of the disk at the start, in bytes.
    pub(crate) size_bytes: u64,
    /// Why everything counts as changed.
    pub(crate) everything: Option<String>,
    /// The grains that have changed.
    pub(crate) exact: Arc<Bits>,
}

impl Segment {
    /// Tells the point from a former one of its name.
    pub(crate) fn id(&self) -> u64 {
        (self.started_seconds << 30) | u64::from(self.started_ns & ((1 << 30) - 1))
    }

    /// Whether it begins with this point. `None` stands for any point of the name.
    pub(crate) fn begins_with(&self, name: &str, id: Option<u64>) -> bool {
        self.name == name && id.is_none_or(|id| id == self.id())
    }
}

/// The file, open for writing.
#[derive(Debug)]
pub(crate) struct Sidecar {
    store: Arc<dyn Store>,
    pub(crate) header: Header,
    /// Records in the log.
    records: u64,
    /// Whether a write has failed: what a reader takes for the header is not known then.
    is_broken: bool,
}

/// What a file contains.
#[derive(Debug)]
pub(crate) struct Contents {
    pub(crate) header: Header,
    /// The segments, the oldest first. The last one includes the log.
    pub(crate) segments: Vec<Segment>,
    /// Whether the log has records.
    pub(crate) has_log: bool,
}

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Bad(#[from] BadTracks),
}

/// The path of the file for the image at `image`.
pub(crate) fn path_for(image: &Path) -> PathBuf {
    let mut name = OsString::from(image);
    name.push(".tracks");
    name.into()
}

fn options(writable: bool, create_new: bool) -> OpenOptions {
    // The lock of the image guards this file too.
    OpenOptions { writable, create_new, cache: CacheMode::PageCache, lock: LockMode::None }
}

/// Reads the file at `path`.
pub(crate) fn read(files: &Files, path: &Path) -> Result<Contents, ReadError> {
    let store = files.open(path, &options(false, false)).map_err(io::Error::other)?;
    contents_of(&*store)
}

fn contents_of(store: &dyn Store) -> Result<Contents, ReadError> {
    let len_bytes = store.len_bytes()?;
    let short = |expected| BadTracks { offset_bytes: len_bytes, found: "the end of the file".into(), expected };
    if len_bytes < AREAS_OFFSET_BYTES {
        return Err(short("a header and a log").into());
    }
    let mut newest: Option<Header> = None;
    for offset_bytes in HEADER_OFFSETS_BYTES {
        let mut bytes = [0; HEADER_BYTES];
        store.read_at(&mut bytes, offset_bytes)?;
        let found = Header::parse(&bytes, offset_bytes)?;
        newest = newest.into_iter().chain(found).max_by_key(|header| header.sequence);
    }
    let header = newest.ok_or(BadTracks {
        offset_bytes: 0,
        found: "no valid header".into(),
        expected: "one at offset 0 or 4096",
    })?;
    let (start, area_len) = (header.area_offset_bytes, header.area_bytes());
    if start.checked_add(area_len).is_none_or(|end| end > len_bytes) {
        return Err(short("the bitmaps of all points").into());
    }
    // At most 16 bitmaps of 4 MiB, and the file is that long.
    let mut area = vec![0; area_len as usize];
    store.read_at(&mut area, start)?;
    if crc_of(0, &area) != header.area_crc {
        let found = "bitmaps with a wrong checksum".into();
        return Err(BadTracks { offset_bytes: start, found, expected: "the checksum in the header" }.into());
    }
    let count = header.segments as usize;
    let (heads, bitmaps) = area.split_at(count * SEGMENT_BYTES);
    let mut segments: Vec<Segment> = Vec::with_capacity(count);
    let bitmaps = bitmaps.chunks_exact(bitmap_bytes(header.grains()) as usize);
    for ((head, bitmap), number) in heads.chunks_exact(SEGMENT_BYTES).zip(bitmaps).zip(0..) {
        let head = SegmentHead::parse(head, start + number * SEGMENT_BYTES as u64)?;
        segments.push(Segment {
            name: head.name,
            started_seconds: head.started_seconds,
            started_ns: head.started_ns,
            linkage_id: head.linkage_id.map(LinkageId::from_uuid),
            size_bytes: head.size_bytes,
            everything: Some(head.everything).filter(|reason| !reason.is_empty()),
            exact: Arc::new(Bits::from_bytes(bitmap, header.grains())),
        });
    }
    let has_log = replay(store, &header, &segments)?;
    Ok(Contents { header, segments, has_log })
}

/// Adds the grains in the log to the last segment. Returns whether there are any.
fn replay(store: &dyn Store, header: &Header, segments: &[Segment]) -> Result<bool, ReadError> {
    let mut log = vec![0; LOG_RECORDS as usize * RECORD_BYTES];
    store.read_at(&mut log, LOG_OFFSET_BYTES)?;
    let records = log.chunks_exact(RECORD_BYTES).map(|record| parse_record(record, header.sequence));
    let (mut has_log, mut gap) = (false, None);
    for (record, number) in records.zip(0_u64..) {
        let offset_bytes = LOG_OFFSET_BYTES + number * RECORD_BYTES as u64;
        let Some(record) = record else {
            gap = gap.or(Some(number));
            continue;
        };
        // What a power cut has torn are the last records that were written together.
        if gap.is_some_and(|gap| number.saturating_sub(record.position.into()) > gap) {
            let found = "a record behind one that is damaged".into();
            return Err(BadTracks { offset_bytes, found, expected: "all records before it" }.into());
        }
        has_log = true;
        for run in record.runs {
            if run.first.checked_add(run.count).is_none_or(|end| end > header.grains()) {
                let found = format!("{} grains from {}", run.count, run.first);
                return Err(BadTracks { offset_bytes, found, expected: "grains of the disk" }.into());
            }
            segments.iter().rev().take(1).for_each(|last| last.exact.set(run));
        }
    }
    Ok(has_log)
}

impl Sidecar {
    /// Makes the file at `path` with one area. It has its name when it is complete.
    pub(crate) fn create(files: &Files, path: &Path, header: Header, segments: &[Segment]) -> io::Result<Self> {
        let mut partial = OsString::from(path);
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        // A program that was killed may have left it. Creating it fails if it cannot be removed.
        let _ = files.remove(&partial);
        let store = files.open(&partial, &options(true, true)).map_err(io::Error::other)?;
        let made = (|| {
            store.write_at(&vec![0; AREAS_OFFSET_BYTES as usize], 0)?;
            let mut sidecar = Self { store: Arc::clone(&store), header, records: 0, is_broken: false };
            sidecar.checkpoint(segments, |_| {})?;
            sidecar.store.sync_data()?;
            files.rename(&partial, path, false)?;
            sidecar.store.was_renamed(path);
            files.sync_directory_of(path)?;
            Ok(sidecar)
        })();
        if made.is_err() {
            // The first error is returned.
            let _ = files.remove(&partial);
        }
        made
    }

    /// Opens the file at `path`, whose contents were read.
    pub(crate) fn open(files: &Files, path: &Path, header: Header) -> io::Result<Self> {
        let store = files.open(path, &options(true, false)).map_err(io::Error::other)?;
        // Before anything is appended there is a new header, so old records do not count.
        Ok(Self { store, header, records: LOG_RECORDS, is_broken: false })
    }

    /// Whether the log has room for so many runs.
    pub(crate) fn has_room(&self, runs: usize) -> bool {
        self.records + runs.div_ceil(RUNS_MAX) as u64 <= LOG_RECORDS
    }

    /// Appends runs to the log, durably. There is room for them.
    ///
    /// # Errors
    /// Those of the file, and then always: also of [`Sidecar::checkpoint`].
    pub(crate) fn append(&mut self, runs: &[GrainRun]) -> io::Result<()> {
        self.unless_broken(|sidecar| sidecar.write_records(runs))
    }

    fn unless_broken(&mut self, write: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        if self.is_broken {
            return Err(io::Error::other("an earlier write to it has failed"));
        }
        let written = write(self);
        self.is_broken = written.is_err();
        written
    }

    fn write_records(&mut self, runs: &[GrainRun]) -> io::Result<()> {
        let records = runs.chunks(RUNS_MAX).zip(0..);
        let bytes: Vec<u8> =
            records.flat_map(|(runs, position)| record_bytes(self.header.sequence, position, runs)).collect();
        self.store.write_durable_at(&bytes, LOG_OFFSET_BYTES + self.records * RECORD_BYTES as u64)?;
        self.records += (bytes.len() / RECORD_BYTES) as u64;
        Ok(())
    }

    /// Writes all segments, then the header as `change` makes it. The log is empty afterwards.
    pub(crate) fn checkpoint(&mut self, segments: &[Segment], change: impl FnOnce(&mut Header)) -> io::Result<()> {
        self.unless_broken(|sidecar| sidecar.write_segments(segments, change))
    }

    fn write_segments(&mut self, segments: &[Segment], change: impl FnOnce(&mut Header)) -> io::Result<()> {
        let mut next = self.header.clone();
        change(&mut next);
        next.segments = segments.len() as u32;
        let mut area = Vec::with_capacity(area_bytes(segments.len(), next.grains()) as usize);
        for segment in segments {
            let head = SegmentHead {
                name: segment.name.clone(),
                started_seconds: segment.started_seconds,
                started_ns: segment.started_ns,
                linkage_id: segment.linkage_id.map(LinkageId::to_uuid),
                size_bytes: segment.size_bytes,
                everything: segment.everything.clone().unwrap_or_default(),
            };
            area.extend(head.to_bytes());
        }
        segments.iter().for_each(|segment| segment.exact.write_to(&mut area));
        let (used, used_bytes) = (self.header.area_offset_bytes, self.header.area_bytes());
        next.area_offset_bytes = if used >= AREAS_OFFSET_BYTES + area.len() as u64 {
            AREAS_OFFSET_BYTES
        } else {
            (used + used_bytes).next_multiple_of(4096)
        };
        next.area_crc = crc_of(0, &area);
        self.store.write_at(&area, next.area_offset_bytes)?;
        self.store.sync_data()?;
        self.write_header(next)
    }

    fn write_header(&mut self, next: Header) -> io::Result<()> {
        let next = Header { sequence: self.header.sequence + 1, ..next };
        let bytes = next.to_bytes();
        let first = (next.sequence % 2) as usize;
        self.store.write_at(&bytes, HEADER_OFFSETS_BYTES[first])?;
        self.store.sync_data()?;
        self.store.write_at(&bytes, HEADER_OFFSETS_BYTES[1 - first])?;
        if !next.is_open {
            self.store.sync_data()?;
        }
        self.header = next;
        self.records = 0;
        Ok(())
    }
}
