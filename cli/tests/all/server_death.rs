//! What the death of a server costs clients that live on, through every door: a write is answered,
//! the server is killed and started again, the client flushes, the page cache is dropped, and what
//! is there is compared. Either everything that was answered is there, or no flush succeeds.
//!
//! An attached disk has no such clients: its device fails with its server (`kill.rs`, `attach.rs`).

use crate::control::Place;
use crate::serving::Serving;
use diskwright_nbd::{NbdDevice, NbdUri};
use diskwright_serve::vhost_user::front_end::{FrontEnd, FrontOptions};
use diskwright_store::{BlockDevice, BlockQueue, IoBuf, QueueOptions, Request};
use nix::{
    fcntl::{PosixFadviseAdvice, posix_fadvise},
    sys::signal::Signal,
};
use std::{io, time::Duration};

const BLOCK: u64 = 64 << 10;
/// In a block of the image of its own, in every format.
const LATER: u64 = 100;
const FILES: [&str; 5] = ["disk.vhdx", "disk.vhd", "disk.qcow2", "disk.vdi", "disk.vmdk"];

fn one(queue: &mut dyn BlockQueue, request: Request) -> io::Result<Option<IoBuf>> {
    queue.push(request).map_err(|refused| refused.reason)?;
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done)?;
    }
    let done = done.pop().unwrap();
    done.result.map(|()| done.buf)
}

fn write(queue: &mut dyn BlockQueue, block: u64, byte: u8) -> io::Result<()> {
    let mut buf = IoBuf::new(BLOCK as usize);
    buf.fill(byte);
    one(queue, Request::write(block * BLOCK, BLOCK as usize, buf, 0)).map(drop)
}

fn read(queue: &mut dyn BlockQueue, block: u64) -> io::Result<Vec<u8>> {
    let read = one(queue, Request::read(block * BLOCK, BLOCK as usize, IoBuf::new(BLOCK as usize), 0))?;
    Ok(read.unwrap()[..BLOCK as usize].to_vec())
}

fn flush(queue: &mut dyn BlockQueue) -> io::Result<()> {
    one(queue, Request::flush(0)).map(drop)
}

fn drop_caches(place: &Place, file: &str) {
    let file = std::fs::File::open(place.shop.path(file)).unwrap();
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
}

/// Kills the server and starts the next one.
fn replaced(place: &Place, server: Serving, line: &str) -> Serving {
    server.stop(Signal::SIGKILL);
    place.serve(line).expect("it was served before")
}

fn options(records_in_flight: bool) -> FrontOptions {
    FrontOptions { queues: 1, depth: 4, records_in_flight, ..FrontOptions::default() }
}

#[test]
fn a_machine_that_lost_writes_is_told_until_it_is_reset() {
    for file in FILES {
        let place = Place::with(&[]);
        place.ok(&format!("create {file} --size 64M"));
        let line = format!("{file} --vhost-user vhost.sock --vhost-queues 1");
        let Some(mut server) = place.serve(&line) else { return };
        let socket = place.shop.path("vhost.sock");
        let mut front = FrontEnd::connect(&socket, options(true)).unwrap();
        let mut queue = front.queue(0).unwrap();
        // What was flushed is no loss.
        write(&mut queue, 0, 1).unwrap();
        flush(&mut queue).unwrap();
        server = replaced(&place, server, &line);
        front.reconnect(&socket).unwrap();
        flush(&mut queue).unwrap();
        // Nor is a write that needed no new block: its payload is in the file.
        write(&mut queue, 0, 2).unwrap();
        server = replaced(&place, server, &line);
        front.reconnect(&socket).unwrap();
        flush(&mut queue).unwrap();
        drop_caches(&place, file);
        assert!(read(&mut queue, 0).unwrap().iter().all(|&byte| byte == 2), "{file}");
        // But what is in a new block is.
        write(&mut queue, LATER, 3).unwrap();
        for _ in 0..2 {
            server = replaced(&place, server, &line);
            front.reconnect(&socket).unwrap();
            assert!(flush(&mut queue).is_err(), "{file}: a write was lost, and a flush succeeds");
            assert!(read(&mut queue, LATER).is_err() && write(&mut queue, 0, 4).is_err(), "{file}");
            server.wait_for_log("every request fails until the machine is reset");
        }
        drop((queue, front));
        // The machine was reset.
        let front = FrontEnd::connect(&socket, options(true)).unwrap();
        let mut queue = front.queue(0).unwrap();
        assert!(read(&mut queue, 0).unwrap().iter().all(|&byte| byte == 2), "{file}");
        write(&mut queue, LATER, 5).unwrap();
        flush(&mut queue).unwrap();
        drop((queue, front));
        assert_eq!(server.stop(Signal::SIGTERM), Some(0));
        place.ok(&format!("check {file}"));
        drop_caches(&place, file);
        place.shop.ok(&format!("io {file} --read-only -c 'read -P 2 0 64k' -c 'read -P 5 {} 64k'", LATER * BLOCK));
    }
}

#[test]
fn a_server_that_was_stopped_leaves_nothing_at_risk() {
    let place = Place::with(&["disk.vhdx"]);
    let line = "disk.vhdx --vhost-user vhost.sock --vhost-queues 1";
    let Some(server) = place.serve(line) else { return };
    let socket = place.shop.path("vhost.sock");
    let mut front = FrontEnd::connect(&socket, options(true)).unwrap();
    let mut queue = front.queue(0).unwrap();
    write(&mut queue, LATER, 3).unwrap();
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    let server = place.serve(line).unwrap();
    front.reconnect(&socket).unwrap();
    flush(&mut queue).unwrap();
    assert!(read(&mut queue, LATER).unwrap().iter().all(|&byte| byte == 3));
    drop((queue, front));
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

#[test]
fn without_memory_for_requests_in_flight_only_a_raw_disk_goes_on() {
    for (file, goes_on) in [("disk.vhdx", false), ("disk.raw", true)] {
        let place = Place::with(&[file]);
        let line = format!("{file} --vhost-user vhost.sock --vhost-queues 1");
        let Some(mut server) = place.serve(&line) else { return };
        let socket = place.shop.path("vhost.sock");
        let mut front = FrontEnd::connect(&socket, options(false)).unwrap();
        let mut queue = front.queue(0).unwrap();
        write(&mut queue, LATER, 3).unwrap();
        server = replaced(&place, server, &line);
        front.reconnect(&socket).unwrap();
        assert_eq!(flush(&mut queue).is_ok(), goes_on, "{file}");
        drop_caches(&place, file);
        assert_eq!(read(&mut queue, LATER).is_ok_and(|read| read.iter().all(|&byte| byte == 3)), goes_on, "{file}");
        drop((queue, front));
        let front = FrontEnd::connect(&socket, options(false)).unwrap();
        flush(&mut front.queue(0).unwrap()).unwrap();
        drop(front);
        assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    }
}

#[test]
fn an_ephemeral_disk_loses_everything_with_its_server_and_says_so() {
    let place = Place::with(&["disk.vhdx"]);
    let line = "disk.vhdx --ephemeral --vhost-user vhost.sock --vhost-queues 1";
    let Some(server) = place.serve(line) else { return };
    let socket = place.shop.path("vhost.sock");
    let mut front = FrontEnd::connect(&socket, options(true)).unwrap();
    let mut queue = front.queue(0).unwrap();
    write(&mut queue, LATER, 3).unwrap();
    flush(&mut queue).unwrap();
    let server = replaced(&place, server, line);
    front.reconnect(&socket).unwrap();
    assert!(flush(&mut queue).is_err() && read(&mut queue, LATER).is_err());
    drop((queue, front));
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

#[test]
fn an_nbd_client_that_reconnects_does_not_flush_what_was_lost() {
    let place = Place::with(&["disk.vhdx"]);
    let line = "disk.vhdx --nbd ./nbd.sock";
    let Some(mut server) = place.serve(line) else { return };
    let uri = NbdUri { reconnect: Some(Duration::from_secs(60)), ..NbdUri::unix(place.shop.path("nbd.sock"), "") };
    let device = NbdDevice::open(&uri, true).unwrap();
    assert!(device.export().server_id.is_some());
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    write(&mut *queue, 0, 1).unwrap();
    flush(&mut *queue).unwrap();
    server = replaced(&place, server, line);
    flush(&mut *queue).unwrap();
    write(&mut *queue, LATER, 3).unwrap();
    server = replaced(&place, server, line);
    for _ in 0..2 {
        let error = flush(&mut *queue).unwrap_err().to_string();
        assert!(error.contains("no flush succeeds any more"), "{error}");
        assert!(write(&mut *queue, 2, 2).is_ok(), "it is the flushes that would tell a lie");
    }
    // Also by another connection of the same device.
    let mut second = device.open_queue(&QueueOptions::default()).unwrap();
    assert!(flush(&mut *second).is_err());
    drop((queue, second, device));
    let device = NbdDevice::open(&uri, true).unwrap();
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    flush(&mut *queue).unwrap();
    drop_caches(&place, "disk.vhdx");
    assert!(read(&mut *queue, 0).unwrap().iter().all(|&byte| byte == 1));
    drop((queue, device));
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}
