//! The hash of CHAP: over the challenge's number, the secret and the challenge (RFC 1994; RFC 7143,
//! 12.1.3).

use md5::{Digest, Md5};
use ring::digest::{SHA256, digest};

/// A hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// Every peer has it.
    Md5,
    /// Our own peers prefer it.
    Sha256,
}

impl Algorithm {
    /// The algorithm with this number.
    pub fn of(number: &str) -> Option<Self> {
        match number {
            "5" => Some(Self::Md5),
            "7" => Some(Self::Sha256),
            _ => None,
        }
    }

    /// Its number.
    pub fn number(self) -> &'static str {
        match self {
            Self::Md5 => "5",
            Self::Sha256 => "7",
        }
    }

    /// The response to a challenge with the number `id`.
    pub fn hash(self, id: u8, secret: &[u8], challenge: &[u8]) -> Vec<u8> {
        let text = [&[id], secret, challenge].concat();
        match self {
            Self::Md5 => Md5::digest(&text).to_vec(),
            Self::Sha256 => digest(&SHA256, &text).as_ref().to_vec(),
        }
    }
}

/// Compares without telling by the time where the first difference is.
pub fn are_equal(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |differs, (one, other)| differs | (one ^ other)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::text;

    #[test]
    fn a_known_hash_is_computed() {
        // printf '\x01secretchallenge' | md5sum, sha256sum
        let md5 = Algorithm::Md5.hash(1, b"secret", b"challenge");
        let sha = Algorithm::Sha256.hash(1, b"secret", b"challenge");
        assert_eq!((text::hex(&md5).len(), text::hex(&sha).len()), (34, 66));
        assert_eq!(text::hex(&md5), "0x46e47770030e2b4e26a0db72a7efec00");
        assert_eq!(text::hex(&sha), "0x2dfa0526f4764864b7c3c5bc6596bcead3d8dbd984f4fc1d9f330299f0beced4");
    }
}
