//! Every format and type against an array of bytes: random operations, with reopening and new
//! children in between.

use crate::common::{Kind, Step, Twin};
use diskwright_image::{DiskType, Format};
use diskwright_store::{CacheMode, EngineKind};
use proptest::prelude::*;

fn steps(size_sectors: u64) -> impl Strategy<Value = Vec<Step>> {
    // Half of the lengths are small, half may cover whole blocks.
    let range = (0..size_sectors, prop_oneof![1..24_u64, 1..6000_u64]);
    let step = prop_oneof![
        6 => (range.clone(), any::<u8>(), any::<bool>())
            .prop_map(|((sector, sectors), seed, fua)| Step::Write { sector, sectors, seed: seed | 1, fua }),
        2 => range.clone().prop_map(|(sector, sectors)| Step::Zero { sector, sectors }),
        2 => range.clone().prop_map(|(sector, sectors)| Step::Discard { sector, sectors }),
        3 => range.prop_map(|(sector, sectors)| Step::Read { sector, sectors }),
        2 => Just(Step::Flush),
        1 => Just(Step::Reopen),
        1 => Just(Step::Child),
    ];
    prop::collection::vec(step, 1..40)
}

fn run(kind: Kind, size_bytes: u64, cases: u32) {
    let strategy = steps(size_bytes / u64::from(kind.sector_bytes));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases,
        max_shrink_iters: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&strategy, |steps| {
            let mut twin = Twin::new(kind, size_bytes);
            for step in steps {
                twin.apply(step);
            }
            twin.verify();
            twin.apply(Step::Reopen);
            twin.verify();
            twin.close();
            for path in &twin.chain {
                common_check(path);
            }
            Ok(())
        })
        .unwrap();
}

/// Our own check must accept what we wrote.
fn common_check(path: &std::path::Path) {
    use diskwright_image::{Severity, probe};
    use diskwright_store::{FileStore, LockMode, OpenOptions};
    let store = FileStore::open(
        path,
        &OpenOptions { writable: false, create_new: false, cache: CacheMode::PageCache, lock: LockMode::Shared },
    )
    .unwrap();
    let (_, report) = probe::check(std::sync::Arc::new(store), None).unwrap();
    let bad: Vec<_> = report.findings.iter().filter(|finding| finding.severity == Severity::Corrupt).collect();
    assert!(bad.is_empty(), "{}: {bad:?}", path.display());
}

const MIB: u64 = 1 << 20;

#[test]
fn raw() {
    run(Kind::new(Format::Raw, DiskType::Fixed, None), 3 * MIB, 12);
}

#[test]
fn vhd_fixed() {
    run(Kind::new(Format::Vhd, DiskType::Fixed, None), 3 * MIB, 12);
}

#[test]
fn vhd_dynamic() {
    run(Kind::new(Format::Vhd, DiskType::Dynamic, Some(512 << 10)), 5 * MIB + 512, 24);
}

#[test]
fn vhd_dynamic_of_small_blocks() {
    run(Kind::new(Format::Vhd, DiskType::Dynamic, Some(16 << 10)), MIB, 24);
}

#[test]
fn vhd_differencing() {
    run(Kind::new(Format::Vhd, DiskType::Differencing, Some(512 << 10)), 5 * MIB, 24);
}

#[test]
fn vhd_differencing_of_large_blocks() {
    run(Kind::new(Format::Vhd, DiskType::Differencing, Some(4 << 20)), 9 * MIB, 12);
}

#[test]
fn vhdx_fixed() {
    run(Kind::new(Format::Vhdx, DiskType::Fixed, Some(1 << 20)), 4 * MIB, 12);
}

#[test]
fn vhdx_dynamic() {
    run(Kind::new(Format::Vhdx, DiskType::Dynamic, Some(1 << 20)), 7 * MIB + 512, 24);
}

#[test]
fn vhdx_dynamic_of_4096_byte_sectors() {
    let kind = Kind { sector_bytes: 4096, ..Kind::new(Format::Vhdx, DiskType::Dynamic, Some(2 << 20)) };
    run(kind, 9 * MIB, 16);
}

#[test]
fn vhdx_differencing() {
    run(Kind::new(Format::Vhdx, DiskType::Differencing, Some(1 << 20)), 7 * MIB, 24);
}

#[test]
fn vhdx_differencing_of_4096_byte_sectors() {
    let kind = Kind { sector_bytes: 4096, ..Kind::new(Format::Vhdx, DiskType::Differencing, Some(1 << 20)) };
    run(kind, 7 * MIB, 16);
}

#[test]
fn vhdx_differencing_with_o_direct_and_without_a_ring() {
    for engine in [EngineKind::Auto, EngineKind::Sync] {
        let kind =
            Kind { cache: CacheMode::Direct, engine, ..Kind::new(Format::Vhdx, DiskType::Differencing, Some(1 << 20)) };
        run(kind, 5 * MIB, 8);
    }
}

#[test]
fn vhd_with_o_direct_and_without_a_ring() {
    for (engine, disk_type) in [
        (EngineKind::Auto, DiskType::Dynamic),
        (EngineKind::Sync, DiskType::Dynamic),
        (EngineKind::Auto, DiskType::Differencing),
        (EngineKind::Auto, DiskType::Fixed),
    ] {
        let kind = Kind { cache: CacheMode::Direct, engine, ..Kind::new(Format::Vhd, disk_type, Some(512 << 10)) };
        let kind = if disk_type == DiskType::Fixed { Kind { block_bytes: None, ..kind } } else { kind };
        run(kind, 5 * MIB, 8);
    }
}
