//! Changes that are no whole number of sectors, and what must wait for them.
//!
//! A disk moves whole sectors. A write of part of a sector is a read, a patch in memory, and a
//! write; were another write of that sector to come in between, it would be undone. So there is one
//! such *patching* change at a time, it starts when nothing in flight touches its sectors, and
//! until it has ended nothing that touches them starts:
//!
//! ```text
//!   change ─▶ whole sectors, and nobody waits or patches? ── yes ─▶ starts at once             every request of a loop device
//!                  │ no
//!                  ▼
//!            queue (first in, first out) ─▶ starts when what it would meet has ended
//! ```
//!
//! First in, first out, so nothing starves. Speed is nothing here: the programs that write parts of
//! sectors do it by hand.

use std::{collections::VecDeque, ops::Range};

/// What a change puts in place of what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// The payload of the message.
    Payload,
    /// Zeros.
    Zeroes,
    /// Zeros, and the space is given back.
    Discard,
}

/// One piece of a patching change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Read these sectors, put bytes over `bytes`, and write them.
    Patch { sectors: Range<u64>, bytes: Range<u64> },
    /// Whole sectors.
    Whole { sectors: Range<u64> },
}

/// Whether two ranges share a byte.
pub(crate) fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The whole sectors that hold `bytes`.
pub(crate) fn sectors_of(bytes: &Range<u64>, sector_bytes: u64) -> Range<u64> {
    bytes.start - bytes.start % sector_bytes..bytes.end.next_multiple_of(sector_bytes)
}

/// The pieces of a change. Payload is patched in one piece, as it fits into one buffer; zeros may
/// be long, so their ends are patched and what is between is zeroed whole.
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
