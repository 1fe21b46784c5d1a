//! ublk: a block device of this machine whose requests this program carries out
//! (`linux/ublk_cmd.h`, Linux 6.5 and later).
//!
//! ```text
//!   UblkControl ──▶ /dev/ublk-control   add, set, start, stop, delete, ask      one command after the other, waiting for each
//!   UblkQueue ────▶ /dev/ublkcN         fetch a request, commit its result      on the SharedRing that the disk's queue is on
//!                   /dev/ublkbN         what everybody else sees
//!
//!   layout.rs   structs of the interface <-> values, pure      control.rs, queue.rs
//! ```
//!
//! Every tag of the device has a fetch under way, with a buffer; a request ends it. What is written
//! lies in the buffer then, and what is read is taken from the buffer by the commit, which is the
//! next fetch too. So a request costs one entry in the ring and one answer, and no system call of
//! its own.
//!
//! The kernel could also leave the copying to us (`UBLK_F_USER_COPY`: pread and pwrite on
//! `/dev/ublkcN`). That would spare the fetches their buffers, but it costs a further call for each
//! request, which no ring takes over without lending it a thread (the device cannot tell whether it
//! would block). And the payload lands aligned in memory that is registered with the ring either
//! way.
//!
//! Invariant: a buffer is the kernel's from its fetch to the answer; an [`IoBuf`](crate::IoBuf)
//! moves in and moves out.

mod control;
mod layout;
mod queue;

pub use control::{UBLK_CONTROL, UblkControl};
pub use layout::{UblkDevice, UblkFacts, UblkOperation};
pub use queue::{UblkEnd, UblkQueue};
