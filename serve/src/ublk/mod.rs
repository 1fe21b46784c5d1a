//! A disk as a block device of this machine, by the kernel's ublk driver (Linux 6.5 and later),
//! without a file system in between.
//!
//! ```text
//!   program ─▶ /dev/ublkbN ─▶ kernel ─▶ pump ─▶ session ─▶ the disk's queue
//!                                         \____ one ring ____/
//!
//!   error.rs     errors
//!   session.rs   kernel requests -> disk requests -> answers     no I/O with the kernel
//!   pump.rs      adds, serves and deletes a device
//!   find.rs      finds our devices by their mark
//! ```
//!
//! Two processes work on a device. The *server* adds it, serves its queue, and deletes it after it
//! was stopped. The supervisor of `attach` starts and stops it: both commands block until the
//! server has done its part, so the server cannot call them itself.
//!
//! A device carries a *mark* from its addition to its deletion. The supervisor chooses the mark and
//! records it before it starts the server. So a device is found again no matter when its server was
//! killed, and a device of another program is never taken for ours. When a server is killed, the
//! kernel fails all requests of the device and removes `/dev/ublkbN`. `/dev/ublkcN` stays until the
//! device is deleted.

mod error;
mod find;
mod pump;
mod session;

pub use error::UblkError;
pub use find::{FoundDevice, new_mark};
pub use pump::serve;

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
