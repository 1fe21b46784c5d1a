//! Paths that are not regular files, files that exist already, files in use, and invalid parents.

use crate::damage::*;
use diskwright_disk::{ConvertOptions, CreateRequest, Disk, DiskError, OpenOptions, convert, create};
use diskwright_image::Format;
use std::{
    io::{BufRead, BufReader, Write},
    os::unix::{fs::symlink, net::UnixListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};
use tempfile::tempdir;

fn writable() -> OpenOptions {
    OpenOptions { writable: true, ..OpenOptions::default() }
}

fn refusal(path: &Path, options: &OpenOptions) -> String {
    match Disk::open(path, options) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => error.to_string(),
    }
}

fn assert_told(told: &str, words: &[&str]) {
    assert!(words.iter().all(|word| told.contains(word)), "{words:?} are not all in: {told}");
}

fn fifo(path: &Path) {
    nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
}

#[test]
fn files_of_other_types_are_refused_at_once() {
    let dir = tempdir().unwrap();
    let place = |name: &str| dir.path().join(name);
    fifo(&place("pipe.vhdx"));
    let _listener = UnixListener::bind(place("socket.vhd")).unwrap();
    std::fs::create_dir(place("folder.vhdx")).unwrap();
    symlink(place("two.vhd"), place("one.vhd")).unwrap();
    symlink(place("one.vhd"), place("two.vhd")).unwrap();
    symlink(place("pipe.vhdx"), place("to-pipe.vhd")).unwrap();
    for (path, words) in [
        (place("pipe.vhdx"), "a named pipe"),
        (place("to-pipe.vhd"), "a named pipe"),
        (place("socket.vhd"), "a socket"),
        (place("folder.vhdx"), "a directory"),
        (PathBuf::from("/dev/null"), "a character device"),
        (place("one.vhd"), "symbolic link"),
        (place("none.vhd"), "No such file"),
        (place("none/none.vhd"), "No such file"),
    ] {
        for options in [OpenOptions::default(), writable()] {
            assert_told(&refusal(&path, &options), &[path.to_str().unwrap(), words]);
        }
    }
}

#[test]
fn files_without_contents_are_refused() {
    let dir = tempdir().unwrap();
    for (name, bytes, words) in [
        ("empty.vhdx", vec![], "vhdxfile"),
        ("empty.vhd", vec![], "conectix"),
        ("empty.raw", vec![], "0 bytes"),
        ("empty", vec![], "0 bytes"),
        ("byte.vhdx", vec![1], "vhdxfile"),
        ("byte.vhd", vec![1], "conectix"),
        ("zeros.vhdx", vec![0; 4 * MIB], "vhdxfile"),
        ("zeros.vhd", vec![0; MIB], "conectix"),
        ("ones.avhdx", vec![0xff; MIB], "vhdxfile"),
        ("identifier.vhdx", b"vhdxfile".to_vec(), "520 bytes"),
        ("cookie.vhd", b"conectix".to_vec(), "conectix"),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, &bytes).unwrap();
        for options in [OpenOptions::default(), writable()] {
            assert_told(&refusal(&path, &options), &[path.to_str().unwrap(), words]);
        }
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "{name}");
    }
    // A raw disk of any length is valid.
    let path = dir.path().join("byte.raw");
    std::fs::write(&path, [1]).unwrap();
    read_all(&path, &OpenOptions::default()).unwrap();
}

#[test]
fn an_unknown_extension_creates_nothing_and_opens_by_its_signature() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("disk.xyz");
    let request = CreateRequest { size_bytes: Some(1 << 20), ..CreateRequest::default() };
    assert_told(&create(&path, &request).unwrap_err().to_string(), &["disk.xyz", ".xyz", "`CreateRequest::format`"]);
    assert!(!path.exists());
    create(&path, &CreateRequest { format: Some(Format::Vhdx), ..request }).unwrap();
    assert_eq!(Disk::open(&path, &OpenOptions::default()).unwrap().layers()[0].image.info().format, Format::Vhdx);
}

#[test]
fn an_existing_file_is_refused_and_kept() {
    let dir = tempdir().unwrap();
    let place = |name: &str| dir.path().join(name);
    let (source, dest, link) = (place("source.vhdx"), place("dest.vhdx"), place("link.vhdx"));
    let request = CreateRequest { size_bytes: Some(4 << 20), ..CreateRequest::default() };
    create(&source, &request).unwrap();
    let disk = std::fs::read(&source).unwrap();
    std::fs::write(&dest, "mine").unwrap();
    // A dangling link is found only when the copy is renamed.
    symlink(place("nowhere"), &link).unwrap();
    let options = ConvertOptions::default();
    for path in [&dest, &source, &link] {
        let told = format!("{}: file exists; nothing was changed", path.display());
        assert_told(&create(path, &request).unwrap_err().to_string(), &[&told]);
        assert_told(&convert(&source, path, &options, &mut |_, _| true).unwrap_err().to_string(), &[&told]);
    }
    // The file is created while the copy is written.
    let late = place("late.vhdx");
    let told = convert(&source, &late, &options, &mut |_, _| {
        std::fs::write(&late, "mine too").unwrap();
        true
    });
    assert_told(&told.unwrap_err().to_string(), &["late.vhdx: file exists"]);

    assert!(std::fs::read(&source).unwrap() == disk);
    assert_eq!((std::fs::read(&dest).unwrap(), std::fs::read(&late).unwrap()), (b"mine".into(), b"mine too".into()));
    assert_eq!(std::fs::read_link(&link).unwrap(), place("nowhere"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4, "no partial copy is left");
}

#[test]
fn invalid_sizes_create_nothing() {
    let dir = tempdir().unwrap();
    for (name, size_bytes, words) in [
        ("a.vhdx", 0, "0"),
        ("a.vhd", 0, "0"),
        ("a.raw", 0, "0"),
        ("a.vhdx", (64 << 40) + 512, "64 TiB"),
        ("a.vhd", (2040 << 30) + 512, "2190433320960"),
        ("a.vhdx", u64::MAX, "multiple"),
        ("a.vhd", u64::MAX - 511, "2190433320960"),
        ("a.vhdx", 1000, "multiple"),
        ("a.vhd", 1000, "multiple"),
    ] {
        let path = dir.path().join(name);
        let request = CreateRequest { size_bytes: Some(size_bytes), ..CreateRequest::default() };
        assert_told(&create(&path, &request).unwrap_err().to_string(), &[path.to_str().unwrap(), words]);
        assert!(!path.exists(), "{name} of {size_bytes}");
    }
}

/// A child of `parent.vhdx` (or `.vhd`) in a folder of its own.
fn pair(dir: &Path, extension: &str) -> (PathBuf, PathBuf) {
    let (parent, child) = (dir.join(format!("parent.{extension}")), dir.join(format!("child.{extension}")));
    create(&parent, &CreateRequest { size_bytes: Some(4 << 20), ..CreateRequest::default() }).unwrap();
    create(&child, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
    (parent, child)
}

#[test]
fn a_parent_that_is_not_a_disk_is_refused_with_its_child() {
    for extension in ["vhdx", "vhd"] {
        let dir = tempdir().unwrap();
        let (parent, child) = pair(dir.path(), extension);
        let as_it_was = std::fs::read(&child).unwrap();
        type Maker = fn(&Path);
        let makers: [(&str, Maker); 6] = [
            ("a named pipe", |path| fifo(path)),
            ("a directory", |path| std::fs::create_dir(path).unwrap()),
            ("lies outside", |path| symlink("/dev/null", path).unwrap()),
            ("another format", |path| std::fs::write(path, [0; 4096]).unwrap()),
            ("another format", |path| std::fs::write(path, []).unwrap()),
            ("not found", |path| symlink(path, path).unwrap()),
        ];
        for (words, make) in makers {
            if parent.is_dir() {
                std::fs::remove_dir(&parent).unwrap();
            } else {
                std::fs::remove_file(&parent).unwrap();
            }
            make(&parent);
            for options in [OpenOptions::default(), writable()] {
                assert_told(&refusal(&child, &options), &[child.to_str().unwrap(), words]);
            }
        }
        assert!(std::fs::read(&child).unwrap() == as_it_was);
    }
}

#[test]
fn a_disk_that_is_its_own_parent_is_a_loop_for_readers_and_writers() {
    for extension in ["vhdx", "vhd"] {
        let dir = tempdir().unwrap();
        let (parent, child) = pair(dir.path(), extension);
        for link in [std::fs::hard_link::<&Path, &Path>, |from, to| symlink(from, to)] {
            std::fs::remove_file(&parent).unwrap();
            link(&child, &parent).unwrap();
            let as_it_was = std::fs::read(&child).unwrap();
            for options in [OpenOptions::default(), writable()] {
                assert_told(&refusal(&child, &options), &[child.to_str().unwrap(), "loop"]);
            }
            assert!(std::fs::read(&child).unwrap() == as_it_was);
        }
    }
}

#[test]
fn a_loop_of_two_is_refused_to_readers_and_writers() {
    // Two children, each with the identity that the other expects. Copied ids make that possible in
    // VHD.
    let dir = tempdir().unwrap();
    let (parent, child) = pair(dir.path(), "vhd");
    let other = dir.path().join("other.vhd");
    create(&other, &CreateRequest { parent: Some(child.clone()), ..CreateRequest::default() }).unwrap();
    // `child` names `parent`. The file `parent` is replaced by `other`, with the id of `parent`,
    // and `other` names `child`.
    let mut bytes = std::fs::read(&other).unwrap();
    let id = std::fs::read(&parent).unwrap()[68..84].to_vec();
    in_footers(&mut bytes, 68, &id);
    std::fs::remove_file(&other).unwrap();
    std::fs::write(&parent, &bytes).unwrap();
    assert_told(&refusal(&child, &OpenOptions::default()), &["loop"]);
    // A writer gets the loop error, or an earlier one: the other file names this one as its parent.
    assert_told(&refusal(&child, &writable()), &["names this image as its parent"]);
    let insisting = OpenOptions { allow_parent_write: true, ..writable() };
    assert_told(&refusal(&child, &insisting), &["loop"]);
}

#[test]
fn a_disk_refused_because_of_its_parent_keeps_its_log() {
    let dir = tempdir().unwrap();
    let samples = samples(dir.path());
    let sample = samples.iter().find(|sample| sample.name == "diff.vhdx").unwrap();
    // The file as it is while open: its log is not empty.
    let disk = Disk::open(&sample.path, &writable()).unwrap();
    let mut io = diskwright_store::Blocking::open(&*disk, diskwright_store::EngineKind::Sync).unwrap();
    io.write(3 << 20, &[9; 512], true).unwrap();
    let open = std::fs::read(&sample.path).unwrap();
    drop(io);
    disk.close().unwrap();
    drop(disk);
    std::fs::write(&sample.path, &open).unwrap();
    std::fs::rename(dir.path().join("parent.vhdx"), dir.path().join("elsewhere.raw")).unwrap();
    assert_told(&refusal(&sample.path, &writable()), &["its parent was not found"]);
    assert!(std::fs::read(&sample.path).unwrap() == open, "a refused disk was changed");
    std::fs::rename(dir.path().join("elsewhere.raw"), dir.path().join("parent.vhdx")).unwrap();
    Disk::open(&sample.path, &writable()).unwrap().close().unwrap();
    let mut found = [0; 512];
    let disk = Disk::open(&sample.path, &OpenOptions::default()).unwrap();
    diskwright_store::Blocking::open(&*disk, diskwright_store::EngineKind::Sync)
        .unwrap()
        .read(3 << 20, &mut found)
        .unwrap();
    assert_eq!(found, [9; 512]);
}

#[test]
fn parent_and_child_must_have_the_same_sector_size() {
    let dir = tempdir().unwrap();
    let samples = samples(dir.path());
    let child = samples.iter().find(|sample| sample.name == "diff.vhdx").unwrap();
    let parent = dir.path().join("parent.vhdx");
    let mut bytes = std::fs::read(&parent).unwrap();
    put(&mut bytes, LOGICAL_SECTOR, &4096_u32.to_le_bytes());
    std::fs::write(&parent, &bytes).unwrap();
    assert_told(&refusal(&child.path, &OpenOptions::default()), &["diff.vhdx", "parent.vhdx", "4096", "512"]);
}

#[test]
fn a_truncated_parent_is_reported() {
    for name in ["diff.vhd", "diff.vhdx"] {
        let dir = tempdir().unwrap();
        let samples = samples(dir.path());
        let child = samples.iter().find(|sample| sample.name == name).unwrap();
        let parent = dir.path().join(if name == "diff.vhd" { "parent.vhd" } else { "parent.vhdx" });
        let modified = std::fs::metadata(&parent).unwrap().modified().unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&parent).unwrap();
        let len = file.metadata().unwrap().len();
        file.set_len(len / 2).unwrap();
        file.set_modified(modified).unwrap();
        // The child has no data that hides the parent.
        let options = OpenOptions::default();
        let told = read_all(&child.path, &options);
        let direct = read_all(&parent, &options).unwrap_err();
        assert_told(&direct, &[parent.to_str().unwrap(), "offset"]);
        assert!(told.as_ref().is_err_and(|told| told.contains(parent.to_str().unwrap())), "{told:?}");
    }
}

/// A process that has a file open. Killed on drop.
struct Holder(Child);

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `qemu-io` with the file open; `None`, and a message, if it is not installed.
fn qemu_io(path: &Path, format: &str, read_only: bool) -> Option<Holder> {
    let mut command = Command::new("qemu-io");
    command.args(["-f", format]).args(read_only.then_some("-r")).arg(path);
    let mut child = match command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) => {
            println!("skipped: qemu-io: {error}");
            return None;
        }
    };
    // qemu-io answers only after it has opened the file.
    child.stdin.as_mut().unwrap().write_all(b"length\n").unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(!line.is_empty(), "qemu-io has opened nothing");
    Some(Holder(child))
}

#[test]
fn the_process_that_has_locked_the_file_is_named() {
    for (name, format) in [("raw.raw", "raw"), ("dynamic.vhd", "vpc"), ("dynamic.vhdx", "vhdx")] {
        let dir = tempdir().unwrap();
        let samples = samples(dir.path());
        let sample = samples.iter().find(|sample| sample.name == name).unwrap();
        let Some(holder) = qemu_io(&sample.path, format, false) else { return };
        let pid = holder.0.id().to_string();
        let as_it_is = std::fs::read(&sample.path).unwrap();
        for options in [OpenOptions::default(), writable()] {
            let error = Disk::open(&sample.path, &options).unwrap_err();
            assert!(matches!(error, DiskError::InUse { .. }), "{error}");
            assert_told(
                &error.to_string(),
                &[sample.path.to_str().unwrap(), "qemu-io", &pid, "close the other program"],
            );
        }
        assert!(std::fs::read(&sample.path).unwrap() == as_it_is);
        drop(holder);
        // A reader permits other readers and excludes writers. For a raw file, however, qemu-io
        // also permits writers.
        if format == "raw" {
            continue;
        }
        let Some(holder) = qemu_io(&sample.path, format, true) else { return };
        Disk::open(&sample.path, &OpenOptions::default()).unwrap();
        assert_told(&refusal(&sample.path, &writable()), &["qemu-io", "in use"]);
        drop(holder);
        Disk::open(&sample.path, &writable()).unwrap();
    }
}

#[test]
fn a_parent_in_use_is_reported() {
    let dir = tempdir().unwrap();
    let (parent, child) = pair(dir.path(), "vhdx");
    let Some(_holder) = qemu_io(&parent, "vhdx", false) else { return };
    assert_told(&refusal(&child, &OpenOptions::default()), &[parent.to_str().unwrap(), "qemu-io", "in use"]);
}
