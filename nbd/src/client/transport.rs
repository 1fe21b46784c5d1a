//! A non-blocking connection: a socket, with or without TLS.
//!
//! ```text
//!   send(slices) ─▶ [rustls ─▶] socket      recv(slices) ◀─ [rustls ◀─ 64 KiB buffer ◀─] socket
//! ```
//!
//! Both return `WouldBlock` if nothing can be transferred; the caller then uses [`Socket::wait`].
//! Without TLS, bytes are transferred directly between the socket and the slices, which are the
//! callers' own buffers.

use diskwright_store::{Endpoint, Socket};
use rustls::{ClientConfig, ClientConnection, pki_types::ServerName};
use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    sync::Arc,
    time::Duration,
};

/// Size of the receive buffer for TLS: four records.
const TLS_STAGE_BYTES: usize = 64 << 10;

#[derive(Debug)]
struct Tls {
    connection: ClientConnection,
    stage: Vec<u8>,
    taken: usize,
    filled: usize,
    ended: bool,
}

/// One connection; see the module documentation.
#[derive(Debug)]
pub(super) struct Transport {
    socket: Arc<Socket>,
    tls: Option<Box<Tls>>,
}

impl Transport {
    /// Connects within `limit`.
    pub(super) fn connect(endpoint: &Endpoint, limit: Duration) -> io::Result<Self> {
        let socket = Socket::connect(endpoint, limit)?;
        Ok(Self { socket: Arc::new(socket), tls: None })
    }

    /// Uses TLS from now on. The TLS handshake takes place during the first sends and receives.
    pub(super) fn start_tls(
        &mut self,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> Result<(), rustls::Error> {
        let connection = ClientConnection::new(config, name)?;
        let stage = vec![0; TLS_STAGE_BYTES];
        self.tls = Some(Box::new(Tls { connection, stage, taken: 0, filled: 0, ended: false }));
        Ok(())
    }

    /// Whether the connection uses TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// TLS version and cipher; `None` without TLS or before the handshake.
    pub(super) fn tls_name(&self) -> Option<String> {
        let connection = &self.tls.as_ref()?.connection;
        let version = match connection.protocol_version()? {
            rustls::ProtocolVersion::TLSv1_2 => "TLS 1.2".to_owned(),
            rustls::ProtocolVersion::TLSv1_3 => "TLS 1.3".to_owned(),
            other => format!("{other:?}"),
        };
        Some(match connection.negotiated_cipher_suite() {
            Some(suite) => format!("{version}, {:?}", suite.suite()),
            None => version,
        })
    }

    /// Sends as much as the socket accepts now; `WouldBlock` if that is nothing.
    pub(super) fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return (&*self.socket).write_vectored(slices) };
        let taken = tls.connection.writer().write_vectored(slices)?;
        match self.flush() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && taken > 0 => Ok(taken),
            Err(error) => Err(error),
            Ok(()) if taken == 0 => Err(io::ErrorKind::WouldBlock.into()),
            Ok(()) => Ok(taken),
        }
    }

    /// Whether accepted bytes are still waiting for the socket.
    pub(super) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.connection.wants_write())
    }

    /// Sends accepted bytes that wait for the socket; `WouldBlock` if some still have to wait.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let Some(tls) = &mut self.tls else { return Ok(()) };
        while tls.connection.wants_write() {
            tls.connection.write_tls(&mut &*self.socket)?;
        }
        Ok(())
    }

    /// Receives what is available: `WouldBlock` if nothing is, 0 at the end of the stream.
    pub(super) fn recv(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            None => (&*self.socket).read_vectored(slices),
            Some(tls) => {
                let received = tls.recv(&self.socket, slices);
                // A TLS handshake or key update may require an answer.
                match self.flush() {
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
                    _ => received,
                }
            }
        }
    }

    /// The socket, for waiting.
    pub(super) fn socket(&self) -> Arc<Socket> {
        Arc::clone(&self.socket)
    }

    /// Sends the TLS close notification.
    pub(super) fn close_tls(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.connection.send_close_notify();
            let _ = tls.connection.write_tls(&mut &*self.socket);
        }
    }
}

impl Tls {
    fn recv(&mut self, mut socket: &Socket, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        loop {
            match self.connection.reader().read_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                ended_or_failed_or_received => return ended_or_failed_or_received,
            }
            if self.taken == self.filled && !self.ended {
                let received = socket.read(&mut self.stage)?;
                (self.taken, self.filled) = (0, received);
                self.ended = self.filled == 0;
            }
            let mut came = &self.stage[self.taken..self.filled];
            let before = came.len();
            self.connection.read_tls(&mut came)?;
            self.taken += before - came.len();
            self.connection.process_new_packets().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }
}
