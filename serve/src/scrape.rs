//! Metrics over HTTP: as much of it as Prometheus, curl and a browser need, for GET of one page.
//!
//! One thread, one request at a time, each with a limit of time and of size: whoever scrapes is a program of the same operator.

use crate::nbd::{Address, ListenError, Listener};
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::UnixListener,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
    time::Instant,
};

/// Longest request that is read.
const REQUEST_BYTES_MAX: usize = 8 << 10;

/// Time for a request, and for its answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the page shows.
pub type Page = Arc<dyn Fn() -> String + Send + Sync>;

/// A page that is served until this is dropped.
#[derive(Debug)]
pub struct Scrape {
    address: Address,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

trait Conversation: Read + Write + Send {}
impl<T: Read + Write + Send> Conversation for T {}

impl Scrape {
    /// Serves `page` at `/metrics` (and `/`) of an address.
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
                    (Some(tcp), _) => tcp.accept().and_then(|(stream, _)| {
                        stream.set_read_timeout(Some(PATIENCE))?;
                        stream.set_write_timeout(Some(PATIENCE))?;
                        Ok(Box::new(stream) as _)
                    }),
                    (None, Some(unix)) => unix.accept().and_then(|(stream, _)| {
                        stream.set_read_timeout(Some(PATIENCE))?;
                        stream.set_write_timeout(Some(PATIENCE))?;
                        Ok(Box::new(stream) as _)
                    }),
                    (None, None) => return,
                };
                match accepted.and_then(|mut stream| answer(stream.as_mut(), &page)) {
                    Ok(()) => {}
                    Err(error) => {
                        tracing::debug!(%error, "a request for metrics failed");
                        // Something may have run out; it is not asked for again at once.
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

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }
}

impl Drop for Scrape {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // A visit, so that the thread looks up.
        let visited = match &self.address {
            Address::Tcp(host, port) => {
                let host = if host == "0.0.0.0" || host == "::" { "localhost" } else { host };
                TcpStream::connect((host, *port)).and_then(|stream| stream.shutdown(Shutdown::Both))
            }
            Address::Unix(path) => std::os::unix::net::UnixStream::connect(path).map(drop),
        };
        if let (Ok(()), Some(thread)) = (visited, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

fn answer(stream: &mut dyn Conversation, page: &Page) -> io::Result<()> {
    let (mut request, began) = (Vec::new(), Instant::now());
    let mut chunk = [0; 1024];
    while !request.windows(4).any(|four| four == b"\r\n\r\n") {
        let got = stream.read(&mut chunk)?;
        // The time of a whole request: one who sends a byte now and then would keep the others out.
        if got == 0 || request.len() + got > REQUEST_BYTES_MAX || began.elapsed() > PATIENCE {
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
    fn the_page_is_told_and_nothing_else() {
        let scrape = Scrape::start(&Address::Tcp("127.0.0.1".into(), 0), Arc::new(|| "a 1\n".to_owned())).unwrap();
        let text = ask(scrape.address(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\na 1\n"), "{text}");
        assert!(ask(scrape.address(), "GET /etc/passwd HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(ask(scrape.address(), "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        assert_eq!(ask(scrape.address(), &"x".repeat(9000)), "");
        let address = scrape.address().clone();
        drop(scrape);
        assert!(Listener::bind(&address).is_ok(), "it has let go");
    }
}
