//! Which ranges of a disk differ from another disk; exports of these ranges, and their application
//! to a copy of that other disk.
//!
//! ```text
//!   change.rs        Change, Changes: the trait of everything that lists ranges in order
//!   sides.rs         Difference: the ranges in which two disks differ  ─┐
//!   named_ranges.rs  NamedRanges: ranges that the caller names          ├─▶ Changes
//!   since_point.rs   SincePoint: what was tracked since a point        ─┘
//!
//!   Changes ─▶ printed
//!   Changes ─▶ payload.rs: data and zeros ─┬─▶ stream.rs: a stream          (export.rs)
//!                                          ├─▶ sink.rs: a differencing image (export.rs)
//!   a stream, a differencing image ────────┴─▶ sink.rs: a copy of the base   (apply.rs)
//! ```
//!
//! An export names two states of a disk by their identities: the *base*, and the *result*. It turns
//! any copy of the base into a copy of the result, which then has the result's identity. So the
//! next export, whose base is this result, applies to it.
//!
//! `read.rs` reads ranges in order with several requests in flight. Nothing here holds a lock.

mod apply;
mod change;
mod export;
mod mark;
mod named_ranges;
mod payload;
mod read;
mod records;
mod sides;
mod since_point;
mod sink;
mod state;
mod stream;

pub use apply::{Applied, ApplyOptions, Increment, apply_export};
pub use change::{Change, ChangeKind, Changes, EachChange};
pub use export::{Export, Exported};
pub use named_ranges::NamedRanges;
pub use sides::Difference;
pub use since_point::SincePoint;
pub use state::DiskState;
