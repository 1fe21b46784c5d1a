//! Payloads are written from the memory into which they were received, and a large one is a single
//! disk request. Copies, calls and memory are counted.

use crate::common::{Client, Served, eventually, raw_file, serve};
use crate::seen::Watched;
use diskwright_nbd::wire::{Command, CommandFlags, Framing};
use diskwright_serve::net::ServerOptions;
use diskwright_store::{BlockDevice, CacheMode, Operation};
use std::{
    collections::HashMap,
    fs,
    io::{ErrorKind, Write},
    ops::Range,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

const NONE: CommandFlags = CommandFlags::empty();
const MIB: usize = 1 << 20;

fn pattern(len_bytes: usize, seed: u8) -> Vec<u8> {
    (0..len_bytes).map(|n| (n % 251) as u8 ^ (n >> 12) as u8 ^ seed).collect()
}

/// A server with one worker for a raw file of 16 MiB.
fn serve_file(path: &Path, cache: CacheMode, alignment_bytes: Option<usize>) -> (Watched, Option<Served>) {
    let disk = Watched::new(raw_file(path, 16 << 20, cache), alignment_bytes);
    let options = ServerOptions { workers: 1, ..ServerOptions::default() };
    let served = serve(vec![("disk", Arc::new(disk.clone()) as Arc<dyn BlockDevice>)], options);
    (disk, served)
}

/// Sends a message while the worker is blocked, so that the worker then receives as much at once as
/// the socket holds. The worker is blocked by a write of 512 bytes that is sent before.
fn say_at_once(disk: &Watched, client: &mut Client, message: &[u8]) {
    disk.stop(true);
    let mut first = client.request(Command::WRITE, NONE, 15 << 20, 512);
    first.extend([1; 512]);
    client.say(&first);
    disk.wait_for_push();
    client.stream.set_nonblocking(true).unwrap();
    let mut said = 0;
    while said < message.len() {
        match client.stream.write(&message[said..]) {
            Ok(count) => said += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(said >= message.len().min(128 << 10), "the socket took {said} bytes only");
    client.stream.set_nonblocking(false).unwrap();
    disk.stop(false);
    client.say(&message[said..]);
    assert!(client.reply(0).is_ok());
}

/// 32 writes of 4 KiB in one message, and the file's contents after them.
fn small_writes(client: &mut Client, seed: u8) -> (Vec<u8>, Vec<u8>) {
    let payload = pattern(32 * 4096, seed);
    let mut message = Vec::new();
    for (n, bytes) in (0..).zip(payload.chunks(4096)) {
        message.extend(client.request(Command::WRITE, NONE, n * 8192, 4096));
        message.extend(bytes);
    }
    let mut expected = vec![0; 64 * 4096];
    expected.chunks_mut(8192).zip(payload.chunks(4096)).for_each(|(place, bytes)| place[..4096].copy_from_slice(bytes));
    (message, expected)
}

#[test]
fn small_writes_are_not_copied_and_need_no_more_calls() {
    const ROUNDS: u64 = 8;
    /// How often each way is tried at least, and at most. The kernel decides how many completions
    /// arrive at once, so the fewest calls are compared: on a busy machine they need more tries.
    const TRIES: Range<usize> = 6..100;
    let dir = tempfile::tempdir().unwrap();
    let mut enters = [u64::MAX; 3];
    // Buffered; a disk that claims to need aligned memory; a disk that needs it (O_DIRECT).
    let ways = [(CacheMode::PageCache, None), (CacheMode::PageCache, Some(4096)), (CacheMode::Direct, None)];
    let is_met = |enters: [u64; 3]| enters[0] <= enters[1] + ROUNDS;
    for (try_, (way, (cache, alignment_bytes))) in
        (0..TRIES.end).flat_map(|n| ways.into_iter().enumerate().map(move |way| (n, way)))
    {
        if way == 0 && try_ >= TRIES.start && is_met(enters) {
            break;
        }
        let path = dir.path().join("disk");
        let (disk, Some(served)) = serve_file(&path, cache, alignment_bytes) else { return };
        let copies = cache == CacheMode::Direct || alignment_bytes.is_some();
        let mut client = served.client().go("disk", Framing::Structured, &[]);
        let before = served.server().metrics().totals();
        for round in 0..ROUNDS {
            let (message, expected) = small_writes(&mut client, round as u8);
            say_at_once(&disk, &mut client, &message);
            (0..32).for_each(|_| assert!(client.reply(0).is_ok()));
            let seen = disk.take();
            assert_eq!(seen.len(), 33);
            if copies {
                assert!(seen.iter().all(|request| request.segments == 0 && request.is_aligned), "{seen:?}");
            } else {
                let window = &seen[1].shared;
                assert!(seen[1..].iter().all(|request| request.segments == 1 && request.shared == *window), "{seen:?}");
            }
            let held = client.read(0, expected.len() as u64).unwrap();
            assert!(held == expected, "{cache:?}");
            disk.take();
        }
        let after = served.server().metrics().totals();
        let payload_bytes = if copies { 512 + 32 * 4096 } else { 512 };
        assert_eq!(after.copied_bytes - before.copied_bytes, ROUNDS * payload_bytes, "{cache:?} {alignment_bytes:?}");
        enters[way] = enters[way].min(after.enters - before.enters);
        drop(served);
        fs::remove_file(&path).unwrap();
    }
    assert!(is_met(enters), "calls of io_uring_enter: {enters:?}");
}

#[test]
fn a_large_request_is_one_disk_request_without_a_copy() {
    let dir = tempfile::tempdir().unwrap();
    for (cache, framing) in [(CacheMode::PageCache, Framing::Simple), (CacheMode::Direct, Framing::Extended)] {
        let path = dir.path().join("disk");
        let (disk, Some(served)) = serve_file(&path, cache, None) else { return };
        let mut client = served.client().go("disk", framing, &[]);
        let flags = if framing == Framing::Extended { CommandFlags::PAYLOAD_LEN } else { NONE };
        for (offset, len, fua) in [(0, 4 * MIB, NONE), (4096, 4 * MIB + 4096, CommandFlags::FUA)] {
            let data = pattern(len, 7);
            let mut message = client.request(Command::WRITE, flags | fua, offset, len as u64);
            message.extend(&data);
            let before = served.server().metrics().totals().copied_bytes;
            if framing == Framing::Simple {
                say_at_once(&disk, &mut client, &message);
            } else {
                client.say(&message);
            }
            assert!(client.reply(0).is_ok());
            let large: Vec<_> = disk.take().into_iter().filter(|request| request.len_bytes > 512).collect();
            assert!(large.len() == 1 && large[0].len_bytes == len as u64, "{large:?}");
            let copied = served.server().metrics().totals().copied_bytes - before;
            if cache == CacheMode::PageCache {
                assert_eq!(
                    (copied, large[0].shared.len()),
                    (512, 1),
                    "the payload received with the header is written from the window"
                );
            } else {
                // The payload received with the header is copied to an aligned buffer.
                assert!(copied <= 132 << 10 && large[0].shared.is_empty() && large[0].is_aligned, "{copied}");
            }
            assert!(client.read(offset, len as u64).unwrap() == data);
            let read = disk.take();
            assert!(read.len() == 1 && read[0].operation == Operation::Read && read[0].segments == len.div_ceil(MIB));
            assert!(read[0].is_aligned);
        }
        drop(served);
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn retired_windows_count_for_the_clients_share() {
    const LIMIT: usize = 2 * MIB;
    let dir = tempfile::tempdir().unwrap();
    let disk = Watched::new(raw_file(&dir.path().join("disk"), 16 << 20, CacheMode::PageCache), None);
    let options =
        ServerOptions { workers: 1, requests_max: 100_000, request_bytes_max: LIMIT, ..ServerOptions::default() };
    let Some(served) = serve(vec![("disk", Arc::new(disk.clone()) as Arc<dyn BlockDevice>)], options) else { return };
    let mut client = served.client().go("disk", Framing::Structured, &[]);
    disk.hold(true);
    // One payload that is written from the window, and many that are copied.
    let mut message = Vec::new();
    for n in 0..110 {
        let len = if n == 0 { 4096 } else { 512 };
        message.extend(client.request(Command::WRITE, NONE, n * 4096, len));
        message.resize(message.len() + len as usize, 3);
    }
    client.stream.set_nonblocking(true).unwrap();
    let (mut at, mut last) = (0, Instant::now());
    while last.elapsed() < Duration::from_millis(500) {
        match client.stream.write(&message[at..]) {
            Ok(count) => (at, last) = ((at + count) % message.len(), Instant::now()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}"),
        }
    }
    let seen = disk.take();
    let windows: HashMap<usize, usize> = seen.iter().flat_map(|request| request.shared.clone()).collect();
    let copied: u64 = seen.iter().filter(|request| request.shared.is_empty()).map(|request| request.len_bytes).sum();
    let held = windows.values().sum::<usize>() + copied as usize;
    // Before the assertions: a server that is dropped waits for its disks.
    disk.hold(false);
    assert!(windows.len() > 4, "only {} windows were shared", windows.len());
    // The last request may be taken just below the limit, and one window is still being decoded.
    assert!(held <= LIMIT + (256 << 10), "{held} bytes are held for one client, in {} windows", windows.len());
    drop(client);
    let mut other = served.client().go("disk", Framing::Structured, &[]);
    eventually("the first client's requests have ended", || {
        other.read(0, 512).unwrap();
        served.server().metrics().totals().connections == 1
    });
    // All windows were given back, so another client can be served.
    let (message, expected) = small_writes(&mut other, 9);
    say_at_once(&disk, &mut other, &message);
    (0..32).for_each(|_| assert!(other.reply(0).is_ok()));
    assert!(other.read(0, expected.len() as u64).unwrap()[..4096] == expected[..4096]);
}
