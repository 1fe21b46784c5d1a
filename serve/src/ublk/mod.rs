//! A disk as a block device of this machine, by the kernel's ublk driver (Linux 6.5 and later),
//! without a file system between.
//!
//! ```text
//!   program ─▶ /dev/ublkbN ─▶ kernel ─▶ pump ─▶ session ─▶ the disk's queue
//!                                         \____ one ring ____/
//!
//!   error.rs     what can go wrong
//!   session.rs   requests -> the disk's requests -> answers      no I/O with the kernel
//!   pump.rs      a device added, served, deleted
//!   find.rs      devices of ours by their mark
//! ```
//!
//! Two processes have a part in a device. The *server* adds it, serves its queue, and, when it was
//! stopped, deletes it. Somebody else (the supervisor of `attach`) starts and stops it, for both
//! wait until the server has done its share.
//!
//! A device carries a *mark* from the moment it is added until it is deleted, which whoever starts
//! a server chooses and notes before. So a device whose server was killed in any moment is found
//! again, and no device of others is taken for it. When a server is killed the kernel fails all
//! that is asked of the device and takes `/dev/ublkbN` away; what stays is `/dev/ublkcN`, until
//! somebody deletes the device.

pub mod error;
mod find;
mod pump;
mod session;

pub use error::UblkError;
pub use find::{Found, new_mark};
pub use pump::serve;

use diskwright_store::ublk::{UBLK_CONTROL, UblkControl};
use std::path::PathBuf;

/// The block device with this number.
pub fn block_device(number: u32) -> PathBuf {
    format!("/dev/ublkb{number}").into()
}

/// The control device; where there is none that can be used, the error says why.
///
/// # Errors
/// [`UblkError::NoDriver`].
pub fn control() -> Result<UblkControl, UblkError> {
    UblkControl::open().map_err(|source| UblkError::NoDriver { path: UBLK_CONTROL.into(), source })
}
