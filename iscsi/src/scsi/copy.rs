//! EXTENDED COPY with list identifiers of one byte, and RECEIVE COPY RESULTS (SPC-4, 6.4, 6.17 and
//! 6.18): the parameter list, and what is told of copies.
//!
//! ```text
//!   header │ CSCD descriptors: which logical units │ segment descriptors: which blocks │
//! ```
//!
//! A CSCD descriptor names a logical unit by a designator of its page 83h. Supported are the
//! identification descriptor (E4h) and the segment from blocks to blocks (02h).

use super::{Sense, designator::Designator, token};
use crate::{put, u16_at, u32_at, u64_at};

/// Service actions of EXTENDED COPY.
pub mod copies {
    /// EXTENDED COPY(LID1).
    pub const LID1: u16 = 0x00;
    /// POPULATE TOKEN.
    pub const POPULATE_TOKEN: u16 = 0x10;
    /// WRITE USING TOKEN.
    pub const WRITE_USING_TOKEN: u16 = 0x11;
}

/// Service actions of RECEIVE COPY RESULTS.
pub mod results {
    /// COPY STATUS(LID1).
    pub const STATUS: u16 = 0x00;
    /// OPERATING PARAMETERS.
    pub const PARAMETERS: u16 = 0x03;
    /// RECEIVE ROD TOKEN INFORMATION.
    pub const TOKEN_INFORMATION: u16 = 0x07;
}

/// Logical units that one list names at most.
pub const UNITS_MAX: u16 = 8;
/// Segments of one list at most.
pub const SEGMENTS_MAX: u16 = 64;
/// Copies of one initiator at once.
pub const COPIES_MAX: u8 = 16;

const HEADER_BYTES: usize = 16;
const UNIT_BYTES: usize = 32;
const SEGMENT_BYTES: usize = 28;
const DESCRIPTORS_BYTES_MAX: usize = UNITS_MAX as usize * UNIT_BYTES + SEGMENTS_MAX as usize * SEGMENT_BYTES;

/// Type of the identification descriptor.
const BY_DESIGNATOR: u8 = 0xe4;
/// Type of the segment from blocks to blocks.
const BLOCKS_TO_BLOCKS: u8 = 0x02;

/// A logical unit that a list names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyUnit {
    /// Its name.
    pub designator: Designator,
    /// Length of its blocks in bytes.
    pub block_bytes: u32,
}

/// Blocks to be copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The index of the unit that is read.
    pub source: usize,
    /// The index of the unit that is written.
    pub destination: usize,
    /// Number of blocks.
    pub blocks: u64,
    /// The first block that is read.
    pub from: u64,
    /// The first block that is written.
    pub to: u64,
}

/// The parameter list of EXTENDED COPY.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyList {
    /// By which the initiator asks how the copy stands; `None` if it will not.
    pub id: Option<u8>,
    /// The units that the segments refer to.
    pub units: Vec<CopyUnit>,
    /// The segments, in their order.
    pub segments: Vec<Segment>,
}

impl CopyList {
    /// Decodes a list.
    ///
    /// # Errors
    /// It is cut, has too many descriptors, or one that is not supported.
    pub fn decode(list: &[u8]) -> Result<Self, Sense> {
        if list.len() < HEADER_BYTES {
            return Err(Sense::PARAMETER_LENGTH);
        }
        let units_bytes = usize::from(u16_at(list, 2));
        let (segments_bytes, inline_bytes) = (u32_at(list, 8) as usize, u32_at(list, 12) as usize);
        let descriptors_bytes = units_bytes.checked_add(segments_bytes).ok_or(Sense::PARAMETER_LENGTH)?;
        if descriptors_bytes > DESCRIPTORS_BYTES_MAX || list.len() - HEADER_BYTES < descriptors_bytes {
            return Err(Sense::PARAMETER_LENGTH);
        }
        if inline_bytes > 0 {
            return Err(Sense::INLINE_DATA);
        }
        let (units, segments) = list[HEADER_BYTES..][..descriptors_bytes].split_at(units_bytes);
        if units.len() / UNIT_BYTES > UNITS_MAX.into() {
            return Err(Sense::TOO_MANY_UNITS);
        }
        if segments.len() / SEGMENT_BYTES > SEGMENTS_MAX.into() {
            return Err(Sense::TOO_MANY_SEGMENTS);
        }
        let id = match list[1] >> 3 & 3 {
            0 => Some(list[0]),
            2 | 3 => None,
            _ => return Err(Sense::INVALID_PARAMETER),
        };
        Ok(Self {
            id,
            units: units.chunks(UNIT_BYTES).map(decode_unit).collect::<Result<_, _>>()?,
            segments: segments.chunks(SEGMENT_BYTES).map(decode_segment).collect::<Result<_, _>>()?,
        })
    }

    /// The list's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; HEADER_BYTES];
        (out[0], out[1]) = (self.id.unwrap_or(0), if self.id.is_some() { 0 } else { 3 << 3 });
        put(&mut out, 2, &((self.units.len() * UNIT_BYTES) as u16).to_be_bytes());
        put(&mut out, 8, &((self.segments.len() * SEGMENT_BYTES) as u32).to_be_bytes());
        for unit in &self.units {
            let mut entry = [0; UNIT_BYTES];
            entry[0] = BY_DESIGNATOR;
            let Designator { code_set, kind, value } = &unit.designator;
            (entry[4], entry[5], entry[7]) = (*code_set, *kind, value.len().min(20) as u8);
            let len = value.len().min(20);
            entry[8..8 + len].copy_from_slice(&value[..len]);
            put(&mut entry, 28, &(unit.block_bytes & 0xff_ffff).to_be_bytes());
            out.extend(entry);
        }
        for segment in &self.segments {
            let mut entry = [0; SEGMENT_BYTES];
            (entry[0], entry[3]) = (BLOCKS_TO_BLOCKS, SEGMENT_BYTES as u8 - 4);
            put(&mut entry, 4, &(segment.source as u16).to_be_bytes());
            put(&mut entry, 6, &(segment.destination as u16).to_be_bytes());
            put(&mut entry, 10, &(segment.blocks as u16).to_be_bytes());
            put(&mut entry, 12, &segment.from.to_be_bytes());
            put(&mut entry, 20, &segment.to.to_be_bytes());
            out.extend(entry);
        }
        out
    }
}

fn decode_unit(entry: &[u8]) -> Result<CopyUnit, Sense> {
    if entry[0] != BY_DESIGNATOR {
        return Err(Sense::UNIT_TYPE);
    }
    if entry.len() < UNIT_BYTES {
        return Err(Sense::PARAMETER_LENGTH);
    }
    // Not the type of its id, which is ignored, but that of its device: blocks.
    if entry[1] & 0x1f != 0 || entry[7] > 20 {
        return Err(Sense::INVALID_PARAMETER);
    }
    let value = entry[8..8 + usize::from(entry[7])].to_vec();
    let designator = Designator { code_set: entry[4] & 0x0f, kind: entry[5] & 0x3f, value };
    Ok(CopyUnit { designator, block_bytes: u32_at(entry, 28) & 0xff_ffff })
}

fn decode_segment(entry: &[u8]) -> Result<Segment, Sense> {
    if entry[0] != BLOCKS_TO_BLOCKS {
        return Err(Sense::SEGMENT_TYPE);
    }
    if entry.len() < SEGMENT_BYTES {
        return Err(Sense::PARAMETER_LENGTH);
    }
    if usize::from(u16_at(entry, 2)) != SEGMENT_BYTES - 4 {
        return Err(Sense::INVALID_PARAMETER);
    }
    Ok(Segment {
        source: u16_at(entry, 4).into(),
        destination: u16_at(entry, 6).into(),
        blocks: u16_at(entry, 10).into(),
        from: u64_at(entry, 12),
        to: u64_at(entry, 20),
    })
}

/// How a copy stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyState {
    /// It goes on.
    Copying,
    /// All was copied.
    Done,
    /// It has failed.
    Failed,
}

/// COPY STATUS.
pub fn status(state: CopyState, segments: u16, copied_bytes: u64) -> Vec<u8> {
    let mut out = vec![0; 12];
    out[3] = 8;
    out[4] = match state {
        CopyState::Copying => 0,
        CopyState::Done => 1,
        CopyState::Failed => 2,
    };
    put(&mut out, 5, &segments.to_be_bytes());
    // In KiB.
    out[7] = 1;
    put(&mut out, 8, &u32::try_from(copied_bytes >> 10).unwrap_or(u32::MAX).to_be_bytes());
    out
}

/// OPERATING PARAMETERS, for segments of at most `segment_bytes`.
pub fn parameters(segment_bytes: u32) -> Vec<u8> {
    let mut out = vec![0; 44];
    // The list of segments may be of no length.
    out[4] = 1;
    put(&mut out, 8, &UNITS_MAX.to_be_bytes());
    put(&mut out, 10, &SEGMENTS_MAX.to_be_bytes());
    put(&mut out, 12, &(DESCRIPTORS_BYTES_MAX as u32).to_be_bytes());
    put(&mut out, 16, &segment_bytes.to_be_bytes());
    put(&mut out, 34, &u16::from(COPIES_MAX).to_be_bytes());
    // Granularity: a power of 2.
    (out[36], out[37]) = (COPIES_MAX, 9);
    let types = [BLOCKS_TO_BLOCKS, BY_DESIGNATOR];
    out[43] = types.len() as u8;
    out.extend(types);
    let available_bytes = out.len() as u32 - 4;
    put(&mut out, 0, &available_bytes.to_be_bytes());
    out
}

/// The body of page 8Fh of vital product data: third-party copy (SPC-4, 7.8.17). The blocks are
/// those of a token at most, and those from which on a longer copy is not faster.
pub(super) fn page(blocks_max: u64, blocks_best: u64) -> Vec<u8> {
    let mut out = Vec::new();
    let mut add = |kind: u16, mut body: Vec<u8>| {
        body.resize(body.len().next_multiple_of(4), 0);
        out.extend(kind.to_be_bytes());
        out.extend((body.len() as u16).to_be_bytes());
        out.extend(body);
    };
    add(0x0000, token::limits(blocks_max, blocks_best));
    // Commands: EXTENDED COPY and RECEIVE COPY RESULTS, each with its service actions.
    let copies = [copies::LID1, copies::POPULATE_TOKEN, copies::WRITE_USING_TOKEN].map(|action| action as u8);
    let results = [results::STATUS, results::PARAMETERS, results::TOKEN_INFORMATION].map(|action| action as u8);
    add(0x0001, [&[10, 0x83, 3][..], &copies, &[0x84, 3], &results].concat());
    let mut parameters = vec![0; 28];
    put(&mut parameters, 4, &UNITS_MAX.to_be_bytes());
    put(&mut parameters, 6, &SEGMENTS_MAX.to_be_bytes());
    put(&mut parameters, 8, &(DESCRIPTORS_BYTES_MAX as u32).to_be_bytes());
    add(0x0004, parameters);
    add(0x0008, vec![2, BLOCKS_TO_BLOCKS, BY_DESIGNATOR]);
    add(0x000c, vec![0, 0]);
    let mut operations = vec![0; 32];
    put(&mut operations, 0, &u32::from(COPIES_MAX).to_be_bytes());
    put(&mut operations, 4, &u32::from(COPIES_MAX).to_be_bytes());
    put(&mut operations, 8, &u32::MAX.to_be_bytes());
    operations[12] = 9;
    add(0x8001, operations);
    token::features().into_iter().for_each(|(kind, body)| add(kind, body));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit() -> CopyUnit {
        CopyUnit { designator: Designator { code_set: 1, kind: 3, value: b"01234567".to_vec() }, block_bytes: 512 }
    }

    fn list() -> CopyList {
        let segment = Segment { source: 0, destination: 1, blocks: 65535, from: 7, to: 1 << 40 };
        CopyList { id: Some(9), units: vec![unit(), unit()], segments: vec![segment; 3] }
    }

    #[test]
    fn lists_are_encoded_and_decoded() {
        let list = list();
        assert_eq!(CopyList::decode(&list.encode()), Ok(list.clone()));
        let without = CopyList { id: None, ..list };
        assert_eq!(CopyList::decode(&without.encode()), Ok(without));
    }

    #[test]
    fn what_is_wrong_is_told() {
        let good = list().encode();
        for bytes in [1, 15, 16, 40, good.len() - 1] {
            assert_eq!(CopyList::decode(&good[..bytes]), Err(Sense::PARAMETER_LENGTH), "{bytes}");
        }
        let with = |at: usize, byte: u8| {
            let mut list = good.clone();
            list[at] = byte;
            CopyList::decode(&list)
        };
        assert_eq!(with(1, 1 << 3), Err(Sense::INVALID_PARAMETER), "reserved usage of the identifier");
        assert_eq!(with(8, 0xff), Err(Sense::PARAMETER_LENGTH));
        assert_eq!(with(15, 4), Err(Sense::INLINE_DATA));
        assert_eq!(with(16, 0xe0), Err(Sense::UNIT_TYPE));
        assert_eq!(with(17, 5), Err(Sense::INVALID_PARAMETER), "the device is no disk");
        assert_eq!(with(23, 21), Err(Sense::INVALID_PARAMETER));
        assert_eq!(with(16 + 64, 0x03), Err(Sense::SEGMENT_TYPE));
        assert_eq!(with(16 + 64 + 3, 23), Err(Sense::INVALID_PARAMETER));
        let segment = list().segments[0];
        let many = |units: usize, segments: usize| {
            let list = CopyList { id: None, units: vec![unit(); units], segments: vec![segment; segments] };
            CopyList::decode(&list.encode()).map(|_| ())
        };
        assert_eq!(
            (many(8, 64), many(9, 1), many(1, 65)),
            (Ok(()), Err(Sense::TOO_MANY_UNITS), Err(Sense::TOO_MANY_SEGMENTS))
        );
        assert_eq!(many(9, 65), Err(Sense::PARAMETER_LENGTH));
        assert_eq!(many(0, 0), Ok(()));
    }
}
