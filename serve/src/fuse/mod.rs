//! A disk as a file: the kernel's FUSE protocol, implemented here on the block queue.
//!
//! ```text
//!   program, loop device ─▶ kernel ─▶ /dev/fuse ─▶ pump ─▶ session ─▶ the disk's queue
//!                                                    \____ one ring ____/
//!
//!   wire.rs        messages <-> values                        pure
//!   negotiate.rs   protocol version and features              pure
//!   view.rs        files and attributes at the mount point    pure
//!   changes.rs     changes of parts of sectors                pure
//!   buffers.rs     buffers: header directly before the page-aligned payload
//!   session.rs     messages -> requests -> replies            no I/O with the kernel
//!   pump.rs        the loop on the ring
//!   mount.rs       mount(2), or fusermount3 for users
//! ```
//!
//! There is no page cache in between: files are opened for direct I/O, so a program's read is a
//! read of the disk, and a loop device above has only its own cache. No FUSE library is used,
//! because the payload must be received aligned, in buffers that the disk's queue takes without a
//! copy, on the same ring as the disk's queue.

mod buffers;
mod changes;
mod error;
mod mount;
mod negotiate;
mod pump;
mod session;
mod view;
mod wire;

pub use error::FuseError;
pub use mount::{MountOptions, mount, shape_of, unmount};
pub use pump::serve;
pub(crate) use session::errno_of;
pub use view::{DISK_NAME, Shape, View};
