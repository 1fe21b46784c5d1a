//! What can be wrong with a message.

/// A message that the protocol does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A message does not begin as it must.
    #[error("{what} begins with {found:#x}, expected {expected}")]
    Magic {
        /// Of what message.
        what: &'static str,
        /// What stood there.
        found: u64,
        /// What should have.
        expected: &'static str,
    },
    /// A message has a length that it cannot have.
    #[error("{what} is {found} bytes long, expected {expected}")]
    Length {
        /// Of what message.
        what: &'static str,
        /// The length it has.
        found: u64,
        /// What it should be.
        expected: &'static str,
    },
    /// A message is longer than the receiver takes.
    #[error("{what} is {found} bytes long, at most {limit} are accepted")]
    TooLong {
        /// Of what message.
        what: &'static str,
        /// The length it claims.
        found: u64,
        /// The receiver's limit.
        limit: u64,
    },
    /// A string is not one.
    #[error("{what} is not text (UTF-8 without NUL, of at most 4096 bytes)")]
    Text {
        /// What should be text.
        what: &'static str,
    },
    /// A field has a value that it cannot have.
    #[error("{what} is {found}, expected {expected}")]
    Value {
        /// Which field.
        what: &'static str,
        /// What it holds.
        found: u64,
        /// What it may hold.
        expected: &'static str,
    },
}
