//! Errors of malformed messages.

/// A message that violates the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A message begins with a wrong magic number.
    #[error("{what} begins with {found:#x}, expected {expected}")]
    Magic {
        /// The message.
        what: &'static str,
        /// The value found.
        found: u64,
        /// The value expected.
        expected: &'static str,
    },
    /// A message has an impossible length.
    #[error("{what} is {found} bytes long, expected {expected}")]
    Length {
        /// The message.
        what: &'static str,
        /// The length found.
        found: u64,
        /// The length expected.
        expected: &'static str,
    },
    /// A message is longer than the receiver accepts.
    #[error("{what} is {found} bytes long, at most {limit} are accepted")]
    TooLong {
        /// The message.
        what: &'static str,
        /// The length that the header announces.
        found: u64,
        /// The receiver's limit.
        limit: u64,
    },
    /// A string is not valid text.
    #[error("{what} is not text (UTF-8 without NUL, of at most 4096 bytes)")]
    Text {
        /// The string.
        what: &'static str,
    },
    /// A field has an impossible value.
    #[error("{what} is {found}, expected {expected}")]
    Value {
        /// The field.
        what: &'static str,
        /// The value found.
        found: u64,
        /// The values expected.
        expected: &'static str,
    },
}
