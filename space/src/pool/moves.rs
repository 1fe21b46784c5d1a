//! The moves between the tiers are recorded, kept in a table of the pool's own, and shown.
//!
//! ```text
//!   optimize moves a slab ─▶ a row, or one more slab in the last one ─▶ "/moves", at a close
//! ```

use super::{Pool, lock};
use crate::{
    moved::{MoveReason, ROW_BYTES, Row, TierMove},
    plan::SlabHeat,
};
use diskwright_format::space::{change::Tier, superblock::Class};
use std::{
    io,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

const MOVES: &str = "/moves";
const MAGIC: &[u8; 8] = b"DWMOVE1\0";

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
        let rows = self.read_table(MOVES, MAGIC, ROW_BYTES)?;
        lock(&self.moves).put_before(rows.iter().map(|row| Row::from_bytes(row)).collect());
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
