//! Converts block status to extents.
//!
//! A server reports runs of any length, but extents are whole sectors: a sector that is partly data
//! is data. `base:allocation` says what is zero. The allocation depth, if reported, says which
//! layer owns a run: 0 none, 1 the top.

use super::tables::StatusFound;
use crate::wire::AllocationFlags;
use diskwright_store::{Extent, ExtentKind};

/// Builds the extents of a range, from front to back.
#[derive(Debug)]
pub(super) struct Extents<'a> {
    out: &'a mut Vec<Extent>,
    end_bytes: u64,
    sector_bytes: u64,
    /// End of the extents built so far.
    built_bytes: u64,
}

/// The state of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RunState {
    kind: ExtentKind,
    depth: u32,
}

impl<'a> Extents<'a> {
    /// Builds extents of `start_bytes..end_bytes`, which are whole sectors.
    pub(super) fn new(start_bytes: u64, end_bytes: u64, sector_bytes: u32, out: &'a mut Vec<Extent>) -> Self {
        Self { out, end_bytes, sector_bytes: sector_bytes.into(), built_bytes: start_bytes }
    }

    /// Adds the status reported from `at_bytes` on, where both contexts begin. Returns where the
    /// status ended: at least one byte further.
    pub(super) fn add(&mut self, mut at_bytes: u64, status: &StatusFound) -> u64 {
        let mut depths = status.depth.iter().copied();
        let mut depth = depths.next();
        for run in &status.allocation {
            let mut left_bytes = run.len_bytes;
            while left_bytes > 0 {
                let Some(layer) = &mut depth else {
                    // The depth context covers less than the allocation context: the rest is
                    // requested again. (Or there is no depth context.)
                    if !status.depth.is_empty() {
                        return at_bytes;
                    }
                    at_bytes = self.run(at_bytes, left_bytes, run_state(run.status, None));
                    break;
                };
                let len_bytes = left_bytes.min(layer.len_bytes);
                at_bytes = self.run(at_bytes, len_bytes, run_state(run.status, Some(layer.status)));
                left_bytes -= len_bytes;
                layer.len_bytes -= len_bytes;
                if layer.len_bytes == 0 {
                    depth = depths.next();
                }
            }
        }
        at_bytes
    }

    /// Adds a run of any length. Data extends to the end of its last sector; zeros begin at their
    /// first whole sector.
    fn run(&mut self, at_bytes: u64, len_bytes: u64, run_state: RunState) -> u64 {
        let stop_bytes = at_bytes.saturating_add(len_bytes);
        let edge_bytes = match run_state.kind {
            ExtentKind::Data => stop_bytes.next_multiple_of(self.sector_bytes),
            // The next run decides the state of a sector that both share.
            _ => stop_bytes - stop_bytes % self.sector_bytes,
        };
        self.extend_to(edge_bytes.min(self.end_bytes), run_state);
        stop_bytes
    }

    fn extend_to(&mut self, edge_bytes: u64, run_state: RunState) {
        if edge_bytes <= self.built_bytes {
            return;
        }
        let (offset_bytes, len_bytes) = (self.built_bytes, edge_bytes - self.built_bytes);
        self.built_bytes = edge_bytes;
        match self.out.last_mut() {
            Some(last)
                if (last.kind, last.depth) == (run_state.kind, run_state.depth)
                    && last.offset_bytes + last.len_bytes == offset_bytes =>
            {
                last.len_bytes += len_bytes;
            }
            _ => self.out.push(Extent {
                offset_bytes,
                len_bytes,
                kind: run_state.kind,
                depth: run_state.depth,
                file: 0,
                file_offset_bytes: None,
            }),
        }
    }

    /// Adds the last sector if it is missing: the export ends within it, and beyond the end is
    /// zero.
    pub(super) fn finish(mut self) {
        self.extend_to(self.end_bytes, RunState { kind: ExtentKind::Zero, depth: 0 });
    }
}

fn run_state(allocation: u64, depth: Option<u64>) -> RunState {
    let zero = allocation & u64::from(AllocationFlags::ZERO.bits()) != 0;
    match depth {
        Some(0) if zero => RunState { kind: ExtentKind::Unallocated, depth: 0 },
        _ => RunState {
            kind: if zero { ExtentKind::Zero } else { ExtentKind::Data },
            depth: depth.map_or(0, |depth| u32::try_from(depth.saturating_sub(1)).unwrap_or(u32::MAX)),
        },
    }
}
