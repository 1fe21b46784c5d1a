//! versitygw on this machine, behind a proxy that adds a delay to each request and counts ranges.
//!
//! ```text
//!   client ─▶ proxy: + 5 ms, notes "range: bytes=a-b" ─▶ versitygw ─▶ a file
//! ```

use diskwright_lab::{LabError, Result};
use diskwright_load::data;
use diskwright_object::Settings;
use std::{
    env, fs,
    fs::File,
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    ops::Range,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

pub(crate) const MIB: u64 = 1 << 20;
/// The bucket and the key of the object.
pub(crate) const BUCKET: &str = "golden";
pub(crate) const KEY: &str = "disk.raw";
pub(crate) const NAME: &str = "s3://golden/disk.raw";
pub(crate) const SEED: u64 = 23;
/// What the proxy adds to each request.
pub(crate) const DELAY: Duration = Duration::from_millis(5);
const METHODS: [&[u8]; 5] = [b"GET ", b"PUT ", b"HEAD ", b"POST ", b"DELETE "];
const PATIENCE: Duration = Duration::from_secs(20);
const ACCESS: &str = "AKIABENCH";
const SECRET: &str = "bench-secret";

/// The server and its proxy. They end with the value.
#[derive(Debug)]
pub(crate) struct Gateway {
    server: Child,
    /// Where the proxy listens.
    endpoint: String,
    /// The object as a file.
    pub(crate) file: PathBuf,
    dir: PathBuf,
    asked: Arc<Mutex<Vec<Range<u64>>>>,
    sent_bytes: Arc<AtomicU64>,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn program() -> Option<PathBuf> {
    let paths = env::var_os("PATH").unwrap_or_default();
    let home = env::var_os("HOME").map(|home| PathBuf::from(home).join("go/bin"));
    let own = env::current_exe().ok().and_then(|exe| Some(exe.parent()?.parent()?.join("go")));
    env::split_paths(&paths).chain(home).chain(own).map(|dir| dir.join("versitygw")).find(|path| path.exists())
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

impl Gateway {
    /// Starts both. The inner error says why there is none.
    pub(crate) fn start(dir: &Path, size_bytes: u64) -> Result<Result<Self, String>> {
        let Some(program) = program() else {
            return Ok(Err(
                "versitygw is not installed: go install github.com/versity/versitygw/cmd/versitygw@v1.8.0".into()
            ));
        };
        let wrong = |doing| LabError::file(doing, dir);
        let (buckets, meta) = (dir.join("buckets"), dir.join("meta"));
        fs::create_dir_all(buckets.join(BUCKET)).map_err(wrong("make a bucket in"))?;
        fs::create_dir_all(&meta).map_err(wrong("make a folder in"))?;
        let file = buckets.join(BUCKET).join(KEY);
        fill(&file, size_bytes).map_err(LabError::file("write", &file))?;
        let port = free_port().map_err(wrong("find a port for a server of"))?;
        let mut command = Command::new(program);
        command.args([
            "--access",
            ACCESS,
            "--secret",
            SECRET,
            "--port",
            &format!("127.0.0.1:{port}"),
            "--quiet",
            "posix",
        ]);
        // What was not uploaded has no ETag of its own.
        command.args(["--default-etag", "\"golden\"", "--sidecar"]).arg(&meta).arg(&buckets);
        let server = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let server = server.map_err(wrong("start versitygw in"))?;
        let listener = TcpListener::bind("127.0.0.1:0").map_err(wrong("start a proxy for"))?;
        let endpoint = format!("http://{}", listener.local_addr().map_err(wrong("start a proxy for"))?);
        let asked: Arc<Mutex<Vec<Range<u64>>>> = Arc::default();
        let sent_bytes: Arc<AtomicU64> = Arc::default();
        let (dir, sent) = (dir.to_owned(), Arc::clone(&sent_bytes));
        let gateway = Self { server, endpoint, file, dir, asked: Arc::clone(&asked), sent_bytes };
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if begun.elapsed() > PATIENCE {
                return Ok(Err("versitygw does not listen".into()));
            }
            thread::sleep(Duration::from_millis(20));
        }
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (asked, sent) = (Arc::clone(&asked), Arc::clone(&sent));
                thread::spawn(move || {
                    // An error is the end of the connection.
                    let _ = pass_on(client, port, &asked, &sent);
                });
            }
        });
        Ok(Ok(gateway))
    }

    /// How its clients reach it, with a cache of their own.
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            cache: Some(self.cache()),
            cache_bytes: 64 << 30,
            timeout: PATIENCE,
            allow_http: false,
            aws: self.variables().map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter().collect(),
        }
    }

    /// The same for a program.
    pub(crate) fn variables(&self) -> [(&'static str, &str); 4] {
        [
            ("AWS_ENDPOINT_URL", self.endpoint.as_str()),
            ("AWS_ACCESS_KEY_ID", ACCESS),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
            ("AWS_REGION", "us-east-1"),
        ]
    }

    /// The folder of its clients' cache.
    pub(crate) fn cache(&self) -> PathBuf {
        self.dir.join("cache")
    }

    /// The bucket as a folder.
    pub(crate) fn bucket(&self) -> PathBuf {
        self.dir.join("buckets").join(BUCKET)
    }

    /// Bytes that clients have sent since this was last called.
    pub(crate) fn take_sent_bytes(&self) -> u64 {
        self.sent_bytes.swap(0, Ordering::Relaxed)
    }

    /// The ranges that were asked for since this was last called.
    pub(crate) fn take_asked(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.asked.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn fill(path: &Path, size_bytes: u64) -> io::Result<()> {
    let mut file = File::create(path)?;
    let mut buf = vec![0; MIB as usize];
    for offset_bytes in (0..size_bytes).step_by(MIB as usize) {
        data::fill(SEED, offset_bytes, &mut buf);
        file.write_all(&buf)?;
    }
    file.sync_all()
}

/// Passes a connection on.
fn pass_on(mut client: TcpStream, port: u16, asked: &Mutex<Vec<Range<u64>>>, sent_bytes: &AtomicU64) -> io::Result<()> {
    let mut server = TcpStream::connect(("127.0.0.1", port))?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut answers, mut to_client) = (server.try_clone()?, client.try_clone()?);
    thread::spawn(move || {
        let _ = io::copy(&mut answers, &mut to_client);
        let _ = to_client.shutdown(Shutdown::Both);
    });
    let mut buf = vec![0; 64 << 10];
    loop {
        // The head of a request is short, and comes in one piece.
        let len = client.read(&mut buf)?;
        if len == 0 {
            return server.shutdown(Shutdown::Write);
        }
        sent_bytes.fetch_add(len as u64, Ordering::Relaxed);
        // The rest is the body of an upload.
        if METHODS.iter().any(|method| buf[..len].starts_with(method)) {
            asked.lock().unwrap_or_else(PoisonError::into_inner).extend(range_of(&buf[..len]));
            thread::sleep(DELAY);
        }
        server.write_all(&buf[..len])?;
    }
}

/// The range that a request asks for.
fn range_of(head: &[u8]) -> Option<Range<u64>> {
    let head = String::from_utf8_lossy(head).to_ascii_lowercase();
    let (_, rest) = head.split_once("\r\nrange: bytes=")?;
    let (first, last) = rest.split("\r\n").next()?.split_once('-')?;
    Some(first.parse().ok()?..last.parse::<u64>().ok()? + 1)
}
