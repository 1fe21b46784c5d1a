//! What no library wraps safely: system calls and an instruction, each behind a function that is
//! safe to call.
//!
//! ```text
//!   cycles.rs         the processor's cycle counter
//!   reflink.rs        sharing a range between files
//!   loop_device.rs    loop devices, and partitions by hand
//! ```

mod cycles;
pub mod loop_device;
mod reflink;

pub use cycles::cycle_counter;
pub(crate) use reflink::clone_range;
