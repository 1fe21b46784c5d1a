//! Machinery that proves promises: nothing flushed is ever lost, and no failure below is hidden.
//!
//! It is written once, for any image type and any command, and knows the code under test only by
//! its front doors: the block queue, the commands of `disk`, and the files beneath them
//! ([`diskwright_store::Files`]).
//!
//! ```text
//!   contents.rs   what a file holds; torn writes
//!   history.rs    what was done to the files, in order
//!   world.rs      a file system in memory: records, fails, breaks rules, kills
//!   cut.rs        which states a power cut allows
//!   ledger.rs     what the user may count on, sector by sector
//!   crowd.rs      several queues of one disk at the same time, as a case
//!   player.rs     one of several who drive a device at the same time, until it is taken from under them
//!   linear.rs     which results many threads may see; threads that do everything at once
//!   stage.rs      the trait Case: what a format, a command, a server implements to be put through all of it
//!   campaign.rs   many seeds, many cuts; how to see a failure again
//!   disk.rs       every kind of disk as a case
//!   command.rs    commands that make files: create, convert
//!   fault.rs      what can go wrong below; faulty.rs: at every single operation
//!   mutation.rs   rules broken from below; meddler.rs: rules broken from above
//!   packed.rs     an image of a format that does not exist: two files, packed blocks, no record of sectors
//!   watchdog.rs   what hangs is told, and ended
//!   opinion.rs    what qemu-img and libvhdi make of it
//! ```
//!
//! A development crate: nothing of it is shipped.

#![forbid(unsafe_code)]

pub mod campaign;
pub mod command;
pub mod contents;
pub mod crowd;
pub mod cut;
pub mod dice;
pub mod disk;
pub mod fault;
pub mod faulty;
pub mod history;
pub mod ledger;
pub mod linear;
pub mod meddler;
pub mod mutation;
pub mod opinion;
pub mod packed;
pub mod player;
pub mod stage;
pub mod watchdog;
pub mod world;
