//! What can still be known of an image whose tables are damaged.
//!
//! ```text
//!   salvage.rs of each format   every structure for itself; a damaged one is left out
//!        │
//!        ▼
//!   salvaged.rs   size, blocks, table.rs: a place, or why it is lost, for each block
//!        │        gaps(): space of the file that no table and no entry names
//!        │        place(): a block found in a gap, whose own contents prove where it belongs
//!        ▼
//!   SalvagedImage   a read-only image: a lost block is `Damaged`, never the parent's data
//! ```
//!
//! What must hold: an entry is believed only if nothing contradicts it. Two entries for the same
//! space are both lost, and so is an entry with bits that must be zero. Absent blocks are believed
//! only while nothing suggests that entries were wiped ([`BlockTable::doubt_absent`]).
//!
//! If nothing says whether the image has a parent, its absent blocks are lost: they may be the
//! parent's ([`ParentRecord::Unknown`]).
//!
//! Memory: one record for each block that has space, up to [`HELD_MAX`]; runs of lost blocks are
//! one record. Time: entries behind the end of the file are one record, and no range of the file is
//! read more often than a constant says. No read error ends a salvage, except when not even the
//! length of the file is known.

mod image;
mod reading;
mod salvaged;
mod table;

pub use image::SalvagedImage;
pub use reading::read_what_can_be;
pub(crate) use reading::{each_entry, file_length};
pub use salvaged::{Bitmaps, ParentRecord, SalvageHints, Salvaged, Unpack};
pub use table::{BlockTable, Fault, HELD_MAX, SalvagedBlock};
pub(crate) use table::{joined, overlapping, overlaps_one};

#[cfg(test)]
mod tests;
