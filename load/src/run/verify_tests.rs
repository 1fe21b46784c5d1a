//! Tests of verified contents on a model of a disk with each kind of fault.

use super::*;
use crate::job::{Bytes, Span};
use proptest::prelude::*;

const SIZE: usize = 64 << 10;

/// Units of 4 KiB.
fn generations() -> Generations {
    Generations::new(&Job::simple("x", Load::default(), Span::default(), Span::from_secs(1)), SIZE as u64)
}

fn write(generations: &Generations, disk: &mut [u8], offset_bytes: usize, len: usize) {
    assert!(generations.begin_write(offset_bytes as u64, len));
    generations.seal(offset_bytes as u64, &mut disk[offset_bytes..offset_bytes + len]);
    generations.end_write(offset_bytes as u64, len, true);
}

fn read(generations: &Generations, disk: &[u8], offset_bytes: usize, len: usize) -> Result<(), Fault> {
    let mut before = Vec::new();
    generations.begin_read(offset_bytes as u64, len, &mut before);
    let checked = generations.check(offset_bytes as u64, &disk[offset_bytes..offset_bytes + len], &before);
    checked.map_err(|error| *error.get_ref().unwrap().downcast_ref::<Fault>().unwrap())
}

#[test]
fn written_data_are_accepted_and_each_fault_is_found() {
    let generations = generations();
    let mut disk = vec![7; SIZE];
    read(&generations, &disk, 0, SIZE).expect("nothing has been written yet");
    write(&generations, &mut disk, 8192, 8192);
    let first = disk.clone();
    write(&generations, &mut disk, 8192, 8192);
    read(&generations, &disk, 4096, 16384).unwrap();

    let fault = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut disk = disk.clone();
        change(&mut disk);
        read(&generations, &disk, 4096, 16384).unwrap_err()
    };
    let stale = fault(&|disk| disk[8192..12288].copy_from_slice(&first[8192..12288]));
    assert_eq!(stale, Fault { at_bytes: 8192, kind: FaultKind::Stale { found: 1, expected: 2 } });
    let torn = fault(&|disk| disk[10240..12288].copy_from_slice(&first[10240..12288]));
    assert_eq!(torn, Fault { at_bytes: 10240, kind: FaultKind::Torn { found: 1, other: 2 } });
    let torn = fault(&|disk| disk[8192..10240].copy_from_slice(&first[8192..10240]));
    assert_eq!(torn, Fault { at_bytes: 10240, kind: FaultKind::Torn { found: 2, other: 1 } });
    let misdirected = fault(&|disk| disk.copy_within(8192..12288, 12288));
    assert_eq!(
        misdirected,
        Fault { at_bytes: 12288, kind: FaultKind::Misdirected { belongs_bytes: 8192, generation: 2 } }
    );
    let damaged = fault(&|disk| disk[9000] ^= 1);
    assert_eq!(damaged, Fault { at_bytes: 8704, kind: FaultKind::Damaged });
    let foreign = fault(&|disk| disk[8192..8704].fill(0));
    assert_eq!(foreign, Fault { at_bytes: 8192, kind: FaultKind::Foreign });
    for wrong in [stale, torn, misdirected, damaged, foreign] {
        assert!(wrong.to_string().starts_with("wrong data at offset "), "{wrong}");
    }
}

#[test]
fn a_read_may_see_a_write_in_flight_and_no_second_write_begins() {
    let generations = generations();
    let mut disk = vec![7; SIZE];
    write(&generations, &mut disk, 0, 4096);
    let old = disk.clone();
    let mut before = Vec::new();
    generations.begin_read(0, 4096, &mut before);
    assert!(generations.begin_write(0, 8192));
    assert!(!generations.begin_write(4096, 8192), "one unit is being written");
    assert!(generations.begin_write(8192, 4096), "the other unit was taken back");
    generations.seal(0, &mut disk[..8192]);
    generations.check(0, &old[..4096], &before).unwrap();
    generations.check(0, &disk[..4096], &before).unwrap();
    let mut mixed = old[..2000].to_vec();
    mixed.extend_from_slice(&disk[2000..4096]);
    generations.check(0, &mixed, &before).expect("torn sectors are accepted during a write");
    generations.end_write(0, 8192, true);
    read(&generations, &disk, 0, 8192).unwrap();
    assert!(matches!(read(&generations, &old, 0, 4096).unwrap_err().kind, FaultKind::Stale { found: 1, expected: 2 }));
}

#[test]
fn a_unit_is_unknown_after_a_failed_write_until_the_next() {
    let generations = generations();
    let mut disk = vec![7; SIZE];
    write(&generations, &mut disk, 0, 4096);
    assert!(generations.begin_write(0, 4096));
    generations.end_write(0, 4096, false);
    read(&generations, &disk, 0, 4096).unwrap();
    write(&generations, &mut disk, 0, 4096);
    read(&generations, &disk, 0, 4096).unwrap();
    disk[100] ^= 1;
    assert!(read(&generations, &disk, 0, 4096).is_err());
}

#[test]
fn a_write_that_is_taken_back_leaves_an_unknown_unit_unknown() {
    let generations = generations();
    let mut disk = vec![7; SIZE];
    write(&generations, &mut disk, 0, 8192);
    let old = disk.clone();
    // The next write of the first unit fails and has not reached the disk.
    assert!(generations.begin_write(0, 4096));
    generations.end_write(0, 4096, false);
    // A write of both units is taken back, because a write of the second unit is in flight.
    assert!(generations.begin_write(4096, 4096));
    assert!(!generations.begin_write(0, 8192));
    read(&generations, &old, 0, 4096).expect("the failed write may have left the old contents");
    generations.end_write(4096, 4096, false);
    // The failed write may also have reached the disk.
    generations.seal(0, &mut disk[..4096]);
    read(&generations, &disk, 0, 4096).expect("the failed write may have left the new contents");
    // While the next write is in flight the old contents are still possible.
    assert!(generations.begin_write(0, 8192));
    read(&generations, &old, 0, 8192).expect("nothing was written since");
    generations.seal(0, &mut disk[..8192]);
    generations.end_write(0, 8192, true);
    read(&generations, &disk, 0, 8192).unwrap();
    assert!(read(&generations, &old, 0, 4096).is_err(), "the contents are known after a write that succeeded");
}

#[test]
fn a_fill_has_generation_zero_and_a_lost_first_write_is_found() {
    let generations = generations();
    let mut disk = vec![7; SIZE];
    seal_first(1, 0, &mut disk);
    read(&generations, &disk, 0, SIZE).unwrap();
    let filled = disk.clone();
    write(&generations, &mut disk, 4096, 4096);
    assert_eq!(
        read(&generations, &filled, 4096, 4096).unwrap_err().kind,
        FaultKind::Stale { found: 0, expected: 1 },
        "the write was lost"
    );
    let mut moved = filled.clone();
    moved.copy_within(0..4096, 8192);
    assert!(matches!(read(&generations, &moved, 8192, 4096).unwrap_err().kind, FaultKind::Misdirected { .. }));
}

#[test]
fn a_unit_is_the_largest_piece_that_no_request_divides() {
    let unit = |load: Load| {
        Generations::new(&Job::simple("x", load, Span::default(), Span::from_secs(1)), SIZE as u64).unit_bytes
    };
    assert_eq!(unit(Load::default()), 4096);
    assert_eq!(unit(Load { align: Some(Bytes(1024)), ..Load::default() }), 1024);
    assert_eq!(unit(Load { start: Bytes(512 * 3), ..Load::default() }), 512);
}

proptest! {
    #[test]
    fn a_disk_without_faults_passes(steps in prop::collection::vec((0_usize..16, 1_usize..4, any::<bool>()), 1..200)) {
        let generations = generations();
        let mut disk = vec![7; SIZE];
        for (unit, units, is_write) in steps {
            let (offset_bytes, len) = (unit * 4096, (units * 4096).min(SIZE - unit * 4096));
            if is_write {
                write(&generations, &mut disk, offset_bytes, len);
            }
            prop_assert_eq!(read(&generations, &disk, offset_bytes, len), Ok(()));
        }
    }

    #[test]
    fn any_changed_byte_is_a_fault(at in 4096_usize..8192, flip in 1_u8..=255) {
        let generations = generations();
        let mut disk = vec![7; SIZE];
        write(&generations, &mut disk, 4096, 4096);
        disk[at] ^= flip;
        prop_assert!(read(&generations, &disk, 4096, 4096).is_err());
    }
}
