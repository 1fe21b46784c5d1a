//! Test machinery for two promises: flushed data is never lost, and no failure below the disk is
//! hidden.
//!
//! The machinery is written once, for any image type and any command. It uses the code under test
//! only through its public interfaces: the block queue, the commands of `disk`, and the files below
//! them ([`diskwright_store::Files`]).
//!
//! ```text
//!   stage.rs         the trait Case: a format, a command or a server implements it to be tested
//!   disk/            every kind of disk as a case
//!   command.rs       create and convert as cases
//!   connecting.rs    new links of a chain as cases
//!   life.rs          snapshot and revert, and clones, as cases
//!   merge.rs         merges as cases
//!   moving.rs        moves of a closed disk as cases; live_moving.rs: of a disk in use
//!   applying.rs      exports of changes that are applied to a copy, as cases
//!   compacting.rs    compact as a case
//!   repairing.rs     a repair and its undo as a case
//!   sizes.rs         smaller and larger disks with a GPT as cases
//!   space.rs         pools of members as cases, also with members that vanish
//!   pushing.rs       pushes and prunes of one repository at the same time
//!   crowd.rs         several queues of one disk at the same time, as a case
//!   packed.rs        a made-up image format: two files, packed blocks, no sector bitmaps
//!
//!   world/           a file system in memory: records, fails, breaks rules, kills
//!   contents.rs      contents of a file; torn writes
//!   history.rs       every change and sync of the files, in order
//!   cut.rs           the states that a power cut may leave
//!   ledger.rs        for each sector, the contents that the user may see
//!   campaign.rs      many seeds, many power cuts; how to reproduce a failure
//!
//!   fault.rs         how operations can fail
//!   faulty.rs        a fault at every single operation
//!   sample.rs        which of many runs a short test takes
//!   mutation.rs      rules broken in the files below the disk
//!   rule_breaker.rs  rules broken between the disk and an image
//!   player.rs        one of several queues that use a device at the same time, until it is killed
//!   linear/          which results concurrent threads may see; threads that produce them
//!   watchdog.rs      names a test that hangs, and ends it
//!   opinion.rs       what qemu-img and libvhdi read
//! ```
//!
//! A development crate: it is not shipped.

#![forbid(unsafe_code)]

pub mod applying;
pub mod campaign;
pub mod command;
pub mod compacting;
pub mod connecting;
pub mod contents;
pub mod crowd;
pub mod cut;
pub mod dice;
pub mod disk;
pub mod fault;
pub mod faulty;
pub mod history;
pub mod ledger;
pub mod life;
pub mod linear;
pub mod live_moving;
pub mod merge;
pub mod moving;
pub mod mutation;
pub mod opinion;
pub mod packed;
pub mod player;
pub mod pushing;
pub mod repairing;
pub mod resized_copies;
pub mod rule_breaker;
pub mod sample;
pub mod sizes;
pub mod space;
pub mod stage;
pub mod tracking;
pub mod watchdog;
pub mod world;
