//! A disk as a block device of this machine, by the kernel's ublk driver (Linux 6.5 and later),
//! without a file system in between.
//!
//! ```text
//!   program ─▶ /dev/ublkbN ─▶ kernel ─▶ pump ─▶ session ─▶ the disk's queue
//!                                         \____ one ring ____/
//!
//!   error.rs     errors
//!   session.rs   kernel requests -> disk requests -> answers     no I/O with the kernel
//!   pump.rs      adds, serves and deletes a device; a thread for each of its queues
//!   find.rs      finds our devices by their mark
//!   risk.rs      what the death of the server would cost, written for the supervisor
//! ```
//!
//! Two processes work on a device. The *server* adds it, serves its queue, and deletes it after it
//! was stopped. The supervisor of `attach` starts and stops it: both commands block until the
//! server has done its part, so the server cannot call them itself.
//!
//! A device carries a *mark* from its addition to its deletion. The supervisor chooses the mark and
//! records it before it starts the server. So a device is found again no matter when its server was
//! killed, and a device of another program is never taken for ours. When a server is
//! killed, the requests of the device wait. The supervisor starts another server with the same
//! device if nothing was lost (`risk.rs`), and requests that were in flight are made again.
//! Otherwise it stops the device: the kernel fails its requests and removes `/dev/ublkbN`. While
//! the supervisor is gone too, requests wait until the next command clears up.

mod error;
mod find;
mod pump;
mod risk;
mod session;

pub use error::UblkError;
pub use find::{FoundDevice, new_mark};
pub use pump::{UblkPlace, serve};
pub(crate) use risk::is_safe;

use diskwright_store::ublk::{UBLK_CONTROL, UblkControl};
use std::path::PathBuf;

/// Path of the block device with this number.
pub fn block_device(number: u32) -> PathBuf {
    format!("/dev/ublkb{number}").into()
}

/// Opens the control device of the ublk driver.
///
/// # Errors
/// [`UblkError::NoDriver`].
pub fn control() -> Result<UblkControl, UblkError> {
    UblkControl::open().map_err(|source| UblkError::NoDriver { path: UBLK_CONTROL.into(), source })
}
