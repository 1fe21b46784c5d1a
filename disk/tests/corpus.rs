//! Real images of other programs: `shared/corpus` next to the checkout.
//!
//! The folder is searched in the parents of the checkout, or given by `DISKWRIGHT_CORPUS`.
//! `MANIFEST.tsv` has the hash of each image, its virtual size and the hash of its virtual disk.
//! `HOSTILE.tsv` lists damaged and malicious files. The tests check that every image of a supported
//! format reads as the manifest says, that every image of another format is refused by the name of
//! that format and does not change, and that every hostile file is refused and found corrupt by a
//! check, without memory sized by a header's claim. Without the folder, `xz` or `sha256sum` the
//! test is skipped with a message.

use diskwright_disk::{Disk, DiskError, OpenOptions};
use diskwright_image::{Format, Severity, probe};
use diskwright_store::{BlockDevice, Blocking, EngineKind, FileStore};
use std::{
    collections::HashMap,
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

/// Maximum growth of the process's peak memory by opening a hostile file.
const BYTES_MAX: u64 = 32 << 20;
/// Bytes of a disk read by one call.
const PIECE_BYTES: usize = 8 << 20;

fn corpus() -> Option<PathBuf> {
    if let Some(said) = env::var_os("DISKWRIGHT_CORPUS") {
        return Some(said.into());
    }
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR"));
    checkout.ancestors().map(|dir| dir.join("shared/corpus")).find(|dir| dir.join("MANIFEST.tsv").is_file())
}

/// The rows of a table, each as a map from column name to value.
fn rows(path: &Path) -> Vec<HashMap<String, String>> {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut lines = text.lines();
    let columns: Vec<&str> = lines.next().expect("a table has a head").split('\t').collect();
    let row = |line: &str| columns.iter().map(ToString::to_string).zip(line.split('\t').map(str::to_owned)).collect();
    lines.filter(|line| !line.is_empty()).map(row).collect()
}

fn unpack(packed: &Path, to: &Path) {
    let out = fs::File::create(to).unwrap();
    let status = Command::new("xz").arg("-dkc").arg(packed).stdout(out).status().unwrap();
    assert!(status.success(), "{}: xz failed", packed.display());
}

/// SHA-256 of what `feed` writes.
fn sha256(feed: impl FnOnce(&mut dyn Write)) -> String {
    // 12 GB are hashed. With the processor's SHA instructions openssl takes a fifth of the time of
    // sha256sum.
    let start = |command: &mut Command| command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = start(Command::new("openssl").args(["dgst", "-sha256", "-r"]))
        .or_else(|_| start(&mut Command::new("sha256sum")))
        .unwrap();
    feed(&mut child.stdin.take().unwrap());
    let output = child.wait_with_output().unwrap();
    String::from_utf8_lossy(&output.stdout).split_whitespace().next().unwrap_or_default().to_owned()
}

fn sha256_of_file(path: &Path) -> String {
    sha256(|out| {
        std::io::copy(&mut fs::File::open(path).unwrap(), out).unwrap();
    })
}

fn sha256_of_disk(disk: &Disk) -> String {
    let size_bytes = disk.geometry().size_bytes;
    let mut queue = Blocking::open(disk, EngineKind::Auto).unwrap();
    let mut piece = vec![0; PIECE_BYTES];
    sha256(|out| {
        for start in (0..size_bytes).step_by(PIECE_BYTES) {
            let len = (size_bytes - start).min(PIECE_BYTES as u64) as usize;
            queue.read(start, &mut piece[..len]).unwrap();
            out.write_all(&piece[..len]).unwrap();
        }
    })
}

/// Peak memory of this process in bytes.
fn memory_peak_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Whether images of this format are opened: the program's own list.
fn is_supported(format: &str) -> bool {
    Format::ALL.iter().any(|ours| ours.driver().name == format)
}

/// Opens for reading and for writing, and checks: all three must fail, or the check must find the
/// file corrupt, as `HOSTILE.tsv` demands of each of its files. Returns the errors. The file must
/// not change.
fn refusals(path: &Path) -> [String; 3] {
    let before = sha256_of_file(path);
    let refused = |writable| {
        let opened = Disk::open(path, &OpenOptions { writable, ..OpenOptions::default() });
        opened.map(drop).expect_err(&path.display().to_string()).to_string()
    };
    let store = Arc::new(FileStore::open(path, &diskwright_store::OpenOptions::default()).unwrap());
    let checked = match probe::check(store, None) {
        Err(error) => DiskError::from(error).to_string(),
        Ok((_, report)) => {
            assert_eq!(report.worst(), Some(Severity::Corrupt), "{}: {:?}", path.display(), report.findings);
            format!("check finds {:?}", report.findings)
        }
    };
    let told = [refused(false), refused(true), checked];
    assert_eq!(sha256_of_file(path), before, "{} was changed", path.display());
    told
}

// A single test, as the peak memory is that of the whole process.
#[test]
fn the_corpus_reads_as_its_manifest_says() {
    let Some(corpus) = corpus() else { return println!("skipped: no folder above the checkout has shared/corpus") };
    for program in ["xz", "sha256sum"] {
        if Command::new(program).arg("--version").stdout(Stdio::null()).status().is_err() {
            return println!("skipped: the corpus: {program} is not installed");
        }
    }
    let dir = tempfile::tempdir_in(env::var_os("CARGO_TARGET_TMPDIR").unwrap_or_else(|| "/tmp".into())).unwrap();

    for row in rows(&corpus.join("HOSTILE.tsv")) {
        let name = &row["name"];
        let format = row["format"].split_whitespace().next().unwrap();
        // Inputs of fuzzers may have no signature: only their extension makes them VHDs.
        let path = if format == "vhd" { dir.path().join(name).with_extension("vhd") } else { dir.path().join(name) };
        unpack(&corpus.join("hostile").join(format!("{name}.xz")), &path);
        assert_eq!(sha256_of_file(&path), row["file_sha256"], "{name}");
        let before = memory_peak_bytes();
        let told = refusals(&path);
        let taken = memory_peak_bytes() - before;
        assert!(taken < BYTES_MAX, "{name} took {taken} bytes of memory");
        println!("{name}: {}", told.join("\n    "));
        if !is_supported(format) {
            assert!(told[0].contains(&format!("{format} is not supported")), "{name}: {}", told[0]);
        }
    }

    let manifest = rows(&corpus.join("MANIFEST.tsv"));
    // The files of one image lie in one folder, under their own names.
    for row in &manifest {
        let path = dir.path().join(&row["name"]);
        unpack(&corpus.join(format!("{}.xz", row["name"])), &path);
        assert_eq!(sha256_of_file(&path), row["file_sha256"], "{}", row["name"]);
    }
    let (mut read, mut refused) = (0, 0);
    for row in &manifest {
        let (name, path) = (&row["name"], dir.path().join(&row["name"]));
        // The extent of a descriptor belongs to the image of that name.
        if row["format"].starts_with("extent/") {
            continue;
        }
        if !is_supported(row["format"].split('-').next().unwrap()) {
            let format = path.extension().unwrap().to_str().unwrap();
            for told in refusals(&path) {
                assert!(told.contains(&format!("{format} is not supported")), "{name}: {told}");
            }
            refused += 1;
            continue;
        }
        let disk = Disk::open(&path, &OpenOptions::default()).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(disk.geometry().size_bytes.to_string(), row["virtual_size"], "{name}");
        assert_eq!(sha256_of_disk(&disk), row["virtual_sha256"], "{name}");
        assert_eq!(
            disk.layers()[0].image.info().format.to_string(),
            row["format"].split('-').next().unwrap(),
            "{name}"
        );
        drop(disk);
        assert_eq!(sha256_of_file(&path), row["file_sha256"], "{name} was changed by reading");
        read += 1;
    }
    println!("{read} images read as the manifest says, {refused} refused by the name of their format");
    assert!(read > 0, "the manifest is empty");
}
