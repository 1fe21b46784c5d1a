//! Servers for tests, of this crate and of others (feature `testing`).
//!
//! ```text
//!   server.rs   a web server that fails as it is told
//!   memory.rs   a repository in memory
//! ```

mod memory;
mod server;

pub use memory::MemoryRemote;
pub use server::{Fault, Seen, TestServer};
