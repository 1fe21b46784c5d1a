//! Change tracking: what is reported, after which events everything is, and damaged files of
//! points.

use diskwright_disk::{
    Changed, CreateRequest, Disk, MergeOptions, NewSize, OpenOptions, ResizeOptions, create, resize,
};
use diskwright_image::DiskType;
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    fs,
    io::Write,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const GRAIN: u64 = 64 << 10;
const SIZE: u64 = 64 * MIB;

fn made(extension: &str, disk_type: DiskType) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().canonicalize().unwrap().join(format!("vm.{extension}"));
    let disk_type = Some(disk_type).filter(|_| extension != "raw");
    create(&path, &CreateRequest { size_bytes: Some(SIZE), disk_type, ..CreateRequest::default() }).unwrap();
    (dir, path)
}

fn all_kinds() -> [(TempDir, PathBuf); 9] {
    [
        made("raw", DiskType::Fixed),
        made("vhd", DiskType::Fixed),
        made("vhd", DiskType::Dynamic),
        made("vhdx", DiskType::Fixed),
        made("vhdx", DiskType::Dynamic),
        made("vmdk", DiskType::Dynamic),
        made("qcow2", DiskType::Dynamic),
        made("vdi", DiskType::Fixed),
        made("vdi", DiskType::Dynamic),
    ]
}

fn open(path: &Path, writable: bool) -> Arc<Disk> {
    Disk::open(path, &OpenOptions { writable, ..OpenOptions::default() }).unwrap()
}

fn blocking(disk: &Disk) -> Blocking {
    Blocking::open(disk, EngineKind::Auto).unwrap()
}

fn tracks(path: &Path) -> PathBuf {
    format!("{}.tracks", path.display()).into()
}

fn ranges(changed: &Changed) -> Vec<Range<u64>> {
    assert_eq!(changed.everything(), None);
    changed.ranges().collect()
}

fn only(range: Range<u64>) -> Vec<Range<u64>> {
    Vec::from([range])
}

/// After a crash, ranges are known only where every program that writes gives the contents another
/// identity: QEMU writes a VDI without doing so, and a qcow2 has none.
#[test]
fn a_session_that_has_not_ended_is_known_by_identities_that_all_programs_renew() {
    for (extension, is_known) in
        [("raw", false), ("vhd", false), ("vhdx", true), ("vmdk", true), ("qcow2", false), ("vdi", false)]
    {
        let (_dir, path) = made(extension, DiskType::Dynamic);
        let disk = open(&path, true);
        disk.start_tracking("one").unwrap();
        blocking(&disk).write(MIB, &[1; 512], true).unwrap();
        // As another process finds it after a crash.
        let options = OpenOptions { force_share: true, ..OpenOptions::default() };
        let changed = Disk::open(&path, &options).unwrap().changed_since("one").unwrap();
        assert_eq!(changed.everything().is_none(), is_known, "{extension}: {:?}", changed.everything());
        assert!(changed.ranges().any(|range| range.contains(&MIB)), "{extension}");
        disk.close().unwrap();
    }
}

/// A parent that QEMU has written has the identity that it had, if it is a VDI.
#[test]
fn a_parent_that_was_written_changes_everything() {
    for extension in ["vhd", "vhdx", "vmdk", "qcow2", "vdi"] {
        let (dir, base) = made(extension, DiskType::Dynamic);
        let path = dir.path().canonicalize().unwrap().join(format!("child.{extension}"));
        create(&path, &CreateRequest { parent: Some(base.clone()), ..CreateRequest::default() }).unwrap();
        let disk = open(&path, true);
        disk.start_tracking("one").unwrap();
        disk.close().unwrap();
        drop(disk);
        assert_eq!(ranges(&since(&path, "one")), [], "{extension}");
        let time = fs::metadata(&base).unwrap().modified().unwrap() + std::time::Duration::from_secs(5);
        fs::File::options().write(true).open(&base).unwrap().set_modified(time).unwrap();
        // Where the identity says all, the time says nothing.
        let is_renewed = ["vhdx", "vmdk"].contains(&extension);
        assert_eq!(since(&path, "one").everything().is_none(), is_renewed, "{extension}");
    }
}

/// What a new process would report.
fn since(path: &Path, name: &str) -> Changed {
    open(path, false).changed_since(name).unwrap()
}

/// Why everything counts as changed.
fn reason(path: &Path, name: &str) -> String {
    let changed = since(path, name);
    assert_eq!(changed.ranges().collect::<Vec<_>>(), only(0..changed.size_bytes()));
    changed.everything().expect("everything has changed").to_owned()
}

#[test]
fn writes_zeroes_and_discards_are_reported_by_grains_since_each_point() {
    for (_dir, path) in all_kinds() {
        let disk = open(&path, true);
        let mut io = blocking(&disk);
        io.write(40 * MIB, &[9; 4096], false).unwrap();
        disk.start_tracking("one").unwrap();
        assert!(ranges(&disk.changed_since("one").unwrap()).is_empty(), "what was written before does not count");
        io.write(MIB, &[1; 4096], false).unwrap();
        io.write(2 * GRAIN - 512, &[1; 1024], false).unwrap();
        disk.start_tracking("two").unwrap();
        io.write_zeroes(3 * MIB, GRAIN).unwrap();
        io.discard(SIZE - 4096, 4096).unwrap();
        io.read(10 * MIB, &mut [0; 4096]).unwrap();
        let one = [GRAIN..3 * GRAIN, MIB..MIB + GRAIN, 3 * MIB..3 * MIB + GRAIN, SIZE - GRAIN..SIZE];
        assert_eq!(ranges(&disk.changed_since("one").unwrap()), one);
        assert_eq!(ranges(&disk.changed_since("two").unwrap()), one[2..]);
        drop(io);
        disk.close().unwrap();
        drop(disk);
        // The exact ranges are in the file after a clean close, and stay when it is opened again.
        for _ in 0..2 {
            assert_eq!(ranges(&since(&path, "one")), one, "{}", path.display());
            assert_eq!(ranges(&since(&path, "two")), one[2..]);
            let again = open(&path, true);
            blocking(&again).write(MIB, &[2; 512], true).unwrap();
            again.stop_tracking("two").unwrap();
            assert_eq!(ranges(&again.changed_since("one").unwrap()), one);
            again.start_tracking("two").unwrap();
            blocking(&again).write_zeroes(3 * MIB, 512).unwrap();
            blocking(&again).write(SIZE - 512, &[3; 512], true).unwrap();
            again.close().unwrap();
        }
        let points: Vec<_> = open(&path, false).points().unwrap();
        assert_eq!(points.iter().map(|point| &*point.name).collect::<Vec<_>>(), ["one", "two"]);
        assert_eq!(points.iter().map(|point| point.changed_bytes).collect::<Vec<_>>(), [5 * GRAIN, 2 * GRAIN]);
    }
}

#[test]
fn an_open_and_a_close_without_a_write_change_nothing() {
    let (_dir, path) = made("vhdx", DiskType::Dynamic);
    let disk = open(&path, true);
    disk.start_tracking("one").unwrap();
    disk.close().unwrap();
    drop(disk);
    let before = fs::read(tracks(&path)).unwrap();
    open(&path, true).close().unwrap();
    assert_eq!(fs::read(tracks(&path)).unwrap(), before);
    assert!(ranges(&since(&path, "one")).is_empty());
}

#[test]
fn a_point_is_stopped_and_the_last_one_takes_the_file_with_it() {
    let (_dir, path) = made("vhdx", DiskType::Dynamic);
    let disk = open(&path, true);
    let mut io = blocking(&disk);
    for (number, name) in (0..).zip(["a", "b", "c"]) {
        disk.start_tracking(name).unwrap();
        io.write(number * MIB, &[1; 512], false).unwrap();
    }
    let grain = |at: u64| at * MIB..at * MIB + GRAIN;
    // The middle one, the newest, the oldest: what they had still counts for those before.
    disk.stop_tracking("b").unwrap();
    assert_eq!(ranges(&disk.changed_since("a").unwrap()), [grain(0), grain(1), grain(2)]);
    assert_eq!(ranges(&disk.changed_since("c").unwrap()), [grain(2)]);
    disk.stop_tracking("c").unwrap();
    io.write(5 * MIB, &[1; 512], false).unwrap();
    disk.start_tracking("d").unwrap();
    io.write(6 * MIB, &[1; 512], false).unwrap();
    assert_eq!(ranges(&disk.changed_since("a").unwrap()), [grain(0), grain(1), grain(2), grain(5), grain(6)]);
    disk.stop_tracking("a").unwrap();
    assert_eq!(ranges(&disk.changed_since("d").unwrap()), [grain(6)]);
    assert!(disk.changed_since("a").unwrap_err().to_string().contains("no point \"a\""));
    disk.stop_tracking("d").unwrap();
    assert!(disk.points().unwrap().is_empty() && !tracks(&path).exists());
    io.write(7 * MIB, &[1; 512], true).unwrap();
}

#[test]
fn what_cannot_be_tracked_is_refused_and_nothing_is_written() {
    let (dir, path) = made("vhdx", DiskType::Dynamic);
    let told = |disk: &Disk, name: &str| disk.start_tracking(name).unwrap_err().to_string();
    assert!(told(&open(&path, false), "a").contains("open read-only"));
    let disk = open(&path, true);
    assert!(told(&disk, "a/b").contains("is not a name for a point"));
    assert!(!tracks(&path).exists());
    for number in 0..16 {
        disk.start_tracking(&format!("p{number}")).unwrap();
    }
    assert!(told(&disk, "p3").contains("cannot be started") && told(&disk, "p16").contains("cannot be started"));
    assert!(disk.stop_tracking("x").unwrap_err().to_string().contains("no point \"x\""));
    for part in ["001", "002"] {
        fs::write(dir.path().join(format!("parts.{part}")), [0; 4096]).unwrap();
    }
    assert!(told(&open(&dir.path().join("parts.001"), true), "a").contains("one file of its own"));
}

/// Bytes that another program writes to the image.
fn write_as_another_program(path: &Path) {
    let file = fs::File::options().write(true).open(path).unwrap();
    let len_bytes = file.metadata().unwrap().len();
    // Payload: the others have tables in the middle of such a small file.
    let ends_in_payload = ["vmdk", "qcow2", "vdi"].iter().any(|name| path.extension() == Some(name.as_ref()));
    file.write_all_at(&[0xee], if ends_in_payload { len_bytes - 1 } else { len_bytes / 2 }).unwrap();
}

#[test]
fn the_write_of_another_program_a_copy_and_a_revert_change_everything() {
    type Event = fn(&Path);
    let events: [(Event, &str); 4] = [
        (write_as_another_program, "another program has written"),
        (
            |path| {
                let aside = path.with_extension("aside");
                fs::copy(path, &aside).unwrap();
                fs::rename(aside, path).unwrap();
            },
            "another file",
        ),
        (|path| fs::File::options().append(true).open(path).unwrap().write_all(&[0; 512]).unwrap(), "another program"),
        (
            |path| {
                // Opened by its name elsewhere, so that its points are not found.
                let other = path.with_file_name(format!("other.{}", path.extension().unwrap().display()));
                fs::hard_link(path, &other).unwrap();
                let disk = open(&other, true);
                blocking(&disk).write(0, &[1; 512], true).unwrap();
                disk.close().unwrap();
            },
            "",
        ),
    ];
    for (event, told) in events {
        for (_dir, path) in all_kinds() {
            if path.extension().is_some_and(|extension| extension == "vhd") && told == "another program" {
                // A VHD must end with its footer.
                continue;
            }
            let disk = open(&path, true);
            disk.start_tracking("one").unwrap();
            blocking(&disk).write(MIB, &[1; 512], true).unwrap();
            disk.close().unwrap();
            drop(disk);
            event(&path);
            let why = reason(&path, "one");
            assert!(why.contains(told), "{}: {why}", path.display());
            // It stays so, also for what is written later; a new point starts afresh.
            let disk = open(&path, true);
            blocking(&disk).write(2 * MIB, &[1; 512], true).unwrap();
            disk.start_tracking("two").unwrap();
            blocking(&disk).write(3 * MIB, &[1; 512], true).unwrap();
            disk.close().unwrap();
            drop(disk);
            assert_eq!(reason(&path, "one"), why);
            assert_eq!(ranges(&since(&path, "two")), only(3 * MIB..3 * MIB + GRAIN));
            assert_eq!(open(&path, false).points().unwrap()[0].everything.as_deref(), Some(&*why));
        }
    }
}

#[test]
fn a_damaged_file_of_points_is_refused_by_name_and_the_disk_opens_without_it() {
    type Change = fn(&Path);
    fn put(path: &Path, at: u64, bytes: &[u8]) {
        fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
    }
    let damages: [(Change, &str); 4] = [
        (|path| fs::write(path, b"DWTRACKS").unwrap(), "found the end of the file"),
        (
            |path| {
                put(path, 100, &[0xff]);
                put(path, 4196, &[0xff]);
            },
            "no valid header",
        ),
        (|path| put(path, (1 << 20) + 700, &[0xff; 4096]), "wrong checksum"),
        (
            |path| {
                let file = fs::File::options().write(true).open(path).unwrap();
                file.set_len((1 << 20) + 100).unwrap();
            },
            "found the end of the file",
        ),
    ];
    for (damage, told) in damages {
        let (_dir, path) = made("vhdx", DiskType::Dynamic);
        let disk = open(&path, true);
        disk.start_tracking("one").unwrap();
        disk.close().unwrap();
        drop(disk);
        damage(&tracks(&path));
        if told == "wrong checksum" {
            // The damage may lie in the area that is not in use.
            put(&tracks(&path), 1 << 20, &[0xff; 16384]);
        }
        for error in [open(&path, false).points().unwrap_err(), open(&path, false).changed_since("one").unwrap_err()] {
            let error = error.to_string();
            assert!(error.contains(told) && error.contains("vm.vhdx.tracks"), "{error}");
        }
        let disk = open(&path, true);
        assert!(disk.warnings().iter().any(|warning| warning.contains(told)), "{:?}", disk.warnings());
        assert!(disk.start_tracking("two").unwrap_err().to_string().contains("remove it"));
        blocking(&disk).write(0, &[1; 512], true).unwrap();
        disk.close().unwrap();
    }
}

#[test]
fn one_damaged_copy_of_the_header_costs_nothing() {
    for slot in [0, 4096] {
        let (_dir, path) = made("vhd", DiskType::Dynamic);
        let disk = open(&path, true);
        disk.start_tracking("one").unwrap();
        blocking(&disk).write(MIB, &[1; 512], true).unwrap();
        disk.close().unwrap();
        drop(disk);
        let file = fs::File::options().write(true).open(tracks(&path)).unwrap();
        file.write_all_at(&[0; 512], slot).unwrap();
        assert_eq!(ranges(&since(&path, "one")), only(MIB..MIB + GRAIN));
    }
}

#[test]
fn a_disk_keeps_its_points_when_it_grows_and_shrinks() {
    for (extension, disk_type) in [("raw", DiskType::Fixed), ("vhdx", DiskType::Dynamic), ("vhd", DiskType::Dynamic)] {
        let (_dir, path) = made(extension, disk_type);
        let disk = open(&path, true);
        let mut io = blocking(&disk);
        // An MBR with a partition from 1 to 17 MiB, so that the disk can be made smaller.
        let mut mbr = [0; 512];
        mbr[450] = 0x83;
        mbr[454..458].copy_from_slice(&2048_u32.to_le_bytes());
        mbr[458..462].copy_from_slice(&32768_u32.to_le_bytes());
        mbr[510..].copy_from_slice(&[0x55, 0xaa]);
        io.write(0, &mbr, false).unwrap();
        disk.start_tracking("one").unwrap();
        io.write(MIB, &[1; 512], false).unwrap();
        disk.grow(SIZE + 8 * MIB).unwrap();
        io.write(2 * MIB, &[1; 512], false).unwrap();
        let size = disk.geometry().size_bytes;
        let grown = [MIB..MIB + GRAIN, 2 * MIB..2 * MIB + GRAIN, SIZE..size];
        assert_eq!(ranges(&disk.changed_since("one").unwrap()), grown);
        drop(io);
        disk.close().unwrap();
        drop(disk);
        assert_eq!(ranges(&since(&path, "one")), grown);
        if extension == "raw" {
            continue;
        }
        let options = ResizeOptions { size: NewSize::Bytes(SIZE / 2), ..ResizeOptions::default() };
        resize(&path, &options, &mut |_, _| true).unwrap();
        assert_eq!(ranges(&since(&path, "one")), grown[..2], "{extension}");
    }
}

#[test]
fn a_hit_makes_no_sync_and_a_miss_makes_one_for_all_that_wait() {
    let (_dir, path) = made("vhdx", DiskType::Fixed);
    let disk = open(&path, true);
    disk.start_tracking("one").unwrap();
    let mut io = blocking(&disk);
    let sidecar = || fs::read(tracks(&path)).unwrap();
    // The first write makes the file say that the disk is written, the second one marks a run.
    io.write(0, &[1; 512], false).unwrap();
    io.write(GRAIN, &[1; 512], false).unwrap();
    let before = sidecar();
    // The run ahead covers the first 16 MiB.
    for at in (0..16 * MIB).step_by(GRAIN as usize) {
        io.write(at, &[1; 512], false).unwrap();
    }
    let after = sidecar();
    let written = (0..).zip(before.iter().zip(&after)).filter(|(_, (one, other))| one != other).map(|(at, _)| at);
    assert_eq!(written.collect::<Vec<u64>>(), [], "hits write nothing");
    io.write(16 * MIB, &[1; 512], false).unwrap();
    let after = sidecar();
    let changed = before.iter().zip(&after).filter(|(one, other)| one != other).count();
    assert!((1..=512).contains(&changed) && before.len() == after.len(), "one record: {changed} bytes");
}

/// Merges and compaction of a disk in use change its images, and not its contents.
#[test]
fn points_go_on_when_the_images_of_a_disk_in_use_are_merged_and_compacted() {
    for extension in ["vhdx", "vhd"] {
        let (_dir, path) = made(extension, DiskType::Dynamic);
        let disk = open(&path, true);
        let mut io = blocking(&disk);
        io.write(0, &[1; 512], false).unwrap();
        disk.start_tracking("one").unwrap();
        io.write(MIB, &[1; 512], false).unwrap();
        let middle = disk.snapshot("a", false, &mut ()).unwrap().parent;
        io.write(2 * MIB, &[2; 512], false).unwrap();
        let upper = disk.snapshot_tracked("b", Some("two"), false, &mut ()).unwrap().parent;
        io.write(3 * MIB, &[3; 512], false).unwrap();
        let grain = |at: u64| at * MIB..at * MIB + GRAIN;
        let (one, two) = ([grain(1), grain(2), grain(3)], [grain(3)]);
        let judge = |when: &str| {
            assert_eq!(ranges(&disk.changed_since("one").unwrap()), one, "{extension}, {when}");
            assert_eq!(ranges(&disk.changed_since("two").unwrap()), two, "{extension}, {when}");
        };
        judge("two snapshots");
        disk.merge(&upper, &MergeOptions::default(), &mut |_, _| true).unwrap();
        judge("a frozen image was merged");
        disk.merge(&path, &MergeOptions::default(), &mut |_, _| true).unwrap();
        judge("the image that is written was merged");
        assert!(path.exists() && !middle.exists() && !upper.exists());
        disk.compact(false, &mut |_, _| true).unwrap();
        judge("compacted");
        io.write(3 * MIB, &[4; 512], false).unwrap();
        drop(io);
        disk.close().unwrap();
        drop(disk);
        assert_eq!(ranges(&since(&path, "one")), one, "{extension}");
        assert_eq!(ranges(&since(&path, "two")), two, "{extension}");
    }
}
