//! Clusters of which parts are free, in an image with subclusters: what is known of them in memory.
//!
//! What is not known costs only time: a part is zeroed once more before it is handed out.

use std::collections::HashMap;

/// Most clusters whose clean parts are remembered.
const CLEAN_MAX: usize = 1 << 16;

/// What is known of clusters of which parts are free.
#[derive(Debug, Default)]
pub(super) struct Subs {
    /// Cluster of the disk to the offset of its new cluster, which no entry names yet.
    pub fresh: HashMap<u64, u64>,
    /// Cluster of the disk to the subclusters of its own cluster that are zeros and have no data.
    clean: HashMap<u64, u32>,
}

impl Subs {
    /// Forgets what is known of a cluster that is freed. Returns its offset if no entry names it.
    pub fn forget(&mut self, cluster: u64) -> Option<u64> {
        self.clean.remove(&cluster);
        self.fresh.remove(&cluster)
    }

    /// Whether a subcluster's part is zeros. It is not from now on: it is handed out.
    pub fn take_clean(&mut self, cluster: u64, bit: u32) -> bool {
        let Some(parts) = self.clean.get_mut(&cluster) else { return false };
        let is_clean = *parts & bit != 0;
        *parts &= !bit;
        is_clean
    }

    /// All parts of a new cluster are zeros.
    pub fn all_clean(&mut self, cluster: u64) {
        if self.clean.len() >= CLEAN_MAX {
            self.clean.clear();
        }
        self.clean.insert(cluster, u32::MAX);
    }
}
