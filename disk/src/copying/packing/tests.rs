//! Blocks arrive in order and complete, whatever the source; the work ends when something fails.

use super::{chunk::Packer, *};
use crate::{CreateRequest, Disk, OpenOptions, Opened, copying::create::create};
use diskwright_store::{Blocking, EngineKind};
use std::{
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};

const BLOCK: usize = 64 << 10;

/// Blocks as they are.
struct Plain;

impl Packer for Plain {
    fn pack(&mut self, block: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        out.extend_from_slice(block);
        Ok(())
    }
}

/// Collects blocks; fails at block `fails_at`.
#[derive(Default)]
struct Collected {
    blocks: Vec<(u64, Vec<u8>)>,
    fails_at: Option<u64>,
}

impl Sink for Collected {
    fn block(&mut self, number: u64, packed: &[u8]) -> io::Result<()> {
        assert!(self.blocks.last().is_none_or(|(last, _)| *last < number), "out of order");
        if self.fails_at.is_some_and(|fails_at| number >= fails_at) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.blocks.push((number, packed.to_vec()));
        Ok(())
    }
}

fn packing<'a>(source: &'a Opened, packer: &'a (dyn Fn() -> io::Result<Box<dyn Packer>> + Sync)) -> Packing<'a> {
    Packing { source, engine: EngineKind::Auto, block_bytes: BLOCK, skip_damaged: false, packer }
}

fn disk(path: &Path, size_bytes: u64, writes: &[(u64, usize, u8)]) -> Opened {
    create(path, &CreateRequest { size_bytes: Some(size_bytes), ..CreateRequest::default() }).unwrap();
    let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
    for (at, len, byte) in writes {
        io.write(*at, &vec![*byte; *len], false).unwrap();
    }
    drop(io);
    disk.close().unwrap();
    drop(disk);
    Opened::open(path, &OpenOptions::default()).unwrap()
}

#[test]
fn blocks_with_data_arrive_in_order_and_complete() {
    let dir = tempfile::tempdir().unwrap();
    // The last block is cut, and one write crosses the ends of chunks.
    let size_bytes = (300 << 20) + 512;
    let writes = [
        (0, 512, 1),
        ((1 << 20) - 4096, (2 << 20) + 8192, 2),
        (70 << 20, 200 << 10, 3),
        (299 << 20, 4096, 0),
        (300 << 20, 512, 5),
    ];
    let source = disk(&dir.path().join("a.vhdx"), size_bytes, &writes);
    let mut expected = vec![0; size_bytes as usize];
    for (at, len, byte) in writes {
        expected[at as usize..][..len].fill(byte);
    }
    expected.resize(expected.len().next_multiple_of(BLOCK), 0);
    let expected: Vec<(u64, Vec<u8>)> = (0..)
        .zip(expected.chunks(BLOCK))
        .filter(|(_, block)| block.iter().any(|byte| *byte != 0))
        .map(|(number, block)| (number, block.to_vec()))
        .collect();
    let mut sink = Collected::default();
    let packed = packing(&source, &|| Ok(Box::new(Plain))).run(&mut sink, &mut |_, _| true).unwrap();
    assert_eq!(sink.blocks, expected);
    assert_eq!(packed.data_bytes + packed.zero_bytes, size_bytes);
    assert_eq!(packed.data_bytes, (expected.len() as u64 - 1) * BLOCK as u64 + 512);
}

#[test]
fn a_sink_that_fails_ends_the_work() {
    let dir = tempfile::tempdir().unwrap();
    let source = disk(&dir.path().join("a.vhdx"), 200 << 20, &[(0, 100 << 20, 1)]);
    let mut sink = Collected { fails_at: Some(5), ..Collected::default() };
    let failed = packing(&source, &|| Ok(Box::new(Plain))).run(&mut sink, &mut |_, _| true).unwrap_err();
    assert!(matches!(failed, Some(Failure::Dest(error)) if error.kind() == io::ErrorKind::StorageFull));
    assert_eq!(sink.blocks.len(), 5);
}

#[test]
fn progress_stops_the_work() {
    let dir = tempfile::tempdir().unwrap();
    let source = disk(&dir.path().join("a.vhdx"), 64 << 20, &[(0, 64 << 20, 1)]);
    struct Slow;
    impl Packer for Slow {
        fn pack(&mut self, _: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
            thread::sleep(Duration::from_millis(2));
            out.push(1);
            Ok(())
        }
    }
    let mut sink = Collected::default();
    let stopped = packing(&source, &|| Ok(Box::new(Slow))).run(&mut sink, &mut |_, _| false).unwrap_err();
    assert!(stopped.is_none() && sink.blocks.len() < 1024);
}

#[test]
fn a_packer_that_fails_in_one_worker_ends_them_all() {
    let dir = tempfile::tempdir().unwrap();
    let source = disk(&dir.path().join("a.vhdx"), 64 << 20, &[(0, 64 << 20, 1)]);
    struct Failing(usize);
    impl Packer for Failing {
        fn pack(&mut self, _: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
            if self.0 == 0 {
                return Err(io::Error::other("no"));
            }
            self.0 -= 1;
            out.push(1);
            Ok(())
        }
    }
    let made = AtomicUsize::new(0);
    let packer = || Ok(Box::new(Failing(made.fetch_add(1, Ordering::Relaxed) * 40)) as Box<dyn Packer>);
    let failed = packing(&source, &packer).run(&mut Collected::default(), &mut |_, _| true).unwrap_err();
    assert!(matches!(failed, Some(Failure::Dest(_))));
}
