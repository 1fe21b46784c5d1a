//! Tests of verified contents: a model of a disk that can go wrong in each way that is told apart.

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

fn read(generations: &Generations, disk: &[u8], offset_bytes: usize, len: usize) -> Result<(), Wrong> {
    let mut before = Vec::new();
    generations.begin_read(offset_bytes as u64, len, &mut before);
    let checked = generations.check(offset_bytes as u64, &disk[offset_bytes..offset_bytes + len], &before);
    checked.map_err(|error| *error.get_ref().unwrap().downcast_ref::<Wrong>().unwrap())
}

#[test]
fn what_was_written_is_accepted_and_each_fault_is_told_apart() {
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
    assert_eq!(stale, Wrong { at_bytes: 8192, how: How::Stale { found: 1, expected: 2 } });
    let torn = fault(&|disk| disk[10240..12288].copy_from_slice(&first[10240..12288]));
    assert_eq!(torn, Wrong { at_bytes: 10240, how: How::Torn { found: 1, other: 2 } });
    let torn = fault(&|disk| disk[8192..10240].copy_from_slice(&first[8192..10240]));
    assert_eq!(torn, Wrong { at_bytes: 10240, how: How::Torn { found: 2, other: 1 } });
    let misdirected = fault(&|disk| disk.copy_within(8192..12288, 12288));
    assert_eq!(misdirected, Wrong { at_bytes: 12288, how: How::Misdirected { belongs_bytes: 8192, generation: 2 } });
    let damaged = fault(&|disk| disk[9000] ^= 1);
    assert_eq!(damaged, Wrong { at_bytes: 8704, how: How::Damaged });
    let foreign = fault(&|disk| disk[8192..8704].fill(0));
    assert_eq!(foreign, Wrong { at_bytes: 8192, how: How::Foreign });
    for wrong in [stale, torn, misdirected, damaged, foreign] {
        assert!(wrong.to_string().starts_with("wrong data at offset "), "{wrong}");
    }
}

#[test]
fn a_write_in_flight_may_be_seen_or_not_and_no_second_one_begins() {
    let generations = generations();
    let mut disk = vec![7; SIZE];
    write(&generations, &mut disk, 0, 4096);
    let old = disk.clone();
    let mut before = Vec::new();
    generations.begin_read(0, 4096, &mut before);
    assert!(generations.begin_write(0, 8192));
    assert!(!generations.begin_write(4096, 8192), "one unit of it is being written");
    assert!(generations.begin_write(8192, 4096), "and the other was given back");
    generations.seal(0, &mut disk[..8192]);
    generations.check(0, &old[..4096], &before).unwrap();
    generations.check(0, &disk[..4096], &before).unwrap();
    let mut mixed = old[..2000].to_vec();
    mixed.extend_from_slice(&disk[2000..4096]);
    generations.check(0, &mixed, &before).expect("half-written sectors are no fault meanwhile");
    generations.end_write(0, 8192, true);
    read(&generations, &disk, 0, 8192).unwrap();
    assert!(matches!(read(&generations, &old, 0, 4096).unwrap_err().how, How::Stale { found: 1, expected: 2 }));
}

#[test]
fn after_a_failed_write_nobody_knows_until_the_next() {
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
    // The first unit's next write fails, and has not reached the disk.
    assert!(generations.begin_write(0, 4096));
    generations.end_write(0, 4096, false);
    // A write of both units finds the second one in flight, and is taken back.
    assert!(generations.begin_write(4096, 4096));
    assert!(!generations.begin_write(0, 8192));
    read(&generations, &old, 0, 4096).expect("the failed write may have left the old contents");
    generations.end_write(4096, 4096, false);
    // The failed write may have arrived as well.
    generations.seal(0, &mut disk[..4096]);
    read(&generations, &disk, 0, 4096).expect("or the new ones");
    // While the next write is in flight the old contents are possible still.
    assert!(generations.begin_write(0, 8192));
    read(&generations, &old, 0, 8192).expect("nothing was written since");
    generations.seal(0, &mut disk[..8192]);
    generations.end_write(0, 8192, true);
    read(&generations, &disk, 0, 8192).unwrap();
    assert!(read(&generations, &old, 0, 4096).is_err(), "from here on the contents are known");
}

#[test]
fn a_fill_is_generation_nought_and_a_lost_first_write_shows() {
    let generations = generations();
    let mut disk = vec![7; SIZE];
    seal_first(1, 0, &mut disk);
    read(&generations, &disk, 0, SIZE).unwrap();
    let filled = disk.clone();
    write(&generations, &mut disk, 4096, 4096);
    assert_eq!(
        read(&generations, &filled, 4096, 4096).unwrap_err().how,
        How::Stale { found: 0, expected: 1 },
        "the write was lost"
    );
    let mut moved = filled.clone();
    moved.copy_within(0..4096, 8192);
    assert!(matches!(read(&generations, &moved, 8192, 4096).unwrap_err().how, How::Misdirected { .. }));
}

#[test]
fn a_unit_is_what_no_request_cuts() {
    let unit = |load: Load| {
        Generations::new(&Job::simple("x", load, Span::default(), Span::from_secs(1)), SIZE as u64).unit_bytes
    };
    assert_eq!(unit(Load::default()), 4096);
    assert_eq!(unit(Load { align: Some(Bytes(1024)), ..Load::default() }), 1024);
    assert_eq!(unit(Load { start: Bytes(512 * 3), ..Load::default() }), 512);
}

proptest! {
    #[test]
    fn a_sound_disk_never_shows_a_fault(steps in prop::collection::vec((0_usize..16, 1_usize..4, any::<bool>()), 1..200)) {
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
    fn any_changed_byte_of_what_was_written_is_a_fault(at in 4096_usize..8192, flip in 1_u8..=255) {
        let generations = generations();
        let mut disk = vec![7; SIZE];
        write(&generations, &mut disk, 4096, 4096);
        disk[at] ^= flip;
        prop_assert!(read(&generations, &disk, 4096, 4096).is_err());
    }
}
