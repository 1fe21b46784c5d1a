//! The I/O for space at the end of a VHD: zeroes free pieces, or grows the file and moves the
//! footer.
//!
//! [`Growth`](super::growth::Growth) decides under the state mutex what is needed and records the
//! result. The I/O between is done without that mutex, by one thread at a time.

use crate::{
    ImageError, Result,
    space::{Extension, zero_pieces},
};
use diskwright_format::vhd::FOOTER_BYTES;
use diskwright_store::Store;
use std::io;

/// What failed, in errors.
pub(super) const GROW: &str = "grow the file";

/// The I/O that is needed before a piece can be taken.
#[derive(Debug)]
pub(super) enum SpacePreparation {
    Enough,
    /// Zero these free pieces.
    Zero {
        pieces: Vec<u64>,
        piece_bytes: u64,
    },
    /// Grow the file and move the footer.
    Extend {
        extension: Extension,
        footer: Box<[u8; FOOTER_BYTES]>,
    },
}

/// Result of [`SpacePreparation::make`].
#[derive(Debug)]
pub(super) enum PreparedSpace {
    Nothing,
    /// The first `zeroed` of the pieces are zeros now.
    Zeroed {
        pieces: Vec<u64>,
        zeroed: usize,
        piece_bytes: u64,
    },
    Extended {
        end_bytes: u64,
    },
}

impl SpacePreparation {
    /// Does the I/O. The caller ensures that only one thread does so. The result must be published
    /// even if there is an error.
    pub fn make(self, store: &dyn Store) -> (PreparedSpace, Result<()>) {
        match self {
            Self::Enough => (PreparedSpace::Nothing, Ok(())),
            Self::Zero { pieces, piece_bytes } => {
                let (zeroed, result) = zero_pieces(store, &pieces, piece_bytes);
                let at = pieces.get(zeroed).copied().unwrap_or(0);
                (
                    PreparedSpace::Zeroed { pieces, zeroed, piece_bytes },
                    result.map_err(|e| ImageError::io(GROW, store, at, e)),
                )
            }
            Self::Extend { extension, footer } => match extend(store, &extension, &footer) {
                Ok(end_bytes) => (PreparedSpace::Extended { end_bytes }, Ok(())),
                Err(error) => {
                    restore_footer(store, &footer, extension.from_bytes);
                    (PreparedSpace::Nothing, Err(error))
                }
            },
        }
    }
}

fn extend(store: &dyn Store, extension: &Extension, footer: &[u8; FOOTER_BYTES]) -> Result<u64> {
    let old_end = extension.from_bytes;
    let new_end = extension.carry_out(store).map_err(|e| ImageError::io(GROW, store, old_end, e))?;
    move_footer(store, footer, old_end, new_end)
        .map_err(|e| ImageError::io("move the footer to the file's new end", store, new_end, e))?;
    Ok(new_end)
}

fn move_footer(store: &dyn Store, footer: &[u8; FOOTER_BYTES], old_end: u64, new_end: u64) -> io::Result<()> {
    store.write_at(footer, new_end)?;
    // The old footer becomes slack, and slack must be zero.
    let covered_bytes = (new_end - old_end).min(FOOTER_BYTES as u64) as usize;
    store.write_at(&[0; FOOTER_BYTES][..covered_bytes], old_end)
}

/// Writes the footer again after a failed growth, which may have cut it off. Errors are ignored:
/// the copy at offset 0 is valid.
fn restore_footer(store: &dyn Store, footer: &[u8; FOOTER_BYTES], at: u64) {
    let end = at + FOOTER_BYTES as u64;
    if store.write_at(footer, at).is_ok() && store.len_bytes().is_ok_and(|len_bytes| len_bytes > end) {
        let _ = store.set_len(end);
    }
}
