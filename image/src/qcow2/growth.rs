//! What must be known and made before a cluster is allocated: the survey of the file, refcount
//! blocks, a longer refcount table.
//!
//! ```text
//!   survey          the check of the file ─▶ damage: refused; clusters without refcount: free
//!   refcount block  takes the first free cluster of the range that it covers:
//!                   its own refcount ─▶ sync ─▶ named by the refcount table
//!   longer table    [ blocks that cover all of this │ the table ], at the end of the file:
//!                   written ─▶ sync ─▶ header (one sector) ─▶ sync ─▶ the old table is free
//! ```
//!
//! Refcounts of other programs' images may lie, so allocation does not trust them: in a session
//! with a change of an entry the file is checked first. Whatever the check calls damage is refused,
//! as a cluster that looks free may be in use. Leaked clusters are free: nothing refers to them.
//! Unused space at the end of the file is cut off, so that a longer file reads as zeros there. What
//! looks free may be free only in the page cache, as a program may have been killed during a flush.
//! So the file is synced before its free space is used.
//!
//! The caller holds `preparing`.

use super::{
    check::{self, Usage},
    counts::CountPrerequisite,
    pages::Piece,
    write::{FreedSpace, Writing},
};
use crate::{ImageError, Result, findings::Severity, space::Space};
use diskwright_format::qcow2::{Place, REFCOUNT_TABLE_MAX_BYTES};
use std::ops::Range;

impl Writing {
    /// Surveys the file, once in a session.
    pub(super) fn survey(&self) -> Result<()> {
        if self.lock().space.is_some() {
            return Ok(());
        }
        self.settle_front()?;
        let mut usage = Usage::default();
        let report = check::examine_for_use(self.barrier.store(), &mut usage)?;
        if let Some(finding) = report.findings.iter().find(|finding| finding.severity == Severity::Corrupt) {
            return Err(ImageError::Unsupported {
                path: self.store().name().to_owned(),
                what: format!("writing to a damaged image ({})", finding.message.trim_end_matches('.')),
                hint: "repair it first: `diskwright check` says what is damaged".into(),
            });
        }
        self.refuse_packed(usage.has_packed)?;
        self.barrier.sync("make the tables durable as they were found")?;
        let end = usage.end_cluster * self.cluster_bytes();
        let cut = self.store().set_len(end);
        cut.map_err(|error| self.io("cut the file after its last cluster", end, error))?;
        self.layout.note_len(end);
        let mut space = Space::new(end, self.cluster_bytes());
        space.add_all_free(usage.free, self.cluster_bytes());
        self.lock().space = Some(space);
        // Bitmaps that are not kept look leaked, but the header still names them.
        if self.layout.front.extensions.bitmaps.is_none() {
            usage.leaked.runs().try_for_each(|clusters| self.take_back(clusters))?;
        }
        Ok(())
    }

    /// Makes leaked clusters free.
    fn take_back(&self, clusters: Range<u64>) -> Result<()> {
        for cluster in clusters {
            if self.change_count(cluster, |_| 0) == Some(0)
                && let Some(space) = &mut self.lock().space
            {
                space.add_free(cluster * self.cluster_bytes(), self.cluster_bytes());
            }
            // Memory stays bounded.
            if self.is_flush_due() {
                self.run_flush()?;
            }
        }
        Ok(())
    }

    /// Makes the refcount block whose range holds the free cluster at `next`, which is the next one
    /// to be taken: the block lies there.
    pub(super) fn make_count_block(&self, next: u64) -> Result<()> {
        let cluster_bytes = self.cluster_bytes();
        let taken = match &mut self.lock().space {
            Some(space) => space.take(cluster_bytes).map_err(|error| self.io("grow the file", next, error))?,
            None => None,
        };
        let Some(at) = taken else { return Ok(()) };
        if at != next {
            if let Some(space) = &mut self.lock().space {
                space.add_free(at, cluster_bytes);
            }
            return Ok(());
        }
        let (page_at, page) = self.lock().counts.first_page(at);
        let made =
            self.write_pieces("write a new refcount block", &[Piece { offset_bytes: page_at, bytes: page.to_vec() }]);
        if let Err(error) = made.and_then(|()| Ok(self.barrier.sync("make a new refcount block durable")?)) {
            if let Some(space) = &mut self.lock().space {
                space.add_free(at, cluster_bytes);
            }
            return Err(error);
        }
        let mut state = self.lock();
        state.counts.name_block(at / cluster_bytes, at);
        let (most, is_pinned) = (state.pages_max(), state.pinned);
        let has_dropped = state.counts.pages.insert(page_at, page, most, is_pinned);
        state.drops += u64::from(has_dropped);
        Ok(())
    }

    /// Makes the refcount block for the range of `cluster` in a range that has one.
    pub(super) fn make_count_block_elsewhere(&self, cluster: u64) -> Result<()> {
        let at = self.take_cluster_waiting()?;
        // The block is zeros. Its own refcount is durable before the table names it.
        self.run_flush()?;
        let mut state = self.lock();
        match state.counts.get(cluster) {
            Err(CountPrerequisite::Block) => state.counts.name_block(cluster, at),
            _ => state.free(FreedSpace::Cluster(at)),
        }
        Ok(())
    }

    /// Continues with a longer refcount table. `next` is the end of the used part of the file, and
    /// the first cluster beyond the range of the present table.
    pub(super) fn lengthen_table(&self, next: u64) -> Result<()> {
        let cluster_bytes = self.cluster_bytes();
        let (width, mut blocks, old) = {
            let state = self.lock();
            (state.counts.width, state.counts.blocks().to_vec(), state.counts.table)
        };
        let per_block = width.per_block(cluster_bytes);
        let first = next / cluster_bytes;
        let plan = Region::of(first, per_block, blocks.len() as u64, cluster_bytes);
        if plan.table_clusters * cluster_bytes > REFCOUNT_TABLE_MAX_BYTES.max(cluster_bytes) {
            let what = format!("a qcow2 file of more than {next} bytes in clusters of {cluster_bytes}");
            return Err(self.unsupported(what, "convert the disk to an image with larger clusters, or to VHDX"));
        }
        let len_bytes = plan.clusters() * cluster_bytes;
        let at = self.take_region(next, len_bytes)?;
        let Some(at) = at else { return Ok(()) };
        let table =
            Place { offset_bytes: at + plan.blocks * cluster_bytes, len_bytes: plan.table_clusters * cluster_bytes };
        let mut bytes = vec![0; (plan.blocks * cluster_bytes) as usize];
        // Of each block the counts of this region, which begins in the first block's range.
        let range_start = first / per_block * per_block;
        for cluster in first..first + plan.clusters() {
            width.set(&mut bytes, (cluster - range_start) as usize, 1);
        }
        blocks.resize((plan.table_clusters * cluster_bytes / 8) as usize, 0);
        for (number, entry) in (0..plan.blocks).zip(blocks.iter_mut().skip((first / per_block) as usize)) {
            *entry = at + number * cluster_bytes;
        }
        let pieces = [
            Piece { offset_bytes: at, bytes },
            Piece {
                offset_bytes: table.offset_bytes,
                bytes: blocks.iter().flat_map(|entry| entry.to_be_bytes()).collect(),
            },
        ];
        self.write_pieces("write a longer refcount table", &pieces)?;
        self.barrier.sync("make a longer refcount table durable")?;
        let (field_at, field) = self.layout.front.header.refcount_table_field(table);
        self.change_front(&[(field_at, &field)])?;
        let _turn = self.flushing.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.lock().counts.replace_table(table, blocks);
        self.give_up_region(old);
        Ok(())
    }

    /// Takes `len_bytes` at the end of the file, all zeros; `None` if the end is not at `next` any
    /// more.
    pub(super) fn take_region(&self, next: u64, len_bytes: u64) -> Result<Option<u64>> {
        loop {
            let extension = {
                let mut state = self.lock();
                let Some(space) = &mut state.space else { return Ok(None) };
                if space.used_end_bytes() != next {
                    return Ok(None);
                }
                let io_error = |error| self.io("grow the file", next, error);
                if let Some(at) = space.take(len_bytes).map_err(io_error)? {
                    return Ok(Some(at));
                }
                space.growth(len_bytes).map_err(io_error)?
            };
            match extension {
                Some(extension) => self.extend(&extension)?,
                None => return Ok(None),
            }
        }
    }

    /// Lowers the refcounts of a table to which nothing refers, durably, any more. Its space is not
    /// used again in this session, because [`Layout`](super::layout::Layout) keeps data away from
    /// the tables that the header named at first; the close gives it back. A refcount that cannot
    /// be read stays: a leak.
    pub(super) fn give_up_region(&self, old: Place) {
        let cluster_bytes = self.cluster_bytes();
        let end = old.offset_bytes.saturating_add(old.len_bytes).div_ceil(cluster_bytes);
        for cluster in old.offset_bytes / cluster_bytes..end {
            if self.change_count(cluster, |count| count.saturating_sub(1)) == Some(0) {
                self.lock().given_up.push(cluster);
            }
        }
    }
}

/// A longer table with the blocks that cover it.
#[derive(Debug, PartialEq, Eq)]
struct Region {
    blocks: u64,
    table_clusters: u64,
}

impl Region {
    fn clusters(&self) -> u64 {
        self.blocks + self.table_clusters
    }

    /// The region that begins at cluster `first`, for a table of half as many entries again.
    fn of(first: u64, per_block: u64, entries: u64, cluster_bytes: u64) -> Self {
        let mut region = Self { blocks: 1, table_clusters: 1 };
        loop {
            let last_block = (first + region.clusters() - 1) / per_block;
            let entries = (last_block + 1).max(entries + entries / 2);
            let needed = Self {
                blocks: last_block + 1 - first / per_block,
                table_clusters: (entries * 8).div_ceil(cluster_bytes),
            };
            if needed.blocks <= region.blocks && needed.table_clusters <= region.table_clusters {
                return region;
            }
            region = Self {
                blocks: needed.blocks.max(region.blocks),
                table_clusters: needed.table_clusters.max(region.table_clusters),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_longer_table_covers_itself() {
        for (first, per_block, entries, cluster_bytes) in
            [(1 << 14, 256, 64, 512), (100 << 10, 64, 64, 512), (1 << 28, 32768, 8192, 65536), (4095, 4096, 1, 512)]
        {
            let region = Region::of(first, per_block, entries, cluster_bytes);
            let last = first + region.clusters() - 1;
            assert!(last / per_block < first / per_block + region.blocks, "{region:?}");
            assert!(last / per_block < region.table_clusters * cluster_bytes / 8, "{region:?}");
            assert!(region.table_clusters * cluster_bytes / 8 >= entries + entries / 2);
        }
    }
}
