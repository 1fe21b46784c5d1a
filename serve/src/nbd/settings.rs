//! What a server is told to do, and how its workers share it.

use super::{desk::ShareLimit, export::Exports, handshake::TlsNeed};
use ipnet::IpNet;
use rustls::ServerConfig;
use std::{
    io,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// What of a server can be chosen.
#[derive(Debug, Clone)]
pub struct Options {
    /// Threads that serve; 0 is one for each processor, at most 8.
    pub workers: usize,
    /// Connections at a time; more are closed at once.
    pub connections_max: usize,
    /// Requests in flight for each connection.
    pub requests_max: u32,
    /// Bytes of payload in flight for each connection. One request goes whatever its size.
    pub request_bytes_max: usize,
    /// Certificates, if there are any.
    pub tls: Option<Arc<ServerConfig>>,
    /// Speak with clients on unix sockets, too, in TLS only. (On TCP that is so whenever there are
    /// certificates.)
    pub tls_on_unix: bool,
    /// Networks from which clients on TCP may come. Empty: from everywhere.
    pub allowed: Vec<IpNet>,
    /// Serve writable exports on TCP without TLS.
    pub insecure_writes: bool,
    /// Time for the handshake.
    pub handshake_time: Duration,
    /// Time for clients to take their last replies when the server stops.
    pub drain_time: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            workers: 0,
            connections_max: 128,
            requests_max: 256,
            request_bytes_max: 16 << 20,
            tls: None,
            tls_on_unix: false,
            allowed: Vec::new(),
            insecure_writes: false,
            handshake_time: Duration::from_secs(20),
            drain_time: Duration::from_secs(10),
        }
    }
}

/// What the threads of a server share.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) exports: Arc<Exports>,
    pub(crate) share: ShareLimit,
    pub(crate) ring_depth: usize,
    pub(crate) connections_max: usize,
    allowed: Vec<IpNet>,
    /// Exchanged when certificates are read anew; the lock is held for a clone.
    tls: Mutex<Option<Arc<ServerConfig>>>,
    tls_on_unix: bool,
    pub(crate) handshake_time: Duration,
    pub(crate) drain_time: Duration,
}

impl Settings {
    pub(crate) fn new(exports: Exports, options: Options) -> Self {
        Self {
            exports: Arc::new(exports),
            share: ShareLimit { requests: options.requests_max.max(1), bytes: options.request_bytes_max.max(1) },
            ring_depth: 256,
            connections_max: options.connections_max,
            allowed: options.allowed,
            tls: Mutex::new(options.tls),
            tls_on_unix: options.tls_on_unix,
            handshake_time: options.handshake_time,
            drain_time: options.drain_time,
        }
    }

    fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.tls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn tls_session(&self) -> io::Result<Arc<ServerConfig>> {
        self.tls().ok_or_else(|| io::Error::other("there are no certificates"))
    }

    /// Connections that come from now on are served with these certificates.
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

    /// Whether a client may come from there.
    pub(crate) fn allows(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.allowed.is_empty() || self.allowed.iter().any(|net| net.contains(&address))
    }
}
