//! Lines over a unix socket: bounded in length, and with a deadline for a whole line. A time-out
//! for each read or write alone would let a peer that moves one byte now and then wait for ever.

use super::message::LINE_BYTES_MAX;
use serde::Serialize;
use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

/// Time for a request to arrive, and for a line of an answer to be taken.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// A stream that reads and writes lines.
#[derive(Debug)]
pub(super) struct Lines {
    stream: UnixStream,
    /// Bytes received behind the last line.
    rest: Vec<u8>,
}

impl Lines {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, rest: Vec::new() }
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends `value` as one line, within [`PATIENCE`].
    pub(super) fn send(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        let deadline = Instant::now() + PATIENCE;
        let mut sent = 0;
        while sent < line.len() {
            self.stream.set_write_timeout(Some(left(deadline)?))?;
            match self.stream.write(&line[sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The next line without its line feed. `patience` is for the whole line; `None` waits as long
    /// as the peer lives.
    ///
    /// # Errors
    /// `UnexpectedEof` if the peer has closed the stream; `InvalidData` for a line that is too
    /// long; `TimedOut` or `WouldBlock` after the deadline.
    pub(super) fn receive(&mut self, patience: Option<Duration>) -> io::Result<Vec<u8>> {
        let deadline = patience.map(|patience| Instant::now() + patience);
        let mut chunk = [0; 4096];
        loop {
            if let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
                let behind = self.rest.split_off(end + 1);
                self.rest.pop();
                return Ok(std::mem::replace(&mut self.rest, behind));
            }
            if self.rest.len() >= LINE_BYTES_MAX {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("a line is longer than {LINE_BYTES_MAX} bytes"),
                ));
            }
            self.stream.set_read_timeout(deadline.map(left).transpose()?)?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.rest.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Time until the deadline; an error if there is none left.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn lines_are_whole_and_bounded() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut lines = Lines::new(ours);
        theirs.write_all(b"one\ntwo\nthr").unwrap();
        assert_eq!(lines.receive(Some(PATIENCE)).unwrap(), b"one");
        assert_eq!(lines.receive(Some(PATIENCE)).unwrap(), b"two");
        theirs.write_all(b"ee\n").unwrap();
        assert_eq!(lines.receive(None).unwrap(), b"three");
        let flood = thread::spawn(move || {
            let _ = theirs.write_all(&vec![b'x'; 2 * LINE_BYTES_MAX]);
        });
        assert_eq!(lines.receive(Some(PATIENCE)).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(lines.rest.len() < LINE_BYTES_MAX + 4096);
        drop(lines);
        flood.join().unwrap();
    }

    #[test]
    fn a_peer_that_sends_byte_by_byte_is_given_up() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let drip = thread::spawn(move || {
            while theirs.write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(5));
            }
        });
        let mut lines = Lines::new(ours);
        let error = lines.receive(Some(Duration::from_millis(60))).unwrap_err();
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
        drop(lines);
        drip.join().unwrap();
    }
}
