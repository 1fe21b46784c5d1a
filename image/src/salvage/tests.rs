//! Tests of the parts; `disk/tests/all/rescue.rs` rescues whole images.

use super::*;
use crate::{BlockState, CreateOptions, DiskType, Format, Image};
use diskwright_store::{FileRange, MemoryStore, Store, testing::ForwardingStore};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

fn store() -> MemoryStore {
    MemoryStore::new("test")
}

#[test]
fn runs_of_lost_blocks_split_around_one_that_is_found() {
    let store = store();
    let mut table = BlockTable::new(10, 1 << 20);
    table.lose(&store, 2, 8, Fault::Unreadable).unwrap();
    table.hold(&store, 5, SalvagedBlock::Data(1 << 20)).unwrap();
    let runs: Vec<_> = table.lost().collect();
    assert_eq!(runs, [(2, 5, Fault::Unreadable), (6, 8, Fault::Unreadable)]);
    assert_eq!(table.lost_blocks(), 5);
    let states: Vec<bool> = (0..10).map(|block| table.get(block).is_err()).collect();
    assert_eq!(states, [false, false, true, true, true, false, true, true, false, false]);
    assert_eq!((table.next(0), table.next(5), table.next(8)), (Some(2), Some(5), None));
    assert_eq!(table.get(9), Ok(None));
    table.doubt_absent(Fault::Doubted);
    assert_eq!((table.get(9), table.get(5)), (Err(Fault::Doubted), Ok(Some(SalvagedBlock::Data(1 << 20)))));
    assert_eq!(table.get(10), Ok(None), "beyond the disk nothing is lost");
}

#[test]
fn every_block_that_shares_space_is_named() {
    // 1 lies in 0, 2 begins in 0 and 3 where 2 ends.
    let mut pieces = [(3, 30, 40), (0, 0, 20), (2, 19, 30), (1, 4, 8), (4, 50, 60)];
    assert_eq!(overlapping(&mut pieces), [0, 1, 2]);
    assert_eq!(overlapping(&mut []), []);
}

fn made(format: Format) -> Vec<u8> {
    let store = Arc::new(store());
    let options = CreateOptions {
        disk_type: DiskType::Dynamic,
        size_bytes: 8 << 20,
        block_bytes: Some(1 << 20),
        logical_sector_bytes: 512,
        physical_sector_bytes: 4096,
        parent: None,
        preallocate: false,
        disk_id: None,
        own: Default::default(),
    };
    format.driver().create(Arc::clone(&store) as Arc<dyn Store>, &options).unwrap();
    store.to_vec()
}

/// Salvage of an image cut to each length, and with each 512 bytes of its tables overwritten: a
/// result or an error, and no panic.
#[test]
fn no_truncation_and_no_lost_sector_ends_in_a_panic() {
    for format in [Format::Vhd, Format::Vhdx] {
        let bytes = made(format);
        let hints = SalvageHints { size_bytes: Some(8 << 20), block_bytes: Some(1 << 20), is_child: None };
        let mut found = 0;
        for at in (0..bytes.len().min(4 << 20)).step_by(if format == Format::Vhd { 512 } else { 60 << 10 }) {
            let cut = bytes[..at].to_vec();
            let mut torn = bytes.clone();
            let end = (at + 512).min(torn.len());
            torn[at..end].fill(0xa5);
            for bytes in [cut, torn] {
                let store = Arc::new(MemoryStore::with_bytes("test", bytes));
                if let Ok(salvaged) = format.driver().salvage(store, &hints) {
                    let image = SalvagedImage::new(Arc::new(salvaged));
                    let mut states = [BlockState::Absent; 9];
                    image.block_states(0, &mut states).unwrap();
                    for (block, state) in (0..).zip(states) {
                        if state == BlockState::Damaged {
                            image.damage(block).unwrap();
                        }
                    }
                    found += 1;
                }
            }
        }
        assert!(found > 4, "{format}");
    }
}

/// A file of zeros without holes, whose reads are counted.
#[derive(Debug)]
struct Zeros {
    inner: MemoryStore,
    len_bytes: u64,
    read_bytes: AtomicU64,
}

impl ForwardingStore for Zeros {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len_bytes)
    }
    fn read_at(&self, buf: &mut [u8], _: u64) -> io::Result<()> {
        self.read_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
        buf.fill(0);
        Ok(())
    }
    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let len_bytes = self.len_bytes - offset_bytes;
        Ok((len_bytes > 0).then_some(FileRange { offset_bytes, len_bytes }))
    }
    fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.len_bytes)
    }
}

/// A table of 32 MiB could begin at each of the first 32 MiB: the search is given up.
#[test]
fn the_search_for_a_table_reads_the_file_a_few_times_only() {
    const LEN: u64 = 64 << 20;
    let store = Arc::new(Zeros { inner: store(), len_bytes: LEN, read_bytes: AtomicU64::new(0) });
    let hints = SalvageHints { size_bytes: Some(4 << 40), block_bytes: Some(1 << 20), is_child: Some(false) };
    let salvaged = Format::Vhdx.driver().salvage(Arc::clone(&store) as Arc<dyn Store>, &hints).unwrap();
    assert!(salvaged.info.remarks.iter().any(|remark| remark.contains("given up")), "{:?}", salvaged.info.remarks);
    let read = store.read_bytes.load(Ordering::Relaxed);
    assert!(read < 6 * LEN, "{read} bytes of {LEN}");
}

#[test]
fn runs_of_lost_blocks_are_told_at_once() {
    let store = store();
    let mut table = BlockTable::new(1 << 26, 512);
    table.lose(&store, 100, 1 << 25, Fault::Unreadable).unwrap();
    table.hold(&store, 200, SalvagedBlock::Data(1 << 20)).unwrap();
    assert_eq!(table.lost_run(100), Some((200, Fault::Unreadable)));
    assert_eq!((table.lost_run(200), table.lost_run(1 << 25)), (None, None));
    assert_eq!(table.lost_run(201), Some((1 << 25, Fault::Unreadable)));
    table.doubt_absent(Fault::MaybeParents);
    assert_eq!(table.lost_run(1 << 25), Some((1 << 26, Fault::MaybeParents)));
    assert_eq!(table.lost_run(0), Some((100, Fault::MaybeParents)));
}

#[test]
fn joined_ranges_are_found_by_what_they_share() {
    let ranges = joined(vec![30..40, 0..10, 5..12, 12..14, 50..50]);
    assert_eq!(ranges, [0..14, 30..40]);
    for (range, shares) in [(14..30, false), (13..14, true), (0..1, true), (39..60, true), (40..60, false)] {
        assert_eq!(overlaps_one(&ranges, &range), shares, "{range:?}");
    }
}
