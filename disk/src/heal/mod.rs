//! Damage: finds and repairs it, and copies what can be read of a damaged image.
//!
//! ```text
//!   check.rs          damage in an image, and broken links to its parents
//!   reconnect.rs      gives an image another link to its parent, and finds lost parents
//!   repair/           repairs an image, with an undo file; undoes a repair
//!   rescue.rs         copies what can be read of an image whose tables are damaged
//! ```
//!
//! A repair changes an image only after its undo file is durable.

pub(crate) mod check;
pub(crate) mod reconnect;
pub(crate) mod repair;
pub(crate) mod rescue;
