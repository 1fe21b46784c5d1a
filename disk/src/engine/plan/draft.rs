//! The plan of a request: its parts for the engine, and what follows when they are done.

use crate::engine::{
    chain::Member,
    claims,
    map::{LayerId, Run, SourceId},
    mutation::Mutation,
    work::{Decoded, Work},
};
use diskwright_image::Commit;
use diskwright_store::{
    IoBuf,
    store::{FileRange, Zeroing},
};
use std::sync::Arc;

/// The result of planning.
#[derive(Debug)]
pub(crate) enum PlanResult {
    /// The parts can be carried out.
    Ready,
    Work(Work),
    /// This block must be released first.
    Busy(claims::Key),
}

/// What to do when a request's payload is in place.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// The image that the commits are for.
    pub(crate) member: Option<Member>,
    pub(crate) commits: Vec<(u64, Commit)>,
    pub(crate) initialised: Vec<u64>,
    pub(crate) flush_after: bool,
    pub(crate) is_sync: bool,
    /// A success reports that the payload is durable, and no flush follows.
    pub(crate) is_durable: bool,
}

/// A part of a write, started after the lock was released.
#[derive(Debug)]
pub(crate) enum Part {
    Payload { source: SourceId, file_offset_bytes: u64, start: usize, len: usize },
    Shared { source: SourceId, file_offset_bytes: u64, bytes: Arc<IoBuf> },
    Zeroes { source: SourceId, range: FileRange, how: Zeroing },
}

/// Appends a part, or extends the last one if both are contiguous in one file. So small adjacent
/// blocks are written by one call.
pub(super) fn push_part(parts: &mut Vec<Part>, part: Part) {
    match (parts.last_mut(), &part) {
        (
            Some(Part::Payload { source, file_offset_bytes, start, len }),
            Part::Payload { source: next, file_offset_bytes: next_offset, start: next_start, len: more },
        ) if source == next && *file_offset_bytes + *len as u64 == *next_offset && *start + *len == *next_start => {
            *len += more;
        }
        (Some(Part::Zeroes { source, range, how }), Part::Zeroes { source: next, range: more, how: next_how })
            if source == next && how == next_how && range.offset_bytes + range.len_bytes == more.offset_bytes =>
        {
            range.len_bytes += more.len_bytes;
        }
        _ => parts.push(part),
    }
}

/// The plan of a request so far.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    pub(crate) parts: Vec<Part>,
    pub(crate) pending: Pending,
    /// Reads only: the owners of the range.
    pub(crate) runs: Vec<Run>,
    /// Reads only: the compressed blocks, with their bytes once decompressed.
    pub(crate) decoded: Vec<(LayerId, u64, Decoded)>,
}

impl Draft {
    /// Starts a plan whose commits are for `image`. If an earlier plan was for another image, that
    /// plan is dropped. Its reservations stay with the other image.
    pub(super) fn is_for(&mut self, mutation: &mut Mutation, image: &Member) {
        if self.pending.member.as_ref().is_some_and(|member| member.id == image.id) {
            return;
        }
        self.start_over(mutation);
        self.pending.member = Some(image.clone());
    }

    /// Drops the plan and releases all blocks.
    pub(super) fn start_over(&mut self, mutation: &mut Mutation) {
        self.parts.clear();
        let Pending { member: Some(member), commits, initialised, .. } = &mut self.pending else { return };
        for block in commits.drain(..).map(|(block, _)| block).chain(initialised.drain(..)) {
            mutation.claims.release((member.id, block));
        }
    }
}
