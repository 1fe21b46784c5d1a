//! A server that lies, stalls or vanishes: each way ends in an error that says so, and never in a panic, a hang or a heap of memory.
//!
//! The fake server is a thread that does a proper handshake and then answers what its script says.

use diskwright_nbd::{
    ClientError, NbdDevice, NbdUri,
    wire::{
        Answering, BlockSizes, CONTEXT_ALLOCATION, ChunkFlags, ChunkKind, ClientOption, Command, Decoded, Descriptor,
        ErrorCode, Framing, Greeting, HandshakeFlags, Info, OptionCode, OptionHeader, ReplyCode, RequestHeader,
        TransmissionFlags, handshake, option_reply, reply,
    },
};
use diskwright_store::{BlockDevice, Blocking, EngineKind, IoBuf, QueueOptions, Request};
use proptest::prelude::*;
use std::{
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};
use tempfile::TempDir;

const SIZE: u64 = 1 << 20;

/// Answers one request, its payload taken; `false` hangs up.
type Script = dyn Fn(&RequestHeader, Framing, &mut UnixStream) -> bool + Send + Sync;

struct Fake {
    dir: TempDir,
    /// Connections that have been taken.
    taken: Arc<AtomicUsize>,
}

impl Fake {
    fn uri(&self) -> NbdUri {
        NbdUri::unix(self.dir.path().join("sock"), "")
    }

    fn open(&self) -> NbdDevice {
        NbdDevice::open(&self.uri(), true).unwrap()
    }
}

/// A server that is proper until the transmission phase, and takes one connection after the other.
fn fake(
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

/// A server that does what it likes with each connection.
fn raw(act: impl Fn(&mut UnixStream) + Send + Sync + 'static) -> Fake {
    let dir = TempDir::new().unwrap();
    let listener = UnixListener::bind(dir.path().join("sock")).unwrap();
    let taken = Arc::new(AtomicUsize::new(0));
    let (act, count) = (Arc::new(act), Arc::clone(&taken));
    // It ends with the process; its socket goes with the folder.
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

fn take(stream: &mut UnixStream, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

fn shake_hands(stream: &mut UnixStream, framing: Framing) -> io::Result<()> {
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

fn serve(stream: &mut UnixStream, framing: Framing, script: &Script) -> io::Result<()> {
    loop {
        let bytes = take(stream, RequestHeader::wire_bytes(framing))?;
        let Ok(Decoded::Value(request, _)) = RequestHeader::decode(&bytes, framing) else { return Ok(()) };
        take(stream, request.payload_bytes(framing) as usize)?;
        if request.command == Command::DISCONNECT || !script(&request, framing, stream) {
            return Ok(());
        }
    }
}

/// A right answer.
fn honest(request: &RequestHeader, framing: Framing, stream: &mut UnixStream) -> bool {
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

fn read(device: &NbdDevice) -> Result<Vec<u8>, io::Error> {
    let mut bytes = vec![0; 8192];
    Blocking::open(device, EngineKind::Auto)?.read(4096, &mut bytes).map(|()| bytes)
}

fn status(device: &NbdDevice) -> Result<(), io::Error> {
    device.extents(0, SIZE, &mut Vec::new())
}

/// What a fake answers to everything, made from the request.
fn answers(framing: Framing, make: impl Fn(&RequestHeader, Answering, &mut Vec<u8>) + Send + Sync + 'static) -> Fake {
    fake(framing, move |request, framing, stream| {
        let mut bytes = Vec::new();
        make(request, Answering::to(request, framing), &mut bytes);
        stream.write_all(&bytes).is_ok()
    })
}

#[test]
fn the_fake_can_be_honest() {
    for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
        let server = fake(framing, honest);
        let device = server.open();
        assert_eq!(device.export().framing, framing);
        assert!(read(&device).unwrap().iter().all(|&byte| byte == 0x5a));
        let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
        queue.write(0, &[1; 4096], true).unwrap();
        queue.write_zeroes(0, SIZE).unwrap();
        queue.flush().unwrap();
        status(&device).unwrap();
    }
}

#[test]
fn lies_in_answers_end_the_connection_with_what_was_wrong() {
    use Framing::{Extended, Simple, Structured};
    type Make = fn(&RequestHeader, Answering, &mut Vec<u8>);
    let reads: &[(&str, Framing, Make)] = &[
        ("not under way", Simple, |r, _, out| out.extend_from_slice(&reply::simple(!r.cookie, ErrorCode::NONE))),
        ("not under way", Extended, |r, a, out| {
            out.extend_from_slice(&Answering { cookie: r.cookie ^ 1, ..a }.done());
        }),
        ("begins with 0x41414141", Structured, |_, _, out| out.extend_from_slice(&[0x41; 64])),
        ("begins with 0x67446698", Extended, |r, _, out| {
            out.extend_from_slice(&reply::simple(r.cookie, ErrorCode::NONE));
        }),
        ("simple reply to a READ", Structured, |r, _, out| {
            out.extend_from_slice(&reply::simple(r.cookie, ErrorCode::NONE));
        }),
        ("bytes from 4096 on are missing", Structured, |_, a, out| out.extend_from_slice(&a.done())),
        ("bytes from 8192 on are missing", Structured, |r, a, out| {
            a.hole(ChunkFlags::empty(), r.offset_bytes, 4096, out);
            out.extend_from_slice(&a.done());
        }),
        ("same bytes twice", Structured, |r, a, out| {
            a.hole(ChunkFlags::empty(), r.offset_bytes, 4096, out);
            a.hole(ChunkFlags::DONE, r.offset_bytes + 4095, 512, out);
        }),
        ("of offset 0 in answer", Structured, |_, a, out| a.hole(ChunkFlags::DONE, 0, 4096, out)),
        ("in answer to a READ of 4096", Structured, |r, a, out| {
            a.hole(ChunkFlags::DONE, r.offset_bytes, u32::MAX, out);
        }),
        ("in answer to a READ of 4096", Structured, |_, a, out| a.hole(ChunkFlags::DONE, u64::MAX, 2, out)),
        ("in answer to a READ of 4096", Extended, |_, a, out| {
            out.extend_from_slice(&a.data(ChunkFlags::DONE, u64::MAX - 5, 512));
        }),
        ("data chunk of 4294967295 bytes", Structured, |r, a, out| {
            out.extend_from_slice(&a.data(ChunkFlags::DONE, r.offset_bytes, u32::MAX));
        }),
        ("data chunk of 8 bytes", Structured, |r, a, out| {
            out.extend_from_slice(&a.data(ChunkFlags::DONE, r.offset_bytes, 0));
        }),
        ("at most 12 are accepted", Structured, |_, a, out| {
            out.extend_from_slice(&a.chunk(ChunkFlags::DONE, ChunkKind::BLOCK_STATUS, u32::MAX));
        }),
        ("at most 4160 are accepted", Extended, |_, a, out| {
            out.extend_from_slice(&a.chunk(ChunkFlags::DONE, ChunkKind::ERROR, u32::MAX));
        }),
        ("not the last", Structured, |_, a, out| {
            out.extend_from_slice(&a.chunk(ChunkFlags::empty(), ChunkKind::NONE, 0));
        }),
        ("kind of a chunk is 9", Structured, |_, a, out| {
            out.extend_from_slice(&a.chunk(ChunkFlags::DONE, ChunkKind(9), 0));
        }),
        ("is not under way", Structured, |r, a, out| {
            a.hole(ChunkFlags::DONE, r.offset_bytes, 8192, out);
            a.hole(ChunkFlags::DONE, r.offset_bytes, 8192, out);
        }),
    ];
    for (word, framing, make) in reads {
        let server = answers(*framing, *make);
        let device = server.open();
        // Where the lie comes behind the answer, it is found by the next request at the latest.
        let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
        let mut bytes = vec![0; 8192];
        let error = (0..2).try_for_each(|_| queue.read(4096, &mut bytes)).unwrap_err();
        assert!(error.to_string().contains(word), "{word}: {error}");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{word}");
    }
    let statuses: &[(&str, Framing, Make)] = &[
        ("without a status", Structured, |_, a, out| out.extend_from_slice(&a.done())),
        ("without a status", Structured, |r, _, out| out.extend_from_slice(&reply::simple(r.cookie, ErrorCode::NONE))),
        ("not agreed on", Structured, |_, a, out| {
            a.block_status(ChunkFlags::DONE, 8, &[Descriptor { len_bytes: 512, status: 0 }], out);
        }),
        ("empty, or beyond", Extended, |_, a, out| {
            a.block_status(ChunkFlags::DONE, 7, &[Descriptor { len_bytes: 0, status: 0 }], out);
        }),
        ("empty, or beyond", Structured, |_, a, out| {
            a.block_status(ChunkFlags::DONE, 7, &[Descriptor { len_bytes: SIZE, status: 0 }; 2], out);
        }),
        ("one context twice", Structured, |_, a, out| {
            let all = [Descriptor { len_bytes: 512, status: 0 }];
            a.block_status(ChunkFlags::empty(), 7, &all, out);
            a.block_status(ChunkFlags::DONE, 7, &all, out);
        }),
        ("are accepted", Extended, |_, a, out| {
            out.extend_from_slice(&a.chunk(ChunkFlags::DONE, ChunkKind::BLOCK_STATUS_EXT, u32::MAX));
        }),
        ("chunk for another command", Structured, |r, a, out| a.hole(ChunkFlags::DONE, r.offset_bytes, 512, out)),
    ];
    for (word, framing, make) in statuses {
        let error = status(&answers(*framing, *make).open()).unwrap_err();
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
}

#[test]
fn errors_of_the_server_in_all_their_forms() {
    type Make = fn(&RequestHeader, Answering, &mut Vec<u8>);
    let all: &[(&str, Framing, io::ErrorKind, Make)] = &[
        ("at 4096 with input/output", Framing::Simple, io::ErrorKind::Other, |r, _, out| {
            out.extend_from_slice(&reply::simple(r.cookie, ErrorCode::EIO));
        }),
        ("no memory? (ENOMEM) (tough ?[2J luck)", Framing::Structured, io::ErrorKind::OutOfMemory, |_, a, out| {
            a.error(ErrorCode::ENOMEM, "tough \x1b[2J luck", None, out);
        }),
        ("at 8191 with", Framing::Extended, io::ErrorKind::InvalidInput, |r, a, out| {
            a.hole(ChunkFlags::empty(), r.offset_bytes, 512, out);
            a.error(ErrorCode(4711), "", Some(8191), out);
        }),
        ("shutting down", Framing::Structured, io::ErrorKind::ConnectionAborted, |_, a, out| {
            a.error(ErrorCode::ESHUTDOWN, "", None, out);
        }),
    ];
    for (word, framing, kind, make) in all {
        let server = answers(*framing, *make);
        let device = server.open();
        for _ in 0..2 {
            let error = read(&device).unwrap_err();
            let word = word.replace("no memory? ", "");
            assert!(error.to_string().contains(&word), "{word}: {error}");
            assert_eq!(error.kind(), *kind);
        }
        // The connection goes on.
        assert_eq!(server.taken.load(Ordering::SeqCst), 1, "{word}");
    }
}

#[test]
fn it_does_not_matter_how_the_bytes_come() {
    // A read in crumbs, out of order, and every byte of it alone on the wire.
    let server = fake(Framing::Structured, |request, framing, stream| {
        let answering = Answering::to(request, framing);
        let mut bytes = Vec::new();
        for piece in [3u64, 0, 2, 1, 5, 4, 7, 6, 8, 10, 9, 11, 15, 14, 13, 12] {
            let at = request.offset_bytes + piece * 512;
            if piece % 3 == 0 {
                answering.hole(ChunkFlags::empty(), at, 512, &mut bytes);
            } else {
                bytes.extend_from_slice(&answering.data(ChunkFlags::empty(), at, 512));
                bytes.resize(bytes.len() + 512, piece as u8);
            }
        }
        bytes.extend_from_slice(&answering.done());
        bytes.chunks(1).all(|byte| stream.write_all(byte).is_ok())
    });
    let found = read(&server.open()).unwrap();
    for (piece, bytes) in found.chunks(512).enumerate() {
        let expected = if piece % 3 == 0 { 0 } else { piece as u8 };
        assert!(bytes.iter().all(|&byte| byte == expected), "piece {piece}");
    }
}

#[test]
fn a_refusal_before_the_contents_are_sent_leaves_the_buffer_alone() {
    // The server answers as soon as it has the header, and reads the contents afterwards.
    let server = raw(|stream| {
        if shake_hands(stream, Framing::Structured).is_err() {
            return;
        }
        for turn in 0..2 {
            let Ok(bytes) = take(stream, RequestHeader::COMPACT_BYTES) else { return };
            let Ok(Decoded::Value(request, _)) = RequestHeader::decode(&bytes, Framing::Structured) else { return };
            let _ = stream.write_all(&reply::simple(request.cookie, ErrorCode::ENOSPC));
            thread::sleep(Duration::from_millis(50 * turn));
            let _ = take(stream, request.len_bytes as usize);
        }
        let _ = take(stream, 1);
    });
    let device = server.open();
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    let mut done = Vec::new();
    for _ in 0..2 {
        queue.push(Request::write(0, SIZE as usize, IoBuf::new(SIZE as usize), 1)).unwrap();
        queue.reap(1, &mut done).unwrap();
        let completion = done.pop().unwrap();
        assert_eq!(completion.result.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(completion.buf.unwrap().len(), SIZE as usize);
    }
}

#[test]
fn a_server_that_stalls_or_vanishes() {
    let silent = fake(Framing::Structured, |_, _, _| true);
    let mut uri = silent.uri();
    uri.timeout = Some(Duration::from_millis(200));
    let device = NbdDevice::open(&uri, false).unwrap();
    let error = read(&device).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(error.to_string().contains("1 request was waiting"), "{error}");

    let vanishes = fake(Framing::Structured, |request, framing, stream| {
        let header = Answering::to(request, framing).data(ChunkFlags::DONE, request.offset_bytes, 4096);
        let _ = stream.write_all(&header);
        false
    });
    let device = vanishes.open();
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    let mut done = Vec::new();
    for tag in 0..8 {
        queue.push(Request::read(tag * 4096, 4096, IoBuf::new(4096), tag)).unwrap();
    }
    while queue.in_flight() > 0 {
        queue.reap(8, &mut done).unwrap();
    }
    assert_eq!(done.len(), 8);
    assert!(done.iter().all(|completion| completion.result.is_err() && completion.buf.is_some()));
    // What comes later fails too, and at once.
    queue.push(Request::flush(9)).unwrap();
    done.clear();
    queue.reap(1, &mut done).unwrap();
    assert!(done[0].result.is_err());
    // A new queue has a new connection.
    drop(queue);
    assert!(read(&device).is_err());
    assert_eq!(vanishes.taken.load(Ordering::SeqCst), 2);

    let mute = raw(|stream| drop(take(stream, 1)));
    let mut uri = mute.uri();
    uri.timeout = Some(Duration::from_millis(200));
    let error = NbdDevice::open(&uri, false).unwrap_err();
    assert!(matches!(error, ClientError::Stalled { .. }), "{error}");
}

/// A server that says `bytes` first, then what `option` makes of each option.
fn handshaker(option: impl Fn(OptionCode, &mut Vec<u8>) + Send + Sync + 'static) -> Fake {
    raw(move |stream| {
        let _ = stream.write_all(&Greeting::encode_newstyle(HandshakeFlags::FIXED_NEWSTYLE));
        let _ = take(stream, 4);
        while let Ok(bytes) = take(stream, OptionHeader::WIRE_BYTES) {
            let Ok(Decoded::Value(header, _)) = OptionHeader::decode(&bytes) else { return };
            let _ = take(stream, header.data_bytes as usize);
            let mut answer = Vec::new();
            option(header.option, &mut answer);
            let _ = stream.write_all(&answer);
        }
    })
}

#[test]
fn lies_in_the_handshake() {
    let said = |server: Fake| NbdDevice::open(&server.uri(), false).unwrap_err().to_string();
    let error = said(raw(|stream| drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"))));
    assert!(error.contains("expected \"NBDMAGIC\"") && error.contains("no NBD server"), "{error}");
    let error = said(raw(|_| {}));
    assert!(error.contains("the connection broke while waiting for its greeting"), "{error}");
    let error = said(handshaker(|_, out| out.extend_from_slice(&[7; 20])));
    assert!(error.contains("0x707070707070707"), "{error}");
    let error = said(handshaker(|_, out| option_reply::encode_ack(OptionCode::LIST, out)));
    assert!(error.contains("it answered LIST to EXTENDED_HEADERS"), "{error}");
    let error = said(handshaker(|option, out| {
        let header = diskwright_nbd::wire::OptionReplyHeader { option, code: ReplyCode::ACK, data_bytes: u32::MAX };
        out.extend_from_slice(&header.encode());
    }));
    assert!(error.contains("4294967295 bytes long, at most 65536"), "{error}");
    let error = said(handshaker(|option, out| {
        (0..20_000).for_each(|_| option_reply::encode_server("x", "", out));
        option_reply::encode_ack(option, out);
    }));
    assert!(error.contains("LIST to EXTENDED_HEADERS"), "{error}");
    let go = |size_bytes: u64, sizes: Option<BlockSizes>| {
        handshaker(move |option, out| match option {
            OptionCode::GO => {
                let flags = TransmissionFlags::HAS_FLAGS;
                if size_bytes > 0 {
                    option_reply::encode_info(option, &Info::Export { size_bytes, flags }, out);
                }
                if let Some(sizes) = sizes {
                    option_reply::encode_info(option, &Info::BlockSize(sizes), out);
                }
                option_reply::encode_ack(option, out);
            }
            _ => option_reply::encode_refusal(option, ReplyCode::ERR_UNSUP, "no", out),
        })
    };
    let error = said(go(0, None));
    assert!(error.contains("did not tell the size"), "{error}");
    let error = said(go(u64::MAX, None));
    assert!(error.contains("beyond all measure"), "{error}");
    let odd = BlockSizes { minimum: 4096, preferred: 4096, maximum: u32::MAX };
    let error = said(go(10_000, Some(odd)));
    assert!(error.contains("no multiple of its smallest block of 4096"), "{error}");
    let error = said(go(1 << 20, Some(BlockSizes { minimum: 77, ..odd })));
    assert!(error.contains("the minimum block size is 77"), "{error}");
    let error = said(handshaker(|option, out| {
        option_reply::encode_refusal(option, ReplyCode::ERR_POLICY, "not \x07 today", out);
    }));
    assert!(error.contains("refuses GO") && error.contains("(not ? today)"), "{error}");
    let error = said(handshaker(|option, out| option_reply::encode_refusal(option, ReplyCode::ERR_TLS_REQD, "", out)));
    assert!(error.contains("nbds://"), "{error}");
    // An old server hangs up on EXPORT_NAME.
    let error = said(raw(|stream| {
        let _ = stream.write_all(&Greeting::encode_newstyle(HandshakeFlags::empty()));
        let _ = take(stream, 4 + 16);
    }));
    assert!(error.contains("there is no export"), "{error}");
    // And a greeting that is cut off.
    let error = said(raw(|stream| drop(stream.write_all(&handshake::GREETING_MAGIC.to_be_bytes()[..7]))));
    assert!(error.contains("hung up"), "{error}");
}

/// Messages of a server, right ones and wrong ones, about requests that there are and that there are not.
fn babble() -> impl Strategy<Value = Vec<u8>> {
    let chunk = (any::<bool>(), 0u16..8, any::<bool>(), 0u64..3, 0u64..20_000, prop::collection::vec(0u8..3, 0..40))
        .prop_map(|(done, kind, error, cookie, offset, payload)| {
            let answering = Answering { framing: Framing::Structured, cookie: cookie << 32, offset_bytes: 0 };
            let flags = if done { ChunkFlags::DONE } else { ChunkFlags::empty() };
            let kind = ChunkKind(kind | if error { 0x8000 } else { 0 });
            let mut bytes = answering.chunk(flags, kind, payload.len() as u32 + 8).to_vec();
            bytes.extend_from_slice(&offset.to_be_bytes());
            bytes.extend_from_slice(&payload);
            bytes
        });
    let simple = (0u64..3, 0u32..30).prop_map(|(cookie, error)| reply::simple(cookie << 32, ErrorCode(error)).to_vec());
    let noise = prop::collection::vec(any::<u8>(), 0..64);
    let message = prop_oneof![6 => chunk, 2 => simple, 1 => noise];
    prop::collection::vec(message, 0..8).prop_map(|messages| messages.concat())
}

#[test]
fn whatever_a_server_babbles_every_request_ends() {
    proptest!(ProptestConfig::with_cases(64), |(bytes in babble(), cut in 1usize..50)| {
        // All of it at the first request, then the end of the connection.
        let server = fake(Framing::Structured, move |_, _, stream| {
            bytes.chunks(cut).for_each(|piece| drop(stream.write_all(piece)));
            false
        });
        let device = server.open();
        let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
        queue.push(Request::read(4096, 8192, IoBuf::new(8192), 0)).unwrap();
        queue.push(Request::write(0, 4096, IoBuf::new(4096), 1)).unwrap();
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.reap(1, &mut done).unwrap();
        }
        prop_assert_eq!(done.len(), 2);
        prop_assert!(done.iter().all(|completion| completion.buf.is_some()));
        let _ = status(&device);
    });
}

#[test]
fn a_broken_connection_is_made_anew_and_nothing_is_lost() {
    // Each connection dies after seven requests, the seventh of them taken and not answered.
    let budget = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&budget);
    let server = fake(Framing::Structured, move |request, framing, stream| {
        count.fetch_add(1, Ordering::SeqCst) % 7 != 6 && honest(request, framing, stream)
    });
    let mut uri = server.uri();
    uri.reconnect = Some(Duration::from_secs(60));
    let device = NbdDevice::open(&uri, true).unwrap();
    let mut queue = device.open_queue(&QueueOptions { depth: 4, ..QueueOptions::default() }).unwrap();
    let mut done = Vec::new();
    for tag in 0..50u64 {
        while queue.in_flight() == 4 {
            queue.reap(1, &mut done).unwrap();
        }
        let buf = IoBuf::new(4096);
        let request = if tag % 2 == 0 {
            Request::read(tag * 4096, 4096, buf, tag)
        } else {
            Request::write(tag * 4096, 4096, buf, tag)
        };
        queue.push(request).unwrap();
    }
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done).unwrap();
    }
    let mut tags: Vec<u64> = done.iter().map(|completion| completion.tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, (0..50).collect::<Vec<_>>());
    for completion in done {
        completion.result.unwrap();
        let expected = if completion.tag % 2 == 0 { 0x5a } else { 0 };
        assert!(completion.buf.unwrap().iter().all(|&byte| byte == expected), "{}", completion.tag);
    }
    assert!(device.reconnects() >= 50 / 7);
}

#[test]
fn a_server_that_does_not_come_back_or_comes_back_as_another() {
    let server = fake(Framing::Structured, |_, _, _| false);
    let mut uri = server.uri();
    uri.reconnect = Some(Duration::from_millis(300));
    let device = NbdDevice::open(&uri, false).unwrap();
    std::fs::remove_file(server.dir.path().join("sock")).unwrap();
    let error = read(&device).unwrap_err();
    assert!(error.to_string().contains("could not be reached again within 0.3 s"), "{error}");

    let turns = AtomicUsize::new(0);
    let changes = raw(move |stream| {
        let framing = if turns.fetch_add(1, Ordering::SeqCst) == 0 { Framing::Structured } else { Framing::Simple };
        let _ = shake_hands(stream, framing);
        let _ = take(stream, RequestHeader::COMPACT_BYTES);
    });
    let mut uri = changes.uri();
    uri.reconnect = Some(Duration::from_secs(60));
    let device = NbdDevice::open(&uri, false).unwrap();
    let error = read(&device).unwrap_err();
    assert!(error.to_string().contains("is not the same: the server speaks otherwise"), "{error}");
}
