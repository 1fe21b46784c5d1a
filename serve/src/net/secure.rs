//! TLS between a connection's stream and the protocol.
//!
//! ```text
//!   stream ─▶ raw bytes ─▶ feed ─▶ plain bytes in the connection's window
//!   outbox ─▶ seal (encrypt) ─▶ raw pieces ─▶ stream
//! ```
//!
//! rustls does no I/O here: it is given bytes and returns bytes. It buffers at most the records of
//! one `feed`.

use super::pool::{HEADER_ROOM_BYTES, Pool};
use diskwright_store::{IoBuf, Piece};
use rustls::{ServerConfig, ServerConnection};
use std::{
    io::{self, Read, Write},
    sync::Arc,
};

/// Raw bytes that one receive takes. The window has room for as many plain bytes.
pub(crate) const RAW_BYTES: usize = 64 << 10;

/// Plain bytes that are encrypted at once, and the size of the buffers for the result.
const SEALED_BYTES: usize = 128 << 10;

#[derive(Debug)]
pub(crate) struct Secure {
    session: ServerConnection,
    closed: bool,
    /// The buffer for raw bytes; `None` while the kernel has it.
    pub(crate) raw: Option<IoBuf>,
}

impl Secure {
    pub(crate) fn new(config: &Arc<ServerConfig>) -> Result<Self, rustls::Error> {
        let mut session = ServerConnection::new(Arc::clone(config))?;
        // All that is given to rustls is sent before more is given, so rustls needs no limit.
        session.set_buffer_limit(None);
        Ok(Self { session, closed: false, raw: None })
    }

    /// Decrypts raw bytes into `plain`, which must have room for as many. Returns the number of
    /// plain bytes.
    ///
    /// # Errors
    /// The bytes are not valid TLS, or the client's certificate is refused. An alert to the client
    /// may then wait to be sent.
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

    /// Queues the TLS close_notify on the first call. Returns whether there is anything to send.
    pub(crate) fn close(&mut self) -> bool {
        if std::mem::replace(&mut self.closed, true) {
            return false;
        }
        self.session.send_close_notify();
        self.session.wants_write()
    }

    /// Whether rustls has bytes to send.
    pub(crate) fn has_output(&self) -> bool {
        self.session.wants_write()
    }

    /// Encrypts `pieces` and appends the result to `out`. The buffers of `pieces` go back to the
    /// pool.
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
