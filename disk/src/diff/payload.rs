//! What a disk has in the ranges in which it differs: data or zeros.

use super::{
    change::{ChangeKind, Changes},
    read::Reader,
};
use crate::{DiskError, Opened, Progress, Result};
use diskwright_store::{EngineKind, all_zero};
use std::{ops::Range, path::Path};

/// A piece of an export.
#[derive(Debug)]
pub(super) enum Piece<'a> {
    /// The range has these bytes, at most 1 MiB.
    Data { offset_bytes: u64, bytes: &'a [u8] },
    /// The range reads as zeros.
    Zeros { offset_bytes: u64, len_bytes: u64 },
}

impl Piece<'_> {
    fn range(&self) -> Range<u64> {
        match self {
            Self::Data { offset_bytes, bytes } => *offset_bytes..offset_bytes + bytes.len() as u64,
            Self::Zeros { offset_bytes, len_bytes } => *offset_bytes..offset_bytes + len_bytes,
        }
    }
}

/// What is called with each piece.
pub(super) type EachPiece<'a> = dyn FnMut(Piece<'_>, &mut Progress<'_>) -> Result<()> + 'a;

/// The pieces of an export, in ascending order, without overlaps.
pub(super) trait Pieces {
    /// Calls `each` with every piece. `progress` counts bytes of the disk.
    ///
    /// # Errors
    /// If the pieces cannot be read; [`DiskError::Stopped`]; the first error of `each`.
    fn for_each(&mut self, progress: &mut Progress<'_>, each: &mut EachPiece<'_>) -> Result<()>;
}

/// The pieces of an export, and zeros for what has no piece in `padding`.
///
/// A copy that is longer than the base may hold anything behind the base's end, where the result
/// has zeros without a piece.
pub(super) struct Padded<'a> {
    pub(super) pieces: &'a mut dyn Pieces,
    pub(super) padding: Range<u64>,
}

impl Pieces for Padded<'_> {
    fn for_each(&mut self, progress: &mut Progress<'_>, each: &mut EachPiece<'_>) -> Result<()> {
        let mut at = self.padding.start;
        let end = self.padding.end;
        let pad = |at: u64, until: u64, progress: &mut Progress<'_>, each: &mut EachPiece<'_>| {
            let until = until.min(end);
            let zeros = Piece::Zeros { offset_bytes: at, len_bytes: until.saturating_sub(at) };
            if at < until { each(zeros, progress) } else { Ok(()) }
        };
        self.pieces.for_each(progress, &mut |piece, progress| {
            let range = piece.range();
            pad(at, range.start, progress, each)?;
            at = at.max(range.end);
            each(piece, progress)
        })?;
        pad(at, end, progress, each)
    }
}

/// The pieces of an open disk.
pub(super) struct Payload<'a> {
    pub(super) disk: &'a Opened,
    pub(super) path: &'a Path,
    pub(super) changes: &'a mut dyn Changes,
    pub(super) engine: EngineKind,
}

impl Pieces for Payload<'_> {
    fn for_each(&mut self, progress: &mut Progress<'_>, each: &mut EachPiece<'_>) -> Result<()> {
        let device = self.disk.device();
        let end_bytes = device.geometry().size_bytes;
        let mut reader = Reader::open(&[(device, self.path)], self.engine)?;
        let read = |offset_bytes: u64, bytes: &[&[u8]], progress: &mut Progress<'_>, each: &mut EachPiece<'_>| {
            let Some(bytes) = bytes.first() else { return Ok(()) };
            let piece = match all_zero(bytes) {
                true => Piece::Zeros { offset_bytes, len_bytes: bytes.len() as u64 },
                false => Piece::Data { offset_bytes, bytes },
            };
            each(piece, progress)?;
            if progress(offset_bytes + bytes.len() as u64, end_bytes) { Ok(()) } else { Err(DiskError::Stopped) }
        };
        self.changes.for_each(progress, &mut |change, progress| {
            let (offset_bytes, len_bytes) = (change.offset_bytes, change.len_bytes);
            let mut hand_out = |at: u64, bytes: &[&[u8]], progress: &mut Progress<'_>| read(at, bytes, progress, each);
            match change.kind {
                ChangeKind::Data => reader.push(offset_bytes..change.end_bytes(), progress, &mut hand_out),
                ChangeKind::Zeros => {
                    reader.drain(progress, &mut hand_out)?;
                    each(Piece::Zeros { offset_bytes, len_bytes }, progress)
                }
                // The size of the result says that it ends.
                ChangeKind::Beyond => Ok(()),
            }
        })?;
        reader.drain(progress, &mut |at: u64, bytes: &[&[u8]], progress: &mut Progress<'_>| {
            read(at, bytes, progress, each)
        })
    }
}
