//! Hand-made logs, replayed in memory and on disk.

use super::*;
use crate::{ImageError, LogState, vhdx::check};
use diskwright_format::vhdx::{
    BatEntry, Header, PayloadState, Slot,
    log::{LogEntryHeader, data_entry, seal},
};

const LOG: u64 = MIB;
const LOG_BYTES: u64 = MIB;
const BAT: u64 = 3 * MIB;
const GUID: Uuid = Uuid::from_u128(0xabc);

/// A dynamic disk with a block of 7s at 4 MiB to which the BAT does not refer yet.
struct Bench {
    store: Arc<TestStore>,
}

impl Bench {
    fn new() -> Self {
        let store = Driver::create(&options(DiskType::Dynamic, 10 * MIB, MIB as u32));
        store.write_at(&vec![7; MIB as usize], 4 * MIB).unwrap();
        Self { store }
    }

    fn name_log(&self, log_guid: Uuid) {
        for slot in [Slot::First, Slot::Second] {
            let mut raw = vec![0; 4096];
            self.store.read_at(&mut raw, slot.offset_bytes()).unwrap();
            let header = Header { log_guid, ..Header::parse(&raw).unwrap() };
            self.store.write_at(&header.to_bytes(), slot.offset_bytes()).unwrap();
        }
    }

    fn header(&self, number: u64, tail: u64) -> LogEntryHeader {
        let file_bytes = self.store.len_bytes().unwrap();
        LogEntryHeader {
            checksum: 0,
            entry_len_bytes: 0,
            tail_bytes: tail as u32,
            sequence_number: number,
            descriptors: 0,
            log_guid: GUID,
            flushed_file_bytes: file_bytes,
            last_file_bytes: file_bytes,
        }
    }

    /// Puts an entry into the ring. Returns the position of the next one.
    fn put(&self, position: u64, entry: &[u8]) -> u64 {
        for (index, sector) in entry.chunks(4096).enumerate() {
            self.store.write_at(sector, LOG + (position + 4096 * index as u64) % LOG_BYTES).unwrap();
        }
        (position + entry.len() as u64) % LOG_BYTES
    }

    fn put_page(&self, position: u64, header: LogEntryHeader, page: &[u8]) -> u64 {
        self.put(position, &data_entry(header, [(BAT, page)].into_iter()))
    }

    /// Opens read-only and writable. Both must read the same tag in sector 0, and a read-only open
    /// must not write.
    fn replayed(&self) -> (u8, LogState) {
        let before = self.store.contents();
        let reader = Driver::open(&self.store, false);
        let (tag, log) = (reader.read(0), reader.image.info().log);
        assert!(self.store.contents() == before, "a read-only open wrote");
        assert!(check(Arc::clone(&self.store) as Arc<dyn Store>).is_ok());
        let copy = TestStore::new(before);
        let writer = Driver::open(&copy, true);
        assert_eq!((writer.read(0), writer.image.info().log), (tag, log));
        drop(writer);
        let again = Driver::open(&copy, false);
        assert_eq!((again.read(0), again.image.info().log), (tag, LogState::Clean));
        assert_ne!(again.image.info().file_write_id, reader.image.info().file_write_id);
        (tag, log)
    }

    fn refused(&self) -> String {
        let before = self.store.contents();
        let mut messages = Vec::new();
        for writable in [false, true] {
            let error = open(Arc::clone(&self.store) as Arc<dyn Store>, writable).unwrap_err();
            assert!(matches!(error, ImageError::Corrupt { .. }), "{error}");
            messages.push(error.to_string());
        }
        let report = check(Arc::clone(&self.store) as Arc<dyn Store>).unwrap();
        assert_eq!(report.worst(), Some(crate::Severity::Corrupt));
        // The FileWriteGuid may change, but nothing after the headers.
        let (mut old, mut new) = (vec![0; 256 << 10], vec![0; 256 << 10]);
        before.read(&mut old, 192 << 10);
        self.store.contents().read(&mut new, 192 << 10);
        assert!(old == new);
        messages.swap_remove(0)
    }
}

/// A BAT page whose block 0 is at `block_0_bytes`.
fn page(block_0_bytes: u64) -> Vec<u8> {
    let mut page = vec![0; 4096];
    page[..8].copy_from_slice(&BatEntry::payload(PayloadState::FullyPresent, block_0_bytes).to_le_bytes());
    page[4088..].copy_from_slice(&[0; 8]);
    page
}

fn empty_page() -> Vec<u8> {
    vec![0; 4096]
}

#[test]
fn an_entry_is_replayed() {
    let bench = Bench::new();
    bench.put_page(8192, bench.header(3, 8192), &page(4 * MIB));
    assert_eq!(Driver::open(&bench.store, false).read(0), 0, "without a log GUID, the log is empty");
    bench.name_log(GUID);
    assert_eq!(bench.replayed(), (7, LogState::Replayed { entries: 1 }));
}

#[test]
fn an_entry_that_wraps_around_is_replayed() {
    for position in [LOG_BYTES - 4096, LOG_BYTES - 8192] {
        let bench = Bench::new();
        bench.name_log(GUID);
        let next = bench.put_page(position, bench.header(8, position), &empty_page());
        let last = bench.put_page(next, bench.header(9, position), &page(4 * MIB));
        bench.put(last, &data_entry(bench.header(10, position), std::iter::empty()));
        assert_eq!(bench.replayed(), (7, LogState::Replayed { entries: 3 }), "from {position}");
    }
}

#[test]
fn a_leading_empty_entry_is_part_of_the_sequence() {
    let bench = Bench::new();
    bench.name_log(GUID);
    let next = bench.put(0, &data_entry(bench.header(5, 0), std::iter::empty()));
    bench.put_page(next, bench.header(6, 0), &page(4 * MIB));
    assert_eq!(bench.replayed(), (7, LogState::Replayed { entries: 2 }));
}

#[test]
fn a_single_empty_entry_replays_nothing() {
    let bench = Bench::new();
    bench.name_log(GUID);
    bench.put(4096, &data_entry(bench.header(1, 4096), std::iter::empty()));
    assert_eq!(bench.replayed(), (0, LogState::Replayed { entries: 1 }));
}

#[test]
fn with_a_torn_head_the_previous_entry_is_replayed() {
    for torn_byte in [0, 70, 4096 + 4, 4096 + 2000, 8191] {
        let bench = Bench::new();
        bench.name_log(GUID);
        let next = bench.put_page(0, bench.header(1, 0), &page(4 * MIB));
        let mut torn = data_entry(bench.header(2, next), [(BAT, &empty_page()[..])].into_iter());
        torn[torn_byte] ^= 0x55;
        bench.put(next, &torn);
        assert_eq!(bench.replayed(), (7, LogState::Replayed { entries: 1 }), "byte {torn_byte}");
    }
}

#[test]
fn different_halves_of_a_sequence_number_make_an_entry_invalid() {
    let bench = Bench::new();
    bench.name_log(GUID);
    let mut entry = data_entry(bench.header(1, 0), [(BAT, &page(4 * MIB)[..])].into_iter());
    entry[8191] = 9;
    seal(&mut entry);
    bench.put(0, &entry);
    assert!(bench.refused().contains("no complete sequence"));
}

#[test]
fn entries_of_another_guid_are_ignored() {
    let bench = Bench::new();
    bench.name_log(Uuid::from_u128(0xdef));
    bench.put_page(0, bench.header(1, 0), &page(4 * MIB));
    assert!(bench.refused().contains("0 valid entries"));
}

#[test]
fn the_later_of_two_sequences_is_replayed_from_its_tail() {
    let bench = Bench::new();
    bench.name_log(GUID);
    // Sequence numbers 1 and 2: an old sequence.
    let next = bench.put_page(0, bench.header(1, 0), &empty_page());
    bench.put_page(next, bench.header(2, 0), &empty_page());
    // Sequence numbers 20, 21, 22; the tail of 22 is 21.
    let second = bench.put_page(65536, bench.header(20, 65536), &page(9 << 40));
    let third = bench.put_page(second, bench.header(21, 65536), &empty_page());
    bench.put_page(third, bench.header(22, second), &page(4 * MIB));
    assert_eq!(bench.replayed(), (7, LogState::Replayed { entries: 2 }));
}

#[test]
fn a_head_whose_tail_is_not_in_its_chain_is_ignored() {
    let bench = Bench::new();
    bench.name_log(GUID);
    bench.put_page(0, bench.header(4, 0), &page(4 * MIB));
    bench.put_page(65536, bench.header(20, 4096 * 77), &empty_page());
    assert_eq!(bench.replayed(), (7, LogState::Replayed { entries: 1 }));
}

#[test]
fn a_file_shorter_than_the_head_requires_is_refused() {
    let bench = Bench::new();
    bench.name_log(GUID);
    let promised = bench.store.len_bytes().unwrap() + MIB;
    bench.put_page(
        0,
        LogEntryHeader { flushed_file_bytes: promised, last_file_bytes: promised, ..bench.header(1, 0) },
        &page(4 * MIB),
    );
    let message = bench.refused();
    assert!(message.contains("copied completely"), "{message}");
}

#[test]
fn only_the_file_length_of_the_head_counts() {
    let bench = Bench::new();
    bench.name_log(GUID);
    let promised = bench.store.len_bytes().unwrap() + MIB;
    let next = bench.put_page(0, LogEntryHeader { flushed_file_bytes: promised, ..bench.header(1, 0) }, &page(4 * MIB));
    bench.put_page(next, bench.header(2, 0), &page(4 * MIB));
    assert_eq!(bench.replayed(), (7, LogState::Replayed { entries: 2 }));
}

#[test]
fn the_file_is_extended_to_the_last_file_offset() {
    let bench = Bench::new();
    bench.name_log(GUID);
    let last = bench.store.len_bytes().unwrap() + 2 * MIB;
    let block = last - MIB;
    bench.put_page(0, LogEntryHeader { last_file_bytes: last, ..bench.header(1, 0) }, &page(block));
    assert_eq!(bench.replayed().0, 0, "the block lies in the added range, which is zero");
    Driver::open(&bench.store, true);
    assert_eq!(bench.store.len_bytes().unwrap(), last);
}

#[test]
fn zero_descriptors_zero_even_what_an_earlier_entry_set() {
    use diskwright_format::vhdx::Descriptor;
    let bench = Bench::new();
    bench.name_log(GUID);
    bench.store.write_at(&page(4 * MIB), BAT + 4096).unwrap();
    let next = bench.put_page(0, bench.header(1, 0), &page(4 * MIB));
    let mut entry = data_entry(bench.header(2, 0), std::iter::empty());
    let zero = Descriptor::Zero { offset_bytes: BAT, len_bytes: 8192 };
    entry[24] = 1;
    entry[64..96].copy_from_slice(&zero.to_bytes(2));
    seal(&mut entry);
    bench.put(next, &entry);
    assert_eq!(bench.replayed(), (0, LogState::Replayed { entries: 2 }));
    let reader = Driver::open(&bench.store, false);
    let mut raw = [1; 8];
    reader.image.store().read_at(&mut raw, BAT + 4096).unwrap();
    assert_eq!(raw, [0; 8]);
}

#[test]
fn a_log_that_changes_headers_or_itself_or_extends_the_file_too_far_is_refused() {
    for target in [0, 64 << 10, 128 << 10, LOG, LOG + 8192, 1 << 60] {
        let bench = Bench::new();
        bench.name_log(GUID);
        bench.put(0, &data_entry(bench.header(1, 0), [(target, &empty_page()[..])].into_iter()));
        bench.refused();
    }
    let bench = Bench::new();
    bench.name_log(GUID);
    bench.put_page(0, LogEntryHeader { last_file_bytes: 1 << 60, ..bench.header(1, 0) }, &page(4 * MIB));
    bench.refused();
}

#[test]
fn a_log_may_change_region_tables() {
    let bench = Bench::new();
    bench.name_log(GUID);
    let mut table = vec![0; 4096];
    bench.store.read_at(&mut table, 192 << 10).unwrap();
    bench.store.write_at(&[0x11; 4096], 192 << 10).unwrap();
    bench.put(0, &data_entry(bench.header(1, 0), [(192 << 10, &table[..]), (BAT, &page(4 * MIB)[..])].into_iter()));
    assert_eq!(bench.replayed().0, 7);
    assert!(Driver::open(&bench.store, false).image.info().remarks.is_empty());
}
