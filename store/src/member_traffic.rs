//! What the members of a store have done: the files and devices that lie below a store which keeps
//! its bytes in several of them.

use std::ops::Sub;

/// Requests that a file or a device was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Reads.
    pub reads: u64,
    /// Writes, those of zeros included.
    pub writes: u64,
    /// Bytes of the reads.
    pub read_bytes: u64,
    /// Bytes of the writes.
    pub written_bytes: u64,
    /// Syncs, and writes that are durable by themselves.
    pub syncs: u64,
}

impl Sub for Traffic {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            reads: self.reads.saturating_sub(earlier.reads),
            writes: self.writes.saturating_sub(earlier.writes),
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(earlier.written_bytes),
            syncs: self.syncs.saturating_sub(earlier.syncs),
        }
    }
}

/// What a member has done since it was opened, also for others that share it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberTraffic {
    /// Its path.
    pub name: String,
    /// `ssd` or `hdd`.
    pub class: &'static str,
    /// What it was asked for.
    pub traffic: Traffic,
}

impl MemberTraffic {
    /// Adds members that are not in the list yet. Several stores may lie in one pool.
    pub fn merge(found: &mut Vec<Self>, others: Vec<Self>) {
        for other in others {
            if found.iter().all(|known| known.name != other.name) {
                found.push(other);
            }
        }
    }
}
