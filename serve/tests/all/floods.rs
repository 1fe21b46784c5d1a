//! Clients that send without end, or stop halfway, and never read: the server limits what it takes
//! from each client, and the time for the handshake. (Invalid requests are tested in `hostile.rs`.)

use crate::common;
use crate::common::{Served, eventually, memory, serve};
use diskwright_disk::{CreateRequest, Disk, OpenOptions};
use diskwright_nbd::wire::{Command, CommandFlags, Framing, OptionCode, OptionHeader, option};
use diskwright_serve::net::ServerOptions;
use diskwright_store::{BlockDevice, BlockQueue, Extent, Geometry, QueueOptions};
use std::{
    io::{self, ErrorKind, Read, Write},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const NONE: CommandFlags = CommandFlags::empty();

fn another_client_is_served(served: &Served) {
    let mut client = served.client().go("m", Framing::Structured, &[]);
    assert_eq!(client.read(4096, 512).unwrap().len(), 512);
    assert!(served.server().is_well());
}

/// Sends `message` repeatedly and never reads, until the server takes nothing more, closes the
/// connection, or has taken `too_much`. Returns the number of bytes that were taken.
fn flood(stream: &mut UnixStream, message: &[u8], too_much: usize) -> usize {
    stream.set_nonblocking(true).unwrap();
    let (mut taken, mut at, mut last) = (0, 0, Instant::now());
    while taken < too_much && last.elapsed() < Duration::from_millis(300) {
        match stream.write(&message[at..]) {
            Ok(count) => {
                taken += count;
                at = (at + count) % message.len();
                last = Instant::now();
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(1)),
            Err(_) => break,
        }
    }
    taken
}

/// Far more than all socket buffers and one client's share together.
const TOO_MUCH: usize = 64 << 20;
/// An upper bound of those buffers and that share. A short reply uses some hundred bytes of a
/// socket's buffer, so the replies to a few hundred options of 60 KiB fit.
const ENOUGH: usize = 48 << 20;

#[test]
fn endless_options_are_limited() {
    let options = ServerOptions { handshake_time: Duration::from_secs(3), workers: 1, ..ServerOptions::default() };
    let Some(served) = serve(vec![("m", memory(1 << 20, true))], options) else { return };
    let mut list = Vec::new();
    option::encode_plain(OptionCode::LIST, &[], &mut list);
    let mut long = Vec::new();
    option::encode_plain(OptionCode(4711), &[0x6b; 60 << 10], &mut long);
    for message in [list, long] {
        let mut client = served.client();
        let taken = flood(&mut client.stream, &message, TOO_MUCH);
        assert!(taken < ENOUGH, "{taken} bytes of options were taken from a client that reads no reply");
        another_client_is_served(&served);
    }
    eventually("the clients are disconnected at their time limit", || {
        served.server().metrics().totals().connections == 0
    });
}

#[test]
fn endless_requests_are_limited() {
    let options =
        ServerOptions { workers: 1, requests_max: 32, request_bytes_max: 4 << 20, ..ServerOptions::default() };
    let Some(served) = serve(vec![("m", memory(1 << 20, true))], options) else { return };
    for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
        for (command, len) in
            [(Command::READ, 65536), (Command::FLUSH, 0), (Command::BLOCK_STATUS, 4096), (Command(99), 0)]
        {
            let mut client =
                served.client().go("m", framing, &["base:allocation"][..usize::from(framing != Framing::Simple)]);
            let request = client.request(command, NONE, 0, len);
            let taken = flood(&mut client.stream, &request, TOO_MUCH);
            assert!(taken < ENOUGH, "{taken} bytes of {command:?} were taken from a client that reads no reply");
            let totals = served.server().metrics().totals();
            assert!(totals.in_flight <= 32, "{} requests are in flight for one client", totals.in_flight);
            another_client_is_served(&served);
        }
        let mut client = served.client().go("m", framing, &[]);
        let mut write = client.request(Command::WRITE, NONE, 0, 65536);
        write.resize(write.len() + 65536, 7);
        let taken = flood(&mut client.stream, &write, TOO_MUCH);
        // The replies are small, so many of them fit into the buffers, but not without end.
        assert!(taken <= TOO_MUCH + (1 << 20));
        another_client_is_served(&served);
    }
    eventually("the connections are closed", || served.server().metrics().totals().connections == 0);
}

#[test]
fn requests_on_a_huge_hole_do_not_block_other_clients() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hole.vhdx");
    let request = CreateRequest { size_bytes: Some(64 << 40), ..CreateRequest::default() };
    diskwright_disk::create(&path, &request).unwrap();
    let hole = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let options = ServerOptions { workers: 1, ..ServerOptions::default() };
    let Some(mut served) = serve(vec![("m", memory(1 << 20, true)), ("hole", hole)], options) else { return };
    let mut client = served.client().go("hole", Framing::Extended, &["base:allocation"]);
    // To search all of it would take minutes.
    for command in [Command::BLOCK_STATUS, Command::TRIM] {
        for _ in 0..100 {
            let asked = client.request(command, NONE, 0, 64 << 40);
            client.say(&asked);
        }
        let began = Instant::now();
        another_client_is_served(&served);
        assert!(began.elapsed() < Duration::from_secs(10), "{command:?}: {:?}", began.elapsed());
    }
    drop(client);
    eventually("the client's requests have ended", || served.server().metrics().totals().connections == 0);
    let began = Instant::now();
    served.stop().unwrap();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// Block status requests that one client sends in one message.
const STATUS_REQUESTS: usize = 100;

/// A disk whose `extents` is slow and may fail. The first call waits until another client has sent
/// a request, the last call until that client has its reply.
#[derive(Debug)]
struct Slow {
    disk: Arc<dyn BlockDevice>,
    fails: bool,
    /// Number of calls of `extents` that have begun, and that have ended.
    begun: AtomicUsize,
    ended: AtomicUsize,
    /// Progress of the other client: 1 after its request, 2 after its reply.
    other: AtomicUsize,
}

impl BlockDevice for Slow {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }
    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        self.disk.open_queue(options)
    }
    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
        let until = match self.begun.fetch_add(1, Ordering::SeqCst) + 1 {
            1 => 1,
            STATUS_REQUESTS => 2,
            _ => 0,
        };
        // With a limit, so that a server that does not switch clients fails the test instead of
        // hanging.
        for _ in 0..5000 {
            thread::sleep(Duration::from_millis(1));
            if self.other.load(Ordering::SeqCst) >= until {
                break;
            }
        }
        self.ended.fetch_add(1, Ordering::SeqCst);
        if self.fails { Err(ErrorKind::InvalidData.into()) } else { self.disk.extents(offset_bytes, len_bytes, out) }
    }
}

#[test]
fn slow_block_status_gives_way_to_other_connections() {
    for fails in [false, true] {
        let (disk, zero) = (memory(1 << 20, false), || AtomicUsize::new(0));
        let slow = Arc::new(Slow { disk, fails, begun: zero(), ended: zero(), other: zero() });
        let options = ServerOptions { workers: 1, ..ServerOptions::default() };
        let Some(served) = serve(vec![("m", Arc::clone(&slow) as _)], options) else { return };
        let mut client = served.client().go("m", Framing::Structured, &["base:allocation"]);
        let mut other = served.client().go("m", Framing::Structured, &[]);
        let requests: Vec<_> =
            (0..STATUS_REQUESTS).flat_map(|_| client.request(Command::BLOCK_STATUS, NONE, 0, 4096)).collect();
        client.say(&requests);
        eventually("the first call of `extents` has begun", || slow.begun.load(Ordering::SeqCst) > 0);
        other.send(Command::READ, 0, 512);
        slow.other.store(1, Ordering::SeqCst);
        assert_eq!(other.reply(512).unwrap().len(), 512);
        let ended = slow.ended.load(Ordering::SeqCst);
        slow.other.store(2, Ordering::SeqCst);
        assert!(
            ended < STATUS_REQUESTS,
            "all requests of one client were answered before the other's (fails: {fails})"
        );
        // The client that gave up its turn gets its replies too.
        for _ in 0..STATUS_REQUESTS {
            assert_eq!(client.reply(0).is_err(), fails);
        }
    }
}

#[test]
fn clients_that_stop_halfway_do_not_block_others() {
    let options = ServerOptions { workers: 1, handshake_time: Duration::from_millis(400), ..ServerOptions::default() };
    let Some(mut served) = serve(vec![("m", memory(4 << 20, true))], options) else { return };
    // In the handshake: after every third byte.
    let mut hello = Vec::new();
    option::encode_contexts(OptionCode::SET_META_CONTEXT, "m", &["base:allocation"], &mut hello);
    option::encode_export(OptionCode::GO, "m", &[1, 3], &mut hello);
    let stopped: Vec<_> = (0..hello.len())
        .step_by(3)
        .map(|stop| {
            let mut client = served.client();
            client.say(&hello[..stop]);
            client
        })
        .collect();
    another_client_is_served(&served);
    eventually("the clients are disconnected at their time limit", || {
        served.server().metrics().totals().connections == 0
    });
    drop(stopped);
    // In a payload, some bytes of which have been sent.
    let holders: Vec<_> = (0..20)
        .map(|number| {
            let mut client = served.client().go("m", Framing::Simple, &[]);
            let write = client.request(Command::WRITE, NONE, 0, 2 << 20);
            client.say(&write);
            client.say(&vec![number; 1000 * usize::from(number)]);
            client
        })
        .collect();
    another_client_is_served(&served);
    // The stop does not wait for these clients.
    let start = Instant::now();
    served.stop().unwrap();
    assert!(start.elapsed() < common::PATIENCE, "the server waits for payloads that are never sent");
    drop(holders);
}

#[test]
fn many_clients_that_disconnect_early() {
    let options = ServerOptions { connections_max: 16, ..ServerOptions::default() };
    let Some(served) = serve(vec![("m", memory(1 << 20, true))], options) else { return };
    let unfinished = OptionHeader { option: OptionCode::GO, data_bytes: 60_000 }.encode();
    for round in 0..300_u32 {
        let Ok(mut stream) = UnixStream::connect(served.socket()) else { continue };
        // At every stage: before the first byte, in the flags, in the header of an option.
        let _ = stream.write_all(&3_u32.to_be_bytes()[..(round % 5) as usize]);
        if round % 5 == 4 {
            let _ = stream.write_all(&unfinished[..(round % 17) as usize]);
        }
    }
    // Connections are accepted in order, so the one that is greeted came after all others.
    eventually("all connections were accepted", || {
        let greeted = |mut stream: UnixStream| stream.read_exact(&mut [0; 18]);
        UnixStream::connect(served.socket()).and_then(greeted).is_ok()
    });
    eventually("the connections are closed", || served.server().metrics().totals().connections == 0);
    another_client_is_served(&served);
}
