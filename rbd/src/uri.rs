//! Names of images: `rbd://POOL/IMAGE`, `rbd://POOL/NAMESPACE/IMAGE`, with `@SNAPSHOT`, and with
//! the settings of the connection as a query.
//!
//! ```text
//!   rbd://POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][?id=USER][&conf=FILE][&timeout=SECONDS]
//! ```
//!
//! Without a query the settings are those of Ceph's tools: `CEPH_ARGS`, `CEPH_CONF`,
//! `/etc/ceph/ceph.conf`, user `admin`. `%` begins a byte in two hexadecimal digits. A name has no
//! secrets: keys are in keyrings, which the configuration names.

use crate::error::{RbdError, Result};
use percent_encoding::percent_decode_str;
use std::{fmt, path::Path, time::Duration};

/// How names begin.
pub(crate) const PREFIX: &str = "rbd://";

/// How long the cluster may fail to answer, unless the name says it.
const TIMEOUT: Duration = Duration::from_secs(120);

/// How a cluster is reached.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Connection {
    /// The user, without "client.".
    pub(crate) user: Option<String>,
    /// The file of the configuration.
    pub(crate) conf: Option<String>,
    pub(crate) timeout: Duration,
}

/// The name of an image; see the module documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RbdUri {
    pub(crate) pool: String,
    pub(crate) namespace: Option<String>,
    pub(crate) image: String,
    pub(crate) snapshot: Option<String>,
    pub(crate) connection: Connection,
    query: Option<String>,
}

fn decoded(text: &str) -> Option<String> {
    percent_decode_str(text).decode_utf8().ok().map(Into::into).filter(|text: &String| !text.contains('\0'))
}

impl RbdUri {
    /// Reads a name.
    ///
    /// # Errors
    /// [`RbdError::BadName`].
    pub fn parse(path: &Path) -> Result<Self> {
        let bad = |why| RbdError::BadName { name: path.display().to_string(), why };
        let expected = "expected rbd://POOL/IMAGE or rbd://POOL/IMAGE@SNAPSHOT";
        let text = path.to_str().ok_or_else(|| bad("it is not UTF-8"))?;
        let rest = text.strip_prefix(PREFIX).ok_or_else(|| bad(expected))?;
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let (rest, snapshot) = rest.rsplit_once('@').map_or((rest, None), |(rest, snap)| (rest, Some(snap)));
        let mut parts = rest.split('/').map(|part| decoded(part).filter(|part| !part.is_empty()));
        let (first, second, third) = (parts.next().flatten(), parts.next(), parts.next());
        let (pool, namespace, image) = match (first, second, third, parts.next()) {
            (Some(pool), Some(Some(image)), None, None) => (pool, None, image),
            (Some(pool), Some(Some(namespace)), Some(Some(image)), None) => (pool, Some(namespace), image),
            _ => return Err(bad(expected)),
        };
        let snapshot = match snapshot.map(|snapshot| decoded(snapshot).filter(|text| !text.is_empty())) {
            Some(None) => return Err(bad("the snapshot behind @ has no name")),
            snapshot => snapshot.flatten(),
        };
        let mut connection = Connection { user: None, conf: None, timeout: TIMEOUT };
        for setting in query.into_iter().flat_map(|query| query.split('&')).filter(|setting| !setting.is_empty()) {
            let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
            let value = decoded(value).filter(|value| !value.is_empty());
            let value = value.ok_or_else(|| bad("a setting behind ? has no value"))?;
            match key {
                "id" => connection.user = Some(value),
                "conf" => connection.conf = Some(value),
                "timeout" => {
                    let seconds = value.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
                    let seconds = seconds.ok_or_else(|| bad("timeout is a number of seconds from 1 to 86400"))?;
                    connection.timeout = Duration::from_secs(seconds);
                }
                _ => return Err(bad("the settings behind ? are id, conf and timeout")),
            }
        }
        let query = query.filter(|query| !query.is_empty()).map(str::to_owned);
        Ok(Self { pool, namespace, image, snapshot, connection, query })
    }

    /// Another image beside this one.
    pub(crate) fn beside(&self, image: String) -> Self {
        Self { image, snapshot: None, ..self.clone() }
    }
}

impl fmt::Display for RbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const PLAIN: percent_encoding::AsciiSet =
            percent_encoding::NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'+').remove(b'=');
        let encoded = |text: &str| percent_encoding::utf8_percent_encode(text, &PLAIN).to_string();
        write!(f, "{PREFIX}{}/", encoded(&self.pool))?;
        if let Some(namespace) = &self.namespace {
            write!(f, "{}/", encoded(namespace))?;
        }
        write!(f, "{}", encoded(&self.image))?;
        if let Some(snapshot) = &self.snapshot {
            write!(f, "@{}", encoded(snapshot))?;
        }
        match &self.query {
            Some(query) => write!(f, "?{query}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<RbdUri> {
        RbdUri::parse(Path::new(text))
    }

    #[test]
    fn names_are_read_and_shown_again() {
        for text in [
            "rbd://rbd/vm",
            "rbd://rbd/tenant/vm",
            "rbd://rbd/vm@monday",
            "rbd://rbd/vm?id=lab&conf=/etc/ceph/other.conf",
            "rbd://a%20b/vm%40home@x?timeout=5",
        ] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        let uri = parse("rbd://a%20b/ns/vm%40home@x?id=lab&timeout=5").unwrap();
        assert_eq!((uri.pool.as_str(), uri.namespace.as_deref(), uri.image.as_str()), ("a b", Some("ns"), "vm@home"));
        assert_eq!((uri.snapshot.as_deref(), uri.connection.user.as_deref()), (Some("x"), Some("lab")));
        assert_eq!(uri.connection.timeout, Duration::from_secs(5));
        assert_eq!(uri.beside("other".into()).to_string(), "rbd://a%20b/ns/other?id=lab&timeout=5");
    }

    #[test]
    fn wrong_names_are_refused_with_what_is_expected() {
        for (bad, why) in [
            ("rbd://", "expected rbd://POOL/IMAGE"),
            ("rbd://pool", "expected rbd://POOL/IMAGE"),
            ("rbd://pool/", "expected rbd://POOL/IMAGE"),
            ("rbd:///image", "expected rbd://POOL/IMAGE"),
            ("rbd://a/b/c/d", "expected rbd://POOL/IMAGE"),
            ("rbd://a/b@", "no name"),
            ("rbd://a/b?id=", "no value"),
            ("rbd://a/b?key=secret", "id, conf and timeout"),
            ("rbd://a/b?timeout=0", "from 1 to 86400"),
            ("rbd://a/b%00", "expected rbd://POOL/IMAGE"),
            ("s3://a/b", "expected rbd://POOL/IMAGE"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }
}
