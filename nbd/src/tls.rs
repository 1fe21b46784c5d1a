//! From a folder of certificates to a rustls configuration, for clients and servers.
//!
//! The folder has the layout of qemu, libnbd and nbdkit:
//!
//! ```text
//!   ca-cert.pem                      the CA that signs the peer's certificate
//!   ca-crl.pem                       certificates that the CA has revoked (optional)
//!   server-cert.pem  server-key.pem  the server's certificate and key
//!   client-cert.pem  client-key.pem  the client's (optional if the server does not verify clients)
//! ```
//!
//! TLS 1.2 and 1.3, with the primitives of `ring`. It needs only a C compiler, which linking Rust
//! programs needs anyway; aws-lc needs cmake on some machines.

use crate::uri::{Endpoint, NbdUri, TlsParameters};
use rustls::{
    ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{
        CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
        pem::{self, PemObject},
    },
    server::WebPkiClientVerifier,
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The folder that libnbd also uses if none is given.
const SYSTEM_DIR: &str = "/etc/pki/libnbd";

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{}: cannot read this certificate, key or revocation list: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file has unexpected contents.
    #[error("{}: {what}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What was found or expected.
        what: String,
    },
    /// No folder with certificates was found.
    #[error(
        "ca-cert.pem was not found in {}; name the folder of certificates in the URI with tls-certificates=DIR",
        looked_in.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(" or ")
    )]
    NoFolder {
        /// Where it was searched.
        looked_in: Vec<PathBuf>,
    },
    /// The server's name cannot be in a certificate.
    #[error(
        "{name:?} is not a host name or address that a certificate can contain; give the name in the server's certificate with tls-hostname=NAME"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// rustls rejects the certificates.
    #[error("{}: the certificates cannot be used: {source}", dir.display())]
    Config {
        /// The folder.
        dir: PathBuf,
        /// The reason.
        source: rustls::Error,
    },
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A client's configuration, and the name that the server's certificate must have.
///
/// # Errors
/// [`TlsError`].
pub fn client(uri: &NbdUri, parameters: &TlsParameters) -> Result<(Arc<ClientConfig>, ServerName<'static>), TlsError> {
    let name = match (&parameters.hostname, &uri.endpoint) {
        (Some(name), _) => name.clone(),
        (None, Endpoint::Tcp { host, .. }) => host.clone(),
        (None, Endpoint::Unix(_)) => "localhost".into(),
    };
    let server_name = ServerName::try_from(name.clone()).map_err(|_| TlsError::Name { name })?;
    let dir = match &parameters.certificates {
        Some(dir) => Some(dir.clone()),
        None => default_dir(parameters.trust_anyone)?,
    };
    let shown = dir.clone().unwrap_or_default();
    let config = |source| TlsError::Config { dir: shown.clone(), source };
    let builder =
        ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().map_err(config)?;
    let builder = match &dir {
        Some(dir) if !parameters.trust_anyone => {
            let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots(dir)?), provider())
                .with_crls(revoked(dir)?)
                .build()
                .map_err(|error| TlsError::Content { path: dir.join("ca-cert.pem"), what: error.to_string() })?;
            builder.with_webpki_verifier(verifier)
        }
        _ => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate { provider: provider() })),
    };
    let own = dir.filter(|dir| dir.join("client-cert.pem").exists());
    let config = match own {
        Some(dir) => {
            let (chain, key) = identity(&dir, "client")?;
            builder.with_client_auth_cert(chain, key).map_err(config)?
        }
        None => builder.with_no_client_auth(),
    };
    Ok((Arc::new(config), server_name))
}

/// A server's configuration. With `verify_clients`, clients must have a certificate signed by the
/// CA in `ca-cert.pem`.
///
/// # Errors
/// [`TlsError`].
pub fn server(dir: &Path, verify_clients: bool) -> Result<Arc<ServerConfig>, TlsError> {
    let config = |source| TlsError::Config { dir: dir.to_owned(), source };
    let builder =
        ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().map_err(config)?;
    let builder = if verify_clients {
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(dir)?), provider())
            .with_crls(revoked(dir)?)
            .build()
            .map_err(|error| TlsError::Content { path: dir.join("ca-cert.pem"), what: error.to_string() })?;
        builder.with_client_cert_verifier(verifier)
    } else {
        builder.with_no_client_auth()
    };
    let (chain, key) = identity(dir, "server")?;
    builder.with_single_cert(chain, key).map(Arc::new).map_err(config)
}

/// The default folder; `None` if there is none and none is needed.
fn default_dir(trust_anyone: bool) -> Result<Option<PathBuf>, TlsError> {
    let mut looked_in: Vec<PathBuf> = std::env::home_dir().map(|home| home.join(".pki/libnbd")).into_iter().collect();
    looked_in.push(SYSTEM_DIR.into());
    match looked_in.iter().find(|dir| dir.join("ca-cert.pem").exists()) {
        Some(dir) => Ok(Some(dir.clone())),
        None if trust_anyone => Ok(None),
        None => Err(TlsError::NoFolder { looked_in }),
    }
}

fn read<T: PemObject>(path: &Path) -> Result<Vec<T>, TlsError> {
    let bytes = fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })?;
    T::pem_slice_iter(&bytes)
        .collect::<Result<Vec<T>, pem::Error>>()
        .map_err(|error| TlsError::Content { path: path.to_owned(), what: format!("this is not PEM: {error}") })
}

fn roots(dir: &Path) -> Result<RootCertStore, TlsError> {
    let path = dir.join("ca-cert.pem");
    let mut roots = RootCertStore::empty();
    for certificate in read::<CertificateDer<'static>>(&path)? {
        roots.add(certificate).map_err(|error| TlsError::Content {
            path: path.clone(),
            what: format!("not a CA's certificate: {error}"),
        })?;
    }
    if roots.is_empty() {
        return Err(TlsError::Content { path, what: "it contains no certificate".into() });
    }
    Ok(roots)
}

fn revoked(dir: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    let path = dir.join("ca-crl.pem");
    if path.exists() { read(&path) } else { Ok(Vec::new()) }
}

fn identity(dir: &Path, whose: &str) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsError> {
    let path = dir.join(format!("{whose}-cert.pem"));
    let chain = read(&path)?;
    if chain.is_empty() {
        return Err(TlsError::Content { path, what: "it contains no certificate".into() });
    }
    let path = dir.join(format!("{whose}-key.pem"));
    let key = read(&path)?.pop().ok_or(TlsError::Content { path, what: "it contains no private key".into() })?;
    Ok((chain, key))
}

/// Accepts every certificate whose key the server holds. Only for `tls-verify-peer=0`.
#[derive(Debug)]
struct AcceptAnyCertificate {
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
