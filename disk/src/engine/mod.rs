//! An open disk and its queues: from a request to the I/O engine of the store.
//!
//! ```text
//!   carry_out.rs   does the I/O that a plan needs, without the lock
//!   chain.rs       the images with their ids, the map over them, the geometry; immutable
//!   claims.rs      blocks that are being changed, and requests that wait for them
//!   background.rs  background threads of a disk, for I/O that must not block a queue
//!   device.rs      Disk: the BlockDevice
//!   epoch.rs       grace periods: when freed space can be reused
//!   guard.rs       turns a panic into an error of its request, and poisons the disk
//!   excluded.rs    keeps blocks still while clients work, so that they can be copied or moved
//!   holes.rs       finds the next block that any layer has, for walks over nearly empty disks
//!   block_set.rs   the blocks that are still to be merged
//!   map.rs         owner of each unit of the disk, folded over the chain once, lock-free look-up
//!   mutation.rs    the state that the mutation lock guards
//!   plan.rs        plans a request from memory alone
//!   queue.rs       DiskQueue: one thread's requests, through the map to the engine
//!   sharing.rs     shares bytes of another file into the disk by reflink
//!   shared.rs      state of a disk and its queues: mutation lock, flush, grace periods, close
//!   throttle.rs    divides the device between clients and work in the background
//!   way.rs         moves blocks that lie where longer tables of the image will be
//!   track.rs       marks of ranges that have changed since named points
//!   work.rs        what a plan needs first: tables read, space prepared, blocks filled
//! ```
//!
//! A request is planned from memory alone under the mutation lock, and does its I/O without it.
//! Knows nothing of how a disk is found: `opening/` brings the images.

pub(crate) mod background;
pub(crate) mod block_set;
pub(crate) mod carry_out;
pub(crate) mod chain;
pub(crate) mod claims;
pub(crate) mod device;
pub(crate) mod epoch;
pub(crate) mod excluded;
pub(crate) mod guard;
pub(crate) mod holes;
pub(crate) mod map;
pub(crate) mod mutation;
pub(crate) mod plan;
pub(crate) mod queue;
#[cfg(all(test, feature = "shuttle"))]
pub(crate) mod schedules;
pub(crate) mod shared;
mod sharing;
pub(crate) mod throttle;
pub(crate) mod track;
mod way;
pub(crate) mod work;
