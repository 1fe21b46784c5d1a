//! What happens to a disk after it was made: snapshots, clones, merges, moves, other sizes.
//!
//! ```text
//!   absorb.rs         merges a disk in use into its parent
//!   clones.rs         creates many children of one image
//!   compact.rs        gives back space, and makes the file as small as possible
//!   kept_name.rs      marks a disk that keeps its name when its merge in use is finished later
//!   live_merge.rs     merges frozen images of a disk in use
//!   live_move.rs      moves a disk in use to another file
//!   live_snapshot.rs  freezes a disk in use
//!   mark_file.rs      marks beside an image which operation on it is under way
//!   merge.rs          merges an image into one of its ancestors
//!   movable.rs        a disk that can be exchanged for another one while it is in use
//!   move_copy.rs      copies a disk that clients write to
//!   move_plan.rs      where a disk moves to, and the names that are made and removed
//!   offline_move.rs   moves a disk that no process has open
//!   removal.rs        removes an image with its extents
//!   resize.rs         gives a disk another size
//!   snapshot.rs       freezes a disk, goes back to a snapshot, removes one
//!   unknown.rs        refuses files of which nothing says that they are disks
//! ```
//!
//! Each operation can be cut at any moment. It leaves the old state, the new one, or one that the
//! same operation finishes. Those on a disk in use change the chain under its mutation lock.

pub(crate) mod absorb;
pub(crate) mod clones;
pub(crate) mod compact;
pub(crate) mod kept_name;
pub(crate) mod live_merge;
pub(crate) mod live_move;
pub(crate) mod live_snapshot;
pub(crate) mod mark_file;
pub(crate) mod merge;
pub(crate) mod movable;
pub(crate) mod move_copy;
pub(crate) mod move_plan;
pub(crate) mod offline_move;
pub(crate) mod removal;
pub(crate) mod resize;
pub(crate) mod snapshot;
pub(crate) mod unknown;
