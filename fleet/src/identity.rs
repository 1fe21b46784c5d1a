//! Who an agent or a controller is: a key, a certificate that it signs itself, and the fingerprint
//! by which others know it.
//!
//! There is no certificate authority. A peer is known by the SHA-256 of its certificate, as SSH
//! knows hosts by their keys: the user carries the fingerprint from one machine to the other.
//!
//! The identity is kept in a file that only its user can read, so that a fingerprint stays the same
//! when a program is started again.

use crate::error::{FleetError, Result};
use ring::digest::{SHA256, digest};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use std::{
    fmt, fs, io,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process,
    str::FromStr,
    sync::atomic::{AtomicU32, Ordering},
};

/// SHA-256 of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of a certificate.
    pub(crate) fn of(certificate: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, certificate).as_ref());
        Self(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Fingerprint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a fingerprint of 64 hexadecimal digits");
        let digits: Vec<u32> = text.chars().map(|c| c.to_digit(16)).collect::<Option<_>>().ok_or_else(wrong)?;
        let (pairs, rest) = digits.as_chunks::<2>();
        let mut bytes = [0; 32];
        if pairs.len() != bytes.len() || !rest.is_empty() {
            return Err(wrong());
        }
        for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
            *byte = (high * 16 + low) as u8;
        }
        Ok(Self(bytes))
    }
}

/// A key and its certificate.
#[derive(Debug)]
pub struct Identity {
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) key: PrivateKeyDer<'static>,
    /// The fingerprint of the certificate.
    pub fingerprint: Fingerprint,
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self { certificate: self.certificate.clone(), key: self.key.clone_key(), fingerprint: self.fingerprint }
    }
}

impl Identity {
    /// A new identity that is not kept.
    ///
    /// # Errors
    /// [`FleetError::Identity`].
    pub fn temporary() -> Result<Self> {
        Self::parse(&new_pem().map_err(|what| identity_error(Path::new(""), what))?)
            .map_err(|what| identity_error(Path::new(""), what))
    }

    /// The identity of a file, which is made if there is none. Of two programs that make it at once
    /// both use the same one.
    ///
    /// # Errors
    /// [`FleetError::Identity`].
    pub fn kept_at(path: &Path) -> Result<Self> {
        let failed = |error: io::Error| identity_error(path, error.to_string());
        let text = match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let pem = new_pem().map_err(|what| identity_error(path, what))?;
                publish(path, &pem).map_err(failed)?;
                fs::read(path).map_err(failed)?
            }
            found => found.map_err(failed)?,
        };
        Self::parse(&text).map_err(|what| identity_error(path, what))
    }

    fn parse(pem: &[u8]) -> Result<Self, String> {
        let certificate = CertificateDer::from_pem_slice(pem).map_err(|error| format!("no certificate: {error}"))?;
        let key = PrivateKeyDer::from_pem_slice(pem).map_err(|error| format!("no private key: {error}"))?;
        let fingerprint = Fingerprint::of(&certificate);
        Ok(Self { certificate, key, fingerprint })
    }
}

fn identity_error(path: &Path, what: String) -> FleetError {
    FleetError::Identity { path: path.to_owned(), what }
}

fn new_pem() -> Result<Vec<u8>, String> {
    let made = rcgen::generate_simple_self_signed(["diskwright".to_owned()]).map_err(|error| error.to_string())?;
    Ok((made.cert.pem() + &made.signing_key.serialize_pem()).into_bytes())
}

/// Writes a file under its name in one step. One that is there stays.
fn publish(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".new-{}-{}", process::id(), NUMBER.fetch_add(1, Ordering::Relaxed)));
    let made = (|| {
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&name)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        match fs::hard_link(&name, path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        }
    })();
    let _ = fs::remove_file(&name);
    made
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::fs::PermissionsExt, thread};

    #[test]
    fn an_identity_stays_and_only_its_user_can_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/agent.pem");
        let found: Vec<Fingerprint> = thread::scope(|scope| {
            let open = || Identity::kept_at(&path).unwrap().fingerprint;
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(found.iter().all(|fingerprint| *fingerprint == found[0]), "all use the same one");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no temporary file is left");
        assert_ne!(Identity::temporary().unwrap().fingerprint, found[0]);
    }

    #[test]
    fn a_damaged_file_is_named_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.pem");
        fs::write(&path, "nothing").unwrap();
        let error = Identity::kept_at(&path).unwrap_err().to_string();
        assert!(error.contains("agent.pem") && error.contains("no certificate"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"nothing");
    }

    #[test]
    fn fingerprints_are_written_as_digits() {
        let fingerprint = Identity::temporary().unwrap().fingerprint;
        assert_eq!(fingerprint.to_string().parse(), Ok(fingerprint));
        assert_eq!(fingerprint.to_string().to_uppercase().parse(), Ok(fingerprint));
        for wrong in ["", "ab", &"a".repeat(63), &"a".repeat(65), &"g".repeat(64), &"é".repeat(32)] {
            assert!(wrong.parse::<Fingerprint>().is_err(), "{wrong}");
        }
    }
}
