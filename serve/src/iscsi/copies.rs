//! EXTENDED COPY: the server copies blocks within a disk or from one to another, and no data pass
//! the network.
//!
//! ```text
//!   list ─▶ units and ranges checked ─▶ Copying ─▶ read a piece ─▶ write it, or clear zeros ─┐
//!                                                   ▲───────────────────────────────────────┘
//! ```
//!
//! All ranges are checked before anything is copied. The initiator must have both disks as logical
//! units, and reservations must let it read the one and write the other, with each piece anew. A
//! copy of blocks onto later blocks of the same disk begins at its end, so that it may overlap.
//!
//! A copy holds one piece in memory, which counts for the client's share.

use super::{
    replies::{Outcome, cut},
    state::{Asked, CopyResult, CopyRun, Copying, Iscsi, Step},
};
use crate::{
    net::{
        connection::Connection,
        core::Core,
        flights::{ClientRequest, Contents},
        pool::HEADER_ROOM_BYTES,
    },
    reservations::Seat,
};
use diskwright_iscsi::scsi::{
    Sense,
    command::Class,
    copy::{self, CopyList, CopyState},
    status,
};
use diskwright_store::{Operation, all_zero};
use std::{io, sync::Arc};

/// Copies of which the results are kept.
const RESULTS_MAX: usize = 32;

/// Length of a segment at most: 65,535 blocks of 4 KiB.
const SEGMENT_BYTES_MAX: u32 = 65535 << 12;

impl Core<Iscsi> {
    /// Begins a copy: its list is here.
    pub(super) fn start_copy(&mut self, conn: &mut Connection<Iscsi>, asked: &ClientRequest<Asked>, list: &[u8]) {
        let outcome = match CopyList::decode(list).and_then(|list| Ok((list.id, self.runs_of(&list)?))) {
            Err(sense) => Outcome::Failed(sense),
            Ok((id, runs)) => match self.count_copy(conn, &runs) {
                Err(outcome) => outcome,
                Ok(counted) => {
                    let copying =
                        Copying { id, next: 0, done_bytes: 0, copied_bytes: 0, runs, is_read: false, counted };
                    keep_result(conn, &copying, CopyState::Copying);
                    return self.copy_next(conn, asked, Box::new(copying));
                }
            },
        };
        self.finish(conn, asked, outcome);
    }

    /// The ranges of a list.
    fn runs_of(&self, list: &CopyList) -> Result<Vec<CopyRun>, Sense> {
        let exports = Arc::clone(&self.exports);
        // The index of the export, and its description.
        let units = list.units.iter().map(|unit| {
            let described =
                (0..exports.indexes()).filter_map(|index| Some((index, self.describe(exports.here(index)?))));
            described
                .into_iter()
                .find(|(_, disk)| disk.designators().contains(&unit.designator))
                .ok_or(Sense::COPY_UNREACHABLE)
                .and_then(
                    |found| {
                        if found.1.block_bytes == unit.block_bytes { Ok(found) } else { Err(Sense::COPY_UNIT) }
                    },
                )
        });
        let units = units.collect::<Result<Vec<_>, _>>()?;
        let runs = list.segments.iter().map(|segment| {
            let of = |index: usize, first: u64| {
                let (export, disk) = units.get(index).ok_or(Sense::COPY_UNREACHABLE)?;
                let end = first.checked_add(segment.blocks).filter(|&end| end <= disk.blocks);
                end.ok_or(Sense::COPY_ABORTED)?;
                Ok((*export as u32, first * u64::from(disk.block_bytes), disk))
            };
            let (source, from_bytes, read) = of(segment.source, segment.from)?;
            let (destination, to_bytes, written) = of(segment.destination, segment.to)?;
            if read.block_bytes != written.block_bytes {
                return Err(Sense::COPY_UNIT);
            }
            if written.is_read_only {
                return Err(Sense::WRITE_PROTECTED);
            }
            let len_bytes = segment.blocks * u64::from(read.block_bytes);
            Ok(CopyRun { source, destination, from_bytes, to_bytes, len_bytes })
        });
        runs.collect()
    }

    /// Counts the copy among the requests in flight of the disks that it touches, and opens their
    /// queues.
    fn count_copy(
        &mut self,
        conn: &Connection<Iscsi>,
        runs: &[CopyRun],
    ) -> Result<Vec<crate::reservations::Counted>, Outcome> {
        let mut exports: Vec<u32> = runs.iter().flat_map(|run| [run.source, run.destination]).collect();
        exports.sort_unstable();
        exports.dedup();
        for &export in &exports {
            self.open_queue(export as usize).map_err(|error| {
                tracing::warn!(%error, "a copy failed");
                Outcome::Failed(Sense::INTERNAL)
            })?;
        }
        Ok(exports.iter().filter_map(|&export| conn.session.units.seat(export as usize).map(Seat::count)).collect())
    }

    /// Reads the next piece, or ends the copy.
    fn copy_next(&mut self, conn: &mut Connection<Iscsi>, asked: &ClientRequest<Asked>, mut copying: Box<Copying>) {
        while copying.runs.get(copying.next).is_some_and(|run| copying.done_bytes >= run.len_bytes) {
            (copying.next, copying.done_bytes) = (copying.next + 1, 0);
        }
        let Some(run) = copying.runs.get(copying.next).copied() else {
            keep_result(conn, &copying, CopyState::Done);
            return self.finish(conn, asked, Outcome::Good);
        };
        let units = &mut conn.session.units;
        let may =
            units.allows(run.source as usize, Class::Reads) && units.allows(run.destination as usize, Class::Writes);
        if !may {
            keep_result(conn, &copying, CopyState::Failed);
            return self.finish(conn, asked, Outcome::Status(status::RESERVATION_CONFLICT));
        }
        let (offset_bytes, len_bytes) = run.piece(copying.done_bytes);
        copying.is_read = false;
        let reading =
            ClientRequest { export: run.source, offset_bytes: run.from_bytes + offset_bytes, len_bytes, ..*asked };
        if let Some(task) = conn.session.tasks.get_mut(asked.own.slot) {
            task.step = Step::Copy(copying);
            self.read(conn, &reading);
        }
    }

    /// A piece was read or written.
    pub(super) fn copy_step(
        &mut self,
        conn: &mut Connection<Iscsi>,
        asked: &ClientRequest<Asked>,
        mut copying: Box<Copying>,
        contents: Contents,
    ) {
        let Some(run) = copying.runs.get(copying.next).copied() else {
            contents.into_bufs().for_each(|buf| self.pool.give(buf));
            return self.finish(conn, asked, Outcome::Failed(Sense::INTERNAL));
        };
        let (offset_bytes, len_bytes) = run.piece(copying.done_bytes);
        if copying.is_read {
            contents.into_bufs().for_each(|buf| self.pool.give(buf));
            copying.done_bytes += len_bytes;
            copying.copied_bytes += len_bytes;
            return self.copy_next(conn, asked, copying);
        }
        copying.is_read = true;
        let writing =
            ClientRequest { export: run.destination, offset_bytes: run.to_bytes + offset_bytes, len_bytes, ..*asked };
        let is_zero = is_zero(&contents, len_bytes as usize);
        let Some(task) = conn.session.tasks.get_mut(asked.own.slot) else {
            return contents.into_bufs().for_each(|buf| self.pool.give(buf));
        };
        task.step = Step::Copy(copying);
        if is_zero {
            contents.into_bufs().for_each(|buf| self.pool.give(buf));
            self.clear(conn, &writing, Operation::WriteZeroes, false);
        } else {
            self.write_kept(conn, &writing, contents, 0);
        }
    }

    /// A read or write of a copy has failed.
    pub(super) fn copy_failed(
        &mut self,
        conn: &mut Connection<Iscsi>,
        asked: &ClientRequest<Asked>,
        copying: &Copying,
        error: &io::Error,
    ) {
        keep_result(conn, copying, CopyState::Failed);
        let sense = Sense::of_error(error, copying.is_read);
        let (offset_bytes, len_bytes, writes) = (asked.offset_bytes, asked.len_bytes, copying.is_read);
        let export = self.exports.here(asked.export as usize).map_or("", |export| export.name.as_str());
        tracing::warn!(%export, peer = %conn.peer, writes, offset_bytes, len_bytes, %error, "a copy failed");
        self.finish(conn, asked, Outcome::Failed(sense));
    }
}

/// COPY STATUS.
pub(super) fn result(conn: &Connection<Iscsi>, id: u8, room_bytes: u32) -> Outcome {
    match conn.session.copies.iter().find(|one| one.id == id) {
        Some(found) => cut(copy::status(found.state, found.segments, found.copied_bytes), room_bytes),
        None => Outcome::Failed(Sense::INVALID_FIELD),
    }
}

/// OPERATING PARAMETERS.
pub(super) fn parameters(room_bytes: u32) -> Outcome {
    cut(copy::parameters(SEGMENT_BYTES_MAX), room_bytes)
}

fn keep_result(conn: &mut Connection<Iscsi>, copying: &Copying, state: CopyState) {
    let Some(id) = copying.id else { return };
    let copies = &mut conn.session.copies;
    copies.retain(|one| one.id != id);
    if copies.len() >= RESULTS_MAX {
        copies.pop_front();
    }
    copies.push_back(CopyResult { id, state, segments: copying.next as u16, copied_bytes: copying.copied_bytes });
}

fn is_zero(contents: &Contents, len_bytes: usize) -> bool {
    let mut left_bytes = len_bytes;
    contents.first.iter().chain(&contents.more).all(|buf| {
        let now_bytes = left_bytes.min(buf.len() - HEADER_ROOM_BYTES);
        left_bytes -= now_bytes;
        all_zero(&buf[HEADER_ROOM_BYTES..][..now_bytes])
    })
}
