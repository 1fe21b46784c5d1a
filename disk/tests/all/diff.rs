//! Differences: random chains and pairs of disks against models of their bytes and of what was
//! written, and what is read for them.

use crate::common::{Kind, Step, Twin, read_all, write};
use diskwright_disk::{
    Change, ChangeKind, Changes, CreateRequest, Difference, Disk, DiskError, NamedRanges, NewSize, OpenOptions, Opened,
    ResizeOptions, create, resize,
};
use diskwright_image::{DiskType, Format};
use diskwright_store::{
    BlockDevice, EngineKind, ExtentKind, FileSystem, Files, LocalFiles, OpenError, Store,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use proptest::prelude::*;
use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

const MIB: u64 = 1 << 20;

fn opened(path: &Path) -> Opened {
    Opened::open(path, &OpenOptions::default()).unwrap()
}

fn since(path: &Path, ancestor: Option<&Path>) -> Difference {
    let disk = Disk::open(path, &OpenOptions::default()).unwrap();
    Difference::since((&disk, path), ancestor, &Files::default(), EngineKind::Auto).unwrap()
}

fn between(path: &Path, base: &Path) -> Difference {
    Difference::between((opened(path), path), (opened(base), base), EngineKind::Auto).unwrap()
}

fn ranges(mut changes: impl Changes) -> Vec<Change> {
    let mut found: Vec<Change> = Vec::new();
    let each = &mut |change: Change, _: &mut diskwright_disk::Progress<'_>| {
        if let Some(last) = found.last() {
            let joins = last.end_bytes() == change.offset_bytes && last.kind == change.kind;
            assert!(last.end_bytes() <= change.offset_bytes && !joins, "{last:?}, then {change:?}");
        }
        assert!(change.len_bytes > 0);
        found.push(change);
        Ok(())
    };
    changes.for_each(&mut |_, _| true, each).unwrap();
    found
}

/// Whether every byte outside of the ranges is the same, and what the ranges say of the disk.
fn judge(found: &[Change], disk: &[u8], base: &[u8]) {
    let len = disk.len().max(base.len());
    let padded = |of: &[u8]| [of, &vec![0; len - of.len()]].concat();
    let (whole, whole_base) = (padded(disk), padded(base));
    let same = |from: usize, to: usize| {
        assert!(whole[from..to] == whole_base[from..to], "a byte of {from}..{to} differs, and is in no range");
    };
    let mut at = 0;
    for change in found {
        let (start, end) = (change.offset_bytes as usize, change.end_bytes() as usize);
        same(at, start);
        match change.kind {
            ChangeKind::Data => assert!(end <= disk.len(), "{change:?}"),
            ChangeKind::Zeros => assert!(disk[start..end].iter().all(|&byte| byte == 0), "{change:?} holds data"),
            ChangeKind::Beyond => assert!(start >= disk.len() && end <= base.len(), "{change:?}"),
        }
        at = end;
    }
    same(at, len);
}

/// The sectors that differ, as `exactly` must give them.
fn judge_exactly(found: &[Change], disk: &[u8], base: &[u8]) {
    judge(found, disk, base);
    let zeros = [0; 512];
    for at in found.iter().flat_map(|change| (change.offset_bytes..change.end_bytes()).step_by(512)) {
        let of = |bytes: &[u8]| *bytes[(at as usize).min(bytes.len())..].first_chunk().unwrap_or(&zeros);
        assert_ne!(of(disk), of(base), "the sector at {at} is the same");
    }
}

fn steps(size_sectors: u64) -> impl Strategy<Value = Vec<Step>> {
    let range = (0..size_sectors, prop_oneof![1..24_u64, 1..5000_u64]);
    let step = prop_oneof![
        6 => (range.clone(), any::<u8>())
            .prop_map(|((sector, sectors), seed)| Step::Write { sector, sectors, seed: seed | 1, fua: false }),
        2 => range.clone().prop_map(|(sector, sectors)| Step::Zero { sector, sectors }),
        2 => range.prop_map(|(sector, sectors)| Step::Discard { sector, sectors }),
        3 => Just(Step::Child),
    ];
    prop::collection::vec(step, 4..30)
}

/// A chain, what each image read when it was frozen, and the sectors that each image was told to
/// change.
struct History {
    twin: Twin,
    held: Vec<Vec<u8>>,
    touched: Vec<Vec<bool>>,
}

fn history(kind: Kind, size_bytes: u64, steps: Vec<Step>) -> History {
    let mut twin = Twin::new(kind, size_bytes);
    let sectors = (size_bytes / 512) as usize;
    let mut held = vec![Vec::new(); twin.chain.len() - 1];
    let mut touched = vec![vec![true; sectors]; twin.chain.len() - 1];
    touched.push(vec![false; sectors]);
    for step in steps {
        match step {
            Step::Write { sector, sectors: count, .. }
            | Step::Zero { sector, sectors: count }
            | Step::Discard { sector, sectors: count } => {
                let end = ((sector + count) as usize).min(sectors);
                touched.last_mut().unwrap()[(sector as usize).min(end)..end].fill(true);
            }
            Step::Child => {
                held.push(twin.model.clone());
                touched.push(vec![false; sectors]);
            }
            _ => {}
        }
        twin.apply(step);
    }
    twin.close();
    held.push(twin.model.clone());
    held[0] = read_all(&twin.chain[0]);
    History { twin, held, touched }
}

/// Random chains: every image against every ancestor, by the tables and exactly.
fn chains(format: Format, block_bytes: u32, cases: u32) {
    let kind = Kind::new(format, DiskType::Differencing, Some(block_bytes));
    let size_bytes = 6 * MIB;
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases,
        max_shrink_iters: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&steps(size_bytes / 512), |steps| {
            let History { twin, held, touched } = history(kind, size_bytes, steps);
            let last = twin.chain.len() - 1;
            for (upper, lower) in (0..last).map(|lower| (last, lower)).chain([(1, 0)]) {
                let (path, ancestor) = (&twin.chain[upper], &twin.chain[lower]);
                let (disk, base) = (&held[upper], &held[lower]);
                let found = ranges(since(path, Some(ancestor)));
                judge(&found, disk, base);
                // Nothing is listed that was not touched.
                for sector in found.iter().flat_map(|change| change.offset_bytes / 512..change.end_bytes() / 512) {
                    let was = touched[lower + 1..=upper].iter().any(|image| image[sector as usize]);
                    assert!(was, "sector {sector} was not touched above image {lower}");
                }
                // As two disks they have common images too. Their difference is the same.
                let difference = between(path, ancestor);
                assert!(!difference.reads_contents());
                assert_eq!(ranges(difference), found);
                judge_exactly(&ranges(since(path, Some(ancestor)).exactly()), disk, base);
                // The other way round.
                let difference = between(ancestor, path);
                assert!(!difference.reads_contents());
                judge(&ranges(difference), base, disk);
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn random_chains_vhd() {
    chains(Format::Vhd, 16 << 10, 6);
}

#[test]
fn random_chains_vhdx() {
    chains(Format::Vhdx, 1 << 20, 6);
}

/// Two children of one image, and the same contents in disks that have nothing in common.
#[test]
fn random_pairs() {
    let size_bytes = 6 * MIB;
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 5,
        max_shrink_iters: 50,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let sectors = size_bytes / 512;
    runner
        .run(&(steps(sectors), steps(sectors), any::<bool>()), |(first, second, is_vhd)| {
            let (format, block_bytes) = if is_vhd { (Format::Vhd, 16 << 10) } else { (Format::Vhdx, 1 << 20) };
            let kind = Kind::new(format, DiskType::Differencing, Some(block_bytes));
            let no_child = |step: &Step| !matches!(step, Step::Child);
            let mut twin = Twin::new(kind, size_bytes);
            first.into_iter().filter(no_child).for_each(|step| twin.apply(step));
            twin.close();
            let (one, one_holds) = (twin.chain[1].clone(), twin.model.clone());
            // The other child.
            let other = twin.dir.path().join(format!("other.{format}"));
            let request = CreateRequest { parent: Some(twin.chain[0].clone()), ..CreateRequest::default() };
            create(&other, &request).unwrap();
            twin.chain.push(other.clone());
            twin.model = read_all(&twin.chain[0]);
            twin.open();
            second.into_iter().filter(no_child).for_each(|step| twin.apply(step));
            twin.close();
            let difference = between(&one, &other);
            assert!(!difference.reads_contents());
            judge(&ranges(difference), &one_holds, &twin.model);
            judge_exactly(&ranges(between(&one, &other).exactly()), &one_holds, &twin.model);
            // A raw copy has no image in common.
            let raw = twin.dir.path().join("copy.raw");
            std::fs::write(&raw, &twin.model[..twin.model.len() - 512]).unwrap();
            for (disk, base, of_disk, of_base) in [
                (&one, &raw, &one_holds[..], &twin.model[..twin.model.len() - 512]),
                (&raw, &one, &twin.model[..twin.model.len() - 512], &one_holds[..]),
            ] {
                let difference = between(disk, base);
                assert!(difference.reads_contents());
                judge_exactly(&ranges(difference), of_disk, of_base);
            }
            Ok(())
        })
        .unwrap();
}

fn child(parent: &Path, name: &str, size_bytes: Option<u64>) -> PathBuf {
    let path = parent.with_file_name(name);
    create(&path, &CreateRequest { parent: Some(parent.to_owned()), size_bytes, ..CreateRequest::default() }).unwrap();
    path
}

fn kinds(found: &[Change]) -> Vec<(u64, u64, ChangeKind)> {
    found.iter().map(|change| (change.offset_bytes, change.end_bytes(), change.kind)).collect()
}

#[test]
fn sizes_that_differ() {
    use ChangeKind::{Beyond, Data, Zeros};
    for extension in ["vhd", "vhdx"] {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join(format!("base.{extension}"));
        create(&base, &CreateRequest { size_bytes: Some(16 * MIB), ..CreateRequest::default() }).unwrap();
        write(&base, 10 * MIB, 1, 8192);
        write(&base, 15 * MIB, 1, 4096);
        // Larger: only its data count. Zeros behind the end of the base are those that it has.
        let larger = child(&base, &format!("larger.{extension}"), Some(32 * MIB));
        assert_eq!(ranges(since(&larger, None)), []);
        write(&larger, 20 * MIB, 5, 4096);
        write(&larger, 10 * MIB, 0, 4096);
        let zeros = (10 * MIB, 10 * MIB + 4096);
        let kind = if extension == "vhd" { Data } else { Zeros };
        let found = kinds(&ranges(since(&larger, None)));
        assert_eq!(found.last(), Some(&(20 * MIB, 20 * MIB + 4096, Data)));
        // A part of a block is zeroed by writing zeros, which is data by the tables.
        assert!(found[0] == (zeros.0, zeros.1, kind) || found[0] == (zeros.0, zeros.1, Data), "{found:?}");
        assert_eq!(kinds(&ranges(since(&larger, None).exactly()))[0], (zeros.0, zeros.1, Zeros));
        judge(&ranges(between(&base, &larger)), &read_all(&base), &read_all(&larger));
        // Smaller: what the base has behind its end.
        let smaller = child(&base, &format!("smaller.{extension}"), Some(12 * MIB));
        let found = kinds(&ranges(since(&smaller, None)));
        assert!(found.iter().all(|range| range.2 == Beyond) && found[0].0 >= 12 * MIB, "{found:?}");
        assert_eq!(kinds(&ranges(since(&smaller, None).exactly())), [(15 * MIB, 15 * MIB + 4096, Beyond)]);
        // An image between that is smaller hides the rest of the base.
        let top = child(&smaller, &format!("top.{extension}"), Some(16 * MIB));
        let found = ranges(since(&top, Some(&base)));
        judge(&found, &read_all(&top), &read_all(&base));
        assert!(kinds(&found).iter().any(|range| range.2 == Zeros && range.0 <= 15 * MIB && range.1 > 15 * MIB));
        assert_eq!(kinds(&ranges(since(&top, Some(&base)).exactly())), [(15 * MIB, 15 * MIB + 4096, Zeros)]);
        assert_eq!(ranges(since(&top, None)), []);
    }
}

#[test]
fn disks_that_cannot_be_compared() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base.vhdx");
    create(&base, &CreateRequest { size_bytes: Some(16 * MIB), ..CreateRequest::default() }).unwrap();
    let refused = |path: &Path, ancestor: Option<&Path>| {
        let disk = Disk::open(path, &OpenOptions::default()).unwrap();
        Difference::since((&disk, path), ancestor, &Files::default(), EngineKind::Auto).unwrap_err().to_string()
    };
    assert!(refused(&base, None).contains("no parent"));
    let top = child(&base, "top.vhdx", None);
    let other = dir.path().join("other.vhdx");
    create(&other, &CreateRequest { size_bytes: Some(16 * MIB), ..CreateRequest::default() }).unwrap();
    assert!(refused(&top, Some(&other)).contains("not among its ancestors"));
    assert!(refused(&top, Some(&top)).contains("not among its ancestors"));
    assert!(refused(&top, Some(&dir.path().join("gone.vhdx"))).contains("find the ancestor"));
    // Stopped in the middle.
    write(&top, 0, 1, 4096);
    let stopped = since(&top, None).for_each(&mut |_, _| false, &mut |_, _| Ok(()));
    assert!(matches!(stopped, Err(DiskError::Stopped)));
}

/// A damaged block of a disk is an error. In an image that both have it is none.
#[test]
fn damage_is_told_where_it_matters() {
    for extension in ["vhd", "vhdx"] {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join(format!("base.{extension}"));
        let block_bytes = Some(MIB as u32);
        create(&base, &CreateRequest { size_bytes: Some(32 * MIB), block_bytes, ..CreateRequest::default() }).unwrap();
        write(&base, 0, 1, 8 * MIB as usize);
        let (top, other) = (child(&base, &format!("top.{extension}"), None), dir.path().join("other.raw"));
        write(&top, 12 * MIB, 2, MIB as usize);
        std::fs::write(&other, [0; 4096]).unwrap();
        crate::damaged_blocks::break_entry(&base, 5);
        assert_eq!(kinds(&ranges(since(&top, None))), [(12 * MIB, 13 * MIB, ChangeKind::Data)]);
        let fails = |mut difference: Difference| {
            difference.for_each(&mut |_, _| true, &mut |_, _| Ok(())).unwrap_err().to_string()
        };
        assert!(fails(between(&top, &other)).contains("base."));
        assert!(fails(between(&other, &top)).contains("base."));
        crate::damaged_blocks::break_entry(&top, 12);
        assert!(fails(since(&top, None)).contains("top."));
        assert!(fails(between(&base, &top)).contains("top."));
    }
}

#[test]
fn ranges_of_others_get_their_kinds_from_the_disk() {
    use ChangeKind::{Data, Zeros};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.vhdx");
    create(&path, &CreateRequest { size_bytes: Some(16 * MIB), ..CreateRequest::default() }).unwrap();
    write(&path, 2 * MIB, 7, MIB as usize);
    let disk = opened(&path);
    let unit = disk.disk().unwrap().layers()[0].image.info().block_bytes;
    let list = [100..MIB, 2 * MIB..2 * MIB + 4096, 2 * MIB + 4096..2 * MIB + 5000, 15 * MIB..40 * MIB];
    let found = kinds(&ranges(NamedRanges::new(&disk, &path, list.into_iter())));
    assert_eq!(unit, 2 * MIB);
    assert_eq!(found, [(0, MIB, Zeros), (2 * MIB, 2 * MIB + 5120, Data), (15 * MIB, 16 * MIB, Zeros)]);
}

/// Files that record where they are read.
#[derive(Debug, Default)]
struct Recording {
    reads: Arc<Mutex<Vec<(PathBuf, u64, u64)>>>,
}

#[derive(Debug)]
struct Recorded {
    inner: Arc<dyn Store>,
    reads: Arc<Mutex<Vec<(PathBuf, u64, u64)>>>,
}

impl ForwardingStore for Recorded {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.reads.lock().unwrap().push((self.inner.name().to_owned(), offset_bytes, buf.len() as u64));
        self.inner.read_at(buf, offset_bytes)
    }
}

impl ForwardingFileSystem for Recording {
    fn open(&self, path: &Path, options: &diskwright_store::OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        let inner = FileSystem::open(&LocalFiles, path, options)?;
        Ok(Arc::new(Recorded { inner, reads: Arc::clone(&self.reads) }))
    }
}

/// A difference within a chain reads no byte of payload, and needs no queue.
#[test]
fn no_payload_is_read_within_a_chain() {
    for (extension, block_bytes) in [("vhd", 64 << 10), ("vhdx", MIB as u32)] {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join(format!("0.{extension}"));
        let request =
            CreateRequest { size_bytes: Some(24 * MIB), block_bytes: Some(block_bytes), ..CreateRequest::default() };
        create(&base, &request).unwrap();
        write(&base, 0, 1, 8 * MIB as usize);
        let mut path = base.clone();
        for number in 1..8_u64 {
            path = child(&path, &format!("{number}.{extension}"), None);
            // Whole blocks, a part of one, and zeros.
            write(&path, 2 * number * MIB, number as u8, MIB as usize);
            write(&path, 17 * MIB + number * 8192, number as u8, 4096);
            write(&path, number * MIB, 0, 65536);
        }
        let recording = Recording::default();
        let reads = Arc::clone(&recording.reads);
        let files = Files::new(Arc::new(recording));
        let options = OpenOptions { files: files.clone(), ..OpenOptions::default() };
        let disk = Disk::open(&path, &options).unwrap();
        // Where the payload of each image lies.
        let mut payload = Vec::new();
        for layer in disk.layers().iter() {
            let alone = Disk::from_layers(vec![layer.clone()], Vec::new()).unwrap();
            let mut extents = Vec::new();
            alone.extents(0, 24 * MIB, &mut extents).unwrap();
            let name = layer.image.store().name().to_owned();
            for extent in extents.iter().filter(|extent| extent.kind == ExtentKind::Data) {
                let at = extent.file_offset_bytes.unwrap();
                payload.push((name.clone(), at, at + extent.len_bytes));
            }
        }
        assert!(payload.len() > 16, "{payload:?}");
        reads.lock().unwrap().clear();
        for ancestor in [None, Some(&*base)] {
            let difference = Difference::since((&disk, &path), ancestor, &files, EngineKind::Auto).unwrap();
            assert!(!difference.reads_contents() && !ranges(difference).is_empty());
        }
        let reads = reads.lock().unwrap();
        for (name, at, len) in reads.iter() {
            let hit = payload.iter().find(|(file, start, end)| file == name && at < end && *start < at + len);
            assert!(hit.is_none(), "{} bytes of {} at {at} are read: {hit:?}", len, name.display());
        }
        assert!(!reads.is_empty());
    }
}

/// A disk that only claims to be huge is passed over, and a chain with other sizes too.
#[test]
fn a_huge_empty_disk_takes_no_time() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base.vhdx");
    create(&base, &CreateRequest { size_bytes: Some(8 << 40), ..CreateRequest::default() }).unwrap();
    write(&base, 5 << 40, 1, 4096);
    let top = child(&base, "top.vhdx", None);
    write(&top, 7 << 40, 2, 4096);
    let larger = ResizeOptions { size: NewSize::Bytes(64 << 40), ..ResizeOptions::default() };
    resize(&top, &larger, &mut |_, _| true).unwrap();
    assert_eq!(kinds(&ranges(since(&top, None))), [(7 << 40, (7 << 40) + 4096, ChangeKind::Data)]);
    assert_eq!(kinds(&ranges(since(&top, None).exactly())), [(7 << 40, (7 << 40) + 4096, ChangeKind::Data)]);
    let mut windows = 0;
    since(&top, None)
        .for_each(
            &mut |_, _| {
                windows += 1;
                true
            },
            &mut |_, _| Ok(()),
        )
        .unwrap();
    assert!(windows < 100, "{windows} windows");
}
