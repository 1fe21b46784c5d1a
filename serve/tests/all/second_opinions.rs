//! Other projects' clients: libnbd's programs, qemu's, fio. A program that is not installed is
//! skipped by name.

use crate::common::{Served, serve};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_serve::net::ServerOptions;
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Arc,
};

const MIB: u64 = 1 << 20;

/// Runs a program. Prints that it is skipped and returns `None` if it is not installed.
fn program(name: &str, args: &[&str]) -> Option<Output> {
    // Not in this folder: it has a file that Python would import as a module.
    match Command::new(name).args(args).current_dir("/").output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: {name} is not installed");
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

/// The output of a program, which must succeed.
fn said(name: &str, args: &[&str]) -> Option<String> {
    let output = program(name, args)?;
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name} {args:?}: {said}");
    Some(said)
}

/// A dynamic VHDX of 64 MiB with some bytes at 3 and 40 MiB.
fn disk(dir: &Path) -> (PathBuf, Arc<Disk>) {
    let path = dir.join("disk.vhdx");
    create(&path, &CreateRequest { size_bytes: Some(64 * MIB), ..CreateRequest::default() }).unwrap();
    let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let mut io = Blocking::open(disk.as_ref(), EngineKind::Auto).unwrap();
    for at in [3 * MIB, 40 * MIB] {
        let bytes: Vec<u8> = (0..MIB).map(|n| (n * 31 + at / MIB) as u8 ^ (n >> 8) as u8).collect();
        io.write(at, &bytes, true).unwrap();
    }
    drop(io);
    (path, disk)
}

fn served(dir: &Path) -> Option<(PathBuf, Arc<Disk>, Served)> {
    let (path, disk) = disk(dir);
    let served = serve(vec![("disk", Arc::clone(&disk) as Arc<dyn BlockDevice>)], ServerOptions::default())?;
    Some((path, disk, served))
}

fn contents(disk: &Disk) -> Vec<u8> {
    let mut bytes = vec![0; disk.geometry().size_bytes as usize];
    Blocking::open(disk, EngineKind::Auto).unwrap().read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn nbdinfo_lists_the_export_and_its_features() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_, _, served)) = served(dir.path()) else { return };
    let Some(list) = said("nbdinfo", &["--list", &served.uri("")]) else { return };
    for words in ["export=\"disk\"", "description: disk disk", "export-size: 67108864", "can_multi_conn: true"] {
        assert!(list.contains(words), "{words}\n{list}");
    }
    for words in ["can_df: true", "can_fast_zero: true", "can_trim: true", "can_fua: true", "can_cache: true"] {
        assert!(list.contains(words), "{words}\n{list}");
    }
    for words in ["block_size_minimum: 512", "block_size_maximum: 33554432", "qemu:allocation-depth"] {
        assert!(list.contains(words), "{words}\n{list}");
    }
    let map = said("nbdinfo", &["--map", &served.uri("disk")]).unwrap();
    let runs: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
    // Blocks of 2 MiB.
    let expected = [["0", "2097152", "3"], ["2097152", "2097152", "0"], ["4194304", "37748736", "3"]];
    assert_eq!(runs[..3], expected, "{map}");
    let depths = said("nbdinfo", &["--map=qemu:allocation-depth", &served.uri("disk")]).unwrap();
    let second = depths.lines().nth(1).map(|line| line.split_whitespace().nth(2));
    assert_eq!(second, Some(Some("1")), "{depths}");
}

#[test]
fn nbdcopy_copies_out_and_in() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_, disk, served)) = served(dir.path()) else { return };
    let copy = dir.path().join("copy.raw");
    let Some(_) = said("nbdcopy", &[&served.uri("disk"), copy.to_str().unwrap()]) else { return };
    let mut bytes = std::fs::read(&copy).unwrap();
    assert!(bytes == contents(&disk));
    bytes[20 << 20..(20 << 20) + 100_000].fill(0xab);
    std::fs::write(&copy, &bytes).unwrap();
    said("nbdcopy", &["--flush", copy.to_str().unwrap(), &served.uri("disk")]).unwrap();
    assert!(bytes == contents(&disk));
}

#[test]
fn nbdsh_uses_rare_commands_and_flags() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_, disk, served)) = served(dir.path()) else { return };
    let script = r#"
import sys
try:
    import nbd
    nbd.NBD
except (ImportError, AttributeError):
    print("skipped: python3-libnbd is not installed")
    sys.exit(0)
for structured in (True, False):
    h = nbd.NBD()
    h.set_request_structured_replies(structured)
    h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    h.connect_uri(sys.argv[1])
    assert h.get_structured_replies_negotiated() == structured
    h.pwrite(b"x" * 4096, 8 << 20, nbd.CMD_FLAG_FUA)
    assert h.pread(4096, 8 << 20) == b"x" * 4096
    h.zero(4096, 8 << 20, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FAST_ZERO)
    assert h.pread(4096, 8 << 20) == bytes(4096)
    h.trim(2 << 20, 8 << 20)
    h.cache(1 << 20, 3 << 20)
    h.flush()
    if structured:
        def data(buf, offset, status, error):
            assert status == nbd.READ_DATA
        h.pread_structured(1 << 20, 3 << 20, data, nbd.CMD_FLAG_DF)
        runs = []
        h.block_status(64 << 20, 0, lambda context, offset, entries, error: runs.append((context, entries)))
        assert runs[0][0] == "base:allocation" and sum(runs[0][1][::2]) == 64 << 20, runs
        h.block_status(64 << 20, 0, lambda context, offset, entries, error: runs.append((context, entries)), nbd.CMD_FLAG_REQ_ONE)
        assert len(runs[1][1]) == 2, runs
    h.set_strict_mode(0)
    for wrong in (lambda: h.pread(512, 64 << 20), lambda: h.pread(513, 0), lambda: h.pwrite(b"x" * 512, 64 << 20)):
        try:
            wrong()
            sys.exit("an invalid request was not refused")
        except nbd.Error as error:
            assert error.errno in ("EINVAL", "ENOSPC"), error.errno
    assert h.pread(512, 0) == bytes(512)
    h.shutdown()
print("done")
"#;
    let before = contents(&disk);
    let Some(text) = said("/usr/bin/python3", &["-c", script, &served.uri("disk")]) else { return };
    if text.contains("skipped:") {
        return println!("{}", text.trim());
    }
    assert!(text.ends_with("done\n"), "{text}");
    assert!(contents(&disk) == before, "the script leaves the disk as it was");
}

#[test]
fn qemu_reads_writes_and_maps() {
    let dir = tempfile::tempdir().unwrap();
    let Some((path, disk, mut served)) = served(dir.path()) else { return };
    let uri = served.uri("disk");
    let Some(info) = said("qemu-img", &["info", &uri]) else { return };
    assert!(info.contains("64 MiB"), "{info}");
    let map = said("qemu-img", &["map", "--output=json", &uri]).unwrap();
    assert!(
        map.contains(
            "\"start\": 2097152, \"length\": 2097152, \"depth\": 0, \"present\": true, \"zero\": false, \"data\": true"
        ),
        "{map}"
    );
    let copy = dir.path().join("copy.qcow2");
    said("qemu-img", &["convert", "-O", "qcow2", &uri, copy.to_str().unwrap()]).unwrap();
    said("qemu-img", &["compare", &uri, copy.to_str().unwrap()]).unwrap();
    let io = said(
        "qemu-io",
        &[
            "-f",
            "raw",
            "-c",
            "write -P 0x5a 10M 3M",
            "-c",
            "write -z -u 11M 1M",
            "-c",
            "discard 12M 64k",
            "-c",
            "flush",
            "-c",
            "read -P 0x5a 10M 1M",
            "-c",
            "read -P 0 11M 1M",
            "-c",
            "read -P 0 12M 64k",
            &uri,
        ],
    )
    .unwrap();
    assert!(!io.contains("failed"), "{io}");
    said("qemu-img", &["convert", "-n", "-f", "qcow2", "-O", "raw", copy.to_str().unwrap(), &uri]).unwrap();
    said("qemu-img", &["compare", &uri, copy.to_str().unwrap()]).unwrap();
    served.stop().unwrap();
    disk.close().unwrap();
    drop(disk);
    said("qemu-img", &["compare", "-f", "vhdx", path.to_str().unwrap(), copy.to_str().unwrap()]).unwrap();
}

#[test]
fn fio_verifies_what_it_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_, _, served)) = served(dir.path()) else { return };
    let uri = format!("--uri={}", served.uri("disk"));
    let log = format!("--aux-path={}", dir.path().display());
    for (depth, pattern) in [("1", "randrw"), ("8", "randwrite"), ("32", "write")] {
        let depth = format!("--iodepth={depth}");
        let pattern = format!("--rw={pattern}");
        let args = [
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--size=16m",
            "--bsrange=4k-64k",
            &pattern,
            &depth,
            "--verify=crc32c",
            "--verify_fatal=1",
            "--do_verify=1",
            "--randseed=7",
            &log,
        ];
        let Some(output) = program("fio", &args) else { return };
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if said.contains("engine nbd not loadable") {
            return println!("skipped: this fio has no nbd engine");
        }
        assert!(output.status.success() && said.contains("err= 0"), "{said}");
    }
}
