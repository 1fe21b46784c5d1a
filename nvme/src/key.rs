//! Keys of DH-HMAC-CHAP, in the text form of `nvme gen-dhchap-key`, and their HMAC.
//!
//! A key is first hashed with its owner's name, unless it says otherwise (Base, "NVMe In-band
//! Authentication").

use crate::wire::auth::Hash;
use base64::{Engine, engine::general_purpose::STANDARD};
use ring::hmac;
use std::fmt;

/// A key, as `DHHC-1:HH:BASE64:` tells it.
#[derive(Clone, PartialEq, Eq)]
pub struct Key {
    /// The function by which it is hashed with its owner's name.
    hash: Option<Hash>,
    bytes: Vec<u8>,
}

impl Key {
    /// Parses a key; `None` if it is not one.
    pub fn parse(text: &str) -> Option<Self> {
        let (hash, rest) = text.trim().strip_prefix("DHHC-1:")?.split_once(':')?;
        let hash = match u8::from_str_radix(hash, 16).ok()? {
            0 => None,
            id => Some(Hash::of(id)?),
        };
        let mut bytes = STANDARD.decode(rest.strip_suffix(':')?).ok()?;
        let sum = bytes.split_off(bytes.len().checked_sub(4)?);
        let is_right = matches!(bytes.len(), 32 | 48 | 64) && sum == crc32fast::hash(&bytes).to_le_bytes();
        (is_right && hash.is_none_or(|hash| hash.bytes() == bytes.len())).then_some(Self { hash, bytes })
    }

    /// The function by which it is hashed.
    pub fn hash(&self) -> Option<Hash> {
        self.hash
    }

    /// The key of its owner.
    pub fn of(&self, owner: &str) -> Vec<u8> {
        match self.hash {
            Some(hash) => mac(hash, &self.bytes, &[owner.as_bytes(), b"NVMe-over-Fabrics"].concat()),
            None => self.bytes.clone(),
        }
    }
}

fn algorithm(hash: Hash) -> hmac::Algorithm {
    match hash {
        Hash::Sha256 => hmac::HMAC_SHA256,
        Hash::Sha384 => hmac::HMAC_SHA384,
        Hash::Sha512 => hmac::HMAC_SHA512,
    }
}

/// The HMAC of a text.
pub fn mac(hash: Hash, key: &[u8], text: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(algorithm(hash), key), text).as_ref().to_vec()
}

/// Whether a text has this HMAC. The time does not tell where they differ.
pub fn verify(hash: Hash, key: &[u8], text: &[u8], response: &[u8]) -> bool {
    hmac::verify(&hmac::Key::new(algorithm(hash), key), text, response).is_ok()
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}
