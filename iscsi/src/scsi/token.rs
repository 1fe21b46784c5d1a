//! Copies by tokens (ODX): POPULATE TOKEN, WRITE USING TOKEN and RECEIVE ROD TOKEN INFORMATION
//! (SBC-3, 5.7, 5.47 and 5.26; SPC-4, 5.17.6).
//!
//! ```text
//!   ranges of a disk ─▶ POPULATE TOKEN ─▶ a token of 512 bytes, kept by the target
//!   RECEIVE ROD TOKEN INFORMATION ─▶ the token
//!   token and ranges of any disk ─▶ WRITE USING TOKEN ─▶ the target copies
//! ```

use super::Sense;
use crate::{array, put, u16_at, u32_at, u64_at};

/// Length of a token.
pub const TOKEN_BYTES: usize = 512;
/// Ranges of one list at most.
pub const RANGES_MAX: usize = 256;
/// How long a token lasts without being used, if the initiator does not say, and at most.
pub const TIMEOUT_S: u32 = 60;
/// The same at most.
pub const TIMEOUT_S_MAX: u32 = 3600;

/// ROD type: as the data were when the token was made; it ends when they change.
const CHANGE_VULNERABLE: u32 = 0x0080_0001;
/// ROD type: as the data were when the token was made.
const POINT_IN_TIME: u32 = 0x0080_0000;
/// ROD type of the token that stands for zeros.
const ZEROS: u32 = 0xffff_0001;

const RANGE_BYTES: usize = 16;

/// Blocks, as their first one and their number.
pub type BlockRange = (u64, u64);

/// The parameter list of POPULATE TOKEN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PopulateList {
    /// How long the token is to last without being used, in seconds; 0 for the target's choice.
    pub timeout_s: u32,
    /// What it is to stand for.
    pub ranges: Vec<BlockRange>,
}

impl PopulateList {
    const HEADER_BYTES: usize = 16;

    /// Decodes a list.
    ///
    /// # Errors
    /// It is cut, or has a field that is not supported.
    pub fn decode(list: &[u8]) -> Result<Self, Sense> {
        let list = whole(list, Self::HEADER_BYTES)?;
        let timeout_s = u32_at(list, 4);
        let has_type = list[2] & 2 != 0;
        let kind = u32_at(list, 8);
        // Point in time is what initiators ask for that take what they get.
        let is_known = !has_type || matches!(kind, 0 | CHANGE_VULNERABLE | POINT_IN_TIME);
        if list[2] & 1 != 0 || !is_known || timeout_s > TIMEOUT_S_MAX {
            return Err(Sense::INVALID_PARAMETER);
        }
        Ok(Self { timeout_s, ranges: ranges_of(list, Self::HEADER_BYTES)? })
    }

    /// The list's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; Self::HEADER_BYTES];
        put(&mut out, 4, &self.timeout_s.to_be_bytes());
        put_ranges(&mut out, &self.ranges);
        out
    }
}

/// The parameter list of WRITE USING TOKEN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteList {
    /// Where in what the token stands for the copy begins, in blocks.
    pub offset_blocks: u64,
    /// The token.
    pub token: Token,
    /// Whether it is not needed any more.
    pub deletes: bool,
    /// What is written.
    pub ranges: Vec<BlockRange>,
}

impl WriteList {
    const HEADER_BYTES: usize = 536;

    /// Decodes a list.
    ///
    /// # Errors
    /// It is cut, has a field that is not supported, or no token.
    pub fn decode(list: &[u8]) -> Result<Self, Sense> {
        let list = whole(list, Self::HEADER_BYTES)?;
        if list[2] & 1 != 0 {
            return Err(Sense::INVALID_PARAMETER);
        }
        Ok(Self {
            offset_blocks: u64_at(list, 8),
            token: Token::decode(&list[16..][..TOKEN_BYTES])?,
            deletes: list[2] & 2 != 0,
            ranges: ranges_of(list, Self::HEADER_BYTES)?,
        })
    }

    /// The list's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; Self::HEADER_BYTES];
        out[2] = u8::from(self.deletes) << 1;
        put(&mut out, 8, &self.offset_blocks.to_be_bytes());
        out[16..][..TOKEN_BYTES].copy_from_slice(&self.token.encode());
        put_ranges(&mut out, &self.ranges);
        out
    }
}

/// The list up to the length that it tells.
fn whole(list: &[u8], header_bytes: usize) -> Result<&[u8], Sense> {
    let told_bytes = usize::from(u16_at(list, 0)) + 2;
    if list.len() < header_bytes || told_bytes < header_bytes || told_bytes > list.len() {
        return Err(Sense::PARAMETER_LENGTH);
    }
    Ok(&list[..told_bytes])
}

fn ranges_of(list: &[u8], header_bytes: usize) -> Result<Vec<BlockRange>, Sense> {
    let ranges_bytes = usize::from(u16_at(list, header_bytes - 2));
    let ranges = list.get(header_bytes..header_bytes + ranges_bytes).ok_or(Sense::PARAMETER_LENGTH)?;
    if ranges.is_empty() || ranges.len() % RANGE_BYTES != 0 {
        return Err(Sense::INVALID_PARAMETER);
    }
    if ranges.len() / RANGE_BYTES > RANGES_MAX {
        return Err(Sense::TOO_MANY_SEGMENTS);
    }
    Ok(ranges.chunks_exact(RANGE_BYTES).map(|range| (u64_at(range, 0), u32_at(range, 8).into())).collect())
}

fn put_ranges(out: &mut Vec<u8>, ranges: &[BlockRange]) {
    let (header_bytes, ranges_bytes) = (out.len(), ranges.len() * RANGE_BYTES);
    put(out, 0, &((header_bytes + ranges_bytes - 2) as u16).to_be_bytes());
    put(out, header_bytes - 2, &(ranges_bytes as u16).to_be_bytes());
    for &(first, blocks) in ranges {
        out.extend(first.to_be_bytes());
        out.extend((blocks as u32).to_be_bytes());
        out.extend([0; 4]);
    }
}

/// A token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token {
    /// It stands for data.
    Data {
        /// By which the target finds it.
        id: [u8; 32],
        /// Number of bytes that it stands for.
        len_bytes: u64,
    },
    /// It stands for zeros.
    Zeros,
}

impl Token {
    /// The token's bytes.
    pub fn encode(&self) -> [u8; TOKEN_BYTES] {
        let mut out = [0; TOKEN_BYTES];
        put(&mut out, 6, &(TOKEN_BYTES as u16 - 8).to_be_bytes());
        match self {
            Self::Zeros => put(&mut out, 0, &ZEROS.to_be_bytes()),
            Self::Data { id, len_bytes } => {
                put(&mut out, 0, &CHANGE_VULNERABLE.to_be_bytes());
                // The copy manager's identifier, the bytes that the token stands for, and what is
                // the copy manager's.
                put(&mut out, 8, &id[..8]);
                put(&mut out, 56, &len_bytes.to_be_bytes());
                put(&mut out, 64, id);
            }
        }
        out
    }

    /// Decodes a token.
    ///
    /// # Errors
    /// It is none of ours.
    pub fn decode(bytes: &[u8]) -> Result<Self, Sense> {
        if usize::from(u16_at(bytes, 6)) != TOKEN_BYTES - 8 {
            return Err(Sense::TOKEN_LENGTH);
        }
        match u32_at(bytes, 0) {
            ZEROS => Ok(Self::Zeros),
            CHANGE_VULNERABLE => Ok(Self::Data { id: array(bytes, 64), len_bytes: u64_at(bytes, 56) }),
            _ => Err(Sense::TOKEN_TYPE),
        }
    }
}

/// How the command with a list identifier has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenState {
    /// It goes on.
    Working,
    /// All was done.
    Done,
    /// A part was done; the initiator asks for the rest again.
    Part,
    /// It has failed.
    Failed(Sense),
}

/// RECEIVE ROD TOKEN INFORMATION. `action` is the service action of the command that it is about.
pub fn information(action: u16, state: TokenState, blocks: u64, token: Option<Token>) -> Vec<u8> {
    let mut out = vec![0; 32];
    out[4] = action as u8 & 0x1f;
    out[5] = match state {
        TokenState::Working => 0x11,
        TokenState::Done => 0x01,
        TokenState::Part => 0x03,
        TokenState::Failed(_) => 0x02,
    };
    // In blocks.
    out[15] = 0xf1;
    put(&mut out, 16, &blocks.to_be_bytes());
    if let TokenState::Failed(sense) = state {
        out[12] = 0x02;
        (out[13], out[14]) = (Sense::BYTES as u8, Sense::BYTES as u8);
        out.extend(sense.encode());
    }
    match token {
        Some(token) => {
            out.extend((TOKEN_BYTES as u32 + 2).to_be_bytes());
            out.extend([0, 0]);
            out.extend(token.encode());
        }
        None => out.extend([0; 4]),
    }
    let available_bytes = out.len() as u32 - 4;
    put(&mut out, 0, &available_bytes.to_be_bytes());
    out
}

/// The token in an answer, if there is one.
pub fn token_in(information: &[u8]) -> Option<Token> {
    let at = 32 + usize::from(*information.get(13)?);
    let descriptor = information.get(at + 4..at + 6 + TOKEN_BYTES)?;
    Token::decode(&descriptor[2..]).ok()
}

/// The limits of page 8Fh, as the body of descriptor 0000h: ranges and time of tokens, and the
/// blocks of one.
pub(super) fn limits(blocks_max: u64, blocks_best: u64) -> Vec<u8> {
    let mut out = vec![0; 32];
    put(&mut out, 6, &(RANGES_MAX as u16).to_be_bytes());
    put(&mut out, 8, &TIMEOUT_S_MAX.to_be_bytes());
    put(&mut out, 12, &TIMEOUT_S.to_be_bytes());
    put(&mut out, 16, &blocks_max.to_be_bytes());
    put(&mut out, 24, &blocks_best.to_be_bytes());
    out
}

/// The bodies of descriptors 0106h and 0108h of page 8Fh: how long tokens last, and their types.
pub(super) fn features() -> [(u16, Vec<u8>); 2] {
    let mut lifetime = vec![0; 44];
    put(&mut lifetime, 12, &TIMEOUT_S.to_be_bytes());
    put(&mut lifetime, 16, &TIMEOUT_S_MAX.to_be_bytes());
    put(&mut lifetime, 20, &TIMEOUT_S_MAX.to_be_bytes());
    let mut types = vec![0; 4];
    put(&mut types, 2, &128_u16.to_be_bytes());
    // Made and taken; and taken only.
    for (kind, ways, preference) in [(CHANGE_VULNERABLE, 3, 0x8000_u16), (ZEROS, 2, 0)] {
        let mut entry = vec![0; 64];
        put(&mut entry, 0, &kind.to_be_bytes());
        entry[4] = ways;
        put(&mut entry, 6, &preference.to_be_bytes());
        types.extend(entry);
    }
    [(0x0106, lifetime), (0x0108, types)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_tokens_are_encoded_and_decoded() {
        let list = PopulateList { timeout_s: 7, ranges: vec![(1, 2), (1 << 40, u32::MAX.into())] };
        assert_eq!(PopulateList::decode(&list.encode()), Ok(list.clone()));
        for token in [Token::Zeros, Token::Data { id: [3; 32], len_bytes: 1 << 33 }] {
            assert_eq!(Token::decode(&token.encode()), Ok(token));
            let list = WriteList { offset_blocks: 9, token, deletes: true, ranges: list.ranges.clone() };
            assert_eq!(WriteList::decode(&list.encode()), Ok(list));
            for state in [TokenState::Done, TokenState::Failed(Sense::TOKEN_REVOKED)] {
                let told = information(0x10, state, 77, Some(token));
                assert_eq!((u32_at(&told, 0) as usize + 4, token_in(&told)), (told.len(), Some(token)));
                assert_eq!(token_in(&told[..told.len() - 1]), None);
            }
        }
        assert_eq!(token_in(&information(0x11, TokenState::Part, 1, None)), None);
    }

    #[test]
    fn what_is_wrong_is_told() {
        let list = PopulateList { timeout_s: 0, ranges: vec![(1, 2)] };
        let good = list.encode();
        for bytes in [0, 15, 20, good.len() - 1] {
            assert_eq!(PopulateList::decode(&good[..bytes]), Err(Sense::PARAMETER_LENGTH), "{bytes}");
        }
        let with = |at: usize, byte: u8| {
            let mut list = good.clone();
            list[at] = byte;
            PopulateList::decode(&list).map(|_| ())
        };
        assert_eq!((with(2, 1), with(2, 2)), (Err(Sense::INVALID_PARAMETER), Ok(())), "IMMED, RTV");
        assert_eq!((with(4, 1), with(15, 0)), (Err(Sense::INVALID_PARAMETER), Err(Sense::INVALID_PARAMETER)));
        let many = PopulateList { timeout_s: 0, ranges: vec![(0, 1); 257] };
        assert_eq!(PopulateList::decode(&many.encode()), Err(Sense::TOO_MANY_SEGMENTS));
        let mut token = Token::Zeros.encode();
        token[3] = 2;
        assert_eq!(Token::decode(&token), Err(Sense::TOKEN_TYPE));
        token[7] = 0;
        assert_eq!(Token::decode(&token), Err(Sense::TOKEN_LENGTH));
    }
}
