//! The parameter list of UNMAP (SBC-3, 5.28).

use super::{Blocks, Sense, inquiry::UNMAP_RANGES_MAX};
use crate::{u16_at, u32_at, u64_at};

const HEADER_BYTES: usize = 8;
const RANGE_BYTES: usize = 16;

/// The ranges of a parameter list, in their order.
///
/// # Errors
/// The list is too short, or has too many ranges.
pub fn ranges(list: &[u8]) -> Result<Vec<Blocks>, Sense> {
    if list.is_empty() {
        return Ok(Vec::new());
    }
    if list.len() < HEADER_BYTES {
        return Err(Sense::PARAMETER_LENGTH);
    }
    // A length that is no multiple of a descriptor's ends with a part that is ignored.
    let there_bytes = usize::from(u16_at(list, 2)).min(list.len() - HEADER_BYTES);
    let ranges = list[HEADER_BYTES..][..there_bytes].chunks_exact(RANGE_BYTES);
    if ranges.len() > UNMAP_RANGES_MAX as usize {
        return Err(Sense::INVALID_PARAMETER);
    }
    Ok(ranges.map(|range| Blocks { first: u64_at(range, 0), count: u32_at(range, 8).into() }).collect())
}
