//! Requests that need a plan: planned under the mutation lock, again after each piece of work,
//! until their parts can be given to the engine.

use super::{
    DiskQueue,
    task::{Cookie, RequestState, Task},
};
use crate::engine::{
    carry_out,
    chain::Chain,
    epoch::Parity,
    guard::guarded,
    map::{LayerId, Owner},
    plan::{self, Draft, Part, Pending, PlanResult},
    work::Work,
};
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::{ExternalTicket, Operation, Request, queue::validate};
use std::{io, sync::Arc};

impl DiskQueue {
    pub(super) fn begin_task(&mut self, request: Request, parity: Option<Parity>, is_zeros: bool) {
        let at = request.offset_bytes;
        let draft = std::mem::take(&mut self.spare);
        self.advance(Task { request, draft, at, is_continued: false, is_zeros, marked: None }, parity);
    }

    /// Plans a task, again after each piece of work, until it can be issued, rests or fails.
    pub(super) fn advance(&mut self, mut task: Task, parity: Option<Parity>) {
        loop {
            let shared = Arc::clone(&self.shared);
            let mut mutation = shared.lock();
            if !Arc::ptr_eq(&self.chain, &mutation.chain) {
                self.chain = Arc::clone(&mutation.chain);
            }
            // The chain that the plan is for decides: it may have a newer point.
            if let Some(view) = task.unmarked(&self.chain) {
                drop(mutation);
                if !view.passes(task.request.offset_bytes, task.request.len_bytes) {
                    let (offset_bytes, len_bytes) = (task.request.offset_bytes, task.request.len_bytes);
                    let ticket = self.rest(task);
                    view.request(offset_bytes, len_bytes, ticket);
                    return self.leave(parity);
                }
                task.marked = Some(view);
                continue;
            }
            let end = task.request.offset_bytes + task.request.len_bytes;
            let planned = guarded(&shared.poison, || match task.request.operation {
                // The disk may have shrunk since the request was validated.
                _ if end > self.chain.geometry.size_bytes => Err(validate(&task.request, &self.chain.geometry)
                    .err()
                    .unwrap_or_else(|| io::ErrorKind::InvalidInput.into())),
                Operation::Read => Ok(plan::plan_read(&mutation, task.request.offset_bytes, end, &mut task.draft)),
                Operation::WriteZeroes | Operation::Discard => {
                    let discard = task.request.operation == Operation::Discard;
                    plan::plan_zero(&mut mutation, &mut task.at, end, discard, &mut task.draft)
                }
                Operation::Write if task.is_zeros => {
                    plan::plan_zero(&mut mutation, &mut task.at, end, false, &mut task.draft)
                }
                Operation::Write | Operation::Flush => {
                    let start = task.request.offset_bytes;
                    plan::plan_write(&mut mutation, start, &mut task.at, end, &mut task.draft)
                }
            });
            if !self.chain.geometry.read_only {
                shared.try_recycle(&mut mutation);
            }
            let has_stage = task.at > task.request.offset_bytes
                && !(task.draft.parts.is_empty() && task.draft.pending.commits.is_empty());
            match planned {
                Err(error) => {
                    drop(mutation);
                    return self.issue(task, parity, Err(error), false);
                }
                Ok(PlanResult::Ready) => {
                    drop(mutation);
                    let done = task.at >= end || !task.goes_in_stages();
                    if done || has_stage {
                        return self.issue(task, parity, Ok(()), !done);
                    }
                }
                Ok(next @ (PlanResult::Work(_) | PlanResult::Busy(_))) if has_stage && task.goes_in_stages() => {
                    // The next stage plans this again. A block must not stay excluded for work that
                    // is not done now.
                    #[cfg(feature = "shuttle")]
                    let next = if is_broken(Rule::ExclusionEnds) { PlanResult::Ready } else { next };
                    if let PlanResult::Work(Work::CopyUp { layer, block }) = next {
                        mutation.claims.end_exclusion((layer, block));
                    }
                    drop(mutation);
                    return self.issue(task, parity, Ok(()), true);
                }
                Ok(PlanResult::Busy(key)) => {
                    self.leave(parity);
                    let ticket = self.rest(task);
                    return mutation.claims.wait(key, ticket);
                }
                Ok(PlanResult::Work(work)) => {
                    drop(mutation);
                    if self.hands_over {
                        let chain = Arc::clone(&self.chain);
                        let ticket = self.rest(task);
                        shared.request_work(carry_out::load(chain, work, ticket));
                        // Only now: a change of the chain waits for counted requests first, and
                        // then for the loader.
                        return self.leave(parity);
                    }
                    // The request stays counted during the work, which may write to the image:
                    // after a change of the chain that image must not be written. The work waits
                    // for no grace period.
                    if let Err(error) = guarded(&shared.poison, || shared.carry_out(&self.chain, &work)) {
                        return self.issue(task, parity, Err(error), false);
                    }
                }
            }
        }
    }

    /// Lets a task rest until its ticket is completed.
    fn rest(&mut self, task: Task) -> ExternalTicket {
        let tag = task.request.tag;
        self.resting += 1;
        let kept = self.keep(RequestState::Resting(Box::new(task)));
        self.engine.external(tag, Cookie::new(None, kept).0, None)
    }

    /// Starts the parts of a planned task. Their commits follow when they are done. If planning
    /// failed half-way, the planned parts are still carried out, because they hold blocks, and the
    /// request fails.
    fn issue(&mut self, mut task: Task, parity: Option<Parity>, planned: io::Result<()>, continues: bool) {
        let Request { tag, fua, buf_offset_bytes, .. } = task.request;
        let is_read = task.request.operation == Operation::Read;
        let payload = (task.request.buf.take(), task.request.segments.take());
        let in_one = payload.1.as_ref().is_none_or(|segments| segments.count() <= 1);
        let mut pending = std::mem::take(&mut task.draft.pending);
        pending.flush_after = fua && !continues && !is_read;
        let alone = planned.is_ok() && in_one && !task.is_continued;
        let durable = alone && self.is_durable_alone(&pending, &task.draft.parts);
        task.is_continued = true;
        (pending.flush_after, pending.is_durable) = (pending.flush_after && !durable, durable);
        let mut draft = std::mem::take(&mut task.draft);
        let offset_bytes = task.request.offset_bytes;
        let kept = if is_read { 0 } else { self.keep(RequestState::Parts(pending, continues.then(|| Box::new(task)))) };
        let slot = self.begin(tag, Cookie::new(parity, kept), payload);
        if let Err(error) = planned {
            self.engine.fail(&slot, error);
        } else {
            for &run in &draft.runs {
                let start = buf_offset_bytes + (run.start_bytes - offset_bytes) as usize;
                let range = start..start + run.len_bytes as usize;
                match run.owner {
                    Owner::Data { source, offset_bytes } => match self.target(source) {
                        Ok(target) => self.engine.read(&slot, target, offset_bytes, range),
                        Err(error) => self.engine.fail(&slot, error),
                    },
                    Owner::Damaged { layer } => self.engine.fail(&slot, self.chain.damage(layer, run.start_bytes)),
                    Owner::Compressed { layer } => {
                        let bytes = decompressed(&self.chain, &draft, layer, run.start_bytes, run.len_bytes);
                        match bytes {
                            Some(bytes) => self.engine.fill(&slot, start, bytes),
                            None => self.engine.fail(&slot, io::ErrorKind::UnexpectedEof.into()),
                        }
                    }
                    Owner::Zero { .. } | Owner::Absent | Owner::Lazy { .. } => self.engine.fill_zeros(&slot, range),
                }
            }
        }
        for part in draft.parts.drain(..) {
            let source = match &part {
                Part::Payload { source, .. } | Part::Shared { source, .. } | Part::Zeroes { source, .. } => *source,
            };
            match (self.target(source), part) {
                (Ok(target), Part::Payload { file_offset_bytes, start, len, .. }) => {
                    let start = buf_offset_bytes + start;
                    self.engine.write(&slot, target, file_offset_bytes, start..start + len, durable);
                }
                (Ok(target), Part::Shared { file_offset_bytes, bytes, .. }) => {
                    self.engine.write_shared(&slot, target, file_offset_bytes, &bytes);
                }
                (Ok(target), Part::Zeroes { range, how, .. }) => self.engine.write_zeroes(&slot, target, range, how),
                (Err(error), _) => self.engine.fail(&slot, error),
            }
        }
        self.engine.end(slot);
        draft.runs.clear();
        draft.decoded.clear();
        self.spare = draft;
    }

    /// Whether a write with FUA can be made durable by RWF_DSYNC alone: its payload is one
    /// contiguous part, and no metadata waits for a flush. For several parts one flush is cheaper
    /// than one RWF_DSYNC each.
    fn is_durable_alone(&self, pending: &Pending, parts: &[Part]) -> bool {
        pending.flush_after
            && pending.commits.is_empty()
            && pending.initialised.is_empty()
            && matches!(parts, [Part::Payload { .. }])
            && self.shared.check_poison(&self.chain).is_ok()
            && pending.member.as_ref().and_then(|image| image.image.writer()).is_some_and(|writer| !writer.is_dirty())
    }
}

/// A range of a decompressed block; `None` if it is not in the draft.
fn decompressed<'a>(
    chain: &Chain,
    draft: &'a Draft,
    layer: LayerId,
    start_bytes: u64,
    len_bytes: u64,
) -> Option<&'a [u8]> {
    let block_bytes = chain.member(layer)?.block_bytes;
    let (block, within) = (start_bytes / block_bytes, (start_bytes % block_bytes) as usize);
    let (.., cell) = draft.decoded.iter().find(|(of, number, _)| (*of, *number) == (layer, block))?;
    cell.get()?.get(within..within + len_bytes as usize)
}
