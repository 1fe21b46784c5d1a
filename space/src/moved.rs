//! What has moved between the tiers lately, and why, in memory and as rows of a table.
//!
//! A row is a run of slabs of one disk that moved for one reason. The newest [`MOVES_MAX`] are
//! kept.

use crate::numbers::{u32_at, u64_at};

pub(crate) const ROW_BYTES: usize = 28;
/// How many rows are kept.
const MOVES_MAX: usize = 512;
/// Slabs that move within this time are one row.
const ONE_MOVE_S: u64 = 60;

/// Why a slab has moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveReason {
    /// It is pinned to the tier.
    Pinned,
    /// It is used more often than others.
    Hot,
    /// Others are used more often.
    Cold,
}

impl MoveReason {
    /// The reason in a few words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pinned => "pinned",
            Self::Hot => "hotter than others",
            Self::Cold => "colder than others",
        }
    }

    fn from_byte(byte: u8) -> Self {
        [Self::Pinned, Self::Hot][..].get(usize::from(byte)).copied().unwrap_or(Self::Cold)
    }
}

/// A run of slabs that has moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierMove {
    /// When, in seconds since 1970.
    pub unix_s: u64,
    /// The disk.
    pub disk: String,
    /// Offset in the disk.
    pub offset_bytes: u64,
    /// Length.
    pub len_bytes: u64,
    /// Whether it has moved to fast members.
    pub is_up: bool,
    /// Requests that were known of all of it.
    pub heat: u64,
    /// Why.
    pub why: MoveReason,
}

/// A row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) unix_s: u64,
    pub(crate) file: u32,
    pub(crate) first: u32,
    pub(crate) count: u32,
    pub(crate) heat: u32,
    pub(crate) is_up: bool,
    pub(crate) why: MoveReason,
}

impl Row {
    pub(crate) fn to_bytes(self) -> [u8; ROW_BYTES] {
        let mut bytes = [0; ROW_BYTES];
        bytes[..8].copy_from_slice(&self.unix_s.to_le_bytes());
        for (at, number) in [(8, self.file), (12, self.first), (16, self.count), (20, self.heat)] {
            bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        }
        (bytes[24], bytes[25]) = (self.is_up.into(), self.why as u8);
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let byte = |at: usize| bytes.get(at).copied().unwrap_or_default();
        Self {
            unix_s: u64_at(bytes, 0),
            file: u32_at(bytes, 8),
            first: u32_at(bytes, 12),
            count: u32_at(bytes, 16),
            heat: u32_at(bytes, 20),
            is_up: byte(24) == 1,
            why: MoveReason::from_byte(byte(25)),
        }
    }

    /// Whether a slab that moves now continues the row.
    fn takes(&self, slab: &Self) -> bool {
        let is_next = self.first.checked_add(self.count) == Some(slab.first);
        is_next
            && (self.file, self.is_up, self.why) == (slab.file, slab.is_up, slab.why)
            && slab.unix_s.saturating_sub(self.unix_s) < ONE_MOVE_S
    }
}

/// The rows, the newest last.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    pub(crate) rows: Vec<Row>,
    /// Rows have changed since they were saved.
    pub(crate) is_changed: bool,
}

impl Moves {
    pub(crate) fn push(&mut self, slab: Row) {
        self.is_changed = true;
        match self.rows.iter_mut().rev().take(16).find(|row| row.takes(&slab)) {
            Some(row) => (row.count, row.heat) = (row.count + 1, row.heat.saturating_add(slab.heat)),
            None => self.rows.push(slab),
        }
        self.drop_old();
    }

    fn drop_old(&mut self) {
        let surplus = self.rows.len().saturating_sub(MOVES_MAX);
        self.rows.drain(..surplus);
    }

    /// Adds the rows of earlier sessions.
    pub(crate) fn put_before(&mut self, mut rows: Vec<Row>) {
        rows.append(&mut self.rows);
        self.rows = rows;
        self.drop_old();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(unix_s: u64, first: u32, is_up: bool) -> Row {
        let why = if is_up { MoveReason::Hot } else { MoveReason::Cold };
        Row { unix_s, file: 3, first, count: 1, heat: 5, is_up, why }
    }

    #[test]
    fn neighbours_become_one_row_and_old_rows_go() {
        let mut moves = Moves::default();
        // An optimisation moves slabs up and down in turns.
        for index in 0..4 {
            moves.push(row(100, index, true));
            moves.push(row(100, 50 + index, false));
        }
        assert_eq!(moves.rows.len(), 2);
        assert_eq!((moves.rows[0].count, moves.rows[0].heat, moves.rows[1].first), (4, 20, 50));
        moves.push(row(500, 4, true));
        assert_eq!(moves.rows.len(), 3, "that was another time");
        (0..2 * MOVES_MAX as u32).for_each(|index| moves.push(row(600, 2 * index, true)));
        assert_eq!((moves.rows.len(), moves.rows[0].first), (MOVES_MAX, 2 * MOVES_MAX as u32));
        for row in &moves.rows {
            assert_eq!(Row::from_bytes(&row.to_bytes()), *row);
        }
    }
}
