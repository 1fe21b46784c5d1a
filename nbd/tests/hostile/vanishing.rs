//! Servers that stall, disappear, come back, or come back with a different export.

use crate::fake::{fake, honest, raw, read, shake_hands, take};
use diskwright_nbd::{
    ClientError, NbdDevice,
    wire::{Answering, ChunkFlags, Command, Framing, RequestHeader},
};
use diskwright_store::{BlockDevice, Blocking, EngineKind, IoBuf, QueueOptions, Request};
use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

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
    // Later requests fail too, immediately.
    queue.push(Request::flush(9)).unwrap();
    done.clear();
    queue.reap(1, &mut done).unwrap();
    assert!(done[0].result.is_err());
    // A new queue makes a new connection.
    drop(queue);
    assert!(read(&device).is_err());
    assert_eq!(vanishes.taken.load(Ordering::SeqCst), 2);

    let mute = raw(|stream| drop(take(stream, 1)));
    let mut uri = mute.uri();
    uri.timeout = Some(Duration::from_millis(200));
    let error = NbdDevice::open(&uri, false).unwrap_err();
    assert!(matches!(error, ClientError::Stalled { .. }), "{error}");
}

#[test]
fn a_broken_connection_is_re_established_and_no_request_is_lost() {
    // Each connection breaks at its seventh request, which is received and not answered.
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
fn after_a_reconnection_no_flush_covers_writes_that_a_former_server_answered() {
    for flushes_first in [false, true] {
        // Breaks at each read, which is received and answered by the next connection.
        let reads = AtomicUsize::new(0);
        let server = fake(Framing::Structured, move |request, framing, stream| {
            let breaks = request.command == Command::READ && reads.fetch_add(1, Ordering::SeqCst).is_multiple_of(2);
            !breaks && honest(request, framing, stream)
        });
        let mut uri = server.uri();
        uri.reconnect = Some(Duration::from_secs(60));
        let device = NbdDevice::open(&uri, true).unwrap();
        let mut disk = Blocking::open(&device, EngineKind::Auto).unwrap();
        let mut bytes = [0; 4096];
        disk.write(0, &[7; 4096], false).unwrap();
        if flushes_first {
            disk.flush().unwrap();
        }
        disk.read(0, &mut bytes).unwrap();
        assert_eq!(device.reconnects(), 1);
        assert_eq!(disk.flush().is_ok(), flushes_first);
        assert_eq!(disk.flush().is_ok(), flushes_first);
        disk.read(4096, &mut bytes).unwrap();
        disk.write(0, &[7; 4096], true).unwrap();
    }
}

#[test]
fn a_flush_that_a_dead_server_did_not_answer_is_not_answered_by_the_next_one() {
    let flushes = AtomicUsize::new(0);
    let server = fake(Framing::Structured, move |request, framing, stream| {
        let breaks = request.command == Command::FLUSH && flushes.fetch_add(1, Ordering::SeqCst) == 0;
        !breaks && honest(request, framing, stream)
    });
    let mut uri = server.uri();
    uri.reconnect = Some(Duration::from_secs(60));
    let device = NbdDevice::open(&uri, true).unwrap();
    let mut disk = Blocking::open(&device, EngineKind::Auto).unwrap();
    disk.write(0, &[7; 4096], false).unwrap();
    let error = disk.flush().unwrap_err().to_string();
    assert!(error.contains("these writes may be lost"), "{error}");
    assert_eq!(device.reconnects(), 1);
}

#[test]
fn reconnecting_fails_if_the_server_is_gone_or_has_changed() {
    let server = fake(Framing::Structured, |_, _, _| false);
    let mut uri = server.uri();
    uri.reconnect = Some(Duration::from_millis(300));
    let device = NbdDevice::open(&uri, false).unwrap();
    std::fs::remove_file(server.dir.path().join("sock")).unwrap();
    let error = read(&device).unwrap_err();
    assert!(error.to_string().contains("reconnecting failed for 0.3 s"), "{error}");

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
    assert!(error.to_string().contains("has changed: its framing or block sizes are different"), "{error}");
}
