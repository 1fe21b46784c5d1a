//! Clients that send without end, or stop in the middle, and never read: what the server takes from
//! each is bounded, and so is how long it puts up with one that has not even begun. (What it
//! answers to nonsense is in `hostile.rs`.)

mod common;

use common::{Served, eventually, memory, serve};
use diskwright_disk::{CreateRequest, Disk, OpenOptions};
use diskwright_nbd::wire::{Command, CommandFlags, Framing, OptionCode, OptionHeader, option};
use diskwright_serve::nbd::Options;
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

fn somebody_is_served(served: &Served) {
    let mut client = served.client().go("m", Framing::Structured, &[]);
    assert_eq!(client.read(4096, 512).unwrap().len(), 512);
    assert!(served.server().is_well());
}

/// Says `message` again and again and never reads, until nothing is taken for a while, or the
/// server hangs up, or far too much has been taken. How much was.
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

/// Far more than all buffers between two processes and the server's share for one client together.
const TOO_MUCH: usize = 64 << 20;
/// Those buffers, and that share. An answer of some bytes takes some hundred of a socket, so a few
/// hundred options of 60 KiB find room for theirs.
const ENOUGH: usize = 48 << 20;

#[test]
fn options_without_end_are_not_taken_without_end() {
    let options = Options { handshake_time: Duration::from_secs(3), workers: 1, ..Options::default() };
    let Some(served) = serve(vec![("m", memory(1 << 20, true))], options) else { return };
    let mut list = Vec::new();
    option::encode_plain(OptionCode::LIST, &[], &mut list);
    let mut long = Vec::new();
    option::encode_plain(OptionCode(4711), &[0x6b; 60 << 10], &mut long);
    for message in [list, long] {
        let mut client = served.client();
        let taken = flood(&mut client.stream, &message, TOO_MUCH);
        assert!(taken < ENOUGH, "{taken} bytes of options were taken of one who reads no answer");
        somebody_is_served(&served);
    }
    eventually("they are sent away when their time is up", || served.server().metrics().totals().connections == 0);
}

#[test]
fn requests_without_end_are_not_taken_without_end() {
    let options = Options { workers: 1, requests_max: 32, request_bytes_max: 4 << 20, ..Options::default() };
    let Some(served) = serve(vec![("m", memory(1 << 20, true))], options) else { return };
    for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
        for (command, len) in
            [(Command::READ, 65536), (Command::FLUSH, 0), (Command::BLOCK_STATUS, 4096), (Command(99), 0)]
        {
            let mut client =
                served.client().go("m", framing, &["base:allocation"][..usize::from(framing != Framing::Simple)]);
            let request = client.request(command, NONE, 0, len);
            let taken = flood(&mut client.stream, &request, TOO_MUCH);
            assert!(taken < ENOUGH, "{taken} bytes of {command:?} were taken of one who reads no answer");
            let totals = served.server().metrics().totals();
            assert!(totals.in_flight <= 32, "{} requests are in flight for one client", totals.in_flight);
            somebody_is_served(&served);
        }
        let mut client = served.client().go("m", framing, &[]);
        let mut write = client.request(Command::WRITE, NONE, 0, 65536);
        write.resize(write.len() + 65536, 7);
        let taken = flood(&mut client.stream, &write, TOO_MUCH);
        // Their answers are small, so many fit between; but not for ever.
        assert!(taken <= TOO_MUCH + (1 << 20));
        somebody_is_served(&served);
    }
    eventually("they are gone", || served.server().metrics().totals().connections == 0);
}

#[test]
fn endless_holes_hold_up_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hole.vhdx");
    let request = CreateRequest { size_bytes: Some(64 << 40), ..CreateRequest::default() };
    diskwright_disk::create(&path, &request).unwrap();
    let hole = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let options = Options { workers: 1, ..Options::default() };
    let Some(mut served) = serve(vec![("m", memory(1 << 20, true)), ("hole", hole)], options) else { return };
    let mut client = served.client().go("hole", Framing::Extended, &["base:allocation"]);
    // All of it would take minutes.
    for command in [Command::BLOCK_STATUS, Command::TRIM] {
        for _ in 0..100 {
            let asked = client.request(command, NONE, 0, 64 << 40);
            client.say(&asked);
        }
        let began = Instant::now();
        somebody_is_served(&served);
        assert!(began.elapsed() < Duration::from_secs(10), "{command:?}: {:?}", began.elapsed());
    }
    drop(client);
    eventually("what it asked for has ended", || served.server().metrics().totals().connections == 0);
    let began = Instant::now();
    served.stop().unwrap();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// Requests for block status that one client sends in one go.
const STATUS_REQUESTS: usize = 100;

/// A disk that takes its time to find its extents, and may fail then. While the first are looked
/// for, another client asks for something; and before the last are found, he has his answer, if
/// that comes at all.
#[derive(Debug)]
struct Slow {
    disk: Arc<dyn BlockDevice>,
    fails: bool,
    /// How often it began to look for extents, and how often that has ended.
    begun: AtomicUsize,
    ended: AtomicUsize,
    /// How far the other client is: 1 when he has asked, 2 when he has his answer.
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
        // Not for ever: a server that does not give way is to fail, not to hang.
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
        let options = Options { workers: 1, ..Options::default() };
        let Some(served) = serve(vec![("m", Arc::clone(&slow) as _)], options) else { return };
        let mut client = served.client().go("m", Framing::Structured, &["base:allocation"]);
        let mut other = served.client().go("m", Framing::Structured, &[]);
        let requests: Vec<_> =
            (0..STATUS_REQUESTS).flat_map(|_| client.request(Command::BLOCK_STATUS, NONE, 0, 4096)).collect();
        client.say(&requests);
        eventually("the first extents are looked for", || slow.begun.load(Ordering::SeqCst) > 0);
        other.send(Command::READ, 0, 512);
        slow.other.store(1, Ordering::SeqCst);
        assert_eq!(other.reply(512).unwrap().len(), 512);
        let ended = slow.ended.load(Ordering::SeqCst);
        slow.other.store(2, Ordering::SeqCst);
        assert!(ended < STATUS_REQUESTS, "all of one client's requests came before the other's (fails: {fails})");
        // Who gives way gets his answers too.
        for _ in 0..STATUS_REQUESTS {
            assert_eq!(client.reply(0).is_err(), fails);
        }
    }
}

#[test]
fn whoever_stops_in_the_middle_holds_up_nobody() {
    let options = Options { workers: 1, handshake_time: Duration::from_millis(400), ..Options::default() };
    let Some(mut served) = serve(vec![("m", memory(4 << 20, true))], options) else { return };
    // In the handshake: after every byte of it.
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
    somebody_is_served(&served);
    eventually("their time is up", || served.server().metrics().totals().connections == 0);
    drop(stopped);
    // In a payload: each holds what it has announced, and no more are served than fit.
    let holders: Vec<_> = (0..20)
        .map(|number| {
            let mut client = served.client().go("m", Framing::Simple, &[]);
            let write = client.request(Command::WRITE, NONE, 0, 2 << 20);
            client.say(&write);
            client.say(&vec![number; 1000 * usize::from(number)]);
            client
        })
        .collect();
    somebody_is_served(&served);
    // A stop does not wait for them.
    let start = Instant::now();
    served.stop().unwrap();
    assert!(start.elapsed() < common::PATIENCE, "the server waits for payloads that never come");
    drop(holders);
}

#[test]
fn a_crowd_that_comes_and_goes() {
    let options = Options { connections_max: 16, ..Options::default() };
    let Some(served) = serve(vec![("m", memory(1 << 20, true))], options) else { return };
    let lies = OptionHeader { option: OptionCode::GO, data_bytes: 60_000 }.encode();
    for round in 0..300_u32 {
        let Ok(mut stream) = UnixStream::connect(served.socket()) else { continue };
        // At every stage: before a word, in the flags, in a header, in the data of an option.
        let _ = stream.write_all(&3_u32.to_be_bytes()[..(round % 5) as usize]);
        if round % 5 == 4 {
            let _ = stream.write_all(&lies[..(round % 17) as usize]);
        }
    }
    // They are taken in the order in which they came: who is greeted was behind all of them.
    eventually("all were taken", || {
        let greeted = |mut stream: UnixStream| stream.read_exact(&mut [0; 18]);
        UnixStream::connect(served.socket()).and_then(greeted).is_ok()
    });
    eventually("they are gone", || served.server().metrics().totals().connections == 0);
    somebody_is_served(&served);
}
