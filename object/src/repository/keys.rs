//! Keys of a repository.
//!
//! ```text
//!   NAME                                a manifest: a disk
//!   chunks/AB/ABCDEF....PUSH            a chunk: its digest, and the push that has sent it
//!   pushing/PUSH/start, .../alive       a push that is under way
//!   condemned/ID                        chunks that are to be deleted
//! ```
//!
//! A key is never used for other bytes, and never again after it was deleted: a chunk that is sent
//! anew has the name of another push. So a deletion can come late, and deletes nothing that
//! somebody needs.

use crate::error::{ObjectError, Result};
use ring::rand::{SecureRandom, SystemRandom};
use std::{fmt, io, path::Path};

/// What the folders are called.
pub(super) const CHUNKS: &str = "chunks/";
pub(super) const PUSHING: &str = "pushing/";
pub(super) const CONDEMNED: &str = "condemned/";

/// The longest name of a disk.
const NAME_MAX: usize = 200;

/// SHA-256 of a chunk's bytes.
pub type Digest = [u8; 32];

/// Tells a push from all others: random.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PushId(pub u64);

impl fmt::Display for PushId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl PushId {
    /// A number that no other push draws.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 8];
        let drawn = SecureRandom::fill(&SystemRandom::new(), &mut bytes);
        drawn.map_err(|_| {
            ObjectError::local("draw", Path::new("a random number"), io::Error::other("the system has none"))
        })?;
        Ok(Self(u64::from_le_bytes(bytes)))
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let is_ours = text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        is_ours.then(|| u64::from_str_radix(text, 16).ok().map(Self))?
    }
}

/// Names a chunk: its digest, and the push that has sent it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkKey {
    /// SHA-256 of the chunk's bytes.
    pub digest: Digest,
    /// Who has sent it.
    pub push: PushId,
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The digest that [`hex`] has written.
pub fn unhex(digits: &str) -> Option<Digest> {
    if digits.len() != 64 || !digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let mut digest = [0; 32];
    for (byte, at) in digest.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()?;
    }
    Some(digest)
}

impl fmt::Display for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digest = hex(&self.digest);
        write!(f, "{CHUNKS}{}/{digest}.{}", &digest[..2], self.push)
    }
}

impl ChunkKey {
    /// The chunk with this key; `None` if the key is not of a chunk.
    pub fn parse(key: &str) -> Option<Self> {
        let (start, rest) = key.strip_prefix(CHUNKS)?.split_once('/')?;
        let (digits, push) = rest.split_once('.')?;
        let digest = unhex(digits).filter(|_| digits.starts_with(start) && start.len() == 2)?;
        Some(Self { digest, push: PushId::parse(push)? })
    }
}

/// Why a disk cannot be called that; `None` if it can.
pub(super) fn bad_name(name: &str) -> Option<&'static str> {
    if name.is_empty() || name.len() > NAME_MAX {
        return Some("the name of a pushed disk has 1 to 200 letters: s3://BUCKET/FOLDER/NAME");
    }
    if [CHUNKS, PUSHING, CONDEMNED].iter().any(|folder| folder.trim_end_matches('/') == name) {
        return Some("chunks, pushing and condemned are folders of the repository; choose another name");
    }
    let is_plain = name.chars().all(|letter| letter.is_alphanumeric() || "-_.+@=, ".contains(letter));
    (!is_plain || name.starts_with('.')).then_some(
        "the name of a pushed disk has letters, digits, '-', '_', '.', '+', '@', '=', ',' and blanks, and does not begin with a dot",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_were_written() {
        let key = ChunkKey { digest: std::array::from_fn(|at| at as u8 * 7), push: PushId(0xAB) };
        let text = key.to_string();
        assert!(text.starts_with("chunks/00/00070e") && text.ends_with(".00000000000000ab"), "{text}");
        assert_eq!(ChunkKey::parse(&text), Some(key));
        for bad in [
            text.to_uppercase(),
            text.replace("/00/", "/01/"),
            text.replace(".0000", ".000"),
            text[1..].to_owned(),
            format!("{text}0"),
            "chunks/".to_owned(),
            "chunks/é/é.é".to_owned(),
        ] {
            assert_eq!(ChunkKey::parse(&bad), None, "{bad}");
        }
    }

    #[test]
    fn names_that_cannot_be_are_refused() {
        for good in ["monday", "vm 1@2026-11-29.vhdx", "wébserver"] {
            assert_eq!(bad_name(good), None, "{good}");
        }
        for bad in ["", "chunks", "condemned", "a/b", "a?b", ".hidden", "..", "a\nb", &"n".repeat(201)] {
            assert!(bad_name(bad).is_some(), "{bad}");
        }
    }
}
