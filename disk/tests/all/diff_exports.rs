//! Exports and their application: increments of a disk that goes on, wrong bases, streams that were
//! cut or changed, applications that were stopped, and libvhdi as a reader.

use crate::common::{Kind, Step, Twin, read_all, write};
use diskwright_disk::{
    Applied, ApplyOptions, Change, Changes, CreateRequest, Difference, Disk, DiskError, Exported, Increment, NewSize,
    OpenOptions, Opened, ResizeOptions, apply_export, check, create, resize,
};
use diskwright_format::dwdiff::{HEADER_BYTES, Header, RECORD_BYTES, Record, RecordKind, checksum_of, payload_crc};
use diskwright_image::{DiskType, Format, Severity};
use diskwright_store::{Blocking, EngineKind, ErrorCode, Files};
use proptest::prelude::*;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn clear(path: &Path, offset_bytes: u64, len_bytes: u64) {
    let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let mut queue = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    queue.write_zeroes(offset_bytes, len_bytes).unwrap();
    drop(queue);
    disk.close().unwrap();
}

fn since(path: &Path) -> Difference {
    let disk = Disk::open(path, &OpenOptions::default()).unwrap();
    Difference::since((&disk, path), None, &Files::default(), EngineKind::Auto).unwrap()
}

fn export(path: &Path, out: &Path) -> diskwright_disk::Result<Exported> {
    since(path).export(EngineKind::Auto, &Files::default()).to_file(out, false, &mut |_, _| true)
}

fn apply_file(out: &Path, copy: &Path) -> diskwright_disk::Result<Applied> {
    apply_export(Increment::File(out), copy, &ApplyOptions::default(), &mut |_, _| true)
}

fn insisting() -> ApplyOptions {
    ApplyOptions { ignore_id_mismatch: true, ..ApplyOptions::default() }
}

fn linkage(path: &Path) -> Option<diskwright_image::LinkageId> {
    Disk::open(path, &OpenOptions::default()).unwrap().layers()[0].image.linkage_id()
}

fn sound(path: &Path) {
    let checked = check(path, &OpenOptions::default()).unwrap();
    assert!(checked.report.worst() < Some(Severity::Corrupt), "{}: {:?}", path.display(), checked.report.findings);
}

fn ranges(changes: &mut dyn Changes) -> Vec<Change> {
    let mut found = Vec::new();
    changes
        .for_each(&mut |_, _| true, &mut |change, _| {
            found.push(change);
            Ok(())
        })
        .unwrap();
    found
}

fn scribble(twin: &mut Twin, random: &mut Xoshiro256PlusPlus, steps: u32) {
    let sectors = twin.model.len() as u64 / u64::from(twin.kind.sector_bytes);
    for _ in 0..steps {
        let sector = random.next_u64() % sectors;
        let len = 1 + random.next_u64() % if random.next_u64().is_multiple_of(6) { 5000 } else { 100 };
        twin.apply(match random.next_u64() % 6 {
            0 => Step::Zero { sector, sectors: len },
            1 => Step::Discard { sector, sectors: len },
            _ => Step::Write { sector, sectors: len, seed: random.next_u64() as u8 | 1, fua: false },
        });
    }
}

/// A full copy, then ten increments, each applied to the copy. Streams and images in turns.
fn ten_increments(kind: Kind) {
    let mut twin = Twin::new(kind, 6 * MIB);
    let mut random = Xoshiro256PlusPlus::seed_from_u64(kind.block_bytes.unwrap_or(0).into());
    twin.close();
    let copy = twin.dir.path().join("backup").join(format!("copy.{}", kind.format));
    fs::create_dir(copy.parent().unwrap()).unwrap();
    fs::copy(&twin.chain[0], &copy).unwrap();
    let mut exports: Vec<PathBuf> = Vec::new();
    twin.open();
    for number in 0..10 {
        scribble(&mut twin, &mut random, 6);
        twin.close();
        let top = twin.chain.last().unwrap().clone();
        let extension = if number % 2 == 0 { "dwdiff".into() } else { format!("a{}", kind.format) };
        let out = twin.dir.path().join(format!("export-{number}.{extension}"));
        let exported = export(&top, &out).unwrap();
        if number % 2 == 1 {
            // The image has exactly the changed ranges. It reads as the disk, and has its identity.
            let alone = ranges(&mut since(&out));
            let same: Vec<_> = ranges(&mut since(&top));
            let shape = |changes: &[Change]| -> Vec<bool> {
                let mut sectors = vec![false; 6 * MIB as usize / 512];
                for change in changes {
                    let (start, end) = (change.offset_bytes as usize / 512, change.end_bytes() as usize / 512);
                    sectors[start..end].fill(true);
                }
                sectors
            };
            assert_eq!(shape(&alone), shape(&same));
            assert!(read_all(&out) == twin.model);
            assert_eq!(linkage(&out), linkage(&top));
            sound(&out);
        }
        if let Some(earlier) = exports.last() {
            // Applied twice, and out of order.
            assert!(apply_file(earlier, &copy).unwrap().was_applied);
            let error = apply_file(&exports[0], &copy);
            assert!(exports.len() == 1 || matches!(error, Err(DiskError::WrongBase { .. })));
        }
        let done = apply_file(&out, &copy).unwrap();
        assert!(!done.was_applied && !done.resumed);
        assert_eq!(done.data_bytes, exported.data_bytes);
        assert!(read_all(&copy) == twin.model, "{kind:?} after increment {number}");
        assert_eq!(linkage(&copy), linkage(&top));
        exports.push(out);
        twin.open();
        twin.apply(Step::Child);
    }
    twin.close();
    sound(&copy);
    // A child of the exported disk is a child of its copy.
    fs::rename(&copy, &twin.chain[10]).unwrap();
    if kind.format == Format::Vhdx {
        assert!(read_all(&twin.chain[11]) == twin.model);
    }
}

#[test]
fn ten_increments_vhd() {
    ten_increments(Kind::new(Format::Vhd, DiskType::Differencing, Some(16 << 10)));
}

#[test]
fn ten_increments_vhdx() {
    ten_increments(Kind::new(Format::Vhdx, DiskType::Differencing, Some(1 << 20)));
}

#[test]
fn ten_increments_vhdx_4k() {
    let kind = Kind::new(Format::Vhdx, DiskType::Differencing, Some(2 << 20));
    ten_increments(Kind { sector_bytes: 4096, ..kind });
}

/// A base with a copy, a child of it, and an export of the child.
struct Yard {
    dir: TempDir,
    base: PathBuf,
    top: PathBuf,
    copy: PathBuf,
    out: PathBuf,
}

fn yard(extension: &str, disk_type: DiskType) -> Yard {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().canonicalize().unwrap().join(name);
    let (base, top) = (at(&format!("base.{extension}")), at(&format!("top.{extension}")));
    let copy = at("there").join(format!("copy.{extension}"));
    let request = CreateRequest { size_bytes: Some(8 * MIB), disk_type: Some(disk_type), ..CreateRequest::default() };
    create(&base, &request).unwrap();
    write(&base, 0, 1, 3 * MIB as usize);
    fs::create_dir(at("there")).unwrap();
    fs::copy(&base, &copy).unwrap();
    create(&top, &CreateRequest { parent: Some(base.clone()), ..CreateRequest::default() }).unwrap();
    write(&top, MIB, 2, MIB as usize + 4096);
    write(&top, 7 * MIB, 3, 512);
    clear(&top, 4096, 512 << 10);
    let out = at("changes.dwdiff");
    export(&top, &out).unwrap();
    Yard { base, top, copy, out, dir }
}

#[test]
fn fixed_and_dynamic_copies_are_changed_in_place() {
    for (extension, disk_type) in
        [("vhd", DiskType::Fixed), ("vhd", DiskType::Dynamic), ("vhdx", DiskType::Fixed), ("vhdx", DiskType::Dynamic)]
    {
        let yard = yard(extension, disk_type);
        let options = ApplyOptions { dry_run: true, ..ApplyOptions::default() };
        let held = fs::read(&yard.copy).unwrap();
        let would = apply_export(Increment::File(&yard.out), &yard.copy, &options, &mut |_, _| true).unwrap();
        assert!(would.data_bytes >= MIB && fs::read(&yard.copy).unwrap() == held);
        apply_file(&yard.out, &yard.copy).unwrap();
        assert!(read_all(&yard.copy) == read_all(&yard.top));
        assert_eq!(linkage(&yard.copy), linkage(&yard.top));
        sound(&yard.copy);
        // The identity stays when the copy is opened again, and a footer is where others look.
        let name = if extension == "vhd" { "vpc" } else { "vhdx" };
        match Command::new("qemu-img").args(["info", "-f", name]).arg(&yard.copy).output() {
            Ok(output) => assert!(output.status.success(), "{output:?}"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => println!("skipped: qemu-img is not installed"),
            Err(error) => panic!("qemu-img: {error}"),
        }
    }
}

#[test]
fn a_wrong_base_is_refused_and_not_changed() {
    for extension in ["vhd", "vhdx"] {
        let yard = yard(extension, DiskType::Dynamic);
        let other = yard.dir.path().join(format!("other.{extension}"));
        create(&other, &CreateRequest { size_bytes: Some(8 * MIB), ..CreateRequest::default() }).unwrap();
        let held = fs::read(&other).unwrap();
        let error = apply_file(&yard.out, &other).unwrap_err();
        assert!(matches!(error, DiskError::WrongBase { .. }) && error.code() == ErrorCode::ParentChanged, "{error}");
        assert!(fs::read(&other).unwrap() == held);
        // A VHDX that was written since has another identity.
        write(&yard.copy, 5 * MIB, 9, 512);
        let refused = apply_file(&yard.out, &yard.copy);
        assert_eq!(refused.is_err(), extension == "vhdx");
        // The base has a child beside it.
        let held = fs::read(&yard.base).unwrap();
        assert!(matches!(apply_file(&yard.out, &yard.base), Err(DiskError::HasChildren { .. })));
        assert!(fs::read(&yard.base).unwrap() == held);
        // Insisting: the caller knows that the contents are the same.
        apply_export(Increment::File(&yard.out), &other, &insisting(), &mut |_, _| true).unwrap();
        assert_eq!(linkage(&other), linkage(&yard.top));
        let not_an_export = apply_file(&yard.base, &yard.copy).unwrap_err();
        assert!(not_an_export.to_string().contains("neither a stream of changes nor"), "{not_an_export}");
    }
}

#[test]
fn a_raw_copy_needs_insistence() {
    let yard = yard("vhdx", DiskType::Dynamic);
    let raw = yard.dir.path().join("copy.raw");
    fs::write(&raw, read_all(&yard.base)).unwrap();
    let held = fs::read(&raw).unwrap();
    let error = apply_file(&yard.out, &raw).unwrap_err().to_string();
    assert!(error.contains("has no identity") && error.contains("`ApplyOptions::ignore_id_mismatch`"), "{error}");
    assert!(fs::read(&raw).unwrap() == held);
    for _ in 0..2 {
        let done = apply_export(Increment::File(&yard.out), &raw, &insisting(), &mut |_, _| true).unwrap();
        assert!(!done.was_applied && done.result_id.is_none());
        assert!(fs::read(&raw).unwrap() == read_all(&yard.top));
    }
    // Exports between raw disks, which have no identity at all.
    let (old, new) = (yard.dir.path().join("old.raw"), yard.dir.path().join("new.raw"));
    fs::write(&old, &held).unwrap();
    fs::write(&new, [&fs::read(&raw).unwrap()[..], &[7; 4096]].concat()).unwrap();
    let open = |path: &Path| Opened::open(path, &OpenOptions::default()).unwrap();
    let out = yard.dir.path().join("raw.dwdiff");
    Difference::between((open(&new), &new), (open(&old), &old), EngineKind::Auto)
        .unwrap()
        .export(EngineKind::Auto, &Files::default())
        .to_file(&out, false, &mut |_, _| true)
        .unwrap();
    assert!(apply_file(&out, &yard.copy).unwrap_err().to_string().contains("made from a raw disk"));
    apply_export(Increment::File(&out), &old, &insisting(), &mut |_, _| true).unwrap();
    assert!(fs::read(&old).unwrap() == fs::read(&new).unwrap());
    // Another size.
    fs::write(&old, vec![0; 3 * MIB as usize]).unwrap();
    let error = apply_export(Increment::File(&out), &old, &insisting(), &mut |_, _| true).unwrap_err().to_string();
    assert!(error.contains("applies to a disk of 8388608"), "{error}");
}

/// A device that is longer than the base may hold anything behind the base's end. The result has
/// zeros there where the export has no range.
#[test]
fn a_longer_copy_gets_zeros_behind_the_base() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [old, new, copy, out] = ["old.raw", "new.raw", "copy.raw", "out.dwdiff"].map(|name| dir.path().join(name));
    let block = |byte: u8| vec![byte; MIB as usize];
    fs::write(&old, block(1)).unwrap();
    fs::write(&new, [block(1), block(0), block(2), block(0)].concat()).unwrap();
    let open = |path: &Path| Opened::open(path, &OpenOptions::default()).unwrap();
    Difference::between((open(&new), &new), (open(&old), &old), EngineKind::Auto)
        .unwrap()
        .export(EngineKind::Auto, &Files::default())
        .to_file(&out, false, &mut |_, _| true)
        .unwrap();
    fs::write(&copy, [block(1), block(9), block(9), block(9), block(9)].concat()).unwrap();
    for _ in 0..2 {
        let done = apply_export(Increment::File(&out), &copy, &insisting(), &mut |_, _| true).unwrap();
        assert_eq!(done.size_bytes, (5 * MIB, 5 * MIB));
        let found = fs::read(&copy).unwrap();
        assert!(found == [block(1), block(0), block(2), block(0), block(9)].concat());
    }
    // A differencing image does not say where its base ends.
    let yard = yard("vhdx", DiskType::Dynamic);
    let image = yard.dir.path().join("out.avhdx");
    export(&yard.top, &image).unwrap();
    let held = vec![9; 9 * MIB as usize];
    fs::write(&copy, &held).unwrap();
    let error = apply_export(Increment::File(&image), &copy, &insisting(), &mut |_, _| true).unwrap_err().to_string();
    assert!(error.contains("how long its base is") && fs::read(&copy).unwrap() == held, "{error}");
}

/// Ranges of a stream are whole sectors of both disks: nothing is written before all of them are
/// known to be.
#[test]
fn ranges_within_the_sectors_of_the_base_are_refused() {
    let yard = yard("vhdx", DiskType::Dynamic);
    let whole = fs::read(&yard.out).unwrap();
    let held = fs::read(&yard.copy).unwrap();
    let mut header = Header::parse(whole.first_chunk().unwrap()).unwrap();
    (header.base.sector_bytes, header.result.sector_bytes) = (4096, 4096);
    let file = yard.dir.path().join("forged.dwdiff");
    let data = RecordKind::Data { payload_crc: payload_crc(&[1; 512]) };
    fs::write(&file, forged(&header.to_bytes(), data, 512, 512, &[1; 512])).unwrap();
    let error = apply_file(&file, &yard.copy).unwrap_err();
    assert!(matches!(&error, DiskError::BadExport { .. }) && error.to_string().contains("whole 4096 bytes"), "{error}");
    assert!(fs::read(&yard.copy).unwrap() == held);
}

#[test]
fn sizes_go_with_the_changes() {
    for extension in ["vhd", "vhdx"] {
        for (size_bytes, image) in [(12 * MIB, false), (12 * MIB, true), (4 * MIB, false), (4 * MIB, true)] {
            let yard = yard(extension, DiskType::Dynamic);
            let top = yard.dir.path().join(format!("resized.{extension}"));
            let request = CreateRequest {
                parent: Some(yard.base.clone()),
                size_bytes: Some(size_bytes),
                ..CreateRequest::default()
            };
            create(&top, &request).unwrap();
            write(&top, size_bytes - 4096, 9, 4096);
            let out = yard.dir.path().join(if image { format!("out.a{extension}") } else { "out.dwdiff".into() });
            export(&top, &out).unwrap();
            let done = apply_file(&out, &yard.copy).unwrap();
            assert_eq!(done.size_bytes, (8 * MIB, size_bytes));
            assert!(read_all(&yard.copy) == read_all(&top), "{extension} {size_bytes}");
            sound(&yard.copy);
        }
    }
    let larger = ResizeOptions { size: NewSize::Bytes(9 * MIB), ..ResizeOptions::default() };
    let yard = yard("vhd", DiskType::Dynamic);
    resize(&yard.copy, &larger, &mut |_, _| true).unwrap();
    let error = apply_file(&yard.out, &yard.copy).unwrap_err().to_string();
    assert!(error.contains("applies to a disk of 8388608") && error.contains("nothing was changed"), "{error}");
}

/// Every length of the stream but the whole one is refused before the copy is changed. As a stream
/// the part is applied, and the whole stream finishes it.
#[test]
fn a_cut_stream_is_recognised() {
    for extension in ["vhd", "vhdx"] {
        let yard = yard(extension, DiskType::Dynamic);
        let whole = fs::read(&yard.out).unwrap();
        let held = fs::read(&yard.copy).unwrap();
        let part = yard.dir.path().join("part.dwdiff");
        let records = [0, 1, 8, 255, 256, 257, 288, 300, whole.len() / 2, whole.len() - 33, whole.len() - 32];
        for len in records.into_iter().chain([whole.len() - 1]) {
            fs::write(&part, &whole[..len]).unwrap();
            let error = apply_file(&part, &yard.copy).unwrap_err().to_string();
            assert!(len < 8 || error.contains("without its end mark"), "{len}: {error}");
            assert!(fs::read(&yard.copy).unwrap() == held);
        }
        fs::write(&part, [&whole[..], b"x"].concat()).unwrap();
        assert!(apply_file(&part, &yard.copy).unwrap_err().to_string().contains("nothing behind the end mark"));
        assert!(fs::read(&yard.copy).unwrap() == held);
        let mut cut = &whole[..whole.len() / 2];
        let error = apply_export(Increment::Stream(&mut cut), &yard.copy, &ApplyOptions::default(), &mut |_, _| true);
        let error = error.unwrap_err();
        assert!(matches!(&error, DiskError::AppliedInPart { .. }) && error.code() == ErrorCode::Corrupt, "{error}");
        assert!(![linkage(&yard.base), linkage(&yard.top)].contains(&linkage(&yard.copy)));
        let mut all = &whole[..];
        let done =
            apply_export(Increment::Stream(&mut all), &yard.copy, &ApplyOptions::default(), &mut |_, _| true).unwrap();
        assert!(done.resumed && read_all(&yard.copy) == read_all(&yard.top));
        sound(&yard.copy);
    }
}

/// Stopped at every call of the progress, and finished.
#[test]
fn what_was_stopped_is_finished_by_the_same_call() {
    for extension in ["vhd", "vhdx"] {
        let yard = yard(extension, DiskType::Dynamic);
        let image = yard.dir.path().join(format!("out.a{extension}"));
        export(&yard.top, &image).unwrap();
        let names = || fs::read_dir(yard.dir.path()).unwrap().count();
        let fresh = fs::read(&yard.copy).unwrap();
        let before = names();
        for export_path in [&yard.out, &image] {
            for calls in 0.. {
                let mut left = calls;
                let mut stop = |_, _| {
                    left -= 1;
                    left >= 0
                };
                fs::write(&yard.copy, &fresh).unwrap();
                let stopped =
                    apply_export(Increment::File(export_path), &yard.copy, &ApplyOptions::default(), &mut stop);
                let done = match stopped {
                    Err(DiskError::Stopped) => apply_file(export_path, &yard.copy).unwrap(),
                    done => done.unwrap(),
                };
                assert!(!done.was_applied && read_all(&yard.copy) == read_all(&yard.top));
                assert_eq!(linkage(&yard.copy), linkage(&yard.top));
                if left >= 0 {
                    assert!(calls > 2, "{calls}");
                    break;
                }
            }
        }
        for name in ["other.dwdiff".to_owned(), format!("other.a{extension}")] {
            let out = yard.dir.path().join(name);
            for calls in 0.. {
                let mut left = calls;
                let mut stop = |_, _| {
                    left -= 1;
                    left >= 0
                };
                let made = since(&yard.top).export(EngineKind::Auto, &Files::default()).to_file(&out, false, &mut stop);
                if made.is_ok() {
                    break;
                }
                assert!(matches!(made, Err(DiskError::Stopped)) && names() == before, "a file is left");
            }
            assert!(matches!(export(&yard.top, &out), Err(DiskError::Exists { .. })));
            fs::remove_file(&out).unwrap();
        }
    }
}

#[test]
fn exports_that_cannot_be_made() {
    let yard = yard("vhdx", DiskType::Dynamic);
    let refused = |name: &str| export(&yard.top, &yard.dir.path().join(name)).unwrap_err().to_string();
    assert!(refused("out.raw").contains("use .dwdiff for a stream"));
    assert!(refused("out.avhd").contains("vhd child of a vhdx disk"));
    assert!(refused("missing/out.avhdx").contains("missing"));
    assert!(!yard.dir.path().join("out.avhd").exists());
}

/// A sealed record: its checksum is right, whatever it says.
fn forged(whole: &[u8], kind: RecordKind, offset_bytes: u64, len_bytes: u64, payload: &[u8]) -> Vec<u8> {
    let header: &[u8; HEADER_BYTES] = whole.first_chunk().unwrap();
    let record = Record { kind, offset_bytes, len_bytes, number: 0 };
    [&header[..], &record.to_bytes(checksum_of(header)), payload].concat()
}

#[test]
fn forged_records_are_refused() {
    let yard = yard("vhdx", DiskType::Dynamic);
    let whole = fs::read(&yard.out).unwrap();
    let held = fs::read(&yard.copy).unwrap();
    let file = yard.dir.path().join("forged.dwdiff");
    let data = RecordKind::Data { payload_crc: payload_crc(&[1; 512]) };
    for (kind, offset_bytes, len_bytes) in [
        (data, 0, u64::MAX),
        (data, u64::MAX - 511, 512),
        (data, 0, 2 * MIB),
        (data, 0, 0),
        (data, 100, 512),
        (data, 8 * MIB, 512),
        (RecordKind::Zeros, 0, 9 * MIB),
        (RecordKind::Zeros, 512, u64::MAX),
        (RecordKind::Done, 1, 0),
        (RecordKind::Data { payload_crc: 1 }, 0, 512),
    ] {
        fs::write(&file, forged(&whole, kind, offset_bytes, len_bytes, &[1; 512])).unwrap();
        let error = apply_file(&file, &yard.copy).unwrap_err();
        assert!(matches!(error, DiskError::BadExport { .. }), "{kind:?} {offset_bytes} {len_bytes}: {error}");
        assert!(fs::read(&yard.copy).unwrap() == held);
    }
    // A record is missing, doubled, or in another place.
    let first = HEADER_BYTES..HEADER_BYTES + RECORD_BYTES;
    assert_eq!(&whole[first.start..first.start + 4], b"ZERO");
    let missing = [&whole[..first.start], &whole[first.end..]].concat();
    let doubled = [&whole[..first.end], &whole[first.clone()], &whole[first.end..]].concat();
    for bytes in [missing, doubled] {
        fs::write(&file, bytes).unwrap();
        let error = apply_file(&file, &yard.copy).unwrap_err().to_string();
        assert!(error.contains("found record"), "{error}");
        assert!(fs::read(&yard.copy).unwrap() == held);
    }
}

#[test]
fn changed_streams_are_refused() {
    let yard = yard("vhdx", DiskType::Dynamic);
    let whole = fs::read(&yard.out).unwrap();
    let held = fs::read(&yard.copy).unwrap();
    let file = yard.dir.path().join("changed.dwdiff");
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    // Half of the changes are made where the header and the first records are.
    let place = prop_oneof![0..600_usize, 0..whole.len()];
    runner
        .run(&(place, 1_u8.., 0..3_u8, 1..64_usize), |(at, flip, how, count)| {
            let mut bytes = whole.clone();
            match how {
                0 => bytes[at] ^= flip,
                1 => drop(bytes.drain(at..(at + count).min(whole.len()))),
                _ => drop(bytes.splice(at..at, vec![flip; count])),
            }
            fs::write(&file, bytes).unwrap();
            prop_assert!(apply_file(&file, &yard.copy).is_err());
            prop_assert!(fs::read(&yard.copy).unwrap() == held);
            Ok(())
        })
        .unwrap();
}

/// Reads a chain with libvhdi. Arguments: the file to write, and the paths from the base to the
/// top.
const LIBVHDI: &str = include_str!("../../../proof/proving/src/chain_by_libvhdi.py");

/// An exported image as another program reads it, above its base.
#[test]
fn libvhdi_reads_an_exported_image() {
    for (extension, block_bytes) in [("vhd", 512 << 10), ("vhdx", 1 << 20)] {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(format!("{name}.{extension}"));
        let (base, top, out) = (at("base"), at("top"), at("out"));
        let request =
            CreateRequest { size_bytes: Some(8 * MIB), block_bytes: Some(block_bytes), ..CreateRequest::default() };
        create(&base, &request).unwrap();
        write(&base, 0, 1, 4 * MIB as usize);
        create(&top, &CreateRequest { parent: Some(base.clone()), ..CreateRequest::default() }).unwrap();
        write(&top, 0, 2, 65536);
        write(&top, 3 * MIB + 8192, 3, 4096);
        write(&top, 5 * MIB, 4, 2 * MIB as usize);
        export(&top, &out).unwrap();
        let read = dir.path().join("read.raw");
        let output = Command::new("python3").arg("-c").arg(LIBVHDI).args([&read, &base, &out]).output();
        match output {
            Ok(output) if output.status.success() => {
                assert!(fs::read(&read).unwrap() == read_all(&top), "{extension}");
            }
            Ok(output) if output.status.code() == Some(77) => println!("skipped: python3-libvhdi is not installed"),
            other => panic!("{other:?}"),
        }
    }
}
