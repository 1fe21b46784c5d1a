//! The file identifier at offset 0: a signature and the creator's name (MS-VHDX 2.2.1). It is
//! written once, when the file is created.

use super::{
    Invalid, Result,
    bytes::{get_u16, put, signature},
};

/// Number of bytes in use.
pub const FILE_ID_BYTES: usize = 520;
/// The first eight bytes of every VHDX.
const SIGNATURE: &[u8; 8] = b"vhdxfile";
const CREATOR_UNITS: usize = 256;

/// The file identifier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileIdentifier {
    /// The program that created the file, for information. At most 255 UTF-16 code units are
    /// stored.
    pub creator: String,
}

impl FileIdentifier {
    /// Parses at least [`FILE_ID_BYTES`] bytes.
    ///
    /// # Errors
    /// If there are too few bytes or the signature is wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        signature("file identifier", bytes, 0, SIGNATURE)?;
        if bytes.len() < FILE_ID_BYTES {
            return Err(Invalid::short("file identifier", bytes.len(), FILE_ID_BYTES));
        }
        let units: Vec<u16> =
            (0..CREATOR_UNITS).map(|unit| get_u16(bytes, 8 + 2 * unit)).take_while(|&unit| unit != 0).collect();
        Ok(Self { creator: String::from_utf16_lossy(&units) })
    }

    /// The bytes to write at offset 0.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; FILE_ID_BYTES];
        put(&mut bytes, 0, SIGNATURE);
        for (index, unit) in self.creator.encode_utf16().take(CREATOR_UNITS - 1).enumerate() {
            put(&mut bytes, 8 + 2 * index, &unit.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn roundtrip(creator in "[^\0]{0,100}") {
            let id = FileIdentifier { creator };
            prop_assert_eq!(FileIdentifier::parse(&id.to_bytes()), Ok(id));
        }

        #[test]
        fn hostile_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = FileIdentifier::parse(&bytes);
            let mut signed = bytes;
            put(&mut signed, 0, SIGNATURE);
            let _ = FileIdentifier::parse(&signed);
        }
    }
}
