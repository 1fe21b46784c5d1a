//! Spaces: pools of files and devices that hold disks, in one, two or three copies.
//!
//! ```text
//!   space://POOL/NAME ─▶ Spaces (names) ─▶ Pool ─▶ SpaceFile, a Store
//!                                           │         │ place, release
//!                                           │         ▼
//!                                           │      the engine's transfers on the members' files
//!                                           ▼
//!                       superblocks, journal, checkpoints (diskwright_format::space)
//! ```
//!
//! A disk of a space is a [`Store`](diskwright_store::Store), so an image can lie in it like in a
//! file. Its transfers go from the caller's memory to the members directly: the map is one look-up.
//! The map changes through a journal that all members with an area have; see [`Pool`].

#![forbid(unsafe_code)]

mod busy;
mod cache;
mod class;
mod columns;
mod copies;
mod counter;
mod error;
mod file;
mod file_state;
mod free;
mod heat;
mod leaves;
mod log;
mod logged;
mod member;
mod moved;
mod names;
mod numbers;
mod outcome;
mod pace;
mod placing;
mod plan;
mod pool;
mod registry;
mod slab_table;
mod slow;
mod sums;

pub use cache::{CACHE_BYTES_DEFAULT, CacheStatus, Emptied};
pub use class::class_of;
pub use diskwright_format::space::{WITNESS_BYTES, change::Tier, superblock::Class};
pub use error::{Result, SpaceError};
pub use file::{SpaceFile, uri};
pub use moved::{MoveReason, TierMove};
pub use names::{PATIENCE, SCHEME, Spaces, split};
pub use pool::{
    NewFile, Pool,
    create::{NewMember, PoolCreateOptions, SLAB_BYTES_DEFAULT},
    drain::Moved,
    open::PoolOptions,
    optimize::Optimized,
    report::{Piece, TierReport},
    scrub::{Damage, Scrubbed},
    status::{DiskStatus, Health, MemberStatus, Status},
    thin::Room,
};
pub use registry::{Known, MemberLimit, Registry};

#[cfg(test)]
mod cache_tests;
#[cfg(test)]
mod seal_tests;
#[cfg(test)]
mod stress_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tier_tests;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
