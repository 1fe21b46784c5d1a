//! System calls and an instruction that no library wraps safely, each behind a safe function.
//!
//! ```text
//!   cycles.rs         the processor's cycle counter
//!   reflink.rs        sharing a range between files
//!   loop_device.rs    loop devices, and adding partitions
//!   freeze.rs         freezing and thawing file systems
//! ```

mod cycles;
pub mod freeze;
pub mod loop_device;
mod reflink;

pub use cycles::cycle_counter;
pub(crate) use reflink::clone_range;
