//! Which files count as undo files: those of strangers, links, blank and stale ones do not, and an
//! interrupted repair is found whatever the next command names.

use crate::damage::{MIB, crc32c, put};
use diskwright_disk::{
    CreateRequest, Disk, DiskError, OpenOptions, RepairOptions, Repaired, create, interrupted_repair, repair,
    undo_repair,
};
use diskwright_image::Severity;
use diskwright_store::{
    Blocking, EngineKind, ErrorCode, FileSystem, Files, LocalFiles, OpenError, OpenOptions as StoreOptions, Store,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};
use tempfile::TempDir;

/// The length of the junk that is put before the footer.
const JUNK: usize = 64 << 10;

/// A VHD with data in its first block, whose footer copy is destroyed, and with junk before its
/// footer: its repair writes the copy and cuts the file. And its bytes.
fn damaged(dir: &TempDir, name: &str) -> (PathBuf, Vec<u8>) {
    let path = dir.path().join("disk.vhd");
    let size_bytes = Some(16 * MIB as u64);
    create(&path, &CreateRequest { size_bytes, block_bytes: Some(MIB as u32), ..CreateRequest::default() }).unwrap();
    let named = dir.path().join(name);
    fs::rename(&path, &named).unwrap();
    write(&named, &OpenOptions::default()).unwrap();
    break_it(&named);
    let bytes = fs::read(&named).unwrap();
    (named, bytes)
}

fn break_it(path: &Path) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    let mut bytes = fs::read(path).unwrap();
    let footer = bytes.split_off(bytes.len() - 512);
    bytes.resize(bytes.len() + JUNK, 0x5a);
    bytes.extend(footer);
    bytes[30..50].fill(0xaa);
    fs::write(path, bytes).unwrap();
    fs::File::open(path).unwrap().set_modified(modified).unwrap();
}

/// Writes to the disk. Returns the warnings of the open.
fn write(path: &Path, options: &OpenOptions) -> Result<Vec<String>, DiskError> {
    let disk = Disk::open(path, &OpenOptions { writable: true, ..options.clone() })?;
    let warnings = disk.warnings().to_vec();
    let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
    io.write(0, &[7; 4096], false).unwrap();
    drop(io);
    disk.close()?;
    Ok(warnings)
}

fn mend_with(path: &Path, options: &RepairOptions) -> Result<Repaired, DiskError> {
    repair(path, options, &mut |_, _| true)
}

fn mend(path: &Path) -> Repaired {
    mend_with(path, &RepairOptions::default()).unwrap()
}

fn undo(path: &Path) -> Result<Vec<String>, DiskError> {
    undo_repair(path, &RepairOptions::default()).map(|done| done.warnings)
}

fn named(undo: impl Into<PathBuf>) -> RepairOptions {
    RepairOptions { undo_file: Some(undo.into()), ..RepairOptions::default() }
}

/// Makes an undo file that of an interrupted repair.
fn arm(undo: &Path) {
    let mut bytes = fs::read(undo).unwrap();
    put(&mut bytes, 8, &2_u32.to_le_bytes());
    put(&mut bytes, 12, &[0; 4]);
    let crc = crc32c(&bytes[..512]);
    put(&mut bytes, 12, &crc.to_le_bytes());
    fs::write(undo, bytes).unwrap();
}

fn is_whole(done: &Repaired) -> bool {
    done.after.worst() < Some(Severity::Leak) && !done.steps.is_empty()
}

#[test]
fn an_interrupted_undo_is_finished_before_the_format_is_looked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (path, damaged) = damaged(&dir, "disk.vhd");
    let undo_file = mend(&path).undo_file.unwrap();
    // The file has its old length and its old copy of the footer, and not yet its old tail.
    arm(&undo_file);
    let mut half = fs::read(&path).unwrap();
    half.resize(damaged.len(), 0);
    half[..512].copy_from_slice(&damaged[..512]);
    fs::write(&path, &half).unwrap();
    assert!(Disk::open(&path, &OpenOptions::default()).is_err(), "nothing says that it is a VHD");
    let done = mend(&path);
    assert_eq!((done.rolled_back.as_ref(), is_whole(&done)), (Some(&undo_file), true), "{done:?}");
    undo(&path).unwrap();
    assert!(fs::read(&path).unwrap() == damaged && !undo_file.exists());
}

#[test]
fn a_blank_undo_file_is_replaced_and_no_other_one() {
    for len in [0, 1, 512, 700, 1 << 20] {
        for elsewhere in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let (path, damaged) = damaged(&dir, "disk.vhd");
            let undo_file = dir.path().join(if elsewhere { "other" } else { "disk.vhd.undo" });
            let options = if elsewhere { named(&undo_file) } else { RepairOptions::default() };
            fs::write(&undo_file, vec![0; len]).unwrap();
            assert!(undo_repair(&path, &options).is_err());
            let done = mend_with(&path, &options).unwrap();
            assert_eq!(done.undo_file.as_ref(), Some(&undo_file), "{len}: {done:?}");
            assert!(
                is_whole(&done) && done.warnings.iter().any(|warning| warning.contains("it was blank")),
                "{done:?}"
            );
            undo_repair(&path, &options).unwrap();
            assert!(fs::read(&path).unwrap() == damaged);
        }
    }
    // A file without a head, but with records: it may be that of an interrupted repair.
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = damaged(&dir, "disk.vhd");
    let first = mend(&path).undo_file.unwrap();
    let mut bytes = fs::read(&first).unwrap();
    bytes[..512].fill(0);
    fs::write(&first, &bytes).unwrap();
    break_it(&path);
    assert!(mend_with(&path, &named(&first)).is_err());
    assert!(mend(&path).undo_file.unwrap().ends_with("disk.vhd.undo.2"));
    assert!(fs::read(&first).unwrap() == bytes);
    // A long file of zeros is rather a disk.
    let disk = dir.path().join("blank.img");
    fs::File::create(&disk).unwrap().set_len(65 << 20).unwrap();
    break_it(&path);
    assert!(mend_with(&path, &named(&disk)).is_err());
    assert_eq!(fs::metadata(&disk).unwrap().len(), 65 << 20);
}

/// Files of which some calls are told otherwise.
#[derive(Debug, Clone, Default)]
struct Odd {
    /// The owner and the permissions that undo files have.
    of_undo: Option<(u32, u32)>,
    /// Whether the time of the image cannot be set.
    keeps_time: bool,
    /// Whether inode numbers change.
    makes_inodes_up: bool,
}

#[derive(Debug)]
struct OddStore {
    inner: Arc<dyn Store>,
    odd: Odd,
    is_undo: bool,
}

impl ForwardingStore for OddStore {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }
    fn set_modified(&self, modified: SystemTime) -> io::Result<()> {
        if self.odd.keeps_time {
            Err(io::ErrorKind::PermissionDenied.into())
        } else {
            self.inner.set_modified(modified)
        }
    }
    fn keeps_inode(&self) -> bool {
        !self.odd.makes_inodes_up
    }
    fn access_bits(&self) -> Option<(u32, u32, u32)> {
        let (owner, group, bits) = self.inner.access_bits()?;
        let (owner, bits) = self.odd.of_undo.filter(|_| self.is_undo).unwrap_or((owner, bits));
        Some((owner, group, bits))
    }
}

impl ForwardingFileSystem for Odd {
    fn open(&self, path: &Path, options: &StoreOptions) -> Result<Arc<dyn Store>, OpenError> {
        let is_undo = path.to_string_lossy().contains("undo");
        Ok(Arc::new(OddStore { inner: LocalFiles.open(path, options)?, odd: self.clone(), is_undo }))
    }
}

impl Odd {
    fn open(&self) -> OpenOptions {
        OpenOptions { files: Files::new(Arc::new(self.clone())), ..OpenOptions::default() }
    }

    fn repair(&self) -> RepairOptions {
        RepairOptions { open: self.open(), ..RepairOptions::default() }
    }
}

/// What a stranger's file does: nothing, but it is named.
fn is_ignored(path: &Path, undo_file: &Path, odd: &Odd) {
    let name = undo_file.to_str().unwrap();
    assert!(interrupted_repair(&odd.open().files, path).iter().all(|told| !told.contains("was interrupted")));
    let warnings = write(path, &odd.open()).unwrap();
    assert!(warnings.iter().any(|warning| warning.contains(name)), "{warnings:?}");
    break_it(path);
    let damaged = fs::read(path).unwrap();
    let done = mend_with(path, &odd.repair()).unwrap();
    assert!(done.rolled_back.is_none() && is_whole(&done), "{done:?}");
    assert!(done.warnings.iter().any(|warning| warning.contains(name)), "{done:?}");
    let repaired = fs::read(path).unwrap();
    let told = mend_with(path, &RepairOptions { undo_file: Some(undo_file.to_owned()), ..odd.repair() }).unwrap_err();
    assert!(told.to_string().contains("not used as an undo file"), "{told}");
    assert!(fs::read(path).unwrap() == repaired);
    fs::remove_file(done.undo_file.unwrap()).unwrap();
    let told = undo_repair(path, &odd.repair()).unwrap_err();
    assert!(told.to_string().contains(name) && fs::read(path).unwrap() == repaired, "{told}");
    assert!(undo_file.exists() && repaired != damaged);
}

#[test]
fn undo_files_of_strangers_are_named_and_ignored() {
    const STRANGER: u32 = 4_000_000;
    for of_undo in [(STRANGER, 0o600), (0, 0o666), (0, 0o620)] {
        let dir = tempfile::tempdir().unwrap();
        let (path, _) = damaged(&dir, "disk.vhd");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let undo_file = mend(&path).undo_file.unwrap();
        arm(&undo_file);
        let odd = Odd { of_undo: Some(of_undo), ..Odd::default() };
        is_ignored(&path, &undo_file, &odd);
    }
    // One that is not trusted by its name is used by who names it to undo a repair.
    let dir = tempfile::tempdir().unwrap();
    let (path, damaged) = damaged(&dir, "disk.vhd");
    let undo_file = mend(&path).undo_file.unwrap();
    let odd = Odd { of_undo: Some((STRANGER, 0o600)), ..Odd::default() };
    undo_repair(&path, &RepairOptions { undo_file: Some(undo_file), ..odd.repair() }).unwrap();
    assert!(fs::read(&path).unwrap() == damaged);
    // A stranger cannot use up the names.
    fs::rename(mend(&path).undo_file.unwrap(), dir.path().join("disk.vhd.undo.99")).unwrap();
    break_it(&path);
    let done = mend_with(&path, &odd.repair()).unwrap();
    assert!(done.undo_file.unwrap().ends_with("disk.vhd.undo"));
}

#[test]
fn a_link_with_the_name_of_an_undo_file_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = damaged(&dir, "disk.vhd");
    let made = mend(&path).undo_file.unwrap();
    arm(&made);
    let away = dir.path().join("away");
    fs::rename(&made, &away).unwrap();
    symlink(&away, &made).unwrap();
    let before = fs::read(&away).unwrap();
    write(&path, &OpenOptions::default()).unwrap();
    break_it(&path);
    let done = mend(&path);
    assert!(done.rolled_back.is_none() && done.undo_file.unwrap().ends_with("disk.vhd.undo.2"));
    assert!(mend_with(&path, &named(&made)).is_err());
    assert!(fs::read(&away).unwrap() == before);
}

#[test]
fn an_interrupted_repair_is_found_whatever_undo_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = damaged(&dir, "disk.vhd");
    let complete = dir.path().join("complete");
    mend_with(&path, &named(&complete)).unwrap();
    break_it(&path);
    let again = fs::read(&path).unwrap();
    let undo_file = mend(&path).undo_file.unwrap();
    arm(&undo_file);
    // The earlier repair is not undone below the later one.
    let told = undo_repair(&path, &named(&complete)).unwrap_err();
    assert_eq!(told.code(), ErrorCode::BadChain, "{told}");
    assert!(told.to_string().contains("was interrupted"), "{told}");
    let exists = mend_with(&path, &named(&complete)).unwrap_err();
    assert_eq!(exists.code(), ErrorCode::Exists, "{exists}");
    let other = dir.path().join("other");
    let done = mend_with(&path, &named(&other)).unwrap();
    assert_eq!((done.rolled_back.as_ref(), done.undo_file.as_ref()), (Some(&undo_file), Some(&other)));
    assert!(is_whole(&done) && !undo_file.exists(), "{done:?}");
    // A repair with that name that is interrupted too.
    arm(&other);
    let done = mend_with(&path, &named(&other)).unwrap();
    assert!(done.rolled_back.is_some() && is_whole(&done), "{done:?}");
    undo_repair(&path, &named(&other)).unwrap();
    assert!(fs::read(&path).unwrap() == again);
}

#[test]
fn an_interrupted_repair_is_found_by_any_of_the_names() {
    let dir = tempfile::tempdir().unwrap();
    let (path, damaged) = damaged(&dir, "disk.vhd");
    let made = mend(&path).undo_file.unwrap();
    arm(&made);
    for number in [2, 57, 99] {
        let name = dir.path().join(format!("disk.vhd.undo.{number}"));
        fs::rename(&made, &name).unwrap();
        let told = write(&path, &OpenOptions::default()).unwrap_err();
        assert!(told.to_string().contains("was interrupted"), "{number}: {told}");
        assert_eq!(
            mend_with(&path, &RepairOptions { dry_run: true, ..RepairOptions::default() }).unwrap_err().code(),
            ErrorCode::BadChain
        );
        fs::rename(&name, &made).unwrap();
    }
    // In a folder that cannot be listed as well, unless the test runs as root.
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o300)).unwrap();
    let told = write(&path, &OpenOptions::default()).unwrap_err();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
    assert!(told.to_string().contains("was interrupted"), "{told}");
    undo(&path).unwrap();
    assert!(fs::read(&path).unwrap() == damaged);
}

#[test]
fn an_undo_file_that_does_not_fit_the_image_any_more_does_not_block_it() {
    let told = "another program has written to the image since";
    for repairs in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (path, _) = damaged(&dir, "disk.vhd");
        let undo_file = mend(&path).undo_file.unwrap();
        arm(&undo_file);
        // Another program has replaced a structure that the repair has changed.
        let mut bytes = fs::read(&path).unwrap();
        bytes[300] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let warnings = if repairs {
            let done = mend(&path);
            assert!(done.rolled_back.is_none() && is_whole(&done) && undo_file.exists(), "{done:?}");
            done.warnings
        } else {
            write(&path, &OpenOptions::default()).unwrap()
        };
        assert!(warnings.iter().any(|warning| warning.contains(told)), "{warnings:?}");
    }
}

#[test]
fn a_time_that_cannot_be_set_back_is_told_with_the_children() {
    let dir = tempfile::tempdir().unwrap();
    let (path, damaged) = damaged(&dir, "disk.vhd");
    let done = mend(&path);
    assert!(done.warnings.is_empty(), "{done:?}");
    let child = dir.path().join("child.vhd");
    create(&child, &CreateRequest { parent: Some(path.clone()), ..CreateRequest::default() }).unwrap();
    undo(&path).unwrap();
    let odd = Odd { keeps_time: true, ..Odd::default() };
    let done = mend_with(&path, &odd.repair()).unwrap();
    let told = |what: &str| done.warnings.iter().any(|warning| warning.contains(what));
    assert!(is_whole(&done) && told("could not be set back") && told("child.vhd"), "{done:?}");
    let done = undo_repair(&path, &odd.repair()).unwrap();
    assert!(done.warnings.iter().any(|warning| warning.contains("could not be set back")), "{done:?}");
    assert!(fs::read(&path).unwrap() == damaged);
}

#[test]
fn where_inode_numbers_are_made_up_the_contents_decide() {
    let dir = tempfile::tempdir().unwrap();
    let (path, damaged) = damaged(&dir, "disk.vhd");
    let odd = Odd { makes_inodes_up: true, ..Odd::default() };
    // As after the next mount: the same file has another inode number.
    let renumber = || {
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let copy = dir.path().join("copy");
        fs::copy(&path, &copy).unwrap();
        fs::File::open(&copy).unwrap().set_modified(modified).unwrap();
        fs::rename(&copy, &path).unwrap();
    };
    let undo_file = mend_with(&path, &odd.repair()).unwrap().undo_file.unwrap();
    renumber();
    undo_repair(&path, &odd.repair()).unwrap();
    assert!(fs::read(&path).unwrap() == damaged);
    mend_with(&path, &odd.repair()).unwrap();
    arm(&undo_file);
    renumber();
    assert!(write(&path, &odd.open()).unwrap_err().to_string().contains("was interrupted"));
    // Another file of that name is not blocked.
    let mut bytes = fs::read(&path).unwrap();
    bytes[300] ^= 1;
    fs::write(&path, &bytes).unwrap();
    write(&path, &odd.open()).unwrap();
}
