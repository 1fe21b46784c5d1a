//! A disk as a file, by the FUSE protocol of the kernel, spoken by hand on the block queue.
//!
//! ```text
//!   program, loop device ─▶ kernel ─▶ /dev/fuse ─▶ pump ─▶ session ─▶ the disk's queue
//!                                                    \____ one ring ____/
//!
//!   wire.rs        messages <-> values                        pure
//!   negotiate.rs   which version, which features              pure
//!   view.rs        what is to be seen at the mount point      pure
//!   changes.rs     changes of parts of sectors                pure
//!   buffers.rs     memory: headers directly before payload on a page
//!   session.rs     messages -> requests -> replies            no I/O with the kernel
//!   pump.rs        the loop on the ring
//!   mount.rs       mount(2), or the helper for users
//! ```
//!
//! No page cache lies between: files are opened for direct I/O, so a program's read is a read of
//! the disk, and a loop device above keeps its own cache only. The protocol is spoken by hand, and
//! not by a library, because the payload must land aligned in buffers that the disk's queue takes
//! as they are, on the ring that the disk's queue is on.

mod buffers;
mod changes;
pub mod error;
pub mod mount;
mod negotiate;
mod pump;
mod session;
pub mod view;
mod wire;

pub use error::FuseError;
pub use mount::{MountOptions, mount, shape_of, unmount};
pub use pump::serve;
pub(crate) use session::errno_of;
pub use view::{DISK_NAME, Shape, View};
