//! Clusters that two structures have, or a structure and data: whose entry is given up.
//!
//! ```text
//!   header, L1 tables, snapshots ─▶ refcount table ─▶ refcount blocks ─▶ L2 tables ─▶ data
//!           keep the cluster        is made again     is made again      given up     given up
//! ```
//!
//! The structure that comes first here keeps the cluster. What comes later loses its entry: of
//! refcounts that costs nothing, as they are counted again. Of clusters with data the one that is
//! met first keeps the cluster, if the other one is compressed or the other way round.

use super::{
    check_counts::ClusterUse,
    check_walk::{EntryPlace, L2_TABLE, REFCOUNT_BLOCK, REFCOUNT_TABLE, Reference, Walk},
};
use crate::{
    Result,
    findings::{Change, Finding, Findings, Repair, Severity},
};
use std::collections::HashMap;

/// Most overlapping clusters that one round looks at.
const CLUSTERS_MAX: usize = 1 << 16;

/// Clusters that are used twice, with the number of references to each.
#[derive(Debug, Default)]
pub(super) struct Overlaps {
    clusters: HashMap<u64, Overlap>,
    left_out: u64,
}

#[derive(Debug)]
struct Overlap {
    references: u64,
    /// What has the cluster, as far as the walk has come.
    owner: Option<ClusterUse>,
    /// Whether one entry can be given up for another.
    is_resolved: bool,
}

impl Overlaps {
    pub fn note(&mut self, cluster: u64, references: u64) {
        if self.clusters.len() < CLUSTERS_MAX {
            self.clusters.insert(cluster, Overlap { references, owner: None, is_resolved: false });
        } else {
            self.left_out += 1;
        }
    }

    pub fn is_empty(&self) -> bool {
        self.clusters.is_empty()
    }

    /// Reports all overlaps. One more walk finds their entries. Returns what it takes to remove all
    /// of them.
    ///
    /// # Errors
    /// `Io`.
    pub fn report(mut self, walk: &Walk<'_>, findings: &mut Findings) -> Result<Repair> {
        let mut takes = Repair::Lossless;
        if self.is_empty() {
            return Ok(takes);
        }
        let cluster_bits = walk.geometry.cluster_bits;
        let mut table_is_reported = false;
        walk.references(None, &mut |reference| {
            let end = reference.offset_bytes.saturating_add(reference.len_bytes.max(1)).min(walk.front.file_bytes);
            let mut lost = None;
            for cluster in reference.offset_bytes >> cluster_bits..end.div_ceil(1 << cluster_bits) {
                let Some(overlap) = self.clusters.get_mut(&cluster) else { continue };
                if is_apart(overlap.owner, &reference) {
                    lost = Some(cluster);
                    overlap.is_resolved = true;
                } else if reference.weight > 0 {
                    overlap.owner = Some(reference.of);
                }
            }
            let Some(cluster) = lost else { return Ok(()) };
            let at = cluster << cluster_bits;
            let finding = || {
                let found = format!("offset {}, where another structure is", reference.offset_bytes);
                let message = format!(
                    "The {} at offset {} leads to offset {at}, which something else uses too.",
                    reference.structure, reference.entry_at
                );
                Finding::new(Severity::Corrupt, reference.entry_at, reference.structure, found, "space of its own")
                    .says(message)
            };
            match reference.structure {
                REFCOUNT_TABLE => {
                    table_is_reported = true;
                    if !walk.replace_refcount_table_now(finding(), findings) {
                        takes = Repair::Impossible;
                    }
                    Ok(())
                }
                REFCOUNT_BLOCK => {
                    let what = "the entry is cleared, and the refcounts of its range are counted again";
                    let changes = vec![Change::Write(reference.entry_at, vec![0; 8])];
                    // Without a table of its own the words may be anything.
                    match table_is_reported {
                        true => findings.add(Finding { repair: Repair::Lossless, ..finding() }),
                        false => findings.add_repairable(finding(), what, changes),
                    }
                    Ok(())
                }
                _ => {
                    let is_entry = !matches!(reference.place, EntryPlace::None);
                    takes = takes.max(if is_entry { Repair::CostsData } else { Repair::Impossible });
                    walk.give_up(reference.place, reference.entry_at, finding(), findings)
                }
            }
        })?;
        for (cluster, overlap) in self.clusters.iter().filter(|(_, overlap)| !overlap.is_resolved) {
            let at = cluster << cluster_bits;
            let found = format!("{} references by structures or data that do not go together", overlap.references);
            let structure = format!("cluster {cluster}");
            let finding = Finding::new(Severity::Corrupt, at, structure, found, "one structure, or data");
            takes = Repair::Impossible;
            findings.add(finding.says(format!(
                "The cluster at offset {at} is used by a structure of the format and by something else ({} references).",
                overlap.references
            )));
        }
        if self.left_out > 0 {
            let found = format!("{} more clusters that are used twice", self.left_out);
            let finding = Finding::new(Severity::Corrupt, 0, "clusters", found, "one structure, or data");
            findings.give_up(finding, None, "a later round gives up their entries", Vec::new());
            takes = takes.max(Repair::CostsData);
        }
        Ok(takes)
    }
}

/// Whether a reference loses a cluster to what has it already.
fn is_apart(owner: Option<ClusterUse>, reference: &Reference) -> bool {
    let Some(owner) = owner else { return false };
    match (owner, reference.of) {
        // The entries of the L1 tables were asked before.
        (ClusterUse::Metadata, ClusterUse::Metadata) if reference.structure == L2_TABLE => false,
        (ClusterUse::Metadata, _) => true,
        (owner, of) => owner != of && !matches!(reference.place, EntryPlace::L1 { .. }),
    }
}
