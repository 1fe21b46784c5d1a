//! A hostile front-end of the vhost-user device, and a hostile guest behind an honest one.
//!
//! `vhost_messages` sends messages with numbers and descriptors that lie, before and after a ring
//! runs. `vhost_ring` is a guest that writes what it likes into its virtqueue. What must hold:
//!
//! - The server ends the connection, or answers. Its threads stay alive, and it serves the next
//!   front-end.
//! - A guest is answered at most once for each request that it made available.
//! - Memory depends on what is in flight at once, not on length fields (`tests/corpus.rs` measures
//!   it).

use arbitrary::{Arbitrary, Unstructured};
use diskwright_serve::{
    net::{Address, Listener},
    vhost_user::{
        VhostUserOptions, VhostUserServer,
        front_end::{FrontEnd, FrontOptions},
    },
};
use diskwright_store::{BlockQueue, IoBuf, MemoryStore, RawDevice, Request};
use rustix::{
    event::EventfdFlags,
    fs::MemfdFlags,
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags},
};
use std::{
    fs::File,
    io::{self, IoSlice, Read},
    mem::MaybeUninit,
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tempfile::TempDir;

const SIZE_BYTES: u64 = 1 << 20;
/// Maximum number of messages, or steps, in an input.
const MOST: usize = 16;
/// A peer that needs longer is stuck.
const PATIENCE: Duration = Duration::from_secs(30);
/// The memory of the hostile front-end, in its process.
const USER_BASE: u64 = 0x7000_0000;
const MEMORY_BYTES: u64 = 256 << 10;

/// A server that runs until the process ends.
struct Running {
    server: VhostUserServer,
    socket: PathBuf,
    _dir: TempDir,
}

/// Prints that the targets are skipped and returns `None` if there is no io_uring.
fn server() -> Option<&'static Running> {
    static SERVER: OnceLock<Option<Running>> = OnceLock::new();
    let start = || {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let socket = dir.path().join("socket");
        let store = Arc::new(MemoryStore::with_bytes("disk", vec![0x5a; SIZE_BYTES as usize]));
        let device = Arc::new(RawDevice::new(store, true, 512).expect("a disk in memory"));
        let listener = Listener::bind(&Address::Unix(socket.clone())).expect("a socket");
        let options =
            VhostUserOptions { name: "disk".into(), queues: 2, is_ephemeral: false, reservations: Arc::default() };
        match VhostUserServer::start(device, listener, options) {
            Ok(server) => Some(Running { server, socket, _dir: dir }),
            Err(error) => {
                println!("skipped: hostile guests of the vhost-user device: {error}");
                None
            }
        }
    };
    SERVER.get_or_init(start).as_ref()
}

/// Starts the server, so that its memory is not counted for an input.
pub fn warm_up() {
    if let Some(running) = server() {
        running.serves_others();
    }
}

impl Running {
    fn serves_others(&self) {
        let front = FrontEnd::connect(&self.socket, options()).expect("an honest front-end");
        let mut queue = front.queue(0).expect("a queue");
        queue.push(Request::read(0, 4096, IoBuf::new(4096), 0)).expect("a read by another guest");
        let mut done = Vec::new();
        queue.reap(1, &mut done).expect("an answer");
        assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
    }

    fn check(&self, data: &[u8]) {
        assert!(self.server.is_well(), "a thread of the server ended");
        if data.first().is_some_and(|byte| byte % 16 == 0) {
            self.serves_others();
        }
    }
}

fn options() -> FrontOptions {
    FrontOptions { queues: 1, depth: 4, ..FrontOptions::default() }
}

/// A number as a hostile front-end sends it.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Number {
    Small(u8),
    /// Within the memory, in steps of 16.
    User(u16),
    NearPower(u8, i8),
    Any(u64),
}

impl Number {
    fn get(self) -> u64 {
        match self {
            Self::Small(value) => value.into(),
            Self::User(step) => USER_BASE + u64::from(step) * 16,
            Self::NearPower(power, by) => (1_u64 << (power % 64)).wrapping_add_signed(by.into()),
            Self::Any(value) => value,
        }
    }
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Descriptor {
    Event,
    Memory,
    File,
    Socket,
}

impl Descriptor {
    fn open(self) -> OwnedFd {
        match self {
            Self::Event => rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
            Self::Memory => {
                let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
                let fd = rustix::fs::memfd_create("fuzz", flags).expect("a memfd");
                rustix::fs::ftruncate(&fd, MEMORY_BYTES).expect("its length");
                fd
            }
            Self::File => File::open("/dev/null").expect("a file").into(),
            Self::Socket => UnixStream::pair().expect("a pair of sockets").0.into(),
        }
    }
}

/// A message with a body of the right form and any numbers, or of any bytes.
#[derive(Debug, Arbitrary)]
struct Message {
    code: u8,
    flags: Option<u32>,
    numbers: [Number; 4],
    bytes: Option<Vec<u8>>,
    length_error: i8,
    lies_about_length: bool,
    fds: Vec<Descriptor>,
}

fn words(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn longs(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

impl Message {
    fn code(&self) -> u32 {
        u32::from(self.code % 45)
    }

    fn body(&self) -> Vec<u8> {
        if let Some(bytes) = &self.bytes {
            return bytes.clone();
        }
        let number = |index: usize| self.numbers[index].get();
        let ring = number(0) as u32 % 3;
        match self.code() {
            2 | 16 => longs(&[number(0)]),
            5 => {
                let count = self.fds.len().min(8);
                let region = [number(0), number(1), number(2), number(3)];
                [words(&[count as u32, 0]), longs(&region.repeat(count))].concat()
            }
            8 | 10 | 11 | 18 => words(&[ring, number(1) as u32]),
            9 => [words(&[ring, 0]), longs(&[number(1), number(2), number(3), 0])].concat(),
            12..=14 => longs(&[number(0) & 0x1ff]),
            24 | 25 => {
                let len = number(1) as u32 % 300;
                [words(&[number(0) as u32 % 300, len, 0]), vec![number(2) as u8; len as usize]].concat()
            }
            31 | 32 => {
                let sizes = [(number(2) as u16).to_ne_bytes(), (number(3) as u16).to_ne_bytes(), [0; 2], [0; 2]];
                [longs(&[number(0), number(1)]), sizes.concat()].concat()
            }
            _ => Vec::new(),
        }
    }
}

/// The messages that lead to a ring that runs.
fn honest_beginning() -> Vec<(u32, Vec<u8>, Vec<Descriptor>)> {
    let region = [0, MEMORY_BYTES, USER_BASE, 0];
    let protocol: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13;
    vec![
        (3, Vec::new(), vec![]),
        (16, longs(&[protocol]), vec![]),
        (2, longs(&[1 << 30 | 1 << 32 | 1 << 28]), vec![]),
        (5, [words(&[1, 0]), longs(&region)].concat(), vec![Descriptor::Memory]),
        (8, words(&[0, 16]), vec![]),
        (10, words(&[0, 0]), vec![]),
        (9, [words(&[0, 0]), longs(&[USER_BASE, USER_BASE + 8192, USER_BASE + 4096, 0])].concat(), vec![]),
        (13, longs(&[0]), vec![Descriptor::Event]),
        (12, longs(&[0]), vec![Descriptor::Event]),
        (18, words(&[0, 1]), vec![]),
    ]
}

fn send(stream: &UnixStream, bytes: &[u8], fds: &[Descriptor]) -> io::Result<()> {
    let fds: Vec<OwnedFd> = fds.iter().take(8).map(|fd| fd.open()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    if !borrowed.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)), "there is room for them");
    }
    rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[derive(Debug, Arbitrary)]
struct FrontScript {
    begins_honestly: bool,
    messages: Vec<Message>,
}

/// The fuzz target: a hostile front-end.
pub fn vhost_messages(data: &[u8]) {
    let Ok(script) = FrontScript::arbitrary(&mut Unstructured::new(data)) else { return };
    let Some(running) = server() else { return };
    let mut stream = UnixStream::connect(&running.socket).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    let beginning = if script.begins_honestly { honest_beginning() } else { Vec::new() };
    let framed = |code: u32, flags: u32, len: u32, body: &[u8]| [&words(&[code, flags, len]), body].concat();
    let honest = beginning
        .iter()
        .try_for_each(|(code, body, fds)| send(&stream, &framed(*code, 1, body.len() as u32, body), fds));
    // The server may end the connection at any message.
    let _ = honest.and_then(|()| {
        script.messages.iter().take(MOST).try_for_each(|message| {
            let body = message.body();
            let error = if message.lies_about_length { message.length_error } else { 0 };
            let len = (body.len() as u32).wrapping_add_signed(error.into());
            send(&stream, &framed(message.code(), message.flags.unwrap_or(1), len, &body), &message.fds)
        })
    });
    let _ = stream.shutdown(Shutdown::Write);
    let mut buf = [0; 4096];
    loop {
        match stream.read(&mut buf) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break,
            // Interrupted by the alarm of the fuzzer.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => panic!("the server neither answers nor disconnects: {error}"),
        }
    }
    running.check(data);
}

/// An address as a hostile guest names it.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum GuestAddress {
    Within(u16),
    NearEnd(i16),
    Any(u64),
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Length {
    Small(u8),
    Sectors(u8),
    Any(u32),
}

/// One step of a hostile guest.
#[derive(Debug, Arbitrary)]
enum Step {
    /// A descriptor of the ring, or of the indirect table in the last page.
    Describe { in_table: bool, index: u8, address: GuestAddress, len: Length, flags: u8, next: u8 },
    /// A request of the right form: header, payload, status.
    Request { slot: u8, kind: u8, sector: Number, address: GuestAddress, len: Length, written: bool },
    /// Makes heads available, and sets the index wrong by `error`.
    Offer { heads: [u8; 4], count: u8, error: i8, kicks: bool },
    /// Writes a byte into the ring.
    Poke { at: u16, byte: u8 },
    /// Sends a message that stops and starts the ring.
    Restart,
}

#[derive(Debug, Arbitrary)]
struct GuestScript {
    steps: Vec<Step>,
}

struct Guest {
    front: FrontEnd,
    index: u16,
    /// The highest index that was shown.
    most: u16,
}

impl Guest {
    fn address(&self, address: GuestAddress) -> u64 {
        let layout = self.front.layout();
        match address {
            GuestAddress::Within(at) => layout.address(usize::from(at) % layout.total_bytes()),
            GuestAddress::NearEnd(by) => layout.address(layout.total_bytes()).wrapping_add_signed(by.into()),
            GuestAddress::Any(address) => address,
        }
    }

    fn len(len: Length) -> u32 {
        match len {
            Length::Small(len) => len.into(),
            Length::Sectors(count) => u32::from(count) * 512,
            Length::Any(len) => len,
        }
    }

    /// The last page, where no ring is.
    fn page(&self) -> usize {
        self.front.layout().total_bytes() - 4096
    }

    fn describe(&self, at: usize, address: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.front.memory().copy_in(at, &bytes).expect("its own memory");
    }

    fn step(&mut self, step: &Step) -> io::Result<()> {
        let layout = self.front.layout().clone();
        let (ring, size) = (layout.ring(0), layout.ring_size());
        let memory = Arc::clone(self.front.memory());
        match step {
            Step::Describe { in_table, index, address, len, flags, next } => {
                let start = if *in_table { self.page() + 2048 } else { ring.descriptors };
                let at = start + 16 * usize::from(u16::from(*index) % size);
                self.describe(at, self.address(*address), Self::len(*len), (flags % 8).into(), (*next).into());
            }
            Step::Request { slot, kind, sector, address, len, written } => {
                let slot = u16::from(*slot) % (size / 3);
                let page = self.page() + 64 * usize::from(slot);
                let kinds = [0, 1, 4, 8, 11, 13, 77];
                let kind: u32 = kinds[usize::from(*kind) % kinds.len()];
                memory.copy_in(page, &[words(&[kind, 0]), longs(&[sector.get()])].concat())?;
                let descriptor = |number: u16| ring.descriptors + 16 * usize::from(3 * slot + number);
                let flags = if *written { 3 } else { 1 };
                self.describe(descriptor(0), layout.address(page), 16, 1, 3 * slot + 1);
                self.describe(descriptor(1), self.address(*address), Self::len(*len), flags, 3 * slot + 2);
                self.describe(descriptor(2), layout.address(page + 32), 1, 2, 0);
            }
            Step::Offer { heads, count, error, kicks } => {
                for &head in heads.iter().take(usize::from(*count) % 5) {
                    let head = if head % 8 == 0 { head.into() } else { 3 * (u16::from(head) % (size / 3)) };
                    memory.store_u16(ring.available + 4 + 2 * usize::from(self.index % size), head)?;
                    self.index = self.index.wrapping_add(1);
                }
                // Mostly the truth.
                let shown = self.index.wrapping_add_signed(if error % 4 == 0 { (*error).into() } else { 0 });
                self.most = self.most.max(shown);
                memory.store_u16(ring.available + 2, shown)?;
                if *kicks {
                    self.front.kick(0)?;
                }
            }
            Step::Poke { at, byte } => memory.copy_in(ring.descriptors + usize::from(*at) % self.page(), &[*byte])?,
            Step::Restart => {
                self.front.stop_ring(0)?;
                self.front.start_ring(0)?;
            }
        }
        Ok(())
    }
}

/// The fuzz target: a hostile guest.
pub fn vhost_ring(data: &[u8]) {
    let Ok(script) = GuestScript::arbitrary(&mut Unstructured::new(data)) else { return };
    let Some(running) = server() else { return };
    let front = FrontEnd::connect(&running.socket, options()).expect("a front-end");
    let mut guest = Guest { front, index: 0, most: 0 };
    // A guest that pokes may change the index of used entries itself.
    let pokes = script.steps.iter().any(|step| matches!(step, Step::Poke { .. }));
    // The server may end the connection at any step.
    let stepped = script.steps.iter().take(MOST).try_for_each(|step| guest.step(step));
    let stopped = stepped.and_then(|()| {
        guest.front.kick(0)?;
        // Ends when the requests that were taken have ended.
        guest.front.stop_ring(0)
    });
    if let (Ok(next), false) = (stopped, pokes) {
        let ring = guest.front.layout().ring(0);
        let used = guest.front.memory().load_u16(ring.used + 2).expect("its own memory");
        // A ring that is damaged at this moment has requests without answers.
        assert!(used <= next && next <= guest.most, "{used} answers, {next} requests taken of {}", guest.most);
    }
    drop(guest);
    running.check(data);
}
