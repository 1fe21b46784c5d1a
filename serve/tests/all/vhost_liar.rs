//! A front-end that lies. Whatever it says, its connection ends or its request fails, the reason is
//! logged, and the next front-end is served.

use crate::{
    common::memory,
    vhost_user::{Served, finish, serve},
};
use diskwright_serve::vhost_user::front_end::{FrontEnd, FrontOptions};
use diskwright_store::{BlockQueue, IoBuf, Request};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::{
    fs::File,
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn options() -> FrontOptions {
    FrontOptions { depth: 8, ..FrontOptions::default() }
}

/// Writes a descriptor of ring 0.
fn describe(front: &FrontEnd, index: usize, address: u64, len: u32, flags: u16, next: u16) {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    front.memory().copy_in(front.layout().ring(0).descriptors + 16 * index, &bytes).unwrap();
}

/// Makes heads available on ring 0, and kicks.
fn offer(front: &FrontEnd, heads: &[u16], index: u16) {
    let ring = front.layout().ring(0);
    for (number, &head) in heads.iter().enumerate() {
        front.memory().store_u16(ring.available + 4 + 2 * number, head).unwrap();
    }
    front.memory().store_u16(ring.available + 2, index).unwrap();
    front.kick(0).unwrap();
}

fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(20), "not so: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn is_served(served: &Served) {
    let front = FrontEnd::connect(&served.socket, options()).unwrap();
    let mut queue = front.queue(0).unwrap();
    queue.push(Request::read(0, 4096, IoBuf::new(4096), 0)).unwrap();
    finish(&mut queue).pop().unwrap().result.unwrap();
    assert!(served.server.is_well());
}

#[test]
fn a_damaged_ring_ends_its_connection_and_the_next_front_end_is_served() {
    let disk = memory(1 << 20, true);
    let Some(served) = serve(&disk, 1) else { return };
    // Memory that no ring uses: the page of the first request.
    let size = FrontEnd::connect(&served.socket, options()).unwrap().layout().ring_size();
    type Lie = fn(&FrontEnd, u64, u16);
    let lies: &[(&str, Lie)] = &[
        ("a loop", |front, page, _| {
            describe(front, 0, page, 16, NEXT, 1);
            describe(front, 1, page, 16, NEXT, 0);
            offer(front, &[0], 1);
        }),
        ("a next descriptor outside the table", |front, page, size| {
            describe(front, 0, page, 16, NEXT, size);
            offer(front, &[0], 1);
        }),
        ("a head outside the table", |front, _, size| offer(front, &[size], 1)),
        ("an index far ahead", |front, _, size| offer(front, &[0], size + 1)),
        ("no status", |front, page, _| {
            describe(front, 0, page, 16, 0, 0);
            offer(front, &[0], 1);
        }),
        ("a status outside the memory", |front, page, _| {
            describe(front, 0, page, 16, NEXT, 1);
            describe(front, 1, 0x10, 1, WRITE, 0);
            offer(front, &[0], 1);
        }),
        ("a status at the last address", |front, page, _| {
            describe(front, 0, page, 16, NEXT, 1);
            describe(front, 1, u64::MAX - 1, u32::MAX, WRITE, 0);
            offer(front, &[0], 1);
        }),
        ("readable behind writable", |front, page, _| {
            describe(front, 0, page, 16, NEXT | WRITE, 1);
            describe(front, 1, page, 16, 0, 0);
            offer(front, &[0], 1);
        }),
        ("an indirect table outside the memory", |front, _, _| {
            describe(front, 0, u64::MAX - 15, 32, INDIRECT, 0);
            offer(front, &[0], 1);
        }),
        ("an indirect table that is no whole number of descriptors", |front, page, _| {
            describe(front, 0, page, 17, INDIRECT, 0);
            offer(front, &[0], 1);
        }),
        ("an indirect table of 4 GiB that is a loop", |front, page, _| {
            let at = (page - front.layout().address(0)) as usize;
            let mut entry = [0; 16];
            entry[..8].copy_from_slice(&page.to_le_bytes());
            entry[8] = 1;
            entry[12] = NEXT as u8;
            front.memory().copy_in(at, &entry).unwrap();
            describe(front, 0, page, u32::MAX - 15, INDIRECT, 0);
            offer(front, &[0], 1);
        }),
        ("an indirect table in an indirect table", |front, page, _| {
            let at = (page - front.layout().address(0)) as usize;
            let mut entry = [0; 16];
            entry[..8].copy_from_slice(&page.to_le_bytes());
            entry[8] = 16;
            entry[12] = INDIRECT as u8;
            front.memory().copy_in(at, &entry).unwrap();
            describe(front, 0, page, 16, INDIRECT, 0);
            offer(front, &[0], 1);
        }),
    ];
    for (name, lie) in lies {
        let front = FrontEnd::connect(&served.socket, options()).unwrap();
        let page = front.layout().address(front.layout().total_bytes() - 4096);
        lie(&front, page, size);
        soon(name, || front.config(0, 8).is_err());
        drop(front);
        is_served(&served);
    }
    assert_eq!(served.server.metrics().totals().broken, lies.len() as u64);
    served.server.stop().unwrap();
}

#[test]
fn a_wrong_request_is_answered_and_its_connection_goes_on() {
    let disk = memory(1 << 20, true);
    let Some(served) = serve(&disk, 1) else { return };
    let front = FrontEnd::connect(&served.socket, options()).unwrap();
    let at = front.layout().total_bytes() - 4096;
    let page = front.layout().address(at);
    let status = at + 64;
    let header = |kind: u32, sector: u64| {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        bytes
    };
    // The type, its sector, the payload's address, length and flags, and the status.
    let cases: &[(u32, u64, u64, u32, u16, u8)] = &[
        (0, 0, 0x10, 512, WRITE, 1),
        (0, 0, u64::MAX - 100, 512, WRITE, 1),
        (1, 0, page, u32::MAX, 0, 1),
        (1, 0, page + 128, 1, 0, 1),
        (0, u64::MAX, page + 128, 512, WRITE, 1),
        (0, 1 << 40, page + 128, 512, WRITE, 1),
        (0, 2047, page + 128, 1024, WRITE, 1),
        (11, 0, page + 128, 15, 0, 1),
        (77, 0, page + 128, 16, 0, 2),
        (8, 0, page + 128, 20, WRITE, 0),
    ];
    for (number, &(kind, sector, address, len, flags, expected)) in (0u16..).zip(cases) {
        front.memory().copy_in(at, &header(kind, sector)).unwrap();
        front.memory().copy_in(status, &[0xee]).unwrap();
        describe(&front, 0, page, 16, NEXT, 1);
        describe(&front, 1, address, len, flags | NEXT, 2);
        describe(&front, 2, page + 64, 1, WRITE, 0);
        let ring = front.layout().ring(0);
        let entry = ring.available + 4 + 2 * usize::from(number % front.layout().ring_size());
        front.memory().store_u16(entry, 0).unwrap();
        front.memory().store_u16(ring.available + 2, number + 1).unwrap();
        front.kick(0).unwrap();
        soon("answered", || front.memory().load_u16(ring.used + 2).unwrap() == number + 1);
        let mut found = [0];
        front.memory().copy_out(status, &mut found).unwrap();
        assert_eq!(found[0], expected, "case {number}");
    }
    let mut identity = [0; 20];
    front.memory().copy_out(at + 128, &mut identity).unwrap();
    assert_eq!(&identity, b"a disk with a long n");
    assert_eq!(served.server.metrics().totals().broken, 0);
    assert!(front.config(0, 8).is_ok());
}

#[test]
fn descriptors_that_change_while_they_are_read_harm_only_their_guest() {
    let disk = memory(1 << 20, true);
    let Some(served) = serve(&disk, 1) else { return };
    for round in 0..10u64 {
        let front = FrontEnd::connect(&served.socket, options()).unwrap();
        let (memory, layout) = (Arc::clone(front.memory()), front.layout().clone());
        let done = Arc::new(AtomicBool::new(false));
        let liar = {
            let done = Arc::clone(&done);
            std::thread::spawn(move || {
                let mut state = round + 1;
                while !done.load(Ordering::Relaxed) {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let at = layout.ring(0).descriptors + (state >> 33) as usize % (16 * 24);
                    memory.copy_in(at, &[(state >> 24) as u8]).unwrap();
                    std::thread::yield_now();
                }
            })
        };
        let mut queue = front.queue(0).unwrap();
        for tag in 0..200 {
            // The queue may call a used entry wrong, and the server may end the connection.
            if queue.push(Request::write(tag % 8 * 4096, 4096, IoBuf::new(4096), tag)).is_err()
                || queue.reap(0, &mut Vec::new()).is_err()
                || front.config(0, 8).is_err()
            {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
        liar.join().unwrap();
        drop((queue, front));
        is_served(&served);
    }
    served.server.stop().unwrap();
}

/// Sends a message with descriptors on a new connection, and waits until the server ends it.
fn is_ended(served: &Served, messages: &[(u32, Vec<u8>, Vec<OwnedFd>)]) {
    let mut stream = UnixStream::connect(&served.socket).unwrap();
    for (code, body, fds) in messages {
        let words = [*code, 1, body.len() as u32];
        let header: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        if !borrowed.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)));
        }
        let bytes = [header, body.clone()].concat();
        let _ = rustix::net::sendmsg(&stream, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL);
    }
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{messages:?}"),
    }
}

#[test]
fn wrong_messages_end_their_connection_and_the_next_front_end_is_served() {
    let disk = memory(1 << 20, true);
    let Some(served) = serve(&disk, 2) else { return };
    let state = |index: u32, value: u32| [index.to_ne_bytes(), value.to_ne_bytes()].concat();
    let file = || -> OwnedFd { tempfile::tempfile().unwrap().into() };
    let region = |len: u64| {
        let mut body = state(1, 0);
        [0x1000, len, 0x7000, 0].iter().for_each(|number: &u64| body.extend_from_slice(&number.to_ne_bytes()));
        body
    };
    let zero: OwnedFd = File::open("/dev/zero").unwrap().into();
    let cases: Vec<(u32, Vec<u8>, Vec<OwnedFd>)> = vec![
        (2, u64::MAX.to_ne_bytes().to_vec(), vec![]),
        (16, u64::MAX.to_ne_bytes().to_vec(), vec![]),
        (5, region(4096), vec![file()]),
        (5, region(4096), vec![]),
        (5, region(u64::MAX), vec![file()]),
        (5, state(u32::MAX, 0), vec![]),
        (8, state(2, 128), vec![]),
        (8, state(0, 3), vec![]),
        (8, state(0, 65536), vec![]),
        (8, state(0, 0), vec![]),
        (10, state(0, 65536), vec![]),
        (12, 0u64.to_ne_bytes().to_vec(), vec![file()]),
        (12, 0u64.to_ne_bytes().to_vec(), vec![zero]),
        (13, 7u64.to_ne_bytes().to_vec(), vec![]),
        (12, 0x100u64.to_ne_bytes().to_vec(), vec![]),
        (12, 0u64.to_ne_bytes().to_vec(), (0..40).map(|_| file()).collect()),
        (24, [250u32, 20, 0].iter().flat_map(|word| word.to_ne_bytes()).collect(), vec![]),
        (25, [0u32, 0, 0].iter().flat_map(|word| word.to_ne_bytes()).collect(), vec![]),
        (31, [0u8; 16].iter().chain(&[255; 8]).copied().collect(), vec![]),
        (32, [255u8; 24].to_vec(), vec![file()]),
        (6, vec![0; 16], vec![]),
        (9999, vec![], vec![]),
        (1, vec![0; 8], vec![]),
    ];
    let count = cases.len() as u64;
    for case in cases {
        is_ended(&served, &[case]);
        is_served(&served);
    }
    assert_eq!(served.server.metrics().totals().broken, count);
    // A header that lies about its length, half a message, and nothing at all.
    for bytes in [vec![0xff; 12], vec![1, 0, 0, 0, 1], vec![]] {
        let mut stream = UnixStream::connect(&served.socket).unwrap();
        stream.write_all(&bytes).unwrap();
        drop(stream);
        is_served(&served);
    }
    served.server.stop().unwrap();
}
