//! Tests of plans: which blocks are held while a request waits, and which parts are merged.

use super::*;
use crate::engine::{chain::Layer, shared::Shared};
use diskwright_image::{CreateOptions, DiskType, probe, vhd};
use diskwright_store::{
    MemoryStore, Store,
    store::{FileRange, Zeroing},
};

const BLOCK: u64 = 1 << 20;

/// The first write of a dynamic VHD's block also writes the block's bitmap, and shares the block
/// until that is done.
#[test]
fn a_write_that_must_wait_holds_no_block() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new("disk"));
    let options = CreateOptions {
        disk_type: DiskType::Dynamic,
        size_bytes: 8 * BLOCK,
        block_bytes: Some(BLOCK as u32),
        logical_sector_bytes: 512,
        physical_sector_bytes: 512,
        parent: None,
        preallocate: false,
        disk_id: None,
        own: Default::default(),
    };
    vhd::create(Arc::clone(&store), &options).unwrap();
    let image = probe::open(store, Some(diskwright_image::Format::Vhd), true, 512).unwrap();
    let chain = Chain::new(vec![Layer { path: "disk".into(), image }], 1 << 20).unwrap();
    let shared = Shared::new(chain, Vec::new());
    let chain = shared.chain();
    let [first, second] = [0, 1].map(|block| (chain.top().id, block));
    let mut draft = Draft::default();
    let plan = |draft: &mut Draft| loop {
        let next = plan_write(&mut shared.lock(), 0, &mut 0, 2 * BLOCK, draft).unwrap();
        let PlanResult::Work(work) = next else { return next };
        assert!(!shared.lock().claims.is_shared(first), "{work:?}");
        shared.carry_out(&chain, &work).unwrap();
    };
    assert!(shared.lock().claims.exclude(second));
    assert!(matches!(plan(&mut draft), PlanResult::Busy(key) if key == second));
    assert!(!shared.lock().claims.is_shared(first) && draft.parts.is_empty());
    shared.lock().claims.end_exclusion(second);
    assert!(matches!(plan(&mut draft), PlanResult::Ready));
    assert!(shared.lock().claims.is_shared(second));
    shared.settle(&draft.pending, Err(io::ErrorKind::StorageFull.into())).unwrap_err();
    assert!(shared.lock().claims.exclude(first) && shared.lock().claims.exclude(second));
}

#[test]
fn parts_are_merged_only_if_contiguous_in_one_file() {
    let payload = |source, file_offset_bytes, start| Part::Payload { source, file_offset_bytes, start, len: 1024 };
    let zeroes =
        |source, offset_bytes, how| Part::Zeroes { source, range: FileRange { offset_bytes, len_bytes: 1024 }, how };
    let mut parts = Vec::new();
    for part in [payload(0, 4096, 0), payload(0, 5120, 1024), payload(1, 6144, 2048), payload(1, 0, 3072)] {
        push_part(&mut parts, part);
    }
    assert!(matches!(parts[0], Part::Payload { source: 0, file_offset_bytes: 4096, start: 0, len: 2048 }));
    assert_eq!(parts.len(), 3, "another file, or another offset: {parts:?}");
    push_part(&mut parts, payload(1, 1024, 8192));
    assert_eq!(parts.len(), 4, "not contiguous in the buffer: {parts:?}");
    let (keep, deallocate) = (Zeroing::Keep, Zeroing::Deallocate);
    for part in [zeroes(1, 2048, keep), zeroes(1, 3072, keep), zeroes(1, 4096, deallocate), zeroes(2, 5120, deallocate)]
    {
        push_part(&mut parts, part);
    }
    assert_eq!(parts.len(), 7, "{parts:?}");
    assert!(matches!(&parts[4], Part::Zeroes { range, .. } if range.len_bytes == 2048));
}
