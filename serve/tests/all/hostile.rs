//! Clients that send invalid bytes, disconnect, stop reading, or are too many: the server handles
//! each of them, and other clients are served as before.

use crate::common::{Client, PATIENCE, Served, eventually, memory, raw_file, serve};
use diskwright_nbd::wire::{
    Command, CommandFlags, ErrorCode, Framing, OptionCode, OptionHeader, ReplyCode, RequestHeader, option,
};
use diskwright_serve::{
    ThreadError, nbd,
    net::{Address, Export, Listener, ServeError, ServerOptions},
};
use diskwright_store::{BlockDevice, CacheMode, Completion, Geometry, PushError, QueueOptions, Request};
use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

const NONE: CommandFlags = CommandFlags::empty();

/// Asserts that another client is served.
fn is_well(served: &Served) {
    let mut client = served.client().go("m", Framing::Structured, &[]);
    assert_eq!(client.read(4096, 512).unwrap().len(), 512);
    assert!(served.server().is_well());
}

#[test]
fn invalid_bytes_end_only_their_connection() {
    let Some(served) = serve(vec![("m", memory(1 << 20, true))], ServerOptions::default()) else { return };
    let says = |bytes: &[u8]| {
        let mut client = served.client();
        client.say(bytes);
        client.is_hung_up()
    };
    assert!(says(&[0x55; 16]), "the magic of an option");
    let huge = OptionHeader { option: OptionCode::GO, data_bytes: u32::MAX };
    assert!(says(&huge.encode()), "the length of an option");
    let mut unknown = Vec::new();
    option::encode_plain(OptionCode::EXPORT_NAME, b"nobody", &mut unknown);
    assert!(says(&unknown), "EXPORT_NAME of an unknown export");
    // Without the flags that a client must have.
    let mut client = UnixStream::connect(served.socket()).unwrap();
    client.write_all(&[0, 0, 0, 0]).unwrap();
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
        let mut client = served.client().go("m", framing, &[]);
        client.say(&[0x55; 32]);
        assert!(client.is_hung_up(), "the magic of a request");
        // The server does not wait for a payload of nearly 4 GiB.
        let mut client = served.client().go("m", framing, &[]);
        let write = client.request(Command::WRITE, NONE, 0, u64::from(u32::MAX) - 511);
        client.say(&write);
        assert!(client.is_hung_up(), "the length of a payload");
    }
    is_well(&served);
    assert_eq!(served.server().metrics().totals().broken, 10);
}

#[test]
fn an_unknown_export_or_option_gets_an_error_reply() {
    let Some(served) = serve(vec![("m", memory(1 << 20, true))], ServerOptions::default()) else { return };
    let mut client = served.client();
    let go = client.option(|out| option::encode_export(OptionCode::GO, "nobody", &[], out));
    assert_eq!(go[0].0, ReplyCode::ERR_UNKNOWN);
    let odd = client.option(|out| option::encode_plain(OptionCode(1234), &[1, 2, 3], out));
    assert_eq!(odd[0].0, ReplyCode::ERR_UNSUP);
    let mut client = client.go("", Framing::Simple, &[]);
    client.read(0, 512).unwrap();
}

#[test]
fn clients_disconnect_with_requests_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let device = raw_file(&dir.path().join("disk"), 64 << 20, CacheMode::Direct);
    let Some(served) = serve(vec![("m", device)], ServerOptions::default()) else { return };
    for round in 0..30u64 {
        let mut client = served.client().go("m", Framing::Structured, &[]);
        let mut batch = Vec::new();
        for n in 0..200 {
            batch.extend(client.request(Command::READ, NONE, n * 65536, 65536));
        }
        client.stream.set_nonblocking(true).unwrap();
        let _ = client.stream.write(&batch);
        if round % 3 == 0 {
            // In the middle of a payload that needs several buffers.
            let write = client.request(Command::WRITE, NONE, 0, 3 << 20);
            let _ = client.stream.write(&write);
            let _ = client.stream.write(&vec![round as u8; (1 << 20) + 77]);
        }
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_micros(round * 50));
        }
    }
    eventually("all connections are closed", || {
        let totals = served.server().metrics().totals();
        totals.connections == 0 && totals.in_flight == 0
    });
    is_well(&served);
}

#[test]
fn a_client_that_does_not_read_is_limited_and_does_not_block_others() {
    let dir = tempfile::tempdir().unwrap();
    let device = raw_file(&dir.path().join("disk"), 64 << 20, CacheMode::PageCache);
    // One worker, so that all clients share it.
    let options = ServerOptions { workers: 1, request_bytes_max: 4 << 20, ..ServerOptions::default() };
    let Some(served) = serve(vec![("m", device)], options) else { return };
    let mut deaf = served.client().go("m", Framing::Simple, &[]);
    let mut batch = Vec::new();
    for n in 0..2000u64 {
        batch.extend(deaf.request(Command::READ, NONE, (n % 60) << 20, 1 << 20));
    }
    deaf.stream.set_nonblocking(true).unwrap();
    let _ = deaf.stream.write(&batch);
    for _ in 0..20 {
        is_well(&served);
    }
    let read = served.server().metrics().totals().commands[0].bytes;
    assert!(read <= 20 << 20, "{read} bytes were read for a client that reads no replies");
    // When the client reads after all, it gets its replies.
    deaf.stream.set_nonblocking(false).unwrap();
    deaf.stream.set_read_timeout(Some(PATIENCE)).unwrap();
    for _ in 0..40 {
        assert_eq!(deaf.reply(1 << 20).unwrap().len(), 1 << 20);
    }
    drop(deaf);
    eventually("the connection is closed", || served.server().metrics().totals().connections == 0);
}

#[test]
fn connections_are_limited_in_number_and_in_handshake_time() {
    let options =
        ServerOptions { connections_max: 3, handshake_time: Duration::from_millis(300), ..ServerOptions::default() };
    let Some(served) = serve(vec![("m", memory(1 << 20, true))], options) else { return };
    let mut three: Vec<Client> = (0..3).map(|_| served.client().go("m", Framing::Simple, &[])).collect();
    let mut fourth = UnixStream::connect(served.socket()).unwrap();
    let mut greeting = Vec::new();
    assert!(fourth.read_to_end(&mut greeting).map_or(true, |_| greeting.is_empty()));
    assert_eq!(served.server().metrics().totals().refused, 1);
    three[1].read(0, 512).unwrap();
    three.pop();
    eventually("one connection is closed", || served.server().metrics().totals().connections == 2);
    let silent = UnixStream::connect(served.socket()).unwrap();
    eventually("the silent client is disconnected", || {
        let totals = served.server().metrics().totals();
        totals.accepted == 4 && totals.connections == 2
    });
    drop(silent);
    three[0].read(0, 512).unwrap();
}

#[test]
fn writable_exports_on_tcp_need_tls_or_insecure_writes() {
    let export =
        |writable| vec![Export { name: "m".into(), description: String::new(), device: memory(1 << 20, writable) }];
    let tcp = || vec![Listener::bind(&Address::Tcp("127.0.0.1".into(), 0)).unwrap()];
    let error = nbd::start(export(true), tcp(), ServerOptions::default()).unwrap_err();
    assert!(matches!(error, ServeError::Insecure { .. }), "{error}");
    assert!(error.to_string().contains("`ServerOptions::insecure_writes`"));
    let nowhere = nbd::start(export(true), Vec::new(), ServerOptions::default()).unwrap_err();
    assert!(matches!(nowhere, ServeError::NoListener));
    let allowed = vec!["10.1.2.0/24".parse().unwrap()];
    for (writable, options, served) in [
        (false, ServerOptions::default(), true),
        (true, ServerOptions { insecure_writes: true, ..ServerOptions::default() }, true),
        (false, ServerOptions { allowed, ..ServerOptions::default() }, false),
    ] {
        let server = match nbd::start(export(writable), tcp(), options) {
            Ok(server) => server,
            Err(ServeError::Thread(ThreadError::Ring { source })) => {
                return eprintln!("skipped: no io_uring: {source}");
            }
            Err(error) => panic!("{error}"),
        };
        let Address::Tcp(host, port) = &server.addresses()[0] else { panic!("not TCP") };
        let mut client = TcpStream::connect((host.as_str(), *port)).unwrap();
        let mut greeting = Vec::new();
        let _ = Read::by_ref(&mut client).take(18).read_to_end(&mut greeting);
        assert_eq!(greeting.len() == 18, served);
        drop(client);
        server.stop().unwrap();
    }
    assert!(TcpListener::bind("127.0.0.1:0").is_ok());
}

/// A disk whose writes fail with "no space" while `is_full` is set.
#[derive(Debug)]
struct Full {
    below: Arc<dyn BlockDevice>,
    is_full: Arc<AtomicBool>,
}

#[derive(Debug)]
struct FullQueue {
    below: Box<dyn diskwright_store::BlockQueue>,
    is_full: Arc<AtomicBool>,
}

impl BlockDevice for Full {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }
    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn diskwright_store::BlockQueue>> {
        let is_full = Arc::clone(&self.is_full);
        Ok(Box::new(FullQueue { below: self.below.open_queue(options)?, is_full }))
    }
}

impl diskwright_store::BlockQueue for FullQueue {
    fn depth(&self) -> usize {
        self.below.depth()
    }
    fn in_flight(&self) -> usize {
        self.below.in_flight()
    }
    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        if self.is_full.load(Ordering::SeqCst) && request.operation == diskwright_store::Operation::Write {
            let reason = io::ErrorKind::StorageFull.into();
            return Err(Box::new(PushError { request, reason }));
        }
        self.below.push(request)
    }
    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        self.below.reap(at_least, out)
    }
}

#[test]
fn a_full_disk_gives_enospc_and_works_again_afterwards() {
    let is_full = Arc::new(AtomicBool::new(true));
    let device = Arc::new(Full { below: memory(4 << 20, true), is_full: Arc::clone(&is_full) });
    let Some(served) = serve(vec![("m", device)], ServerOptions::default()) else { return };
    for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
        let mut client = served.client().go("m", framing, &[]);
        is_full.store(true, Ordering::SeqCst);
        assert_eq!(client.write(0, &[1; 4096], NONE).unwrap_err(), ErrorCode::ENOSPC);
        // A payload in segments.
        assert_eq!(client.write(0, &vec![1; 3 << 20], NONE).unwrap_err(), ErrorCode::ENOSPC);
        is_full.store(false, Ordering::SeqCst);
        client.write(8192, &[2; 4096], NONE).unwrap();
        assert!(client.read(8192, 4096).unwrap().iter().all(|&byte| byte == 2));
    }
}

#[test]
fn a_stop_under_load_keeps_all_acknowledged_writes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let device = raw_file(&path, 64 << 20, CacheMode::Direct);
    let Some(mut served) = serve(vec![("m", device)], ServerOptions::default()) else { return };
    let socket = served.socket();
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..4u64)
        .map(|n| {
            let mut client = Client::connect(&socket).go("m", Framing::Structured, &[]);
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                let mut acknowledged = 0u64;
                for round in 1u64.. {
                    let mut bytes =
                        client.request(Command::WRITE, CommandFlags::FUA, (n << 20) + (round % 64) * 4096, 4096);
                    bytes.extend(round.to_le_bytes().repeat(512));
                    if client.stream.write_all(&bytes).is_err() {
                        break;
                    }
                    match client.try_reply(0) {
                        Ok((_, reply)) => drop(reply.unwrap()),
                        Err(_) => break,
                    }
                    acknowledged = round;
                    if stop.load(Ordering::Relaxed) && round > 1_000_000 {
                        break;
                    }
                }
                (n, acknowledged)
            })
        })
        .collect();
    let idle = Client::connect(&socket).go("m", Framing::Simple, &[]);
    let greeting_only = Client::connect(&socket);
    eventually("the clients write", || served.server().metrics().totals().commands[1].requests > 100);
    served.stop().unwrap();
    assert!(!socket.exists(), "the socket is removed");
    let bytes = std::fs::read(&path).unwrap();
    for writer in writers {
        let (n, acknowledged) = writer.join().unwrap();
        assert!(acknowledged > 0);
        let at = (n << 20) as usize + (acknowledged % 64) as usize * 4096;
        let found = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        // One more write may be on the disk without a reply that the client has received.
        assert!(found == acknowledged || found == acknowledged + 64, "{found} after {acknowledged}");
    }
    drop((idle, greeting_only));
}

#[test]
fn headers_may_arrive_byte_by_byte() {
    let Some(served) = serve(vec![("m", memory(1 << 20, true))], ServerOptions::default()) else { return };
    for framing in [Framing::Simple, Framing::Extended] {
        let mut client = served.client().go("m", framing, &[]);
        assert_eq!(RequestHeader::wire_bytes(framing), if framing == Framing::Extended { 32 } else { 28 });
        let mut bytes = client.request(Command::WRITE, NONE, 512, 1024);
        bytes.extend([7; 1024]);
        for byte in bytes.chunks(1) {
            client.say(byte);
        }
        client.reply(0).unwrap();
        let mut bytes = client.request(Command::READ, NONE, 512, 1024);
        bytes.extend(client.request(Command::FLUSH, NONE, 0, 0));
        let (front, back) = bytes.split_at(33);
        client.say(front);
        std::thread::sleep(Duration::from_millis(1));
        client.say(back);
        let mut sizes: Vec<usize> = (0..2)
            .map(|n| {
                client.try_reply(if framing == Framing::Simple && n == 0 { 1024 } else { 0 }).unwrap().1.unwrap().len()
            })
            .collect();
        sizes.sort_unstable();
        assert_eq!(sizes, [0, 1024]);
    }
}
