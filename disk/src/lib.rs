//! A virtual disk: a chain of images as one block device. Opens, creates, converts and compares
//! disks.
//!
//! ```text
//!   options.rs  options for opening a disk
//!   error.rs    what can go wrong, as sentences for the user
//!   engine/     an open disk: plans requests, does their I/O, marks what changes
//!   opening/    from a path to a chain of images
//!   rules/      checks an image against the rules of a place: Azure, Windows, VMware
//!   copying/    new images, and copies of disks
//!   life/       snapshots, clones, merges, moves, other sizes
//!   heal/       checks, repairs, rescues
//!   diff/       what differs between two disks; exports and applies it
//! ```
//!
//! A folder imports only from those above it in this list. There is one exception: `opening` asks
//! `heal::repair` whether the repair of an image was interrupted.

#![forbid(unsafe_code)]

mod copying;
mod diff;
mod engine;
mod error;
mod heal;
mod life;
mod opening;
mod options;
mod rules;

pub use copying::compare::{CompareOutcome, compare};
pub use copying::convert::{ConvertOptions, ConvertOutcome, ConvertPlan, Identity, convert, plan_convert, size_note};
pub use copying::copy::{LostRange, LostRanges};
pub use copying::create::{CreateRequest, create};
pub use copying::new_size::NewSize;
pub use copying::room::empty_image_bytes;
pub use diff::{
    Applied, ApplyOptions, Change, ChangeKind, Changes, Difference, DiskState, EachChange, Export, Exported, Increment,
    NamedRanges, SincePoint, apply_export,
};
pub use diskwright_volume as volume;
pub use engine::chain::Layer;
pub use engine::device::{Disk, MAP_MEMORY_BYTES};
pub use engine::track::changed::{Changed, TrackPoint};
pub use error::{DiskError, Result};
pub use heal::check::{Checked, check, check_image, check_ranges};
pub use heal::reconnect::{ReconnectOptions, Reconnected, Relinked, reconnect};
pub use heal::repair::{PlannedWrite, RepairOptions, Repaired, Undone, interrupted_repair, repair, undo_repair};
pub use heal::rescue::{Leftover, PlacedBlock, RangeKind, RescueOptions, Rescued, RescuedRange, rescue};
pub use life::absorb::{AbsorbOptions, Absorbed};
pub use life::clones::clone_disk;
pub use life::compact::{CompactOptions, Compacted, VolumeGain, compact};
pub use life::live_snapshot::SnapshotWatch;
pub use life::merge::{KeptName, MergeOptions, Merged, merge};
pub use life::movable::Movable;
pub use life::move_plan::{MoveOptions, MoveWatch, Moved};
pub use life::offline_move::move_disk;
pub use life::resize::{ResizeOptions, Resized, resize};
pub use life::snapshot::{FormerImage, Snapshot, SnapshotOptions, remove_snapshot, revert, snapshot};
pub use life::unknown::refuse_unknown;
pub use opening::folder::{FAMILY_MAX, FolderImage, FolderImages, FoundParent, Node};
pub use opening::open::{parent_timestamp_warning, read_without_lock};
pub use opening::ova::{Digests, MemberDigest, Ova, OvaDisk, OvaMember, is_ova};
pub use opening::parts::{PartRole, Parts, check_parts, parts_of};
pub use opening::place::{Opened, Place, Remote, require_file};
pub use opening::volumes::layout;
pub use options::{ChainScope, OpenOptions, ParentPolicy};
pub use rules::{ChainFacts, Destination, ImageFacts, Judgement, Rule, TableFacts, Verdict};

/// Reports the progress of a long operation: bytes done, bytes in total. Returns `false` to stop
/// it.
pub type Progress<'a> = dyn FnMut(u64, u64) -> bool + 'a;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
