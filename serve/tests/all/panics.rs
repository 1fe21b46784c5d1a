//! A disk that panics on a server's worker: its requests fail, and the worker's other clients are
//! served.

use crate::common::{Served, memory, serve};
use diskwright_nbd::wire::{CONTEXT_ALLOCATION, Command, CommandFlags, Framing, OptionCode, option};
use diskwright_serve::net::ServerOptions;
use diskwright_store::{BlockDevice, BlockQueue, Completion, Extent, Geometry, PushError, QueueOptions, Request};
use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

/// The method that panics at its next call.
type Next = Arc<Mutex<Option<&'static str>>>;

fn called(next: &Next, method: &'static str) {
    let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
    if *next == Some(method) {
        *next = None;
        drop(next);
        panic!("{method} panics on purpose");
    }
}

#[derive(Debug)]
struct Fragile {
    inner: Arc<dyn BlockDevice>,
    next: Next,
}

#[derive(Debug)]
struct FragileQueue {
    inner: Box<dyn BlockQueue>,
    next: Next,
}

impl BlockDevice for Fragile {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }
    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        called(&self.next, "open_queue");
        Ok(Box::new(FragileQueue { inner: self.inner.open_queue(options)?, next: Arc::clone(&self.next) }))
    }
    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
        called(&self.next, "extents");
        self.inner.extents(offset_bytes, len_bytes, out)
    }
}

impl BlockQueue for FragileQueue {
    fn depth(&self) -> usize {
        self.inner.depth()
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        called(&self.next, "push");
        self.inner.push(request)
    }
    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        called(&self.next, "reap");
        self.inner.reap(at_least, out)
    }
}

/// A server with one worker, one disk that panics, and one that does not.
fn served() -> Option<(Served, Next)> {
    let next = Next::default();
    let fragile = Arc::new(Fragile { inner: memory(1 << 20, true), next: Arc::clone(&next) });
    let devices: Vec<(&str, Arc<dyn BlockDevice>)> = vec![("bad", fragile), ("good", memory(1 << 20, true))];
    Some((serve(devices, ServerOptions { workers: 1, ..ServerOptions::default() })?, next))
}

#[test]
fn a_panic_fails_only_the_requests_of_its_disk() {
    for method in ["push", "reap"] {
        let Some((mut served, next)) = served() else { return };
        let mut good = served.client().go("good", Framing::Structured, &[]);
        let mut bad = served.client().go("bad", Framing::Structured, &[]);
        bad.read(0, 4096).unwrap();
        *next.lock().unwrap() = Some(method);
        // Several requests in flight.
        bad.send(Command::READ, 0, 512 << 10);
        bad.send(Command::FLUSH, 0, 0);
        assert!(bad.reply(512 << 10).is_err(), "{method}");
        let _ = bad.reply(0);
        good.write(4096, &[7; 4096], CommandFlags::FUA).unwrap();
        assert_eq!(good.read(4096, 4096).unwrap(), [7; 4096]);
        // The connection stays open, and new ones are accepted. Each request gets an error reply.
        assert!(bad.read(0, 4096).is_err(), "{method}");
        assert!(served.client().go("bad", Framing::Simple, &[]).write(0, &[1; 512], CommandFlags::empty()).is_err());
        assert!(served.server().is_well());
        served.stop().unwrap();
    }
}

#[test]
fn a_panic_in_extents_fails_one_request() {
    let Some((served, next)) = served() else { return };
    let mut bad = served.client().go("bad", Framing::Structured, &[CONTEXT_ALLOCATION]);
    *next.lock().unwrap() = Some("extents");
    assert!(bad.ask(Command::BLOCK_STATUS, CommandFlags::empty(), 0, 1 << 20).is_err());
    bad.ask(Command::BLOCK_STATUS, CommandFlags::empty(), 0, 1 << 20).unwrap();
    bad.read(0, 4096).unwrap();
}

#[test]
fn a_panic_in_open_queue_ends_one_connection() {
    let Some((served, next)) = served() else { return };
    let mut good = served.client().go("good", Framing::Structured, &[]);
    *next.lock().unwrap() = Some("open_queue");
    let mut bad = served.client();
    let mut go = Vec::new();
    option::encode_export(OptionCode::GO, "bad", &[], &mut go);
    bad.say(&go);
    assert!(bad.is_hung_up());
    good.read(0, 4096).unwrap();
    served.client().go("bad", Framing::Structured, &[]).read(0, 4096).unwrap();
}
