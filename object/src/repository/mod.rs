//! Repositories: disks in a folder of a bucket, as chunks that are shared and never change.
//!
//! ```text
//!   keys.rs      what objects are called
//!   manifest.rs  what a disk consists of
//!   chunk.rs     the object of a chunk
//!   remote.rs    what is needed of a server: the trait Remote
//!   s3.rs        a folder of a bucket
//!   session.rs   a push that is under way; chunks that are to be deleted
//!   plan.rs      what need not be read
//!   push.rs      push
//!   prune.rs     prune; which disks there are
//! ```
//!
//! A chunk is 4 MiB of a disk, named by the digest of its bytes. A manifest lists the chunks of a
//! disk. What two disks have in common is stored once. A manifest is published when all its chunks
//! are there, and only if there is none of that name.
//!
//! What must always hold: all chunks of a manifest that can be read are there.

mod chunk;
mod keys;
mod manifest;
mod plan;
mod prune;
mod push;
mod remote;
mod s3;
mod session;

pub use keys::{ChunkKey, Digest, PushId, hex, unhex};
pub use manifest::{CHUNK_BYTES, Chunk, DISK_BYTES_MAX, Facts, Manifest};
pub use plan::Changed;
pub use prune::{Disk, PruneOptions, Pruned, disk, disks, prune};
pub use push::{PushOptions, Pushed, push};
pub use remote::{Listed, Remote};
pub use s3::S3Remote;
pub(crate) use {
    chunk::{digest_of, unpack},
    manifest::{MAGIC, MANIFEST_BYTES_MAX},
};
