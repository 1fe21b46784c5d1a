//! What has moved between the tiers lately, and why.
//!
//! ```text
//!   optimize moves a slab ─▶ a row, or one more slab in the last one ─▶ "/moves", at a close
//! ```
//!
//! A row is a run of slabs of one disk that moved for one reason. The newest [`MOVES_MAX`] are kept.

use super::{
    Pool, lock,
    own_files::{u32_at, u64_at},
};
use crate::plan::SlabHeat;
use diskwright_format::space::{change::Tier, superblock::Class};
use std::{
    io,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

const MOVES: &str = "/moves";
const MAGIC: &[u8; 8] = b"DWMOVE1\0";
const ROW_BYTES: usize = 28;
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
struct Row {
    unix_s: u64,
    file: u32,
    first: u32,
    count: u32,
    heat: u32,
    is_up: bool,
    why: MoveReason,
}

impl Row {
    fn to_bytes(self) -> [u8; ROW_BYTES] {
        let mut bytes = [0; ROW_BYTES];
        bytes[..8].copy_from_slice(&self.unix_s.to_le_bytes());
        for (at, number) in [(8, self.file), (12, self.first), (16, self.count), (20, self.heat)] {
            bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        }
        (bytes[24], bytes[25]) = (self.is_up.into(), self.why as u8);
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
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
    rows: Vec<Row>,
    /// Rows have changed since they were saved.
    is_changed: bool,
}

impl Moves {
    fn push(&mut self, slab: Row) {
        self.is_changed = true;
        match self.rows.iter_mut().rev().take(16).find(|row| row.takes(&slab)) {
            Some(row) => (row.count, row.heat) = (row.count + 1, row.heat.saturating_add(slab.heat)),
            None => self.rows.push(slab),
        }
        let surplus = self.rows.len().saturating_sub(MOVES_MAX);
        self.rows.drain(..surplus);
    }
}

impl Pool {
    /// Records that a slab has moved.
    pub(super) fn record_move(&self, slab: &SlabHeat, to: Class) {
        let is_up = to == Class::Ssd;
        let why = match (slab.tier, is_up) {
            (Tier::Fast, true) | (Tier::Slow, false) => MoveReason::Pinned,
            (_, true) => MoveReason::Hot,
            (_, false) => MoveReason::Cold,
        };
        let unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let (file, first, heat) = (slab.file, slab.index, slab.heat);
        lock(&self.moves).push(Row { unix_s, file, first, count: 1, heat, is_up, why });
    }

    /// What has moved between the tiers lately, the newest first.
    pub fn moves(self: &Arc<Self>) -> Vec<TierMove> {
        self.load_heat();
        let names = lock(&self.state).names.clone();
        let name_of = |file: u32| names.iter().find(|(_, number)| **number == file).map(|(name, _)| name.clone());
        let moves = lock(&self.moves);
        let shown = moves.rows.iter().rev().filter_map(|row| {
            Some(TierMove {
                unix_s: row.unix_s,
                disk: name_of(row.file)?,
                offset_bytes: u64::from(row.first) << self.slab_shift,
                len_bytes: u64::from(row.count) << self.slab_shift,
                is_up: row.is_up,
                heat: u64::from(row.heat) * u64::from(crate::heat::SAMPLE),
                why: row.why,
            })
        });
        shown.collect()
    }

    /// Adds the moves of earlier sessions, before those of this one.
    pub(super) fn read_moves(self: &Arc<Self>) -> io::Result<()> {
        let mut rows: Vec<Row> =
            self.read_table(MOVES, MAGIC, ROW_BYTES)?.iter().map(|row| Row::from_bytes(row)).collect();
        let mut moves = lock(&self.moves);
        rows.append(&mut moves.rows);
        rows.drain(..rows.len().saturating_sub(MOVES_MAX));
        moves.rows = rows;
        Ok(())
    }

    /// Saves the moves, if there are new ones.
    pub(super) fn save_moves(self: &Arc<Self>) -> io::Result<()> {
        let moves = lock(&self.moves);
        if !moves.is_changed {
            return Ok(());
        }
        let rows: Vec<u8> = moves.rows.iter().flat_map(|row| row.to_bytes()).collect();
        drop(moves);
        self.write_table(MOVES, MAGIC, ROW_BYTES, &rows)?;
        lock(&self.moves).is_changed = false;
        Ok(())
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
