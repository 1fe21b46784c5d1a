//! Addresses: where a peer listens, and by which fingerprint it is known.
//!
//! ```text
//!   host:7407#FINGERPRINT           by TCP
//!   vsock:3:7407#FINGERPRINT        from a host to the guest with this CID, or from a guest to 2
//!   ...#FINGERPRINT/TOKEN           with the token that admits the one who dials
//! ```

use crate::{
    error::{FleetError, Result},
    identity::Fingerprint,
    trust::Token,
};
use std::{fmt, str::FromStr};

/// The port of an agent that is not told another one.
pub const PORT: u16 = 7407;

/// Where a program listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A host name or address, and a port.
    Tcp(String, u16),
    /// A context identifier and a port of virtual sockets.
    Vsock(u32, u32),
}

/// Any context identifier of this machine, to listen. Its own one is known on the host.
pub const ANY_CID: u32 = u32::MAX;

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Vsock(ANY_CID, port) => write!(f, "vsock:CID:{port}"),
            Self::Vsock(cid, port) => write!(f, "vsock:{cid}:{port}"),
        }
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(rest) = text.strip_prefix("vsock:") {
            let parts = rest.split_once(':').and_then(|(cid, port)| Some((cid.parse().ok()?, port.parse().ok()?)));
            let (cid, port) = parts.ok_or("vsock: needs the CID of the machine and a port, as in vsock:3:7407")?;
            return Ok(Self::Vsock(cid, port));
        }
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, rest) = rest.split_once(']').ok_or("the bracket of the address is not closed")?;
                (host, rest.strip_prefix(':'))
            }
            None => match text.split_once(':') {
                Some((_, port)) if port.contains(':') => return Err("an IPv6 address needs brackets".into()),
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        if host.is_empty() {
            return Err("the host is missing".into());
        }
        let port = port.map_or(Ok(PORT), |port| port.parse().map_err(|_| format!("{port:?} is not a port")))?;
        Ok(Self::Tcp(host.to_owned(), port))
    }
}

/// Where a peer listens, and who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Where it listens.
    pub place: Place,
    /// Who it is.
    pub fingerprint: Fingerprint,
    /// What admits the one who dials.
    pub token: Option<Token>,
}

/// Without the token.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.place, self.fingerprint)
    }
}

impl FromStr for Address {
    type Err = FleetError;

    fn from_str(text: &str) -> Result<Self> {
        let (place, rest) = text.split_once('#').unwrap_or((text, ""));
        // A token may be in it, which is not shown.
        let wrong = |what: String| FleetError::Address { text: place.to_owned(), what };
        if rest.is_empty() {
            return Err(wrong("the fingerprint is missing".into()));
        }
        let (fingerprint, token) = match rest.split_once('/') {
            Some((fingerprint, token)) => (fingerprint, Some(Token::new(token))),
            None => (rest, None),
        };
        Ok(Self { place: place.parse().map_err(wrong)?, fingerprint: fingerprint.parse().map_err(wrong)?, token })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        let digits = "ab".repeat(32);
        let read = |text: &str| format!("{text}#{digits}").parse::<Address>();
        for (text, shown) in [
            ("host:12", "host:12"),
            ("10.0.0.1:12", "10.0.0.1:12"),
            ("[::1]:12", "[::1]:12"),
            ("host", "host:7407"),
            ("[fe80::1]", "[fe80::1]:7407"),
            ("vsock:3:12", "vsock:3:12"),
        ] {
            let address = read(text).unwrap();
            assert_eq!(address.to_string(), format!("{shown}#{digits}"));
        }
        assert_eq!(Place::Vsock(ANY_CID, 12).to_string(), "vsock:CID:12");
        for wrong in ["vsock:CID:12", "", ":12", "host:", "host:99999", "::1", "[::1", "vsock:3", "vsock:x:1", "vsock:"]
        {
            assert!(matches!(read(wrong), Err(FleetError::Address { .. })), "{wrong}");
        }
    }

    #[test]
    fn a_token_is_read_and_not_shown() {
        let text = format!("host:1#{}/secret", "0".repeat(64));
        let address: Address = text.parse().unwrap();
        assert_eq!(address.token, Some(Token::new("secret")));
        assert!(!address.to_string().contains("secret") && !format!("{address:?}").contains("secret"));
        let error = "host:1#12/secret".parse::<Address>().unwrap_err().to_string();
        assert!(error.contains("fingerprint") && !error.contains("secret"), "{error}");
        assert!("host:1".parse::<Address>().unwrap_err().to_string().contains("fingerprint is missing"));
    }
}
