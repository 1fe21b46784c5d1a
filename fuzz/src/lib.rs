//! What fuzzers drive: hostile images and hostile peers, as bodies that also run without a fuzzer.
//!
//! ```text
//!   targets/fuzz_targets/NAME.rs   libFuzzer, by `cargo +nightly fuzz run --fuzz-dir fuzz/targets NAME`
//!   tests/corpus.rs                the corpus, and random inputs, under a limit of memory: in `./test`
//!           │
//!           ▼
//!   targets.rs   the bodies: bytes in, a panic where a promise is broken
//!     ├─ samples.rs    small sound images of every type, in memory; made once
//!     ├─ bounded.rs    a store in memory that does not grow for ever: a length in a log entry is not taken as memory
//!     ├─ locators.rs   a child that lies about where its parent is
//!     ├─ wire.rs       the decoders of the NBD protocol; peers.rs: a server and a client whose peer says what it is told
//!     └─ mutation.rs   damage that knows the formats: which structure, which field, checksums put right again
//! ```
//!
//! The promises: nothing panics or takes memory by a field's word; what `check` calls sound is read
//! to its end without an error, and is written, flushed, closed and opened again without becoming
//! unsound; and reading changes nothing.

#![forbid(unsafe_code)]

pub mod bounded;
pub mod locators;
pub mod mutation;
pub mod peers;
pub mod samples;
pub mod targets;
pub mod wire;

pub use targets::{Body, TARGETS};
