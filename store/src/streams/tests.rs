use super::*;
use crate::{CacheMode, Engine, FileStore, LockMode, OpenOptions, Slab, Store};
use std::{
    collections::HashMap,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    sync::Arc,
    thread,
    time::Instant,
};

fn ring() -> Option<SharedRing> {
    let ring = SharedRing::new(64, None);
    if let Err(error) = &ring {
        eprintln!("skipped: no io_uring: {error}");
    }
    ring.ok()
}

/// Waits until `count` operations have ended, and returns them by tag.
fn ends(ring: &SharedRing, streams: &mut Streams, count: usize) -> HashMap<u64, StreamEnd> {
    let mut out = Vec::new();
    streams.reap(&mut out);
    while out.len() < count {
        ring.wait().unwrap();
        streams.reap(&mut out);
    }
    let by_tag: HashMap<u64, StreamEnd> = out.into_iter().map(|end| (end.tag, end)).collect();
    assert_eq!(by_tag.len(), count, "each operation ends once");
    by_tag
}

fn end(ring: &SharedRing, streams: &mut Streams) -> StreamEnd {
    ends(ring, streams, 1).into_values().next().unwrap()
}

fn filled(len_bytes: usize, byte: u8) -> IoBuf {
    let mut buf = IoBuf::new(len_bytes);
    buf.fill(byte);
    buf
}

fn pattern(len_bytes: usize) -> Vec<u8> {
    (0..len_bytes).map(|n| (n % 251) as u8 ^ (n >> 12) as u8).collect()
}

#[test]
fn a_receive_returns_available_bytes_or_fills_its_range() {
    let Some(ring) = ring() else { return };
    let mut streams = Streams::new(&ring);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let stream = streams.add(ours.into()).unwrap();
    theirs.write_all(b"hello").unwrap();
    streams.receive(stream, filled(4096, 0), 100..200, false, 1);
    let ended = end(&ring, &mut streams);
    assert_eq!((ended.tag, ended.result.unwrap()), (1, 5));
    assert_eq!(&ended.buf.unwrap()[98..107], b"\0\0hello\0\0");

    streams.receive(stream, IoBuf::new(4096), 0..1000, true, 2);
    let writer = thread::spawn(move || {
        for chunk in pattern(1000).chunks(300) {
            theirs.write_all(chunk).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
        theirs.write_all(b"rest").unwrap();
    });
    let ended = end(&ring, &mut streams);
    assert_eq!(ended.result.unwrap(), 1000);
    assert_eq!(ended.buf.unwrap()[..1000], pattern(1000));
    writer.join().unwrap();
    // The stream ends before the range is full.
    streams.receive(stream, IoBuf::new(4096), 0..1000, true, 3);
    let ended = end(&ring, &mut streams);
    assert_eq!((ended.result.unwrap(), &ended.buf.unwrap()[..4]), (4, &b"rest"[..]));
    streams.receive(stream, IoBuf::new(4096), 0..1000, false, 4);
    assert_eq!(end(&ring, &mut streams).result.unwrap(), 0);
}

#[test]
fn everything_is_sent_in_order_to_a_slow_reader() {
    let Some(ring) = ring() else { return };
    for pieces in [1usize, 7, 1500] {
        let mut streams = Streams::new(&ring);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let stream = streams.add(ours.into()).unwrap();
        let bytes = pattern(3 << 20);
        let piece_bytes = bytes.len() / pieces;
        let mut list = Vec::new();
        for n in 0..pieces {
            let mut buf = IoBuf::new(piece_bytes + 64);
            buf[64..].copy_from_slice(&bytes[n * piece_bytes..(n + 1) * piece_bytes]);
            list.push((buf, 64..64 + piece_bytes));
        }
        let reader = thread::spawn(move || {
            let mut got = vec![0; pieces * piece_bytes];
            for chunk in got.chunks_mut(100_000) {
                theirs.read_exact(chunk).unwrap();
                thread::yield_now();
            }
            got
        });
        if pieces == 1 {
            let (buf, range) = list.remove(0);
            streams.send(stream, buf, range, 5);
        } else {
            streams.send_all(stream, list, 5);
        }
        let ended = end(&ring, &mut streams);
        assert_eq!(ended.result.unwrap(), pieces * piece_bytes);
        assert_eq!(ended.pieces.len() + usize::from(ended.buf.is_some()), pieces, "the buffers come back");
        assert!(reader.join().unwrap() == bytes[..pieces * piece_bytes]);
    }
}

#[test]
fn one_receive_fills_several_pieces() {
    let Some(ring) = ring() else { return };
    let mut streams = Streams::new(&ring);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let stream = streams.add(ours.into()).unwrap();
    theirs.write_all(&pattern(900)).unwrap();
    streams.receive_into(stream, vec![(IoBuf::new(4096), 10..110), (IoBuf::new(4096), 0..4096)], 1);
    let ended = end(&ring, &mut streams);
    assert_eq!(ended.result.unwrap(), 900);
    assert_eq!(ended.pieces[0].0[10..110], pattern(900)[..100]);
    assert_eq!(ended.pieces[1].0[..800], pattern(900)[100..]);
}

#[test]
fn pipes_work_as_sockets_do() {
    let Some(ring) = ring() else { return };
    let mut streams = Streams::new(&ring);
    let (reader, writer) = io::pipe().unwrap();
    let (reader, writer) = (streams.add(reader.into()).unwrap(), streams.add(writer.into()).unwrap());
    // More than the capacity of a pipe.
    let bytes = pattern(300_000);
    let mut buf = IoBuf::new(bytes.len());
    buf.copy_from_slice(&bytes);
    streams.send(writer, buf, 0..bytes.len(), 1);
    streams.receive(reader, IoBuf::new(bytes.len()), 0..bytes.len(), true, 2);
    let mut both = ends(&ring, &mut streams, 2);
    assert_eq!(both.remove(&1).unwrap().result.unwrap(), bytes.len());
    assert!(both.remove(&2).unwrap().buf.unwrap()[..] == bytes[..]);
    streams.send_all(writer, vec![(filled(100, 1), 0..100), (filled(100, 2), 50..100)], 3);
    streams.receive_into(reader, vec![(IoBuf::new(120), 0..120), (IoBuf::new(100), 0..100)], 4);
    let mut both = ends(&ring, &mut streams, 2);
    assert_eq!(both.remove(&3).unwrap().result.unwrap(), 150);
    let received = both.remove(&4).unwrap();
    assert_eq!(received.result.unwrap(), 150);
    assert_eq!((received.pieces[0].0[119], received.pieces[1].0[29], received.pieces[1].0[30]), (2, 2, 0));
    streams.close(writer);
    streams.receive(reader, IoBuf::new(100), 0..100, false, 5);
    assert_eq!(end(&ring, &mut streams).result.unwrap(), 0, "the descriptor is closed");
}

#[test]
fn listeners_accept() {
    let Some(ring) = ring() else { return };
    let mut streams = Streams::new(&ring);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let unix = UnixListener::bind(&path).unwrap();
    // systemd may pass a non-blocking listener.
    unix.set_nonblocking(true).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let (unix, tcp) = (streams.add(unix.into()).unwrap(), streams.add(tcp.into()).unwrap());
    streams.accept(unix, 1);
    streams.accept(tcp, 2);
    let clients = thread::spawn(move || {
        let mut greetings = [[0; 2]; 2];
        UnixStream::connect(path).unwrap().read_exact(&mut greetings[0]).unwrap();
        TcpStream::connect(address).unwrap().read_exact(&mut greetings[1]).unwrap();
        greetings
    });
    for _ in 0..2 {
        let ended = end(&ring, &mut streams);
        let tag = ended.tag;
        let stream = streams.add(ended.accepted.unwrap()).unwrap();
        streams.send(stream, filled(2, tag as u8), 0..2, 3);
        assert_eq!(end(&ring, &mut streams).result.unwrap(), 2);
        streams.close(stream);
    }
    assert_eq!(clients.join().unwrap(), [[1, 1], [2, 2]]);
}

#[test]
fn closing_cancels_only_the_operations_of_its_stream() {
    let Some(ring) = ring() else { return };
    let mut streams = Streams::new(&ring);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (others, mut friends) = UnixStream::pair().unwrap();
    let stream = streams.add(ours.into()).unwrap();
    let other = streams.add(others.into()).unwrap();
    streams.receive(other, IoBuf::new(10), 0..10, true, 9);
    streams.receive(stream, IoBuf::new(10), 0..10, false, 1);
    ring.wait_for(Duration::from_millis(1)).unwrap();
    // Larger than the socket's buffer, so the send waits with part of it sent.
    streams.send(stream, filled(4 << 20, 1), 0..4 << 20, 2);
    ring.wait_for(Duration::from_millis(1)).unwrap();
    streams.close(stream);
    // An operation that was not submitted yet is cancelled too; a new one is refused.
    streams.receive(stream, IoBuf::new(10), 0..10, false, 3);
    let mut three = ends(&ring, &mut streams, 3);
    for tag in [1, 3] {
        let ended = three.remove(&tag).unwrap();
        assert_eq!(ended.result.unwrap_err().raw_os_error(), Some(nix::libc::ECANCELED));
        assert!(ended.buf.is_some());
    }
    let sent = three.remove(&2).unwrap();
    assert!(sent.result.is_err() && sent.buf.is_some());
    let mut rest = Vec::new();
    theirs.read_to_end(&mut rest).unwrap();
    assert!(streams.fd(stream).is_none() && streams.fd(other).is_some());
    friends.write_all(b"0123456789").unwrap();
    assert_eq!(end(&ring, &mut streams).result.unwrap(), 10);
    // The table entry is reused, and the old id does not refer to the new stream.
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let next = streams.add(ours.into()).unwrap();
    assert_ne!(next, stream);
    streams.close(stream);
    assert!(streams.fd(next).is_some() && streams.fd(stream).is_none());
}

#[test]
fn a_peer_that_vanishes_is_an_end_or_an_error() {
    let Some(ring) = ring() else { return };
    let mut streams = Streams::new(&ring);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let stream = streams.add(ours.into()).unwrap();
    streams.receive(stream, IoBuf::new(10), 0..10, true, 1);
    streams.send(stream, filled(4 << 20, 1), 0..4 << 20, 2);
    let helper = thread::spawn(move || {
        thread::sleep(Duration::from_millis(2));
        drop(theirs);
    });
    let mut both = ends(&ring, &mut streams, 2);
    // Data that the peer did not read turn the close into a reset.
    assert!(
        both.remove(&1)
            .unwrap()
            .result
            .map_or_else(|error| error.kind() == io::ErrorKind::ConnectionReset, |moved| moved == 0)
    );
    let error = both.remove(&2).unwrap().result.unwrap_err();
    assert!(matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset), "{error}");
    helper.join().unwrap();
    streams.send_all(stream, vec![(filled(10, 1), 0..10), (filled(10, 1), 0..10)], 3);
    assert_eq!(end(&ring, &mut streams).result.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn timers_end_and_waiting_has_a_limit() {
    let Some(ring) = ring() else { return };
    let mut streams = Streams::new(&ring);
    let started = Instant::now();
    streams.timer(Duration::from_millis(20), 2);
    streams.timer(Duration::from_millis(5), 1);
    let first = end(&ring, &mut streams);
    assert_eq!((first.tag, first.result.unwrap()), (1, 0));
    assert_eq!(end(&ring, &mut streams).tag, 2);
    assert!(started.elapsed() >= Duration::from_millis(20));
    ring.wait_for(Duration::from_millis(3)).unwrap();
    let mut out = Vec::new();
    streams.reap(&mut out);
    assert!(out.is_empty() && started.elapsed() >= Duration::from_millis(23));
}

#[test]
fn invalid_operations_end_with_the_reason() {
    let Some(ring) = ring() else { return };
    let mut streams = Streams::new(&ring);
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let stream = streams.add(ours.into()).unwrap();
    streams.receive(stream, IoBuf::new(10), 5..11, false, 1);
    #[expect(clippy::reversed_empty_ranges, reason = "an invalid range, which must be refused")]
    streams.send(stream, IoBuf::new(10), 8..5, 2);
    streams.send_all(stream, vec![(IoBuf::new(10), 0..10), (IoBuf::new(10), 0..11)], 3);
    streams.send_all(stream, Vec::new(), 4);
    let all = ends(&ring, &mut streams, 4);
    assert!(
        all.values().all(|end| end.result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput))
    );
    assert!(all[&1].buf.is_some() && all[&3].pieces.len() == 2);
    streams.accept(stream, 5);
    assert!(end(&ring, &mut streams).result.is_err(), "accept needs a listener");
    streams.close(stream);
    assert!(streams.fd(stream).is_none(), "no operation is left in flight");
}

#[test]
fn dropping_the_streams_waits_for_everything() {
    let Some(ring) = ring() else { return };
    for _ in 0..20 {
        let mut streams = Streams::new(&ring);
        let mut peers = Vec::new();
        for tag in 0..8 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let stream = streams.add(ours.into()).unwrap();
            streams.receive(stream, IoBuf::new(4096), 0..4096, false, tag);
            streams.send_all(stream, vec![(filled(1 << 20, 1), 0..1 << 20), (filled(10, 1), 0..10)], 100 + tag);
            peers.push(theirs);
        }
        streams.timer(Duration::from_secs(3600), 1);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = streams.add(listener.into()).unwrap();
        streams.accept(listener, 2);
        ring.wait_for(Duration::from_micros(100)).unwrap();
        streams.receive(listener, IoBuf::new(1), 0..1, false, 3);
        drop(streams);
        for mut peer in peers {
            let mut rest = Vec::new();
            peer.read_to_end(&mut rest).unwrap();
        }
    }
}

#[test]
fn streams_and_engines_share_a_turn() {
    let slab = Slab::of_classes(&[(2, 4096), (2, 65536)]);
    let Ok(ring) = SharedRing::new(32, Some(&slab)) else {
        eprintln!("skipped: no io_uring");
        return;
    };
    let mut bufs = slab.take_all();
    assert_eq!(bufs.iter().map(|buf| buf.len()).collect::<Vec<_>>(), [4096, 4096, 65536, 65536]);
    for (n, buf) in bufs.iter_mut().enumerate() {
        buf.fill(n as u8 + 1);
    }
    assert!(
        bufs.iter().enumerate().all(|(n, buf)| buf.iter().all(|&byte| byte == n as u8 + 1)),
        "the buffers must not overlap"
    );
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    std::fs::write(&path, pattern(65536)).unwrap();
    let options =
        OpenOptions { writable: true, create_new: false, cache: CacheMode::PageCache, lock: LockMode::Exclusive };
    let store: Arc<dyn Store> = Arc::new(FileStore::open(&path, &options).unwrap());
    let mut engine = Engine::on(&ring);
    let target = engine.add_target(&store).unwrap();
    let mut streams = Streams::new(&ring);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let stream = streams.add(ours.into()).unwrap();
    // Echoes the file through one ring.
    engine.read_one(1, 0, target, 0, bufs.pop().unwrap(), 4096..65536);
    let (mut done, mut out) = (Vec::new(), Vec::new());
    let mut sent = 0;
    while sent == 0 {
        ring.wait().unwrap();
        engine.reap(0, &mut done).unwrap();
        for ended in done.drain(..) {
            ended.result.unwrap();
            streams.send(stream, ended.buf.unwrap(), 4096..65536, 2);
        }
        streams.reap(&mut out);
        for ended in out.drain(..) {
            sent = ended.result.unwrap();
        }
    }
    let mut got = vec![0; sent];
    theirs.read_exact(&mut got).unwrap();
    assert!(got == pattern(65536)[..61440]);
    drop(streams);
    drop(engine);
}

#[test]
fn a_poll_ends_when_data_or_the_end_arrives() {
    let Some(ring) = ring() else { return };
    let mut streams = Streams::new(&ring);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let stream = streams.add(ours.into()).unwrap();
    streams.poll(stream, 1);
    ring.wait_for(Duration::from_millis(20)).unwrap();
    let mut nothing = Vec::new();
    streams.reap(&mut nothing);
    assert!(nothing.is_empty());
    theirs.write_all(b"hello").unwrap();
    assert_eq!(end(&ring, &mut streams).result.unwrap() & 1, 1, "POLLIN");
    streams.receive(stream, IoBuf::new(4096), 0..100, false, 2);
    assert_eq!(end(&ring, &mut streams).result.unwrap(), 5);
    drop(theirs);
    streams.poll(stream, 3);
    assert_ne!(end(&ring, &mut streams).result.unwrap() & 16, 0, "POLLHUP");
}
