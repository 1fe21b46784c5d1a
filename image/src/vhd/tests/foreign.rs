//! Interoperability with other programs, in both directions. A program that is not installed is
//! skipped by name.

use super::{sparse::Sectors, *};
use std::{path::Path, process::Command};

fn is_installed(program: &str) -> bool {
    let found = Command::new(program).arg("--help").output().is_ok();
    if !found {
        eprintln!("skipped: {program} is not installed");
    }
    found
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
    text
}

fn save(store: &SparseStore, path: &Path) {
    std::fs::write(path, store.to_vec()).unwrap();
}

fn load(path: &Path) -> Arc<SparseStore> {
    let mut sectors = Sectors::default();
    sectors.write(&std::fs::read(path).unwrap(), 0);
    Arc::new(SparseStore::with("theirs.vhd", sectors))
}

const SIZE: u64 = (20 << 20) + 512;

#[test]
fn qemu_reads_what_we_write() {
    if !is_installed("qemu-img") || !is_installed("qemu-io") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (disk_type, block_bytes) in
        [(DiskType::Fixed, 2 << 20), (DiskType::Dynamic, 2 << 20), (DiskType::Dynamic, 512 << 10)]
    {
        let store = created(disk_type, SIZE, block_bytes);
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        disk.write(0, &[0x11; 4096]);
        disk.write(9 << 20, &[0x22; 65536]);
        disk.write(SIZE - 1024, &[0x33; 1024]);
        disk.close();
        let path = folder.path().join(format!("{disk_type}{block_bytes}.vhd"));
        save(&store, &path);
        let file = path.to_str().unwrap();
        let info = run("qemu-img", &["info", "-f", "vpc", "--output=json", file]);
        assert!(info.contains(&format!("\"virtual-size\": {SIZE}")), "{info}");
        let read = |at: u64, len: u64, pattern: u8| {
            let command = format!("read -P {pattern} {at} {len}");
            let text = run("qemu-io", &["-r", "-f", "vpc", "-c", &command, file]);
            assert!(!text.contains("verification failed") && text.contains("ops"), "{command}: {text}");
        };
        read(0, 4096, 0x11);
        read(4096, (9 << 20) - 4096, 0);
        read(9 << 20, 65536, 0x22);
        read((9 << 20) + 65536, SIZE - 1024 - (9 << 20) - 65536, 0);
        read(SIZE - 1024, 1024, 0x33);
        // QEMU can continue the file.
        let command = ["-c", "write -P 0x44 5M 128k", "-c", "write -P 0x55 512 512"];
        run("qemu-io", &["-f", "vpc", command[0], command[1], command[2], command[3], file]);
        let theirs = load(&path);
        assert_sound(theirs.clone());
        let disk = TestDisk::open(theirs, true, Vec::new());
        assert_eq!(disk.read(5 << 20, 131_072), vec![0x44; 131_072]);
        assert_eq!(disk.read(0, 1536), [[0x11; 512], [0x55; 512], [0x11; 512]].concat());
        disk.close();
    }
}

#[test]
fn we_read_and_write_what_qemu_makes() {
    if !is_installed("qemu-img") || !is_installed("qemu-io") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (name, extra) in
        [("dynamic", "force_size=on"), ("chs", "force_size=off"), ("fixed", "subformat=fixed,force_size=on")]
    {
        let path = folder.path().join(format!("{name}.vhd"));
        let file = path.to_str().unwrap();
        run("qemu-img", &["create", "-f", "vpc", "-o", extra, file, "20M"]);
        run("qemu-io", &["-f", "vpc", "-c", "write -P 0x66 3M 70k", "-c", "write -P 0x67 18M 512", file]);
        let info = run("qemu-img", &["info", "-f", "vpc", "--output=json", file]);
        let store = load(&path);
        assert_sound(store.clone());
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        let size = disk.image.info().size_bytes;
        assert!(info.contains(&format!("\"virtual-size\": {size}")), "{name}: {size} {info}");
        assert_eq!(disk.read(3 << 20, 71_680), vec![0x66; 71_680], "{name}");
        assert_eq!(disk.read(18 << 20, 1024), [[0x67; 512], [0; 512]].concat());
        disk.write(3 << 20, &[0x77; 512]);
        disk.write(11 << 20, &[0x78; 4096]);
        disk.close();
        assert_sound(store.clone());
        save(&store, &path);
        let command = ["-c", "read -P 0x77 3M 512", "-c", "read -P 0x66 3146240 71168", "-c", "read -P 0x78 11M 4096"];
        let text = run(
            "qemu-io",
            &["-r", "-f", "vpc", command[0], command[1], command[2], command[3], command[4], command[5], file],
        );
        assert!(!text.contains("verification failed"), "{name}: {text}");
    }
}

#[test]
fn libvhdi_understands_all_types() {
    if !is_installed("vhdiinfo") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (disk_type, word) in
        [(DiskType::Fixed, "Fixed"), (DiskType::Dynamic, "Dynamic"), (DiskType::Differencing, "Differential")]
    {
        let store = created(disk_type, SIZE, 2 << 20);
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        disk.write(9 << 20, &[0x22; 65536]);
        disk.close();
        let path = folder.path().join("ours.vhd");
        save(&store, &path);
        let text = run("vhdiinfo", &[path.to_str().unwrap()]);
        assert!(text.contains(word) && text.contains(&SIZE.to_string()), "{text}");
        assert!(text.contains("00000000-0000-0000-0000-000000000063"), "the identifier: {text}");
        if disk_type == DiskType::Differencing {
            assert!(text.contains("parent.vhd") && text.contains("00000000-0000-0000-0000-000000000007"), "{text}");
        }
    }
}

/// The header and its locators lie elsewhere after the change.
#[test]
fn other_programs_read_a_changed_link() {
    let store = created(DiskType::Differencing, SIZE, 2 << 20);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ours.vhd");
    for (name, id) in [("Grüße an alle.vhd", 0x4321u128), ("a.vhd", 0x9876)] {
        let new = ParentLink {
            relative_path: Some(format!(".\\{name}")),
            absolute_path: Some(format!("C:\\disks\\{name}")),
            name: Some(name.into()),
            linkage: Some(Uuid::from_u128(id).into()),
            ..Default::default()
        };
        let disk = TestDisk::open(store.clone(), true, Vec::new());
        disk.write(9 << 20, &[0x22; 65536]);
        disk.image.writer().unwrap().set_parent_link(&new).unwrap();
        disk.close();
        save(&store, &path);
        let file = path.to_str().unwrap();
        if is_installed("vhdiinfo") {
            let text = run("vhdiinfo", &[file]);
            assert!(text.contains(name) && text.contains(&Uuid::from_u128(id).to_string()), "{text}");
        }
        if is_installed("qemu-img") {
            let text = run("qemu-img", &["info", "-f", "vpc", "--output=json", file]);
            assert!(text.contains(&format!("\"virtual-size\": {SIZE}")), "{text}");
        }
        if is_installed("qemu-io") {
            let text = run("qemu-io", &["-r", "-f", "vpc", "-c", "read -P 0x22 9M 64k", file]);
            assert!(!text.contains("verification failed") && text.contains("ops"), "{text}");
        }
    }
}

/// QEMU allocates space for a block without zeroing it. Any bytes there, such as an old footer,
/// become the guest's data.
#[test]
fn new_blocks_of_qemu_do_not_contain_our_old_footer() {
    if !is_installed("qemu-img") || !is_installed("qemu-io") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.vhd");
    let file = path.to_str().unwrap();
    const BLOCKS: [u64; 3] = [3, 8, 1];
    // (our blocks, blocks discarded afterwards, whether space was preallocated)
    let histories: [(&[u64], &[u64], bool); 6] = [
        (&[], &[], false),
        (&[0], &[], false),
        (&[0, 2], &[2], false),
        (&[0, 2], &[0, 2], false),
        (&[], &[], true),
        (&[0, 2], &[2], true),
    ];
    for block_bytes in [64 << 10, 2 << 20, 4 << 20] {
        for (writes, discards, preallocate) in histories {
            let size_bytes = 9 * u64::from(block_bytes);
            let store = Arc::new(SparseStore::new("disk.vhd"));
            let options = CreateOptions { preallocate, ..options(DiskType::Dynamic, size_bytes, block_bytes) };
            create(store.clone(), &options).unwrap();
            if !writes.is_empty() {
                let disk = TestDisk::open(store.clone(), true, Vec::new());
                for block in writes {
                    disk.write(block * u64::from(block_bytes), &[9; 4096]);
                }
                for &block in discards {
                    disk.discard(block);
                }
                disk.close();
            }
            save(&store, &path);
            for block in BLOCKS {
                let at = block * u64::from(block_bytes);
                let text = run("qemu-io", &["-f", "vpc", "-c", &format!("write -P 0x44 {at} 512"), file]);
                assert!(text.contains("ops"), "{text}");
            }
            let rest = u64::from(block_bytes) - 512;
            for block in BLOCKS {
                let at = block * u64::from(block_bytes) + 512;
                let output = Command::new("qemu-io")
                    .args(["-r", "-f", "vpc", "-c", &format!("read -P 0 {at} {rest}"), file])
                    .output()
                    .unwrap();
                let text = String::from_utf8_lossy(&output.stdout);
                let case = format!("{writes:?} {discards:?} {preallocate} {block_bytes}, block {block}");
                assert!(!text.contains("failed") && text.contains("ops"), "{case}: {text}");
            }
            let theirs = load(&path);
            let disk = TestDisk::open(theirs.clone(), false, Vec::new());
            for block in BLOCKS {
                let read = disk.read(block * u64::from(block_bytes), block_bytes as usize);
                assert!(read[..512] == [0x44; 512] && read[512..].iter().all(|&byte| byte == 0), "block {block}");
            }
            assert_sound(theirs);
        }
    }
}
