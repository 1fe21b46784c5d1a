//! What the formats that are written in one pass share: compressed blocks are encoded, in order,
//! and appended to the output; and what the copy then has done, or why it failed.

use super::super::options::ConvertOutcome;
use crate::{
    DiskError, Opened, Progress,
    copying::{
        copy::{Failure, file_of},
        packing::{Output, Packed, Packing, Sink},
    },
    error::from_io,
};
use std::{io, path::Path};

/// Appends the encoded form of the compressed block with this number to the buffer.
pub(super) type Encode<'a> = dyn FnMut(u64, &[u8], &mut Vec<u8>) -> io::Result<()> + 'a;

/// Encodes blocks, and appends them to the output.
struct Encoder<'a, 'b> {
    encode: &'a mut Encode<'b>,
    output: &'a mut Output,
    buf: Vec<u8>,
}

impl Sink for Encoder<'_, '_> {
    fn block(&mut self, number: u64, packed: &[u8]) -> io::Result<()> {
        self.buf.clear();
        (self.encode)(number, packed, &mut self.buf)?;
        self.output.append(&self.buf)
    }
}

/// Packs the source into `output`, each block as `encode` writes it.
///
/// # Errors
/// As [`Packing::run`].
pub(super) fn pack_into(
    output: &mut Output,
    packing: &Packing<'_>,
    encode: &mut Encode<'_>,
    progress: &mut Progress<'_>,
) -> Result<Packed, Option<Failure>> {
    packing.run(&mut Encoder { encode, output, buf: Vec::new() }, progress)
}

/// The outcome of a conversion that wrote a whole disk of `size_bytes`.
pub(super) fn outcome_of(packed: Packed, size_bytes: u64) -> ConvertOutcome {
    let Packed { data_bytes, zero_bytes, lost } = packed;
    ConvertOutcome {
        size_bytes,
        dest_bytes: size_bytes,
        copied_bytes: data_bytes,
        // The lost ranges became zeros too.
        zero_bytes: zero_bytes.saturating_sub(lost.bytes),
        lost,
        ..ConvertOutcome::default()
    }
}

/// What was written.
pub(super) struct Written {
    pub(super) outcome: ConvertOutcome,
    /// Length of the file in bytes.
    pub(super) file_bytes: u64,
}

/// The error of a packing that failed.
pub(super) fn explain(
    (source, source_path): (&Opened, &Path),
    dest: &Path,
    free_bytes: Option<u64>,
    failure: Option<Failure>,
) -> DiskError {
    match failure {
        None => DiskError::Stopped,
        Some(Failure::Source(range, error)) => from_io("read it", &file_of(source, source_path, range), error),
        Some(Failure::Dest(error)) => {
            let error = diskwright_store::explain_shortage(error, dest, None, free_bytes);
            from_io("copy into it", dest, error)
        }
    }
}
