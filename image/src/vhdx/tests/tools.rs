//! Comparison with qemu-img, qemu-io and vhdiinfo. Each test prints that it was skipped if its tool
//! is not installed.

use super::*;
use crate::vhdx::check;
use std::process::{Command, Output};
use tempfile::TempDir;

/// Runs a tool, or prints the name of a missing tool.
fn tool(name: &str, arguments: &[&str]) -> Option<Output> {
    match Command::new(name).args(arguments).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            eprintln!("skipped: {name} is not installed");
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

fn succeeded(output: &Output) -> String {
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && !text.contains("Pattern verification failed"), "{text}");
    text
}

fn path_of(folder: &TempDir, name: &str) -> String {
    folder.path().join(name).to_str().unwrap().to_owned()
}

fn load(path: &str) -> Arc<TestStore> {
    let mut contents = Contents::default();
    let bytes = std::fs::read(path).unwrap();
    for (index, page) in bytes.chunks(4096).enumerate() {
        if page.iter().any(|&byte| byte != 0) {
            contents.write(page, 4096 * index as u64);
        }
    }
    contents.set_len(bytes.len() as u64);
    TestStore::new(contents)
}

#[test]
fn qemu_reads_what_we_write() {
    for disk_type in [DiskType::Dynamic, DiskType::Fixed] {
        let folder = TempDir::new().unwrap();
        let path = path_of(&folder, "ours.vhdx");
        let store = Driver::create(&options(disk_type, 10 * MIB, MIB as u32));
        let driver = Driver::open(&store, true);
        driver.write(9, 3, 0x41).unwrap();
        driver.write(2048 * 7, 2048, 0x42).unwrap();
        driver.writer().close().unwrap();
        store.contents().save(Path::new(&path));
        let Some(info) = tool("qemu-img", &["info", "--output=json", &path]) else { return };
        let info = succeeded(&info);
        assert!(
            info.contains("\"format\": \"vhdx\"") && info.contains(&format!("\"virtual-size\": {}", 10 * MIB)),
            "{info}"
        );
        assert!(succeeded(&tool("qemu-img", &["check", &path]).unwrap()).contains("No errors"));
        let reads = [
            "read -P 0 0 4608",
            "read -P 0x41 4608 1536",
            "read -P 0 6144 4096",
            "read -P 0x42 7M 1M",
            "read -P 0 8M 2M",
        ];
        let arguments: Vec<&str> = ["-r", "-f", "vhdx"]
            .into_iter()
            .chain(reads.iter().flat_map(|read| ["-c", read]))
            .chain([&path[..]])
            .collect();
        let Some(output) = tool("qemu-io", &arguments) else { return };
        succeeded(&output);
    }
}

#[test]
fn qemu_replays_our_log() {
    let folder = TempDir::new().unwrap();
    let path = path_of(&folder, "crashed.vhdx");
    let store = Driver::create(&options(DiskType::Dynamic, 10 * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    for round in 0..3 {
        driver.write(2048 * round, 8, 0x40 + round as u8).unwrap();
        driver.writer().flush().unwrap();
    }
    // Power cut: the last entry is in the log, but its page is not written in place.
    store.with(|power| power.cut(&mut |_| false)).save(Path::new(&path));
    let Some(output) = tool(
        "qemu-io",
        &["-f", "vhdx", "-c", "read -P 0x40 0 4096", "-c", "read -P 0x41 1M 4096", "-c", "read -P 0x42 2M 4096", &path],
    ) else {
        return;
    };
    succeeded(&output);
    succeeded(&tool("qemu-img", &["check", &path]).unwrap());
    let replayed = Driver::open(&load(&path), false);
    assert_eq!([0, 2048, 4096].map(|sector| replayed.read(sector)), [0x40, 0x41, 0x42]);
    assert_eq!(replayed.image.info().log, crate::LogState::Clean);
}

#[test]
fn we_read_and_change_what_qemu_writes() {
    for subformat in ["dynamic", "fixed"] {
        let folder = TempDir::new().unwrap();
        let path = path_of(&folder, "theirs.vhdx");
        // Half a block at the end: qemu's fixed file ends at the end of the disk.
        let made = tool(
            "qemu-img",
            &["create", "-f", "vhdx", "-o", &format!("subformat={subformat},block_size=1M"), &path, "9961472"],
        );
        let Some(made) = made else { return };
        succeeded(&made);
        let Some(output) =
            tool("qemu-io", &["-f", "vhdx", "-c", "write -P 0x11 5M 64k", "-c", "write -P 0x12 9M 4k", &path])
        else {
            return;
        };
        succeeded(&output);
        let store = load(&path);
        let report = check(Arc::clone(&store) as Arc<dyn Store>).unwrap();
        assert!(report.worst() < Some(crate::Severity::Corrupt), "{:#?}", report.findings);
        let driver = Driver::open(&store, true);
        let info = driver.image.info();
        assert_eq!((info.size_bytes, info.disk_type == DiskType::Fixed), (9_961_472, subformat == "fixed"));
        assert_eq!([10239, 10240, 10367, 10368, 18432].map(|sector| driver.read(sector)), [0, 0x11, 0x11, 0, 0x12]);
        driver.write(10241, 1, 0x21).unwrap();
        driver.write(2048 * 3 + 1, 1, 0x22).unwrap();
        driver.writer().close().unwrap();
        store.contents().save(Path::new(&path));
        assert!(succeeded(&tool("qemu-img", &["check", &path]).unwrap()).contains("No errors"));
        let reads = [
            "read -P 0x11 5M 512",
            "read -P 0x21 5243392 512",
            "read -P 0x22 3146240 512",
            "read -P 0 3145728 512",
            "read -P 0x12 9M 4k",
        ];
        let arguments: Vec<&str> = ["-r", "-f", "vhdx"]
            .into_iter()
            .chain(reads.iter().flat_map(|read| ["-c", read]))
            .chain([&path[..]])
            .collect();
        succeeded(&tool("qemu-io", &arguments).unwrap());
    }
}

#[test]
fn libvhdi_agrees_on_what_we_made() {
    for (disk_type, told) in
        [(DiskType::Fixed, "Fixed"), (DiskType::Dynamic, "Dynamic"), (DiskType::Differencing, "Differential")]
    {
        let folder = TempDir::new().unwrap();
        let path = path_of(&folder, "ours.vhdx");
        Driver::create(&options(disk_type, 10 * MIB, MIB as u32)).contents().save(Path::new(&path));
        let Some(output) = tool("vhdiinfo", &[&path]) else { return };
        let text = succeeded(&output);
        assert!(text.contains(told) && text.contains("10485760"), "{text}");
        if disk_type == DiskType::Differencing {
            assert!(text.contains("00000000-0000-0000-0000-000000001234"), "{text}");
        }
    }
}

#[test]
fn libvhdi_reads_a_changed_link() {
    let folder = TempDir::new().unwrap();
    let path = path_of(&folder, "child.vhdx");
    let store = Driver::create(&options(DiskType::Differencing, 10 * MIB, MIB as u32));
    for (name, id) in [("Grüße an alle.vhdx", 0x4321), ("a.vhdx", 0x9876)] {
        let new = ParentLink {
            relative_path: Some(format!(".\\{name}")),
            absolute_path: Some(format!("C:\\disks\\{name}")),
            linkage: Some(Uuid::from_u128(id).into()),
            linkage2: Some(Uuid::from_u128(0x55).into()),
            ..ParentLink::default()
        };
        let driver = Driver::open(&store, true);
        driver.write(1, 1, 9).unwrap();
        driver.writer().set_parent_link(&new).unwrap();
        // It ignores the log, so the link must be in place already.
        for _ in 0..2 {
            store.contents().save(Path::new(&path));
            let Some(output) = tool("vhdiinfo", &[&path]) else { return };
            let text = succeeded(&output);
            assert!(text.contains(name) && text.contains(&Uuid::from_u128(id).to_string()), "{text}");
            assert!(!text.contains("00000000-0000-0000-0000-000000001234"), "{text}");
            driver.writer().close().unwrap();
        }
    }
}
