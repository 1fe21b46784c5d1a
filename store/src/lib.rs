//! Storage of bytes at offsets, and the block queue that transfers them.
//!
//! This crate is the lowest layer and knows no disk formats. It stores bytes (a [`Store`]) and
//! moves many of them at once (an [`Engine`], and a [`BlockQueue`] on top of it).
//!
//! ```text
//! BlockDevice ──open_queue──▶ BlockQueue   one per thread: push requests, reap completions
//!                                 │
//!                                 ▼
//!                               Engine     joins the parts of a request; io_uring or pread/pwrite
//!                                 │
//!                                 ▼
//!                               Store      a file, a block device, memory
//! ```
//!
//! A server drives disks and [`Streams`] (sockets, `/dev/fuse`) on one [`SharedRing`], so that a
//! turn of its event loop is one system call.
//!
//! A store behind a socket completes requests asynchronously through a [`Lane`]. Work that needs
//! blocking calls goes to the threads of `pool`, so an engine on a ring never blocks its own
//! thread.
//!
//! An image reads and writes its metadata with the blocking methods of [`Store`]. The guest's
//! payload goes through an [`Engine`], directly between the caller's [`IoBuf`] and the file.
//!
//! `unsafe` is allowed only where memory is shared with the kernel, and for system calls that no
//! library wraps: `buffer` (the memory), `part` and `engine` (transfers), `transfer` and `streams`
//! (transfers of streams), `ublk` (block devices that we serve), `ring` (the io_uring, and its
//! stand-in under Miri), `bare` (a baseline for benchmarks) and `sys`.

mod alarm;
mod at_risk;
mod bare;
mod barrier;
mod buffer;
mod claim;
mod code;
mod device_id;
mod direct;
mod engine;
mod external;
pub mod file;
pub mod files;
pub mod lane;
mod limit;
mod limited;
mod limited_store;
mod link;
mod lock;
mod member_traffic;
mod memory;
mod no_io;
mod open;
mod option_names;
mod outbound;
mod overlay;
mod part;
pub mod placement;
mod pool;
pub mod queue;
mod range;
mod raw;
pub mod remote;
pub mod resize;
#[cfg(not(miri))]
mod ring;
#[cfg(miri)]
#[path = "ring/stand_in.rs"]
mod ring;
pub mod secrets;
mod shared;
mod shortage;
mod slot_map;
mod slots;
mod socket;
pub mod store;
mod streams;
pub mod sync;
pub mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod transfer;
// `ublk` names its commands by a type that differs where rustix uses libc, as it does under Miri.
// Miri knows none of these commands.
#[cfg(not(miri))]
pub mod ublk;
mod window;
mod zeros;

pub use alarm::Alarm;
pub use at_risk::AtRisk;
pub use bare::{BareFound, BareLoad, bare_ring};
pub use barrier::{Barrier, BarrierError};
pub use buffer::{HUGE_PAGE_BYTES, IoBuf, MappedMemory, SEGMENTS_MAX, Segment, SegmentMemory, Segments, Slab};
pub use code::ErrorCode;
pub use device_id::{DeviceId, stable_device_name};
pub use engine::{Engine, EngineCompletion, EngineKind, EngineStats, ExternalTicket, SlotId, TargetId};
pub use file::{CacheMode, FileStore, OpenError, OpenOptions, SectorSizes, StoreSnapshot};
pub use files::{FileFacts, FileSystem, Files, LocalFiles};
pub use lane::{Lane, LaneOp, Loan};
pub use limit::{RateLimiter, RateLimits};
pub use limited::LimitedDevice;
pub use limited_store::{LimitedStore, StoreLimit};
pub use lock::LockMode;
pub use member_traffic::{MemberTraffic, Traffic};
pub use memory::MemoryStore;
pub use no_io::{NoIo, assert_io_allowed};
pub use open::{effective_user, raise_open_file_limit, sync_directory_of};
pub use option_names::rename_options;
pub use outbound::Outbound;
pub use overlay::OverlayStore;
pub use placement::{COPIES_MAX, CopyAt, Placed, Placement};
pub use queue::{
    BlockDevice, BlockQueue, Blocking, Completion, Extent, ExtentKind, Geometry, Operation, PushError, QueueOptions,
    Request, TrackedPoint,
};
pub use raw::RawDevice;
pub use shared::SharedRing;
pub use shortage::{explain as explain_shortage, free_bytes, may_reflink, shortage};
pub use slot_map::SlotMap;
pub use socket::{Endpoint, Socket};
pub use store::{Access, DataFile, FileRange, Front, Store, Zeroing, is_full};
pub use streams::{StreamEnd, StreamId, Streams};
pub use sys::cycle_counter;
pub use transfer::Piece;
pub use window::WindowStore;
pub use zeros::all_zero;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
