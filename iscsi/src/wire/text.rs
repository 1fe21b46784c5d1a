//! Text keys: `NAME=VALUE`, each ended by a zero byte (RFC 7143, 6.1).

use base64::{
    Engine, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};

/// With padding at the end or without.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Why text is not a list of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// A pair is not UTF-8.
    #[error("a text key is not UTF-8")]
    NotUtf8,
    /// A pair has no `=`, or no name.
    #[error("a text key has no '=' or no name")]
    NoPair,
}

/// The keys of a text, in their order.
///
/// # Errors
/// [`TextError`].
pub fn pairs(text: &[u8]) -> impl Iterator<Item = Result<(&str, &str), TextError>> {
    text.split(|&byte| byte == 0).filter(|pair| !pair.is_empty()).map(|pair| {
        let pair = std::str::from_utf8(pair).map_err(|_| TextError::NotUtf8)?;
        pair.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or(TextError::NoPair)
    })
}

/// Appends a key.
pub fn put(out: &mut Vec<u8>, name: &str, value: &str) {
    for part in [name, "=", value, "\0"] {
        out.extend_from_slice(part.as_bytes());
    }
}

/// A number: decimal, or hexadecimal after `0x`.
pub fn number(value: &str) -> Option<u32> {
    match value.strip_prefix("0x").or_else(|| value.strip_prefix("0X")) {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => value.parse().ok(),
    }
}

/// A binary value: hexadecimal after `0x`, or base 64 after `0b`. At most 1024 bytes.
pub fn binary(value: &str) -> Option<Vec<u8>> {
    const BYTES_MAX: usize = 1024;
    let (kind, digits) = value.split_at_checked(2)?;
    let out = match kind {
        "0x" | "0X" => {
            let nibbles: Option<Vec<u8>> =
                digits.chars().map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect();
            let nibbles = nibbles?;
            // An odd number of digits has an implied leading zero.
            let (first, rest) = nibbles.split_at(nibbles.len() % 2);
            let pairs = rest.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]);
            first.iter().copied().chain(pairs).collect()
        }
        "0b" | "0B" => BASE64.decode(digits).ok()?,
        _ => return None,
    };
    (!out.is_empty() && out.len() <= BYTES_MAX).then_some(out)
}

/// A binary value as hexadecimal digits after `0x`.
pub fn hex(bytes: &[u8]) -> String {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    "0x".chars().chain(digits.map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)]))).collect()
}
