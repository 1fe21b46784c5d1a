//! Fields of structures whose buffer has a fixed length. A field beyond the buffer's end reads as
//! zeros; where an offset comes from the disk, the reader checks it before.

use uuid::Uuid;

/// `N` bytes at `at`.
pub(crate) fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let field = at.checked_add(N).and_then(|end| bytes.get(at..end));
    field.and_then(|field| field.try_into().ok()).unwrap_or([0; N])
}

pub(crate) fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(get(bytes, at))
}

pub(crate) fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(get(bytes, at))
}

pub(crate) fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(get(bytes, at))
}

pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(get(bytes, at))
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(get(bytes, at))
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(get(bytes, at))
}

/// A UUID whose bytes are in the order of its text, as text; `None` if all are zero.
pub(crate) fn uuid_text(bytes: &[u8], at: usize) -> Option<String> {
    let uuid = Uuid::from_bytes(get(bytes, at));
    (!uuid.is_nil()).then(|| uuid.to_string())
}

/// Text up to the first zero byte; `None` if it is empty. Bytes that are not UTF-8 are replaced.
pub(crate) fn text(bytes: &[u8]) -> Option<String> {
    let len = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let text = String::from_utf8_lossy(&bytes[..len]).trim_end().to_owned();
    (!text.is_empty()).then_some(text)
}

/// UTF-16 text (little-endian); `None` if it is empty.
pub(crate) fn utf16(bytes: &[u8]) -> Option<String> {
    let units: Vec<u16> = bytes.chunks_exact(2).map(|pair| le16(pair, 0)).take_while(|unit| *unit != 0).collect();
    let text = String::from_utf16_lossy(&units);
    (!text.is_empty()).then_some(text)
}

/// CRC-32C without inversions, continued from the register `crc`, as ext4 computes it.
pub(crate) fn crc32c_raw(crc: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!crc, bytes)
}

/// Runs of zero bits among the first `count` bits of `bitmap`, as ranges of bit numbers.
pub(crate) fn zero_runs(bitmap: &[u8], count: u64) -> ZeroRuns<'_> {
    ZeroRuns { bitmap, at: 0, count: count.min(bitmap.len() as u64 * 8) }
}

/// See [`zero_runs`].
pub(crate) struct ZeroRuns<'a> {
    bitmap: &'a [u8],
    at: u64,
    count: u64,
}

impl ZeroRuns<'_> {
    /// First bit at `from` or after that has the value `set`; `count` if there is none.
    fn first_bit(&self, mut from: u64, set: bool) -> u64 {
        let skip = if set { 0x00 } else { 0xff };
        while from < self.count {
            let byte = self.bitmap[(from / 8) as usize];
            if from.is_multiple_of(8) && byte == skip {
                from += 8;
            } else if (byte >> (from % 8) & 1 == 1) == set {
                return from;
            } else {
                from += 1;
            }
        }
        self.count
    }
}

impl Iterator for ZeroRuns<'_> {
    type Item = std::ops::Range<u64>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.first_bit(self.at, false);
        if start >= self.count {
            return None;
        }
        self.at = self.first_bit(start, true);
        Some(start..self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_zero_bits_end_at_the_count() {
        let runs = |bitmap: &[u8], count| zero_runs(bitmap, count).map(|run| (run.start, run.end)).collect::<Vec<_>>();
        assert_eq!(runs(&[0xff, 0x00, 0x81], 24), [(8, 16), (17, 23)]);
        assert_eq!(runs(&[0x0f, 0xf0], 16), [(4, 12)]);
        assert_eq!(runs(&[0x00, 0x00], 11), [(0, 11)]);
        assert_eq!(runs(&[0xff], 8), []);
        assert_eq!(runs(&[0x00], 64), [(0, 8)]);
    }

    #[test]
    fn fields_beyond_the_end_are_zero() {
        assert_eq!(le32(&[1, 2, 3], 0), 0);
        assert_eq!(le16(&[1, 2, 3], usize::MAX), 0);
    }
}
