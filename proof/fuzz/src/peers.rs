//! A hostile client of the NBD server, and a hostile server for the NBD client, over real sockets.
//!
//! An input is a list of messages, so that a fuzzer gets past the handshake: valid messages, valid
//! messages with one wrong field, and any bytes. The peer sends all of them, shuts down its side,
//! and reads until the other side has closed. What must hold:
//!
//! - The server replies or disconnects soon. It sends no more than was requested. Its threads stay
//!   alive, and it serves the next client.
//! - Every request of the client completes and returns its buffer. Errors have a text. Nothing
//!   waits for a reply that cannot come.
//! - Memory depends on the bytes sent, not on length fields (`tests/corpus.rs` measures it).

use crate::scripted::{PATIENCE, ScriptedServer, play_client};
use arbitrary::{Arbitrary, Unstructured};
use diskwright_nbd::{
    NbdDevice, NbdUri,
    wire::{
        Answering, CONTEXT_ALLOCATION, ChunkFlags, ChunkKind, ClientFlags, Command, CommandFlags, ErrorCode, Framing,
        Greeting, HandshakeFlags, Info, OptionCode, OptionHeader, OptionReplyHeader, ReplyCode, RequestHeader,
        TransmissionFlags, option, option_reply, reply,
    },
};
use diskwright_serve::{
    nbd,
    net::{Address, Export, Listener, Server, ServerOptions},
};
use diskwright_store::{BlockDevice, Blocking, EngineKind, IoBuf, MemoryStore, QueueOptions, RawDevice, Request};
use std::sync::{Arc, OnceLock};
use tempfile::TempDir;

const SIZE_BYTES: u64 = 1 << 20;
/// Maximum number of messages in an input.
const MOST: usize = 12;

/// The framing of an input's messages.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Frame {
    Simple,
    Structured,
    Extended,
}

impl Frame {
    fn framing(self) -> Framing {
        match self {
            Self::Simple => Framing::Simple,
            Self::Structured => Framing::Structured,
            Self::Extended => Framing::Extended,
        }
    }
}

/// A number as hostile peers send it.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Number {
    Small(u8),
    Sectors(u8),
    NearPower(u8, i8),
    NearEnd(i16),
    Any(u64),
}

impl Number {
    fn get(self) -> u64 {
        match self {
            Self::Small(value) => value.into(),
            Self::Sectors(value) => u64::from(value) * 512,
            Self::NearPower(power, by) => (1_u64 << (power % 64)).wrapping_add_signed(by.into()),
            Self::NearEnd(by) => SIZE_BYTES.wrapping_add_signed(by.into()),
            Self::Any(value) => value,
        }
    }
}

/// A message of the client.
#[derive(Debug, Arbitrary)]
enum ClientMessage {
    /// An option with data. The length field is wrong by `length_error`.
    Option { code: u8, data: Vec<u8>, length_error: i8 },
    /// A valid query of contexts.
    Contexts { set: bool, queries: Vec<String> },
    /// A valid request to enter the transmission phase.
    Go { name: bool, infos: Vec<u16> },
    /// A request, with up to `payload * 64` bytes of its payload.
    Request { frame: Frame, command: u8, flags: u16, offset: Number, len: Number, payload: u8 },
    /// Any bytes.
    Bytes(Vec<u8>),
}

#[derive(Debug, Arbitrary)]
struct ClientScript {
    /// If given, the input begins with a valid handshake for this framing.
    handshake: Option<Frame>,
    /// Otherwise it begins with these client flags.
    flags: u32,
    messages: Vec<ClientMessage>,
    /// Bytes of each send; 0 sends everything at once.
    piece: u8,
}

fn plain(code: OptionCode, out: &mut Vec<u8>) {
    option::encode_plain(code, &[], out);
}

impl ClientMessage {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Option { code, data, length_error } => {
                let claimed = (data.len() as u32).wrapping_add_signed((*length_error).into());
                let header = OptionHeader { option: OptionCode((code % 13).into()), data_bytes: claimed };
                out.extend_from_slice(&header.encode());
                out.extend_from_slice(data);
            }
            Self::Contexts { set, queries } => {
                let code = if *set { OptionCode::SET_META_CONTEXT } else { OptionCode::LIST_META_CONTEXT };
                let mut queries: Vec<&str> = queries.iter().map(String::as_str).take(MOST).collect();
                queries.push(CONTEXT_ALLOCATION);
                option::encode_contexts(code, "disk", &queries, out);
            }
            Self::Go { name, infos } => {
                let infos = &infos[..infos.len().min(MOST)];
                option::encode_export(OptionCode::GO, if *name { "disk" } else { "" }, infos, out);
            }
            Self::Request { frame, command, flags, offset, len, payload } => {
                let framing = frame.framing();
                let mut len_bytes = len.get();
                if framing != Framing::Extended {
                    len_bytes &= u64::from(u32::MAX);
                }
                let request = RequestHeader {
                    flags: CommandFlags::from_bits_retain(*flags),
                    command: Command((command % 10).into()),
                    cookie: out.len() as u64,
                    offset_bytes: offset.get(),
                    len_bytes,
                };
                request.encode(framing, out);
                let owed = request.payload_bytes(framing).min(u64::from(*payload) * 64);
                out.resize(out.len() + owed as usize, 0x6b);
            }
            Self::Bytes(bytes) => out.extend_from_slice(bytes),
        }
    }
}

impl ClientScript {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self.handshake {
            None => out.extend_from_slice(&self.flags.to_be_bytes()),
            Some(frame) => {
                out.extend_from_slice(&(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).encode());
                match frame {
                    Frame::Simple => {}
                    Frame::Structured => plain(OptionCode::STRUCTURED_REPLY, &mut out),
                    Frame::Extended => plain(OptionCode::EXTENDED_HEADERS, &mut out),
                }
                option::encode_contexts(OptionCode::SET_META_CONTEXT, "disk", &[CONTEXT_ALLOCATION], &mut out);
                option::encode_export(OptionCode::GO, "disk", &[], &mut out);
            }
        }
        self.messages.iter().take(MOST).for_each(|message| message.encode(&mut out));
        out
    }
}

/// A server that runs until the process ends.
struct Running {
    server: Server,
    dir: TempDir,
}

/// Prints that the target is skipped and returns `None` if there is no io_uring.
fn server() -> Option<&'static Running> {
    static SERVER: OnceLock<Option<Running>> = OnceLock::new();
    let start = || {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let store = Arc::new(MemoryStore::with_bytes("disk", vec![0x5a; SIZE_BYTES as usize]));
        let device = Arc::new(RawDevice::new(store, true, 512).expect("a disk in memory"));
        let export = Export { name: "disk".into(), description: "fuzzed".into(), device };
        let listener = Listener::bind(&Address::Unix(dir.path().join("socket"))).expect("a socket");
        match nbd::start(vec![export], vec![listener], ServerOptions { workers: 1, ..ServerOptions::default() }) {
            Ok(server) => Some(Running { server, dir }),
            Err(error) => {
                println!("skipped: hostile clients of the NBD server: {error}");
                None
            }
        }
    };
    SERVER.get_or_init(start).as_ref()
}

/// Starts the servers of this module, so that their memory is not counted for an input.
pub fn warm_up() {
    let _ = (server(), hostile_server());
}

/// The fuzz target: a hostile client of our server.
pub fn nbd_server(data: &[u8]) {
    let Ok(script) = ClientScript::arbitrary(&mut Unstructured::new(data)) else { return };
    let Some(Running { server, dir }) = server() else { return };
    let bytes = script.encode();
    let answered = play_client(dir.path().join("socket"), &bytes, script.piece);
    // A message may be answered with the whole disk, or with a list.
    let messages = script.messages.len().min(MOST) as u64 + 4 + bytes.len() as u64 / 16;
    assert!(answered <= messages * (SIZE_BYTES + (64 << 10)), "{answered} bytes of replies to {} bytes", bytes.len());
    assert!(server.is_well(), "a thread of the server ended");
    if data.first().is_some_and(|byte| byte % 16 == 0) {
        let client = NbdDevice::open(&NbdUri::unix(dir.path().join("socket"), "disk"), false).expect("a client");
        let mut queue = Blocking::open(&client, EngineKind::Auto).expect("a queue");
        queue.read(0, &mut [0; 512]).expect("a read by another client");
    }
}

/// A reply of the server in the transmission phase.
#[derive(Debug, Arbitrary)]
enum ServerReply {
    /// A simple reply, with data if `contents`.
    Simple { cookie: u8, error: u8, contents: bool },
    /// A chunk of data whose length field is wrong by `length_error`.
    Data { cookie: u8, offset: Number, len: u8, length_error: i8, done: bool },
    /// A chunk for a hole.
    Hole { cookie: u8, offset: Number, len: Number, done: bool },
    /// A block status chunk with these runs.
    Status { cookie: u8, context: u8, runs: Vec<(Number, u8)>, done: bool },
    /// An error chunk with a text.
    Error { cookie: u8, code: u8, words: String, offset: Option<Number> },
    /// A chunk of any kind whose length field is wrong by `length_error`.
    Chunk { cookie: u8, kind: u16, flags: u16, payload: Vec<u8>, length_error: i8 },
    /// The chunk that ends a reply.
    Done { cookie: u8 },
    /// Any bytes.
    Bytes(Vec<u8>),
}

#[derive(Debug, Arbitrary)]
struct ServerScript {
    frame: Frame,
    flags: u16,
    size: Option<Number>,
    /// Replaces the n-th reply of the handshake: its index, code, data, and the error of its
    /// length.
    instead: Option<(u8, u32, Vec<u8>, i8)>,
    answers: Vec<ServerReply>,
    piece: u8,
    /// Where the output is truncated.
    cut: u16,
}

/// The cookies of a client's first requests on a connection: a generation in the upper half, a slot
/// in the lower.
fn cookie(number: u8) -> u64 {
    (u64::from(number & 3) << 32) | u64::from((number >> 2) & 3)
}

impl ServerReply {
    fn encode(&self, framing: Framing, out: &mut Vec<u8>) {
        let to = |number: &u8| Answering { framing, cookie: cookie(*number), offset_bytes: 4096 };
        let flags = |done: &bool| if *done { ChunkFlags::DONE } else { ChunkFlags::empty() };
        match self {
            Self::Simple { cookie: number, error, contents } => {
                out.extend_from_slice(&reply::simple(cookie(*number), ErrorCode((error % 40).into())));
                out.resize(out.len() + if *contents { 8192 } else { 0 }, 0x5a);
            }
            Self::Data { cookie, offset, len, length_error, done } => {
                let len = u32::from(*len) * 64;
                let claimed = len.wrapping_add_signed((*length_error).into());
                out.extend_from_slice(&to(cookie).data(flags(done), offset.get(), claimed));
                out.resize(out.len() + len as usize, 0x5a);
            }
            Self::Hole { cookie, offset, len, done } => {
                to(cookie).hole(flags(done), offset.get(), len.get() as u32, out);
            }
            Self::Status { cookie, context, runs, done } => {
                let run = |(len, status): &(Number, u8)| diskwright_nbd::wire::Descriptor {
                    len_bytes: len.get() & u64::from(u32::MAX),
                    status: (*status).into(),
                };
                // At least one run, because our encoder requires it. `Chunk` covers replies without
                // runs.
                let runs: Vec<_> = runs.iter().chain([&(Number::Sectors(8), 0)]).take(MOST).map(run).collect();
                to(cookie).block_status(flags(done), (context % 9).into(), &runs, out);
            }
            Self::Error { cookie, code, words, offset } => {
                let words: String = words.chars().take(500).collect();
                to(cookie).error(ErrorCode((*code).into()), &words, offset.map(Number::get), out);
            }
            Self::Chunk { cookie, kind, flags, payload, length_error } => {
                let claimed = (payload.len() as u32).wrapping_add_signed((*length_error).into());
                let flags = ChunkFlags::from_bits_retain(*flags);
                out.extend_from_slice(&to(cookie).chunk(flags, ChunkKind(*kind), claimed));
                out.extend_from_slice(payload);
            }
            Self::Done { cookie } => out.extend_from_slice(&to(cookie).done()),
            Self::Bytes(bytes) => out.extend_from_slice(bytes),
        }
    }
}

impl ServerScript {
    fn encode(&self) -> Vec<u8> {
        let framing = self.frame.framing();
        let mut replies: Vec<Vec<u8>> = Vec::new();
        let mut reply = |make: &dyn Fn(&mut Vec<u8>)| {
            let mut out = Vec::new();
            make(&mut out);
            replies.push(out);
        };
        let unsup = |code: OptionCode| {
            move |out: &mut Vec<u8>| option_reply::encode_refusal(code, ReplyCode::ERR_UNSUP, "no", out)
        };
        let ack = |code: OptionCode| move |out: &mut Vec<u8>| option_reply::encode_ack(code, out);
        match framing {
            Framing::Simple => {
                reply(&unsup(OptionCode::EXTENDED_HEADERS));
                reply(&unsup(OptionCode::STRUCTURED_REPLY));
            }
            Framing::Structured => {
                reply(&unsup(OptionCode::EXTENDED_HEADERS));
                reply(&ack(OptionCode::STRUCTURED_REPLY));
            }
            Framing::Extended => reply(&ack(OptionCode::EXTENDED_HEADERS)),
        }
        if framing != Framing::Simple {
            reply(&|out| option_reply::encode_context(OptionCode::SET_META_CONTEXT, 7, CONTEXT_ALLOCATION, out));
            reply(&ack(OptionCode::SET_META_CONTEXT));
            reply(&ack(OptionCode::LIST_META_CONTEXT));
        }
        let flags = TransmissionFlags::from_bits_retain((self.flags & !2) | 1);
        let size_bytes = self.size.map_or(SIZE_BYTES, Number::get);
        reply(&|out| option_reply::encode_info(OptionCode::GO, &Info::Export { size_bytes, flags }, out));
        reply(&ack(OptionCode::GO));
        if let Some((which, code, data, length_error)) = &self.instead {
            let which = usize::from(*which) % replies.len();
            let option = OptionReplyHeader::decode(&replies[which]);
            if let Ok(diskwright_nbd::wire::Decoded::Value(header, _)) = option {
                let data_bytes = (data.len() as u32).wrapping_add_signed((*length_error).into());
                let code = ReplyCode((code % 12) | (code & 0x8000_0000));
                replies[which] = OptionReplyHeader { code, data_bytes, ..header }.encode().to_vec();
                replies[which].extend_from_slice(data);
            }
        }
        let mut out = Greeting::encode_newstyle(HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES).to_vec();
        out.extend(replies.concat());
        self.answers.iter().take(MOST).for_each(|answer| answer.encode(framing, &mut out));
        let kept = (out.len() as u64 * (u64::from(self.cut) + 1)) >> 16;
        // Truncated in a quarter of all inputs.
        if self.cut < u16::MAX / 4 {
            out.truncate(kept as usize * 4);
        }
        out
    }
}

fn hostile_server() -> &'static ScriptedServer {
    static SERVER: OnceLock<&ScriptedServer> = OnceLock::new();
    SERVER.get_or_init(ScriptedServer::start)
}

/// The fuzz target: a hostile server for our client.
pub fn nbd_client(data: &[u8]) {
    let Ok(script) = ServerScript::arbitrary(&mut Unstructured::new(data)) else { return };
    let hostile_server = hostile_server();
    hostile_server.set([script.encode()], script.piece);
    let mut uri = NbdUri::unix(hostile_server.socket(), "disk");
    uri.timeout = Some(PATIENCE);
    let device = match NbdDevice::open(&uri, true) {
        Ok(device) => device,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let sector = u64::from(device.geometry().logical_sector_bytes);
    let Ok(mut queue) = device.open_queue(&QueueOptions { depth: 4, ..QueueOptions::default() }) else { return };
    // Requests that do not fit the server's block size are refused here.
    let requests = [
        Request::read(4096, 8192, IoBuf::new(8192), 0),
        Request::write(0, 4096, IoBuf::new(4096), 1),
        Request::write_zeroes(0, sector, 2),
        Request::flush(3),
    ];
    let pushed = requests.into_iter().filter_map(|request| queue.push(request).ok()).count();
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done).expect("a queue survives a hostile server");
    }
    assert_eq!(done.len(), pushed, "every request completes once");
    for completion in &done {
        assert!(completion.buf.is_some() == (completion.tag < 2), "request {} lost its buffer", completion.tag);
        assert!(completion.result.as_ref().err().is_none_or(|error| !error.to_string().is_empty()));
    }
    drop(queue);
    let mut extents = Vec::new();
    let _ = device.extents(0, device.geometry().size_bytes.min(SIZE_BYTES), &mut extents);
}
