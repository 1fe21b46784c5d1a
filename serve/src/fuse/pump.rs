//! The loop of a mount: it receives messages and sends replies until the file is unmounted.
//!
//! ```text
//!   one ring:   receives on /dev/fuse ─▶ session.take ─▶ the disk's queue ─▶ session.reap
//!               ─▶ sends on /dev/fuse
//!               one io_uring_enter a turn submits and waits for all of it
//! ```
//!
//! A poll waits for the first message. Then several receives are submitted at once; their number
//! follows how many brought a message lately. Under load a turn takes many messages without a poll,
//! and an idle mount uses one poll and one receive for each message. A message that finds no free
//! buffer waits in the kernel. Without io_uring, the same session is driven with read(2) and
//! write(2), one message at a time.
//!
//! The loop ends with `Ok` when the mount is gone (ENODEV, after DESTROY or without it) and nothing
//! is in flight. Writes that were answered but not flushed become durable when the caller closes
//! the disk.

use crate::{
    fuse::{
        buffers::Buffers,
        error::FuseError,
        session::{DEPTH, Session},
        view::View,
    },
    reserve::Reserve,
    turn::Pace,
};
use diskwright_store::{BlockDevice, EngineKind, IoBuf, QueueOptions, SharedRing, StreamEnd, StreamId, Streams};
use rustix::io::Errno;
use std::{io, os::fd::OwnedFd, sync::Arc};

/// Maximum number of receives at once. The other large buffers hold messages that were received.
const RECEIVES_MAX: usize = 8;

/// If a batch of at least this many receives all brought messages, the next batch is submitted
/// without a poll.
const BUSY: usize = 4;

/// Requests that are answered in a normal turn.
const ANSWERS: usize = 4;

/// Room in the ring for receives and sends, besides the disk's requests.
const RING_DEPTH: usize = DEPTH + Buffers::count();

const RECEIVE: u64 = 0;
const SEND: u64 = 1;
const POLL: u64 = 2;

/// From poll(2).
const POLLERR: usize = 8;

/// Serves `device` on the descriptor `connection` until the file is unmounted.
///
/// # Errors
/// See [`FuseError`]. The connection is then closed, and the kernel answers every request with an
/// error.
pub fn serve(
    connection: OwnedFd,
    device: Arc<dyn BlockDevice>,
    view: View,
    engine: EngineKind,
) -> Result<(), FuseError> {
    let buffers = Buffers::new();
    let ring = match engine {
        EngineKind::Sync => None,
        EngineKind::Uring => Some(SharedRing::new(RING_DEPTH, Some(buffers.slab())).map_err(FuseError::Queue)?),
        EngineKind::Auto => SharedRing::new(RING_DEPTH, Some(buffers.slab())).ok(),
    };
    let options = QueueOptions { depth: DEPTH, engine, slab: Some(buffers.slab()), ring: ring.as_ref() };
    let queue = device.open_queue(&options).map_err(FuseError::Queue)?;
    match ring {
        Some(ring) => {
            let queue = Box::new(Reserve::over(queue, &ring, Arc::default()));
            serve_on_ring(&ring, connection, Session::new(view, device, queue, buffers))
        }
        None => serve_in_turn(&connection, Session::new(view, device, queue, buffers)),
    }
}

fn serve_on_ring(ring: &SharedRing, connection: OwnedFd, session: Session) -> Result<(), FuseError> {
    let mut streams = Streams::new(ring);
    let kernel = streams.add(connection).map_err(|source| FuseError::Kernel { doing: "poll", source })?;
    let mut pump = Pump {
        streams,
        kernel,
        session,
        receives: 0,
        sends: 0,
        polling: false,
        brought: 0,
        batch: 1,
        unmounted: false,
    };
    let (mut ends, mut pace) = (Vec::new(), Pace::answering(ANSWERS));
    loop {
        pump.listen();
        if pump.is_over() {
            return Ok(());
        }
        pace.end_turn(ring, pump.session.has_reply()).map_err(FuseError::Queue)?;
        pump.streams.reap(&mut ends);
        for end in ends.drain(..) {
            pump.ended(end)?;
        }
        pump.session.reap(0)?;
        for _ in 0..pace.answers() {
            let Some(reply) = pump.session.next_reply() else { break };
            pump.streams.send(kernel, reply.buf, reply.range, SEND);
            pump.sends += 1;
        }
    }
}

struct Pump {
    streams: Streams,
    kernel: StreamId,
    session: Session,
    /// Receives in flight.
    receives: usize,
    /// Sends in flight.
    sends: usize,
    polling: bool,
    /// Receives of the present batch that have brought a message.
    brought: usize,
    /// Receives that are submitted at once.
    batch: usize,
    unmounted: bool,
}

impl Pump {
    fn is_over(&self) -> bool {
        let idle = self.receives == 0 && self.sends == 0 && !self.polling;
        self.unmounted && idle && self.session.in_flight() == 0 && !self.session.has_reply()
    }

    /// Polls if no poll and no receive is in flight and there is a free buffer. If there is no free
    /// buffer, requests are in flight whose completions bring one back.
    fn listen(&mut self) {
        if !self.polling && self.receives == 0 && !self.unmounted && self.session.buffers().has_message() {
            self.streams.poll(self.kernel, POLL);
            self.polling = true;
        }
    }

    fn receive(&mut self) {
        self.brought = 0;
        while self.receives < self.batch
            && let Some(buf) = self.session.buffers().message()
        {
            self.streams.receive(self.kernel, buf, Buffers::message_range(), false, RECEIVE);
            self.receives += 1;
        }
    }

    fn ended(&mut self, end: StreamEnd) -> Result<(), FuseError> {
        match (end.tag, end.buf) {
            (POLL, _) => self.polled(end.result),
            (SEND, Some(buf)) => {
                self.sends -= 1;
                self.session.buffers().give_back(buf);
                end.result.map_or_else(judge_answer, |_| Ok(()))
            }
            (_, Some(buf)) => self.received(buf, end.result),
            (_, None) => Ok(()),
        }
    }

    fn polled(&mut self, events: io::Result<usize>) -> Result<(), FuseError> {
        self.polling = false;
        let events = events.map_err(|source| FuseError::Kernel { doing: "poll", source })?;
        if events & POLLERR == 0 {
            self.receive();
        } else if let (Some(kernel), Some(mut buf)) = (self.streams.fd(self.kernel), self.session.buffers().message()) {
            // A ring reads only when the descriptor is readable, and a mount that is gone never is.
            // So read(2) is called directly.
            let result = rustix::io::read(kernel, &mut buf[Buffers::message_range()]).map_err(io::Error::from);
            self.receives += 1;
            self.received(buf, result)?;
        }
        Ok(())
    }

    fn received(&mut self, buf: IoBuf, result: io::Result<usize>) -> Result<(), FuseError> {
        self.receives -= 1;
        match result {
            Ok(len_bytes) => {
                self.brought += 1;
                self.session.take(buf, len_bytes)?;
            }
            Err(error) => {
                self.session.buffers().give_back(buf);
                self.unmounted |= judge_receive(error)?;
            }
        }
        if self.receives == 0 && !self.unmounted {
            let all = self.brought >= self.batch;
            let was_busy = self.batch >= BUSY;
            self.batch = if all { (self.batch * 2).min(RECEIVES_MAX) } else { self.brought.max(1) };
            if all && was_busy {
                self.receive();
            }
        }
        Ok(())
    }
}

fn serve_in_turn(connection: &OwnedFd, mut session: Session) -> Result<(), FuseError> {
    loop {
        let Some(mut buf) = session.buffers().message() else {
            return Err(FuseError::Queue(io::Error::other(
                "internal error: all buffers are in use and no request is in flight",
            )));
        };
        match rustix::io::read(connection, &mut buf[Buffers::message_range()]) {
            Ok(len_bytes) => session.take(buf, len_bytes)?,
            Err(errno) => {
                session.buffers().give_back(buf);
                if judge_receive(errno.into())? {
                    return Ok(());
                }
            }
        }
        while {
            session.reap(session.in_flight().min(1))?;
            while let Some(reply) = session.next_reply() {
                let written =
                    rustix::io::retry_on_intr(|| rustix::io::write(connection, &reply.buf[reply.range.clone()]));
                session.buffers().give_back(reply.buf);
                match written {
                    Ok(_) => {}
                    Err(errno) => judge_answer(errno.into())?,
                }
            }
            session.in_flight() > 0
        } {}
    }
}

/// Whether a failed receive means that the mount is gone.
fn judge_receive(error: io::Error) -> Result<bool, FuseError> {
    match Errno::from_io_error(&error) {
        Some(Errno::NODEV) => Ok(true),
        // ENOENT: the request was interrupted while it was read.
        Some(Errno::INTR | Errno::AGAIN | Errno::NOENT) => Ok(false),
        _ => Err(FuseError::Kernel { doing: "read from", source: error }),
    }
}

/// Ignores errors that mean that the program no longer waits for the reply (ENOENT) or that the
/// mount is gone (ENODEV; on a ring EAGAIN, because the descriptor is never writable again).
fn judge_answer(error: io::Error) -> Result<(), FuseError> {
    match Errno::from_io_error(&error) {
        Some(Errno::NOENT | Errno::NODEV | Errno::AGAIN) => Ok(()),
        _ => Err(FuseError::Kernel { doing: "write to", source: error }),
    }
}

#[cfg(test)]
#[path = "../../tests/steps/mod.rs"]
mod steps;

#[cfg(test)]
mod tests {
    use super::{
        steps::{DEPTH as READS, HELD, Steps},
        *,
    };
    use crate::{
        fuse::{view::Shape, wire::tests::read},
        metrics::Counter,
    };
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    use std::thread;

    const READ_BYTES: u32 = 4096;

    /// Serves the disk of `steps` until the other end of the socket is closed. The socket keeps
    /// message boundaries, as `/dev/fuse` does. Returns the number of reads held back and of
    /// io_uring_enter calls.
    fn counted(connection: OwnedFd) -> Option<(u64, u64)> {
        let buffers = Buffers::new();
        let ring = SharedRing::new(RING_DEPTH, Some(buffers.slab())).ok()?;
        let held = Arc::new(Counter::default());
        let device: Arc<dyn BlockDevice> = Arc::new(Steps);
        let queue = device.open_queue(&QueueOptions::default()).unwrap();
        let queue = Box::new(Reserve::over(queue, &ring, Arc::clone(&held)));
        let size_bytes = device.geometry().size_bytes;
        let view =
            View { shape: Shape::File, size_bytes, unit_bytes: 4096, read_only: true, uid: 0, gid: 0, time_seconds: 0 };
        // A closed socket shows as an empty message, which is an error. A mount ends with ENODEV.
        assert!(serve_on_ring(&ring, connection, Session::new(view, device, queue, buffers)).is_err());
        Some((held.get(), ring.enters()))
    }

    /// Sends `rounds` of reads, each when the last was answered. The first is sent before the
    /// server starts.
    fn rounds(rounds: u64) -> Option<(u64, u64)> {
        let flags = SocketFlags::CLOEXEC;
        let (kernel, ours) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let ask = |round: u64| {
            (0..READS).all(|number| {
                let message = read(round * READS + number + 1, number * u64::from(READ_BYTES), READ_BYTES);
                rustix::io::write(&kernel, &message).is_ok()
            })
        };
        assert!(ask(0));
        let server = thread::spawn(move || counted(ours));
        for round in 1..=rounds {
            for _ in 0..READS {
                let mut reply = vec![0; 2 * READ_BYTES as usize];
                let Ok(len_bytes @ 1..) = rustix::io::read(&kernel, &mut reply) else {
                    println!("skipped: no io_uring here");
                    return server.join().unwrap();
                };
                assert_eq!(len_bytes, 16 + READ_BYTES as usize);
            }
            assert!(round == rounds || ask(round));
        }
        drop(kernel);
        server.join().unwrap()
    }

    #[test]
    fn a_few_reads_of_each_batch_are_held_back() {
        const ROUNDS: u64 = 8;
        let Some((held, _)) = rounds(ROUNDS) else { return };
        assert_eq!(held, (ROUNDS - 1) * HELD, "the batch size is not known in the first round");
    }

    #[test]
    fn many_messages_take_few_io_uring_enter_calls() {
        let Some((_, enters)) = rounds(1) else { return };
        // Three polls while the batch grows from one message to eight; then eight messages and four
        // replies a turn.
        assert!(enters <= READS / 2 + 8, "{enters} calls for {READS} reads");
    }
}
