//! What a check finds, and the changes that repair it.
//!
//! ```text
//!   format's check ─▶ Finding (severity, place, found, expected) ─┬─▶ CheckReport
//!                        └ how: the changes that repair it ───────┴─▶ RepairAction, for a repair
//! ```
//!
//! A check and a repair run the same code: the code that reports a finding also says how it is
//! repaired. `check` drops that part. A repair (`repair.rs`) collects it, applies it to a draft of
//! the file and checks the draft, until nothing is left that it may repair.
//!
//! Memory: [`FINDINGS_MAX`] findings of each severity are listed and the others counted; a repair
//! collects [`ACTIONS_MAX`] changes at a time, and the next round finds the others.

use crate::error::{ImageError, Result};
use diskwright_store::{FileRange, Store};
use std::ops::Range;

/// Maximum number of listed findings of each severity.
pub(crate) const FINDINGS_MAX: usize = 1000;
/// Maximum number of repairs that are collected by one check.
const ACTIONS_MAX: usize = 1 << 16;

/// How serious a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Unusual, but the disk is intact.
    Note,
    /// Leaked space: nothing in the file refers to it.
    Leak,
    /// Damage: reads or writes may fail or return wrong data.
    Corrupt,
}

/// Whether a repair can remove a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Repair {
    /// Nothing has to be changed.
    NotNeeded,
    /// It is repaired without a guess, and every byte of the disk that can be read now stays the
    /// same.
    Lossless,
    /// It can only be repaired by giving up data. [`Finding::costs`] says which.
    CostsData,
    /// No repair is known.
    Impossible,
}

impl Repair {
    /// As it is shown to users: "repairable without loss".
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotNeeded => "not needed",
            Self::Lossless => "repairable without loss",
            Self::CostsData => "costs data",
            Self::Impossible => "cannot",
        }
    }
}

/// One finding of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How serious the finding is.
    pub severity: Severity,
    /// Offset in the file, in bytes.
    pub offset_bytes: u64,
    /// The structure that is not as the format demands: "footer", "BAT entry 5".
    pub structure: String,
    /// What was found there.
    pub found: String,
    /// What the format demands there. Empty for a note that nothing contradicts.
    pub expected: String,
    /// All of it as one sentence.
    pub message: String,
    /// Whether a repair can remove it.
    pub repair: Repair,
    /// With [`Repair::CostsData`]: the range of the disk that is given up, in bytes. `None` where
    /// no range is lost by this change alone: another finding reports it.
    pub costs: Option<Range<u64>>,
}

impl Finding {
    /// A finding whose sentence is "STRUCTURE: found FOUND, expected EXPECTED". Damage counts as
    /// impossible to repair until [`Finding::repair`] says otherwise.
    pub fn new(
        severity: Severity,
        offset_bytes: u64,
        structure: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        let (structure, found, expected) = (structure.into(), found.into(), expected.into());
        let message = format!("{structure}: found {found}, expected {expected}");
        let repair = if severity == Severity::Note { Repair::NotNeeded } else { Repair::Impossible };
        Self { severity, offset_bytes, structure, found, expected, message, repair, costs: None }
    }

    /// The finding with another sentence.
    #[must_use]
    pub fn says(self, message: impl Into<String>) -> Self {
        Self { message: message.into(), ..self }
    }
}

/// The result of a check of one image.
#[derive(Debug, Clone, Default)]
pub struct CheckReport {
    /// The findings, sorted by offset.
    pub findings: Vec<Finding>,
    /// Payload blocks that have data in the file.
    pub allocated_blocks: u64,
    /// All payload blocks of the virtual disk.
    pub total_blocks: u64,
    /// Bytes of the file that nothing refers to, holes included.
    pub leaked_bytes: u64,
}

impl CheckReport {
    /// The worst severity, or `None` when nothing was found.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }
}

/// One change of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// These bytes are written at this offset.
    Write(u64, Vec<u8>),
    /// The range reads as zeros, and its space is given back to the file system if possible.
    Free(FileRange),
    /// The file gets at least this length in bytes.
    Extend(u64),
    /// The file gets at most this length in bytes.
    Cut(u64),
    /// The log is replayed and emptied.
    ReplayLog,
    /// The log is emptied without a replay.
    DropLog,
}

/// A finding and the changes that repair it.
#[derive(Debug, Clone)]
pub(crate) struct RepairAction {
    pub(crate) finding: Finding,
    /// What is done, as a sentence without a full stop.
    pub(crate) what: String,
    pub(crate) changes: Vec<Change>,
}

/// What a check found, and how it is repaired.
#[derive(Debug, Default)]
pub(crate) struct CheckOutcome {
    pub(crate) report: CheckReport,
    pub(crate) actions: Vec<RepairAction>,
}

/// Collects the findings of a check in bounded memory.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    list: Vec<Finding>,
    /// By severity: number of listed findings, and of those left out.
    counts: [(usize, u64); 3],
    /// Among those that were left out, one that no repair removes without loss.
    stays: bool,
    actions: Option<Vec<RepairAction>>,
}

impl Findings {
    /// `for_repair`: also collects how the findings are repaired.
    pub(crate) fn new(for_repair: bool) -> Self {
        Self { actions: for_repair.then(Vec::new), ..Self::default() }
    }

    /// Whether repairs are collected: the caller need not prepare them otherwise.
    pub(crate) fn for_repair(&self) -> bool {
        self.actions.is_some()
    }

    /// Whether any damage or leak was found.
    pub(crate) fn has_faults(&self) -> bool {
        [Severity::Leak, Severity::Corrupt].into_iter().any(|severity| self.counts[severity as usize].0 > 0)
    }

    /// Adds a finding that is not repaired.
    pub(crate) fn add(&mut self, finding: Finding) {
        let (listed, left_out) = &mut self.counts[finding.severity as usize];
        if *listed < FINDINGS_MAX {
            *listed += 1;
            self.list.push(finding);
        } else {
            *left_out += 1;
            self.stays |= matches!(finding.repair, Repair::CostsData | Repair::Impossible);
        }
    }

    /// Adds a finding that a repair removes without loss of data.
    pub(crate) fn add_repairable(&mut self, finding: Finding, what: impl Into<String>, changes: Vec<Change>) {
        self.add_with(Finding { repair: Repair::Lossless, ..finding }, what.into(), changes);
    }

    /// Adds a finding whose repair gives up the range `costs` of the disk.
    pub(crate) fn give_up(
        &mut self,
        finding: Finding,
        costs: Option<Range<u64>>,
        what: impl Into<String>,
        changes: Vec<Change>,
    ) {
        self.add_with(Finding { repair: Repair::CostsData, costs, ..finding }, what.into(), changes);
    }

    fn add_with(&mut self, finding: Finding, what: String, changes: Vec<Change>) {
        if let Some(actions) = self.actions.as_mut().filter(|actions| actions.len() < ACTIONS_MAX) {
            actions.push(RepairAction { finding: finding.clone(), what, changes });
        }
        self.add(finding);
    }

    /// The findings sorted by offset, and how they are repaired. Of those that were left out their
    /// number is reported.
    pub(crate) fn finish(mut self, report: CheckReport) -> CheckOutcome {
        self.list.sort_by_key(|finding| finding.offset_bytes);
        let severities = [Severity::Note, Severity::Leak, Severity::Corrupt];
        for (severity, (_, left_out)) in severities.into_iter().zip(self.counts) {
            if left_out > 0 {
                let offset_bytes = self.list.last().map_or(0, |finding| finding.offset_bytes);
                let found = format!("{left_out} more findings");
                let message = format!("{left_out} more findings of this kind were left out.");
                let finding = Finding::new(severity, offset_bytes, "file", found, "").says(message);
                let repair = if self.stays { Repair::Impossible } else { Repair::Lossless };
                self.list.push(Finding { repair, ..finding });
            }
        }
        CheckOutcome {
            report: CheckReport { findings: self.list, ..report },
            actions: self.actions.unwrap_or_default(),
        }
    }
}

/// The finding for an error about the contents of a file: damage, or a feature that is not
/// supported.
///
/// # Errors
/// Every other error.
pub(crate) fn corruption(error: ImageError) -> Result<Finding> {
    match error {
        ImageError::Corrupt { structure, offset_bytes, found, expected, .. } => {
            Ok(Finding::new(Severity::Corrupt, offset_bytes, structure, found, expected))
        }
        ref unsupported @ ImageError::Unsupported { ref what, ref hint, .. } => {
            let finding = Finding::new(Severity::Corrupt, 0, "file", what.clone(), hint.clone());
            Ok(finding.says(unsupported.to_string()))
        }
        other => Err(other),
    }
}

/// Whether the file has no data in `range`, apart from parts of blocks of the file system at its
/// ends: its space was given back, and it reads as zeros. A store that does not know its holes has
/// data everywhere.
///
/// # Errors
/// `Io`.
pub(crate) fn is_hole(store: &dyn Store, range: FileRange) -> Result<bool> {
    const PAGE_BYTES: u64 = 4096;
    let start = range.offset_bytes.next_multiple_of(PAGE_BYTES);
    let end = range.offset_bytes.saturating_add(range.len_bytes) / PAGE_BYTES * PAGE_BYTES;
    let io = |error| ImageError::io("look for holes in the file", store, start, error);
    let data = if start < end { store.next_data(start).map_err(io)? } else { None };
    Ok(data.is_none_or(|data| data.offset_bytes >= end))
}
