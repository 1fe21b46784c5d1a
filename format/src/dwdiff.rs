//! The stream of `diskwright diff --export`: what turns one state of a disk into another one.
//!
//! ```text
//!   header 256 │ record 32 │ payload │ record 32 │ record 32 │ payload │ ... │ end mark 32 │ end
//! ```
//!
//! All integers are little-endian. An identity is a UUID in the order of its text form; nil means
//! that the disk has none. *Base* is the state that the stream applies to, *result* the state
//! afterwards.
//!
//! ```text
//!   header
//!     0    8  "DWDIFF\r\n": a transfer as text changes it
//!     8    4  version: 1
//!    12    4  length of the header: 256
//!    16   16  identity of the base: VHDX DataWriteGuid, VHD unique id
//!    32    8  size of the base in bytes
//!    40    4  format of the base: 0 raw, 1 VHD, 2 VHDX, 3 VMDK, 4 qcow2,
//!             5 VDI
//!    44    4  logical sector of the base in bytes
//!    48    8  zeros
//!    56   40  the same of the result
//!    96  156  zeros
//!   252    4  CRC-32C of bytes 0 to 251
//!
//!   record
//!     0    4  "DATA": payload follows; "ZERO": the range reads as zeros; "DONE": the end mark
//!     4    4  CRC-32C of the payload; 0 without payload
//!     8    8  offset on the disk in bytes; DONE: bytes of data in all
//!    16    8  length in bytes, of DATA at most 1 MiB; DONE: bytes of zeros in all
//!    24    4  number of the record, from 0, modulo 2^32
//!    28    4  CRC-32C of the header's checksum (4 bytes) and of bytes 0 to 27
//! ```
//!
//! Ranges ascend, do not overlap, begin and end at multiples of the larger sector of base and
//! result or at the end of the result, and end within its size. Ranges without a record are those
//! of the base, or zeros beyond its end. Nothing follows the end mark.
//!
//! Every byte is under a checksum. A record's checksum begins with that of the header, and records
//! are numbered, so a record that is lost, doubled or from another stream is found. A stream
//! without its end mark is incomplete.

use uuid::Uuid;

/// The first bytes of a stream.
pub const MAGIC: &[u8; 8] = b"DWDIFF\r\n";
/// Length of the header in bytes.
pub const HEADER_BYTES: usize = 256;
/// Length of a record without its payload, in bytes.
pub const RECORD_BYTES: usize = 32;
/// Maximum length of a record's payload in bytes.
pub const PAYLOAD_MAX_BYTES: u64 = 1 << 20;
/// Offsets and lengths are multiples of this, in bytes.
pub const UNIT_BYTES: u64 = 512;

const VERSION: u32 = 1;
const CHECKSUM_AT: usize = HEADER_BYTES - 4;
const BASE_AT: usize = 16;
const RESULT_AT: usize = 56;
const STATE_BYTES: usize = 40;

/// What is wrong with a header or a record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("found {found}, expected {expected}")]
pub struct BadStream {
    /// What was found, in words.
    pub found: String,
    /// What was expected, in words.
    pub expected: String,
}

impl BadStream {
    fn new(found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self { found: found.into(), expected: expected.into() }
    }
}

/// The format of an image, as a stream names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateFormat {
    /// A raw disk, or an export of a server.
    Raw,
    /// VHD.
    Vhd,
    /// VHDX.
    Vhdx,
    /// qcow2.
    Qcow2,
    /// VDI.
    Vdi,
    /// VMDK.
    Vmdk,
}

/// A disk at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// VHDX DataWriteGuid or VHD unique id; `None` for a disk without an identity.
    pub id: Option<Uuid>,
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// Format.
    pub format: StateFormat,
    /// Logical sector in bytes.
    pub sector_bytes: u32,
}

impl State {
    fn write(&self, out: &mut [u8]) {
        out[..16].copy_from_slice(self.id.unwrap_or_default().as_bytes());
        out[16..24].copy_from_slice(&self.size_bytes.to_le_bytes());
        let format: u32 = match self.format {
            StateFormat::Raw => 0,
            StateFormat::Vhd => 1,
            StateFormat::Vhdx => 2,
            StateFormat::Qcow2 => 4,
            StateFormat::Vdi => 5,
            StateFormat::Vmdk => 3,
        };
        out[24..28].copy_from_slice(&format.to_le_bytes());
        out[28..32].copy_from_slice(&self.sector_bytes.to_le_bytes());
    }

    fn parse(bytes: &[u8], whose: &str) -> Result<Self, BadStream> {
        let id = Some(Uuid::from_bytes(array(bytes, 0))).filter(|id| !id.is_nil());
        let format = match u32_at(bytes, 24) {
            0 => StateFormat::Raw,
            1 => StateFormat::Vhd,
            2 => StateFormat::Vhdx,
            4 => StateFormat::Qcow2,
            5 => StateFormat::Vdi,
            3 => StateFormat::Vmdk,
            other => return Err(BadStream::new(format!("the format {other} of the {whose}"), "0 to 5")),
        };
        let (size_bytes, sector_bytes) = (u64_at(bytes, 16), u32_at(bytes, 28));
        if !matches!(sector_bytes, 512 | 1024 | 2048 | 4096) {
            return Err(BadStream::new(
                format!("sectors of {sector_bytes} bytes in the {whose}"),
                "a power of two from 512 to 4096",
            ));
        }
        if size_bytes == 0 || size_bytes % u64::from(sector_bytes) != 0 {
            return Err(BadStream::new(
                format!("a size of {size_bytes} bytes of the {whose}"),
                format!("a multiple of its sector of {sector_bytes}, above 0"),
            ));
        }
        Ok(Self { id, size_bytes, format, sector_bytes })
    }
}

/// The header of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the stream applies to.
    pub base: State,
    /// What the disk is afterwards.
    pub result: State,
}

impl Header {
    /// The bytes of the header.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(HEADER_BYTES as u32).to_le_bytes());
        self.base.write(&mut bytes[BASE_AT..BASE_AT + STATE_BYTES]);
        self.result.write(&mut bytes[RESULT_AT..RESULT_AT + STATE_BYTES]);
        let sum = crc32c::crc32c(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`BadStream`] for another magic or version, a wrong checksum, and impossible values.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, BadStream> {
        if &bytes[..8] != MAGIC {
            return Err(BadStream::new(format!("{:02x?} at its start", &bytes[..8]), "\"DWDIFF\", CR and LF"));
        }
        let (version, len_bytes) = (u32_at(bytes, 8), u32_at(bytes, 12));
        if version != VERSION || len_bytes as usize != HEADER_BYTES {
            return Err(BadStream::new(
                format!("version {version} with a header of {len_bytes} bytes"),
                format!("version {VERSION} with a header of {HEADER_BYTES} bytes"),
            ));
        }
        let (found, right) = (checksum_of(bytes), crc32c::crc32c(&bytes[..CHECKSUM_AT]));
        if found != right {
            return Err(BadStream::new(format!("the header's checksum {found:#010x}"), format!("{right:#010x}")));
        }
        Ok(Self {
            base: State::parse(&bytes[BASE_AT..BASE_AT + STATE_BYTES], "base")?,
            result: State::parse(&bytes[RESULT_AT..RESULT_AT + STATE_BYTES], "result")?,
        })
    }
}

/// The checksum in the bytes of a header, on which the checksums of the records depend.
pub fn checksum_of(header: &[u8; HEADER_BYTES]) -> u32 {
    u32_at(header, CHECKSUM_AT)
}

/// What a record says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordKind {
    /// The range has the payload that follows.
    Data {
        /// CRC-32C of the payload.
        payload_crc: u32,
    },
    /// The range reads as zeros.
    Zeros,
    /// The end of the stream. Offset and length are the totals of data and of zeros.
    Done,
}

/// A record without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Kind of the record.
    pub kind: RecordKind,
    /// Offset on the disk; of the end mark, bytes of data in all.
    pub offset_bytes: u64,
    /// Length in bytes; of the end mark, bytes of zeros in all.
    pub len_bytes: u64,
    /// Number of the record in its stream, from 0, modulo 2^32.
    pub number: u32,
}

impl Record {
    /// The bytes of the record in the stream whose header has the checksum `stream`.
    pub fn to_bytes(&self, stream: u32) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let (tag, payload_crc): (&[u8; 4], u32) = match self.kind {
            RecordKind::Data { payload_crc } => (b"DATA", payload_crc),
            RecordKind::Zeros => (b"ZERO", 0),
            RecordKind::Done => (b"DONE", 0),
        };
        bytes[..4].copy_from_slice(tag);
        bytes[4..8].copy_from_slice(&payload_crc.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len_bytes.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.number.to_le_bytes());
        let sum = record_sum(stream, &bytes);
        bytes[28..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a record. Offset and length are not judged.
    ///
    /// # Errors
    /// [`BadStream`] for a wrong checksum or an unknown kind.
    pub fn parse(bytes: &[u8; RECORD_BYTES], stream: u32) -> Result<Self, BadStream> {
        let (found, right) = (u32_at(bytes, 28), record_sum(stream, bytes));
        if found != right {
            return Err(BadStream::new(
                format!("the checksum {found:#010x}"),
                format!("{right:#010x}, if the record is of this stream"),
            ));
        }
        let kind = match &bytes[..4] {
            b"DATA" => RecordKind::Data { payload_crc: u32_at(bytes, 4) },
            b"ZERO" => RecordKind::Zeros,
            b"DONE" => RecordKind::Done,
            other => return Err(BadStream::new(format!("a record {other:02x?}"), "\"DATA\", \"ZERO\" or \"DONE\"")),
        };
        Ok(Self { kind, offset_bytes: u64_at(bytes, 8), len_bytes: u64_at(bytes, 16), number: u32_at(bytes, 24) })
    }
}

/// CRC-32C of a payload.
pub fn payload_crc(payload: &[u8]) -> u32 {
    crc32c::crc32c(payload)
}

fn record_sum(stream: u32, bytes: &[u8; RECORD_BYTES]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&stream.to_le_bytes()), &bytes[..28])
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        let base =
            State { id: Some(Uuid::from_u128(7)), size_bytes: 1 << 20, format: StateFormat::Vhdx, sector_bytes: 4096 };
        Header { base, result: State { id: None, size_bytes: 512, format: StateFormat::Raw, sector_bytes: 512 } }
    }

    /// The documented bytes, so that other programs can rely on them.
    #[test]
    fn the_bytes_are_those_of_the_table() {
        let bytes = header().to_bytes();
        assert_eq!((&bytes[..8], &bytes[8..16]), (&b"DWDIFF\r\n"[..], &[1, 0, 0, 0, 0, 1, 0, 0][..]));
        assert_eq!((bytes[31], u64_at(&bytes, 32), u32_at(&bytes, 40), u32_at(&bytes, 44)), (7, 1 << 20, 2, 4096));
        assert_eq!((u64_at(&bytes, 72), u32_at(&bytes, 80), u32_at(&bytes, 84)), (512, 0, 512));
        let record = Record { kind: RecordKind::Zeros, offset_bytes: 512, len_bytes: 1024, number: 3 };
        let bytes = record.to_bytes(9);
        assert_eq!((&bytes[..4], u64_at(&bytes, 8), u64_at(&bytes, 16)), (&b"ZERO"[..], 512, 1024));
        assert_eq!((u32_at(&bytes, 4), u32_at(&bytes, 24)), (0, 3));
    }

    proptest! {
        #[test]
        fn any_changed_byte_of_a_header_is_found(at in 0..HEADER_BYTES, flip in 1u8..) {
            let mut bytes = header().to_bytes();
            prop_assert_eq!(Header::parse(&bytes), Ok(header()));
            bytes[at] ^= flip;
            prop_assert!(Header::parse(&bytes).is_err());
        }

        #[test]
        fn any_changed_byte_of_a_record_is_found(
            kind in 0..3_usize, crc: u32, offset_bytes: u64, len_bytes: u64, number: u32, stream: u32,
            at in 0..RECORD_BYTES, flip in 1u8..,
        ) {
            let kind = [RecordKind::Data { payload_crc: crc }, RecordKind::Zeros, RecordKind::Done][kind];
            let record = Record { kind, offset_bytes, len_bytes, number };
            let mut bytes = record.to_bytes(stream);
            prop_assert_eq!(Record::parse(&bytes, stream), Ok(record));
            prop_assert!(Record::parse(&bytes, stream ^ 1).is_err());
            bytes[at] ^= flip;
            prop_assert!(Record::parse(&bytes, stream).is_err());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: [u8; 32], sealed: bool) {
            let mut header = [0; HEADER_BYTES];
            header[..8].copy_from_slice(MAGIC);
            header[8..16].copy_from_slice(&[1, 0, 0, 0, 0, 1, 0, 0]);
            for chunk in header[16..CHECKSUM_AT].chunks_mut(32) {
                chunk.copy_from_slice(&bytes[..chunk.len()]);
            }
            if sealed {
                let sum = crc32c::crc32c(&header[..CHECKSUM_AT]);
                header[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
            }
            let _ = (Header::parse(&header), Record::parse(&bytes, 0));
        }
    }
}
