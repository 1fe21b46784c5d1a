//! What can go wrong between a client and its server.

use crate::{
    tls::TlsError,
    uri::UriError,
    wire::{Command, ErrorCode, OptionCode, ReplyCode, WireError},
};
use std::{io, sync::Arc};

/// Result of a client's operation.
pub type Result<T, E = ClientError> = std::result::Result<T, E>;

/// Why an export cannot be reached, or a request to it failed. `peer` is the server, as in
/// [`Endpoint`](crate::uri::Endpoint).
#[derive(Debug, Clone, thiserror::Error)]
pub enum ClientError {
    /// The URI is none.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// Certificates.
    #[error("{peer}: cannot prepare TLS: {source}")]
    Certificates {
        /// The server.
        peer: String,
        /// What is wrong.
        source: Arc<TlsError>,
    },
    /// Nobody there.
    #[error("{peer}: cannot connect: {source}; is the server running, and does it listen there?")]
    Connect {
        /// The server.
        peer: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The connection broke.
    #[error(
        "{peer}: the connection broke while {doing}: {source}; look at the server's log (?reconnect in the URI makes the connection anew by itself)"
    )]
    Lost {
        /// The server.
        peer: String,
        /// What was under way.
        doing: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// TLS failed.
    #[error("{peer}: TLS failed: {source}; the certificates of both sides must fit together, and name this host")]
    Tls {
        /// The server.
        peer: String,
        /// What rustls said.
        source: rustls::Error,
    },
    /// A message that cannot be.
    #[error("{peer}: while {doing}: {source}; this is no NBD server, or a broken one")]
    Wire {
        /// The server.
        peer: String,
        /// What was under way.
        doing: String,
        /// What is wrong with the message.
        source: WireError,
    },
    /// A message that is well-formed and yet wrong.
    #[error(
        "{peer}: the server broke the protocol: {what}; the connection was ended, its contents are not to be trusted"
    )]
    Protocol {
        /// The server.
        peer: String,
        /// What it did.
        what: String,
    },
    /// The server sent nothing for too long.
    #[error(
        "{peer}: the server sent nothing for {seconds} s while {doing}; if it is only slow, allow it more with ?timeout=SECONDS in the URI"
    )]
    Stalled {
        /// The server.
        peer: String,
        /// What was under way.
        doing: String,
        /// For how long.
        seconds: f64,
    },
    /// The export is not there.
    #[error("{peer}: there is no export {name:?}{}", others(exports))]
    UnknownExport {
        /// The server.
        peer: String,
        /// What was asked for.
        name: String,
        /// What there is instead, as far as the server tells.
        exports: Vec<String>,
    },
    /// TLS is wanted and was not asked for, or the other way round.
    #[error("{peer}: {what}")]
    TlsMismatch {
        /// The server.
        peer: String,
        /// Which, and what to do.
        what: &'static str,
    },
    /// An option was refused.
    #[error("{peer}: the server refuses {option}: {code}{}", words(message))]
    Refused {
        /// The server.
        peer: String,
        /// Which option.
        option: OptionCode,
        /// Why.
        code: ReplyCode,
        /// The server's own words.
        message: String,
    },
    /// The export cannot be used as a disk.
    #[error("{peer}: the export {name:?} cannot be used: {what}")]
    Unusable {
        /// The server.
        peer: String,
        /// The export.
        name: String,
        /// Why.
        what: String,
    },
    /// After reconnecting, the export is another one.
    #[error("{peer}: after reconnecting the export {name:?} is not the same: {what}; nothing more was sent to it")]
    Changed {
        /// The server.
        peer: String,
        /// The export.
        name: String,
        /// What differs.
        what: String,
    },
    /// The server failed a request.
    #[error(
        "{peer}: the server answered {command} of {len_bytes} bytes at {offset_bytes} with {code}{}",
        words(message)
    )]
    Request {
        /// The server.
        peer: String,
        /// What was asked for.
        command: Command,
        /// Where.
        offset_bytes: u64,
        /// How much.
        len_bytes: u64,
        /// Why.
        code: ErrorCode,
        /// The server's own words.
        message: String,
    },
    /// Reconnecting was in vain.
    #[error("{peer}: could not be reached again within {seconds} s; the last failure: {last}")]
    GaveUp {
        /// The server.
        peer: String,
        /// How long it was tried.
        seconds: f64,
        /// Why the last try failed.
        last: Box<ClientError>,
    },
}

fn others(exports: &[String]) -> String {
    match exports {
        [] => {
            "; ask the server's keeper for its name (nbdinfo --list URI shows the names, where the server tells them)"
                .into()
        }
        _ => format!("; there are: {}", exports.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")),
    }
}

fn words(message: &str) -> String {
    // The server's words go to a terminal.
    let printable: String = message.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    if printable.is_empty() { printable } else { format!(" ({printable})") }
}

impl ClientError {
    /// The kind of `io::Error` that it is.
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
        }
    }

    /// Why it failed, for programs to match. What the server calls a request's failure is taken by
    /// the kind of its NBD error number.
    pub fn code(&self) -> diskwright_store::ErrorCode {
        use diskwright_store::ErrorCode as Code;
        match self {
            Self::Uri(_) | Self::Certificates { .. } => Code::InvalidInput,
            Self::Connect { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => Code::PermissionDenied,
            Self::Connect { .. } | Self::Lost { .. } | Self::Stalled { .. } | Self::GaveUp { .. } => Code::Connection,
            Self::Tls { .. } | Self::Wire { .. } | Self::Protocol { .. } | Self::Changed { .. } => Code::Protocol,
            Self::UnknownExport { .. } => Code::NotFound,
            Self::TlsMismatch { .. } => Code::PermissionDenied,
            Self::Unusable { .. } => Code::Unsupported,
            Self::Refused { .. } | Self::Request { .. } => Code::of_system(&self.kind().into()),
        }
    }

    /// Whether making the connection anew may help. It does not where the server says the same
    /// again, or lies.
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
