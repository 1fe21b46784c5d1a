//! NVMe URIs: `nvme://HOST[:PORT][/NQN][?nsid=N]`, and `nvme+unix:///NQN?socket=PATH`, which only
//! Diskwright's target serves.
//!
//! Without an NQN the discovery subsystem is asked, and must know exactly one. Without `nsid` the
//! subsystem must have exactly one namespace. [`fmt::Display`] prints an equivalent URI.

use crate::wire::{DEFAULT_PORT, Digests, check_nqn};
use diskwright_store::Endpoint;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use std::{ffi::OsStr, fmt, os::unix::ffi::OsStrExt, path::PathBuf};

/// Characters that are not percent-encoded.
const PLAIN: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/').remove(b':').remove(b'@');

/// A namespace of a target, and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeUri {
    /// Where the target listens.
    pub endpoint: Endpoint,
    /// NQN of the subsystem.
    pub subsystem: Option<String>,
    /// The namespace.
    pub nsid: Option<u32>,
    /// NQN that this host shows. [default: that of /etc/nvme/hostnqn, or one of this machine]
    pub host_nqn: Option<String>,
    /// The file with the secret by which the host proves who it is.
    pub secrets: Option<PathBuf>,
    /// The digests that are asked for.
    pub digests: Digests,
}

/// Why a text is not a valid NVMe URI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{uri}: {what}; write for example nvme://host/nqn.2026-01.org.example:disks?nsid=1")]
pub struct UriError {
    uri: String,
    what: String,
}

impl NvmeUri {
    /// Whether a text looks like an NVMe URI, valid or not.
    pub fn looks_like(text: &OsStr) -> bool {
        let scheme = text.as_bytes().split(|&byte| byte == b':').next().unwrap_or_default();
        text.len() > scheme.len() && [&b"nvme"[..], b"nvme+unix"].iter().any(|known| scheme.eq_ignore_ascii_case(known))
    }

    /// A namespace at an endpoint.
    pub fn at(endpoint: Endpoint, subsystem: &str, nsid: u32) -> Self {
        let digests = Digests::empty();
        let (subsystem, nsid) = (Some(subsystem.to_owned()), Some(nsid));
        Self { endpoint, subsystem, nsid, host_nqn: None, secrets: None, digests }
    }

    /// Parses a URI.
    ///
    /// # Errors
    /// What is wrong with the URI, with an example of a valid one.
    pub fn parse(text: &str) -> Result<Self, UriError> {
        parse(text).map_err(|what| UriError { uri: text.to_owned(), what })
    }
}

fn decoded(text: &str) -> Result<String, String> {
    let text = percent_decode_str(text).decode_utf8();
    text.map(String::from).map_err(|_| "it has bytes that are not UTF-8".to_owned())
}

fn checked_nqn(text: &str) -> Result<String, String> {
    check_nqn(text).map(|()| text.to_owned()).map_err(|reason| format!("{text:?} is not an NQN: {reason}"))
}

fn parse(text: &str) -> Result<NvmeUri, String> {
    let (scheme, rest) = text.split_once("://").ok_or("there is no :// in it")?;
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = place.split_once('/').unwrap_or((place, ""));
    let path = decoded(path)?;
    let subsystem = if path.is_empty() { None } else { Some(checked_nqn(&path)?) };
    let (mut nsid, mut host_nqn, mut digests, mut socket) = (None, None, Digests::empty(), None);
    let mut secrets = None;
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let value = decoded(value)?;
        match name {
            "nsid" => {
                let wrong = || format!("{value:?} is not the id of a namespace");
                nsid = Some(value.parse().ok().filter(|&nsid| nsid > 0 && nsid < u32::MAX).ok_or_else(wrong)?);
            }
            "host-nqn" => host_nqn = Some(checked_nqn(&value)?),
            "secrets" if !value.is_empty() => secrets = Some(PathBuf::from(value)),
            "header-digest" if value.is_empty() => digests |= Digests::HEADER,
            "data-digest" if value.is_empty() => digests |= Digests::DATA,
            "socket" => socket = Some(value),
            _ => return Err(format!("the parameter {parameter:?} is not known")),
        }
    }
    let endpoint = if scheme.eq_ignore_ascii_case("nvme+unix") {
        match socket {
            Some(path) if authority.is_empty() => Endpoint::Unix(path.into()),
            _ => return Err("a unix socket is named by ?socket=PATH, and has no host".into()),
        }
    } else if scheme.eq_ignore_ascii_case("nvme") && socket.is_none() {
        Endpoint::of_authority(authority, DEFAULT_PORT)?
    } else {
        return Err("the scheme must be nvme, or nvme+unix with a socket".into());
    };
    Ok(NvmeUri { endpoint, subsystem, nsid, host_nqn, secrets, digests })
}

impl fmt::Display for NvmeUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parameters = Vec::new();
        match &self.endpoint {
            Endpoint::Tcp { .. } => write!(f, "nvme://{}/", self.endpoint)?,
            Endpoint::Unix(path) => {
                f.write_str("nvme+unix:///")?;
                parameters.push(format!("socket={}", utf8_percent_encode(&path.to_string_lossy(), PLAIN)));
            }
        }
        write!(f, "{}", utf8_percent_encode(self.subsystem.as_deref().unwrap_or_default(), PLAIN))?;
        parameters.extend(self.nsid.map(|nsid| format!("nsid={nsid}")));
        parameters.extend(self.host_nqn.as_ref().map(|nqn| format!("host-nqn={}", utf8_percent_encode(nqn, PLAIN))));
        let secrets = self.secrets.as_ref().map(|path| path.to_string_lossy());
        parameters.extend(secrets.map(|path| format!("secrets={}", utf8_percent_encode(&path, PLAIN))));
        for (digest, name) in [(Digests::HEADER, "header-digest"), (Digests::DATA, "data-digest")] {
            parameters.extend(self.digests.contains(digest).then(|| name.to_owned()));
        }
        for (index, parameter) in parameters.iter().enumerate() {
            write!(f, "{}{parameter}", if index == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_read_and_printed() {
        for (text, printed) in [
            ("nvme://host", "nvme://host:4420/"),
            ("NVME://[::1]:7/", "nvme://[::1]:7/"),
            (
                "nvme://10.0.0.5/nqn.2026-01.org.example:disks?nsid=3&data-digest&secrets=/a%20b",
                "nvme://10.0.0.5:4420/nqn.2026-01.org.example:disks?nsid=3&secrets=/a%20b&data-digest",
            ),
            (
                "nvme+unix:///nqn.2026-01.org.example:a%2Bb?socket=/run/a%20b&header-digest&host-nqn=nqn.2026-01.org.example:h",
                "nvme+unix:///nqn.2026-01.org.example:a%2Bb?socket=/run/a%20b&host-nqn=nqn.2026-01.org.example:h&header-digest",
            ),
        ] {
            assert!(NvmeUri::looks_like(text.as_ref()));
            let uri = NvmeUri::parse(text).unwrap();
            assert_eq!(uri.to_string(), printed);
            assert_eq!(NvmeUri::parse(printed).unwrap(), uri);
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, what) in [
            ("nvme:host", "no ://"),
            ("nvme:///nqn.2026-01.org.example:disks", "names no host"),
            ("nvme://host:x", "not a port"),
            ("nvme://[::1", "] after the IPv6 address"),
            ("nvme://host/disks", "not an NQN"),
            ("nvme://host?nsid=0", "not the id of a namespace"),
            ("nvme://host?tls", "not known"),
            ("nvme://host?secrets", "not known"),
            ("nvme://host?socket=/a", "the scheme must be"),
            ("nvme+unix:///", "?socket=PATH"),
            ("nvme://host/%ff", "not UTF-8"),
        ] {
            let error = NvmeUri::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(text) && error.contains(what), "{error}");
        }
        assert!(!NvmeUri::looks_like("nvme".as_ref()) && !NvmeUri::looks_like("nvmeX://h".as_ref()));
    }
}
