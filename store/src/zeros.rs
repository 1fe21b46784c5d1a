//! Whether bytes are all zeros: checked for payload that may be recorded as a zero block instead.

/// Whether every byte is 0; true for no bytes. Returns after the first byte for most other data.
pub fn all_zero(bytes: &[u8]) -> bool {
    // The first byte is zero and every byte equals the one before it: a memcmp, as fast as memory.
    bytes.is_empty() || bytes[0] == 0 && bytes[..bytes.len() - 1] == bytes[1..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_non_zero_byte_is_found() {
        assert!(all_zero(&[]));
        assert!(all_zero(&[0]) && !all_zero(&[1]));
        let mut bytes = [0; 4096];
        assert!(all_zero(&bytes));
        for place in [0, 1, 7, 8, 63, 2048, 4094, 4095] {
            bytes[place] = 1;
            assert!(!all_zero(&bytes), "{place}");
            bytes[place] = 0;
        }
    }
}
