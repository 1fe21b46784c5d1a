//! CRC-32C run backwards: the number of an ext4 inode, from its checksum alone.
//!
//! ```text
//!   checksum = CRC-32C(seed of the file system, number, generation, inode)
//!                                               ▲ the only unknown
//! ```
//!
//! A CRC can be run backwards: the checksum and the bytes behind the number have exactly one
//! register before them ([`crc_before`]), and the number follows from it and the seed. So a lone
//! inode states its number without any search.

use crate::bytes::le16;

/// The number of an inode, by its checksum. `None` if it has only half a checksum.
pub(super) fn number_of(seed: u32, raw: &[u8]) -> Option<u32> {
    if raw.len() <= 0x84 || le16(raw, 0x80) < 4 {
        return None;
    }
    let stored = u32::from(le16(raw, 0x7c)) | u32::from(le16(raw, 0x82)) << 16;
    let mut state = crc_before(stored, &raw[0x84..]);
    state = crc_before(state, &[0, 0]);
    state = crc_before(state, &raw[0x7e..0x82]);
    state = crc_before(state, &[0, 0]);
    state = crc_before(state, &raw[..0x7c]);
    state = crc_before(state, &raw[0x64..0x68]);
    // Four bytes enter the register as if they were XORed into it.
    Some(seed ^ crc_before(state, &[0; 4]))
}

/// The register of a CRC-32C before `bytes`, if it is `after` behind them: the inverse of
/// [`crc32c_raw`](crate::bytes::crc32c_raw).
pub(super) fn crc_before(after: u32, bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(after, |after, &byte| {
        let index = BY_TOP[(after >> 24) as usize];
        (after ^ TABLE[usize::from(index)]) << 8 | u32::from(index ^ byte)
    })
}

/// One step of the CRC for each byte.
static TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut value = index as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ 0x82f6_3b78 } else { value >> 1 };
            bit += 1;
        }
        table[index] = value;
        index += 1;
    }
    table
};

/// Index in [`TABLE`] of the entry with this highest byte. Each byte occurs once.
static BY_TOP: [u8; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        table[(TABLE[index] >> 24) as usize] = index as u8;
        index += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::crc32c_raw;

    /// An inode with the checksum that its number gives it.
    fn sealed(seed: u32, number: u32, mut raw: Vec<u8>) -> Vec<u8> {
        raw[0x80..0x82].copy_from_slice(&32_u16.to_le_bytes());
        raw[0x7c..0x7e].fill(0);
        raw[0x82..0x84].fill(0);
        let start = crc32c_raw(crc32c_raw(seed, &number.to_le_bytes()), &raw[0x64..0x68]);
        let sum = crc32c_raw(start, &raw);
        raw[0x7c..0x7e].copy_from_slice(&(sum as u16).to_le_bytes());
        raw[0x82..0x84].copy_from_slice(&((sum >> 16) as u16).to_le_bytes());
        raw
    }

    /// Bytes that differ from call to call.
    fn bytes(seed: u32, len: usize) -> Vec<u8> {
        let mut state = seed | 1;
        let next = std::iter::repeat_with(move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        });
        next.take(len).collect()
    }

    #[test]
    fn a_crc_runs_backwards() {
        for round in 0..300_u32 {
            let (before, data) = (round.wrapping_mul(0x9e37_79b9), bytes(round, round as usize));
            assert_eq!(crc_before(crc32c_raw(before, &data), &data), before);
        }
    }

    #[test]
    fn an_inode_states_its_number() {
        for round in 0..300_u32 {
            let (seed, number) = (round.wrapping_mul(0x9e37_79b9), round.wrapping_mul(0x85eb_ca6b));
            assert_eq!(number_of(seed, &sealed(seed, number, bytes(round, 256))), Some(number));
        }
    }
}
