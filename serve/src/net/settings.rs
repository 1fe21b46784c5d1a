//! Options of a server, and the settings that its threads share.

use super::exports::Exports;
use crate::{Keyring, reservations::ReservationTable};
use diskwright_store::RateLimits;
use ipnet::IpNet;
use rustls::ServerConfig;
use std::{
    io,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// Options of a [`Server`](super::Server).
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Number of worker threads; 0 means one for each processor, at most 8.
    pub workers: usize,
    /// Maximum number of connections at a time. Further ones are closed at once.
    pub connections_max: usize,
    /// Maximum number of requests in flight for each connection.
    pub requests_max: u32,
    /// Maximum payload bytes in flight for each connection. A single request is allowed whatever
    /// its size.
    pub request_bytes_max: usize,
    /// How fast each connection is served. A connection over its limit is not received from.
    pub client_limits: RateLimits,
    /// The TLS certificates; `None` serves without TLS.
    pub tls: Option<Arc<ServerConfig>>,
    /// Require TLS on unix sockets too. On TCP it is required whenever there are certificates.
    pub tls_on_unix: bool,
    /// Networks from which TCP clients may connect. Empty means all.
    pub allowed: Vec<IpNet>,
    /// Allow writable exports on TCP without TLS.
    pub insecure_writes: bool,
    /// Who may connect, and how clients prove who they are, in protocols that have that. Writable
    /// exports then need neither TLS nor [`ServerOptions::insecure_writes`].
    pub secrets: Option<Arc<Keyring>>,
    /// The reservations of the disks. Servers of the same disks have the same table. Clients of
    /// protocols without reservations are refused what others have reserved.
    pub reservations: Arc<ReservationTable>,
    /// Time limit for the handshake of a client.
    pub handshake_time: Duration,
    /// How long a stopping server waits for clients to receive their last replies.
    pub drain_time: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            workers: 0,
            connections_max: 128,
            requests_max: 256,
            request_bytes_max: 16 << 20,
            client_limits: RateLimits::default(),
            tls: None,
            tls_on_unix: false,
            allowed: Vec::new(),
            insecure_writes: false,
            secrets: None,
            reservations: Arc::default(),
            handshake_time: Duration::from_secs(20),
            drain_time: Duration::from_secs(10),
        }
    }
}

/// What one client may have in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ShareLimit {
    pub(crate) requests: u32,
    /// Bytes of payload. A single request is allowed whatever its size.
    pub(crate) bytes: usize,
}

/// Whether connections are encrypted with TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TlsNeed {
    /// The server has no certificates.
    No,
    /// The client decides.
    May,
    /// Clients without TLS are refused.
    Must,
}

/// Settings shared by the threads of a server.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Replaced when an export is added or removed. The lock is held only to clone the `Arc`.
    exports: Mutex<Arc<Exports>>,
    pub(crate) share: ShareLimit,
    pub(crate) ring_depth: usize,
    pub(crate) connections_max: usize,
    /// Replaced when the configuration is reloaded. The lock is held only to copy them.
    client_limits: Mutex<RateLimits>,
    allowed: Vec<IpNet>,
    pub(crate) reservations: Arc<ReservationTable>,
    /// Replaced when the certificates are reloaded. The lock is held only to clone the `Arc`.
    tls: Mutex<Option<Arc<ServerConfig>>>,
    tls_on_unix: bool,
    pub(crate) handshake_time: Duration,
    pub(crate) drain_time: Duration,
}

impl Settings {
    pub(crate) fn new(exports: Exports, options: ServerOptions) -> Self {
        Self {
            exports: Mutex::new(Arc::new(exports)),
            share: ShareLimit { requests: options.requests_max.max(1), bytes: options.request_bytes_max.max(1) },
            ring_depth: 256,
            connections_max: options.connections_max,
            client_limits: Mutex::new(options.client_limits),
            allowed: options.allowed,
            reservations: options.reservations,
            tls: Mutex::new(options.tls),
            tls_on_unix: options.tls_on_unix,
            handshake_time: options.handshake_time,
            drain_time: options.drain_time,
        }
    }

    /// The exports that are served now.
    pub(crate) fn exports(&self) -> Arc<Exports> {
        Arc::clone(&self.exports.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn set_exports(&self, exports: Arc<Exports>) {
        *self.exports.lock().unwrap_or_else(PoisonError::into_inner) = exports;
    }

    pub(crate) fn client_limits(&self) -> RateLimits {
        *self.client_limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses these limits for all connections accepted from now on.
    pub(crate) fn set_client_limits(&self, limits: RateLimits) {
        *self.client_limits.lock().unwrap_or_else(PoisonError::into_inner) = limits;
    }

    fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.tls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn tls_session(&self) -> io::Result<Arc<ServerConfig>> {
        self.tls().ok_or_else(|| io::Error::other("the server has no TLS certificates"))
    }

    /// Uses these certificates for all connections accepted from now on.
    pub(crate) fn set_tls(&self, config: Arc<ServerConfig>) {
        *self.tls.lock().unwrap_or_else(PoisonError::into_inner) = Some(config);
    }

    pub(crate) fn tls_need(&self, on_tcp: bool) -> TlsNeed {
        match self.tls() {
            None => TlsNeed::No,
            Some(_) if on_tcp || self.tls_on_unix => TlsNeed::Must,
            Some(_) => TlsNeed::May,
        }
    }

    /// Whether a client may connect from this address.
    pub(crate) fn allows(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.allowed.is_empty() || self.allowed.iter().any(|net| net.contains(&address))
    }
}
