//! Objects on S3 and web servers as read-only stores: any image, or a whole chain, is read where it
//! lies, and what was read once is kept in a cache on the local disk.
//!
//! ```text
//!   uri.rs          s3://BUCKET/KEY, https://HOST/PATH; what is secret in a URL
//!   settings.rs     environment variables
//!   credentials.rs  whose name requests are made in
//!   client.rs       the HTTP client: TLS, redirects, timeouts
//!   source.rs       one object: its size and ETag, and ranges of it, each with If-Match
//!   answer.rs       what a server's answer means: bytes, try again, or an error
//!   origin.rs       where blocks come from: an object, or the chunks of a pushed disk
//!   seal.rs         the digests of an image's blocks
//!   repository/     disks that are pushed to a bucket as chunks
//!   wanted.rs       blocks of 1 MiB: wanted, under way, read ahead
//!   fetcher.rs      brings them, from the cache or the server, and keeps them
//!   piece.rs        blocks that have come, and reads that wait
//!   units.rs        the 64 KiB pieces of a block
//!   tries.rs        requests that are repeated
//!   streams.rs      which reads are sequential
//!   blocks.rs       what is known of the blocks of an open object
//!   cache/          blocks on the local disk, shared by the processes of a machine
//!   store.rs        an open object as a `Store`
//!   files.rs        names as paths: a `FileSystem`
//!   runtime.rs      the thread on which requests wait
//! ```
//!
//! The data flow:
//!
//! ```text
//!   engine ─ place ─┬─ block is in the cache ─▶ the cache's file, by the ring; compared by CRC-32C
//!                   └─ it is not ─▶ lane ─▶ Fetcher ─▶ GET, If-Match ─▶ memory of the request
//!                                                          └─▶ the cache
//! ```
//!
//! What must always hold: all bytes that a store shows belong to one version of the object, the one
//! that was there when it was opened. An object that changes is an error for every block that is
//! not in the cache. What a server does not send is an error within the timeout, never zeros.

mod answer;
mod blocks;
pub mod cache;
mod client;
mod credentials;
mod error;
mod fetcher;
mod files;
mod origin;
mod piece;
pub mod repository;
mod runtime;
mod seal;
mod settings;
mod source;
mod store;
mod streams;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod tries;
mod units;
mod uri;
mod wanted;

pub use cache::{Cache, CachedObject};
pub use error::{ObjectError, Result};
pub use files::{ObjectFiles, SCHEMES};
pub use origin::{Donor, Donors};
pub use seal::{SEAL_BYTES_MAX, SEAL_ENDING, SEALED_BYTES_MAX, Seal};
pub use settings::{AwsVariables, Settings};
pub use store::ObjectStore;
pub use uri::ObjectUri;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Size of a block: what one GET fetches if nothing of it is there, and what the cache drops as a
/// whole.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// Bytes under one checksum.
pub(crate) const SUM_BYTES: u64 = 4096;
