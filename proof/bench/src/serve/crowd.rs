//! Many clients of one server: a thousand connections, each with one request in flight, on 32
//! disks. Does the server forget one of them?
//!
//! One thread here is all clients. It sends each its next request as soon as it has the answer to
//! the last one, and so knows how long each client waited. The messages are made by the wire
//! protocol alone (`diskwright_nbd::wire`): a thousand full clients would measure themselves.

use super::ServerProgram;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    progress::{Progress, report},
    server::Server,
    targets::{self, Container},
};
use diskwright_nbd::wire::{
    ClientFlags, Command, CommandFlags, Framing, Greeting, OptionCode, OptionReplyHeader, RequestHeader, option,
};
use diskwright_stats::{
    numbers::{duration, grouped},
    summary::median,
};
use diskwright_store::CacheMode;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use rustix::event::epoll;
use std::{
    fs,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

const CLIENTS: usize = 1000;
const DISKS: usize = 32;
const BLOCK_BYTES: u64 = 4096;
/// A simple reply: its header and the payload.
const REPLY_BYTES: usize = 16 + BLOCK_BYTES as usize;

/// A connection with one request in flight.
struct Client {
    stream: UnixStream,
    sent: Instant,
    received: usize,
    /// How long each request took, in nanoseconds.
    waits_ns: Vec<f64>,
}

fn failed(doing: &'static str, socket: &Path) -> impl FnOnce(io::Error) -> LabError {
    LabError::file(doing, socket)
}

/// Connects to an export, with simple replies.
fn connect(socket: &Path, export: &str) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    let mut greeting = [0; Greeting::NEWSTYLE_BYTES];
    stream.read_exact(&mut greeting)?;
    let mut message = (ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).encode().to_vec();
    option::encode_export(OptionCode::GO, export, &[], &mut message);
    stream.write_all(&message)?;
    loop {
        let mut header = [0; OptionReplyHeader::WIRE_BYTES];
        stream.read_exact(&mut header)?;
        let Ok(diskwright_nbd::wire::Decoded::Value(header, _)) = OptionReplyHeader::decode(&header) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let mut data = vec![0; header.data_bytes as usize];
        stream.read_exact(&mut data)?;
        match header.code {
            diskwright_nbd::wire::ReplyCode::ACK => return Ok(stream),
            code if code.is_error() => return Err(io::Error::other(format!("the server refuses {export:?}: {code}"))),
            _ => {}
        }
    }
}

impl Client {
    fn ask(&mut self, offset_bytes: u64) -> io::Result<()> {
        let request = RequestHeader {
            flags: CommandFlags::empty(),
            command: Command::READ,
            cookie: 1,
            offset_bytes,
            len_bytes: BLOCK_BYTES,
        };
        let mut message = Vec::with_capacity(RequestHeader::COMPACT_BYTES);
        request.encode(Framing::Simple, &mut message);
        (self.sent, self.received) = (Instant::now(), 0);
        // 28 bytes always fit into the buffer of an idle socket.
        self.stream.write_all(&message)
    }

    /// Receives what is there. Returns whether the reply is complete.
    fn receive(&mut self, buf: &mut [u8; REPLY_BYTES]) -> io::Result<bool> {
        match self.stream.read(&mut buf[self.received..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                if self.received == 0 && count >= 8 && buf[4..8] != [0; 4] {
                    return Err(io::Error::other("a read failed"));
                }
                self.received += count;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if self.received < REPLY_BYTES {
            return Ok(false);
        }
        self.waits_ns.push(self.sent.elapsed().as_nanos() as f64);
        Ok(true)
    }
}

/// Runs all clients for `length`.
fn run(clients: &mut [Client], size_bytes: u64, length: Duration) -> io::Result<()> {
    let queue = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(SEED);
    let mut place = || random.next_u64() % (size_bytes / BLOCK_BYTES) * BLOCK_BYTES;
    for (index, client) in clients.iter_mut().enumerate() {
        client.stream.set_nonblocking(true)?;
        epoll::add(&queue, &client.stream, epoll::EventData::new_u64(index as u64), epoll::EventFlags::IN)?;
        client.ask(place())?;
    }
    let (begun, mut events, mut buf) = (Instant::now(), Vec::with_capacity(256), [0; REPLY_BYTES]);
    while begun.elapsed() < length {
        events.clear();
        let second = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
        epoll::wait(&queue, rustix::buffer::spare_capacity(&mut events), Some(&second))?;
        for event in &events {
            let client = &mut clients[event.data.u64() as usize];
            if client.receive(&mut buf)? {
                client.ask(place())?;
            }
        }
    }
    // A client that was forgotten has waited until now.
    for client in clients {
        client.waits_ns.push(client.sent.elapsed().as_nanos() as f64);
    }
    Ok(())
}

pub(crate) fn fairness(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes: u64 = context.pick(16 << 20, 64 << 20);
    let all_bytes = DISKS as u64 * size_bytes;
    context.scratch.need("these disks", all_bytes + (1 << 30))?;
    let dir = context.scratch.folder("crowd")?;
    let dir = dir.canonicalize().map_err(LabError::file("find", &dir))?;
    let how = context.preparation(size_bytes, CacheMode::Direct);
    let socket = dir.join("crowd.sock");
    let mut command = ServerProgram::Ours
        .command()
        .map_err(|what| LabError::BadOptions { what, hint: "leave this row out".into() })?;
    command.arg("serve");
    for number in 0..DISKS {
        let own = dir.join(format!("disk{number}"));
        fs::create_dir(&own).map_err(LabError::file("create", &own))?;
        let before = number as u64 * size_bytes;
        let mut tick = |done| report(progress, "prepare", before + done, all_bytes, "32 disks");
        let path = targets::make_filled(Container::VhdxDynamic, &own, &how, &mut tick)?;
        let mut word = std::ffi::OsString::from(format!("disk{number}="));
        word.push(path);
        command.arg(word);
    }
    command.arg("--nbd").arg(&socket).args(["--connections=1100", "--cache=direct", "--quiet"]);
    context.scratch.settle()?;
    let server = Server::listening(command, &socket, "crowd")?;
    let mut clients = Vec::with_capacity(CLIENTS);
    for number in 0..CLIENTS {
        let stream = connect(&socket, &format!("disk{}", number % DISKS)).map_err(failed("connect to", &socket))?;
        clients.push(Client { stream, sent: Instant::now(), received: 0, waits_ns: Vec::new() });
    }
    let length = context.options.cell.unwrap_or_else(|| Duration::from_secs(context.pick(2, 10)));
    report(progress, "measure", 0, 1, "1,000 clients")?;
    run(&mut clients, size_bytes, length).map_err(failed("be a client of", &socket))?;
    let of_client = |client: &Client| client.waits_ns.iter().sum::<f64>() / client.waits_ns.len().max(1) as f64;
    let mut means: Vec<f64> = clients.iter().map(of_client).collect();
    means.sort_by(f64::total_cmp);
    let mut all: Vec<f64> = clients.iter().flat_map(|client| client.waits_ns.iter().copied()).collect();
    all.sort_by(f64::total_cmp);
    let quantile = |share: f64| all[((all.len() - 1) as f64 * share) as usize];
    let (typical, slowest) = (median(&means).unwrap_or(0.0), means.last().copied().unwrap_or(0.0));
    drop(clients);
    server.stop()?;
    let name = "1,000 connections with one 4K read each in flight, 32 disks: the client that waits longest, mean wait";
    Ok(RowOutcome {
        checks: vec![Check::ratio(name, "ns", &[slowest], &[typical], Bar::AtMost(3.0))],
        notes: vec![format!(
            "{} requests in {}; single waits: median {}, 99.9 % {}, longest {}",
            grouped(all.len() as f64),
            duration(length.as_nanos() as f64),
            duration(quantile(0.5)),
            duration(quantile(0.999)),
            duration(quantile(1.0))
        )],
        ..RowOutcome::default()
    })
}
