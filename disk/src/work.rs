//! What a request needs before it can be planned, and what must wait for the disk. `carry_out.rs`
//! does it.
//!
//! A plan that lacks something changes nothing that a second plan would not find (`plan.rs`), so
//! the same work may be done twice, by two requests, and none of it depends on who asked.

use crate::map::LayerId;
use std::{
    ops::Range,
    sync::{Arc, OnceLock},
};

/// A packed block, decoded.
pub(crate) type Decoded = Arc<OnceLock<Box<[u8]>>>;

/// What must be done before a request can be planned.
#[derive(Debug)]
pub(crate) enum Work {
    /// Tell the top image that guest-visible writes begin.
    Begin,
    /// Fold a page of the map.
    Fold { page: u64 },
    /// Read the bitmaps of a unit, from a layer on.
    Decide { unit: u64, layer: LayerId },
    /// Have the top image ready to reserve and commit these blocks.
    Prepare { blocks: Range<u64> },
    /// Give a block of the top image all its sectors: those that it does not have from below. The
    /// block is excluded.
    CopyUp { block: u64 },
    /// Decode a packed block.
    Unpack { layer: LayerId, block: u64, into: Decoded },
}
