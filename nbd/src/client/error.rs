//! Errors of the NBD client.

use crate::{
    tls::TlsError,
    uri::UriError,
    wire::{Command, ErrorCode, OptionCode, ReplyCode, WireError},
};
use std::{io, sync::Arc};

/// Result of a client operation.
pub type Result<T, E = ClientError> = std::result::Result<T, E>;

/// Why an export cannot be reached, or why a request failed. `peer` is the server, displayed as an
/// [`Endpoint`](crate::uri::Endpoint).
#[derive(Debug, Clone, thiserror::Error)]
pub enum ClientError {
    /// The URI is invalid.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// The certificates cannot be used.
    #[error("{peer}: cannot prepare TLS: {source}")]
    Certificates {
        /// The server.
        peer: String,
        /// The reason.
        source: Arc<TlsError>,
    },
    /// No connection to the server could be made.
    #[error("{peer}: cannot connect: {source}; check that the server is running and listens there")]
    Connect {
        /// The server.
        peer: String,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// The connection broke.
    #[error(
        "{peer}: the connection broke while {doing}: {source}; look at the server's log (?reconnect in the URI reconnects automatically)"
    )]
    Lost {
        /// The server.
        peer: String,
        /// What was being done.
        doing: String,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// TLS failed.
    #[error(
        "{peer}: TLS failed: {source}; both certificates must be signed by a CA that the other side trusts, and the server's must name this host"
    )]
    Tls {
        /// The server.
        peer: String,
        /// The error of rustls.
        source: rustls::Error,
    },
    /// A malformed message.
    #[error("{peer}: while {doing}: {source}; this is not an NBD server, or it is broken")]
    Wire {
        /// The server.
        peer: String,
        /// What was being done.
        doing: String,
        /// What is wrong with the message.
        source: WireError,
    },
    /// A well-formed message that violates the protocol.
    #[error(
        "{peer}: the server violated the protocol: {what}; the connection was closed, do not trust the data read from it"
    )]
    Protocol {
        /// The server.
        peer: String,
        /// The violation.
        what: String,
    },
    /// The server sent nothing for too long.
    #[error(
        "{peer}: the server sent nothing for {seconds} s while {doing}; if it is only slow, allow more time with ?timeout=SECONDS in the URI"
    )]
    Stalled {
        /// The server.
        peer: String,
        /// What was being done.
        doing: String,
        /// How long the server sent nothing.
        seconds: f64,
    },
    /// The server has no such export.
    #[error("{peer}: the server has no export {name:?}{}", export_hint(exports))]
    UnknownExport {
        /// The server.
        peer: String,
        /// The name requested.
        name: String,
        /// The exports that the server has, as far as it lists them.
        exports: Vec<String>,
    },
    /// The server requires TLS and the URI does not, or the other way round.
    #[error("{peer}: {what}")]
    TlsMismatch {
        /// The server.
        peer: String,
        /// What does not match, and what to do.
        what: &'static str,
    },
    /// The server refused an option of the handshake.
    #[error("{peer}: the server refuses {option}: {code}{}", in_parentheses(message))]
    Refused {
        /// The server.
        peer: String,
        /// The option.
        option: OptionCode,
        /// The reason.
        code: ReplyCode,
        /// The server's message.
        message: String,
    },
    /// The export cannot be used as a disk.
    #[error("{peer}: the export {name:?} cannot be used: {what}")]
    Unusable {
        /// The server.
        peer: String,
        /// The name of the export.
        name: String,
        /// The reason.
        what: String,
    },
    /// After reconnecting, the export has changed.
    #[error("{peer}: after reconnecting, the export {name:?} has changed: {what}; no request was sent to it")]
    Changed {
        /// The server.
        peer: String,
        /// The name of the export.
        name: String,
        /// What differs.
        what: String,
    },
    /// The server answered a request with an error.
    #[error(
        "{peer}: the server answered {command} of {len_bytes} bytes at {offset_bytes} with {code}{}",
        in_parentheses(message)
    )]
    Request {
        /// The server.
        peer: String,
        /// The command.
        command: Command,
        /// First byte of the range, or of the failure if the server reported it.
        offset_bytes: u64,
        /// Length of the range.
        len_bytes: u64,
        /// The error code.
        code: ErrorCode,
        /// The server's message.
        message: String,
    },
    /// Writes that a former server had answered may be lost.
    #[error(
        "{peer}: the server has ended since it answered writes that were not flushed, or may have, and another one goes on: these writes may be lost, so no flush succeeds any more; check the data and open the export again"
    )]
    LostWrites {
        /// The server.
        peer: String,
    },
    /// The server could not be reached again in time.
    #[error("{peer}: reconnecting failed for {seconds} s; the last error: {last}")]
    GaveUp {
        /// The server.
        peer: String,
        /// How long reconnecting was tried.
        seconds: f64,
        /// The error of the last attempt.
        last: Box<ClientError>,
    },
}

fn export_hint(exports: &[String]) -> String {
    match exports {
        [] => {
            "; ask the server's administrator for its name (nbdinfo --list URI shows the names if the server lists them)"
                .into()
        }
        _ => format!("; it has: {}", exports.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")),
    }
}

fn in_parentheses(message: &str) -> String {
    // Control characters are replaced, because the message goes to a terminal.
    let printable: String = message.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    if printable.is_empty() { printable } else { format!(" ({printable})") }
}

impl ClientError {
    /// The kind of the corresponding `io::Error`.
    pub fn kind(&self) -> io::ErrorKind {
        use io::ErrorKind as Kind;
        match self {
            Self::Uri(_) | Self::Certificates { .. } | Self::Unusable { .. } => Kind::InvalidInput,
            Self::Connect { source, .. } | Self::Lost { source, .. } => source.kind(),
            Self::Tls { .. } | Self::Wire { .. } | Self::Protocol { .. } | Self::Changed { .. } => Kind::InvalidData,
            Self::Stalled { .. } => Kind::TimedOut,
            Self::UnknownExport { .. } => Kind::NotFound,
            Self::TlsMismatch { .. } => Kind::PermissionDenied,
            Self::Refused { code, .. } => match *code {
                ReplyCode::ERR_POLICY => Kind::PermissionDenied,
                ReplyCode::ERR_UNKNOWN => Kind::NotFound,
                ReplyCode::ERR_UNSUP | ReplyCode::ERR_PLATFORM => Kind::Unsupported,
                _ => Kind::Other,
            },
            Self::Request { code, .. } => code.kind(),
            Self::GaveUp { last, .. } => last.kind(),
            Self::LostWrites { .. } => Kind::Other,
        }
    }

    /// Why it failed, for programs to match. What the server calls a request's failure is taken by
    /// the kind of its NBD error number.
    pub fn code(&self) -> diskwright_store::ErrorCode {
        use diskwright_store::ErrorCode as Code;
        match self {
            Self::Uri(_) | Self::Certificates { .. } => Code::InvalidInput,
            Self::Connect { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => Code::PermissionDenied,
            Self::Connect { .. }
            | Self::Lost { .. }
            | Self::Stalled { .. }
            | Self::GaveUp { .. }
            | Self::LostWrites { .. } => Code::Connection,
            Self::Tls { .. } | Self::Wire { .. } | Self::Protocol { .. } | Self::Changed { .. } => Code::Protocol,
            Self::UnknownExport { .. } => Code::NotFound,
            Self::TlsMismatch { .. } => Code::PermissionDenied,
            Self::Unusable { .. } => Code::Unsupported,
            Self::Refused { .. } | Self::Request { .. } => Code::of_system(&self.kind().into()),
        }
    }

    /// Whether reconnecting may help. It does not if the server would answer the same again, or
    /// violated the protocol.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Lost { .. } | Self::Stalled { .. } => true,
            Self::Refused { code, .. } => *code == ReplyCode::ERR_SHUTDOWN,
            // A server that has just started may not have its exports yet.
            Self::UnknownExport { .. } => true,
            _ => false,
        }
    }
}

impl From<ClientError> for io::Error {
    fn from(error: ClientError) -> Self {
        io::Error::new(error.kind(), error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_can_match() {
        let peer = || String::from("host:10809");
        let connect = |kind: io::ErrorKind| ClientError::Connect { peer: peer(), source: Arc::new(kind.into()) };
        let request = |code| ClientError::Request {
            peer: peer(),
            command: Command::WRITE,
            offset_bytes: 0,
            len_bytes: 512,
            code,
            message: String::new(),
        };
        let stalled = ClientError::Stalled { peer: peer(), doing: String::new(), seconds: 1.0 };
        let (text, what) = (String::new, "TLS is required");
        for (error, code) in [
            (connect(io::ErrorKind::ConnectionRefused), "connection"),
            (connect(io::ErrorKind::NotFound), "connection"),
            (connect(io::ErrorKind::PermissionDenied), "permission_denied"),
            (ClientError::GaveUp { peer: peer(), seconds: 1.0, last: Box::new(stalled.clone()) }, "connection"),
            (stalled, "connection"),
            (ClientError::Protocol { peer: peer(), what: text() }, "protocol"),
            (ClientError::UnknownExport { peer: peer(), name: text(), exports: Vec::new() }, "not_found"),
            (ClientError::TlsMismatch { peer: peer(), what }, "permission_denied"),
            (ClientError::Unusable { peer: peer(), name: text(), what: text() }, "unsupported"),
            (request(ErrorCode::ENOSPC), "no_space"),
            (request(ErrorCode::EPERM), "permission_denied"),
            (request(ErrorCode::EINVAL), "invalid_input"),
            (request(ErrorCode::EIO), "io"),
        ] {
            assert_eq!(error.code().as_str(), code, "{error:?}");
        }
    }
}
