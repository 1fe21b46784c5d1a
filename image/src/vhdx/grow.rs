//! Enlarges an open disk.
//!
//! ```text
//!   1  bytes of the last block beyond the old end of the disk     zeroed, if the block has data
//!   2  entries beyond the old end, in table pages already in use  cleared through cache and log
//!   3  entries beyond these pages                                 written in place; or, if the BAT
//!                                  region is too short: a longer region, with a copy of the table
//!   4  sync; ONE log entry with the size, and both region tables if the BAT moved ─▶ sync
//!                                                               this entry is the atomic change
//!   5  region table, sync, its copy, the size, in place; sync
//!   6  the new layout, the cached pages moved with the table      state lock
//! ```
//!
//! Why a power cut does no harm: what is written before step 4 has no effect while the size is the
//! old one. Entries beyond the end of the disk are ignored, and nothing refers to the longer table.
//! The log entry is replayed completely or not at all. One region table is valid at every instant,
//! so programs that read a file without its log find its parent.
//!
//! Why writers can continue: reservations and commits change pages in the cache by the old layout
//! until step 6. The `log` lock is held from before the copy of the table until then. No page
//! reaches the file meanwhile, so the copy lacks only dirty pages, and these move with the table.
//! `preparing` is held throughout: no other thread grows the file, and no freed space is handed
//! out, so the block that was seen in step 1 keeps its space.
//!
//! A fixed disk gets space for its new blocks as a hole at the end of the file, as at creation. The
//! space of a table that was moved is reused only after the file was opened again.

use super::{
    corrupt,
    header::{sync, write},
    image::{VhdxImage, Writing},
    layout::Layout,
    lock,
    open::{read_metadata_table, read_regions, required_region},
    pages::{PAGE_BYTES, Page},
    tables::READ_BAT,
};
use crate::{
    BlockState, Image,
    error::{ImageError, Result},
};
use diskwright_format::vhdx::{
    BITMAP_BLOCK_BYTES, BatEntry, BatGeometry, Invalid, MIB, PayloadState,
    bat::{BAT_ENTRY_BYTES, EntryKind},
    metadata,
    region::{BAT_REGION, METADATA_REGION, REGION_TABLE_OFFSETS},
};
use diskwright_store::{FileRange, Zeroing};
use std::sync::Arc;

/// Bytes of a table copied or written by one call.
const COPY_BYTES: u64 = MIB;

/// What failed, in errors.
const GROW: &str = "make the disk larger";

/// A planned change of the size.
pub(super) struct Plan {
    pub(super) before: Arc<Layout>,
    pub(super) after: Layout,
    /// Length of the new BAT region in bytes; `None` if the present one is long enough.
    pub(super) new_region_bytes: Option<u32>,
    /// Offset of the first new block of a fixed disk.
    pub(super) first_block_bytes: Option<u64>,
}

impl Plan {
    /// First index whose entry has no meaning at the old size. The bitmap entries of a differencing
    /// disk are an exception.
    fn first_index(&self) -> u64 {
        let old = &self.before;
        old.geometry.payload_index(old.geometry.payload_blocks()).min(old.entries())
    }

    /// First index after the last table page that may be in the cache.
    fn cached_end_index(&self) -> u64 {
        self.cached_bytes() / BAT_ENTRY_BYTES
    }

    /// Length of the old table in bytes, rounded up to whole pages.
    fn cached_bytes(&self) -> u64 {
        (self.before.entries() * BAT_ENTRY_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// The new entry at an index beyond the old end; `None` if the entry stays as it is.
    fn entry(&self, index: u64) -> Option<BatEntry> {
        match self.after.geometry.what_is(index) {
            EntryKind::Bitmap { .. } if index < self.before.entries() => None,
            EntryKind::Payload { block } if block < self.after.geometry.payload_blocks() => {
                let new_block = block - self.before.geometry.payload_blocks();
                Some(self.first_block_bytes.map_or(BatEntry::default(), |first_bytes| {
                    let offset_bytes = first_bytes + new_block * self.after.geometry.block_bytes();
                    BatEntry::payload(PayloadState::FullyPresent, offset_bytes)
                }))
            }
            _ => Some(BatEntry::default()),
        }
    }
}

impl VhdxImage {
    /// Enlarges the disk to `size_bytes`, by the steps of this module.
    pub(super) fn grow(&self, writing: &Writing, size_bytes: u64) -> Result<()> {
        self.barrier.check()?;
        let _turn = lock(&writing.preparing);
        let before = writing.layout();
        if size_bytes == before.geometry.size_bytes() {
            return Ok(());
        }
        let plan = self.plan(before, size_bytes)?;
        self.begin_change(writing)?;
        self.check_undamaged(&lock(&writing.state))?;
        let mut taken = Vec::new();
        let result = self.carry_out(writing, plan, &mut taken);
        if let Some(space) = &mut lock(&writing.state).space {
            taken.into_iter().for_each(|(offset_bytes, len_bytes)| space.add_free(offset_bytes, len_bytes));
        }
        result
    }

    /// Records in `taken` the space that was taken and to which nothing refers. The list is emptied
    /// when something may refer to the space.
    fn carry_out(&self, writing: &Writing, mut plan: Plan, taken: &mut Vec<(u64, u64)>) -> Result<()> {
        self.clear_tail(&plan.before)?;
        let new_blocks = plan.after.geometry.payload_blocks() - plan.before.geometry.payload_blocks();
        if plan.before.fixed && new_blocks > 0 {
            let len_bytes = new_blocks * plan.after.geometry.block_bytes();
            let offset_bytes = self.take_space(writing, len_bytes, true)?;
            taken.push((offset_bytes, len_bytes));
            plan.first_block_bytes = Some(offset_bytes);
        }
        if let Some(len_bytes) = plan.new_region_bytes {
            let offset_bytes = self.take_space(writing, len_bytes.into(), false)?;
            taken.push((offset_bytes, len_bytes.into()));
            let (old_bytes, ranges) = (plan.before.bat_offset_bytes, &mut plan.after.metadata);
            ranges.retain(|&(start_bytes, _)| start_bytes != old_bytes);
            ranges.push((offset_bytes, offset_bytes + u64::from(len_bytes)));
            ranges.sort_unstable();
            plan.after.bat_offset_bytes = offset_bytes;
        }
        self.keep_room(writing, &plan, new_blocks)?;
        self.clear_cached_entries(writing, &plan)?;
        self.commit_size(writing, plan, taken)
    }

    pub(super) fn plan(&self, before: Arc<Layout>, size_bytes: u64) -> Result<Plan> {
        let old = &before.geometry;
        let refused = |found: String, expected: &str| ImageError::Unsupported {
            path: self.barrier.store().name().to_owned(),
            what: format!("a new size of {found} for this open disk of {} bytes", old.size_bytes()),
            hint: format!("the size must be {expected}"),
        };
        if size_bytes < old.size_bytes() {
            return Err(refused(format!("{size_bytes} bytes"), "at least the present one"));
        }
        let geometry = BatGeometry::new(size_bytes, old.block_bytes() as u32, old.logical_sector_bytes())
            .map_err(|invalid| refused(invalid.found, &invalid.expected))?;
        let after = Layout { geometry, ..Layout::clone(&before) };
        let region_end = before
            .metadata
            .iter()
            .find(|&&(start_bytes, _)| start_bytes == before.bat_offset_bytes)
            .map(|range| range.1);
        let needed_bytes = (after.entries() * BAT_ENTRY_BYTES).next_multiple_of(MIB);
        let fits = region_end.is_some_and(|end_bytes| after.bat_end_bytes() <= end_bytes);
        // 64 TiB in blocks of 1 MiB take 512 MiB.
        let new_region_bytes = (!fits).then_some(needed_bytes as u32);
        Ok(Plan { before, after, new_region_bytes, first_block_bytes: None })
    }

    /// Zeroes the last block's bytes beyond the end of the disk. A program that shrank the disk may
    /// have left stale data there.
    pub(super) fn clear_tail(&self, layout: &Layout) -> Result<()> {
        let geometry = &layout.geometry;
        let within_bytes = geometry.size_bytes() % geometry.block_bytes();
        let mut state = [BlockState::Absent];
        if within_bytes > 0 {
            self.block_states(geometry.payload_blocks() - 1, &mut state)?;
        }
        if let [BlockState::Data { offset_bytes, .. } | BlockState::Partial { offset_bytes, .. }] = state {
            let range = FileRange {
                offset_bytes: offset_bytes + within_bytes,
                len_bytes: geometry.block_bytes() - within_bytes,
            };
            let zeroed = self.barrier.store().zero_range(range, Zeroing::Keep);
            zeroed.map_err(|error| self.io("clear the last block beyond the disk's end", range.offset_bytes, error))?;
        }
        Ok(())
    }

    /// Takes space that reads as zeros; with `sparsely` as a hole. The caller holds `preparing`.
    fn take_space(&self, writing: &Writing, len_bytes: u64, sparsely: bool) -> Result<u64> {
        loop {
            let extension = {
                let mut state = lock(&writing.state);
                if let Some(offset_bytes) = self.take(&mut state, len_bytes)? {
                    return Ok(offset_bytes);
                }
                let growth = state.space.as_ref().map(|space| space.growth(len_bytes)).transpose();
                growth.map_err(|error| self.io(GROW, 0, error))?.flatten()
            };
            match extension.filter(|_| sparsely) {
                Some(extension) => {
                    let store = &**self.barrier.store();
                    let extended = extension.carry_out_sparsely(store);
                    let end_bytes = extended.map_err(|error| self.io(GROW, extension.from_bytes, error))?;
                    if let Some(space) = &mut lock(&writing.state).space {
                        space.set_file_end(end_bytes);
                    }
                }
                None => self.make_room(writing, len_bytes)?,
            }
        }
    }

    /// If a disk that is not fixed was created with room for all blocks, also reserves room for the
    /// new ones.
    fn keep_room(&self, writing: &Writing, plan: &Plan, new_blocks: u64) -> Result<()> {
        let file_bytes = {
            let state = lock(&writing.state);
            if self.layout.fixed || state.keep_end_bytes == 0 {
                return Ok(());
            }
            state.file_bytes()
        };
        let (old, new) = (&plan.before.geometry, &plan.after.geometry);
        let bitmaps = if plan.after.has_parent { new.chunks() - old.chunks() } else { 0 };
        let len_bytes = new_blocks * new.block_bytes()
            + bitmaps * BITMAP_BLOCK_BYTES
            + u64::from(plan.new_region_bytes.unwrap_or(0));
        if len_bytes == 0 {
            return Ok(());
        }
        let range = FileRange { offset_bytes: file_bytes, len_bytes };
        self.barrier.store().allocate(range).map_err(|error| self.io(GROW, file_bytes, error))?;
        let mut state = lock(&writing.state);
        let end_bytes = file_bytes + len_bytes;
        state.keep_end_bytes = end_bytes;
        if let Some(space) = &mut state.space {
            space.set_file_end(end_bytes);
        }
        Ok(())
    }

    /// Step 2: clears entries beyond the old end in pages that are in use.
    fn clear_cached_entries(&self, writing: &Writing, plan: &Plan) -> Result<()> {
        let (first, end) = (plan.first_index(), plan.cached_end_index().min(plan.after.entries()));
        if first >= end {
            return Ok(());
        }
        let start_bytes = plan.before.entry_offset_bytes(first);
        let len_bytes = (end - first) * BAT_ENTRY_BYTES;
        let is_changed = loop {
            self.load(writing, READ_BAT, start_bytes, len_bytes)?;
            let mut state = lock(&writing.state);
            if !state.pages.has(start_bytes, len_bytes) {
                continue;
            }
            let mut is_changed = false;
            for index in first..end {
                let place = plan.before.entry_offset_bytes(index);
                if let Some(wanted) = plan.entry(index).filter(|&wanted| wanted != state.entry(place)) {
                    state.set_entry(place, wanted);
                    is_changed = true;
                }
            }
            break is_changed;
        };
        if is_changed { self.flush_shared(writing) } else { Ok(()) }
    }

    /// Steps 3 to 6.
    pub(super) fn commit_size(&self, writing: &Writing, plan: Plan, taken: &mut Vec<(u64, u64)>) -> Result<()> {
        let mut log = lock(&writing.log);
        if plan.new_region_bytes.is_some() {
            self.copy_table(&plan)?;
        }
        self.write_new_entries(&plan)?;
        let logged = self.logged_pages(&plan)?;
        sync(&self.barrier)?;
        let file_bytes = lock(&writing.state).file_bytes();
        // A log entry whose write fails half-way may still be valid.
        taken.clear();
        log.append(&self.barrier, &writing.headers, &logged.concat(), file_bytes)?;
        // The log has the new size, so the disk has it, even if a later step fails.
        if let Err(error) = self.write_places(&logged) {
            let again = std::io::Error::other(error.to_string());
            self.barrier.settle("write the disk's new size in place; close the disk and open it again", Err(again))?;
        }
        let mut state = lock(&writing.state);
        if plan.new_region_bytes.is_some() {
            let (from_bytes, to_bytes) = (plan.before.bat_offset_bytes, plan.after.bat_offset_bytes);
            state.pages.move_range(from_bytes, plan.cached_bytes(), to_bytes);
        }
        state.layout = Arc::new(plan.after);
        Ok(())
    }

    /// Copies the old table. Holes stay holes.
    fn copy_table(&self, plan: &Plan) -> Result<()> {
        let store = &**self.barrier.store();
        let (from_bytes, to_bytes) = (plan.before.bat_offset_bytes, plan.after.bat_offset_bytes);
        let end_bytes = from_bytes + plan.cached_bytes();
        let mut at_bytes = from_bytes;
        let mut buf = vec![0; COPY_BYTES.min(plan.cached_bytes()) as usize];
        while at_bytes < end_bytes {
            let data = store.next_data(at_bytes).map_err(|error| self.io(READ_BAT, at_bytes, error))?;
            let Some(data) = data.filter(|data| data.offset_bytes < end_bytes) else { break };
            at_bytes = data.offset_bytes.max(at_bytes);
            let piece = &mut buf[..(end_bytes - at_bytes).min(COPY_BYTES) as usize];
            store.read_at(piece, at_bytes).map_err(|error| self.io(READ_BAT, at_bytes, error))?;
            write(&self.barrier, "copy the block allocation table", piece, at_bytes - from_bytes + to_bytes)?;
            at_bytes += piece.len() as u64;
        }
        Ok(())
    }

    /// Writes the entries after the pages that may be in the cache.
    fn write_new_entries(&self, plan: &Plan) -> Result<()> {
        let (first, end) = (plan.cached_end_index(), plan.after.entries());
        let store = &**self.barrier.store();
        let is_zero = plan.first_block_bytes.is_none();
        let mut index = first;
        while index < end {
            let count = (COPY_BYTES / BAT_ENTRY_BYTES).min(end - index);
            let (start_bytes, end_bytes) =
                (plan.after.entry_offset_bytes(index), plan.after.entry_offset_bytes(index + count));
            let data = store.next_data(start_bytes).map_err(|error| self.io(READ_BAT, start_bytes, error))?;
            if !is_zero || data.is_some_and(|data| data.offset_bytes < end_bytes) {
                let entries = (index..index + count).map(|index| plan.entry(index).unwrap_or_default());
                let bytes: Vec<u8> = entries.flat_map(BatEntry::to_le_bytes).collect();
                write(&self.barrier, "write the block allocation table", &bytes, start_bytes)?;
            }
            index += count;
        }
        Ok(())
    }

    /// The pages that change with the size: of the region table, of its copy, and of the metadata.
    fn logged_pages(&self, plan: &Plan) -> Result<[Vec<Page>; 3]> {
        let store = &**self.barrier.store();
        let mut regions = read_regions(store, &mut Vec::new())?;
        let metadata_region = required_region(store, &regions, METADATA_REGION, "metadata region")?;
        let mut pages = [Vec::new(), Vec::new(), Vec::new()];
        if let Some(len_bytes) = plan.new_region_bytes {
            for region in regions.regions.iter_mut().filter(|region| region.id == BAT_REGION) {
                (region.offset_bytes, region.len_bytes) = (plan.after.bat_offset_bytes, len_bytes);
            }
            let bytes = regions.to_bytes();
            for (pages, offset_bytes) in pages.iter_mut().zip(REGION_TABLE_OFFSETS) {
                self.changed_pages(&bytes, offset_bytes, pages)?;
            }
        }
        let table = read_metadata_table(store, &metadata_region)?;
        let item = table.find(metadata::VIRTUAL_DISK_SIZE).filter(|item| item.len_bytes == 8).ok_or_else(|| {
            let missing = Invalid::new("virtual disk size", 0, "no item of 8 bytes", "one");
            corrupt(store, metadata_region.offset_bytes, missing)
        })?;
        let offset_bytes = metadata_region.offset_bytes + u64::from(item.offset_bytes);
        self.changed_pages(&plan.after.geometry.size_bytes().to_le_bytes(), offset_bytes, &mut pages[2])?;
        Ok(pages)
    }

    /// Appends the pages of the file that change if `bytes` are written at `offset_bytes`.
    pub(super) fn changed_pages(&self, bytes: &[u8], offset_bytes: u64, pages: &mut Vec<Page>) -> Result<()> {
        let end_bytes = offset_bytes + bytes.len() as u64;
        for at_bytes in (offset_bytes - offset_bytes % PAGE_BYTES..end_bytes).step_by(PAGE_BYTES as usize) {
            let mut page = vec![0; PAGE_BYTES as usize].into_boxed_slice();
            self.barrier
                .store()
                .read_at(&mut page, at_bytes)
                .map_err(|error| self.io("read the disk's metadata", at_bytes, error))?;
            let (from, to) = (offset_bytes.max(at_bytes), end_bytes.min(at_bytes + PAGE_BYTES));
            let new = &bytes[(from - offset_bytes) as usize..(to - offset_bytes) as usize];
            let old = &mut page[(from - at_bytes) as usize..(to - at_bytes) as usize];
            if old != new {
                old.copy_from_slice(new);
                pages.push((at_bytes, page));
            }
        }
        Ok(())
    }

    /// Step 5: what the log entry has is written in place.
    fn write_places(&self, logged: &[Vec<Page>; 3]) -> Result<()> {
        for pages in logged.iter().filter(|pages| !pages.is_empty()) {
            for (offset_bytes, page) in pages {
                write(&self.barrier, "write the disk's new size in place", page, *offset_bytes)?;
            }
            sync(&self.barrier)?;
        }
        Ok(())
    }
}
