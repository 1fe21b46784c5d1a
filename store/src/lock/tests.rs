use super::*;
use crate::{CacheMode, FileStore, OpenError, OpenOptions};
use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

const IMAGE_BYTES: u64 = 1 << 20;

fn image(directory: &Path) -> PathBuf {
    let path = directory.join("image.raw");
    fs::File::create(&path).and_then(|file| file.set_len(IMAGE_BYTES)).expect("an image");
    path
}

/// As `image`, but a VHDX. Unlike other formats, QEMU opens raw files for reading while they have a
/// writer.
fn vhdx(directory: &Path) -> PathBuf {
    let path = directory.join("image.vhdx");
    let output = Command::new("qemu-img")
        .args(["create", "-q", "-f", "vhdx"])
        .arg(&path)
        .arg("8M")
        .output()
        .expect("qemu-img starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

fn open(path: &Path, lock: LockMode) -> Result<FileStore, OpenError> {
    FileStore::open(
        path,
        &OpenOptions { writable: lock == LockMode::Exclusive, create_new: false, cache: CacheMode::PageCache, lock },
    )
}

fn holder_of(path: &Path, lock: LockMode) -> Option<String> {
    match open(path, lock) {
        Ok(_) => None,
        Err(OpenError::Locked { holder, purpose, .. }) => {
            assert_eq!(purpose, if lock == LockMode::Exclusive { "writing" } else { "reading" });
            Some(holder)
        }
        Err(other) => panic!("{other}"),
    }
}

fn installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("skipped: {program} is not installed");
    }
    found
}

#[test]
fn readers_share_and_a_writer_excludes_all() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path());
    let (first, second) = (open(&path, LockMode::Shared).unwrap(), open(&path, LockMode::Shared).unwrap());
    assert_eq!(holder_of(&path, LockMode::Exclusive).as_deref(), Some(" by this program itself"));
    drop(first);
    assert!(holder_of(&path, LockMode::Exclusive).is_some());
    drop(second);
    let writer = open(&path, LockMode::Exclusive).unwrap();
    assert!(holder_of(&path, LockMode::Exclusive).is_some());
    assert!(holder_of(&path, LockMode::Shared).is_some());
    assert_eq!(holder_of(&path, LockMode::None), None);
    drop(writer);
    assert_eq!(holder_of(&path, LockMode::Exclusive), None);
    let refusal = {
        let _reader = open(&path, LockMode::Shared).unwrap();
        open(&path, LockMode::Exclusive).unwrap_err().to_string()
    };
    let expected = format!(
        "cannot open {} for writing: it is in use by this program itself. Stop that program or close the file, then try again",
        path.display()
    );
    assert_eq!(refusal, expected);
}

#[test]
fn a_refused_lock_leaves_nothing_locked() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path());
    let reader = open(&path, LockMode::Shared).unwrap();
    let candidate = open(&path, LockMode::None).unwrap();
    let fd = crate::Store::data_file(&candidate).unwrap().fd;
    assert!(matches!(acquire(fd, LockMode::Exclusive), Err(Refusal::Held)));
    // If the candidate's permissions were still locked, another reader would be refused.
    assert_eq!(holder_of(&path, LockMode::Shared), None);
    drop(reader);
}

/// A lock moves from a file that is open for reading to the same file, open for writing, and back.
#[test]
fn a_lock_is_replaced_and_a_refused_one_leaves_that_of_a_reader() {
    use crate::Store;
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path());
    let options = |lock| OpenOptions { writable: true, create_new: false, cache: CacheMode::PageCache, lock };
    let (reader, writer) =
        (open(&path, LockMode::Shared).unwrap(), FileStore::open(&path, &options(LockMode::Shared)).unwrap());
    assert!(writer.relock(LockMode::Exclusive).is_err(), "another reader is there");
    assert_eq!(holder_of(&path, LockMode::Shared), None, "a reader's lock is left");
    reader.relock(LockMode::None).unwrap();
    assert!(holder_of(&path, LockMode::Exclusive).is_some(), "a reader's lock is left");
    writer.relock(LockMode::Exclusive).unwrap();
    assert!(holder_of(&path, LockMode::Shared).is_some());
    assert!(reader.relock(LockMode::Shared).is_err());
    writer.relock(LockMode::Shared).unwrap();
    reader.relock(LockMode::Shared).unwrap();
    assert_eq!(holder_of(&path, LockMode::Shared), None);
    drop(writer);
    assert!(holder_of(&path, LockMode::Exclusive).is_some());
    drop(reader);
    assert_eq!(holder_of(&path, LockMode::Exclusive), None);
}

/// A qemu-io process that has a file open until it is dropped.
struct QemuIo(Child);

impl QemuIo {
    fn open(path: &Path, read_only: bool) -> Self {
        let mut command = Command::new("qemu-io");
        if read_only {
            command.arg("-r");
        }
        let mut child = command
            .args(["-f", if path.extension().is_some_and(|extension| extension == "vhdx") { "vhdx" } else { "raw" }])
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io starts");
        child.stdin.as_mut().unwrap().write_all(b"read 0 512\n").unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(said.any(|line| line.is_ok_and(|line| line.contains("512/512"))), "qemu-io did not read");
        Self(child)
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn files_open_in_qemu_are_refused() {
    if !installed("qemu-io") || !installed("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let raw = image(directory.path());
    let raw_writer = QemuIo::open(&raw, false);
    assert!(holder_of(&raw, LockMode::Exclusive).is_some());
    assert!(holder_of(&raw, LockMode::Shared).is_some());
    drop(raw_writer);
    let path = vhdx(directory.path());
    let writer = QemuIo::open(&path, false);
    let named = format!(" by qemu-io (process {})", writer.0.id());
    assert_eq!(holder_of(&path, LockMode::Exclusive), Some(named.clone()));
    assert_eq!(holder_of(&path, LockMode::Shared), Some(named));
    drop(writer);
    let reader = QemuIo::open(&path, true);
    assert_eq!(holder_of(&path, LockMode::Shared), None);
    assert_eq!(holder_of(&path, LockMode::Exclusive), Some(format!(" by qemu-io (process {})", reader.0.id())));
    drop(reader);
    assert_eq!(holder_of(&path, LockMode::Exclusive), None);
}

#[test]
fn qemu_refuses_files_that_we_have_open() {
    if !installed("qemu-io") || !installed("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (path, format) in [(vhdx(directory.path()), "vhdx"), (image(directory.path()), "raw")] {
        let run = |program: &str, arguments: &[&str]| {
            Command::new(program).args(arguments).args(["-f", format]).arg(&path).output().expect("qemu starts")
        };
        let refused = |output: std::process::Output| {
            let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
            assert!(said.contains("lock"), "{said}");
        };
        let writer = open(&path, LockMode::Exclusive).unwrap();
        if format == "vhdx" {
            refused(run("qemu-img", &["info"]));
        }
        refused(run("qemu-io", &["-c", "write 0 512"]));
        assert!(run("qemu-img", &["info", "-U"]).status.success(), "-U must read despite the lock");
        drop(writer);
        let reader = open(&path, LockMode::Shared).unwrap();
        assert!(run("qemu-img", &["info"]).status.success());
        assert!(run("qemu-io", &["-r", "-c", "read 0 512"]).status.success());
        refused(run("qemu-io", &["-c", "write 0 512"]));
        drop(reader);
        assert!(run("qemu-io", &["-c", "write 0 512"]).status.success());
    }
}

#[test]
fn a_reader_becomes_a_writer_unless_another_program_reads() {
    use crate::Store;
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path());
    let reader = open(&path, LockMode::Shared).unwrap();
    let other = open(&path, LockMode::Shared).unwrap();
    assert!(matches!(reader.relock(LockMode::Exclusive), Err(OpenError::Locked { purpose: "writing", .. })));
    // The refused one is a reader as before: others may read, and none may write.
    assert_eq!(holder_of(&path, LockMode::Shared), None);
    drop(other);
    assert!(holder_of(&path, LockMode::Exclusive).is_some());
    reader.relock(LockMode::Exclusive).unwrap();
    assert!(holder_of(&path, LockMode::Shared).is_some());
    // Another open file of the same program, without a lock, takes over.
    let next = open(&path, LockMode::None).unwrap();
    assert!(next.relock(LockMode::Shared).is_err(), "the writer is still there");
    reader.share_lock().unwrap();
    next.relock(LockMode::Shared).unwrap();
    drop(reader);
    assert_eq!(holder_of(&path, LockMode::Shared), None);
    assert!(holder_of(&path, LockMode::Exclusive).is_some());
    next.relock(LockMode::None).unwrap();
    assert_eq!(holder_of(&path, LockMode::Exclusive), None);
}
