//! The result of a rescue.

use super::ranges::RescuedRange;

/// A block that its own contents have placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedBlock {
    /// First byte on the disk.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Where its payload is in the file.
    pub file_offset_bytes: u64,
    /// What proves the place: structures, and how many of each.
    pub evidence: Vec<(&'static str, u64)>,
}

/// Data that no table entry names and that nothing places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftover {
    /// First byte in the file.
    pub file_offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Why it was not placed.
    pub reason: &'static str,
}

/// The result of a rescue.
#[derive(Debug, Clone, Default)]
pub struct Rescued {
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// The whole disk as ranges, in order. Neighbours differ.
    pub ranges: Vec<RescuedRange>,
    /// Bytes in further ranges, which are too many to list.
    pub unlisted_bytes: u64,
    /// Bytes that were read and copied.
    pub data_bytes: u64,
    /// Bytes that read as zeros.
    pub zero_bytes: u64,
    /// Bytes that are lost, and zeros in the new image.
    pub lost_bytes: u64,
    /// Bytes that read as zeros, but may belong to data that was not placed.
    pub doubted_bytes: u64,
    /// Blocks without a table entry that their own contents have placed.
    pub placed: Vec<PlacedBlock>,
    /// Data in the file that could not be placed.
    pub leftovers: Vec<Leftover>,
    /// Bytes of such data that are not listed.
    pub unlisted_leftover_bytes: u64,
    /// What was found of the tables, and warnings, one sentence each.
    pub remarks: Vec<String>,
}

impl Rescued {
    /// Whether everything was read, and nothing is in doubt.
    pub fn is_whole(&self) -> bool {
        self.lost_bytes == 0 && self.doubted_bytes == 0
    }
}
