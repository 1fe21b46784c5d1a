//! I/O that a request needs before it can be planned. `carry_out.rs` does it.
//!
//! A plan that needs work leaves no state that a second plan would not find (`plan.rs`). So two
//! requests may do the same work, and no work depends on the request that asked for it.

use crate::engine::map::LayerId;
use std::{
    ops::Range,
    sync::{Arc, OnceLock},
};

/// The bytes of a compressed block, once it is decompressed.
pub(crate) type Decoded = Arc<OnceLock<Box<[u8]>>>;

/// I/O to do before a request can be planned.
#[derive(Debug)]
pub(crate) enum Work {
    /// Call `begin_writing` of an image that takes writes.
    Begin {
        layer: LayerId,
    },
    /// Fold a page of the map.
    Fold {
        page: u64,
    },
    /// Read the sector bitmaps of a unit whose word is lazy.
    Decide {
        unit: u64,
    },
    /// Prepare an image that takes writes to reserve and commit these blocks.
    Prepare {
        layer: LayerId,
        blocks: Range<u64>,
    },
    /// Copy-up: fill the sectors that the image does not have in this block from the layers below.
    /// The caller has excluded the block.
    CopyUp {
        layer: LayerId,
        block: u64,
    },
    /// Read the table again for the error of a damaged block, with which the request fails.
    ExplainDamage {
        layer: LayerId,
        offset_bytes: u64,
    },
    Decompress {
        layer: LayerId,
        block: u64,
        into: Decoded,
    },
}
