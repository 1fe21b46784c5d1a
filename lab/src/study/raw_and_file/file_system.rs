use serde::{Deserialize, Serialize};
use std::fmt;

/// Disk sizes and both halves are multiples of this.
pub(super) const SIZE_STEP_BYTES: u64 = 16 << 20;

/// A file system that the study can create.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileSystem {
    /// ext4.
    #[default]
    Ext4,
    /// XFS.
    Xfs,
}

impl FileSystem {
    /// The kernel's name of the file system.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    /// Size of a file system with room for `payload_bytes`, its tables and its journal.
    pub(super) fn bytes_for(self, payload_bytes: u64) -> u64 {
        let own_bytes = match self {
            Self::Ext4 => 64 << 20,
            // mkfs.xfs refuses file systems below 300 MiB.
            Self::Xfs => 320 << 20,
        };
        // The journal grows with the file system, up to 1 GiB. The inode tables take up to a
        // twentieth.
        let journal_bytes = (payload_bytes / 8).min(1 << 30);
        (payload_bytes + payload_bytes / 20 + journal_bytes + own_bytes).next_multiple_of(SIZE_STEP_BYTES)
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
