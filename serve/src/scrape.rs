//! The Prometheus endpoint: just enough HTTP for Prometheus, curl and a browser to GET one page.
//!
//! One thread serves one request at a time, because the clients are the operator's own programs.
//! A request has a limit of size and one deadline for the request and its answer together. Every
//! read and write waits at most until that deadline. With a limit for each wait instead, a client
//! that sends or takes one byte now and then would block all others for ever.

use crate::net::{Address, ListenError, Listener};
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// The longest request that is read.
const REQUEST_BYTES_MAX: usize = 8 << 10;

/// Time for one request and its answer together.
const PATIENCE: Duration = Duration::from_secs(5);

/// Maximum bytes that one call writes. A unix socket splits a longer write into several messages,
/// and the time-out applies to each of them separately.
const WRITE_BYTES_MAX: usize = 4 << 10;

/// Makes the text of the page.
pub type Page = Arc<dyn Fn() -> String + Send + Sync>;

/// A running endpoint. It stops when this is dropped.
#[derive(Debug)]
pub struct Scrape {
    address: Address,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A stream whose reads and writes can be given a time-out.
trait Conversation: Read + Write + Send {
    /// The next read or write waits no longer than `time`, which must not be 0.
    fn wait_at_most(&mut self, time: Duration) -> io::Result<()>;
}

impl Conversation for TcpStream {
    fn wait_at_most(&mut self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }
}

impl Conversation for UnixStream {
    fn wait_at_most(&mut self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }
}

/// A stream whose reads and writes fail once the deadline has passed.
struct DeadlineStream<'a> {
    stream: &'a mut dyn Conversation,
    deadline: Instant,
}

impl DeadlineStream<'_> {
    fn in_time(&mut self) -> io::Result<&mut dyn Conversation> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.wait_at_most(left)?;
        Ok(self.stream)
    }
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.in_time()?.read(buf)
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.in_time()?.write(&bytes[..bytes.len().min(WRITE_BYTES_MAX)])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl Scrape {
    /// Serves `page` at `/metrics` and `/` of an address.
    ///
    /// # Errors
    /// [`ListenError`].
    pub fn start(address: &Address, page: Page) -> Result<Self, ListenError> {
        let listener = Listener::bind(address)?;
        let address = listener.address().clone();
        let (fd, leftover) = listener.into_parts();
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, on_tcp) = (Arc::clone(&stop), matches!(address, Address::Tcp(..)));
        let serve = move || {
            let _leftover = leftover;
            let (tcp, unix) =
                if on_tcp { (Some(TcpListener::from(fd)), None) } else { (None, Some(UnixListener::from(fd))) };
            while !stopped.load(Ordering::Acquire) {
                let accepted: io::Result<Box<dyn Conversation>> = match (&tcp, &unix) {
                    (Some(tcp), _) => tcp.accept().map(|(stream, _)| Box::new(stream) as _),
                    (None, Some(unix)) => unix.accept().map(|(stream, _)| Box::new(stream) as _),
                    (None, None) => return,
                };
                match accepted.and_then(|mut stream| answer(stream.as_mut(), PATIENCE, &page)) {
                    Ok(()) => {}
                    Err(error) => {
                        tracing::debug!(%error, "a request for metrics failed");
                        // The process may be out of descriptors or memory: do not retry at once.
                        thread::sleep(Duration::from_millis(10));
                    }
                }
            }
        };
        let thread = thread::Builder::new()
            .name("metrics".into())
            .spawn(serve)
            .map_err(|source| ListenError::Refused { address: address.clone(), source })?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// The address that it listens on, with the port that it got.
    pub fn address(&self) -> &Address {
        &self.address
    }
}

impl Drop for Scrape {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Connects once, so that the thread returns from `accept` and sees `stop`.
        let visited = match &self.address {
            Address::Tcp(host, port) => {
                let host = if host == "0.0.0.0" || host == "::" { "localhost" } else { host };
                TcpStream::connect((host, *port)).and_then(|stream| stream.shutdown(Shutdown::Both))
            }
            Address::Unix(path) => UnixStream::connect(path).map(drop),
        };
        if let (Ok(()), Some(thread)) = (visited, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

fn answer(stream: &mut dyn Conversation, patience: Duration, page: &Page) -> io::Result<()> {
    let mut stream = DeadlineStream { stream, deadline: Instant::now() + patience };
    let mut request = Vec::new();
    let mut chunk = [0; 1024];
    while !request.windows(4).any(|four| four == b"\r\n\r\n") {
        let got = stream.read(&mut chunk)?;
        if got == 0 || request.len() + got > REQUEST_BYTES_MAX {
            return Ok(());
        }
        request.extend_from_slice(&chunk[..got]);
    }
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split(' ');
    let (status, kind, body) = match (words.next(), words.next()) {
        (Some("GET"), Some("/metrics" | "/")) => ("200 OK", "text/plain; version=0.0.4; charset=utf-8", page()),
        (Some("GET"), _) => ("404 Not Found", "text/plain", "the page is /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "text/plain", "only GET\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(address: &Address, request: &str) -> String {
        let Address::Tcp(host, port) = address else { panic!("not TCP") };
        let mut stream = TcpStream::connect((host.as_str(), *port)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn the_page_is_served_and_nothing_else() {
        let scrape = Scrape::start(&Address::Tcp("127.0.0.1".into(), 0), Arc::new(|| "a 1\n".to_owned())).unwrap();
        let text = ask(scrape.address(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\na 1\n"), "{text}");
        assert!(ask(scrape.address(), "GET /etc/passwd HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(ask(scrape.address(), "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        assert_eq!(ask(scrape.address(), &"x".repeat(9000)), "");
        let address = scrape.address().clone();
        drop(scrape);
        assert!(Listener::bind(&address).is_ok(), "the port is free again");
    }

    const SHORT: Duration = Duration::from_millis(50);
    const DRIP: Duration = Duration::from_millis(5);

    /// Two connections, one TCP and one unix: the server's end and the client's end.
    fn pairs() -> [(Box<dyn Conversation>, Box<dyn Conversation>); 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let unix = UnixStream::pair().unwrap();
        [(Box::new(server), Box::new(client)), (Box::new(unix.0), Box::new(unix.1))]
    }

    fn is_late(result: io::Result<()>) -> bool {
        result.is_err_and(|error| matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock))
    }

    #[test]
    fn a_client_that_sends_byte_by_byte_is_cut_off() {
        for (mut server, mut client) in pairs() {
            // The thread ends when the server's end is closed.
            let dripping = thread::spawn(move || {
                while client.write_all(b"x").is_ok() {
                    thread::sleep(DRIP);
                }
            });
            let result = answer(server.as_mut(), SHORT, &(Arc::new(String::new) as Page));
            assert!(is_late(result), "every byte has extended the deadline");
            drop(server);
            dripping.join().unwrap();
        }
    }

    #[test]
    fn a_client_that_takes_the_answer_slowly_is_cut_off() {
        for (mut server, mut client) in pairs() {
            client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
            let dripping = thread::spawn(move || {
                let mut drip = [0; 64 << 10];
                while client.read(&mut drip).is_ok_and(|got| got > 0) {
                    thread::sleep(DRIP);
                }
            });
            // Far more than all socket buffers hold.
            let page: Page = Arc::new(|| "x".repeat(32 << 20));
            let result = answer(server.as_mut(), SHORT, &page);
            assert!(is_late(result), "every read of the client has extended the deadline");
            drop(server);
            dripping.join().unwrap();
        }
    }

    /// Sends and takes one byte at a time, and records the time-out of each call.
    struct Slow {
        request: io::Cursor<&'static [u8]>,
        answer: Vec<u8>,
        limits: Vec<Duration>,
    }

    impl Read for Slow {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            thread::sleep(Duration::from_millis(1));
            self.request.read(&mut buf[..1])
        }
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            thread::sleep(Duration::from_millis(1));
            self.answer.write(&bytes[..1])
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Conversation for Slow {
        fn wait_at_most(&mut self, time: Duration) -> io::Result<()> {
            self.limits.push(time);
            Ok(())
        }
    }

    #[test]
    fn no_wait_is_longer_than_the_time_left() {
        let request = io::Cursor::new(&b"GET /metrics HTTP/1.1\r\n\r\n"[..]);
        let mut slow = Slow { request, answer: Vec::new(), limits: Vec::new() };
        answer(&mut slow, PATIENCE * 100, &(Arc::new(|| "a 1\n".to_owned()) as Page)).unwrap();
        assert!(slow.answer.ends_with(b"\r\n\r\na 1\n"));
        assert_eq!(slow.limits.len(), slow.request.get_ref().len() + slow.answer.len(), "each call had its time-out");
        assert!(slow.limits[0] <= PATIENCE * 100);
        let shorter = |pair: &[Duration]| pair[1] + Duration::from_millis(1) <= pair[0];
        assert!(slow.limits.windows(2).all(shorter), "{:?}", slow.limits);
    }
}
