//! Bytes at offsets, and the block queue that moves them.
//!
//! This crate is the lowest room of the house. It knows nothing of disk formats; it knows how to
//! keep bytes (a [`Store`]) and how to move many of them at once (an [`Engine`], and on it a
//! [`BlockQueue`]).
//!
//! ```text
//!   BlockDevice ──open_queue──▶ BlockQueue      one per thread: push requests, reap completions
//!                                   │
//!                                   ▼
//!                                 Engine         joins the parts of a request; io_uring, or plain pread/pwrite
//!                                   │
//!                                   ▼
//!                                 Store          a file, a block device, memory
//! ```
//!
//! A server drives disks and [`Streams`] (sockets, `/dev/fuse`) on one [`SharedRing`], so that a
//! turn of its loop is one system call.
//!
//! A store that is reached through a socket completes requests later, by a [`Lane`]; what can only
//! be done by blocking calls is done by the threads of `pool`, so that an engine on a ring never
//! blocks its own thread.
//!
//! Metadata of an image goes through the blocking methods of [`Store`]; the guest's payload goes
//! through an [`Engine`], straight between the caller's [`IoBuf`] and the file.
//!
//! `unsafe` is allowed where memory is shared with the kernel, and only there: `buffer` (that
//! memory), `part` and `engine` (what is done with it), `transfer` and `streams` (the same for
//! streams), `ublk` (the same for block devices that we serve), `ring` (the io_uring itself; for
//! Miri, what stands in for it), `bare` (one to compare with), and in `sys`, for the system calls
//! that no library wraps.

mod bare;
mod barrier;
pub mod buffer;
mod code;
mod direct;
pub mod engine;
mod external;
pub mod file;
pub mod files;
pub mod lane;
mod link;
pub mod lock;
pub mod memory;
mod open;
pub mod overlay;
mod part;
mod pool;
pub mod queue;
pub mod raw;
pub mod resize;
#[cfg(not(miri))]
mod ring;
#[cfg(miri)]
#[path = "ring/stand_in.rs"]
mod ring;
mod shared;
mod shortage;
mod slots;
pub mod store;
pub mod streams;
pub mod sync;
pub mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod transfer;
// It names its commands by a type that is another where system calls go by libc, as they do under
// Miri, which knows none of them.
#[cfg(not(miri))]
pub mod ublk;
mod zeros;

pub use bare::{BareFound, BareLoad, bare_ring};
pub use barrier::{Barrier, BarrierError};
pub use buffer::{HUGE_PAGE_BYTES, IoBuf, MappedMemory, SEGMENTS_MAX, Segment, SegmentMemory, Segments, Slab};
pub use code::ErrorCode;
pub use engine::{Engine, EngineCompletion, EngineKind, EngineStats, ExternalTicket, SlotId, TargetId};
pub use file::{CacheMode, FileStore, OpenError, OpenOptions, SectorSizes};
pub use files::{FileFacts, FileSystem, Files, LocalFiles};
pub use lane::{Lane, LaneOp, Loan};
pub use lock::LockMode;
pub use memory::MemoryStore;
pub use open::{raise_open_file_limit, sync_directory_of};
pub use overlay::OverlayStore;
pub use queue::{
    BlockDevice, BlockQueue, Blocking, Completion, Extent, ExtentKind, Geometry, Operation, PushError, QueueOptions,
    Request,
};
pub use raw::RawDevice;
pub use shared::SharedRing;
pub use shortage::{explain as explain_shortage, free_bytes};
pub use store::{Access, DataFile, FileRange, Front, Store, Zeroing, is_full};
pub use streams::{StreamEnd, StreamId, Streams};
pub use sys::cycle_counter;
pub use transfer::Piece;
pub use zeros::all_zero;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
