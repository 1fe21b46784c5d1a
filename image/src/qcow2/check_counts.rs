//! How often each cluster of the file is referred to, in bounded memory.
//!
//! Counters are kept in chunks of neighbouring clusters, for clusters that something refers to. At
//! the limit the chunks at the end of the file are dropped, and another pass over all tables counts
//! them. So memory depends on neither the length of the file nor on what its tables claim, and the
//! number of passes on what is referred to.

use std::collections::BTreeMap;

/// Clusters of a chunk.
pub(super) const CHUNK: u64 = 256;
/// Most chunks in memory: 64 MiB, for 1 TiB in clusters of 64 KiB.
const CHUNKS_MAX: usize = 1 << 16;

const COUNT: u32 = (1 << 26) - 1;

/// What refers to a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClusterUse {
    /// A structure of the format, which shares its clusters with nothing.
    Metadata,
    /// A cluster of data.
    Data,
    /// Compressed data, of which a cluster holds several.
    Packed,
}

impl ClusterUse {
    fn flag(self) -> u32 {
        match self {
            Self::Metadata => 1 << 26,
            Self::Data => 1 << 27,
            Self::Packed => 1 << 28,
        }
    }
}

const COPIED: u32 = 1 << 29;
const NOT_COPIED: u32 = 1 << 30;
const OVERLAP: u32 = 1 << 31;

/// Count and flags of a cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cell(u32);

impl Cell {
    /// Number of references. Stays at its maximum of 67,108,863.
    pub fn count(self) -> u64 {
        u64::from(self.0 & COUNT)
    }

    pub fn is_metadata(self) -> bool {
        self.0 & ClusterUse::Metadata.flag() != 0
    }

    /// Whether two structures, or a structure and data, share the cluster.
    pub fn overlaps(self) -> bool {
        self.0 & OVERLAP != 0
    }

    /// Whether an entry with the COPIED flag refers to the cluster.
    pub fn is_said_copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// Whether an entry without the COPIED flag, which could have it, refers to the cluster.
    pub fn is_said_shared(self) -> bool {
        self.0 & NOT_COPIED != 0
    }

    fn add(&mut self, weight: u32, of: ClusterUse, copied: Option<bool>) {
        let flags = match copied {
            Some(true) => COPIED,
            Some(false) => NOT_COPIED,
            None => 0,
        };
        if weight == 0 {
            self.0 |= flags;
            return;
        }
        let before = self.0;
        let was = |of: ClusterUse| before & of.flag() != 0;
        let overlaps = match of {
            ClusterUse::Metadata => before & COUNT != 0,
            ClusterUse::Data => was(ClusterUse::Metadata) || was(ClusterUse::Packed),
            ClusterUse::Packed => was(ClusterUse::Metadata) || was(ClusterUse::Data),
        };
        let count = (before & COUNT).saturating_add(weight).min(COUNT);
        self.0 = before & !COUNT | count | of.flag() | flags | if overlaps { OVERLAP } else { 0 };
    }
}

type Chunk = [Cell; CHUNK as usize];

/// The counters of one pass: for the clusters `from .. until`.
#[derive(Debug)]
pub(super) struct Counts {
    chunks: BTreeMap<u64, Box<Chunk>>,
    /// The chunk that was used last, which is not in the map.
    last: Option<(u64, Box<Chunk>)>,
    from: u64,
    /// First cluster that is left to the next pass; `u64::MAX` if none is.
    until: u64,
    chunks_max: usize,
}

impl Counts {
    /// Counters for the clusters from `from` on, a multiple of [`CHUNK`].
    pub fn new(from: u64) -> Self {
        Self::with_limit(from, CHUNKS_MAX)
    }

    fn with_limit(from: u64, chunks_max: usize) -> Self {
        Self { chunks: BTreeMap::new(), last: None, from, until: u64::MAX, chunks_max }
    }

    /// First cluster of the next pass; `None` if this one has all.
    pub fn next_from(&self) -> Option<u64> {
        Some(self.until).filter(|&until| until != u64::MAX)
    }

    /// The clusters of this pass.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.from..self.until
    }

    /// Counts `weight` references to a cluster, or records only `copied` if that is 0. `copied` is
    /// the COPIED flag of an entry for which it means something.
    pub fn add(&mut self, cluster: u64, weight: u32, of: ClusterUse, copied: Option<bool>) {
        if !self.range().contains(&cluster) {
            return;
        }
        let number = cluster / CHUNK;
        if self.last.as_ref().is_none_or(|(last, _)| *last != number) {
            self.put_back();
            let chunk = self.chunks.remove(&number).unwrap_or_else(|| Box::new([Cell::default(); CHUNK as usize]));
            self.last = Some((number, chunk));
        }
        if let Some((_, chunk)) = &mut self.last {
            chunk[(cluster % CHUNK) as usize].add(weight, of, copied);
        }
    }

    /// Puts the last chunk into the map, and drops the highest one at the limit.
    fn put_back(&mut self) {
        self.chunks.extend(self.last.take());
        if self.chunks.len() > self.chunks_max
            && let Some((highest, _)) = self.chunks.pop_last()
        {
            // A chunk that was begun above the limit must not raise it again.
            self.until = self.until.min(highest * CHUNK);
        }
    }

    /// Must be called when all references were counted.
    pub fn finish(&mut self) {
        self.put_back();
    }

    pub fn get(&self, cluster: u64) -> Cell {
        self.chunks.get(&(cluster / CHUNK)).map_or_else(Cell::default, |chunk| chunk[(cluster % CHUNK) as usize])
    }

    /// The clusters of a range that something refers to.
    pub fn used_in(&self, range: std::ops::Range<u64>) -> impl Iterator<Item = (u64, Cell)> + '_ {
        let chunks = self.chunks.range(range.start / CHUNK..range.end.div_ceil(CHUNK).max(range.start / CHUNK));
        let cells = chunks.flat_map(|(number, chunk)| (number * CHUNK..).zip(chunk.iter().copied()));
        cells.filter(move |(cluster, cell)| range.contains(cluster) && cell.count() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn passes_count_all_clusters_in_bounded_memory() {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 45
        };
        let at_random: Vec<u64> = (0..4000).map(|_| next() % 50_000).collect();
        let ascending: Vec<u64> = (0..50_000).step_by(10).collect();
        let descending: Vec<u64> = ascending.iter().rev().copied().collect();
        for references in [at_random, ascending, descending] {
            count_in_passes(&references);
        }
    }

    fn count_in_passes(references: &[u64]) {
        let mut expected: HashMap<u64, u64> = HashMap::new();
        references.iter().for_each(|&cluster| *expected.entry(cluster).or_default() += 2);
        let (mut found, mut passes, mut from) = (HashMap::new(), 0, 0);
        loop {
            let mut counts = Counts::with_limit(from, 20);
            references.iter().for_each(|&cluster| counts.add(cluster, 2, ClusterUse::Data, None));
            counts.finish();
            assert!(counts.chunks.len() <= 20);
            let range = counts.range();
            for (cluster, cell) in counts.used_in(range.start..range.end.min(60_000)) {
                assert_eq!(found.insert(cluster, cell.count()), None);
                assert_eq!(counts.get(cluster), cell);
            }
            passes += 1;
            let Some(next) = counts.next_from() else { break };
            assert!(next > from);
            from = next;
        }
        assert_eq!(found, expected);
        assert!(passes > 5, "{passes}");
    }

    #[test]
    fn what_may_share_a_cluster() {
        let cell = |uses: &[ClusterUse]| {
            let mut cell = Cell::default();
            uses.iter().for_each(|&of| cell.add(1, of, None));
            cell
        };
        for uses in [
            &[ClusterUse::Data, ClusterUse::Data][..],
            &[ClusterUse::Packed, ClusterUse::Packed],
            &[ClusterUse::Metadata],
        ] {
            assert!(!cell(uses).overlaps(), "{uses:?}");
        }
        for uses in [
            [ClusterUse::Metadata, ClusterUse::Metadata],
            [ClusterUse::Metadata, ClusterUse::Data],
            [ClusterUse::Data, ClusterUse::Packed],
        ] {
            assert!(cell(&uses).overlaps() && cell(&[uses[1], uses[0]]).overlaps(), "{uses:?}");
        }
        let mut full = Cell::default();
        full.add(u32::MAX, ClusterUse::Data, Some(true));
        full.add(u32::MAX, ClusterUse::Data, Some(false));
        assert_eq!(full.count(), u64::from(COUNT));
        assert!(full.is_said_copied() && full.is_said_shared() && !full.overlaps() && !full.is_metadata());
    }
}
