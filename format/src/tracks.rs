//! The file of change tracking, `NAME.tracks`: which parts of a disk have changed since named
//! points. It lies beside the image. All numbers are little endian.
//!
//! ```text
//!   0        header, 512 bytes            4096     the other copy of the header
//!   8192     log: 1,024 records of 512 bytes
//!   1 MiB    two areas in turn; the header says which one is valid
//!
//!   header   0 magic "DWTRACKS"     8 version (1)        12 CRC-32C, this field as 0
//!            16 sequence (u64)      24 state: 0 closed, 1 open    28 number of segments
//!            32 size of the disk    40 bytes of a grain  48 CRC-32C of the area    52 zero
//!            56 offset of the area  64 its length
//!            72 identity of the image            128 its coming identity, or zeros
//!   identity 0 GUID                 16 inode             24 length of the file
//!            32 its modification time, ns since 1970     40 CRC-32C of its parents' identities
//!            44 zero                48 1 if there is an identity, else 0
//!   record   0 CRC-32C, as above    4 number of runs (u16, 1 to 31)
//!            6 number of records before it that were written together with it (u16)
//!            8 sequence of the header                    16 runs: first grain, number of grains
//!   area     for each segment 512 bytes:
//!              0 length of the name   4 length of the reason   8 start, s since 1970
//!              16 name (64 bytes)     80 reason (400 bytes): why everything counts as changed
//!              480 GUID of the disk at the start    496 its size    504 1 if there is a GUID
//!              508 start, ns of its second (u32): with the start, it tells a point from a former
//!              one of its name
//!            then for each segment its bitmap, one bit a grain, lowest bit first, in words of 64
//! ```
//!
//! A *segment* is the time from one point to the next. Changed since a point is what changed in its
//! segment or a later one, so a write marks only the last segment. The log has grains that may have
//! changed in the last segment since the area was written.
//!
//! What must hold: the header with the highest sequence counts. A record counts if it has the
//! sequence of that header. A record may be missing only among the last ones that were written
//! together, which a power cut has torn. A damaged file is refused: its reader then takes
//! everything for changed.

use std::fmt;
use uuid::Uuid;

/// Length of a header.
pub const HEADER_BYTES: usize = 512;
/// Offsets of the two copies of the header.
pub const HEADER_OFFSETS_BYTES: [u64; 2] = [0, 4096];
/// Offset of the log.
pub const LOG_OFFSET_BYTES: u64 = 8192;
/// Length of a record of the log.
pub const RECORD_BYTES: usize = 512;
/// Number of records in the log.
pub const LOG_RECORDS: u64 = 1024;
/// Most runs in a record.
pub const RUNS_MAX: usize = 31;
/// Where the areas begin.
pub const AREAS_OFFSET_BYTES: u64 = 1 << 20;
/// Length of a segment's description in an area.
pub const SEGMENT_BYTES: usize = 512;
/// The smallest grain, in bytes.
pub const GRAIN_BYTES_MIN: u64 = 64 << 10;
/// Most grains of a disk: a bitmap has at most 4 MiB.
pub const GRAINS_MAX: u64 = 1 << 25;
/// Most points of a disk.
pub const POINTS_MAX: usize = 16;
/// Longest name of a point, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
/// Longest reason, in bytes.
pub const REASON_BYTES_MAX: usize = 400;

const MAGIC: &[u8; 8] = b"DWTRACKS";
const VERSION: u32 = 1;
const IDENTITY_BYTES: usize = 56;

/// Damage in a file of change tracking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadTracks {
    /// Offset of the damaged part in the file.
    pub offset_bytes: u64,
    /// What was found.
    pub found: String,
    /// What was expected.
    pub expected: &'static str,
}

impl fmt::Display for BadTracks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at offset {}: found {}, expected {}", self.offset_bytes, self.found, self.expected)
    }
}

impl std::error::Error for BadTracks {}

fn bad<T>(offset_bytes: u64, found: impl Into<String>, expected: &'static str) -> Result<T, BadTracks> {
    Err(BadTracks { offset_bytes, found: found.into(), expected })
}

/// By what an image is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The DataWriteGuid of a VHDX; nil for formats without an id that changes with the contents.
    pub guid: Uuid,
    /// Number of its inode.
    pub inode: u64,
    /// Length of its file in bytes.
    pub len_bytes: u64,
    /// Its modification time in nanoseconds since 1970; 0 if unknown.
    pub modified_ns: u64,
    /// CRC-32C of the identities of its parents.
    pub parents: u32,
}

impl Identity {
    fn put(identity: Option<&Self>, bytes: &mut [u8]) {
        let Some(identity) = identity else { return };
        bytes[..16].copy_from_slice(&identity.guid.to_bytes_le());
        bytes[16..24].copy_from_slice(&identity.inode.to_le_bytes());
        bytes[24..32].copy_from_slice(&identity.len_bytes.to_le_bytes());
        bytes[32..40].copy_from_slice(&identity.modified_ns.to_le_bytes());
        bytes[40..44].copy_from_slice(&identity.parents.to_le_bytes());
        bytes[48] = 1;
    }

    fn get(bytes: &[u8]) -> Option<Self> {
        let mut guid = [0; 16];
        guid.copy_from_slice(bytes.get(..16)?);
        (u64_at(bytes, 48) == 1).then(|| Self {
            guid: Uuid::from_bytes_le(guid),
            inode: u64_at(bytes, 16),
            len_bytes: u64_at(bytes, 24),
            modified_ns: u64_at(bytes, 32),
            parents: u32_at(bytes, 40),
        })
    }
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Counts the headers that were written.
    pub sequence: u64,
    /// Whether the image is open for writing, or was when its program or machine ended.
    pub is_open: bool,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    /// Length of a grain in bytes, a power of two.
    pub grain_bytes: u64,
    /// Number of segments, at least 1.
    pub segments: u32,
    /// CRC-32C of the area.
    pub area_crc: u32,
    /// Offset of the area.
    pub area_offset_bytes: u64,
    /// The image that the marks are for.
    pub identity: Identity,
    /// Another image, or another GUID of the same one, that has the same contents.
    pub coming: Option<Identity>,
}

impl Header {
    /// Number of grains of the disk.
    pub fn grains(&self) -> u64 {
        self.size_bytes.div_ceil(self.grain_bytes)
    }

    /// Length of the area in bytes.
    pub fn area_bytes(&self) -> u64 {
        area_bytes(self.segments as usize, self.grains())
    }

    /// The header as it is written.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..28].copy_from_slice(&u32::from(self.is_open).to_le_bytes());
        bytes[28..32].copy_from_slice(&self.segments.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.size_bytes.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.grain_bytes.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.area_crc.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.area_offset_bytes.to_le_bytes());
        bytes[64..72].copy_from_slice(&self.area_bytes().to_le_bytes());
        Identity::put(Some(&self.identity), &mut bytes[72..72 + IDENTITY_BYTES]);
        Identity::put(self.coming.as_ref(), &mut bytes[128..128 + IDENTITY_BYTES]);
        seal(&mut bytes, 12);
        bytes
    }

    /// Reads the copy at `offset_bytes`. The inner `None` is a copy that is torn or was never
    /// written.
    ///
    /// # Errors
    /// A copy that is whole, of a version or with values that this program does not know.
    pub fn parse(bytes: &[u8; HEADER_BYTES], offset_bytes: u64) -> Result<Option<Self>, BadTracks> {
        if &bytes[..8] != MAGIC || u32_at(bytes, 12) != crc_without(bytes, 12) {
            return Ok(None);
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return bad(offset_bytes + 8, format!("version {version}"), "version 1");
        }
        let state = u32_at(bytes, 24);
        let Some(identity) = Identity::get(&bytes[72..]) else {
            return bad(offset_bytes + 72, "no identity of the image", "one");
        };
        let header = Self {
            sequence: u64_at(bytes, 16),
            is_open: state == 1,
            size_bytes: u64_at(bytes, 32),
            grain_bytes: u64_at(bytes, 40),
            segments: u32_at(bytes, 28),
            area_crc: u32_at(bytes, 48),
            area_offset_bytes: u64_at(bytes, 56),
            identity,
            coming: Identity::get(&bytes[128..]),
        };
        if state > 1 {
            return bad(offset_bytes + 24, format!("state {state}"), "0 or 1");
        }
        if !(1..=POINTS_MAX as u32).contains(&header.segments) {
            return bad(offset_bytes + 28, format!("{} segments", header.segments), "1 to 16");
        }
        if !header.grain_bytes.is_power_of_two() || header.grain_bytes < GRAIN_BYTES_MIN {
            return bad(
                offset_bytes + 40,
                format!("a grain of {} bytes", header.grain_bytes),
                "a power of two from 64 KiB",
            );
        }
        if header.size_bytes == 0 || header.grains() > GRAINS_MAX {
            return bad(offset_bytes + 32, format!("{} grains", header.grains()), "1 to 33,554,432");
        }
        let area_bytes = u64_at(bytes, 64);
        if area_bytes != header.area_bytes() {
            return bad(offset_bytes + 64, format!("an area of {area_bytes} bytes"), "the length of its bitmaps");
        }
        if header.area_offset_bytes < AREAS_OFFSET_BYTES || header.area_offset_bytes > 1 << 40 {
            return bad(offset_bytes + 56, format!("an area at {}", header.area_offset_bytes), "one behind the log");
        }
        Ok(Some(header))
    }
}

/// The length of an area.
pub fn area_bytes(segments: usize, grains: u64) -> u64 {
    segments as u64 * (SEGMENT_BYTES as u64 + bitmap_bytes(grains))
}

/// The length of a bitmap.
pub fn bitmap_bytes(grains: u64) -> u64 {
    grains.div_ceil(64) * 8
}

/// Grains that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrainRun {
    /// The first one.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// A record of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Number of records before it that were written together with it.
    pub position: u16,
    /// One to [`RUNS_MAX`] runs.
    pub runs: Vec<GrainRun>,
}

/// A record of the log with up to [`RUNS_MAX`] runs, as it is written.
pub fn record_bytes(sequence: u64, position: u16, runs: &[GrainRun]) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    bytes[4..6].copy_from_slice(&(runs.len().min(RUNS_MAX) as u16).to_le_bytes());
    bytes[6..8].copy_from_slice(&position.to_le_bytes());
    bytes[8..16].copy_from_slice(&sequence.to_le_bytes());
    for (run, place) in runs.iter().zip(bytes[16..].chunks_exact_mut(16)) {
        place[..8].copy_from_slice(&run.first.to_le_bytes());
        place[8..].copy_from_slice(&run.count.to_le_bytes());
    }
    seal(&mut bytes, 0);
    bytes
}

/// Reads a record; `None` if it is torn, or belongs to another header.
pub fn parse_record(bytes: &[u8], sequence: u64) -> Option<Record> {
    let both = bytes.get(..RECORD_BYTES).map(|bytes| u32_at(bytes, 4))?;
    let (count, position) = ((both & 0xffff) as usize, (both >> 16) as u16);
    let is_valid = (1..=RUNS_MAX).contains(&count)
        && u64_at(bytes, 8) == sequence
        && u32_at(bytes, 0) == crc_without(&bytes[..RECORD_BYTES], 0);
    let run = |place: &[u8]| GrainRun { first: u64_at(place, 0), count: u64_at(place, 8) };
    is_valid.then(|| Record { position, runs: bytes[16..RECORD_BYTES].chunks_exact(16).take(count).map(run).collect() })
}

/// The description of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentHead {
    /// Name of the point at which the segment begins.
    pub name: String,
    /// When it began, in seconds since 1970.
    pub started_seconds: u64,
    /// When it began, in nanoseconds of that second.
    pub started_ns: u32,
    /// Why everything counts as changed in it; empty if only what the bitmap says does.
    pub everything: String,
    /// The identity of an image that had the contents of the disk when it began.
    pub linkage_id: Option<Uuid>,
    /// Size of the disk when it began, in bytes.
    pub size_bytes: u64,
}

impl SegmentHead {
    /// The description as it is written. A longer reason is cut.
    pub fn to_bytes(&self) -> [u8; SEGMENT_BYTES] {
        let mut bytes = [0; SEGMENT_BYTES];
        let name = &self.name.as_bytes()[..self.name.len().min(NAME_BYTES_MAX)];
        let mut end = self.everything.len().min(REASON_BYTES_MAX);
        while !self.everything.is_char_boundary(end) {
            end -= 1;
        }
        bytes[..4].copy_from_slice(&(name.len() as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&(end as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.started_seconds.to_le_bytes());
        bytes[16..16 + name.len()].copy_from_slice(name);
        bytes[80..80 + end].copy_from_slice(&self.everything.as_bytes()[..end]);
        if let Some(id) = &self.linkage_id {
            bytes[480..496].copy_from_slice(&id.to_bytes_le());
            bytes[504] = 1;
        }
        bytes[496..504].copy_from_slice(&self.size_bytes.to_le_bytes());
        bytes[508..512].copy_from_slice(&self.started_ns.to_le_bytes());
        bytes
    }

    /// Reads the description at `offset_bytes` of the file.
    ///
    /// # Errors
    /// For a bad name or reason.
    pub fn parse(bytes: &[u8], offset_bytes: u64) -> Result<Self, BadTracks> {
        let Some(bytes) = bytes.get(..SEGMENT_BYTES) else { return bad(offset_bytes, "the end", "a segment") };
        let text = |len: u32, place: &[u8]| {
            place.get(..len as usize).and_then(|text| std::str::from_utf8(text).ok()).map(str::to_owned)
        };
        let name = text(u32_at(bytes, 0), &bytes[16..80]).filter(|name| is_name(name));
        let everything = text(u32_at(bytes, 4), &bytes[80..480]).filter(|reason| !reason.chars().any(char::is_control));
        let mut guid = [0; 16];
        guid.copy_from_slice(&bytes[480..496]);
        let linkage_id = (bytes[504] == 1).then(|| Uuid::from_bytes_le(guid));
        let (started_seconds, started_ns, size_bytes) = (u64_at(bytes, 8), u32_at(bytes, 508), u64_at(bytes, 496));
        match (name, everything) {
            (Some(name), Some(everything)) => {
                Ok(Self { name, started_seconds, started_ns, everything, linkage_id, size_bytes })
            }
            (None, _) => bad(offset_bytes, "another name", "1 to 64 letters, digits, '.', '-' and '_'"),
            (_, None) => bad(offset_bytes + 4, "another reason", "a sentence of at most 400 bytes"),
        }
    }
}

/// Whether a point may have this name.
pub fn is_name(name: &str) -> bool {
    let is_good = |char: char| char.is_ascii_alphanumeric() || matches!(char, '.' | '-' | '_');
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(is_good)
}

/// The CRC-32C of some bytes, continued from `crc`.
pub fn crc_of(crc: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc, bytes)
}

fn seal(bytes: &mut [u8], field: usize) {
    let crc = crc_without(bytes, field);
    bytes[field..field + 4].copy_from_slice(&crc.to_le_bytes());
}

fn crc_without(bytes: &[u8], field: usize) -> u32 {
    let before = crc32c::crc32c(&bytes[..field]);
    crc32c::crc32c_append(crc32c::crc32c_append(before, &[0; 4]), &bytes[field + 4..])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(four)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(eight)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let identity = Identity { guid: Uuid::from_u128(7), inode: 8, len_bytes: 9, modified_ns: 10, parents: 11 };
        Header {
            sequence: 12,
            is_open: true,
            size_bytes: 1 << 30,
            grain_bytes: 64 << 10,
            segments: 2,
            area_crc: 13,
            area_offset_bytes: AREAS_OFFSET_BYTES,
            identity,
            coming: Some(Identity { guid: Uuid::from_u128(14), ..identity }),
        }
    }

    #[test]
    fn a_header_comes_back_and_every_flipped_bit_is_seen() {
        let bytes = header().to_bytes();
        assert_eq!(Header::parse(&bytes, 0).unwrap(), Some(header()));
        for at in 0..184 {
            let mut flipped = bytes;
            flipped[at] ^= 1;
            assert_eq!(Header::parse(&flipped, 0).unwrap(), None, "byte {at}");
        }
        let alone = Header { coming: None, is_open: false, ..header() };
        assert_eq!(Header::parse(&alone.to_bytes(), 0).unwrap(), Some(alone));
    }

    #[test]
    fn a_header_with_a_right_checksum_and_wrong_values_is_refused() {
        type Change = fn(&mut [u8; HEADER_BYTES]);
        let wrong: [(Change, &str); 8] = [
            (|bytes| bytes[8] = 2, "version 2"),
            (|bytes| bytes[24] = 2, "state 2"),
            (|bytes| bytes[28] = 0, "0 segments"),
            (|bytes| bytes[28] = 17, "17 segments"),
            (|bytes| bytes[40] = 1, "a grain of 65537 bytes"),
            (|bytes| bytes[32..40].fill(0xff), "grains"),
            (|bytes| bytes[64] ^= 1, "an area of"),
            (|bytes| bytes[56..64].fill(0), "an area at 0"),
        ];
        for (change, found) in wrong {
            let mut bytes = header().to_bytes();
            change(&mut bytes);
            seal(&mut bytes, 12);
            let error = Header::parse(&bytes, 4096).unwrap_err();
            assert!(error.to_string().contains(found), "{error}");
        }
    }

    #[test]
    fn a_record_counts_only_for_its_header() {
        let runs: Vec<GrainRun> = (0..31).map(|run| GrainRun { first: run * 10, count: run + 1 }).collect();
        for count in [1, 2, 31] {
            let bytes = record_bytes(5, 300, &runs[..count]);
            assert_eq!(parse_record(&bytes, 5), Some(Record { position: 300, runs: runs[..count].to_vec() }));
            assert_eq!(parse_record(&bytes, 4), None);
            let mut torn = bytes;
            torn[100] ^= 1;
            assert_eq!(parse_record(&torn, 5), None);
        }
        assert_eq!(parse_record(&record_bytes(5, 0, &[]), 5), None);
        assert_eq!(parse_record(&[0; 100], 0), None);
    }

    #[test]
    fn a_segment_comes_back_and_a_long_reason_is_cut_between_characters() {
        let head = SegmentHead {
            name: "full-1".into(),
            started_seconds: 3,
            started_ns: 999_999_999,
            everything: String::new(),
            linkage_id: Some(Uuid::from_u128(4)),
            size_bytes: 5,
        };
        assert_eq!(SegmentHead::parse(&head.to_bytes(), 0).unwrap(), head);
        let unknown = SegmentHead { linkage_id: None, ..head.clone() };
        assert_eq!(SegmentHead::parse(&unknown.to_bytes(), 0).unwrap(), unknown);
        let long = SegmentHead { everything: "ä".repeat(300), ..head.clone() };
        assert_eq!(SegmentHead::parse(&long.to_bytes(), 0).unwrap().everything, "ä".repeat(200));
        let mut bad_name = head.to_bytes();
        bad_name[16] = b'/';
        assert!(SegmentHead::parse(&bad_name, 0).is_err());
        bad_name[..4].fill(0xff);
        assert!(SegmentHead::parse(&bad_name, 0).is_err());
    }

    #[test]
    fn names() {
        assert!(["a", "full-2026.01_02", &"x".repeat(64)].iter().all(|name| is_name(name)));
        assert!(!["", "a b", "a/b", "ä", "a:b", &"x".repeat(65)].iter().any(|name| is_name(name)));
    }
}
