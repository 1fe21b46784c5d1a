//! A virtual disk: a chain of images as one block device. Opens, creates, converts and compares
//! disks.
//!
//! ```text
//!   options.rs    options for opening a disk
//!   open.rs       path -> chain of images; finds each parent, checks policy and identity
//!   image_file.rs opens one image with its files
//!   parts.rs      the files of a raw disk in several parts
//!   gate.rs       which parents may be opened, and where they are looked for
//!   siblings.rs   which images of the folder name this one as their parent
//!   chain.rs      the images with their ids, the map over them, the geometry; immutable
//!   map.rs        owner of each unit of the disk, folded over the chain once, lock-free look-up
//!   holes.rs      finds the next block that any layer has, for walks over nearly empty disks
//!   shared.rs     state of a disk and its queues: mutation lock, flush, grace periods, close
//!   plan.rs       plans a request from memory alone
//!   mutation.rs   the state that the mutation lock guards
//!   work.rs       the I/O that a plan needs first: tables read, space prepared, blocks filled
//!   carry_out.rs  does that I/O, without the lock
//!   claims.rs     blocks that are being changed, and requests that wait for them
//!   held.rs      keeps blocks still while clients work, so that they can be copied or moved
//!   guard.rs      turns a panic into an error of its request, and poisons the disk
//!   clerk.rs      background threads of a disk, for I/O that must not block a queue
//!   device.rs     Disk: the BlockDevice
//!   queue.rs      DiskQueue: one thread's requests, through the map to the engine
//!   epoch.rs      grace periods: when freed space can be reused
//!   create.rs     creates images
//!   place.rs      opens a FILE or a URI: a disk or an export
//!   inside.rs     an image inside an export of an NBD server
//!   convert.rs    copies one disk into another
//!   copy.rs       the copying itself: two workers, many requests in flight
//!   check.rs      damage in an image, and broken links to its parents
//!   repair/       repairs an image, with an undo file; undoes a repair
//!   compare.rs    compares the contents of two disks
//!   diff.rs       the ranges in which two disks differ; exports them, and applies exports
//!   compact.rs    gives back space, and makes the file as small as possible
//!   rescue.rs     copies what can be read of an image whose tables are damaged
//!   new_size.rs   which size a disk gets, and what its partition table becomes
//!   resize.rs     gives a disk another size
//!   rules/        checks an image against the rules of the place that it goes to
//!   clones.rs     creates many children of one image
//!   snapshot.rs   freezes a disk, goes back to a snapshot, removes one
//!   merge.rs      merges an image into one of its ancestors
//!   merge_mark.rs the marks that a merge leaves in a child
//!   live_snapshot.rs  freezes a disk in use
//!   reconnect.rs gives an image another link to its parent, and finds lost parents
//!   absorb.rs     merges a disk in use into its parent
//!   left.rs       the blocks that are still to be merged then
//!   live_merge.rs merges frozen images of a disk in use
//!   movable.rs    a disk that can be exchanged for another one while it is in use
//!   move_plan.rs  where a disk moves to, and the names that are made and removed
//!   move_copy.rs  copies a disk that clients write to
//!   live_move.rs  moves a disk in use to another file
//!   offline_move.rs  moves a disk that nobody has open
//!   track.rs      which ranges have changed since named points
//!   family.rs     the images of a folder and their parents
//!   volumes.rs    partitions and file systems on a disk
//! ```

#![forbid(unsafe_code)]

mod absorb;
mod carry_out;
mod chain;
mod check;
mod claims;
mod clerk;
mod clones;
mod compact;
mod compare;
mod convert;
mod copy;
mod create;
mod device;
mod diff;
mod epoch;
mod error;
mod family;
mod gate;
mod guard;
mod held;
mod holes;
mod image_file;
mod inside;
mod left;
mod live_merge;
mod live_move;
mod live_snapshot;
mod map;
mod merge;
mod merge_mark;
mod movable;
mod move_copy;
mod move_plan;
mod mutation;
mod new_size;
mod offline_move;
mod open;
mod options;
mod parts;
mod place;
mod plan;
mod queue;
mod reconnect;
mod referred;
mod repair;
mod rescue;
mod resize;
mod rules;
#[cfg(all(test, feature = "shuttle"))]
mod schedules;
mod shared;
mod siblings;
mod snapshot;
mod track;
mod volumes;
mod work;

pub use absorb::{AbsorbOptions, Absorbed};
pub use chain::Layer;
pub use check::{Checked, check, check_image};
pub use clones::clone_disk;
pub use compact::{CompactOptions, Compacted, VolumeGain, compact};
pub use compare::{CompareOutcome, compare};
pub use convert::{ConvertOptions, ConvertOutcome, Identity, convert, size_note};
pub use copy::{Lost, LostRange};
pub use create::{CreateRequest, create};
pub use device::{Disk, MAP_MEMORY_BYTES};
pub use diff::{
    Applied, ApplyOptions, Change, ChangeKind, Changes, Difference, DiskState, EachChange, Export, Exported, Increment,
    SincePoint, Touched, apply_export,
};
pub use diskwright_volume as volume;
pub use error::{DiskError, Result};
pub use family::{FAMILY_MAX, Family, FoundParent, Node, Relative};
pub use live_snapshot::SnapshotWatch;
pub use merge::{KeptName, MergeOptions, Merged, merge};
pub use movable::Movable;
pub use move_plan::{MoveOptions, MoveWatch, Moved};
pub use new_size::NewSize;
pub use offline_move::move_disk;
pub use open::{parent_timestamp_warning, read_without_lock};
pub use options::{OpenOptions, ParentPolicy, Reach};
pub use parts::{PartRole, Parts, check_parts, parts_of};
pub use place::{Opened, Place, require_file};
pub use reconnect::{ReconnectOptions, Reconnected, Relinked, reconnect};
pub use repair::{PlannedWrite, RepairOptions, Repaired, Undone, interrupted_repair, repair, undo_repair};
pub use rescue::{Leftover, PlacedBlock, RangeKind, RescueOptions, Rescued, RescuedRange, rescue};
pub use resize::{ResizeOptions, Resized, resize};
pub use rules::{Destination, Facts, ImageFacts, Judgement, Rule, TableFacts, Verdict};
pub use snapshot::{Left, Snapshot, SnapshotOptions, remove_snapshot, revert, snapshot};
pub use track::changed::{Changed, TrackPoint};
pub use volumes::layout;

/// Reports the progress of a long operation: bytes done, bytes in total. Returns `false` to stop
/// it.
pub type Progress<'a> = dyn FnMut(u64, u64) -> bool + 'a;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
