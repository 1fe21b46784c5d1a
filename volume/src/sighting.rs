//! What is seen in bytes of an unknown place: see `evidence.rs`.

/// Sum of weights that proves a place.
pub const PROOF: u32 = 2;
/// What was seen in bytes of an unknown place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sighting {
    /// A structure that states its place.
    At {
        /// Its first byte among those that were looked at.
        within_bytes: usize,
        /// The same byte on the disk.
        disk_offset_bytes: u64,
        /// How much it proves; see [`PROOF`].
        weight: u32,
        /// What it is.
        what: &'static str,
    },
    /// A structure of a journal: bytes around it are copies of structures that lie elsewhere.
    Copies {
        /// Its first byte among those that were looked at.
        within_bytes: usize,
    },
}

/// Called with everything that is seen.
pub(crate) type EachSighting<'a> = dyn FnMut(Sighting) + 'a;

/// A superblock that states where its file system begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Anchor {
    /// First byte of the file system on the disk.
    pub start_bytes: u64,
    /// The superblock, from there on.
    pub superblock_bytes: u64,
}
