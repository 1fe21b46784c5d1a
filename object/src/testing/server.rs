//! A web server for tests, which does what it is told: it is slow, lies, and cuts connections.
//!
//! ```text
//!   test ─ put, faults ─▶ TestServer ◀─ GET with Range and If-Match ─ the code under test
//!                            └─ seen: what was asked for
//! ```
//!
//! It knows just enough of HTTP/1.1: one request after the other on a connection, ranges, ETags.
//! Enabled by the feature `testing`, which the tests of other crates use.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// What the server does wrong, once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Sends so many bytes of the answer, head and body, and closes the connection.
    Cut(usize),
    /// Answers with a status and a body.
    Status(u16, String),
    /// Sends the body in pieces of this length, with pauses in between.
    Drip(usize, Duration),
    /// Sends bytes of another range, and says so.
    OtherRange,
    /// Says another ETag.
    OtherEtag,
    /// Says the whole length, sends half of the body and closes the connection.
    Half,
    /// Sends more than was asked for.
    More,
    /// Sends nothing for this long.
    Silence(Duration),
    /// Leads to another address.
    Redirect(String),
    /// Ignores the range.
    Whole,
    /// Compresses.
    Gzip,
    /// Another total length.
    OtherSize,
    /// The bucket is in this region.
    Region(String),
}

/// A request that the server saw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Path and query.
    pub path: String,
    /// The bytes asked for.
    pub range: Option<Range<u64>>,
    /// The header If-Match.
    pub if_match: Option<String>,
    /// The header Authorization.
    pub authorization: Option<String>,
}

#[derive(Debug, Clone)]
struct Object {
    bytes: Arc<Vec<u8>>,
    etag: String,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, Object>,
    faults: VecDeque<Option<Fault>>,
    always: Option<Fault>,
    latency: Duration,
    seen: Vec<Seen>,
    under_way: usize,
    most_under_way: usize,
}

/// The server; see the module documentation. It ends with the value.
#[derive(Debug)]
pub struct TestServer {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    is_over: Arc<AtomicBool>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TestServer {
    /// Starts a server on a free port of this machine.
    ///
    /// # Panics
    /// No port is free.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("no port is free");
        let address = listener.local_addr().expect("a socket has an address");
        let (state, is_over) = (Arc::new(Mutex::new(State::default())), Arc::new(AtomicBool::new(false)));
        let (shared, over) = (Arc::clone(&state), Arc::clone(&is_over));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if over.load(Ordering::Acquire) {
                    return;
                }
                let (shared, over) = (Arc::clone(&shared), Arc::clone(&over));
                thread::spawn(move || {
                    // An error is the end of the connection.
                    let _ = serve(&stream, &shared, &over);
                });
            }
        });
        Self { address, state, is_over }
    }

    /// Host and port.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// The address of an object.
    pub fn url(&self, name: &str) -> String {
        format!("http://{}/{name}", self.address)
    }

    /// Puts an object, in place of another one.
    pub fn put(&self, name: &str, bytes: Vec<u8>, etag: &str) {
        let object = Object { bytes: Arc::new(bytes), etag: etag.into() };
        lock(&self.state).objects.insert(format!("/{name}"), object);
    }

    /// Removes an object.
    pub fn remove(&self, name: &str) {
        lock(&self.state).objects.remove(&format!("/{name}"));
    }

    /// What happens to the next requests, one each.
    pub fn next(&self, faults: impl IntoIterator<Item = Option<Fault>>) {
        lock(&self.state).faults.extend(faults);
    }

    /// What happens to all requests from now on.
    pub fn always(&self, fault: Option<Fault>) {
        lock(&self.state).always = fault;
    }

    /// How long each answer takes.
    pub fn set_latency(&self, latency: Duration) {
        lock(&self.state).latency = latency;
    }

    /// What was asked for since this was last called.
    pub fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut lock(&self.state).seen)
    }

    /// How many requests were under way at once.
    pub fn most_under_way(&self) -> usize {
        lock(&self.state).most_under_way
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

/// Reads the head of a request.
fn request(reader: &mut impl BufRead) -> std::io::Result<Option<Seen>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut seen = Seen { path, range: None, if_match: None, authorization: None };
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            return Ok(Some(seen));
        }
        let Some((name, value)) = line.trim().split_once(": ") else { continue };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let range = value.strip_prefix("bytes=").and_then(|range| range.split_once('-'));
                let number = |text: &str| text.parse::<u64>().ok();
                seen.range = range.and_then(|(first, last)| Some(number(first)?..number(last)? + 1));
            }
            "if-match" => seen.if_match = Some(value.to_owned()),
            "authorization" => seen.authorization = Some(value.to_owned()),
            _ => {}
        }
    }
}

fn serve(stream: &TcpStream, state: &Mutex<State>, is_over: &AtomicBool) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    while let Some(seen) = request(&mut reader)? {
        if is_over.load(Ordering::Acquire) {
            return Ok(());
        }
        let (object, fault, latency) = {
            let mut state = lock(state);
            state.seen.push(seen.clone());
            state.under_way += 1;
            state.most_under_way = state.most_under_way.max(state.under_way);
            let path = seen.path.split('?').next().unwrap_or_default();
            let fault = state.faults.pop_front().unwrap_or_else(|| state.always.clone());
            (state.objects.get(path).cloned(), fault, state.latency)
        };
        thread::sleep(latency);
        let goes_on = answer(stream, &seen, object, fault);
        lock(state).under_way -= 1;
        if !goes_on? {
            return Ok(());
        }
    }
    Ok(())
}

/// Sends an answer. Returns whether the connection goes on.
fn answer(mut stream: &TcpStream, seen: &Seen, object: Option<Object>, fault: Option<Fault>) -> std::io::Result<bool> {
    let plain = |status: &str, more: &str, body: &str| {
        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{more}\r\n{body}", body.len()).into_bytes()
    };
    match &fault {
        Some(Fault::Silence(length)) => thread::sleep(*length),
        Some(Fault::Status(status, body)) => {
            stream.write_all(&plain(&format!("{status} Fault"), "", body))?;
            return Ok(true);
        }
        Some(Fault::Region(region)) => {
            stream.write_all(&plain("301 Moved Permanently", &format!("x-amz-bucket-region: {region}\r\n"), ""))?;
            return Ok(true);
        }
        Some(Fault::Redirect(to)) => {
            stream.write_all(&plain("302 Found", &format!("Location: {to}\r\n"), ""))?;
            return Ok(true);
        }
        _ => {}
    }
    let Some(object) = object else {
        stream.write_all(&plain("404 Not Found", "", ""))?;
        return Ok(true);
    };
    if seen.if_match.as_ref().is_some_and(|etag| *etag != object.etag) {
        stream.write_all(&plain("412 Precondition Failed", "", ""))?;
        return Ok(true);
    }
    let size = object.bytes.len() as u64;
    let mut range = seen.range.clone().unwrap_or(0..size);
    range.end = range.end.min(size);
    if range.start >= range.end {
        stream.write_all(&plain("416 Range Not Satisfiable", &format!("Content-Range: bytes */{size}\r\n"), ""))?;
        return Ok(true);
    }
    let mut status = "206 Partial Content";
    match fault {
        Some(Fault::OtherRange) => range = if range.start > 0 { 0..range.end - range.start } else { 0..range.end / 2 },
        Some(Fault::Whole) => (status, range) = ("200 OK", 0..size),
        _ => {}
    }
    let mut body = object.bytes[range.start as usize..range.end as usize].to_vec();
    let etag = if fault == Some(Fault::OtherEtag) { "\"other\"".to_owned() } else { object.etag };
    let total = if fault == Some(Fault::OtherSize) { size + 1 } else { size };
    let coding = if fault == Some(Fault::Gzip) { "Content-Encoding: gzip\r\n" } else { "" };
    if fault == Some(Fault::More) {
        body.extend_from_slice(b"more");
    }
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nContent-Range: bytes {}-{}/{total}\r\nETag: {etag}\r\n{coding}\
         Last-Modified: Tue, 03 Nov 2026 08:00:00 GMT\r\n\r\n",
        body.len(),
        range.start,
        range.end - 1,
    );
    match fault {
        Some(Fault::Half) => {
            stream.write_all(head.as_bytes())?;
            stream.write_all(&body[..body.len() / 2])?;
            Ok(false)
        }
        Some(Fault::Cut(sent)) => {
            let all = [head.as_bytes(), &body].concat();
            stream.write_all(&all[..sent.min(all.len())])?;
            Ok(false)
        }
        Some(Fault::Drip(piece, pause)) => {
            stream.write_all(head.as_bytes())?;
            for bytes in body.chunks(piece) {
                thread::sleep(pause);
                stream.write_all(bytes)?;
            }
            Ok(true)
        }
        _ => {
            stream.write_all(head.as_bytes())?;
            stream.write_all(&body)?;
            Ok(true)
        }
    }
}
