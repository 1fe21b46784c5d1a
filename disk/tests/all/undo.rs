//! Undoing repairs: refused after any write, restartable, with hostile undo files; and what a
//! repair means for children and for other programs.

use crate::damage::{BAT, HEADERS, MIB, crc32c, put};
use diskwright_disk::{
    CreateRequest, Disk, DiskError, OpenOptions, RepairOptions, Repaired, check, create, interrupted_repair, repair,
    undo_repair,
};
use diskwright_image::{Repair, Severity};
use diskwright_store::{BlockDevice, Blocking, EngineKind, ErrorCode, Files};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};
use tempfile::TempDir;

const SIZE: u64 = 16 * MIB as u64;

fn write(path: &Path, offset_bytes: u64, byte: u8) -> Result<(), DiskError> {
    let options = OpenOptions { writable: true, ..OpenOptions::default() };
    let disk = Disk::open(path, &options)?;
    let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
    io.write(offset_bytes, &[byte; 4096], false).unwrap();
    drop(io);
    disk.close()
}

fn read(path: &Path) -> Vec<u8> {
    let disk = Disk::open(path, &OpenOptions::default()).unwrap();
    let mut bytes = vec![0; disk.geometry().size_bytes as usize];
    Blocking::open(&*disk, EngineKind::Sync).unwrap().read(0, &mut bytes).unwrap();
    bytes
}

/// A disk with data in its blocks 0 and 3.
fn made(dir: &Path, extension: &str) -> PathBuf {
    let path = dir.join(format!("disk.{extension}"));
    let block_bytes = Some(MIB as u32);
    create(&path, &CreateRequest { size_bytes: Some(SIZE), block_bytes, ..CreateRequest::default() }).unwrap();
    write(&path, 0, 1).unwrap();
    write(&path, 3 * MIB as u64, 3).unwrap();
    path
}

/// Damage that leaves the time of the last change as it was, which children have recorded.
fn replace(path: &Path, bytes: &[u8]) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    fs::write(path, bytes).unwrap();
    fs::File::open(path).unwrap().set_modified(modified).unwrap();
}

/// Destroys a copy of a structure, which is repaired without loss.
fn break_copy(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let at = if is_vhdx(path) { HEADERS[1] } else { 0 };
    bytes[at + 30..at + 50].fill(0xaa);
    replace(path, &bytes);
}

/// Makes the entry of block 3 lead beyond the end of the file.
fn break_entry(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    if is_vhdx(path) {
        put(&mut bytes, BAT + 24, &(1_u64 << 40 | 6).to_le_bytes());
    } else {
        let field = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        let entry = field(field(16) + 16) + 12;
        put(&mut bytes, entry, &0x0fff_0000_u32.to_be_bytes());
    }
    replace(path, &bytes);
}

fn is_vhdx(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "vhdx")
}

fn mend(path: &Path) -> Repaired {
    repair(path, &RepairOptions::default(), &mut |_, _| true).unwrap()
}

fn undo(path: &Path) -> Result<(), DiskError> {
    undo_repair(path, &RepairOptions::default()).map(drop)
}

fn each(test: impl Fn(&TempDir, PathBuf)) {
    for extension in ["vhd", "vhdx"] {
        let dir = tempfile::tempdir().unwrap();
        let path = made(dir.path(), extension);
        test(&dir, path);
    }
}

#[test]
fn an_undo_is_refused_after_any_write() {
    type Writer = fn(&Path) -> bool;
    let ours: Writer = |path| write(path, MIB as u64, 9).map(|()| true).unwrap();
    let qemu: Writer = |path| {
        let format = if is_vhdx(path) { "vhdx" } else { "vpc" };
        let ended = Command::new("qemu-io").args(["-f", format, "-c", "write -P 5 0 4096"]).arg(path).output();
        ended.is_ok_and(|ended| ended.status.success())
    };
    let dd: Writer = |path| {
        let seek = fs::metadata(path).unwrap().len() / 512 - 2;
        let to = [format!("of={}", path.display()), format!("seek={seek}")];
        let fixed = ["if=/dev/zero", "bs=512", "count=1", "conv=notrunc", "status=none"];
        Command::new("dd").args(fixed).args(to).status().unwrap().success()
    };
    for (name, writer) in [("our own", ours), ("qemu-io", qemu), ("dd", dd)] {
        each(|_, path| {
            break_copy(&path);
            let done = mend(&path);
            assert_eq!((done.after.worst() < Some(Severity::Leak), done.lost.len()), (true, 0), "{done:?}");
            if !writer(&path) {
                println!("skipped: {name} cannot be run");
                return;
            }
            let written = fs::read(&path).unwrap();
            let refused = undo(&path).unwrap_err();
            assert!(refused.to_string().contains("written to since"), "{name}: {refused}");
            assert!(fs::read(&path).unwrap() == written, "{name}: a refused undo has changed the file");
            assert!(done.undo_file.unwrap().exists());
        });
    }
}

#[test]
fn a_repair_is_planned_carried_out_and_undone() {
    each(|_, path| {
        let sound = read(&path);
        break_copy(&path);
        break_entry(&path);
        let damaged = fs::read(&path).unwrap();
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let loss = |dry_run| RepairOptions { accept_loss: true, dry_run, ..RepairOptions::default() };
        let planned = repair(&path, &loss(true), &mut |_, _| true).unwrap();
        assert!(fs::read(&path).unwrap() == damaged && planned.undo_file.is_none());
        assert!(planned.lost.len() == 1 && planned.lost[0] == (3 * MIB as u64..4 * MIB as u64), "{:?}", planned.lost);
        // Without consent the rest is repaired.
        let first = mend(&path);
        assert!(first.lost.is_empty() && first.after.worst() == Some(Severity::Corrupt), "{first:?}");
        let costly: Vec<_> = first.after.findings.iter().filter(|found| found.repair == Repair::CostsData).collect();
        assert_eq!(costly.len(), 1, "{:?}", first.after.findings);
        assert_eq!(costly[0].costs, Some(3 * MIB as u64..4 * MIB as u64));
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap() == modified, !is_vhdx(&path));
        let second = repair(&path, &loss(false), &mut |_, _| true).unwrap();
        assert_eq!((second.lost.clone(), second.after.worst() < Some(Severity::Leak)), (planned.lost, true));
        let mut expected = sound;
        expected[3 * MIB..4 * MIB].fill(0);
        assert!(read(&path) == expected);
        let after = mend(&path);
        assert!(after.steps.is_empty() && after.undo_file.is_none(), "{after:?}");
        let undos = [first.undo_file.unwrap(), second.undo_file.unwrap()];
        assert!(undos[1].to_string_lossy().ends_with(".undo.2"));
        undo(&path).unwrap();
        undo(&path).unwrap();
        assert!(fs::read(&path).unwrap() == damaged && !undos.iter().any(|undo| undo.exists()));
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), modified);
        assert_eq!(undo(&path).unwrap_err().code(), ErrorCode::InvalidInput);
    });
}

/// Gives an undo file another state.
fn set_state(undo: &Path, state: u32) {
    let mut bytes = fs::read(undo).unwrap();
    put(&mut bytes, 8, &state.to_le_bytes());
    put(&mut bytes, 12, &[0; 4]);
    let crc = crc32c(&bytes[..512]);
    put(&mut bytes, 12, &crc.to_le_bytes());
    fs::write(undo, bytes).unwrap();
}

#[test]
fn an_interrupted_repair_is_seen_and_put_back() {
    each(|_, path| {
        break_copy(&path);
        let damaged = fs::read(&path).unwrap();
        let undo_file = mend(&path).undo_file.unwrap();
        set_state(&undo_file, 2);
        let refused = write(&path, 0, 9).unwrap_err();
        assert!(refused.to_string().contains("was interrupted"), "{refused}");
        let files = Files::default();
        assert_eq!(interrupted_repair(&files, &path).len(), 1);
        assert_eq!(check(&path, &OpenOptions::default()).unwrap().warnings.len(), 1);
        let planned = RepairOptions { dry_run: true, ..RepairOptions::default() };
        assert!(repair(&path, &planned, &mut |_, _| true).is_err());
        let done = mend(&path);
        assert_eq!(done.rolled_back, Some(undo_file.clone()));
        assert!(done.after.worst() < Some(Severity::Leak) && undo_file.exists());
        // Killed again, and undone; a half of the old bytes is back already.
        set_state(&undo_file, 2);
        undo(&path).unwrap();
        assert!(fs::read(&path).unwrap() == damaged);
    });
}

#[test]
fn an_interrupted_repair_of_a_file_that_was_written_since_is_left_alone() {
    each(|_, path| {
        break_copy(&path);
        let undo_file = mend(&path).undo_file.unwrap();
        // Another program changes a table that the repair has changed too.
        let mut bytes = fs::read(&path).unwrap();
        let at = if is_vhdx(&path) { HEADERS[1] } else { 0 };
        bytes[at + 200] ^= 1;
        fs::write(&path, &bytes).unwrap();
        set_state(&undo_file, 2);
        let refused = undo(&path).unwrap_err();
        assert!(refused.to_string().contains("neither as before the repair nor as after it"), "{refused}");
        assert!(fs::read(&path).unwrap() == bytes);
    });
}

#[test]
fn hostile_undo_files_are_refused() {
    each(|dir, path| {
        break_copy(&path);
        break_entry(&path);
        let damaged = fs::read(&path).unwrap();
        let options = RepairOptions { accept_loss: true, ..RepairOptions::default() };
        let undo_file = repair(&path, &options, &mut |_, _| true).unwrap().undo_file.unwrap();
        let repaired = fs::read(&path).unwrap();
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let good = fs::read(&undo_file).unwrap();
        let step = (good.len() / 150).max(1);
        let places = (0..100).chain((512..560).step_by(3)).chain((100..good.len()).step_by(step));
        for at in places {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            fs::write(&undo_file, &bad).unwrap();
            match undo(&path) {
                Err(_) => assert!(fs::read(&path).unwrap() == repaired, "byte {at}: refused, but changed"),
                Ok(()) => {
                    // A byte that has no meaning.
                    assert!(fs::read(&path).unwrap() == damaged, "byte {at}");
                    fs::write(&path, &repaired).unwrap();
                }
            }
            fs::File::open(&path).unwrap().set_modified(modified).unwrap();
        }
        for len in [0, 1, 511, 512, 513, good.len() - 1] {
            fs::write(&undo_file, &good[..len]).unwrap();
            assert!(undo(&path).is_err() && fs::read(&path).unwrap() == repaired, "{len} bytes");
        }
        fs::write(&undo_file, &good).unwrap();
        // The undo file of another image.
        let other = dir.path().join("other").with_extension(path.extension().unwrap());
        fs::copy(&path, &other).unwrap();
        let options = RepairOptions { undo_file: Some(undo_file.clone()), ..RepairOptions::default() };
        let refused = undo_repair(&other, &options).unwrap_err();
        assert!(refused.to_string().contains("was written for another file"), "{refused}");
        // It is never written over.
        let exists = repair(&path, &options, &mut |_, _| true).unwrap_err();
        assert_eq!(exists.code(), ErrorCode::Exists, "{exists}");
        fs::write(&undo_file, "notes of mine").unwrap();
        assert!(repair(&path, &options, &mut |_, _| true).is_err());
        assert_eq!(fs::read(&undo_file).unwrap(), b"notes of mine");
    });
}

#[test]
fn children_stay_linked_unless_data_is_given_up() {
    each(|dir, path| {
        let child = dir.path().join("child").with_extension(path.extension().unwrap());
        let an_hour_ago = SystemTime::now() - Duration::from_secs(3600);
        fs::File::open(&path).unwrap().set_modified(an_hour_ago).unwrap();
        create(&child, &CreateRequest { parent: Some(path.clone()), ..CreateRequest::default() }).unwrap();
        write(&child, 5 * MIB as u64, 5).unwrap();
        let before = read(&child);
        break_copy(&path);
        let done = mend(&path);
        assert!(done.warnings.is_empty(), "{:?}", done.warnings);
        assert!(read(&child) == before);
        write(&child, 6 * MIB as u64, 6).unwrap();
        break_entry(&path);
        let options = RepairOptions { accept_loss: true, ..RepairOptions::default() };
        let done = repair(&path, &options, &mut |_, _| true).unwrap();
        assert!(done.warnings.len() == 1 && done.warnings[0].contains("child."), "{:?}", done.warnings);
        assert!(write(&child, 6 * MIB as u64, 6).is_err(), "the child notices that its parent has changed");
    });
}

#[test]
fn a_disk_in_use_is_not_repaired() {
    each(|_, path| {
        break_copy(&path);
        let damaged = fs::read(&path).unwrap();
        let open = Disk::open(&path, &OpenOptions::default()).unwrap();
        let refused = repair(&path, &RepairOptions::default(), &mut |_, _| true).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::Locked, "{refused}");
        drop(open);
        let stopped = repair(&path, &RepairOptions::default(), &mut |_, _| false).unwrap_err();
        assert_eq!(stopped.code(), ErrorCode::Stopped, "{stopped}");
        let undo_file = path.with_extension(format!("{}.undo", path.extension().unwrap().to_str().unwrap()));
        assert!(fs::read(&path).unwrap() == damaged && !undo_file.exists());
    });
}

#[test]
fn other_programs_read_what_was_repaired() {
    each(|dir, path| {
        let mut expected = read(&path);
        break_copy(&path);
        break_entry(&path);
        let options = RepairOptions { accept_loss: true, ..RepairOptions::default() };
        repair(&path, &options, &mut |_, _| true).unwrap();
        expected[3 * MIB..4 * MIB].fill(0);
        let raw = dir.path().join("out.raw");
        let format = if is_vhdx(&path) { "vhdx" } else { "vpc" };
        match Command::new("qemu-img").args(["convert", "-f", format, "-O", "raw"]).args([&path, &raw]).output() {
            Err(_) => println!("skipped: qemu-img is not installed"),
            Ok(ended) => {
                assert!(ended.status.success(), "{ended:?}");
                assert!(fs::read(&raw).unwrap() == expected);
            }
        }
        match Command::new("vhdiinfo").arg(&path).output() {
            Err(_) => println!("skipped: vhdiinfo is not installed"),
            Ok(ended) => assert!(ended.status.success(), "{ended:?}"),
        }
    });
}
