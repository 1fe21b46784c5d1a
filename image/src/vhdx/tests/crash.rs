//! Power cuts in a flush whose table pages do not fit one log entry. (`proof/proving/` tests all
//! other power cuts. It drives disks from above, and none has so large a table with so many stale
//! bits.)
//!
//! Guards against: a page that is visible before the pages it depends on, an entry overwritten
//! while it is the only one, a partial block without its bitmap, stale bits that become visible.
//!
//! At each sync, before it completes, several files are made from the durable contents and random
//! subsets of all changes since (512 bytes at a time). Each file must open and pass the check, and
//! each of its sectors must hold a value that was flushed, or written since.

use super::*;
use crate::{Severity, vhdx::check};
use std::{
    cell::Cell,
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

thread_local! {
    static DISORDERED: Cell<bool> = const { Cell::new(false) };
}

/// Sorts the pages by offset, when this test breaks the rule that pages come before those that
/// depend on them.
pub(in crate::vhdx) fn disorder(pages: &mut [(u64, Box<[u8]>)]) {
    if DISORDERED.get() {
        pages.sort_unstable_by_key(|(offset_bytes, _)| *offset_bytes);
    }
}

/// The values that a sector may have after a power cut. The first one is the flushed value.
type Allowed = BTreeMap<u64, Vec<u8>>;

fn verify(left: Contents, allowed: &Allowed, rewrite: bool, what: &str) {
    let store = TestStore::new(left);
    let report = check(Arc::clone(&store) as Arc<dyn Store>).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(report.worst() < Some(Severity::Corrupt), "{what}: {:#?}", report.findings);
    let reader = Driver::open(&store, false);
    let mut shown = Vec::new();
    for (&sector, tags) in allowed {
        let tag = reader.read(sector);
        assert!(
            tags.contains(&tag),
            "{what}: sector {sector} shows {tag}, allowed are {tags:?}, block {:?}",
            reader.state(sector / 2048)
        );
        shown.push(tag);
    }
    if rewrite {
        // Replay on disk, and check the contents again after another session.
        let driver = Driver::open(&store, true);
        driver.write(7 * 2048 + 99, 1, 49).unwrap();
        driver.writer().close().unwrap();
        let reader = Driver::open(&store, false);
        for ((&sector, _), tag) in allowed.iter().zip(shown) {
            assert_eq!(reader.read(sector), tag, "{what}: sector {sector} after another session");
        }
        assert_eq!(reader.read(7 * 2048 + 99), 49);
        let report = check(Arc::clone(&store) as Arc<dyn Store>).unwrap();
        assert!(report.worst() < Some(Severity::Corrupt), "{what}: {:#?}", report.findings);
    }
}

/// The contents after several power cuts: torn at 512 bytes, or with whole writes kept or lost.
pub(super) fn cuts(power: &Power, numbers: &mut Numbers) -> Vec<(&'static str, Contents)> {
    let mut left = Vec::new();
    for (name, odds) in [("nothing", 0), ("half", 50), ("most", 90), ("all", 100)] {
        left.push((name, power.cut(&mut |_| numbers.below(100) < odds)));
    }
    for _ in 0..3 {
        let salt = numbers.next();
        left.push((
            "some whole writes",
            power.cut(&mut |number| Numbers(salt ^ (number as u64 + 1) << 32).below(2) == 0),
        ));
    }
    left
}

/// Runs a flush whose table pages need several log entries. All bits of absent blocks are set, as
/// some programs leave them. So a block that becomes visible before its bits are cleared reads
/// zeros instead of its parent. `idle_sync` is the number of a sync of the flush, from 1, that does
/// nothing.
fn many_pages(close: bool, idle_sync: Option<u64>) {
    let blocks_per_page = 512u64;
    let pages = 150;
    let blocks: Vec<u64> = (0..pages).map(|page| page * blocks_per_page + 5 + page % 3).collect();
    let store = Driver::create(&options(DiskType::Differencing, pages * blocks_per_page * MIB, MIB as u32));
    let driver = Driver::open(&store, true);
    // Two of three chunks already have a bitmap.
    for chunk in (0..=pages / 8).filter(|chunk| chunk % 3 != 0) {
        driver.write(chunk * 4096 * 2048, 1, 1).unwrap();
    }
    driver.writer().close().unwrap();
    for &block in &blocks {
        let mut raw = [0; 8];
        store.read_at(&mut raw, 3 * MIB + 8 * (block / 4096 * 4097 + 4096)).unwrap();
        let bitmap_bytes = u64::from_le_bytes(raw) >> 20 << 20;
        if bitmap_bytes != 0 {
            store.write_at(&[0xff; 256], bitmap_bytes + block % 4096 * 256).unwrap();
        }
    }
    let driver = Driver::open(&store, true);
    let mut allowed: Allowed =
        blocks.iter().map(|&block| (block * 2048 + 5, vec![parent_tag(block * 2048 + 5), 9])).collect();
    allowed.insert(4096 * 2048, vec![1]);
    for &block in &blocks {
        driver.write(block * 2048 + 5, 1, 9).unwrap();
        allowed.insert(block * 2048 + 6, vec![parent_tag(block * 2048 + 6)]);
    }
    let mut numbers = Numbers(5);
    let seen = allowed.clone();
    store.set_hook(move |power| {
        for (name, left) in cuts(power, &mut numbers) {
            verify(left, &seen, name == "half", &format!("sync {}, {name} kept", power.syncs));
        }
    });
    let before = store.with(|power| power.syncs);
    store.with(|power| power.idle_sync = idle_sync.map(|number| before + number));
    if close {
        driver.writer().close().unwrap()
    } else {
        driver.writer().flush().unwrap()
    }
    assert!(store.with(|power| power.syncs) - before >= 8, "the flush wrote several entries");
    allowed.values_mut().for_each(|tags| *tags = vec![tags[tags.len() - 1]]);
    verify(store.with(|power| power.cut(&mut |_| false)), &allowed, true, "after the flush");
}

#[test]
fn a_flush_of_many_pages_survives_power_cuts() {
    many_pages(false, None);
}

#[test]
fn a_close_with_many_pages_survives_power_cuts() {
    many_pages(true, None);
}

/// Breaks the order of pages, and single syncs of the flush. The first four syncs are payload, log
/// entry, and one for each header slot. Then each further entry has two.
#[test]
fn breaking_the_page_order_or_a_sync_is_detected() {
    let is_caught = |idle_sync| catch_unwind(AssertUnwindSafe(|| many_pages(false, idle_sync))).is_err();
    DISORDERED.set(true);
    assert!(is_caught(None), "pages were written by ascending offset, and no power cut detects it");
    DISORDERED.set(false);
    for (idle_sync, what) in [
        (5, "the pages of an entry are not durable before the next entry overwrites it"),
        (6, "an entry is not durable before its pages are written"),
    ] {
        assert!(is_caught(Some(idle_sync)), "{what}, and no power cut detects it");
    }
}
