//! Repairs an image: applies the changes that its check lists, and checks again.
//!
//! ```text
//!   ┌─▶ check (collects repairs) ─▶ those that are allowed ─▶ identity, once ─▶ changes ─▶ sync ─┐
//!   └──────────────────────────────────────────────────────────────────────────────────────────┘
//!        until a check has nothing left that may be repaired: its report is the result
//! ```
//!
//! The store is usually a draft that only records the changes (`disk/src/heal/repair/draft.rs`), so
//! that the whole repair is known, and its result checked, before the first byte of a file changes.
//!
//! What must hold:
//!
//! - A repair without [`Repair::CostsData`] changes no byte of the disk that can be read.
//! - Leaked space is given back only when no damage is left that stays or costs data. Until then
//!   the lost data may lie in that space.
//! - Between two syncs the changes may reach the file in any order. A change that needs an earlier
//!   one (a file that is cut, a log that is emptied) has a sync before it. So after each of them,
//!   however many are lost, the file is at least as sound as before the repair.

use crate::{
    Format, Result,
    error::ImageError,
    findings::{Change, CheckOutcome, CheckReport, Finding, Repair, RepairAction, Severity},
};
use diskwright_store::{Store, Zeroing};
use std::sync::Arc;

/// Maximum number of rounds: more than the largest table needs.
const ROUNDS_MAX: usize = 1024;

/// A step of a repair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairStep {
    /// The finding that is repaired.
    pub finding: Finding,
    /// What is done, a sentence without a full stop.
    pub what: String,
}

/// Repairs the image in `store`. Without `accept_loss` only what needs no guess; with it also what
/// costs data ([`Repair::CostsData`]). Calls `begin` before the changes of each step; the changes
/// of `None` are those of the image's identity, before all others.
///
/// Returns the report of a check of the result.
///
/// # Errors
/// As [`Driver::check`](crate::Driver::check); `Io` of a write.
pub fn repair_image(
    format: Format,
    store: &Arc<dyn Store>,
    accept_loss: bool,
    begin: &mut dyn FnMut(Option<RepairStep>) -> bool,
) -> Result<Option<CheckReport>> {
    let driver = format.driver();
    let (mut begun, mut lost) = (false, false);
    let mut last: Vec<(u64, String)> = Vec::new();
    for _ in 0..ROUNDS_MAX {
        let CheckOutcome { report, actions } = driver.examine(Arc::clone(store), true)?;
        let actions = allowed(&report, actions, accept_loss);
        let these: Vec<(u64, String)> =
            actions.iter().map(|action| (action.finding.offset_bytes, action.what.clone())).collect();
        // What a round did not repair, the next one does not repair either.
        if actions.is_empty() || these == last {
            return Ok(Some(report));
        }
        last = these;
        let costs = actions.iter().any(|action| action.finding.repair == Repair::CostsData);
        if !begun || costs && !lost {
            if !begin(None) {
                return Ok(None);
            }
            driver.begin_repair(store, costs)?;
            (begun, lost) = (true, lost | costs);
        }
        for RepairAction { finding, what, changes } in actions {
            if !begin(Some(RepairStep { finding, what })) {
                return Ok(None);
            }
            for change in &changes {
                apply(format, store, change)?;
            }
        }
        sync(&**store)?;
    }
    driver.check(Arc::clone(store)).map(Some)
}

/// The repairs of a round: damage first, and leaked space only when no damage is left.
fn allowed(report: &CheckReport, actions: Vec<RepairAction>, accept_loss: bool) -> Vec<RepairAction> {
    let stays = |finding: &Finding| {
        finding.severity == Severity::Corrupt
            && match finding.repair {
                Repair::NotNeeded | Repair::Lossless => false,
                Repair::CostsData => !accept_loss,
                Repair::Impossible => true,
            }
    };
    let (leaks, damage): (Vec<RepairAction>, Vec<RepairAction>) = actions
        .into_iter()
        .filter(|action| accept_loss || action.finding.repair == Repair::Lossless)
        .partition(|action| action.finding.severity == Severity::Leak);
    if !damage.is_empty() {
        damage
    } else if report.findings.iter().any(stays) {
        Vec::new()
    } else {
        leaks
    }
}

fn sync(store: &dyn Store) -> Result<()> {
    store.sync_data().map_err(|error| ImageError::io("make the repair durable", store, 0, error))
}

fn apply(format: Format, store: &Arc<dyn Store>, change: &Change) -> Result<()> {
    let at = |offset_bytes| move |error| ImageError::io("repair the file", &**store, offset_bytes, error);
    let len_bytes = || store.len_bytes().map_err(at(0));
    match change {
        Change::Write(offset_bytes, bytes) => store.write_at(bytes, *offset_bytes).map_err(at(*offset_bytes)),
        &Change::Free(range) => store.zero_range(range, Zeroing::Deallocate).map_err(at(range.offset_bytes)),
        &Change::Extend(end_bytes) => {
            if len_bytes()? < end_bytes {
                store.set_len(end_bytes).map_err(at(end_bytes))?;
                sync(&**store)?;
            }
            Ok(())
        }
        &Change::Cut(end_bytes) => {
            sync(&**store)?;
            if len_bytes()? > end_bytes {
                store.set_len(end_bytes).map_err(at(end_bytes))?;
            }
            Ok(())
        }
        Change::ReplayLog | Change::DropLog => format.driver().settle_log(store, *change == Change::ReplayLog),
    }
}
