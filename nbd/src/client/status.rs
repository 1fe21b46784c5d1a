//! From what block status tells to extents.
//!
//! Servers tell runs of any length; extents are whole sectors. A sector of which a part is data is
//! data. `base:allocation` says what is zero; the depth, where it is told, says which layer owns
//! it: 0 is none, 1 the top.

use super::tables::StatusFound;
use crate::wire::AllocationFlags;
use diskwright_store::{Extent, ExtentKind};

/// Makes extents of a range, front to back.
#[derive(Debug)]
pub(super) struct Extents<'a> {
    out: &'a mut Vec<Extent>,
    end_bytes: u64,
    sector_bytes: u64,
    /// Extents end here.
    told_bytes: u64,
}

/// What a run of one kind is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Said {
    kind: ExtentKind,
    depth: u32,
}

impl<'a> Extents<'a> {
    /// Of `start..end`, whole sectors.
    pub(super) fn new(start_bytes: u64, end_bytes: u64, sector_bytes: u32, out: &'a mut Vec<Extent>) -> Self {
        Self { out, end_bytes, sector_bytes: sector_bytes.into(), told_bytes: start_bytes }
    }

    /// Adds what was told from `at_bytes` on; both contexts begin there. Gives where the telling
    /// ended: at least one byte further.
    pub(super) fn add(&mut self, mut at_bytes: u64, status: &StatusFound) -> u64 {
        let mut depths = status.depth.iter().copied();
        let mut depth = depths.next();
        for run in &status.allocation {
            let mut left_bytes = run.len_bytes;
            while left_bytes > 0 {
                let Some(layer) = &mut depth else {
                    // The other context tells less; what is left is asked for again. (Or there is
                    // none.)
                    if !status.depth.is_empty() {
                        return at_bytes;
                    }
                    at_bytes = self.run(at_bytes, left_bytes, said(run.status, None));
                    break;
                };
                let len_bytes = left_bytes.min(layer.len_bytes);
                at_bytes = self.run(at_bytes, len_bytes, said(run.status, Some(layer.status)));
                left_bytes -= len_bytes;
                layer.len_bytes -= len_bytes;
                if layer.len_bytes == 0 {
                    depth = depths.next();
                }
            }
        }
        at_bytes
    }

    /// A run of any length. Data reach to the end of their last sector; zeros begin at their first
    /// whole one.
    fn run(&mut self, at_bytes: u64, len_bytes: u64, said: Said) -> u64 {
        let stop_bytes = at_bytes.saturating_add(len_bytes);
        let edge_bytes = match said.kind {
            ExtentKind::Data => stop_bytes.next_multiple_of(self.sector_bytes),
            // The next run decides about a sector that it shares.
            _ => stop_bytes - stop_bytes % self.sector_bytes,
        };
        self.tell(edge_bytes.min(self.end_bytes), said);
        stop_bytes
    }

    fn tell(&mut self, edge_bytes: u64, said: Said) {
        if edge_bytes <= self.told_bytes {
            return;
        }
        let (offset_bytes, len_bytes) = (self.told_bytes, edge_bytes - self.told_bytes);
        self.told_bytes = edge_bytes;
        match self.out.last_mut() {
            Some(last)
                if (last.kind, last.depth) == (said.kind, said.depth)
                    && last.offset_bytes + last.len_bytes == offset_bytes =>
            {
                last.len_bytes += len_bytes;
            }
            _ => self.out.push(Extent {
                offset_bytes,
                len_bytes,
                kind: said.kind,
                depth: said.depth,
                file: 0,
                file_offset_bytes: None,
            }),
        }
    }

    /// The last sector may have been left to a run that never came: what is behind the end of the
    /// export is zero.
    pub(super) fn finish(mut self) {
        self.tell(self.end_bytes, Said { kind: ExtentKind::Zero, depth: 0 });
    }
}

fn said(allocation: u64, depth: Option<u64>) -> Said {
    let zero = allocation & u64::from(AllocationFlags::ZERO.bits()) != 0;
    match depth {
        Some(0) if zero => Said { kind: ExtentKind::Unallocated, depth: 0 },
        _ => Said {
            kind: if zero { ExtentKind::Zero } else { ExtentKind::Data },
            depth: depth.map_or(0, |depth| u32::try_from(depth.saturating_sub(1)).unwrap_or(u32::MAX)),
        },
    }
}
