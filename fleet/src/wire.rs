//! Messages on a connection: four bytes with the length, little-endian, then a JSON document.
//!
//! ```text
//!   ┌──────────┬──────────────────────┐
//!   │ length   │ JSON, `length` bytes │  ...
//!   └──────────┴──────────────────────┘
//! ```
//!
//! The other side may lie. A length above the limit is refused before anything is read, and memory
//! grows with the bytes that arrive, not with the length that was claimed. An unknown field is an
//! error, and so is anything behind the document.

use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};

/// Longest message to an agent: a job with hundreds of loads fits.
pub const ASK_BYTES_MAX: u32 = 4 << 20;
/// Longest message of an agent: the record of a phase with many threads and a long series fits.
pub const ANSWER_BYTES_MAX: u32 = 64 << 20;

/// Why a message could not be read.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The other side closed the connection between two messages.
    #[error("the connection was closed")]
    Closed,
    /// The connection failed, or was closed within a message.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The message is too long.
    #[error("a message of {len} bytes was announced, and at most {most} are accepted")]
    TooLong {
        /// Its length.
        len: u32,
        /// The limit.
        most: u32,
    },
    /// The message is not one of this protocol.
    #[error("a message cannot be understood: {0}")]
    NotUnderstood(#[from] serde_json::Error),
}

/// Sends a message.
///
/// # Errors
/// The connection failed, or the message is longer than 4 GiB.
pub fn write(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)?;
    let len = u32::try_from(bytes.len() - 4).map_err(|_| io::ErrorKind::InvalidInput)?;
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    to.write_all(&bytes)?;
    to.flush()
}

/// Receives a message of at most `most` bytes.
///
/// # Errors
/// [`WireError`].
pub fn read<T: DeserializeOwned>(from: &mut impl Read, most: u32) -> Result<T, WireError> {
    let mut len = [0; 4];
    let mut got = 0;
    while got < len.len() {
        match from.read(&mut len[got..]) {
            Ok(0) if got == 0 => return Err(WireError::Closed),
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    let len = u32::from_le_bytes(len);
    if len > most {
        return Err(WireError::TooLong { len, most });
    }
    let mut bytes = Vec::new();
    from.take(len.into()).read_to_end(&mut bytes)?;
    if bytes.len() < len as usize {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(serde_json::from_slice(&bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Answer, Ask};
    use proptest::prelude::*;

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let mut bytes = Vec::new();
        write(&mut bytes, &Ask::Clock { sent_ns: 7 }).unwrap();
        write(&mut bytes, &Ask::Clock { sent_ns: 8 }).unwrap();
        let mut from = &bytes[..];
        for sent_ns in [7, 8] {
            assert_eq!(read::<Ask>(&mut from, ASK_BYTES_MAX).unwrap(), Ask::Clock { sent_ns });
        }
        assert!(matches!(read::<Ask>(&mut from, ASK_BYTES_MAX), Err(WireError::Closed)));
    }

    #[test]
    fn a_cut_message_and_a_wrong_length_are_errors() {
        let mut bytes = Vec::new();
        write(&mut bytes, &Ask::Clock { sent_ns: 7 }).unwrap();
        for cut in 1..bytes.len() {
            assert!(matches!(read::<Ask>(&mut &bytes[..cut], ASK_BYTES_MAX), Err(WireError::Io(_))), "{cut}");
        }
        let long = [0xff; 4];
        assert!(matches!(read::<Ask>(&mut &long[..], 5), Err(WireError::TooLong { len: u32::MAX, most: 5 })));
    }

    #[test]
    fn what_is_not_of_this_protocol_is_refused() {
        for text in [
            "{\"clock\":{\"sent_ns\":7,\"more\":1}}",
            "{\"clock\":{}}",
            "{\"clock\":{\"sent_ns\":-1}}",
            "{\"other\":{}}",
            "{\"clock\":{\"sent_ns\":7}} x",
            "",
        ] {
            let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
            bytes.extend(text.as_bytes());
            let found = read::<Ask>(&mut &bytes[..], ASK_BYTES_MAX);
            assert!(matches!(found, Err(WireError::NotUnderstood(_))), "{text}: {found:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes: Vec<u8>) {
            let _ = read::<Ask>(&mut &bytes[..], 1 << 16);
            let _ = read::<Answer>(&mut &bytes[..], 1 << 16);
        }
    }
}
