//! Requests of whole sectors: one at a time ([`Blocking`]), or many in flight ([`BlockQueue`]).
//!
//! A thread opens a queue of its own by [`BlockDevice::open_queue`], pushes requests until the
//! queue's depth is reached, and reaps their completions in any order. A request owns its buffer
//! while it is in flight and gives it back in its completion. Buffers from one [`Slab`] are
//! registered with the kernel once, and nothing is copied.
//!
//! ```
//! use diskwright_lib::{BlockDevice, CreateRequest, Disk, EngineKind, OpenOptions, create};
//! use diskwright_lib::queue::{QueueOptions, Request, Slab};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("disk.vhdx");
//! # create(&path, &CreateRequest { size_bytes: Some(64 << 20), ..CreateRequest::default() })?;
//! let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() })?;
//! let slab = Slab::new(4, 4096);
//! let options = QueueOptions { depth: 4, slab: Some(&slab), ..QueueOptions::default() };
//! let mut queue = disk.open_queue(&options)?;
//! for (tag, mut buf) in slab.take_all().into_iter().enumerate() {
//!     buf.fill(tag as u8);
//!     let request = Request::write(tag as u64 * 4096, 4096, buf, tag as u64);
//!     queue.push(request).map_err(|error| error.reason)?;
//! }
//! let mut done = Vec::new();
//! while queue.in_flight() > 0 {
//!     queue.reap(1, &mut done)?;
//! }
//! for completion in done {
//!     completion.result?;
//! }
//! # Ok(())
//! # }
//! ```

pub use diskwright_store::{
    BlockQueue, Blocking, Completion, IoBuf, Operation, PushError, QueueOptions, Request, Segments, Slab,
};

#[cfg(doc)]
use diskwright_store::BlockDevice;
