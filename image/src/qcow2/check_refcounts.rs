//! Compares the refcounts of the file with the references that were counted.
//!
//! ```text
//!   refcount < references   damage: a later write may reuse the cluster. The refcount is raised.
//!   refcount > references   a leak. The refcount is lowered.
//!   COPIED flag             must be set if the refcount is 1, and only then. The entry is changed.
//!   two structures, or a structure and data, in one cluster     check_overlaps.rs
//!   no refcount block                                           check_new_blocks.rs
//! ```

use super::{
    check_counts::{Cell, Counts},
    check_new_blocks::NewBlocks,
    check_overlaps::Overlaps,
    check_walk::{PIECE_BYTES, Walk},
};
use crate::{
    error::{ImageError, Result},
    findings::{Change, CheckReport, FINDINGS_MAX, Finding, Findings, Severity},
    number_set::NumberSet,
};
use std::{collections::HashMap, ops::Range};

const READ: &str = "read a refcount block";
const COPIED: u64 = 1 << 63;

/// Clusters whose refcounts were found wrong in the same way, next to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    clusters: Range<u64>,
    refcount: u64,
    references: u64,
    is_metadata: bool,
}

/// Most entries of each set of clusters: 64 MiB. It takes as many groups of 64 clusters of which
/// some are free and some are not, which are 8 TiB of a file with clusters of 64 KiB.
const ENTRIES_MAX: usize = 1 << 21;

/// Which clusters of the file are used: for a program that is about to allocate some.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// The first cluster after all that have a reference or a refcount.
    pub end_cluster: u64,
    /// Clusters before that which have neither; not those of the highest offsets if there are more
    /// than [`ENTRIES_MAX`] entries hold. The others are used again in a later session.
    pub free: NumberSet,
    /// Clusters with a refcount and without a reference, likewise.
    pub leaked: NumberSet,
    /// Whether there are compressed clusters.
    pub has_packed: bool,
    /// The first cluster that was not seen yet.
    next: u64,
}

impl Usage {
    /// Must be called for ascending clusters that have a refcount or a reference.
    fn note(&mut self, cluster: u64, is_leaked: bool) {
        if is_leaked && self.leaked.entries() < ENTRIES_MAX {
            self.leaked.insert(cluster);
        }
        if self.free.entries() < ENTRIES_MAX {
            self.free.push(self.next..cluster);
        }
        self.next = cluster + 1;
        self.end_cluster = self.next;
    }
}

/// Compares in passes, and collects what is wrong.
pub(super) struct Refcounts<'a> {
    walk: &'a Walk<'a>,
    /// Whether all references are known. If not, nothing counts as leaked.
    knows_all: bool,
    /// Clusters of the file.
    clusters: u64,
    run: Option<Run>,
    /// Clusters whose refcount contradicts a COPIED flag: refcount and references.
    flagged: HashMap<u64, (u64, u64)>,
    /// Contradictions that are not in `flagged`.
    flags_left_out: u64,
    leaked_clusters: u64,
    /// Clusters that are used twice. As long as there is one, data may be the bytes of a structure,
    /// and nothing else is repaired: the disk would change.
    overlaps: Overlaps,
    new_blocks: NewBlocks,
    usage: Option<&'a mut Usage>,
    has_new_table: bool,
    /// The known repairs, until it is known whether there are overlaps.
    actions: Vec<(Finding, String, Vec<Change>)>,
}

/// Most repairs that are held.
const ACTIONS_MAX: usize = 1 << 16;

impl<'a> Refcounts<'a> {
    pub fn new(walk: &'a Walk<'a>, knows_all: bool, usage: Option<&'a mut Usage>) -> Self {
        let clusters = walk.front.file_bytes.div_ceil(walk.geometry.cluster_bytes());
        Self {
            walk,
            knows_all,
            clusters,
            run: None,
            flagged: HashMap::new(),
            flags_left_out: 0,
            leaked_clusters: 0,
            overlaps: Overlaps::default(),
            new_blocks: NewBlocks::default(),
            usage,
            has_new_table: false,
            actions: Vec::new(),
        }
    }

    /// Counts and compares all clusters.
    ///
    /// # Errors
    /// `Io`.
    pub fn check(mut self, findings: &mut Findings, report: &mut CheckReport) -> Result<()> {
        let cluster_bits = self.walk.geometry.cluster_bits;
        let mut from = 0;
        loop {
            let mut counts = Counts::new(from);
            let in_first_pass = from == 0;
            let entries = in_first_pass.then_some(&mut *findings);
            let blocks = self.walk.references(entries, &mut |reference| {
                let end = reference.offset_bytes.saturating_add(reference.len_bytes.max(1));
                // What lies beyond the end of the file was reported, or is the cut last cluster.
                let end = end.min(self.clusters.saturating_mul(1 << cluster_bits));
                for cluster in reference.offset_bytes >> cluster_bits..end.div_ceil(1 << cluster_bits) {
                    counts.add(cluster, reference.weight, reference.of, reference.copied);
                }
                Ok(())
            })?;
            if in_first_pass {
                report.allocated_blocks = blocks;
            }
            counts.finish();
            self.compare(&counts, findings)?;
            match counts.next_from() {
                Some(next) => from = next,
                None => break,
            }
        }
        if let Some(usage) = &mut self.usage {
            usage.has_packed = self.walk.has_packed.get();
        }
        self.end_run(findings)?;
        report.leaked_bytes = self.leaked_clusters << cluster_bits;
        self.report_flags(findings)?;
        let is_apart = self.overlaps.is_empty();
        // Later rounds repair the rest, if this one can remove all overlaps.
        let later = self.overlaps.report(self.walk, findings)?;
        for (finding, what, changes) in self.walk.lossless.take().into_iter().chain(self.actions) {
            if is_apart {
                findings.add_repairable(finding, what, changes);
            } else {
                findings.add(Finding { repair: later, ..finding });
            }
        }
        Ok(())
    }

    fn add_repairable(&mut self, finding: Finding, what: String, changes: Vec<Change>, findings: &mut Findings) {
        if self.actions.len() < ACTIONS_MAX {
            self.actions.push((finding, what, changes));
        } else {
            findings.add(finding);
        }
    }

    /// Compares the clusters of one pass.
    fn compare(&mut self, counts: &Counts, findings: &mut Findings) -> Result<()> {
        let width = self.walk.front.header.refcount_width;
        let per_block = width.per_block(self.walk.geometry.cluster_bytes());
        let per_piece = width.per_block(PIECE_BYTES).min(per_block);
        let range = counts.range();
        let range = range.start..range.end.min(self.clusters);
        let mut buffer = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let block = at / per_block;
            let offset_bytes = usize::try_from(block).ok().and_then(|block| self.walk.refcount_blocks.get(block));
            let Some(&offset_bytes) = offset_bytes.filter(|&&offset_bytes| offset_bytes != 0) else {
                // Without a block all refcounts are 0. After the last block that is all of the
                // file.
                let past_all = block >= self.walk.refcount_blocks.len() as u64;
                let end = if past_all { range.end } else { ((block + 1) * per_block).min(range.end) };
                for (cluster, cell) in counts.used_in(at..end) {
                    self.compare_one(cluster, 0, cell, findings)?;
                }
                at = end;
                continue;
            };
            let piece = at / per_piece * per_piece;
            let end = (piece + per_piece).min(range.end);
            let place = offset_bytes + piece % per_block * u64::from(width.bits()) / 8;
            self.read(&mut buffer, place, (per_piece * u64::from(width.bits()) / 8) as usize)?;
            if buffer.iter().all(|&byte| byte == 0) {
                for (cluster, cell) in counts.used_in(at..end) {
                    self.compare_one(cluster, 0, cell, findings)?;
                }
            } else {
                for cluster in at..end {
                    let refcount = width.get(&buffer, (cluster - piece) as usize);
                    self.compare_one(cluster, refcount, counts.get(cluster), findings)?;
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Reads a piece of a refcount block. What lies beyond the end of the file reads as zeros.
    fn read(&self, buffer: &mut Vec<u8>, at: u64, len: usize) -> Result<()> {
        buffer.clear();
        buffer.resize(len, 0);
        let there = self.walk.front.file_bytes.saturating_sub(at).min(len as u64) as usize;
        let store = self.walk.store;
        if there == 0 {
            return Ok(());
        }
        store.read_at(&mut buffer[..there], at).map_err(|error| ImageError::io(READ, store, at, error))
    }

    fn compare_one(&mut self, cluster: u64, refcount: u64, cell: Cell, findings: &mut Findings) -> Result<()> {
        if let Some(usage) = &mut self.usage
            && (refcount > 0 || cell.count() > 0)
        {
            usage.note(cluster, cell.count() == 0);
        }
        if cell.overlaps() {
            self.overlaps.note(cluster, cell.count());
        }
        // The count of a cell has a limit, which no refcount reaches that is not a lie.
        let references = cell.count().min(self.walk.front.header.refcount_width.max());
        if refcount != references {
            let next = Run { clusters: cluster..cluster + 1, refcount, references, is_metadata: cell.is_metadata() };
            let continues = self.run.as_ref().is_some_and(|run| {
                run.clusters.end == cluster
                    && (run.refcount, run.references, run.is_metadata) == (refcount, references, next.is_metadata)
            });
            match &mut self.run {
                Some(run) if continues => run.clusters.end += 1,
                _ => {
                    self.end_run(findings)?;
                    self.run = Some(next);
                }
            }
        }
        if cell.is_said_copied() && refcount != 1 || cell.is_said_shared() && refcount == 1 {
            if self.flagged.len() < FINDINGS_MAX {
                self.flagged.insert(cluster, (refcount, references));
            } else {
                self.flags_left_out += 1;
            }
        }
        Ok(())
    }

    fn end_run(&mut self, findings: &mut Findings) -> Result<()> {
        let Some(run) = self.run.take() else { return Ok(()) };
        let Run { clusters, refcount, references, is_metadata } = run.clone();
        let cluster_bytes = self.walk.geometry.cluster_bytes();
        let (at, count) = (clusters.start * cluster_bytes, clusters.end - clusters.start);
        let is_leak = refcount > references;
        if is_leak && !self.knows_all {
            return Ok(());
        }
        if is_leak && references == 0 {
            self.leaked_clusters += count;
        }
        let severity = if is_leak { Severity::Leak } else { Severity::Corrupt };
        let structure = match count {
            1 => format!("refcount of cluster {}", clusters.start),
            _ => format!("refcounts of clusters {} to {}", clusters.start, clusters.end - 1),
        };
        let what = if is_metadata { "structures of the image" } else { "data" };
        let message = match references {
            0 => format!(
                "{} bytes at offset {at} are leaked: their refcount is {refcount}, and nothing refers to them.",
                count * cluster_bytes
            ),
            _ => format!(
                "{count} cluster{} of {what} from offset {at} on {} refcount {refcount}, though {references} reference{} found.",
                if count == 1 { "" } else { "s" },
                if count == 1 { "has" } else { "have" },
                if references == 1 { " was" } else { "s were" },
            ),
        };
        let finding = Finding::new(severity, at, structure, refcount.to_string(), references.to_string()).says(message);
        match findings.for_repair().then(|| self.corrected(&run)).transpose()? {
            Some(Some(changes)) => {
                self.add_repairable(finding, format!("the refcount becomes {references}"), changes, findings)
            }
            // What can be repaired is the same without collecting the changes.
            None if self.has_blocks(&run) => self.add_repairable(finding, String::new(), Vec::new(), findings),
            Some(None) | None => {
                let missing = self.blocks_of(&run).filter(|&block| self.block_offset(block).is_none());
                match self.new_blocks.make(self.walk, missing.collect::<Vec<_>>().into_iter(), findings.for_repair()) {
                    Some(changes) => {
                        let what =
                            "refcount blocks are made at the end of the file, and the refcounts are counted again";
                        self.add_repairable(finding, what.to_owned(), changes, findings);
                    }
                    None => self.lengthen_table(finding, findings),
                }
            }
        }
        Ok(())
    }

    /// A table without an entry for clusters of the file is replaced, once.
    fn lengthen_table(&mut self, finding: Finding, findings: &mut Findings) {
        if self.has_new_table {
            let what = "a later round makes the refcount blocks".to_owned();
            return self.add_repairable(finding, what, Vec::new(), findings);
        }
        self.has_new_table = true;
        self.walk.replace_refcount_table(finding, findings);
    }

    fn per_block(&self) -> u64 {
        self.walk.front.header.refcount_width.per_block(self.walk.geometry.cluster_bytes())
    }

    /// The offset of the refcount block with this index of the table.
    fn block_offset(&self, block: u64) -> Option<u64> {
        let block = usize::try_from(block).ok()?;
        self.walk.refcount_blocks.get(block).copied().filter(|&offset_bytes| offset_bytes != 0)
    }

    fn block_of(&self, cluster: u64) -> Option<u64> {
        self.block_offset(cluster / self.per_block())
    }

    /// The indices of the refcount blocks of a run.
    fn blocks_of(&self, run: &Run) -> impl Iterator<Item = u64> + use<> {
        run.clusters.start / self.per_block()..=(run.clusters.end - 1) / self.per_block()
    }

    fn has_blocks(&self, run: &Run) -> bool {
        self.blocks_of(run).all(|block| self.block_offset(block).is_some())
    }

    /// The changes that give the clusters of a run their refcount; `None` if a block is missing.
    fn corrected(&self, run: &Run) -> Result<Option<Vec<Change>>> {
        let width = self.walk.front.header.refcount_width;
        let per_block = width.per_block(self.walk.geometry.cluster_bytes());
        // Whole bytes, in pieces of a bounded size.
        let per_piece = width.per_block(PIECE_BYTES).min(per_block);
        let mut changes = Vec::new();
        let mut buffer = Vec::new();
        let mut at = run.clusters.start;
        while at < run.clusters.end {
            let Some(block) = self.block_of(at) else { return Ok(None) };
            let piece = at / per_piece * per_piece;
            let end = (piece + per_piece).min(run.clusters.end);
            let bits = u64::from(width.bits());
            let first_byte = (at - piece) * bits / 8;
            let last_byte = ((end - piece) * bits).div_ceil(8);
            let place = block + piece % per_block * bits / 8;
            self.read(&mut buffer, place, (per_piece * bits / 8) as usize)?;
            for cluster in at..end {
                width.set(&mut buffer, (cluster - piece) as usize, run.references);
            }
            changes.push(Change::Write(place + first_byte, buffer[first_byte as usize..last_byte as usize].to_vec()));
            at = end;
        }
        Ok(Some(changes))
    }

    /// Reports the entries whose COPIED flag contradicts a refcount. One more walk finds them.
    fn report_flags(&mut self, findings: &mut Findings) -> Result<()> {
        let cluster_bits = self.walk.geometry.cluster_bits;
        let flagged = std::mem::take(&mut self.flagged);
        if !flagged.is_empty() {
            let walk = self.walk;
            walk.references(None, &mut |reference| {
                let Some(is_copied) = reference.copied else { return Ok(()) };
                let Some(&(refcount, references)) = flagged.get(&(reference.offset_bytes >> cluster_bits)) else { return Ok(()) };
                if is_copied != (refcount == 1) {
                    let (found, expected) = if is_copied { ("set", "clear") } else { ("clear", "set") };
                    let message = format!(
                        "The {} at offset {} has the COPIED flag {found}, though the refcount of its cluster at {} is {refcount}.",
                        reference.structure, reference.entry_at, reference.offset_bytes
                    );
                    let finding = Finding::new(
                        Severity::Corrupt,
                        reference.entry_at,
                        reference.structure,
                        format!("the COPIED flag {found}"),
                        format!("the flag {expected}, as the refcount is {refcount}"),
                    );
                    // A refcount that is too low is raised in the same round, and the flag may be
                    // right then.
                    let changes = if refcount < references && is_copied == (references == 1) {
                        Vec::new()
                    } else {
                        vec![Change::Write(reference.entry_at, (reference.word ^ COPIED).to_be_bytes().to_vec())]
                    };
                    let what = "the flag becomes what the refcount says".to_owned();
                    self.add_repairable(finding.says(message), what, changes, findings);
                }
                Ok(())
            })?;
        }
        for _ in 0..self.flags_left_out {
            let finding =
                Finding::new(Severity::Corrupt, 0, "L2 entry", "a wrong COPIED flag", "the flag by the refcount");
            self.add_repairable(finding, "a later round changes the flag".into(), Vec::new(), findings);
        }
        Ok(())
    }
}
