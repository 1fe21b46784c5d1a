//! What the members below the targets do in the window: the files and devices of a space.
//!
//! The conductor reads their counters when the window opens and closes, as it reads the CPU times
//! of the cores. Requests in flight at a boundary count by when they began.

use crate::{record::MemberRecord, target::OpenTarget};
use diskwright_store::MemberTraffic;

/// The counters at a moment, of each member once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Members(Vec<MemberTraffic>);

impl Members {
    pub(crate) fn now(targets: &[OpenTarget]) -> Self {
        let mut found: Vec<MemberTraffic> = Vec::new();
        for target in targets {
            MemberTraffic::merge(&mut found, target.device.member_traffic());
        }
        Self(found)
    }

    /// What each member has done since `earlier`.
    pub(crate) fn since(&self, earlier: &Self) -> Vec<MemberRecord> {
        let record = |now: &MemberTraffic| {
            let then = earlier.0.iter().find(|then| then.name == now.name);
            let done = now.traffic - then.map(|then| then.traffic).unwrap_or_default();
            MemberRecord {
                name: now.name.clone(),
                class: now.class.into(),
                reads: done.reads,
                writes: done.writes,
                read_bytes: done.read_bytes,
                written_bytes: done.written_bytes,
                syncs: done.syncs,
            }
        };
        self.0.iter().map(record).collect()
    }
}
