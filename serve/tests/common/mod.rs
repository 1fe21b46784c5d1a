//! A server in this process, and a client that sends whatever bytes a test wants.
#![allow(dead_code, reason = "each test file uses only some of these")]

pub mod iscsi_initiator;
pub mod model;
pub mod nvme_host;

use diskwright_nbd::wire::{
    Chunk, ChunkFlags, ClientFlags, Command, CommandFlags, Decoded, ErrorCode, Framing, Greeting, OptionCode,
    OptionReplyHeader, ReplyCode, ReplyHeader, RequestHeader, option,
};
use diskwright_serve::{
    ThreadError, nbd,
    net::{Address, Export, Listener, ServeError, Server, ServerOptions},
};
use diskwright_store::{BlockDevice, CacheMode, MemoryStore, RawDevice};
use std::{
    fs,
    io::{self, Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tempfile::TempDir;

/// How long a test waits for an event before it fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A server on a unix socket.
pub struct Served {
    pub server: Option<Server>,
    pub dir: TempDir,
}

impl Served {
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.socket())
    }

    pub fn stop(&mut self) -> Result<(), ServeError> {
        self.server.take().expect("the server runs").stop()
    }

    pub fn server(&self) -> &Server {
        self.server.as_ref().expect("the server runs")
    }
}

/// Serves devices under names. Prints that the test is skipped and returns `None` without io_uring.
pub fn serve(devices: Vec<(&str, Arc<dyn BlockDevice>)>, options: ServerOptions) -> Option<Served> {
    let dir = tempfile::tempdir().unwrap();
    let exports = devices
        .into_iter()
        .map(|(name, device)| Export { name: name.into(), description: format!("disk {name}"), device })
        .collect();
    let listener = Listener::bind(&Address::Unix(dir.path().join("socket"))).unwrap();
    match nbd::start(exports, vec![listener], options) {
        Ok(server) => Some(Served { server: Some(server), dir }),
        Err(ServeError::Thread(ThreadError::Ring { source })) => {
            eprintln!("skipped: no io_uring: {source}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A file of secrets, which only its owner may read: a client, and the server.
pub fn file_of_secrets(dir: &Path, client: (&str, &str), server: Option<(&str, &str)>) -> PathBuf {
    let table =
        |kind: &str, (name, secret): (&str, &str)| format!("{kind}\nname = \"{name}\"\nsecret = \"{secret}\"\n");
    let number = fs::read_dir(dir).unwrap().count();
    let path = dir.join(format!("secrets-{number}.toml"));
    let server = server.map(|server| table("[server]", server)).unwrap_or_default();
    fs::write(&path, table("[[client]]", client) + &server).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

pub fn memory(size_bytes: usize, writable: bool) -> Arc<dyn BlockDevice> {
    let bytes = (0..size_bytes).map(|n| (n % 251) as u8 ^ (n >> 12) as u8).collect();
    Arc::new(RawDevice::new(Arc::new(MemoryStore::with_bytes("memory", bytes)), writable, 512).unwrap())
}

pub fn raw_file(path: &Path, size_bytes: u64, cache: CacheMode) -> Arc<dyn BlockDevice> {
    fs::File::create(path).unwrap().set_len(size_bytes).unwrap();
    Arc::new(RawDevice::open(path, true, cache).unwrap())
}

/// A client on a socket.
pub struct Client {
    pub stream: UnixStream,
    pub framing: Framing,
    next_cookie: u64,
}

/// A complete reply: its data, or the error.
pub type Reply = Result<Vec<u8>, ErrorCode>;

impl Client {
    pub fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let mut client = Self { stream, framing: Framing::Simple, next_cookie: 1 };
        let mut greeting = [0; Greeting::NEWSTYLE_BYTES];
        client.stream.read_exact(&mut greeting).unwrap();
        assert!(matches!(Greeting::decode(&greeting), Ok(Decoded::Value(Greeting::Newstyle(_), _))));
        client.say(&(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).encode());
        client
    }

    pub fn say(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Sends an option. Returns the codes of its replies with their data.
    pub fn option(&mut self, build: impl FnOnce(&mut Vec<u8>)) -> Vec<(ReplyCode, Vec<u8>)> {
        let mut out = Vec::new();
        build(&mut out);
        self.say(&out);
        let mut replies = Vec::new();
        loop {
            let mut header = [0; OptionReplyHeader::WIRE_BYTES];
            self.stream.read_exact(&mut header).unwrap();
            let Ok(Decoded::Value(header, _)) = OptionReplyHeader::decode(&header) else { panic!("no reply") };
            let mut data = vec![0; header.data_bytes as usize];
            self.stream.read_exact(&mut data).unwrap();
            replies.push((header.code, data));
            if header.code == ReplyCode::ACK || header.code.is_error() {
                return replies;
            }
        }
    }

    /// Negotiates and enters the transmission phase.
    pub fn go(mut self, export: &str, framing: Framing, contexts: &[&str]) -> Self {
        let plain = |option| move |out: &mut Vec<u8>| option::encode_plain(option, &[], out);
        match framing {
            Framing::Simple => {}
            Framing::Structured => assert_eq!(self.option(plain(OptionCode::STRUCTURED_REPLY))[0].0, ReplyCode::ACK),
            Framing::Extended => assert_eq!(self.option(plain(OptionCode::EXTENDED_HEADERS))[0].0, ReplyCode::ACK),
        }
        if !contexts.is_empty() {
            let set = |out: &mut Vec<u8>| option::encode_contexts(OptionCode::SET_META_CONTEXT, export, contexts, out);
            assert_eq!(self.option(set).len(), contexts.len() + 1);
        }
        let go = |out: &mut Vec<u8>| option::encode_export(OptionCode::GO, export, &[], out);
        assert_eq!(self.option(go).last().unwrap().0, ReplyCode::ACK);
        self.framing = framing;
        self
    }

    pub fn request(&mut self, command: Command, flags: CommandFlags, offset_bytes: u64, len_bytes: u64) -> Vec<u8> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut out = Vec::new();
        RequestHeader { flags, command, cookie, offset_bytes, len_bytes }.encode(self.framing, &mut out);
        out
    }

    pub fn send(&mut self, command: Command, offset_bytes: u64, len_bytes: u64) -> u64 {
        let bytes = self.request(command, CommandFlags::empty(), offset_bytes, len_bytes);
        self.say(&bytes);
        self.next_cookie - 1
    }

    /// Reads one reply with its cookie. `read_bytes`: length of the data of a successful simple
    /// reply.
    pub fn try_reply(&mut self, read_bytes: usize) -> io::Result<(u64, Reply)> {
        let mut header = vec![
            0;
            match self.framing {
                Framing::Simple => ReplyHeader::SIMPLE_BYTES,
                Framing::Structured => 4,
                Framing::Extended => ReplyHeader::EXTENDED_BYTES,
            }
        ];
        self.stream.read_exact(&mut header)?;
        let header = loop {
            match ReplyHeader::decode(&header, self.framing).unwrap() {
                Decoded::Value(value, _) => break value,
                Decoded::Need(more) => {
                    let there = header.len();
                    header.resize(there + more, 0);
                    self.stream.read_exact(&mut header[there..])?;
                }
            }
        };
        match header {
            ReplyHeader::Simple { error, cookie } if error == ErrorCode::NONE => {
                let mut contents = vec![0; read_bytes];
                self.stream.read_exact(&mut contents)?;
                Ok((cookie, Ok(contents)))
            }
            ReplyHeader::Simple { error, cookie } => Ok((cookie, Err(error))),
            ReplyHeader::Chunk { flags, kind, cookie, payload_bytes, .. } => {
                assert!(flags.contains(ChunkFlags::DONE), "the server sends one chunk");
                let mut payload = vec![0; payload_bytes as usize];
                self.stream.read_exact(&mut payload)?;
                if kind.0 == 1 {
                    return Ok((cookie, Ok(payload.split_off(8))));
                }
                match Chunk::parse(kind, &payload).unwrap() {
                    Chunk::Error { code, .. } => Ok((cookie, Err(code))),
                    _ => Ok((cookie, Ok(payload))),
                }
            }
        }
    }

    pub fn reply(&mut self, read_bytes: usize) -> Reply {
        self.try_reply(read_bytes).unwrap().1
    }

    pub fn read(&mut self, offset_bytes: u64, len_bytes: u64) -> Reply {
        self.send(Command::READ, offset_bytes, len_bytes);
        self.reply(len_bytes as usize)
    }

    pub fn write(&mut self, offset_bytes: u64, data: &[u8], flags: CommandFlags) -> Reply {
        let mut bytes = self.request(Command::WRITE, flags, offset_bytes, data.len() as u64);
        bytes.extend_from_slice(data);
        self.say(&bytes);
        self.reply(0)
    }

    pub fn ask(&mut self, command: Command, flags: CommandFlags, offset_bytes: u64, len_bytes: u64) -> Reply {
        let bytes = self.request(command, flags, offset_bytes, len_bytes);
        self.say(&bytes);
        self.reply(0)
    }

    /// Reads until the server closes the connection. `false` if that takes longer than `PATIENCE`.
    pub fn is_hung_up(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}

/// Waits until `so` returns true. Panics after `PATIENCE`.
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !so() {
        assert!(start.elapsed() < PATIENCE, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
