//! A disk for virtual machines: a vhost-user-blk device (QEMU, Cloud Hypervisor, crosvm) on a unix
//! socket.
//!
//! ```text
//!   front-end (QEMU) ── unix socket ─▶ server.rs ─▶ device.rs      what each message does
//!        │                  channel.rs, wire.rs       │            the socket, and its messages
//!        │                                            ▼
//!        │ memory, eventfds                        worker.rs       one thread for each virtqueue
//!        ▼                                            │
//!   guest's memory ◀── memory.rs ── vring.rs ─────▶ session.rs ─▶ BlockQueue
//!                                   request.rs, inflight.rs, risk.rs
//!                                   config.rs, limits.rs           features, configuration space
//!   front_end/ (feature `testing`): the other side, for tests and benchmarks
//! ```
//!
//! The front-end passes its guest's memory and the addresses of the virtqueues. From then on the
//! guest and the workers share memory, and no request passes the socket. A payload is read from and
//! written to the guest's memory in place, where it is aligned as the disk's file needs it.
//!
//! Guarantees: a completed write is visible on every queue, and durable after a flush on any of
//! them. If the guest does not negotiate flushes, or switches the cache to write-through, each
//! write is durable when it completes. Before a ring stops, its requests in flight are finished.
//! When the server was killed and a front-end with `INFLIGHT_SHMFD` connects to the next one,
//! requests that were in flight are carried out again. If completed writes were lost with the
//! former server, or if that is unknown, every request fails until the machine is reset
//! (`risk.rs`).
//!
//! Everything that comes from the guest or the front-end is checked (`vring`, `request`, `wire`). A
//! wrong request is answered with an error. A damaged ring or message ends the connection with the
//! reason in the log. The memory must be a memfd that can be sealed against shrinking, because its
//! owner could otherwise kill the server (`diskwright_store::MappedMemory`).

mod channel;
mod config;
mod device;
#[cfg(feature = "testing")]
pub mod front_end;
mod inflight;
mod limits;
mod memory;
mod request;
mod risk;
mod server;
mod session;
mod vring;
mod wire;
mod worker;

pub use server::{QUEUES_MAX, VhostUserError, VhostUserOptions, VhostUserServer};
