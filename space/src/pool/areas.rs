//! Where the journal and the checkpoints lie: on up to three members, the fast ones first, the
//! larger ones among them.
//!
//! ```text
//!   a member joins, leaves or is lost ─▶ settle_areas ─▶ a run of free slabs on another member
//!     ─▶ a checkpoint on all areas, the new ones too ─▶ superblocks name the new areas
//! ```
//!
//! The superblock says which slabs are an area, not the map. So a new area is written before it is
//! named, and the slabs of an old one are free once it is not named any more.

use super::{Pool, lock, lose::lineage_number};
use crate::{
    error::{Result, SpaceError},
    log::OpenArea,
};
use diskwright_format::space::{
    AREAS_MAX, BLOCK_BYTES, slabs_of,
    superblock::{Area, Class, MemberState},
};
use std::{io, path::Path, sync::PoisonError};

/// A member that may hold an area.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Holder {
    pub(crate) number: u8,
    pub(crate) class: Class,
    pub(crate) size_bytes: u64,
}

/// The areas of a pool with these members, each at the first slab.
pub(crate) fn areas_for(holders: &[Holder], slab_shift: u8) -> Vec<Area> {
    let all_slabs: u64 = holders.iter().map(|holder| u64::from(slabs_of(holder.size_bytes, slab_shift))).sum();
    // A checkpoint needs at most 5 bytes for each slab; the pool may become half as large again.
    let checkpoint_bytes = 64 * 1024 + all_slabs * 8 + BLOCK_BYTES as u64;
    let journal_bytes = (all_slabs * 64).clamp(512 << 10, 64 << 20);
    let slabs = |bytes: u64| bytes.div_ceil(1 << slab_shift).min(u64::from(u32::MAX) / 4) as u32;
    let mut order = holders.to_vec();
    order.sort_by_key(|holder| (holder.class, std::cmp::Reverse(holder.size_bytes), holder.number));
    let area = |holder: &Holder| Area {
        member: holder.number,
        first_slab: 0,
        journal_slabs: slabs(journal_bytes),
        checkpoint_slabs: slabs(checkpoint_bytes),
    };
    order.iter().take(AREAS_MAX).map(area).collect()
}

impl Pool {
    /// Puts the areas where they belong, if they are not there.
    ///
    /// # Errors
    /// [`SpaceError::Usage`] if no member has room for one; [`SpaceError::Io`].
    pub(super) fn settle_areas(&self) -> Result<()> {
        let mut place = lock(&self.place);
        let superblock = lock(&self.state).superblock.clone();
        let rows = (0_u8..).zip(&superblock.members).filter_map(|(number, row)| Some((number, row.as_ref()?)));
        let usable = rows.filter(|(number, row)| {
            row.state == MemberState::Active && !row.is_witness() && self.live_member(*number).is_some()
        });
        let holders: Vec<Holder> =
            usable.map(|(number, row)| Holder { number, class: row.class, size_bytes: row.size_bytes }).collect();
        let wanted = areas_for(&holders, self.slab_shift);
        let is_kept = |area: &&Area| {
            let stays = holders.iter().any(|holder| holder.number == area.member);
            let fits = |wanted: &Area| {
                area.journal_slabs >= wanted.journal_slabs && area.checkpoint_slabs >= wanted.checkpoint_slabs
            };
            stays && wanted.first().is_none_or(fits)
        };
        let mut areas: Vec<Area> = superblock.areas.iter().filter(is_kept).copied().collect();
        let missing = AREAS_MAX.min(holders.len()).saturating_sub(areas.len());
        let new: Vec<Area> = wanted
            .iter()
            .chain(&areas_for_all(&holders, self.slab_shift))
            .filter(|area| areas.iter().all(|kept| kept.member != area.member))
            .fold(Vec::new(), |mut found: Vec<Area>, area| {
                if found.len() < missing && found.iter().all(|one| one.member != area.member) {
                    found.extend(self.take_run(area));
                }
                found
            });
        areas.extend(&new);
        if areas == superblock.areas {
            return Ok(());
        }
        if areas.is_empty() {
            let what = format!("pool {}: no other member has room for the journal; add a member first", self.name);
            return Err(SpaceError::Usage { what });
        }
        let failed = |error: io::Error| SpaceError::io("move the journal", Path::new(&self.name), error);
        let open = |area: &Area| (area.member, OpenArea::new(area, self.slab_shift));
        // The old ones stay in use until the superblocks name the new ones.
        let both: Vec<Area> = superblock.areas.iter().chain(&new).copied().collect();
        *self.areas.write().unwrap_or_else(PoisonError::into_inner) = both.iter().map(open).collect();
        for area in &new {
            let Some(member) = self.live_member(area.member) else { continue };
            open(area).1.allocate(&*member.store).map_err(failed)?;
        }
        self.write_checkpoint(&mut place).map_err(failed)?;
        let mut state = lock(&self.state);
        let mut superblock = state.superblock.clone();
        let gone: Vec<Area> = superblock.areas.iter().filter(|old| !areas.contains(old)).copied().collect();
        superblock.areas = areas;
        superblock.advance(lineage_number());
        for member in self.live_members() {
            member.write_superblock(&superblock).map_err(failed)?;
        }
        *self.areas.write().unwrap_or_else(PoisonError::into_inner) = superblock.areas.iter().map(open).collect();
        state.superblock = superblock;
        for area in gone {
            let free = &mut state.free[usize::from(area.member)];
            area.slabs().unwrap_or_default().for_each(|slab| free.give_back(slab));
        }
        Ok(())
    }

    /// Takes a run of free slabs for an area.
    fn take_run(&self, area: &Area) -> Option<Area> {
        let count = area.slabs()?.len() as u32;
        let first_slab = lock(&self.state).free[usize::from(area.member)].take_run(count)?;
        Some(Area { first_slab, ..*area })
    }
}

/// An area for each member, for when the best ones have no room.
fn areas_for_all(holders: &[Holder], slab_shift: u8) -> Vec<Area> {
    let sizes = areas_for(holders, slab_shift);
    let Some(first) = sizes.first() else { return Vec::new() };
    holders.iter().map(|holder| Area { member: holder.number, ..*first }).collect()
}
