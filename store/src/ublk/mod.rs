//! ublk: a block device of this machine whose requests this program serves (`linux/ublk_cmd.h`,
//! Linux 6.5 and later).
//!
//! ```text
//! UblkControl ──▶ /dev/ublk-control   add, set, start, stop, delete, query   one blocking command
//! UblkQueue ────▶ /dev/ublkcN         fetch a request, commit its result     on the SharedRing
//!                 /dev/ublkbN         the block device that other programs use
//!
//! layout.rs   structs of the interface <-> values, pure      control.rs, queue.rs
//! ```
//!
//! A device has several queues, each with a thread. Every tag of a queue has a fetch in flight,
//! with a buffer. A request completes the fetch. The payload of a write is then in the buffer; the
//! payload of a read is taken from the buffer by the commit, which is also the next fetch. So a
//! request costs one ring entry and one answer, and no system call of its own. The ring is that of
//! the disk's queue.
//!
//! Rejected: letting the server copy the payload (`UBLK_F_USER_COPY`: pread and pwrite on
//! `/dev/ublkcN`). Fetches would need no buffers, but each request would cost a further call, which
//! a ring can only execute in a worker thread (the device cannot tell whether the call would
//! block). The payload lands aligned in memory registered with the ring either way.
//!
//! Invariant: the kernel owns a buffer from its fetch to the answer; the [`IoBuf`](crate::IoBuf)
//! moves in and out.

mod control;
mod layout;
mod queue;

pub use control::{UBLK_CONTROL, UblkControl};
pub use layout::{UblkDevice, UblkFacts, UblkOperation};
pub use queue::{UblkEnd, UblkNode, UblkQueue};
