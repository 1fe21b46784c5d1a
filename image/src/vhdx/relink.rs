//! Replaces the link of an open disk to its parent.
//!
//! ```text
//!   metadata region:   table │ items │ old locator │ free ...
//!                        └──────────────▲
//!   1  a free place in the region for the new locator, at a multiple of 4096
//!   2  new FileWriteGuid, once a session; sync
//!   3  ONE log entry: pages of the new locator, page of the table ─▶ sync   the atomic change
//!   4  new locator in place ─▶ sync ─▶ table in place ─▶ sync
//! ```
//!
//! The DataWriteGuid stays: a new link changes no guest-visible data, and the disk's own children
//! remain valid.
//!
//! Why a power cut does no harm: the log entry is replayed completely or not at all. Some programs
//! read a file without its log (libvhdi, and [`parent_link`](super::parent_link)). For them the old
//! locator is never overwritten. The new one is durable in place before the table names it. Offset
//! and length of an item lie within one sector, so the table is never torn. The old locator's place
//! is free for the next link.
//!
//! `preparing` is held throughout, so no other thread changes the metadata region (`grow.rs`). The
//! `log` lock is held from the log entry until the table is durable in place: a flush in between
//! would replace the log entry. Other threads reserve and commit meanwhile.

use super::{
    header::{sync, write},
    image::{VhdxImage, Writing},
    link, lock,
    open::{read_metadata_table, read_regions, required_region},
    pages::{PAGE_BYTES, Page},
};
use crate::{
    ParentLink,
    error::{ImageError, Result},
};
use diskwright_format::vhdx::{
    Invalid, MIB, MetadataTable, ParentLocator,
    metadata::{METADATA_TABLE_BYTES, PARENT_LOCATOR},
    region::METADATA_REGION,
};

/// The pages that change with the link.
struct Changes {
    locator: Vec<Page>,
    table: Vec<Page>,
}

impl VhdxImage {
    /// Replaces the link to the parent, by the steps of this module.
    pub(super) fn replace_link(&self, writing: &Writing, link: &ParentLink) -> Result<()> {
        self.barrier.check()?;
        if !self.layout.has_parent {
            return Err(self.refused("the disk has no parent".into(), "only a differencing disk has one"));
        }
        let bytes = link::encode(link).map_err(|(what, hint)| self.refused(what, hint))?;
        let stored = ParentLocator::parse(&bytes).and_then(|locator| link::of_locator(&locator));
        let stored = stored.map_err(|invalid| self.refused(invalid.to_string(), "use other paths"))?;
        let _turn = lock(&writing.preparing);
        let changes = self.changes_for(&bytes)?;
        self.begin_change(writing)?;
        let file_bytes = lock(&writing.state).space.as_ref().map(|space| space.file_end_bytes());
        let file_bytes = match file_bytes {
            Some(file_bytes) => file_bytes,
            // An entry is damaged: the file keeps its length.
            None => self.file_bytes().map(|bytes| bytes - bytes % MIB)?,
        };
        let mut log = lock(&writing.log);
        // The log must not be needed any more for the pages of earlier flushes.
        sync(&self.barrier)?;
        let pages = [&changes.locator[..], &changes.table[..]].concat();
        log.append(&self.barrier, &writing.headers, &pages, file_bytes)?;
        // The log has the new link, so the disk has it, even if a later step fails.
        if let Err(error) = self.write_link(&changes) {
            let again = std::io::Error::other(error.to_string());
            let doing = "write the link to the parent in place; close the disk and open it again";
            self.barrier.settle(doing, Err(again))?;
        }
        *lock(&writing.link) = Some(stored);
        Ok(())
    }

    fn refused(&self, what: String, hint: &str) -> ImageError {
        ImageError::BadParentLink { path: self.barrier.store().name().to_owned(), what, hint: hint.into() }
    }

    /// Step 1: the pages with the new locator and the table that names it.
    fn changes_for(&self, locator: &[u8]) -> Result<Changes> {
        let store = &**self.barrier.store();
        let region =
            required_region(store, &read_regions(store, &mut Vec::new())?, METADATA_REGION, "metadata region")?;
        let table = read_metadata_table(store, &region)?;
        let field_bytes = table.place_field_bytes(PARENT_LOCATOR).ok_or_else(|| {
            let missing = Invalid::new("parent locator", 0, "no such metadata item", "one item");
            super::corrupt(store, region.offset_bytes, missing)
        })?;
        let held_bytes = self.file_bytes()?.saturating_sub(region.offset_bytes).min(region.len_bytes.into());
        let place = free_place(&table, held_bytes, locator.len() as u64).ok_or_else(|| {
            let what = format!("its {} bytes do not fit into the free part of the metadata region", locator.len());
            self.refused(what, "move the parent to a shorter path, or convert the disk to a new one")
        })?;
        let mut changes = Changes { locator: Vec::new(), table: Vec::new() };
        self.changed_pages(locator, region.offset_bytes + u64::from(place), &mut changes.locator)?;
        let fields = [place.to_le_bytes(), (locator.len() as u32).to_le_bytes()].concat();
        self.changed_pages(&fields, region.offset_bytes + field_bytes, &mut changes.table)?;
        Ok(changes)
    }

    /// Step 4: what the log entry has is written in place.
    fn write_link(&self, changes: &Changes) -> Result<()> {
        for pages in [&changes.locator, &changes.table] {
            for (offset_bytes, page) in pages {
                write(&self.barrier, "write the link to the parent in place", page, *offset_bytes)?;
            }
            sync(&self.barrier)?;
        }
        Ok(())
    }
}

/// Offset in the region of the first free range of `len_bytes` that begins at a multiple of 4096.
/// `region_bytes` is the length of the region in the file.
fn free_place(table: &MetadataTable, region_bytes: u64, len_bytes: u64) -> Option<u32> {
    let items = table.entries.iter().filter(|entry| entry.len_bytes > 0);
    let mut used: Vec<(u64, u64)> = items
        .map(|entry| (entry.offset_bytes.into(), u64::from(entry.offset_bytes) + u64::from(entry.len_bytes)))
        .collect();
    used.push((region_bytes, region_bytes));
    used.sort_unstable();
    let mut at_bytes = METADATA_TABLE_BYTES as u64;
    for (start_bytes, end_bytes) in used {
        if at_bytes + len_bytes <= start_bytes.min(region_bytes) {
            return u32::try_from(at_bytes).ok();
        }
        at_bytes = at_bytes.max(end_bytes.next_multiple_of(PAGE_BYTES));
    }
    None
}
