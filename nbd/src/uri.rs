//! NBD URIs: `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`, and `nbds` for the same
//! over TLS.
//!
//! The form is that of <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/uri.md>, with the
//! parameters that libnbd added for certificates, and three of our own: `timeout`, `reconnect` and
//! `connections`. An unknown parameter is an error, because a misspelled `tls-hostname` must not be
//! ignored. [`fmt::Display`] prints an equivalent URI.

use crate::wire::{DEFAULT_PORT, STRING_BYTES_MAX};
pub use diskwright_store::Endpoint;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use std::{
    ffi::OsStr,
    fmt,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    time::Duration,
};

/// Maximum number of connections in a URI.
const CONNECTIONS_MAX: usize = 64;

/// Characters that are not percent-encoded in a path or a parameter.
const PLAIN: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/').remove(b':').remove(b'@');

/// TLS options.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsParameters {
    /// The folder with `ca-cert.pem` and, if the server verifies clients, `client-cert.pem` and
    /// `client-key.pem`.
    pub certificates: Option<PathBuf>,
    /// The name in the server's certificate, if it differs from the host.
    pub hostname: Option<String>,
    /// Do not verify the server's certificate.
    pub trust_anyone: bool,
}

/// An export of a server, and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdUri {
    /// Where the server listens.
    pub endpoint: Endpoint,
    /// The name of the export; empty for the server's default export.
    pub export: String,
    /// TLS options if TLS is required; `None` for an unencrypted connection.
    pub tls: Option<TlsParameters>,
    /// How long the server may send nothing while it owes an answer; zero for no limit. [default:
    /// [`NbdUri::TIMEOUT_DEFAULT`]]
    pub timeout: Option<Duration>,
    /// How long to try to reconnect when the connection breaks; `None` to fail immediately.
    pub reconnect: Option<Duration>,
    /// Maximum number of connections, if the server allows several. [default:
    /// [`NbdUri::CONNECTIONS_DEFAULT`]]
    pub connections: Option<usize>,
}

/// Why a text is not a valid NBD URI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{uri}: {what}; write for example nbd://host/export or nbd+unix:///export?socket=/run/nbd.sock")]
pub struct UriError {
    uri: String,
    what: String,
}

impl NbdUri {
    /// Default of [`timeout`](Self::timeout).
    pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(300);

    /// Default of [`connections`](Self::connections).
    pub const CONNECTIONS_DEFAULT: usize = 4;

    /// How long `?reconnect` without a value tries to reconnect.
    pub const RECONNECT_DEFAULT: Duration = Duration::from_secs(300);

    /// Whether a text looks like an NBD URI, valid or not.
    pub fn looks_like(text: &OsStr) -> bool {
        let scheme = text.as_bytes().split(|&byte| byte == b':').next().unwrap_or_default();
        text.len() > scheme.len()
            && [&b"nbd"[..], b"nbds", b"nbd+unix", b"nbds+unix", b"nbd+tcp", b"nbds+tcp", b"nbd+vsock", b"nbds+vsock"]
                .iter()
                .any(|known| scheme.eq_ignore_ascii_case(known))
    }

    /// An export over a unix socket, without TLS.
    pub fn unix(socket: impl AsRef<Path>, export: &str) -> Self {
        Self::plain(Endpoint::Unix(socket.as_ref().to_owned()), export)
    }

    /// An export over TCP, without TLS.
    pub fn tcp(host: &str, port: u16, export: &str) -> Self {
        Self::plain(Endpoint::Tcp { host: host.to_owned(), port }, export)
    }

    fn plain(endpoint: Endpoint, export: &str) -> Self {
        Self { endpoint, export: export.to_owned(), tls: None, timeout: None, reconnect: None, connections: None }
    }

    /// Parses a URI.
    ///
    /// # Errors
    /// What is wrong with the URI, with an example of a valid one.
    pub fn parse(text: &str) -> Result<Self, UriError> {
        parse(text).map_err(|what| UriError { uri: text.to_owned(), what })
    }
}

impl std::str::FromStr for NbdUri {
    type Err = UriError;
    fn from_str(text: &str) -> Result<Self, UriError> {
        Self::parse(text)
    }
}

fn parse(text: &str) -> Result<NbdUri, String> {
    let (scheme, rest) = text.split_once("://").ok_or("it contains no \"://\"")?;
    let (has_tls, is_unix) = match scheme.to_ascii_lowercase().as_str() {
        "nbd" | "nbd+tcp" => (false, false),
        "nbds" | "nbds+tcp" => (true, false),
        "nbd+unix" => (false, true),
        "nbds+unix" => (true, true),
        _ => return Err(format!("the scheme {scheme} is none of nbd, nbds, nbd+unix and nbds+unix")),
    };
    if rest.contains('#') {
        return Err("it contains \"#\", which NBD URIs do not support (in a name, write %23)".into());
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let export = decoded(path)?;
    if export.len() > STRING_BYTES_MAX || export.contains('\0') {
        return Err("the name of the export is longer than 4096 bytes or contains a zero byte".into());
    }
    let mut found = Parameters::default();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').map_or((pair, None), |(key, value)| (key, Some(value)));
        found.take(key, value)?;
    }
    if !has_tls && let Some(key) = found.tls_key {
        return Err(format!("{key} needs TLS; use the scheme {}", if is_unix { "nbds+unix" } else { "nbds" }));
    }
    let endpoint = if is_unix {
        if !authority.is_empty() {
            return Err(format!("a unix socket has no host, but the URI contains {authority} after \"//\""));
        }
        Endpoint::Unix(found.socket.ok_or("the socket is missing; add ?socket=PATH")?)
    } else {
        if found.socket.is_some() {
            return Err("socket= is only for nbd+unix and nbds+unix".into());
        }
        let (host, port) = host_and_port(authority)?;
        Endpoint::Tcp { host, port }
    };
    Ok(NbdUri {
        endpoint,
        export,
        tls: has_tls.then_some(found.tls),
        timeout: found.timeout,
        reconnect: found.reconnect,
        connections: found.connections,
    })
}

fn host_and_port(authority: &str) -> Result<(String, u16), String> {
    if authority.contains('@') {
        return Err("a user name needs TLS with pre-shared keys, which is not supported; use certificates".into());
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, behind) = rest.split_once(']').ok_or("the address contains \"[\" but no \"]\"")?;
            let port = match behind {
                "" => None,
                _ => Some(behind.strip_prefix(':').ok_or("only :PORT may follow \"]\"")?),
            };
            (host.to_owned(), port)
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (decoded(host)?, Some(port)),
            None => (decoded(authority)?, None),
        },
    };
    let port = match port {
        None | Some("") => DEFAULT_PORT,
        Some(port) => port.parse().ok().filter(|&port| port > 0).ok_or(format!("{port} is not a port"))?,
    };
    // As other clients do for nbd:///export.
    Ok((if host.is_empty() { "localhost".into() } else { host }, port))
}

#[derive(Default)]
struct Parameters {
    socket: Option<PathBuf>,
    tls: TlsParameters,
    tls_key: Option<String>,
    timeout: Option<Duration>,
    reconnect: Option<Duration>,
    connections: Option<usize>,
}

impl Parameters {
    fn take(&mut self, key: &str, value: Option<&str>) -> Result<(), String> {
        let given = || value.ok_or(format!("{key} needs a value"));
        if key.starts_with("tls-") {
            self.tls_key = Some(key.to_owned());
        }
        match key {
            "socket" => self.socket = Some(path(given()?)?),
            "tls-certificates" => self.tls.certificates = Some(path(given()?)?),
            "tls-hostname" => self.tls.hostname = Some(decoded(given()?)?),
            "tls-verify-peer" => {
                self.tls.trust_anyone = match given()? {
                    "0" | "false" => true,
                    "1" | "true" => false,
                    other => return Err(format!("tls-verify-peer must be 0 or 1, not {other}")),
                }
            }
            "tls-type" if given()?.eq_ignore_ascii_case("x509") => {}
            "tls-type" => return Err("tls-type must be x509 (certificates)".into()),
            "timeout" => self.timeout = Some(seconds(key, given()?)?),
            "reconnect" => {
                self.reconnect = Some(match value {
                    None => NbdUri::RECONNECT_DEFAULT,
                    Some(value) => seconds(key, value)?,
                });
            }
            "connections" => {
                let count = given()?.parse().ok().filter(|count| (1..=CONNECTIONS_MAX).contains(count));
                self.connections =
                    Some(count.ok_or(format!("connections must be a number from 1 to {CONNECTIONS_MAX}"))?);
            }
            _ => {
                return Err(format!(
                    "unknown parameter {key}; known are socket, timeout, reconnect, connections, tls-certificates, \
                     tls-hostname, tls-verify-peer and tls-type"
                ));
            }
        }
        Ok(())
    }
}

fn seconds(key: &str, value: &str) -> Result<Duration, String> {
    let seconds: f64 = value.parse().map_err(|_| format!("{key} must be a number of seconds, not {value:?}"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{key} must be a number of seconds, not {value:?}"))
}

fn decoded(text: &str) -> Result<String, String> {
    check_escapes(text)?;
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.map(|text| text.into_owned()).map_err(|_| format!("{text} is not UTF-8"))
}

fn path(text: &str) -> Result<PathBuf, String> {
    check_escapes(text)?;
    let bytes: Vec<u8> = percent_decode_str(text).collect();
    if bytes.is_empty() { Err("an empty path".into()) } else { Ok(std::ffi::OsString::from_vec(bytes).into()) }
}

fn check_escapes(text: &str) -> Result<(), String> {
    for (at, _) in text.match_indices('%') {
        let digits = text.as_bytes().get(at + 1..at + 3);
        if !digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)) {
            return Err(format!("a \"%\" in {text} is not followed by two hexadecimal digits"));
        }
    }
    Ok(())
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = percent_encode(self.export.as_bytes(), PLAIN);
        let secure = if self.tls.is_some() { "s" } else { "" };
        let mut separator = '?';
        let mut parameter = |f: &mut fmt::Formatter<'_>, key: &str, value: &[u8]| {
            let written = write!(f, "{separator}{key}={}", percent_encode(value, PLAIN));
            separator = '&';
            written
        };
        match &self.endpoint {
            Endpoint::Tcp { host, port } => {
                let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
                write!(f, "nbd{secure}://{open}{host}{close}")?;
                if *port != DEFAULT_PORT {
                    write!(f, ":{port}")?;
                }
                write!(f, "/{export}")?;
            }
            Endpoint::Unix(path) => {
                write!(f, "nbd{secure}+unix:///{export}")?;
                parameter(f, "socket", path.as_os_str().as_bytes())?;
            }
        }
        if let Some(tls) = &self.tls {
            if let Some(dir) = &tls.certificates {
                parameter(f, "tls-certificates", dir.as_os_str().as_bytes())?;
            }
            if let Some(hostname) = &tls.hostname {
                parameter(f, "tls-hostname", hostname.as_bytes())?;
            }
            if tls.trust_anyone {
                parameter(f, "tls-verify-peer", b"0")?;
            }
        }
        for (key, time) in [("timeout", self.timeout), ("reconnect", self.reconnect)] {
            if let Some(time) = time {
                parameter(f, key, time.as_secs_f64().to_string().as_bytes())?;
            }
        }
        if let Some(connections) = self.connections {
            parameter(f, "connections", connections.to_string().as_bytes())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_examples_of_the_specification() {
        for (uri, endpoint, export) in [
            ("nbd://example.com/disk", "example.com:10809", "disk"),
            ("nbd+unix:///disk?socket=sock", "sock", "disk"),
            ("nbd://example.com/", "example.com:10809", ""),
            ("nbd://example.com", "example.com:10809", ""),
            ("nbd://example.com//disk", "example.com:10809", "/disk"),
            ("nbd://example.com/hello%20world", "example.com:10809", "hello world"),
            ("nbd://[::1]:10810/a", "[::1]:10810", "a"),
            ("NBD://localhost:1", "localhost:1", ""),
            ("nbd+unix:///?socket=%00/abstract", "@/abstract", ""),
        ] {
            let parsed = NbdUri::parse(uri).unwrap();
            assert_eq!((parsed.endpoint.to_string().as_str(), parsed.export.as_str()), (endpoint, export), "{uri}");
            assert_eq!(parsed.tls, None);
        }
    }

    #[test]
    fn parameters() {
        let uri = "nbds+unix:///x?socket=/run/a%26b&tls-certificates=/etc/pki&tls-hostname=host&tls-verify-peer=0&timeout=1.5&reconnect&connections=8";
        let parsed = NbdUri::parse(uri).unwrap();
        let tls = parsed.tls.clone().unwrap();
        assert_eq!(parsed.endpoint, Endpoint::Unix("/run/a&b".into()));
        assert_eq!((tls.certificates.as_deref(), tls.hostname.as_deref()), (Some(Path::new("/etc/pki")), Some("host")));
        assert!(tls.trust_anyone);
        assert_eq!(parsed.timeout, Some(Duration::from_millis(1500)));
        assert_eq!(parsed.reconnect, Some(NbdUri::RECONNECT_DEFAULT));
        assert_eq!(parsed.connections, Some(8));
    }

    #[test]
    fn invalid_uris_are_explained() {
        for (uri, word) in [
            ("nbd:disk", "://"),
            ("http://host", "http"),
            ("nbd+vsock://1", "none of"),
            ("nbd+unix:///disk", "socket=PATH"),
            ("nbd+unix:///disk?socket=", "empty path"),
            ("nbd+unix://host/disk?socket=a", "no host"),
            ("nbd://host?socket=a", "nbd+unix"),
            ("nbd://host:99999", "99999"),
            ("nbd://host:0", "not a port"),
            ("nbd://[::1", "no \"]\""),
            ("nbd://me@host", "user"),
            ("nbd://host/%zz", "%"),
            ("nbd://host/%00", "zero byte"),
            ("nbd://host/#1", "#"),
            ("nbd://host?tls-hostname=x", "nbds"),
            ("nbds://host?tls-hostnam=x", "tls-hostnam"),
            ("nbds://host?tls-type=psk", "x509"),
            ("nbd://host?timeout=-1", "timeout"),
            ("nbd://host?timeout=soon", "soon"),
            ("nbd://host?connections=0", "1 to 64"),
            ("nbd://host?timeout", "needs a value"),
        ] {
            let error = NbdUri::parse(uri).unwrap_err().to_string();
            assert!(error.contains(word) && error.starts_with(uri), "{uri}: {error}");
        }
    }

    #[test]
    fn nbd_uris_are_recognised_by_their_scheme() {
        for (text, is) in [
            ("nbd://host", true),
            ("nbd+unix:/x", true),
            ("NBDS://h", true),
            ("nbd:host", true),
            ("nbd", false),
            ("disk.raw", false),
            ("./nbd://host", false),
            ("/dev/nbd0", false),
        ] {
            assert_eq!(NbdUri::looks_like(OsStr::new(text)), is, "{text}");
        }
    }

    proptest! {
        #[test]
        fn uris_survive_formatting_and_parsing(
            host in "[a-z][a-z0-9.-]{0,9}|::1|fe80::2", port in 1u16.., export in "\\PC{0,20}", socket in prop::option::of("[^\0]{1,20}"),
            tls in prop::option::of((prop::option::of("\\PC{1,9}"), prop::option::of("\\PC{1,9}"), any::<bool>())),
            timeout in prop::option::of(0u32..100_000), connections in prop::option::of(1usize..64),
        ) {
            let uri = NbdUri {
                endpoint: socket.map_or(Endpoint::Tcp { host, port }, |socket| Endpoint::Unix(socket.into())),
                export,
                tls: tls.map(|(certificates, hostname, trust_anyone)| {
                    TlsParameters { certificates: certificates.map(Into::into), hostname, trust_anyone }
                }),
                timeout: timeout.map(|millis| Duration::from_millis(millis.into())),
                reconnect: None,
                connections,
            };
            prop_assert_eq!(NbdUri::parse(&uri.to_string()).unwrap(), uri);
        }

        #[test]
        fn arbitrary_text_never_panics(text in "(nbds?(\\+unix)?://)?[\\PC%?&=:/@\\[\\]]{0,40}") {
            let _ = NbdUri::parse(&text);
        }
    }
}
