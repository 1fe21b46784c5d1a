//! Repeated flushes that the flusher thread carries out, on a server that is otherwise idle: the
//! server must still accept new clients.
//!
//! A worker once did not. The end of such a flush can be seen in the list of tickets before its
//! wake-up arrives through the ring. When the wake-up arrived, the disk's queue had nothing in
//! flight, so the worker did not reap it. A ring with unread completions neither sleeps nor polls
//! for new ones.

use crate::common::serve;
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_nbd::wire::{Command, CommandFlags, Framing};
use diskwright_serve::net::ServerOptions;

const NONE: CommandFlags = CommandFlags::empty();

#[test]
fn a_server_still_accepts_clients_after_flushes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.vhdx");
    let block_bytes = Some(1 << 20);
    create(&path, &CreateRequest { size_bytes: Some(64 << 20), block_bytes, ..CreateRequest::default() }).unwrap();
    let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let Some(served) = serve(vec![("m", disk)], ServerOptions { workers: 1, ..ServerOptions::default() }) else {
        return;
    };
    let mut client = served.client().go("m", Framing::Structured, &[]);
    for turn in 0..600_u64 {
        // Changes the tables, so that the flush has more to do than one fdatasync.
        let block = (turn / 2 % 60) << 20;
        if turn % 2 == 0 {
            client.write(block, &[turn as u8 | 1; 4096], NONE).unwrap();
        } else {
            client.ask(Command::WRITE_ZEROES, NONE, block, 1 << 20).unwrap();
        }
        client.ask(Command::FLUSH, NONE, 0, 0).unwrap();
        // Only a worker that still polls its ring accepts this client.
        let mut other = served.client().go("m", Framing::Simple, &[]);
        assert_eq!(other.read(block, 512).unwrap().len(), 512);
    }
    assert!(served.server().is_well());
}
