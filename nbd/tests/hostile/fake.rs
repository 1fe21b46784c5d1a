//! The fake server: a thread that performs a valid handshake and then answers according to its
//! script.

use diskwright_nbd::{
    NbdDevice, NbdUri,
    wire::{
        Answering, CONTEXT_ALLOCATION, ChunkFlags, ClientOption, Command, Decoded, Descriptor, ErrorCode, Framing,
        Greeting, HandshakeFlags, Info, OptionCode, OptionHeader, ReplyCode, RequestHeader, TransmissionFlags,
        option_reply, reply,
    },
};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};
use tempfile::TempDir;

pub const SIZE: u64 = 1 << 20;

/// Answers one request, whose payload was received; `false` closes the connection.
pub type Script = dyn Fn(&RequestHeader, Framing, &mut UnixStream) -> bool + Send + Sync;

pub struct Fake {
    pub dir: TempDir,
    /// Number of accepted connections.
    pub taken: Arc<AtomicUsize>,
}

impl Fake {
    pub fn uri(&self) -> NbdUri {
        NbdUri::unix(self.dir.path().join("sock"), "")
    }

    pub fn open(&self) -> NbdDevice {
        NbdDevice::open(&self.uri(), true).unwrap()
    }
}

/// A server that is correct until the transmission phase, and accepts one connection after the
/// other.
pub fn fake(
    framing: Framing,
    script: impl Fn(&RequestHeader, Framing, &mut UnixStream) -> bool + Send + Sync + 'static,
) -> Fake {
    let script: Arc<Script> = Arc::new(script);
    raw(move |stream| {
        if shake_hands(stream, framing).is_ok() {
            let _ = serve(stream, framing, &*script);
        }
    })
}

/// A server that runs `act` on each connection.
pub fn raw(act: impl Fn(&mut UnixStream) + Send + Sync + 'static) -> Fake {
    let dir = TempDir::new().unwrap();
    let listener = UnixListener::bind(dir.path().join("sock")).unwrap();
    let taken = Arc::new(AtomicUsize::new(0));
    let (act, count) = (Arc::new(act), Arc::clone(&taken));
    // The thread ends with the process; the socket is removed with the folder.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            count.fetch_add(1, Ordering::SeqCst);
            let act = Arc::clone(&act);
            thread::spawn(move || act(&mut stream));
        }
    });
    Fake { dir, taken }
}

pub fn take(stream: &mut UnixStream, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

pub fn shake_hands(stream: &mut UnixStream, framing: Framing) -> io::Result<()> {
    let flags = HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES;
    stream.write_all(&Greeting::encode_newstyle(flags))?;
    take(stream, 4)?;
    loop {
        let Ok(Decoded::Value(header, _)) = OptionHeader::decode(&take(stream, OptionHeader::WIRE_BYTES)?) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let data = take(stream, header.data_bytes as usize)?;
        let option = header.option;
        let mut answer = Vec::new();
        match ClientOption::parse(option, &data) {
            Ok(ClientOption::ExtendedHeaders) if framing == Framing::Extended => {
                option_reply::encode_ack(option, &mut answer);
            }
            Ok(ClientOption::StructuredReply) if framing == Framing::Structured => {
                option_reply::encode_ack(option, &mut answer);
            }
            Ok(ClientOption::SetContexts(_)) => {
                option_reply::encode_context(option, 7, CONTEXT_ALLOCATION, &mut answer);
                option_reply::encode_ack(option, &mut answer);
            }
            Ok(ClientOption::Go(_)) => {
                let flags = TransmissionFlags::HAS_FLAGS
                    | TransmissionFlags::SEND_FLUSH
                    | TransmissionFlags::SEND_FUA
                    | TransmissionFlags::SEND_WRITE_ZEROES;
                option_reply::encode_info(option, &Info::Export { size_bytes: SIZE, flags }, &mut answer);
                option_reply::encode_ack(option, &mut answer);
            }
            _ => option_reply::encode_refusal(option, ReplyCode::ERR_UNSUP, "", &mut answer),
        }
        stream.write_all(&answer)?;
        if option == OptionCode::GO {
            return Ok(());
        }
    }
}

pub fn serve(stream: &mut UnixStream, framing: Framing, script: &Script) -> io::Result<()> {
    loop {
        let bytes = take(stream, RequestHeader::wire_bytes(framing))?;
        let Ok(Decoded::Value(request, _)) = RequestHeader::decode(&bytes, framing) else { return Ok(()) };
        take(stream, request.payload_bytes(framing) as usize)?;
        if request.command == Command::DISCONNECT || !script(&request, framing, stream) {
            return Ok(());
        }
    }
}

/// A correct answer.
pub fn honest(request: &RequestHeader, framing: Framing, stream: &mut UnixStream) -> bool {
    let answering = Answering::to(request, framing);
    let mut answer = Vec::new();
    match (request.command, framing) {
        (Command::READ, Framing::Simple) => {
            answer.extend_from_slice(&reply::simple(request.cookie, ErrorCode::NONE));
            answer.resize(answer.len() + request.len_bytes as usize, 0x5a);
        }
        (Command::READ, _) => {
            let len = request.len_bytes as u32;
            answer.extend_from_slice(&answering.data(ChunkFlags::DONE, request.offset_bytes, len));
            answer.resize(answer.len() + request.len_bytes as usize, 0x5a);
        }
        (Command::BLOCK_STATUS, _) => {
            let all = [Descriptor { len_bytes: request.len_bytes, status: 0 }];
            answering.block_status(ChunkFlags::DONE, 7, &all, &mut answer);
        }
        (_, Framing::Extended) => answer.extend_from_slice(&answering.done()),
        _ => answer.extend_from_slice(&reply::simple(request.cookie, ErrorCode::NONE)),
    }
    stream.write_all(&answer).is_ok()
}

pub fn read(device: &NbdDevice) -> Result<Vec<u8>, io::Error> {
    let mut bytes = vec![0; 8192];
    Blocking::open(device, EngineKind::Auto)?.read(4096, &mut bytes).map(|()| bytes)
}

pub fn status(device: &NbdDevice) -> Result<(), io::Error> {
    device.extents(0, SIZE, &mut Vec::new())
}

/// A server that answers every request by `make`.
pub fn answers(
    framing: Framing,
    make: impl Fn(&RequestHeader, Answering, &mut Vec<u8>) + Send + Sync + 'static,
) -> Fake {
    fake(framing, move |request, framing, stream| {
        let mut bytes = Vec::new();
        make(request, Answering::to(request, framing), &mut bytes);
        stream.write_all(&bytes).is_ok()
    })
}
