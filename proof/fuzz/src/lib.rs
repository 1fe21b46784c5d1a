//! Fuzz targets: hostile images and hostile peers. Each target also runs without a fuzzer.
//!
//! ```text
//!   targets/fuzz_targets/N.rs     libFuzzer: `cargo +nightly fuzz run N`, with
//!                                 `--fuzz-dir proof/fuzz/targets`
//!   tests/corpus.rs               the corpus and random inputs, with a memory limit; in `./test`
//!           │
//!           ▼
//!   targets.rs   the targets: bytes in, a panic if a promise is broken
//!     ├─ samples.rs    small valid images of every type, in memory; made once
//!     ├─ bounded.rs    a store in memory with a maximum length
//!     ├─ locators.rs   a child with false paths to its parent
//!     ├─ wire.rs       the decoders of the NBD protocol
//!     ├─ peers.rs      a server with a hostile client, and a client with a hostile server
//!     ├─ nvme.rs      an NVMe/TCP target with a hostile host, a host with a hostile target
//!     ├─ iscsi.rs     an iSCSI target with a hostile initiator, an initiator with a hostile target
//!     ├─ fleet.rs     an agent of a fleet with a hostile controller, a controller with an agent
//!     ├─ scripted.rs  a server that sends chosen bytes
//!     ├─ vhost.rs      a vhost-user device with a hostile front-end or guest
//!     ├─ objects.rs   manifests, chunks and seals of a hostile server
//!     ├─ ova.rs        damaged OVAs, and texts of OVF
//!     ├─ vmdk.rs       damaged VMDKs, and descriptors of chosen lines
//!     ├─ tables.rs     damaged qcow2 and VDI images
//!     ├─ session.rs    what the targets of images do with one
//!     ├─ volumes.rs    the readers of free space on damaged file systems
//!     └─ mutation.rs   damage to chosen fields of chosen structures, with checksums repaired
//! ```
//!
//! The promises: nothing panics, and no memory is sized by a field of a file. An image that `check`
//! finds sound can be read completely without an error. It can also be written, flushed, closed and
//! reopened, and is still sound. Reading changes nothing.

#![forbid(unsafe_code)]

pub mod bounded;
pub mod fleet;
pub mod iscsi;
pub mod locators;
pub mod mutation;
pub mod nvme;
pub mod objects;
pub mod ova;
pub mod peers;
pub mod samples;
mod scripted;
mod session;
pub mod space;
pub mod tables;
pub mod targets;
pub mod vhost;
pub mod vmdk;
pub mod volumes;
pub mod wire;

pub use targets::{Body, TARGETS};
