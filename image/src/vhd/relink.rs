//! Replaces the link of an open disk to its parent, and the unique id of a disk.
//!
//! Only the unique id, the time stamp or the start of the name change:
//!
//! ```text
//!   first 512 bytes of the header, with the checksum ─▶ sync       one sector, so never torn
//! ```
//!
//! Otherwise header and locators get another place, together. The header has two sectors, and its
//! locators lie in the second one, so they cannot be changed where they are:
//!
//! ```text
//!   0        512                            first block
//!   │ footer │ header, locators │ free │ BAT │ ...  blocks  ... │ footer │
//!   │        │       old        │ new ...                       │        │
//!
//!   1  header and locators in the free space before the first block, else at the end of the file
//!      ─▶ sync
//!   2  footer at the end cleared ─▶ sync ─▶ copy at 0 with the new data offset ─▶ sync
//!                                                                   the copy is the atomic change
//!   3  new footer at the end ─▶ sync
//! ```
//!
//! Why a power cut does no harm: the old header and its locators stay as they are, and nothing
//! refers to the new ones before step 2. There are never two valid footers that differ. While the
//! footer at the end is cleared, the copy is used, as after an interrupted growth of the file. The
//! next link goes to the place that the old header has left, if that is long enough.
//!
//! Why writers can continue: reservations, commits and flushes read and write neither header nor
//! locators. `preparing` is held throughout: no other thread grows the file or moves its footer.
//! No block is ever placed below [`Growth::first_block_bytes`](super::growth::Growth), so the space
//! there is no other thread's.

use super::{
    PAGE_BYTES,
    layout::{Blocks, by_trust, read_locator},
    link,
    write::Writing,
};
use crate::{ImageError, LinkageId, ParentLink, Result};
use diskwright_format::vhd::{DynamicHeader, FOOTER_BYTES, Footer, HEADER_BYTES, LocatorKind, SECTOR_BYTES};
use std::sync::{Arc, PoisonError};
use uuid::Uuid;

impl Writing {
    /// Gives the file another unique id, by steps 2 and 3 of this module: only the footers have it.
    pub(super) fn replace_unique_id(&self, unique_id: Uuid) -> Result<()> {
        self.barrier.check()?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        self.begin_growth()?;
        self.switch_footer(|old| Footer::with_unique_id(old, unique_id))?;
        self.lock().unique_id = Some(unique_id);
        self.restore_tail()
    }

    /// Replaces the link to the parent, by the steps of this module.
    pub(super) fn replace_link(&self, link: &ParentLink) -> Result<()> {
        self.barrier.check()?;
        if !self.blocks.is_differencing {
            return Err(self.refused("the disk has no parent".into(), "only a differencing disk has one"));
        }
        link::check(link).map_err(|(what, hint)| self.refused(what, hint))?;
        let _turn = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.blocks();
        let bytes = self.header_bytes(&before)?;
        let header = DynamicHeader {
            parent_id: link.linkage.map_or(Uuid::nil(), LinkageId::to_uuid),
            parent_modified_seconds: link.modified_seconds.unwrap_or(0),
            parent_name: link::name(link),
            ..before.header.clone()
        };
        let new = header.with_parent_of(&bytes);
        let (first, rest) = new.split_at(SECTOR_BYTES as usize);
        let is_one_sector = before.header_offset_bytes.is_multiple_of(SECTOR_BYTES)
            && rest == &bytes[SECTOR_BYTES as usize..]
            && self.has_paths(&before, link)?;
        if is_one_sector {
            self.put("write the dynamic disk header", first, before.header_offset_bytes)?;
            self.barrier.sync("make the link to the parent durable")?;
            self.install(Blocks { header, ..Blocks::clone(&before) }, link);
            return Ok(());
        }
        self.begin_growth()?;
        self.move_header(&before, header, &bytes, link)
    }

    fn refused(&self, what: String, hint: &str) -> ImageError {
        ImageError::BadParentLink { path: self.store.name().to_owned(), what, hint: hint.into() }
    }

    fn header_bytes(&self, blocks: &Blocks) -> Result<[u8; HEADER_BYTES]> {
        let (mut bytes, at) = ([0; HEADER_BYTES], blocks.header_offset_bytes);
        let read = self.store.read_at(&mut bytes, at);
        read.map_err(|e| ImageError::io("read the dynamic disk header", &*self.store, at, e))?;
        Ok(bytes)
    }

    /// Whether the file has locators for exactly the paths of `link`.
    fn has_paths(&self, blocks: &Blocks, link: &ParentLink) -> Result<bool> {
        let len_bytes = self.lock().len_bytes;
        let mut wanted = link::paths(link);
        for (index, entry) in by_trust(&blocks.header.locators) {
            let found = match entry.kind() {
                Some(kind @ (LocatorKind::WindowsRelative | LocatorKind::WindowsAbsolute)) => {
                    let found = read_locator(&*self.store, entry, index, blocks.header_offset_bytes, len_bytes)?;
                    found.ok().flatten().map(|path| (kind, path))
                }
                _ => None,
            };
            let Some(at) = wanted.iter().position(|path| Some(path) == found.as_ref()) else { return Ok(false) };
            wanted.remove(at);
        }
        Ok(wanted.is_empty())
    }

    /// Steps 1 to 3. `bytes` is the old header.
    fn move_header(
        &self,
        before: &Blocks,
        header: DynamicHeader,
        bytes: &[u8; HEADER_BYTES],
        link: &ParentLink,
    ) -> Result<()> {
        let len_bytes = HEADER_BYTES as u64 + link::locators(link, 0).1.len() as u64;
        let place = match self.place_before_blocks(before, len_bytes) {
            Some(place) => place,
            None => {
                let space_bytes = len_bytes.next_multiple_of(PAGE_BYTES);
                let place = self.take_table(space_bytes)?;
                self.keep_room(0, space_bytes)?;
                place
            }
        };
        let (locators, data) = link::locators(link, place + HEADER_BYTES as u64);
        let header = DynamicHeader { locators, ..header };
        let area = [&header.with_parent_of(bytes)[..], &data].concat();
        self.put("write the new link to the parent", &area, place)?;
        self.barrier.sync("make the new link to the parent durable")?;
        self.switch_footer(|old| Footer::with_data_offset(old, place))?;
        let mut after = Blocks { header, header_offset_bytes: place, ..Blocks::clone(before) };
        for range in after.metadata.iter_mut().filter(|range| range.start == before.header_offset_bytes) {
            *range = place..place + HEADER_BYTES as u64;
        }
        self.install(after, link);
        self.restore_tail()
    }

    /// Offset of the first free range of `len_bytes` before the first block, a multiple of 512.
    fn place_before_blocks(&self, blocks: &Blocks, len_bytes: u64) -> Option<u64> {
        let (limit, file_bytes) = {
            let state = self.lock();
            (state.growth.as_ref()?.first_block_bytes(), state.len_bytes)
        };
        let mut used = blocks.tables(file_bytes);
        // The space that an entry claims may be wrong. Its data must not be overwritten.
        used.extend(blocks.header.locators.iter().filter(|entry| entry.is_used()).filter_map(|entry| {
            let end = entry.data_offset.checked_add(entry.data_length_bytes.into())?;
            (end <= file_bytes).then_some(entry.data_offset..end)
        }));
        used.sort_unstable_by_key(|range| range.start);
        let mut at = FOOTER_BYTES as u64;
        for range in used {
            if at + len_bytes <= range.start.min(limit) {
                return Some(at);
            }
            at = at.max(range.end.next_multiple_of(SECTOR_BYTES));
        }
        (at + len_bytes <= limit).then_some(at)
    }

    fn install(&self, after: Blocks, link: &ParentLink) {
        let full = |path: &Option<String>| path.clone().filter(|path| !path.is_empty());
        // As the next open reads it: a long name was truncated.
        let bytes = after.header.to_bytes();
        let stored = DynamicHeader::parse(&bytes, 0).map_or_else(|_| String::new(), |header| header.parent_name);
        let link = ParentLink {
            file_id: None,
            relative_path: full(&link.relative_path),
            absolute_path: full(&link.absolute_path),
            name: Some(stored).filter(|name| !name.is_empty()),
            linkage: link.linkage,
            is_merged: false,
            modified_seconds: Some(after.header.parent_modified_seconds),
            modified_offset_bytes: Some(after.header_offset_bytes + 56),
            volume_path: None,
            linkage2: None,
            format: None,
        };
        let mut state = self.lock();
        state.blocks = Arc::new(after);
        state.link = Some(link);
    }
}
