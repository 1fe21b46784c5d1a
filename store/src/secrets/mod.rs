//! Secrets by which clients and the server prove who they are.
//!
//! A client has a name and a secret. The server may have a name and a secret of its own, for
//! clients that want to know whom they talk to. The secrets of both directions must differ, so that
//! what one side proves is of no use to the other. A secret is never printed.

mod file;

use std::fmt;

/// Length of a secret at least, in bytes (RFC 7143, 9.2.1: 96 bits).
pub const SECRET_BYTES_MIN: usize = 12;

/// Length of a name or a secret at most, in bytes.
pub const BYTES_MAX: usize = 255;

/// Bytes that are not printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// A name and its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    name: String,
    secret: Secret,
}

/// Why secrets cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SecretsError {
    /// The length of a name is wrong.
    #[error("a name in the secrets has {found} bytes; it must have 1 to {BYTES_MAX}")]
    NameLength {
        /// Its length.
        found: usize,
    },
    /// The length of a secret is wrong.
    #[error("the secret of {name:?} has {found} bytes; it must have {SECRET_BYTES_MIN} to {BYTES_MAX}")]
    SecretLength {
        /// Whose it is.
        name: String,
        /// Its length.
        found: usize,
    },
    /// Two clients have the same name.
    #[error("two clients in the secrets have the name {name:?}; give each client a name of its own")]
    Twice {
        /// The name.
        name: String,
    },
    /// A client has the secret of the server.
    #[error("the client {name:?} has the secret of the server; give the two directions different secrets")]
    Same {
        /// The client's name.
        name: String,
    },
    /// The client that is to use its secret is not there, or it is not said which.
    #[error("{}", no_such_client(name.as_deref()))]
    NoSuchClient {
        /// The name that was looked for.
        name: Option<String>,
    },
    /// The file cannot be used.
    #[error("secrets {path}: {what}")]
    File {
        /// Its path.
        path: String,
        /// What is wrong, without the secrets.
        what: String,
    },
    /// There are no clients.
    #[error("the secrets name no client, so nobody could connect; add a [[client]] with name and secret")]
    NoClient,
}

fn no_such_client(name: Option<&str>) -> String {
    match name {
        Some(name) => format!("the secrets have no client {name:?}"),
        None => {
            "the secrets have several clients; name one in the URI (iscsi://NAME@HOST/..., nvme://...?host-nqn=NAME)"
                .to_owned()
        }
    }
}

impl Credentials {
    /// A name and its secret.
    ///
    /// # Errors
    /// One of them is too short or too long.
    pub fn new(name: &str, secret: &str) -> Result<Self, SecretsError> {
        if name.is_empty() || name.len() > BYTES_MAX {
            return Err(SecretsError::NameLength { found: name.len() });
        }
        if !(SECRET_BYTES_MIN..=BYTES_MAX).contains(&secret.len()) {
            return Err(SecretsError::SecretLength { name: name.to_owned(), found: secret.len() });
        }
        Ok(Self { name: name.to_owned(), secret: Secret(secret.as_bytes().to_vec()) })
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The secret as text, which it was made of.
    pub fn secret_text(&self) -> String {
        String::from_utf8_lossy(&self.secret.0).into_owned()
    }

    /// The secret's bytes.
    pub fn secret(&self) -> &[u8] {
        &self.secret.0
    }
}

/// The secrets of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secrets {
    clients: Vec<Credentials>,
    server: Option<Credentials>,
}

impl Secrets {
    /// Who may connect, and what the server proves to clients that ask.
    ///
    /// # Errors
    /// There is no client, a name is there twice, or a client has the server's secret.
    pub fn new(clients: Vec<Credentials>, server: Option<Credentials>) -> Result<Self, SecretsError> {
        if clients.is_empty() {
            return Err(SecretsError::NoClient);
        }
        for (index, client) in clients.iter().enumerate() {
            if clients[..index].iter().any(|other| other.name == client.name) {
                return Err(SecretsError::Twice { name: client.name.clone() });
            }
            if server.as_ref().is_some_and(|server| server.secret == client.secret) {
                return Err(SecretsError::Same { name: client.name.clone() });
            }
        }
        Ok(Self { clients, server })
    }

    /// The client of this name.
    pub fn client(&self, name: &str) -> Option<&Credentials> {
        self.clients.iter().find(|client| client.name == name)
    }

    /// The only client, or the one of this name.
    ///
    /// # Errors
    /// There is none of this name, or there are several and no name is given.
    pub fn own(&self, name: Option<&str>) -> Result<&Credentials, SecretsError> {
        let told = |name: Option<&str>| SecretsError::NoSuchClient { name: name.map(str::to_owned) };
        match (name, &self.clients[..]) {
            (Some(name), _) => self.client(name).ok_or_else(|| told(Some(name))),
            (None, [client]) => Ok(client),
            (None, _) => Err(told(None)),
        }
    }

    /// All of them: clients, then the server.
    pub fn all(&self) -> impl Iterator<Item = &Credentials> {
        self.clients.iter().chain(&self.server)
    }

    /// What the server proves itself with.
    pub fn server(&self) -> Option<&Credentials> {
        self.server.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_secrets_are_refused_and_none_is_printed() {
        let of = |name: &str, secret: &str| Credentials::new(name, secret);
        assert_eq!(of("", "123456789012"), Err(SecretsError::NameLength { found: 0 }));
        assert!(matches!(of("a", "12345678901"), Err(SecretsError::SecretLength { found: 11, .. })));
        let a = of("a", "the secret of a").unwrap();
        assert_eq!(Secrets::new(Vec::new(), None), Err(SecretsError::NoClient));
        let twice = Secrets::new(vec![a.clone(), a.clone()], None);
        assert!(matches!(twice, Err(SecretsError::Twice { .. })));
        let same = Secrets::new(vec![a.clone()], Some(of("server", "the secret of a").unwrap()));
        assert!(matches!(same, Err(SecretsError::Same { .. })));
        let secrets = Secrets::new(vec![a], None).unwrap();
        assert!(!format!("{secrets:?}").contains("the secret"), "{secrets:?}");
    }
}
