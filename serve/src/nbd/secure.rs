//! TLS between the stream and the protocol.
//!
//! ```text
//!   stream ─▶ raw bytes ─▶ feed ─▶ plain bytes in the connection's window
//!   outbox ─▶ seal (encrypt) ─▶ raw pieces ─▶ stream
//! ```
//!
//! rustls holds keys and records; this gives it bytes and takes bytes. It keeps no more than the
//! records of one feed.

use super::pool::{HEADER_ROOM_BYTES, Pool};
use diskwright_store::{IoBuf, Piece};
use rustls::{ServerConfig, ServerConnection};
use std::{
    io::{self, Read, Write},
    sync::Arc,
};

/// Raw bytes that are received at once; there is room for the plain bytes in the window.
pub(crate) const RAW_BYTES: usize = 64 << 10;

/// Plain bytes that are encrypted at once, and the size of the buffers for what comes out.
const SEALED_BYTES: usize = 128 << 10;

/// See the module.
#[derive(Debug)]
pub(crate) struct Secure {
    session: ServerConnection,
    closed: bool,
    /// For raw bytes, unless it is on its way to the kernel.
    pub(crate) raw: Option<IoBuf>,
}

impl Secure {
    pub(crate) fn new(config: &Arc<ServerConfig>) -> Result<Self, rustls::Error> {
        let mut session = ServerConnection::new(Arc::clone(config))?;
        // What is given is sent before more is given, so there is nothing for rustls to limit.
        session.set_buffer_limit(None);
        Ok(Self { session, closed: false, raw: None })
    }

    /// Takes raw bytes, puts the plain ones into `plain`, which has room for as many, and says how
    /// many those are.
    ///
    /// # Errors
    /// The peer does not keep to TLS, or its certificate is refused; an alert for it may wait to be
    /// sent.
    pub(crate) fn feed(&mut self, mut raw: &[u8], plain: &mut [u8]) -> io::Result<usize> {
        let mut len = 0;
        while !raw.is_empty() {
            if self.session.read_tls(&mut raw)? == 0 {
                break;
            }
            self.session.process_new_packets().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            loop {
                match self.session.reader().read(&mut plain[len..]) {
                    Ok(0) => break,
                    Ok(got) => len += got,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(len)
    }

    /// Says goodbye in the manner of TLS, the first time that it is called, and says whether there
    /// is something to be sent for it.
    pub(crate) fn close(&mut self) -> bool {
        if std::mem::replace(&mut self.closed, true) {
            return false;
        }
        self.session.send_close_notify();
        self.session.wants_write()
    }

    /// Whether there is something of TLS itself to be sent.
    pub(crate) fn has_output(&self) -> bool {
        self.session.wants_write()
    }

    /// Encrypts `pieces`, whose buffers go back to the pool, and appends what is to be sent to
    /// `out`.
    pub(crate) fn seal(&mut self, pieces: &mut Vec<Piece>, pool: &mut Pool, out: &mut Vec<Piece>) -> io::Result<()> {
        for (buf, range) in pieces.drain(..) {
            for chunk in buf[range].chunks(SEALED_BYTES) {
                self.session.writer().write_all(chunk)?;
                self.drain(pool, out)?;
            }
            pool.give(buf);
        }
        self.drain(pool, out)
    }

    fn drain(&mut self, pool: &mut Pool, out: &mut Vec<Piece>) -> io::Result<()> {
        while self.session.wants_write() {
            let mut buf = pool.take(SEALED_BYTES);
            let mut room = &mut buf[HEADER_ROOM_BYTES..];
            let room_bytes = room.len();
            while !room.is_empty() && self.session.wants_write() {
                self.session.write_tls(&mut room)?;
            }
            let len = room_bytes - room.len();
            out.push((buf, HEADER_ROOM_BYTES..HEADER_ROOM_BYTES + len));
        }
        Ok(())
    }
}
