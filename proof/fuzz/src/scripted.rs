//! A server that sends chosen bytes to whoever connects, and listens to nothing.

use diskwright_store::{BlockQueue, IoBuf, Request};
use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};
use tempfile::TempDir;

/// A peer that needs longer is stuck.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// What a connection is sent: the bytes, and how many of them at once.
type Line = (Vec<u8>, usize);

/// The server. It runs until the process ends.
#[derive(Debug)]
pub(crate) struct ScriptedServer {
    lines: Mutex<VecDeque<Line>>,
    dir: TempDir,
}

impl ScriptedServer {
    pub(crate) fn start() -> &'static Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let server: &Self = Box::leak(Box::new(Self { lines: Mutex::default(), dir }));
        let listener = UnixListener::bind(server.socket()).expect("a socket");
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // Without a line it disconnects, so further connections of a client get nothing.
                let line = server.lines.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                if let Some((bytes, piece)) = line {
                    thread::spawn(move || send(stream, &bytes, piece));
                }
            }
        });
        server
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// What the next connections are sent. A piece of 0 bytes means all at once.
    pub(crate) fn set(&self, lines: impl IntoIterator<Item = Vec<u8>>, piece: u8) {
        let piece = if piece == 0 { usize::MAX } else { piece.into() };
        *self.lines.lock().unwrap_or_else(PoisonError::into_inner) =
            lines.into_iter().map(|bytes| (bytes, piece)).collect();
    }
}

fn send(mut stream: UnixStream, bytes: &[u8], piece: usize) {
    let _ = stream.set_read_timeout(Some(PATIENCE));
    let _ = bytes.chunks(piece).try_for_each(|piece| stream.write_all(piece));
    let _ = stream.shutdown(Shutdown::Write);
    let mut rest = [0; 16 << 10];
    while stream.read(&mut rest).is_ok_and(|count| count > 0) {}
}

/// Pushes requests of each kind to the queue of a client whose server is hostile. Each completes
/// and returns its buffer, and an error has a text.
pub(crate) fn drive(queue: &mut dyn BlockQueue) {
    let mut pushed = 0;
    for request in [
        Request::read(0, 4096, IoBuf::new(4096), 0),
        Request::write(8192, 512, IoBuf::new(512), 1),
        Request::write(16384, 131072, IoBuf::new(131072), 2),
        Request::flush(3),
        Request::discard(262144, 4096, 4),
    ] {
        // The disk may be smaller.
        pushed += usize::from(queue.push(request).is_ok());
    }
    let mut completions = Vec::new();
    while queue.in_flight() > 0 {
        queue.reap(1, &mut completions).expect("a queue reports errors by its completions");
    }
    assert_eq!(completions.len(), pushed);
    for completion in completions {
        assert_eq!(completion.buf.is_some(), completion.tag < 3, "a buffer is lost");
        if let Err(error) = completion.result {
            assert!(!error.to_string().is_empty());
        }
    }
}

/// Sends the bytes of a hostile client, and reads until the server has closed. Returns how much was
/// answered.
pub(crate) fn play_client(socket: PathBuf, bytes: &[u8], piece: u8) -> u64 {
    let mut stream = UnixStream::connect(socket).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let piece = if piece == 0 { bytes.len().max(1) } else { piece.into() };
    // The server may have disconnected already.
    let _ = bytes.chunks(piece).try_for_each(|piece| stream.write_all(piece));
    let _ = stream.shutdown(Shutdown::Write);
    let (mut answered, mut buf) = (0, vec![0; 256 << 10]);
    loop {
        match stream.read(&mut buf) {
            Ok(0) => return answered,
            Ok(count) => answered += count as u64,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return answered,
            // Interrupted by the alarm of the fuzzer.
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => panic!("the server neither replies nor disconnects: {error}"),
        }
    }
}
