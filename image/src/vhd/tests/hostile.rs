//! Hostile files: no panic, and no more memory than the length of the file justifies.

use super::{sparse::Sectors, *};
use diskwright_format::vhd::{DynamicHeader, FOOTER_BYTES, Footer, HEADER_BYTES};
use proptest::prelude::*;

/// A field of footer or header, and a value for it.
#[derive(Debug, Clone)]
struct Lie {
    at: usize,
    bytes: Vec<u8>,
}

fn lie() -> impl Strategy<Value = Lie> {
    let footer_fields = prop::sample::select(vec![8usize, 16, 20, 28, 40, 44, 48, 52, 56, 60, 68]);
    let header_fields =
        prop::sample::select(vec![528usize, 532, 536, 540, 544, 552, 1088, 1092, 1096, 1100, 1104, 1108]);
    // Of a dynamic disk, of a differencing one.
    let table = prop_oneof![4096usize..4096 + 64, 8192usize..8192 + 64];
    let value = prop_oneof![
        any::<u32>(),
        0u32..100,
        Just(u32::MAX),
        Just(u32::MAX - 1),
        (0u32..32).prop_map(|shift| 1 << shift)
    ];
    let small = (prop_oneof![footer_fields, header_fields, table], value)
        .prop_map(|(at, value)| Lie { at, bytes: value.to_be_bytes().to_vec() });
    prop_oneof![8 => small, 1 => (0usize..6000, prop::collection::vec(any::<u8>(), 1..40)).prop_map(|(at, bytes)| Lie { at, bytes })]
}

/// Recomputes the checksums, so that the changed fields are read.
fn resum(store: &SparseStore) {
    let sum = |bytes: &mut [u8], at: usize| {
        bytes[at..at + 4].fill(0);
        let sum = !bytes.iter().fold(0u32, |sum, &byte| sum.wrapping_add(u32::from(byte)));
        bytes[at..at + 4].copy_from_slice(&sum.to_be_bytes());
    };
    let mut footer = [0; FOOTER_BYTES];
    store.read_at(&mut footer, 0).unwrap();
    sum(&mut footer, 64);
    store.write_at(&footer, 0).unwrap();
    store.write_at(&footer, store.len_bytes().unwrap() - 512).unwrap();
    let mut header = [0; HEADER_BYTES];
    store.read_at(&mut header, 512).unwrap();
    sum(&mut header, 36);
    store.write_at(&header, 512).unwrap();
    let _ = (Footer::parse(&footer, 0), DynamicHeader::parse(&header, 512));
}

/// A sound file is sound after a new link to its parent, and has it.
fn relink(store: &Arc<SparseStore>) {
    let was_sound = check(store.clone()).is_ok_and(|report| report.worst() < Some(Severity::Corrupt));
    let Ok(image) = open(store.clone(), true) else { return };
    let Some(writer) = image.writer() else { return };
    for paths in [1, 40, 3] {
        let link = ParentLink {
            relative_path: Some(".\\another folder\\parent.vhd".repeat(paths)),
            linkage: Some(Uuid::from_u128(5).into()),
            ..ParentLink::default()
        };
        let is_linked = writer.set_parent_link(&link).is_ok();
        if was_sound && is_linked {
            assert_sound(store.clone());
            assert_eq!(crate::vhd::parent_link(&**store).unwrap(), image.parent_link());
            assert_eq!(image.parent_link().unwrap().relative_path, link.relative_path);
        }
    }
    let _ = writer.close();
}

fn exercise(store: Arc<SparseStore>) {
    relink(&Arc::new(SparseStore::with("x.vhd", store.sectors())));
    let _ = check(store.clone());
    for writable in [false, true] {
        let Ok(image) = open(store.clone(), writable) else { continue };
        for first in [0, 1, 7, 1000, u64::MAX - 2, u64::MAX / 8192] {
            let mut states = [BlockState::Zero; 4];
            let _ = image.block_states(first, &mut states);
            let _ = image.sector_bitmap(first);
        }
        let Some(writer) = image.writer() else { continue };
        for block in [0, 3, 1, u64::MAX] {
            if writer.reserve_waiting(block).is_ok() {
                let _ = writer.commit_waiting(block, Commit::Sectors { first: 1, count: u32::MAX });
            }
            let _ = writer.commit_waiting(block, Commit::Discard);
        }
        let _ = writer.close();
    }
    let _ = check(store);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn lies(kind in 0..3usize, lies in prop::collection::vec(lie(), 1..4), cut in prop::option::of(0u64..40_000)) {
        let kind = [DiskType::Fixed, DiskType::Dynamic, DiskType::Differencing][kind];
        let store = created(kind, 16 * 8192, 8192);
        if kind != DiskType::Fixed {
            let disk = TestDisk::open(store.clone(), true, Vec::new());
            disk.write(0, &[1; 512]);
            disk.write(20_480, &[2; 8192]);
            disk.close();
        }
        for lie in &lies {
            store.write_at(&lie.bytes, lie.at as u64).unwrap();
        }
        if let Some(cut) = cut {
            store.set_len(store.len_bytes().unwrap().saturating_sub(cut).max(1536)).unwrap();
        }
        resum(&store);
        exercise(store);
    }

    #[test]
    fn rubbish(bytes in prop::collection::vec(any::<u8>(), 0..3000), cookie: bool) {
        let mut sectors = Sectors::default();
        sectors.write(&bytes, 0);
        if cookie {
            sectors.write(b"conectix", 0);
        }
        exercise(Arc::new(SparseStore::with("x.vhd", sectors)));
    }
}
