//! Checks and repairs, compared with `qemu-img check`.

use super::{
    qemu::{QemuImage, WRITES, store_for_writing, tool},
    *,
};
use crate::{CheckReport, Format, Repair, Severity, repair::repair_image};

fn check(store: Arc<dyn Store>) -> CheckReport {
    super::super::examine(&[Some(store)], false).unwrap().report
}

fn told(report: &CheckReport) -> String {
    report.findings.iter().map(|finding| format!("{:?}: {}\n", finding.severity, finding.message)).collect()
}

#[test]
fn a_sound_image_has_no_findings() {
    let report = check(Built::new().store());
    assert!(report.findings.is_empty(), "{}", told(&report));
    assert_eq!((report.allocated_blocks, report.total_blocks, report.leaked_bytes), (1, 128, 0));
}

/// How damage is repaired.
#[derive(Clone, Copy, PartialEq)]
enum Mends {
    WithoutLoss,
    WithLoss,
    Never,
}
use Mends::{Never, WithLoss, WithoutLoss};

/// What was changed in the image, what is found, and which repair removes it.
#[test]
fn every_kind_of_damage_is_found_and_mended_where_that_needs_no_guess() {
    let refcount = |cluster: u64| (2 * CLUSTER) + cluster * 2;
    type Change = Box<dyn Fn(&mut Built)>;
    let put = |at: u64, value: u64| {
        Box::new(move |built: &mut Built| {
            built.put_u64(at, value);
        }) as Change
    };
    let count = |cluster: u64, value: u16| {
        Box::new(move |built: &mut Built| {
            built.put(refcount(cluster), &value.to_be_bytes());
        }) as Change
    };
    for (change, severity, text, mends) in [
        (count(5, 0), Severity::Corrupt, "has refcount 0, though 1 reference was found", WithoutLoss),
        (count(5, 2), Severity::Corrupt, "COPIED flag set, though the refcount", WithoutLoss),
        (count(4, 9), Severity::Corrupt, "L1 entry at offset 196608 has the COPIED flag set", WithoutLoss),
        (count(1, 3), Severity::Leak, "structures of the image", WithoutLoss),
        (put(L2, 0), Severity::Leak, "65536 bytes at offset 327680 are leaked", WithoutLoss),
        (put(L2, 5 * CLUSTER), Severity::Corrupt, "COPIED flag clear", WithoutLoss),
        (put(L2 + 8, (5 * CLUSTER) | COPIED), Severity::Corrupt, "though 2 references were found", WithoutLoss),
        (put(L1, L2), Severity::Corrupt, "COPIED flag clear", WithoutLoss),
        (
            put(L2 + 8, L2 | COPIED),
            Severity::Corrupt,
            "leads to offset 262144, which something else uses too",
            WithLoss,
        ),
        (put(L2 + 8, 3), Severity::Corrupt, "clear", WithLoss),
        (put(L1, (3 * CLUSTER) | COPIED), Severity::Corrupt, "which something else uses too", WithLoss),
        (put(L1, (9 * CLUSTER) | COPIED), Severity::Corrupt, "an offset in the file", WithLoss),
        (put(L1, L2 | COPIED | (1 << 60) | 6), Severity::Corrupt, "bits 0 to 8 and 56 to 62 clear", WithoutLoss),
        (put(L1, (5 * CLUSTER) | COPIED | 6), Severity::Corrupt, "bits 0 to 8 and 56 to 62 clear", WithLoss),
        (put(CLUSTER, 3 * CLUSTER), Severity::Corrupt, "which something else uses too", WithoutLoss),
        (put(48, 3 * CLUSTER), Severity::Corrupt, "which something else uses too", WithoutLoss),
        (put(48, 9 * CLUSTER), Severity::Corrupt, "a refcount table of 65536 bytes at offset 589824", WithoutLoss),
        (put(L2 + 8, (1 << 62) | (9 * CLUSTER)), Severity::Corrupt, "an offset in the file", WithLoss),
        (put(L2 + 8, (1 << 62) | (5 * CLUSTER + 7)), Severity::Corrupt, "which something else uses too", WithLoss),
        (put(L2 + 8, (9 * CLUSTER) | COPIED | 1), Severity::Corrupt, "an offset in the file", WithoutLoss),
        (put(L2 + 8, (6 * CLUSTER) | COPIED), Severity::Corrupt, "an offset in the file of 393216 bytes", WithLoss),
        (put(L2 + 8, 1 << 60), Severity::Corrupt, "clear", WithLoss),
        (put(L1, 1), Severity::Corrupt, "bits 0 to 8", WithLoss),
        (put(CLUSTER, 0), Severity::Corrupt, "has refcount 0", WithoutLoss),
        (put(CLUSTER, 7 * CLUSTER), Severity::Corrupt, "refcount table entry", WithoutLoss),
        (put(CLUSTER + 8, 2 * CLUSTER), Severity::Corrupt, "a refcount block that no other entry names", WithoutLoss),
        (put(72, features::DIRTY), Severity::Note, "marked dirty", WithoutLoss),
        (put(72, features::DIRTY | features::CORRUPT), Severity::Corrupt, "marked corrupt", WithoutLoss),
        (put(72, 1 << 40), Severity::Corrupt, "bit 40", Never),
        (put(60, 1 << 32), Severity::Corrupt, "snapshot table", Never),
    ] {
        let mut built = Built::new();
        change(&mut built);
        let report = check(built.store());
        assert!(told(&report).contains(text), "{text}: {}", told(&report));
        assert_eq!(report.worst(), Some(severity), "{text}: {}", told(&report));
        let can = |repair| report.findings.iter().any(|finding| finding.repair == repair);
        if mends == WithoutLoss {
            assert!(!can(Repair::Impossible) && !can(Repair::CostsData), "{text}: {}", told(&report));
        }
        assert_eq!(can(Repair::CostsData), mends == WithLoss, "{text}: {}", told(&report));
        let before = built.open().ok().map(|image| contents(&image).ok());
        let store = built.store();
        let after = repair_image(Format::Qcow2, &store, false, &mut |_| true).unwrap().unwrap();
        assert_eq!(after.findings.is_empty(), mends == WithoutLoss, "{text}: {}", told(&after));
        let image = open(vec![Arc::clone(&store)], false, None);
        let is_same = image.ok().map(|image| contents(&image).ok()) == before;
        // An entry whose reserved bits are cleared can be read again.
        assert!(is_same || before == Some(None), "{text}: the repair changed the disk");
        let mut lost = Vec::new();
        let after = repair_image(Format::Qcow2, &store, true, &mut |step| {
            lost.extend(step.and_then(|step| step.finding.costs));
            true
        });
        let after = after.unwrap().unwrap();
        assert_eq!(after.findings.is_empty(), mends != Never, "{text}: {}", told(&after));
        assert_eq!(!lost.is_empty(), mends == WithLoss, "{text}: {lost:?}");
        if mends == WithLoss {
            assert!(contents(&open(vec![store], false, None).unwrap()).is_ok(), "{text}");
        }
    }
}

#[test]
fn the_findings_are_those_of_qemu() {
    let Some(made) = QemuImage::new("cluster_size=4k,refcount_bits=4", "6M", &WRITES) else { return };
    let bytes = std::fs::read(&made.path).unwrap();
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let l2 = word(word(40)) & 0x00ff_ffff_ffff_fe00;
    let block = word(word(48));
    let mut state = 11u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % below
    };
    let mut kinds = [0; 3];
    for round in 0..24 {
        let mut changed = bytes.clone();
        for _ in 0..=random(2) {
            if random(2) == 0 {
                // A refcount of a cluster of the file.
                let at = block + random(bytes.len() / 4096) / 2;
                changed[at] = changed[at].wrapping_add([1, 0x10, 0xff][random(3)]);
            } else {
                // An entry: gone, the one of a neighbour, or with another flag.
                let at = l2 + 8 * random(100);
                match random(3) {
                    0 => changed[at..at + 8].fill(0),
                    1 => changed.copy_within(at + 8..at + 16, at),
                    _ => changed[at] ^= 0x80,
                }
            }
        }
        let path = made.path.with_extension("changed");
        std::fs::write(&path, &changed).unwrap();
        let output = tool("qemu-img", &["check", "-q", "-f", "qcow2", path.to_str().unwrap()]).unwrap();
        let report = check(Arc::new(MemoryStore::with_bytes("disk.qcow2", changed)));
        let ours = match report.worst() {
            Some(Severity::Corrupt) => 2,
            Some(Severity::Leak) => 3,
            _ => 0,
        };
        kinds[[0, 2, 3].iter().position(|code| *code == ours).unwrap()] += 1;
        assert_eq!(
            Some(ours),
            output.status.code(),
            "round {round}: {}{}",
            told(&report),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    assert!(kinds[1] > 2 && kinds[2] > 2, "{kinds:?}");
}

#[test]
fn qemu_agrees_that_a_repair_is_right() {
    for options in ["refcount_bits=1", "refcount_bits=16", "refcount_bits=64"] {
        let Some(made) = QemuImage::new(options, "6M", &WRITES) else { return };
        let before = made.by_qemu(&[]);
        let mut bytes = std::fs::read(&made.path).unwrap();
        let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        let block = word(word(48));
        bytes[block + 1] ^= 0x55;
        bytes[block..block + 8].rotate_left(1);
        std::fs::write(&made.path, bytes).unwrap();
        let store = store_for_writing(&made.path);
        let after = repair_image(Format::Qcow2, &store, false, &mut |_| true).unwrap().unwrap();
        drop(store);
        assert!(after.findings.is_empty(), "{options}: {}", told(&after));
        let output = tool("qemu-img", &["check", "-q", "-f", "qcow2", made.text()]).unwrap();
        assert_eq!(output.status.code(), Some(0), "{options}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(made.by_qemu(&[]) == before, "{options}");
    }
}
