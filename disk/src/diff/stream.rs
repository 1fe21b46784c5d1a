//! Exports as a stream of bytes: [`diskwright_format::dwdiff`] has the layout.
//!
//! A reader accepts only what a writer writes: ranges that ascend, end within the result, and are
//! whole sectors of both disks. It holds one payload in memory, whatever a record claims.

use super::{
    payload::{EachPiece, Piece, Pieces},
    sink::Written,
    state::DiskState,
};
use crate::{DiskError, Progress, Result, error::file_error};
use diskwright_format::dwdiff::{
    self, BadStream, HEADER_BYTES, Header, PAYLOAD_MAX_BYTES, RECORD_BYTES, Record, RecordKind, State, StateFormat,
    UNIT_BYTES,
};
use diskwright_image::{Format, LinkageId};
use diskwright_store::Store;
use std::{
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

fn to_stream(state: &DiskState) -> State {
    State {
        id: state.linkage_id.map(LinkageId::to_uuid),
        size_bytes: state.size_bytes,
        format: match state.format {
            Format::Raw => StateFormat::Raw,
            Format::Vhd => StateFormat::Vhd,
            Format::Vhdx => StateFormat::Vhdx,
            Format::Qcow2 => StateFormat::Qcow2,
            Format::Vdi => StateFormat::Vdi,
            Format::Vmdk => StateFormat::Vmdk,
        },
        sector_bytes: state.sector_bytes,
    }
}

fn from_stream(state: &State) -> DiskState {
    DiskState {
        format: match state.format {
            StateFormat::Raw => Format::Raw,
            StateFormat::Vhd => Format::Vhd,
            StateFormat::Vhdx => Format::Vhdx,
            StateFormat::Qcow2 => Format::Qcow2,
            StateFormat::Vdi => Format::Vdi,
            StateFormat::Vmdk => Format::Vmdk,
        },
        linkage_id: state.id.map(LinkageId::from_uuid),
        size_bytes: state.size_bytes,
        sector_bytes: state.sector_bytes,
    }
}

/// Writes a stream: the header, the pieces, the end mark. The caller flushes `out`.
pub(super) fn write_stream(
    out: &mut dyn Write,
    path: &Path,
    [base, result]: [&DiskState; 2],
    pieces: &mut dyn Pieces,
    progress: &mut Progress<'_>,
) -> Result<Written> {
    let failed = |error| file_error("write the changes into it", path, error);
    let header = Header { base: to_stream(base), result: to_stream(result) }.to_bytes();
    out.write_all(&header).map_err(failed)?;
    let stream = dwdiff::checksum_of(&header);
    let mut number = 0_u32;
    let mut written = Written::default();
    pieces.for_each(progress, &mut |piece, _| {
        written.count(&piece);
        let (kind, offset_bytes, len_bytes, payload) = match piece {
            Piece::Data { offset_bytes, bytes } => {
                (RecordKind::Data { payload_crc: dwdiff::payload_crc(bytes) }, offset_bytes, bytes.len() as u64, bytes)
            }
            Piece::Zeros { offset_bytes, len_bytes } => (RecordKind::Zeros, offset_bytes, len_bytes, &[][..]),
        };
        let record = Record { kind, offset_bytes, len_bytes, number };
        number = number.wrapping_add(1);
        out.write_all(&record.to_bytes(stream)).and_then(|()| out.write_all(payload)).map_err(failed)
    })?;
    let (offset_bytes, len_bytes) = (written.data_bytes, written.zero_bytes);
    let done = Record { kind: RecordKind::Done, offset_bytes, len_bytes, number };
    out.write_all(&done.to_bytes(stream)).map_err(failed)?;
    Ok(written)
}

/// A stream that is being read.
pub(super) struct StreamPieces<'a> {
    input: &'a mut dyn Read,
    path: PathBuf,
    /// Bytes that were read.
    at_bytes: u64,
    checksum: u32,
    pub(super) base: DiskState,
    pub(super) result: DiskState,
}

impl<'a> StreamPieces<'a> {
    /// Reads the header. Errors name `path`.
    pub(super) fn open(input: &'a mut dyn Read, path: &Path) -> Result<Self> {
        let mut bytes = [0; HEADER_BYTES];
        let mut at_bytes = 0;
        fill(input, &mut bytes, &mut at_bytes, path)?;
        let header = Header::parse(&bytes).map_err(|bad| damaged(path, "header", 0, &bad))?;
        Ok(Self {
            input,
            path: path.to_owned(),
            at_bytes,
            checksum: dwdiff::checksum_of(&bytes),
            base: from_stream(&header.base),
            result: from_stream(&header.result),
        })
    }

    /// What ranges are multiples of: the larger sector of base and result, in bytes.
    pub(super) fn unit_bytes(&self) -> u64 {
        UNIT_BYTES.max(self.base.sector_bytes.max(self.result.sector_bytes).into())
    }

    fn check(&self, record: &Record, number: u32, from_bytes: u64) -> std::result::Result<(), BadStream> {
        let bad = |found: String, expected: String| Err(BadStream { found, expected });
        if record.number != number {
            return bad(format!("record {}", record.number), format!("record {number}"));
        }
        if record.kind == RecordKind::Done {
            return Ok(());
        }
        let (start, len) = (record.offset_bytes, record.len_bytes);
        let end = start.checked_add(len).filter(|&end| len > 0 && end <= self.result.size_bytes);
        // The last range may end with the disk.
        let unit_bytes = self.unit_bytes();
        let is_whole = |end: u64| end == self.result.size_bytes || end.is_multiple_of(unit_bytes);
        if !end.is_some_and(is_whole) || start < from_bytes || !start.is_multiple_of(unit_bytes) {
            return bad(
                format!("{len} bytes at {start}"),
                format!(
                    "a range of whole {unit_bytes} bytes between {from_bytes} and the end of the disk at {}",
                    self.result.size_bytes
                ),
            );
        }
        if matches!(record.kind, RecordKind::Data { .. }) && len > PAYLOAD_MAX_BYTES {
            return bad(format!("{len} bytes of data"), format!("at most {PAYLOAD_MAX_BYTES}"));
        }
        Ok(())
    }
}

impl Pieces for StreamPieces<'_> {
    fn for_each(&mut self, progress: &mut Progress<'_>, each: &mut EachPiece<'_>) -> Result<()> {
        let mut payload = vec![0; PAYLOAD_MAX_BYTES as usize];
        let (mut number, mut from_bytes) = (0_u32, 0);
        let mut read = Written::default();
        loop {
            let record_at = self.at_bytes;
            let mut bytes = [0; RECORD_BYTES];
            fill(self.input, &mut bytes, &mut self.at_bytes, &self.path)?;
            let bad = |bad: &BadStream| damaged(&self.path, "record", record_at, bad);
            let record = Record::parse(&bytes, self.checksum).map_err(|error| bad(&error))?;
            self.check(&record, number, from_bytes).map_err(|error| bad(&error))?;
            let (offset_bytes, len_bytes) = (record.offset_bytes, record.len_bytes);
            let piece = match record.kind {
                RecordKind::Done if (offset_bytes, len_bytes) != (read.data_bytes, read.zero_bytes) => {
                    return Err(bad(&BadStream {
                        found: format!("an end mark after {offset_bytes} bytes of data and {len_bytes} of zeros"),
                        expected: format!("{} and {}, as were read", read.data_bytes, read.zero_bytes),
                    }));
                }
                RecordKind::Done => break,
                RecordKind::Zeros => Piece::Zeros { offset_bytes, len_bytes },
                RecordKind::Data { payload_crc } => {
                    let payload = &mut payload[..len_bytes as usize];
                    fill(self.input, payload, &mut self.at_bytes, &self.path)?;
                    let found = dwdiff::payload_crc(payload);
                    if found != payload_crc {
                        return Err(bad(&BadStream {
                            found: format!("data with the checksum {found:#010x}"),
                            expected: format!("{payload_crc:#010x}"),
                        }));
                    }
                    Piece::Data { offset_bytes, bytes: payload }
                }
            };
            read.count(&piece);
            each(piece, progress)?;
            from_bytes = offset_bytes + len_bytes;
            number = number.wrapping_add(1);
            if !progress(from_bytes, self.result.size_bytes) {
                return Err(DiskError::Stopped);
            }
        }
        let mut more = [0];
        match read_some(self.input, &mut more) {
            Ok(0) => Ok(()),
            Ok(_) => Err(damaged(
                &self.path,
                "end",
                self.at_bytes,
                &BadStream { found: "more bytes".into(), expected: "nothing behind the end mark".into() },
            )),
            Err(source) => Err(file_error("read it", &self.path, source)),
        }
    }
}

/// Fills `out`; fails if the stream ends before.
fn fill(input: &mut dyn Read, out: &mut [u8], at_bytes: &mut u64, path: &Path) -> Result<()> {
    let mut done = 0;
    while done < out.len() {
        match read_some(input, &mut out[done..]) {
            Ok(0) => {
                return Err(DiskError::BadExport {
                    path: path.to_owned(),
                    what: format!(
                        "it ends after {} bytes, without its end mark: the export is incomplete; get the whole of it",
                        *at_bytes + done as u64
                    ),
                });
            }
            Ok(count) => done += count,
            Err(source) => return Err(file_error("read it", path, source)),
        }
    }
    *at_bytes += out.len() as u64;
    Ok(())
}

fn read_some(input: &mut dyn Read, out: &mut [u8]) -> io::Result<usize> {
    loop {
        match input.read(out) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

fn damaged(path: &Path, structure: &str, at_bytes: u64, bad: &BadStream) -> DiskError {
    DiskError::BadExport {
        path: path.to_owned(),
        what: format!("its {structure} at byte {at_bytes} is damaged: {bad}; get another copy of the export"),
    }
}

/// The bytes of a store, from its beginning to its end.
#[derive(Debug)]
pub(super) struct StoreBytes {
    store: Arc<dyn Store>,
    at_bytes: u64,
}

impl StoreBytes {
    pub(super) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, at_bytes: 0 }
    }
}

impl Read for StoreBytes {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.store.len_bytes()?.saturating_sub(self.at_bytes);
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(out.len());
        self.store.read_at(&mut out[..len], self.at_bytes)?;
        self.at_bytes += len as u64;
        Ok(len)
    }
}

impl Write for StoreBytes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.store.write_at(bytes, self.at_bytes)?;
        self.at_bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.store.sync_data()
    }
}
