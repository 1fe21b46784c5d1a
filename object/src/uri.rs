//! The names of objects: `s3://BUCKET/KEY`, `https://HOST/PATH` and, to this machine, `http://`.
//!
//! A name may end in a version, `#etag=ETAG&size=BYTES`, and then leads to no other version. With
//! `&seal=ROOT` each block is proved by the seal with this root (`seal.rs`). Images record their
//! parent so ([`ObjectUri::of_version`]).
//!
//! A URL may have secrets: a user with a password, or a query with a signature. They are never part
//! of a name that is shown or recorded. [`ObjectUri::name`] is the name without them.

use crate::{
    error::{ObjectError, Result},
    repository::{Digest, hex, unhex},
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC};
use std::{fmt, path::Path};

/// How an object is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// A bucket of an S3 server.
    S3,
    /// A web server, encrypted.
    Https,
    /// A web server.
    Http,
}

impl Scheme {
    /// How names begin.
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::S3 => "s3://",
            Self::Https => "https://",
            Self::Http => "http://",
        }
    }
}

/// What authorises the reading of a URL.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct UrlSecrets {
    /// User and password.
    pub(crate) user: Option<(String, String)>,
    /// The query, without the question mark.
    pub(crate) query: Option<String>,
}

impl UrlSecrets {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.user.is_none() && self.query.is_none()
    }
}

impl fmt::Debug for UrlSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_empty() { "no secrets" } else { "secrets" })
    }
}

/// What is escaped of an ETag.
const ETAG_ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b':');

/// How a version begins at the end of a name.
const PINNED: &str = "#etag=";
const SEALED: &str = "&seal=";

/// The version that a name leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pinned {
    pub(crate) etag: String,
    pub(crate) size_bytes: u64,
    /// The root of its seal.
    pub(crate) seal: Option<Digest>,
}

impl Pinned {
    /// Splits a version off the end of a name.
    fn split(text: &str) -> Result<(&str, Option<Self>), &'static str> {
        let Some((rest, pinned)) = text.rsplit_once(PINNED) else { return Ok((text, None)) };
        let (etag, size) = pinned.split_once("&size=").ok_or("its version is not #etag=ETAG&size=BYTES")?;
        let (size, seal) = size.split_once(SEALED).map_or((size, None), |(size, seal)| (size, Some(seal)));
        let size_bytes = size.parse().map_err(|_| "the size in its version is not a number")?;
        let seal = seal.map(|seal| unhex(seal).ok_or("the seal in its version is no SHA-256 digest"));
        Ok((rest, Some(Self { etag: decoded(etag), size_bytes, seal: seal.transpose()? })))
    }
}

/// The name of an object; see the module documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectUri {
    scheme: Scheme,
    /// The bucket, or the host with its port.
    host: String,
    /// The key or the path, without a slash at its start. As the user wrote it: the path of a URL
    /// is percent-encoded, a key is not.
    key: String,
    pinned: Option<Pinned>,
    secrets: UrlSecrets,
}

impl ObjectUri {
    /// Reads a name. `.` and `..` are resolved, so that the parent of an image may be named
    /// relative to it.
    ///
    /// # Errors
    /// [`ObjectError::BadName`].
    pub fn parse(path: &Path) -> Result<Self> {
        let bad = |why| ObjectError::BadName { name: shown(path), why };
        let text = path.to_str().ok_or_else(|| bad("it is not UTF-8"))?;
        let schemes = [Scheme::S3, Scheme::Https, Scheme::Http];
        let found = schemes.into_iter().find_map(|scheme| Some((scheme, text.strip_prefix(scheme.prefix())?)));
        let (scheme, rest) = found.ok_or_else(|| bad("expected s3://BUCKET/KEY or https://HOST/PATH"))?;
        if rest.chars().any(|letter| letter.is_control()) {
            return Err(bad("it has control characters"));
        }
        let (rest, pinned) = Pinned::split(rest).map_err(bad)?;
        let (rest, query) = match rest.split_once('?') {
            // A key may have a question mark.
            Some((rest, query)) if scheme != Scheme::S3 => (rest, Some(query.to_owned())),
            _ => (rest, None),
        };
        if scheme != Scheme::S3 && (rest.contains('#') || query.as_deref().is_some_and(|query| query.contains('#'))) {
            return Err(bad("it has a fragment (#), which means nothing here"));
        }
        let (host, key) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, host) = match host.rsplit_once('@') {
            Some((user, host)) if scheme != Scheme::S3 => (Some(user), host),
            _ => (None, host),
        };
        let user = user.map(|user| user.split_once(':').unwrap_or((user, "")));
        let user = user.map(|(name, password)| (decoded(name), decoded(password)));
        if host.is_empty() || host.contains(|letter: char| letter.is_whitespace() || "\\@<>\"".contains(letter)) {
            return Err(bad(match scheme {
                Scheme::S3 => "it has no bucket: expected s3://BUCKET/KEY",
                _ => "it has no host: expected https://HOST/PATH",
            }));
        }
        let mut parts: Vec<&str> = Vec::new();
        for part in key.split('/') {
            match part {
                "." => {}
                ".." => drop(parts.pop().ok_or_else(|| bad("its path leads above the host"))?),
                "" if parts.is_empty() => {}
                part => parts.push(part),
            }
        }
        let host = if scheme == Scheme::S3 { host.to_owned() } else { host.to_ascii_lowercase() };
        Ok(Self { scheme, host, key: parts.join("/"), pinned, secrets: UrlSecrets { user, query } })
    }

    /// How it is reached.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The bucket, or the host with its port.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The key or path, without a slash at its start.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The name without secrets and without a version.
    pub fn name(&self) -> String {
        format!("{}{}/{}", self.scheme.prefix(), self.host, self.key)
    }

    /// The name without secrets, with the version if it has one.
    pub(crate) fn canonical(&self) -> String {
        self.pinned.as_ref().map_or_else(|| self.name(), |pinned| self.of_version(pinned))
    }

    /// The name of a version.
    pub(crate) fn of_version(&self, version: &Pinned) -> String {
        let etag = percent_encoding::utf8_percent_encode(&version.etag, ETAG_ESCAPED);
        let seal = version.seal.map(|seal| format!("{SEALED}{}", hex(&seal))).unwrap_or_default();
        format!("{}{PINNED}{etag}&size={}{seal}", self.name(), version.size_bytes)
    }

    /// The version that it leads to.
    pub(crate) fn pinned(&self) -> Option<&Pinned> {
        self.pinned.as_ref()
    }

    pub(crate) fn secrets(&self) -> &UrlSecrets {
        &self.secrets
    }

    /// The same object with these secrets.
    pub(crate) fn with_secrets(self, secrets: UrlSecrets) -> Self {
        Self { secrets, ..self }
    }

    /// An object in the same folder, or in one below it. A query is a signature of one object, so
    /// it is left out.
    pub(crate) fn beside(&self, key: &str) -> Self {
        let folder = self.key.rsplit_once('/').map_or("", |(folder, _)| folder);
        let key = if folder.is_empty() { key.to_owned() } else { format!("{folder}/{key}") };
        Self { key, pinned: None, secrets: UrlSecrets { query: None, ..self.secrets.clone() }, ..self.clone() }
    }

    /// Whether the host is this machine.
    pub fn is_loopback(&self) -> bool {
        self.scheme != Scheme::S3 && is_loopback(&self.host)
    }
}

/// Whether a host, with or without its port, is this machine.
pub(crate) fn is_loopback(host: &str) -> bool {
    let bare = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    bare.eq_ignore_ascii_case("localhost") || bare.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}

fn decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// A name for a message, without what may be secret in it.
pub(crate) fn shown(path: &Path) -> String {
    let text = path.to_string_lossy();
    let Some((scheme, rest)) = text.split_once("://") else { return text.into_owned() };
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let (host, key) = rest.split_once('/').map_or((rest, None), |(host, key)| (host, Some(key)));
    let host = host.rsplit('@').next().unwrap_or_default();
    match key {
        Some(key) => format!("{scheme}://{host}/{key}"),
        None => format!("{scheme}://{host}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ObjectUri> {
        ObjectUri::parse(Path::new(text))
    }

    #[test]
    fn names_are_split_and_paths_resolved() {
        let uri = parse("s3://golden/win/2022 base?.vhdx").unwrap();
        assert_eq!((uri.scheme(), uri.host(), uri.key()), (Scheme::S3, "golden", "win/2022 base?.vhdx"));
        let uri = parse("https://Example.com:8443/a/./b/../c.vhdx").unwrap();
        assert_eq!((uri.host(), uri.key()), ("example.com:8443", "a/c.vhdx"));
        assert_eq!(uri.name(), "https://example.com:8443/a/c.vhdx");
        for (bad, why) in [
            ("s3://", "no bucket"),
            ("https:///x", "no host"),
            ("https://h/../x", "above the host"),
            ("https://h/x#y", "fragment"),
            ("ftp://h/x", "expected s3://"),
            ("https://h/x\ny", "control"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    #[test]
    fn a_version_is_part_of_a_name_and_read_back() {
        let uri = parse("https://me:pass@host/a%20b.vhdx?sig=SECRET").unwrap();
        let mut version = Pinned { etag: "\"d41d8cd9-2&size=3#\"".into(), size_bytes: 1 << 20, seal: None };
        let named = uri.of_version(&version);
        assert_eq!(named, "https://host/a%20b.vhdx#etag=%22d41d8cd9-2%26size%3D3%23%22&size=1048576");
        let read = parse(&named).unwrap();
        assert_eq!((read.name(), read.canonical()), (uri.name(), named));
        assert_eq!(read.pinned(), Some(&version));
        version.seal = Some([0xa5; 32]);
        let named = uri.of_version(&version);
        assert!(named.ends_with(&format!("&size=1048576&seal={}", "a5".repeat(32))), "{named}");
        assert_eq!(parse(&named).unwrap().pinned(), Some(&version));
        assert_eq!(
            (read.beside("c").canonical(), parse("s3://b/x#y").unwrap().key()),
            ("https://host/c".into(), "x#y")
        );
        for (bad, why) in [
            ("s3://b/x#etag=1", "#etag=ETAG&size=BYTES"),
            ("s3://b/x#etag=1&size=x", "not a number"),
            ("s3://b/x#etag=1&size=1&seal=a5", "no SHA-256"),
        ] {
            assert!(parse(bad).unwrap_err().to_string().contains(why), "{bad}");
        }
    }

    #[test]
    fn secrets_are_kept_and_never_shown() {
        let uri = parse("https://me:p%40ss@host/x.vhdx?sig=SECRET").unwrap();
        assert_eq!(uri.secrets().user, Some(("me".into(), "p@ss".into())));
        assert_eq!(uri.secrets().query.as_deref(), Some("sig=SECRET"));
        let bad = parse("https://me:p%40ss@host/../x?sig=SECRET").unwrap_err();
        for shown in [uri.name(), format!("{uri:?}"), bad.to_string(), format!("{bad:?}")] {
            assert!(!shown.contains("SECRET") && !shown.contains("p%40ss") && !shown.contains("p@ss"), "{shown}");
        }
    }

    #[test]
    fn this_machine_is_known() {
        for (host, is) in [
            ("localhost:80", true),
            ("127.0.0.1", true),
            ("127.8.8.8:9000", true),
            ("[::1]:80", true),
            ("localhost.example.com", false),
            ("10.0.2.2", false),
            ("[::2]:80", false),
        ] {
            assert_eq!(is_loopback(host), is, "{host}");
        }
    }
}
