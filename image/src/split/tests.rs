use super::*;
use diskwright_store::{MemoryStore, testing::ForwardingStore};
use std::sync::{OnceLock, Weak};

const MIB: u64 = 1 << 20;

fn stores(lens_bytes: &[u64]) -> Vec<Arc<MemoryStore>> {
    let store = |(number, &len): (usize, &u64)| {
        Arc::new(MemoryStore::with_bytes(
            format!("disk.{:03}", number + 1),
            vec![(number % 255) as u8 + 1; len as usize],
        ))
    };
    lens_bytes.iter().enumerate().map(store).collect()
}

fn open(parts: &[Arc<MemoryStore>], writable: bool) -> Result<SplitRawImage> {
    SplitRawImage::new(parts.iter().map(|part| Arc::clone(part) as Arc<dyn Store>).collect(), writable, 512)
}

#[test]
fn names_of_parts() {
    let number = |name: &str| part_number(Path::new(name));
    assert_eq!([number("d.000"), number("a/d.img.001"), number("d.1024")], [Some(0), Some(1), Some(1024)]);
    for other in ["d", "d.01", "d.0001", "d.20240131", "d.0x1", "d.+01", ".001", "d.001.raw", "d."] {
        assert_eq!(number(other), None, "{other}");
    }
    assert_eq!(part_path(Path::new("a/d.img.001"), 2), Path::new("a/d.img.002"));
    assert_eq!(part_path(Path::new("d.999"), 1000), Path::new("d.1000"));
}

/// Each byte of each block is in the part, and at the offset in that part, where the concatenated
/// files have it.
#[test]
fn no_block_lies_in_two_parts() {
    for (lens_bytes, block_bytes) in [
        (&[5 * MIB, 7 * MIB, MIB][..], MIB),
        (&[MIB], PSEUDO_BLOCK_BYTES),
        (&[4096 * 3, 512, 4096], 512),
        (&[1024 * 5, 1024, 512, 7], 512),
        (&[64 * MIB, 512], PSEUDO_BLOCK_BYTES),
        (&[10_240, 0], 2048),
    ] {
        let image = open(&stores(lens_bytes), false).unwrap();
        assert_eq!(image.info().block_bytes, block_bytes, "{lens_bytes:?}");
        assert_eq!(u64::from(image.info().payload_alignment_bytes), block_bytes.min(MIB));
        let joined: Vec<(u16, u64)> = (0_u16..)
            .zip(lens_bytes)
            .flat_map(|(part, len)| (0..len.div_ceil(512)).map(move |sector| (part, sector * 512)))
            .collect();
        assert_eq!(image.size_bytes(), joined.len() as u64 * 512);
        let mut states = vec![BlockState::Zero; image.size_bytes().div_ceil(block_bytes) as usize + 1];
        image.block_states(0, &mut states).unwrap();
        assert_eq!(states.pop(), Some(BlockState::Absent), "behind the end");
        for (sector, &place) in joined.iter().enumerate() {
            let at = sector as u64 * 512;
            let BlockState::Data { store, offset_bytes } = states[(at / block_bytes) as usize] else { panic!() };
            assert_eq!((store, offset_bytes + at % block_bytes), place, "{lens_bytes:?} at {at}");
        }
        image.block_states(u64::MAX, &mut states[..1]).unwrap();
        assert_eq!(states[0], BlockState::Absent);
        assert!(image.sector_bitmap(0).unwrap().is_full());
    }
}

#[test]
fn a_part_with_a_bad_length_is_refused_on_open_and_found_by_check() {
    for (lens_bytes, told) in
        [(&[4096, 0, 512][..], "at least one sector"), (&[4096, 1000, 512], "a multiple of the sector")]
    {
        let parts = stores(lens_bytes);
        let error = open(&parts, false).unwrap_err().to_string();
        assert!(error.contains("disk.002") && error.contains(told) && error.contains("disk.003"), "{error}");
        let parts: Vec<_> = parts.into_iter().map(|part| part as Arc<dyn Store>).collect();
        let report = check(&parts, None, 512).unwrap();
        assert_eq!(report.findings.len(), 1);
        assert_eq!((report.worst(), report.findings[0].offset_bytes), (Some(Severity::Corrupt), 4096));
        assert!(report.findings[0].message.contains(told), "{report:?}");
    }
    let ends_early: Vec<_> = stores(&[4096, 1000]).into_iter().map(|part| part as Arc<dyn Store>).collect();
    assert_eq!(check(&ends_early, None, 512).unwrap().worst(), None, "the last part may end within a sector");
    let report = check(&ends_early, Some(Path::new("disk.003")), 512).unwrap();
    assert_eq!(report.findings.len(), 2, "{report:?}");
    assert!(report.findings[1].message.contains("disk.003: the file is missing"), "{report:?}");
    assert!(matches!(open(&[], false), Err(ImageError::Unsupported { .. })));
    let many = vec![512; PARTS_MAX + 1];
    assert!(matches!(open(&stores(&many), false), Err(ImageError::Unsupported { .. })));
    assert!(open(&stores(&many[1..]), false).is_ok());
}

#[test]
fn the_last_part_is_extended_to_a_whole_sector_before_the_first_write() {
    let parts = stores(&[4096, 1000]);
    let image = open(&parts, true).unwrap();
    assert_eq!((image.size_bytes(), image.info().remarks.len()), (4096 + 1024, 1));
    let mut sector = [9; 512];
    image.stores()[1].read_at(&mut sector, 512).unwrap();
    assert!(sector[..488] == [2; 488] && sector[488..] == [0; 24]);
    assert_eq!(parts[1].to_vec().len(), 1000);
    image.writer().unwrap().begin_writing().unwrap();
    assert_eq!((parts[0].to_vec().len(), parts[1].to_vec().len()), (4096, 1024));
}

#[test]
fn blocks_never_move() {
    let image = open(&stores(&[8192, 4096]), true).unwrap();
    let writer = image.writer().unwrap();
    let reservation = writer.reserve_waiting(1).unwrap();
    assert_eq!((reservation.store, reservation.offset_bytes), (1, 0));
    let state = writer.commit_waiting(0, Commit::Whole).unwrap();
    assert_eq!(state, BlockState::Data { store: 0, offset_bytes: 0 });
    assert!(writer.commit(0, Commit::Zero).is_err() && !writer.can_store_zero());
    assert_eq!(writer.reserve_waiting(2).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert!(matches!(writer.resize(1 << 30), Err(ImageError::Unsupported { .. })));
    writer.close().unwrap();
}

#[test]
fn a_failed_sync_of_any_part_poisons_all() {
    for failing in 0..3 {
        let parts = stores(&[4096, 4096, 4096]);
        let image = open(&parts, true).unwrap();
        let writer = image.writer().unwrap();
        writer.flush().unwrap();
        parts[failing].fail_syncs(true);
        assert!(matches!(writer.flush(), Err(ImageError::Io { .. })));
        parts[failing].fail_syncs(false);
        for result in [writer.check_syncs(), writer.flush(), writer.close()] {
            let Err(ImageError::Poisoned { path, .. }) = result else { panic!("{failing}: {result:?}") };
            assert_eq!(path, parts[failing].name());
        }
    }
}

/// A part whose sync succeeds. While it runs, the sync of the first part fails in another thread.
#[derive(Debug)]
struct Slow {
    inner: Arc<MemoryStore>,
    of: OnceLock<Weak<SplitWriter>>,
}

impl ForwardingStore for Slow {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }
    fn sync_data(&self) -> io::Result<()> {
        let writer = self.of.get().and_then(Weak::upgrade).unwrap();
        assert!(writer.barriers[0].settle("test", Err(io::ErrorKind::TimedOut.into())).is_err());
        self.inner.sync_data()
    }
}

/// The flush has already synced the first part when another sync of that part fails. The flush must
/// not succeed: the kernel may have dropped pages of the first part.
#[test]
fn a_flush_fails_when_another_part_fails_meanwhile() {
    let parts = stores(&[4096, 4096]);
    let slow = Arc::new(Slow { inner: Arc::clone(&parts[1]), of: OnceLock::new() });
    let both: [Arc<dyn Store>; 2] = [parts[0].clone(), slow.clone()];
    let writer = Arc::new(SplitWriter {
        barriers: both.into_iter().map(Barrier::new).collect(),
        starts: [0, 4096].into(),
        size_bytes: 8192,
        block_bytes: 4096,
        padding_end_bytes: None,
    });
    slow.of.set(Arc::downgrade(&writer)).unwrap();
    assert!(matches!(writer.flush(), Err(ImageError::Poisoned { .. })));
}
