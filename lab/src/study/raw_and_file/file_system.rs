//! The file systems that the study can make.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Sizes of disks and halves are multiples of this.
pub(super) const SIZE_STEP_BYTES: u64 = 16 << 20;

/// A file system that can be made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileSystem {
    /// Debian's own.
    #[default]
    Ext4,
    /// Red Hat's own.
    Xfs,
}

impl FileSystem {
    /// As the kernel calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    /// Room for disks of `payload_bytes` and its own tables and journal.
    pub(super) fn bytes_for(self, payload_bytes: u64) -> u64 {
        let own_bytes = match self {
            Self::Ext4 => 64 << 20,
            // mkfs.xfs makes none that is smaller.
            Self::Xfs => 320 << 20,
        };
        // Journals grow with the file system, to a gigabyte at most; tables of inodes take a part
        // of it.
        let journal_bytes = (payload_bytes / 8).min(1 << 30);
        (payload_bytes + payload_bytes / 20 + journal_bytes + own_bytes).next_multiple_of(SIZE_STEP_BYTES)
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
