//! Power cuts at every sync of a change, with unsynced writes torn.

use super::{
    TestDisk,
    sparse::{Change, Cut, Sectors, SparseStore},
};
use std::sync::atomic::Ordering;

/// Makes a change, and returns what a cut before each of its syncs and at its end would leave, and
/// the number of its syncs. The syncs with the numbers in `lost` do nothing.
pub(super) fn cuts_during(
    disk: &TestDisk,
    store: &SparseStore,
    lost: &[usize],
    change: impl FnOnce(),
) -> (Vec<Cut>, usize) {
    store.records_cuts.store(true, Ordering::Relaxed);
    disk.store().sync_data().unwrap();
    store.take_cuts();
    change();
    let mut cuts = store.take_cuts();
    let syncs = cuts.len();
    cuts.push(store.cut());
    for &lost in lost {
        let mut changes = cuts[lost].changes.clone();
        changes.append(&mut cuts[lost + 1].changes);
        cuts[lost + 1] = Cut { durable: cuts[lost].durable.clone(), changes };
    }
    (cuts, syncs)
}

/// Chooses which unsynced changes survive a cut; the same ones in every run.
pub(super) struct Tear(u64);

impl Default for Tear {
    fn default() -> Self {
        Self(7)
    }
}

impl Tear {
    fn keeps(&mut self, odds_percent: u64) -> bool {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % 100 < odds_percent
    }

    /// The contents after a cut: of the unsynced changes, `odds` percent.
    pub(super) fn left(&mut self, cut: &Cut, odds: u64) -> Sectors {
        let mut left = cut.durable.clone();
        for change in &cut.changes {
            match change {
                Change::Write(offset, bytes) if self.keeps(odds) => left.write(bytes, *offset),
                Change::Length(len) if self.keeps(odds) => left.set_len(*len),
                Change::Write(..) | Change::Length(_) => {}
            }
        }
        left
    }
}
