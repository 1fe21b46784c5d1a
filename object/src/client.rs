//! The HTTP client of the process: TLS with the system's certificates, no redirect by itself, and a
//! limit on silence.
//!
//! The certificates are those of the system, or of `SSL_CERT_FILE` and `SSL_CERT_DIR`. Proxies are
//! those of `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`.

use crate::{
    error::{ObjectError, Result},
    settings::Settings,
};
use reqwest::{Client, redirect::Policy};
use rustls::{ClientConfig, RootCertStore, crypto::ring};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections to one server that stay open without work.
const IDLE_CONNECTIONS: usize = 32;

static CLIENT: Mutex<Option<(Duration, Client)>> = Mutex::new(None);

/// The client, which shares its connections.
///
/// # Errors
/// TLS cannot be set up.
pub(crate) fn client(settings: &Settings) -> Result<Client> {
    let mut made = CLIENT.lock().unwrap_or_else(PoisonError::into_inner);
    match &*made {
        Some((timeout, client)) if *timeout == settings.timeout => Ok(client.clone()),
        _ => {
            let client = make(settings)?;
            *made = Some((settings.timeout, client.clone()));
            Ok(client)
        }
    }
}

fn make(settings: &Settings) -> Result<Client> {
    let failed = |why: String| ObjectError::Unsuitable { name: "TLS".into(), what: why };
    let mut roots = RootCertStore::empty();
    // Certificates that cannot be read are left out; a server that needs one is refused then.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Client::builder()
        .tls_backend_preconfigured(tls)
        .http1_only()
        .redirect(Policy::none())
        .connect_timeout(CONNECT_TIMEOUT.min(settings.timeout))
        .read_timeout(settings.timeout)
        .pool_max_idle_per_host(IDLE_CONNECTIONS)
        .user_agent(concat!("diskwright/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| failed(error.to_string()))
}
