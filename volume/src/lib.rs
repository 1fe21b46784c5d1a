//! Which ranges of a disk are certainly free: partition tables and the free-space maps of file
//! systems, read only.
//!
//! ```text
//!   volumes()      partition table ─▶ signatures ─▶ one reader: name, label, size, free bytes
//!   free_ranges()  the free ranges of one of these volumes
//!   ends()         how small the disk can be without losing anything (ends.rs)
//!   DiskEvidence   which structures state where on the disk they lie (evidence.rs)
//!   boot()         how a machine starts from the disk (boot.rs)
//!   table_change() what the partition table becomes on a disk of another size (ends.rs)
//!       │
//!       ▼
//!   volume.rs      puts the parts together; rules between volumes (swap areas)
//!     ├─ table/      MBR with logical partitions, GPT
//!     ├─ lvm/        LVM2: linear logical volumes seen through
//!     ├─ signature   what lies in a volume; two signatures are one too many
//!     └─ ext/ ntfs/ xfs/ btrfs/ fat exfat swap   one module for each kind of map
//!           │ free ranges in bytes, ascending
//!           ▼
//!         sink.rs    checks the order, merges neighbours
//!   read.rs, bytes.rs    bytes of a volume, fields of a structure
//! ```
//!
//! What must hold: **when in doubt, a range is in use.** A volume gives up something only if its
//! whole map was read and everything in it agrees: checksums where the format has them, counts
//! where it has counts, and the places of the file system's own structures. Otherwise the volume is
//! left alone, with the reason ([`LeftAlone`]). Space outside of partitions and file systems is in
//! use.
//!
//! A map is read twice by [`free_ranges`]: the first pass proves that it can be trusted to its end,
//! the second passes the ranges on. The disk must not change meanwhile: no map says anything about
//! a disk that another program has open for writing.
//!
//! Everything on a disk is hostile. Bitmaps are streamed by the block, no memory is sized by a
//! field, each loop ends within a bound that follows from the size of the disk, and nothing panics.
//! The crate does no I/O but through [`ReadAt`], and has no locks and no state.

#![forbid(unsafe_code)]

mod boot;
mod btrfs;
mod bytes;
mod ends;
mod evidence;
mod exfat;
mod ext;
mod fat;
mod identity;
mod lvm;
mod ntfs;
mod read;
mod reason;
mod sighting;
mod signature;
mod sink;
mod swap;
mod table;
mod volume;
mod xfs;

pub use boot::{Boot, boot};
pub use ends::{ContentsEnd, EnlargedPartition, TableChange, ends, table_change};
pub use evidence::{DiskEvidence, anchors_in};
pub use read::{Extent, ReadAt};
pub use reason::{LeftAlone, ReasonKind};
pub use sighting::{Anchor, PROOF, Sighting};
pub use table::{Place, Step, TableKind};
pub use volume::{Layout, Volume, free_ranges, volumes};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
