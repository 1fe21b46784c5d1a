//! Damaged qcow2 and VDI images: header, extensions, tables, refcounts, compressed clusters,
//! snapshots, bitmaps; header and block map.
//!
//! ```text
//!   input ─▶ a sample, its fields damaged ─▶ check, read, salvage, write, a larger size
//!            ─▶ opened again
//! ```
//!
//! The promises are those of all images (`lib.rs`). A new size is refused, or the file shows it
//! when it is opened again; the contents stay.

use crate::{
    bounded::BoundedStore,
    mutation::{Edit, Mutation},
    samples::{Sample, samples},
    session::{bytes_of, put, read, salvage},
};
use arbitrary::{Arbitrary, Unstructured};
use diskwright_image::{BlockState, Format, Image, ImageError, Severity, qcow2, repair_image};
use diskwright_store::{MemoryStore, Store};
use std::sync::{Arc, OnceLock};

/// Size of the samples' disks in bytes.
const SIZE_BYTES: u64 = 512 << 10;
/// Cluster of the qcow2 samples in bytes.
const CLUSTER: usize = 4096;
/// The most that a disk grows in one run.
const GROWTH_MAX_BYTES: u64 = 1 << 20;

/// The input.
#[derive(Debug, Arbitrary)]
struct Input {
    mutation: Mutation,
    /// Further damage, behind the first eight changes.
    late: Vec<Edit>,
    block: u8,
    growth_sectors: u16,
}

/// The fuzz target of qcow2.
pub fn qcow2(data: &[u8]) {
    if let Ok(input) = Input::arbitrary(&mut Unstructured::new(data)) {
        run(qcow2_samples(), &input);
    }
}

/// The fuzz target of VDI.
pub fn vdi(data: &[u8]) {
    if let Ok(input) = Input::arbitrary(&mut Unstructured::new(data)) {
        run(vdi_samples(), &input);
    }
}

fn of_format(format: Format) -> Vec<Sample> {
    let found = samples().iter().filter(|sample| sample.format == format);
    let copies = found.map(|sample| Sample {
        name: sample.name,
        format,
        bytes: sample.bytes.clone(),
        parent: None,
        places: sample.places.clone(),
    });
    copies.collect()
}

fn vdi_samples() -> &'static [Sample] {
    static SAMPLES: OnceLock<Vec<Sample>> = OnceLock::new();
    SAMPLES.get_or_init(|| of_format(Format::Vdi))
}

fn qcow2_samples() -> &'static [Sample] {
    static SAMPLES: OnceLock<Vec<Sample>> = OnceLock::new();
    SAMPLES.get_or_init(|| {
        let mut all = of_format(Format::Qcow2);
        let (rich, old) = (rich(&all[0].bytes), old(&all[0].bytes));
        all.extend([rich, old]);
        all
    })
}

fn offset(bytes: &[u8], at: usize) -> usize {
    let word = bytes[at..at + 8].try_into().map(u64::from_be_bytes).unwrap_or_default();
    (word & 0x00ff_ffff_ffff_fe00) as usize
}

fn put_at(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// An image with a compressed cluster, an internal snapshot and a bitmap, appended by hand. Its
/// refcounts are raised by a repair.
fn rich(bytes: &[u8]) -> Sample {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(CLUSTER), 0);
    let first = bytes.len();
    let (l1, l1_entries) = (offset(&bytes, 40), bytes[36..40].to_vec());
    let place = |index: usize| first + index * CLUSTER;
    bytes.resize(place(8), 0);
    // Snapshot 1, whose L1 table is a copy: both share all clusters.
    let table = [
        &(place(1) as u64).to_be_bytes()[..],
        &l1_entries,
        &[0, 1, 0, 3],
        &[0; 20],
        &16_u32.to_be_bytes(),
        &[0; 8],
        &SIZE_BYTES.to_be_bytes(),
        b"1one",
    ];
    put_at(&mut bytes, place(0), &table.concat());
    bytes.copy_within(l1..l1 + CLUSTER, place(1));
    put_at(&mut bytes, 60, &1_u32.to_be_bytes());
    put_at(&mut bytes, 64, &(place(0) as u64).to_be_bytes());
    // A bitmap of one table entry and one cluster of bits.
    let directory = [
        &(place(3) as u64).to_be_bytes()[..],
        &1_u32.to_be_bytes(),
        &2_u32.to_be_bytes(),
        &[1, 16, 0, 3],
        &0_u32.to_be_bytes(),
        b"map\0\0\0\0\0",
    ]
    .concat();
    put_at(&mut bytes, place(2), &directory);
    put_at(&mut bytes, place(3), &(place(4) as u64).to_be_bytes());
    bytes[place(4)..place(5)].fill(0x55);
    let extension = [
        &0x2385_2875_u32.to_be_bytes()[..],
        &24_u32.to_be_bytes(),
        &1_u32.to_be_bytes(),
        &[0; 4],
        &(directory.len() as u64).to_be_bytes(),
        &(place(2) as u64).to_be_bytes(),
    ];
    let header_bytes = bytes[100..104].try_into().map(u32::from_be_bytes).unwrap_or_default() as usize;
    put_at(&mut bytes, header_bytes, &extension.concat());
    put_at(&mut bytes, 88, &1_u64.to_be_bytes());
    // A compressed cluster: one stored block of deflate, over two clusters of the file.
    let l2 = offset(&bytes, l1);
    put_at(&mut bytes, place(5) + 9, &[1, 0, 0x10, 0xff, 0xef]);
    bytes[place(5) + 14..place(5) + 14 + CLUSTER].fill(0x77);
    let sectors = (9 + 5 + CLUSTER as u64).div_ceil(512) - 1;
    let entry = 1_u64 << 62 | sectors << (62 - 4) | (place(5) + 9) as u64;
    put_at(&mut bytes, l2 + 8 * 40, &entry.to_be_bytes());
    let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("rich.qcow2", bytes));
    repair_image(Format::Qcow2, &store, false, &mut |_| true).expect("refcounts are raised in memory");
    let places = vec![
        (0, 112),
        (header_bytes, 64),
        (offset(&bytes_of(&*store), 48), 64),
        (offset(&bytes_of(&*store), offset(&bytes_of(&*store), 48)), 128),
        (l1, 64),
        (l2, 1024),
        (place(0), 96),
        (place(1), 64),
        (place(2), 48),
        (place(3), 16),
        (place(5), 64),
    ];
    Sample { name: "rich.qcow2", format: Format::Qcow2, bytes: bytes_of(&*store), parent: None, places }
}

/// An image of version 2.
fn old(bytes: &[u8]) -> Sample {
    let mut bytes = bytes.to_vec();
    put_at(&mut bytes, 4, &2_u32.to_be_bytes());
    bytes[72..CLUSTER].fill(0);
    let (l1, table) = (offset(&bytes, 40), offset(&bytes, 48));
    let places = vec![(0, 80), (table, 64), (offset(&bytes, table), 128), (l1, 64), (offset(&bytes, l1), 1024)];
    Sample { name: "old.qcow2", format: Format::Qcow2, bytes, parent: None, places }
}

/// Returns the size of the disk if it could be written.
fn run(samples: &[Sample], input: &Input) -> Option<u64> {
    let sample = input.mutation.sample(samples);
    let format = sample.format;
    let mut bytes = input.mutation.apply(sample);
    for edit in input.late.iter().take(8) {
        edit.apply(sample, &mut bytes);
    }
    let store = BoundedStore::holding(sample.name, bytes.clone());
    let driver = format.driver();
    let check = || driver.check(Arc::clone(&store)).is_ok_and(|report| report.worst() < Some(Severity::Corrupt));
    let _ = driver.parent_link(&*store);
    let block_bytes = if format == Format::Vdi { 16 << 10 } else { CLUSTER as u32 };
    salvage(format, &store, (block_bytes, SIZE_BYTES));
    let was_sound = check();
    let open = |writable| driver.open(Arc::clone(&store), writable, 512);
    let states = match open(false) {
        Ok(image) => read(&*image),
        Err(error) => Err(error.to_string()),
    };
    if format == Format::Qcow2
        && let Ok(image) = qcow2::open(vec![Arc::clone(&store)], false, Some("1"))
    {
        let _ = read(&image);
    }
    assert!(bytes_of(&*store) == bytes, "reading changed the file");
    if let (Err(error), true) = (&states, was_sound) {
        // What is refused by name is not damaged.
        let is_refused = matches!(open(false), Err(ImageError::Unsupported { .. }));
        assert!(is_refused, "check finds it sound, but reading fails: {error}");
    }
    let image = open(true).ok()?;
    let size_bytes = change(&*image, input).ok();
    drop(image);
    let size_bytes = size_bytes?;
    let again = open(false).expect("an image that was written and closed");
    assert_eq!(again.size_bytes(), size_bytes, "another size than the new one");
    assert!(!was_sound || check(), "writing has corrupted it");
    if let (Ok(before), true) = (states, was_sound) {
        let after = read(&*again).expect("a sound image can be read");
        let kept = before.iter().zip(&after).filter(|(before, _)| matches!(before, BlockState::Data { .. }));
        assert!(
            kept.into_iter().all(|(_, after)| matches!(after, BlockState::Data { .. })),
            "a block has lost its data"
        );
    }
    Some(size_bytes)
}

/// A session: two blocks, another size.
fn change(image: &dyn Image, input: &Input) -> Result<u64, ImageError> {
    let writer = image.writer().expect("it is open for writing");
    writer.begin_writing()?;
    put(image, writer, u64::from(input.block))?;
    let wanted = image.size_bytes() + u64::from(input.growth_sectors) * 512 % GROWTH_MAX_BYTES;
    match writer.resize(wanted) {
        Ok(()) => assert_eq!(image.size_bytes(), wanted),
        Err(ImageError::Unsupported { .. }) => {}
        Err(error) => return Err(error),
    }
    put(image, writer, u64::MAX)?;
    writer.flush()?;
    writer.close()?;
    Ok(image.size_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(sample: usize) -> Input {
        let mutation = Mutation { sample: sample as u8, edits: Vec::new(), seal: false, cut: u16::MAX };
        Input { mutation, late: Vec::new(), block: 3, growth_sectors: 100 }
    }

    /// Sound samples are read and written, so that the damaged ones test that code.
    #[test]
    fn the_samples_reach_all_code() {
        for samples in [qcow2_samples(), vdi_samples()] {
            for (number, sample) in samples.iter().enumerate() {
                let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes(sample.name, sample.bytes.clone()));
                let report = sample.format.driver().check(Arc::clone(&store)).unwrap();
                assert!(report.worst() < Some(Severity::Leak), "{}: {:?}", sample.name, report.findings);
                let size_bytes = run(samples, &whole(number));
                assert!(size_bytes.is_some(), "{}", sample.name);
            }
        }
        let rich = &qcow2_samples()[2];
        let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("rich", rich.bytes.clone()));
        let image = qcow2::open(vec![store], false, Some("one")).unwrap();
        let states = read(&image).unwrap();
        assert!(states.contains(&BlockState::Compressed), "both share the table: {states:?}");
    }
}
