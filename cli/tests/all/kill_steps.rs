//! `kill -9` of the commands of a disk's life, at each of their steps.
//!
//! ```text
//!   folder made once ─▶ strace counts the steps of the command ─▶ for each step: a copy of the
//!     folder ─▶ killed before the step ─▶ judged ─▶ the same command again ─▶ judged
//! ```
//!
//! A step is a call of the kernel that writes, syncs, or changes a name, a length or a time.
//! strace counts the calls of each kind, and kills the program before the n-th one is carried out.
//! Payload is written by pread and pwrite (`--io-engine pread`), so that strace sees it.
//!
//! A killed program keeps what it wrote in the page cache, so this is one state of those that
//! `proof/proving` tests by power cuts. What it adds is the real program, on a real file system.
//!
//! `DISKWRIGHT_KILL_STEPS` says how many steps of each command are tried, spread evenly over all of
//! them; 0 is all (`./test --nightly`).

use crate::{common::Workshop, killing::number};
use diskwright_disk::{Disk, OpenOptions, check};
use diskwright_image::Severity;
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

pub const MIB: usize = 1 << 20;
/// The calls that are steps.
const STEPS: [&str; 16] = [
    "fdatasync",
    "fsync",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "link",
    "linkat",
    "ftruncate",
    "fallocate",
    "utimensat",
    "pwrite64",
    "pwritev",
    "pwritev2",
    "copy_file_range",
];

/// The contents of a disk.
pub type Model = Vec<u8>;

/// A format, and the smallest blocks with which a small disk has several.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub extension: &'static str,
    block: &'static str,
}

pub const VHD: Kind = Kind { extension: "vhd", block: "16K" };
pub const VHDX: Kind = Kind { extension: "vhdx", block: "1M" };
pub const QCOW2: Kind = Kind { extension: "qcow2", block: "64K" };
pub const VMDK: Kind = Kind { extension: "vmdk", block: "64K" };
const KINDS: [Kind; 4] = [VHD, VHDX, QCOW2, VMDK];

/// The folder in which a command runs.
pub struct Place {
    pub shop: Workshop,
    /// Where the folder is made again for each step.
    copies: Workshop,
}

impl Place {
    fn new() -> Self {
        Self { shop: Workshop::in_memory(), copies: Workshop::in_memory() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.shop.path(name)
    }

    /// A copy of the folder, with the times of the files.
    fn copy(&self) -> PathBuf {
        let copy = self.copies.path("copy");
        let _ = fs::remove_dir_all(&copy);
        let copied = Command::new("cp").args(["-a", "--sparse=always"]).arg(self.shop.path("")).arg(&copy).status();
        assert!(copied.unwrap().success());
        copy
    }
}

/// Runs a test on each of these kinds, in a folder of its own.
pub fn for_each<T: Copy, const N: usize>(kinds: [T; N], test: &dyn Fn(&Place, T)) {
    if can_trace() {
        kinds.iter().for_each(|kind| test(&Place::new(), *kind));
    }
}

/// What the program prints in this folder.
pub fn printed(dir: &Path, line: &str) -> String {
    let output = program(None, dir, line).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// The program in a folder, ready to be started by `starter` or by itself.
fn program(starter: Option<&[&str]>, dir: &Path, line: &str) -> Command {
    let program = env!("CARGO_BIN_EXE_diskwright");
    let mut command = match starter {
        None => Command::new(program),
        Some(options) => {
            let mut command = Command::new("strace");
            command.args(["-f", "-qq"]).args(options).arg(program);
            command
        }
    };
    command.args(line.split(' ')).args(["--io-engine", "pread"]).current_dir(dir).stdin(Stdio::null());
    command
}

/// Runs the program under strace, without what it prints.
fn strace(dir: &Path, options: &[&str], line: &str) -> ExitStatus {
    program(Some(options), dir, line).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap()
}

/// The steps of a command: kinds of calls, and which call of its kind each is.
fn steps_of(dir: &Path, line: &str) -> Vec<(&'static str, usize)> {
    let log = dir.join(".trace");
    let ended = strace(dir, &["-o", log.to_str().unwrap(), "-e", &format!("trace={}", STEPS.join(","))], line);
    assert!(ended.success(), "{line}: {ended:?}");
    let text = fs::read_to_string(&log).unwrap();
    fs::remove_file(&log).unwrap();
    // strace counts the calls of each thread.
    let mut counts = BTreeMap::new();
    let mut steps = Vec::new();
    for line in text.lines() {
        let (thread, call) = line.split_once(' ').unwrap_or_default();
        let name = call.trim_start().split('(').next().unwrap_or_default();
        let Some(call) = STEPS.iter().find(|step| **step == name) else { continue };
        let count = counts.entry((thread, *call)).or_insert(0);
        *count += 1;
        if !steps.contains(&(*call, *count)) {
            steps.push((*call, *count));
        }
    }
    steps
}

/// Whether strace is there, and may trace; else a line says that the test is skipped.
fn can_trace() -> bool {
    let traced = Command::new("strace").args(["-f", "-qq", "-o", "/dev/null", "true"]).status();
    let can = traced.is_ok_and(|status| status.success());
    if !can {
        println!("skipped: kills of commands at each step: strace is not installed, or may not trace");
    }
    can
}

/// Kills the command at its steps, and finishes it by the same command. `judge` judges the folder
/// that is left, and returns whether the command has done its work.
pub fn kill_at_steps(place: &Place, command: &str, judge: &dyn Fn(&Path) -> bool) {
    let whole = place.copy();
    let steps = steps_of(&whole, command);
    assert!(judge(&whole), "{command}: a whole run has not done its work");
    let expected = names(&whole);
    assert!(steps.len() >= 3, "{command}: {steps:?}");
    let most = match number("DISKWRIGHT_KILL_STEPS", 10) as usize {
        0 => steps.len(),
        most => most.min(steps.len()),
    };
    let (mut kills, mut repeated) = (0, 0);
    for number in 0..most {
        let (call, nth) = steps[(2 * number + 1) * steps.len() / (2 * most)];
        let dir = place.copy();
        let (trace, inject) = (format!("trace={call}"), format!("inject={call}:signal=KILL:when={nth}"));
        let ended = strace(&dir, &["-o", "/dev/null", "-e", &trace, "-e", &inject], command);
        let at = format!("{command}, killed before {call} {nth} of {steps:?}");
        // Threads share the work in another way each time.
        let is_killed = ended.signal() == Some(9);
        assert!(is_killed || ended.success(), "{at}: {ended:?}");
        kills += usize::from(is_killed);
        let is_done = judge(&dir);
        if !is_done {
            let again = program(None, &dir, command).output().unwrap();
            let told = String::from_utf8_lossy(&again.stderr);
            assert!(again.status.success(), "{at}: the same command again: {told}");
            assert!(judge(&dir), "{at}: the same command again has not done its work");
            assert_eq!(names(&dir), expected, "{at}: what the same command again has left");
            repeated += 1;
        }
    }
    assert!(kills * 2 >= most, "{command}: strace has killed it {kills} times in {most} runs");
    println!("kills at steps: {command}: {kills} of {} steps, {repeated} finished by the same command", steps.len());
}

fn names(dir: &Path) -> BTreeSet<PathBuf> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            names.extend(self::names(&path).iter().map(|name| Path::new(path.file_name().unwrap()).join(name)));
        } else {
            names.insert(path.file_name().unwrap().into());
        }
    }
    names
}

pub fn options(writable: bool) -> OpenOptions {
    OpenOptions { writable, engine: EngineKind::Sync, ..OpenOptions::default() }
}

/// The disk is sound, and has these contents.
pub fn assert_holds(path: &Path, model: &[u8]) {
    let shown = path.display();
    let checked = check(path, &options(false)).unwrap_or_else(|error| panic!("{shown}: {error}"));
    assert!(checked.report.worst() < Some(Severity::Corrupt), "{shown}: {:?}", checked.report.findings);
    assert!(checked.broken_link.is_none(), "{shown}: {:?}", checked.broken_link);
    assert_reads(path, model);
}

/// The disk has these contents, and zeros behind them.
pub fn assert_reads(path: &Path, model: &[u8]) {
    let shown = path.display();
    let disk = Disk::open(path, &options(false)).unwrap_or_else(|error| panic!("{shown}: {error}"));
    let size_bytes = disk.geometry().size_bytes as usize;
    let mut found = vec![0xee; size_bytes];
    Blocking::open(&*disk, EngineKind::Sync).unwrap().read(0, &mut found).unwrap();
    // Comparing slices is fast also without optimisation.
    let mut wanted = model.to_vec();
    wanted.resize(size_bytes, 0);
    let differs = || found.iter().zip(&wanted).position(|(found, wanted)| found != wanted);
    assert!(size_bytes >= model.len(), "{shown}: it has {size_bytes} bytes");
    assert!(found == wanted, "{shown}: differs at {:?}", differs());
}

pub fn assert_can_be_written(path: &Path) {
    let disk = Disk::open(path, &options(true)).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    disk.close().unwrap();
}

/// Makes an image of 4 MiB.
pub fn make(place: &Place, kind: Kind, name: &str) -> String {
    let file = format!("{name}.{}", kind.extension);
    let block = if kind.extension == "vmdk" { String::new() } else { format!(" --block-size {}", kind.block) };
    place.shop.ok(&format!("create {file} --size 4M{block}"));
    file
}

pub fn make_child(place: &Place, kind: Kind, name: &str, parent: &str) -> String {
    let file = format!("{name}.{}", kind.extension);
    place.shop.ok(&format!("create {file} --parent {parent}"));
    file
}

/// Writes one byte over ranges of a disk, and of its model.
pub fn write(place: &Place, file: &str, model: &mut Model, byte: u8, ranges: &[(usize, usize)]) {
    model.resize(4 * MIB, 0);
    let disk = Disk::open(place.path(file), &options(true)).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
    for &(at, len) in ranges {
        model[at..at + len].fill(byte);
        io.write(at as u64, &model[at..at + len], false).unwrap();
    }
    drop(io);
    disk.close().unwrap();
}

pub const K: usize = 1 << 10;

/// base ◀─ a ◀─ b ◀─ c. Returns the model of each.
pub fn chain(place: &Place, kind: Kind) -> [Model; 4] {
    let base = make(place, kind, "base");
    let mut model = Model::new();
    write(place, &base, &mut model, 1, &[(0, 100 * K), (MIB, 300 * K), (3 * MIB, 40 * K)]);
    let of_base = model.clone();
    let a = make_child(place, kind, "a", &base);
    write(place, &a, &mut model, 2, &[(50 * K, 100 * K), (2 * MIB, 64 * K)]);
    let of_a = model.clone();
    let b = make_child(place, kind, "b", &a);
    write(place, &b, &mut model, 3, &[(90 * K, 5 * K), (3 * MIB + 512, 80 * K)]);
    let of_b = model.clone();
    let c = make_child(place, kind, "c", &b);
    write(place, &c, &mut model, 4, &[(0, 512)]);
    [of_base, of_a, of_b, model]
}

#[test]
fn merge_of_two_levels() {
    for_each(KINDS, &|place, kind| {
        let [_, _, of_b, of_c] = chain(place, kind);
        let file = |name: &str| format!("{name}.{}", kind.extension);
        for keep in ["", " --keep-name"] {
            let judge = |dir: &Path| {
                let [base, a, b, c] = ["base", "a", "b", "c"].map(|name| dir.join(file(name)));
                assert_holds(&c, &of_c);
                assert_holds(if b.exists() { &b } else { &base }, &of_b);
                assert_can_be_written(&c);
                let last = if keep.is_empty() { &b } else { &base };
                !a.exists() && !last.exists()
            };
            kill_at_steps(place, &format!("merge {} --into {}{keep}", file("b"), file("base")), &judge);
        }
    });
}

#[test]
fn compact() {
    for_each(KINDS, &|place, kind| {
        let file = make(place, kind, "disk");
        let mut model = Model::new();
        write(place, &file, &mut model, 1, &[(0, MIB)]);
        write(place, &file, &mut model, 2, &[(MIB, 2 * MIB)]);
        write(place, &file, &mut model, 0, &[(0, 2 * MIB)]);
        let before_bytes = place.path(&file).metadata().unwrap().len();
        let judge = |dir: &Path| {
            assert_holds(&dir.join(&file), &model);
            dir.join(&file).metadata().unwrap().len() + MIB as u64 <= before_bytes
        };
        kill_at_steps(place, &format!("compact {file}"), &judge);
    });
}

#[test]
fn move_to_another_folder_and_format() {
    for_each(
        [(VHD, "vhdx"), (VHDX, "qcow2"), (QCOW2, "vmdk"), (VMDK, "vhd"), (VHDX, "vhdx")],
        &|place, (kind, other)| {
            let file = make(place, kind, "disk");
            let mut model = Model::new();
            write(place, &file, &mut model, 1, &[(0, MIB), (2 * MIB, 100 * K)]);
            fs::create_dir(place.path("new")).unwrap();
            let to = format!("new/disk.{other}");
            let judge = |dir: &Path| {
                let [from, to] = [&file, &to].map(|name| dir.join(name));
                let found =
                    [&from, &to].into_iter().filter(|path| path.exists()).inspect(|path| assert_holds(path, &model));
                assert!(found.count() > 0, "the disk is gone");
                !from.exists()
            };
            kill_at_steps(place, &format!("move {file} {to}"), &judge);
        },
    );
}

#[test]
fn convert() {
    for_each([(VHD, "vhdx"), (VHDX, "vhd"), (VMDK, "qcow2"), (QCOW2, "raw")], &|place, (kind, other)| {
        let file = make(place, kind, "disk");
        let mut model = Model::new();
        write(place, &file, &mut model, 1, &[(0, MIB), (2 * MIB, 100 * K)]);
        let to = format!("copy.{other}");
        let judge = |dir: &Path| {
            assert_holds(&dir.join(&file), &model);
            let is_there = dir.join(&to).exists();
            if is_there {
                assert_holds(&dir.join(&to), &model);
            }
            is_there
        };
        // The folder is in memory, which may have no direct I/O.
        kill_at_steps(place, &format!("convert {file} {to} --cache page"), &judge);
    });
}

#[test]
fn clone() {
    for_each(KINDS, &|place, kind| {
        let file = make(place, kind, "disk");
        let mut model = Model::new();
        write(place, &file, &mut model, 1, &[(0, MIB)]);
        let clones = ["one", "two", "three"].map(|name| format!("{name}.{}", kind.extension));
        let judge = |dir: &Path| {
            assert_holds(&dir.join(&file), &model);
            let made = clones.iter().map(|clone| dir.join(clone)).filter(|clone| clone.exists());
            made.inspect(|clone| assert_holds(clone, &model)).count() == clones.len()
        };
        kill_at_steps(place, &format!("clone {file} {}", clones.join(" ")), &judge);
    });
}

#[test]
fn snapshot_and_revert() {
    for_each(KINDS, &|place, kind| {
        let file = make(place, kind, "disk");
        let (mut model, mut later) = (Model::new(), Model::new());
        write(place, &file, &mut model, 1, &[(0, MIB)]);
        let frozen = |name: &str| {
            let extension = match kind.extension {
                "vhd" => "avhd",
                "vhdx" => "avhdx",
                other => other,
            };
            format!("disk_{name}.{extension}")
        };
        let snapshot = |dir: &Path| {
            assert_holds(&dir.join(&file), &model);
            assert_can_be_written(&dir.join(&file));
            is_other_file(&dir.join(frozen("one")), &dir.join(&file))
        };
        kill_at_steps(place, &format!("snapshot {file} --name one"), &snapshot);

        place.shop.ok(&format!("snapshot {file} --name one"));
        later.clone_from(&model);
        write(place, &file, &mut later, 2, &[(512 * K, MIB)]);
        let revert = |dir: &Path| {
            let is_done = is_other_file(&dir.join(frozen("two")), &dir.join(&file));
            assert_holds(&dir.join(&file), if is_done { &model } else { &later });
            assert_holds(&dir.join(frozen("one")), &model);
            if is_done {
                assert_holds(&dir.join(frozen("two")), &later);
            }
            is_done
        };
        kill_at_steps(place, &format!("snapshot revert {file} --name two"), &revert);
    });
}

/// Whether both are there, and are not two names of one file.
fn is_other_file(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let inode = |path: &Path| path.metadata().ok().map(|found| found.ino());
    inode(one).is_some() && inode(one) != inode(other)
}

/// The only child of a snapshot is merged into it, and keeps its name.
#[test]
fn snapshot_delete() {
    for_each(KINDS, &|place, kind| {
        let [_, _, of_b, of_c] = chain(place, kind);
        let file = |name: &str| format!("{name}.{}", kind.extension);
        // The name of `b` is that of the merged image then.
        let judge = |dir: &Path| {
            assert_holds(&dir.join(file("b")), &of_b);
            assert_holds(&dir.join(file("c")), &of_c);
            assert_can_be_written(&dir.join(file("c")));
            !dir.join(file("a")).exists()
        };
        kill_at_steps(place, &format!("snapshot delete {}", file("a")), &judge);
    });
}

#[test]
fn resize() {
    for_each(KINDS, &|place, kind| {
        let file = make(place, kind, "disk");
        let mut model = Model::new();
        write(place, &file, &mut model, 1, &[(0, MIB), (4 * MIB - 64 * K, 64 * K)]);
        let judge = |dir: &Path| {
            let path = dir.join(&file);
            assert_holds(&path, &model);
            let size_bytes = Disk::open(&path, &options(false)).unwrap().geometry().size_bytes;
            assert!([4, 16].contains(&(size_bytes >> 20)), "{size_bytes}");
            size_bytes == 16 << 20
        };
        kill_at_steps(place, &format!("resize {file} 16M"), &judge);
    });
}
