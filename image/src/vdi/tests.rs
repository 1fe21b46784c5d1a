//! Tests of whole VDI images: by hand, and by qemu-img and qemu-io.

mod growing;
mod writing;

use super::open;
use crate::{BlockState, DiskType, Image, Severity};
use diskwright_store::{MemoryStore, Store};
use std::{process::Command, sync::Arc};

const MIB: u64 = 1 << 20;

/// A dynamic disk of 4 MiB: block 0 has space 1, block 1 is free, block 2 reads as zeros, block 3
/// has space 0, which the end of the file does not cut.
fn built() -> Vec<u8> {
    let mut bytes = vec![0; 3 * MIB as usize];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, b"<<< made by hand >>>\n");
    for (at, value) in [
        (0x40, 0xbeda_107fu32),
        (0x44, 0x0001_0001),
        (0x48, 400),
        (0x4c, 1),
        (0x154, 512),
        (0x158, MIB as u32),
        (0x168, 512),
        (0x178, MIB as u32),
        (0x180, 4),
        (0x184, 2),
        (512, 1),
        (516, u32::MAX),
        (520, u32::MAX - 1),
        (524, 0),
    ] {
        put(at, &value.to_le_bytes());
    }
    put(0x170, &(4 * MIB).to_le_bytes());
    bytes[MIB as usize..2 * MIB as usize].fill(3);
    bytes[2 * MIB as usize..].fill(1);
    bytes
}

fn with(at: usize, value: u32) -> Arc<dyn Store> {
    let mut bytes = built();
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    Arc::new(MemoryStore::with_bytes("disk.vdi", bytes))
}

fn told(store: Arc<dyn Store>) -> (Option<Severity>, String) {
    let report = super::examine(store, false).unwrap().report;
    (report.worst(), report.findings.iter().map(|finding| finding.message.clone()).collect())
}

#[test]
fn a_block_has_space_or_zeros_or_nothing() {
    let image = open(with(0x48, 400), false).unwrap();
    let mut states = [BlockState::Damaged; 5];
    image.block_states(0, &mut states).unwrap();
    let absent = BlockState::Absent;
    assert_eq!(states, [BlockState::data(2 * MIB), absent, BlockState::Zero, BlockState::data(MIB), absent]);
    assert_eq!((image.next_block(1, 9).unwrap(), image.next_block(4, 9).unwrap()), (Some(2), None));
    assert_eq!(image.info().creator, "made by hand");
    assert_eq!(told(with(0x48, 400)), (None, String::new()));
}

#[test]
fn damage_is_found() {
    let image = open(with(512, 2), false).unwrap();
    let mut states = [BlockState::Absent; 4];
    image.block_states(0, &mut states).unwrap();
    assert_eq!((states[0], states[3]), (BlockState::Damaged, BlockState::data(MIB)));
    assert!(image.damage(0).unwrap().to_string().contains("space 2 at offset 3145728"));
    for (at, value, severity, text) in [
        (512, 2, Severity::Corrupt, "Block 0: block map entry"),
        (512, 0, Severity::Corrupt, "Block 3 has space 0, which another block has too"),
        (512, u32::MAX, Severity::Leak, "1048576 bytes in the file are the space of no block"),
        (0x184, 9, Severity::Note, "9 blocks with space"),
        (0x184, 1, Severity::Corrupt, "counts 1 spaces, but blocks have 2"),
        (0x154, 100, Severity::Corrupt, "block map at offset 100"),
        (0x180, 1 << 30, Severity::Corrupt, "a block map from 512 to 4294967808"),
        (0x4c, 3, Severity::Corrupt, "undo image is not supported"),
    ] {
        let (worst, messages) = told(with(at, value));
        assert!(worst == Some(severity) && messages.contains(text), "{text}: {worst:?} {messages}");
    }
    assert!(matches!(open(with(0x40, 0), false), Err(crate::ImageError::NotAnImage { .. })));
}

#[test]
fn a_header_that_counts_too_few_spaces_is_mended() {
    let store = with(0x184, 1);
    crate::repair_image(crate::Format::Vdi, &store, false, &mut |_| true).unwrap().unwrap();
    assert_eq!(told(store), (None, String::new()));
}

#[test]
fn what_an_entry_costs_is_given_up_only_with_consent() {
    for (at, value, costs) in [(512, 2, Some(0..MIB)), (512, 0, Some(3 * MIB..4 * MIB)), (512, u32::MAX, None)] {
        let store = with(at, value);
        let mut lost = Vec::new();
        let mut mend = |accept_loss| {
            crate::repair_image(crate::Format::Vdi, &store, accept_loss, &mut |step| {
                lost.extend(step.and_then(|step| step.finding.costs));
                true
            })
        };
        let after = mend(false).unwrap().unwrap();
        assert_eq!(after.worst().is_none(), costs.is_none(), "{:?}", after.findings);
        let after = mend(true).unwrap().unwrap();
        assert_eq!(after.worst(), None, "{:?}", after.findings);
        assert_eq!(lost.first().cloned(), costs);
        assert_eq!(told(store), (None, String::new()));
    }
}

#[test]
fn qemu_makes_what_we_read() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let run = |name: &str, arguments: &[&str]| match Command::new(name).args(arguments).output() {
        Ok(output) => assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => panic!("{name}: {error}"),
    };
    if Command::new("qemu-img").arg("--version").output().is_err() {
        return eprintln!("skipped: qemu-img is not installed");
    }
    for (static_, kind) in [("off", DiskType::Dynamic), ("on", DiskType::Fixed)] {
        let vdi = path("disk.vdi");
        run("qemu-img", &["create", "-q", "-f", "vdi", "-o", &format!("static={static_}"), &vdi, "5632k"]);
        let writes = ["write -P 1 0 1k", "write -P 2 3000k 1M", "write -P 3 5631k 1k"];
        let commands: Vec<_> = writes.iter().flat_map(|write| ["-c", write]).collect();
        run("qemu-io", &[&["-f", "vdi"], &commands[..], &[&vdi]].concat());
        run("qemu-img", &["convert", "-f", "vdi", "-O", "raw", &vdi, &path("disk.raw")]);
        let expected = std::fs::read(path("disk.raw")).unwrap();
        let bytes = std::fs::read(&vdi).unwrap();
        let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("disk.vdi", bytes));
        let image = open(Arc::clone(&store), false).unwrap();
        assert_eq!((image.info().disk_type, image.size_bytes()), (kind, expected.len() as u64));
        let mut found = vec![0; expected.len()];
        for (block, out) in (0..).zip(found.chunks_mut(MIB as usize)) {
            let mut state = [BlockState::Absent];
            image.block_states(block, &mut state).unwrap();
            if let BlockState::Data { offset_bytes, .. } = state[0] {
                image.store().read_at(out, offset_bytes).unwrap();
            }
        }
        assert!(found == expected, "static={static_}");
        assert_eq!(told(store), (None, String::new()));
    }
}
