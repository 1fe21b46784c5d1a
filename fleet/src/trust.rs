//! Who may give orders: the configuration of TLS, pinned fingerprints, and tokens that are good
//! once.
//!
//! ```text
//!   TLS 1.3, both sides with a certificate ──▶ each side knows the other's fingerprint
//!     the side that dials   : it must be the one in the address          (handshake)
//!     the side that listens : it must be pinned, or bring the token      (first message)
//! ```
//!
//! The side that dials sends nothing, not even a token, to a peer with another fingerprint. A token
//! admits the first peer that brings it, for as long as the listening program runs. After a few
//! wrong tokens it is void, so it cannot be guessed.

use crate::{
    error::{FleetError, Result},
    identity::{Fingerprint, Identity},
};
use ring::{
    digest::{SHA256, digest},
    rand::{SecureRandom, SystemRandom},
};
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
    version::TLS13,
};
use std::sync::{Arc, Mutex, PoisonError};

/// Wrong tokens after which a token is void.
const WRONG_MAX: u32 = 5;

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Checks that the peer holds the key of its certificate, and on the dialling side that it is the
/// expected one.
#[derive(Debug)]
struct Verifier {
    expected: Option<Fingerprint>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    fn signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let found = Fingerprint::of(certificate);
        if self.expected.is_some_and(|expected| expected != found) {
            return Err(Error::General(format!("its fingerprint is {found}")));
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.3 is needed".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        // Whether this peer may do anything is decided by its first message: `Trust::admit`.
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.3 is needed".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

/// The configuration of the side that dials a peer with this fingerprint.
pub(crate) fn dialling(own: &Identity, expected: Fingerprint) -> Result<Arc<ClientConfig>> {
    let verifier = Arc::new(Verifier { expected: Some(expected), provider: provider() });
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map(|builder| builder.dangerous().with_custom_certificate_verifier(verifier))
        .and_then(|builder| builder.with_client_auth_cert(vec![own.certificate.clone()], own.key.clone_key()));
    config.map(Arc::new).map_err(|error| FleetError::Tls(error.to_string()))
}

/// The configuration of the side that listens.
pub(crate) fn listening(own: &Identity) -> Result<Arc<ServerConfig>> {
    let verifier = Arc::new(Verifier { expected: None, provider: provider() });
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map(|builder| builder.with_client_cert_verifier(verifier))
        .and_then(|builder| builder.with_single_cert(vec![own.certificate.clone()], own.key.clone_key()));
    config.map(Arc::new).map_err(|error| FleetError::Tls(error.to_string()))
}

/// A secret that admits one peer.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(...)")
    }
}

impl Token {
    /// A new token of 128 random bits.
    ///
    /// # Errors
    /// [`FleetError::Tls`]: the system has no random numbers.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        let filled = SystemRandom::new().fill(&mut bytes);
        filled.map_err(|_| FleetError::Tls("the system gives no random numbers".into()))?;
        Ok(Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// The token that another program has made.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Its text, which is secret.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Compares by digests, so that the time says nothing about the text.
    fn is(&self, text: &str) -> bool {
        digest(&SHA256, self.0.as_bytes()).as_ref() == digest(&SHA256, text.as_bytes()).as_ref()
    }
}

/// Peers that a listening program admits.
#[derive(Debug, Default)]
pub struct Trust {
    state: Mutex<TrustState>,
}

#[derive(Debug, Default)]
struct TrustState {
    admitted: Vec<Fingerprint>,
    tokens: Vec<Token>,
    /// Those that a token has admitted.
    used_by: Vec<(Token, Fingerprint)>,
    wrong: u32,
}

impl Trust {
    /// Admits peers with these fingerprints, and one more peer for each token.
    pub fn new(pinned: Vec<Fingerprint>, tokens: Vec<Token>) -> Self {
        let state = TrustState { admitted: pinned, tokens, ..TrustState::default() };
        Self { state: Mutex::new(state) }
    }

    /// Whether a peer may give orders, or bring results.
    ///
    /// # Errors
    /// A sentence for the peer.
    pub fn admit(&self, peer: Fingerprint, token: Option<&str>) -> Result<(), String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.admitted.contains(&peer) {
            return Ok(());
        }
        let Some(text) = token else {
            return Err(format!("the fingerprint {peer} is not pinned here, and no token was given"));
        };
        if let Some(place) = state.tokens.iter().position(|token| token.is(text)) {
            let token = state.tokens.swap_remove(place);
            state.used_by.push((token, peer));
            state.admitted.push(peer);
            return Ok(());
        }
        if let Some((_, user)) = state.used_by.iter().find(|(token, _)| token.is(text)) {
            return Err(format!(
                "the token was used before, by the peer with the fingerprint {user}; if that was not you, the token \
                 was stolen: end this program and start it again"
            ));
        }
        state.wrong += 1;
        if state.wrong >= WRONG_MAX {
            state.tokens.clear();
        }
        Err(match state.tokens.is_empty() {
            true => "no token is valid here (any more)".into(),
            false => "the token is wrong".into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(number: u8) -> Fingerprint {
        Fingerprint::of(&[number])
    }

    #[test]
    fn a_token_is_good_once_and_then_for_the_same_peer() {
        let token = Token::random().unwrap();
        assert_ne!(token, Token::random().unwrap());
        let trust = Trust::new(vec![fingerprint(1)], vec![token.clone()]);
        trust.admit(fingerprint(1), None).unwrap();
        trust.admit(fingerprint(2), None).unwrap_err();
        trust.admit(fingerprint(2), Some(token.reveal())).unwrap();
        trust.admit(fingerprint(2), None).unwrap();
        let stolen = trust.admit(fingerprint(3), Some(token.reveal())).unwrap_err();
        assert!(stolen.contains(&fingerprint(2).to_string()), "{stolen}");
        assert!(!format!("{trust:?}").contains(token.reveal()), "tokens are secret");
    }

    #[test]
    fn tokens_cannot_be_guessed() {
        let token = Token::random().unwrap();
        let trust = Trust::new(Vec::new(), vec![token.clone()]);
        for _ in 0..WRONG_MAX {
            trust.admit(fingerprint(9), Some("guess")).unwrap_err();
        }
        assert!(trust.admit(fingerprint(2), Some(token.reveal())).is_err(), "it is void");
    }
}
