//! Changes that do not cover whole sectors, and what must wait for them.
//!
//! A disk moves whole sectors. A write of part of a sector is a read-modify-write. If another write
//! of that sector ran in between, it would be lost. So only one such *patching* change runs at a
//! time. It starts when nothing in flight touches its sectors, and until it has ended nothing that
//! touches them starts:
//!
//! ```text
//!   change ─▶ whole sectors, and none waits or patches? ── yes ─▶ starts at once
//!                  │ no                                    (all requests of a loop device)
//!                  ▼
//!            queue (first in, first out) ─▶ starts when overlapping changes have ended
//! ```
//!
//! The order is first in, first out, so no change starves. Speed does not matter here: only
//! programs that write the file directly write parts of sectors.

use std::{collections::VecDeque, ops::Range};

/// What a change writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// The payload of the message.
    Payload,
    Zeroes,
    /// Zeros, and the space may be freed.
    Discard,
}

/// One step of a patching change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Read these sectors, replace `bytes` in memory, and write the sectors back.
    Patch { sectors: Range<u64>, bytes: Range<u64> },
    /// Write whole sectors.
    Whole { sectors: Range<u64> },
}

/// Whether the ranges share a byte.
pub(crate) fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The smallest range of whole sectors that holds `bytes`.
pub(crate) fn sectors_of(bytes: &Range<u64>, sector_bytes: u64) -> Range<u64> {
    bytes.start - bytes.start % sector_bytes..bytes.end.next_multiple_of(sector_bytes)
}

/// The steps of a change. Payload fits one buffer, so it is patched in one step. Zeros may cover a
/// long range: its two ends are patched, and the sectors between are zeroed whole.
pub(crate) fn pieces(change: Change, bytes: &Range<u64>, sector_bytes: u64) -> VecDeque<Piece> {
    let sectors = sectors_of(bytes, sector_bytes);
    if &sectors == bytes {
        return [Piece::Whole { sectors }].into();
    }
    let inner = bytes.start.next_multiple_of(sector_bytes)..bytes.end - bytes.end % sector_bytes;
    if change == Change::Payload || inner.start >= inner.end {
        return [Piece::Patch { sectors, bytes: bytes.clone() }].into();
    }
    let mut pieces = VecDeque::new();
    if bytes.start < inner.start {
        pieces.push_back(Piece::Patch { sectors: sectors.start..inner.start, bytes: bytes.start..inner.start });
    }
    pieces.push_back(Piece::Whole { sectors: inner.clone() });
    if inner.end < bytes.end {
        pieces.push_back(Piece::Patch { sectors: inner.end..sectors.end, bytes: inner.end..bytes.end });
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn whole_sectors_are_one_piece() {
        assert_eq!(pieces(Change::Payload, &(512..1024), 512), [Piece::Whole { sectors: 512..1024 }]);
        assert_eq!(pieces(Change::Discard, &(0..4096), 4096), [Piece::Whole { sectors: 0..4096 }]);
    }

    #[test]
    fn a_part_of_one_sector_is_one_patch() {
        for change in [Change::Payload, Change::Zeroes] {
            assert_eq!(pieces(change, &(513..514), 512), [Piece::Patch { sectors: 512..1024, bytes: 513..514 }]);
        }
    }

    proptest! {
        #[test]
        fn pieces_cover_the_change_and_nothing_else(start in 0u64..20_000, len in 1u64..20_000, big: bool, payload: bool) {
            let sector_bytes = if big { 4096 } else { 512 };
            let change = if payload { Change::Payload } else { Change::Zeroes };
            let mut at = start;
            for piece in pieces(change, &(start..start + len), sector_bytes) {
                let (sectors, bytes) = match piece {
                    Piece::Whole { sectors } => (sectors.clone(), sectors),
                    Piece::Patch { sectors, bytes } => (sectors, bytes),
                };
                prop_assert_eq!(bytes.start, at);
                prop_assert_eq!((sectors.start % sector_bytes, sectors.end % sector_bytes), (0, 0));
                prop_assert!(sectors.start <= bytes.start && bytes.end <= sectors.end);
                at = bytes.end;
            }
            prop_assert_eq!(at, start + len);
        }
    }
}
