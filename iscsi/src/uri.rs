//! iSCSI URIs: `iscsi://[USER@]HOST[:PORT][/TARGET[/LUN]]`, as QEMU and libiscsi write them, and
//! `iscsi+unix:///TARGET/LUN?socket=PATH`, which only Diskwright's target serves.
//!
//! Without a target the discovery session is asked, and must know exactly one. Without a logical
//! unit the target must have exactly one. A secret is never in the URI, because every user of the
//! machine sees the arguments of commands: `?secrets=FILE` names a file. [`fmt::Display`] prints an
//! equivalent URI.

use crate::wire::{DEFAULT_PORT, check_name};
use diskwright_store::Endpoint;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use std::{ffi::OsStr, fmt, os::unix::ffi::OsStrExt, path::PathBuf};

/// Characters that are not percent-encoded.
const PLAIN: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/').remove(b':');

/// Logical units that can be addressed.
const UNITS: u16 = 1 << 14;

/// A logical unit of a target, and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IscsiUri {
    /// Where the target listens.
    pub endpoint: Endpoint,
    /// The iSCSI name of the target.
    pub target: Option<String>,
    /// The logical unit.
    pub unit: Option<u16>,
    /// The name with which this initiator proves who it is.
    pub user: Option<String>,
    /// The file with its secret.
    pub secrets: Option<PathBuf>,
    /// The iSCSI name of this initiator. [default: that of /etc/iscsi/initiatorname.iscsi, or one
    /// of this machine]
    pub initiator: Option<String>,
    /// Whether headers have a digest.
    pub header_digest: bool,
    /// Whether data have a digest.
    pub data_digest: bool,
}

/// Why a text is not a valid iSCSI URI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{uri}: {what}; write for example iscsi://host/iqn.2026-11.org.example:disks/0")]
pub struct UriError {
    uri: String,
    what: String,
}

impl IscsiUri {
    /// Whether a text looks like an iSCSI URI, valid or not.
    pub fn looks_like(text: &OsStr) -> bool {
        let scheme = text.as_bytes().split(|&byte| byte == b':').next().unwrap_or_default();
        text.len() > scheme.len()
            && [&b"iscsi"[..], b"iscsi+unix"].iter().any(|known| scheme.eq_ignore_ascii_case(known))
    }

    /// A logical unit at an endpoint.
    pub fn at(endpoint: Endpoint, target: &str, unit: u16) -> Self {
        Self {
            endpoint,
            target: Some(target.to_owned()),
            unit: Some(unit),
            user: None,
            secrets: None,
            initiator: None,
            header_digest: false,
            data_digest: false,
        }
    }

    /// Parses a URI.
    ///
    /// # Errors
    /// What is wrong with the URI, with an example of a valid one. If it may hold a password, it is
    /// not repeated.
    pub fn parse(text: &str) -> Result<Self, UriError> {
        parse(text).map_err(|what| {
            let uri = if text.contains('@') { "the iSCSI URI".to_owned() } else { text.to_owned() };
            UriError { uri, what }
        })
    }
}

fn decoded(text: &str) -> Result<String, String> {
    let text = percent_decode_str(text).decode_utf8();
    text.map(String::from).map_err(|_| "it has bytes that are not UTF-8".to_owned())
}

fn checked_name(text: &str) -> Result<String, String> {
    check_name(text).map(|()| text.to_owned()).map_err(|reason| format!("{text:?} is not an iSCSI name: {reason}"))
}

fn parse(text: &str) -> Result<IscsiUri, String> {
    let (scheme, rest) = text.split_once("://").ok_or("there is no :// in it")?;
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = place.split_once('/').unwrap_or((place, ""));
    let (user, authority) = match authority.rsplit_once('@') {
        Some((user, _)) if user.contains([':', '%']) => {
            return Err("a password in a URI can be seen by every user of the machine; put it into a file and write \
                        ?secrets=FILE"
                .into());
        }
        Some((user, authority)) => (Some(user.to_owned()).filter(|user| !user.is_empty()), authority),
        None => (None, authority),
    };
    let path = decoded(path)?;
    let (target, unit) = path.split_once('/').map_or((&*path, None), |(target, unit)| (target, Some(unit)));
    let target = if target.is_empty() { None } else { Some(checked_name(target)?) };
    let unit = match unit.filter(|unit| !unit.is_empty()) {
        Some(unit) => {
            let number = unit.parse().ok().filter(|&unit| unit < UNITS);
            Some(number.ok_or_else(|| format!("{unit:?} is not the number of a logical unit (0 to 16383)"))?)
        }
        None => None,
    };
    let endpoint = Endpoint::Unix(PathBuf::new());
    let mut uri = IscsiUri { endpoint, target, unit, user, ..IscsiUri::at(Endpoint::Unix(PathBuf::new()), "", 0) };
    let mut socket = None;
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let value = decoded(value)?;
        match name {
            "secrets" if !value.is_empty() => uri.secrets = Some(value.into()),
            "initiator" => uri.initiator = Some(checked_name(&value)?),
            "header-digest" if value.is_empty() => uri.header_digest = true,
            "data-digest" if value.is_empty() => uri.data_digest = true,
            "socket" => socket = Some(value),
            _ => return Err(format!("the parameter {name:?} is not known, or its value is not valid")),
        }
    }
    uri.endpoint = if scheme.eq_ignore_ascii_case("iscsi+unix") {
        match socket {
            Some(path) if authority.is_empty() => Endpoint::Unix(path.into()),
            _ => return Err("a unix socket is named by ?socket=PATH, and has no host".into()),
        }
    } else if scheme.eq_ignore_ascii_case("iscsi") && socket.is_none() {
        Endpoint::of_authority(authority, DEFAULT_PORT)?
    } else {
        return Err("the scheme must be iscsi, or iscsi+unix with a socket".into());
    };
    Ok(uri)
}

impl fmt::Display for IscsiUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parameters = Vec::new();
        let user = self.user.as_ref().map(|user| format!("{user}@")).unwrap_or_default();
        match &self.endpoint {
            Endpoint::Tcp { .. } => write!(f, "iscsi://{user}{}/", self.endpoint)?,
            Endpoint::Unix(path) => {
                write!(f, "iscsi+unix://{user}/")?;
                parameters.push(format!("socket={}", utf8_percent_encode(&path.to_string_lossy(), PLAIN)));
            }
        }
        f.write_str(self.target.as_deref().unwrap_or_default())?;
        if let Some(unit) = self.unit {
            write!(f, "/{unit}")?;
        }
        let secrets = self.secrets.as_ref().map(|path| path.to_string_lossy());
        parameters.extend(secrets.map(|path| format!("secrets={}", utf8_percent_encode(&path, PLAIN))));
        parameters.extend(self.initiator.as_ref().map(|name| format!("initiator={name}")));
        for (is_set, name) in [(self.header_digest, "header-digest"), (self.data_digest, "data-digest")] {
            parameters.extend(is_set.then(|| name.to_owned()));
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
            ("iscsi://host", "iscsi://host:3260/"),
            ("ISCSI://[::1]:7/", "iscsi://[::1]:7/"),
            (
                "iscsi://10.0.0.5/iqn.2026-11.org.example:disks/3",
                "iscsi://10.0.0.5:3260/iqn.2026-11.org.example:disks/3",
            ),
            (
                "iscsi://me@h/eui.02004567a425678d/?data-digest&secrets=/a%20b",
                "iscsi://me@h:3260/eui.02004567a425678d?secrets=/a%20b&data-digest",
            ),
            (
                "iscsi+unix:///iqn.2026-11.org.example:a/0?socket=/run/a%20b&header-digest&initiator=iqn.2026-11.org.example:i",
                "iscsi+unix:///iqn.2026-11.org.example:a/0?socket=/run/a%20b&initiator=iqn.2026-11.org.example:i&header-digest",
            ),
            ("iscsi+unix://me@/?socket=/s", "iscsi+unix://me@/?socket=/s"),
        ] {
            assert!(IscsiUri::looks_like(text.as_ref()));
            let uri = IscsiUri::parse(text).unwrap();
            assert_eq!(uri.to_string(), printed);
            assert_eq!(IscsiUri::parse(printed).unwrap(), uri);
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, what) in [
            ("iscsi:host", "no ://"),
            ("iscsi:///iqn.2026-11.org.example:disks", "names no host"),
            ("iscsi://host:x", "not a port"),
            ("iscsi://host/disks", "not an iSCSI name"),
            ("iscsi://host/iqn.2026-11.org.example:disks/x", "not the number of a logical unit"),
            ("iscsi://host/iqn.2026-11.org.example:disks/16384", "not the number of a logical unit"),
            ("iscsi://host?tls", "not known"),
            ("iscsi://host?secrets", "not valid"),
            ("iscsi://host?socket=/a", "the scheme must be"),
            ("iscsi+unix:///", "?socket=PATH"),
            ("iscsi://host/%ff", "not UTF-8"),
        ] {
            let error = IscsiUri::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(text) && error.contains(what), "{error}");
        }
        for text in ["iscsi://me%hidden@host", "iscsi://me:hidden@host"] {
            let error = IscsiUri::parse(text).unwrap_err().to_string();
            assert!(error.contains("?secrets=FILE") && !error.contains("hidden"), "{error}");
        }
        assert!(!IscsiUri::looks_like("iscsi".as_ref()) && !IscsiUri::looks_like("iscsiX://h".as_ref()));
    }
}
