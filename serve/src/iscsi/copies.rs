//! EXTENDED COPY and the commands of tokens (ODX): the server copies blocks within a disk or from
//! one to another, and no data pass the network.
//!
//! ```text
//!   POPULATE TOKEN ─▶ tokens.rs ◀─ WRITE USING TOKEN
//!   units and ranges checked ─▶ Copying ─▶ read a piece ─▶ write it, or clear zeros ─┐
//!                                              ▲─────────────────────────────────────┘
//! ```
//!
//! All ranges are checked before anything is copied. The initiator must have both disks as logical
//! units, and reservations must let it read the one and write the other, with each piece anew. A
//! copy of blocks onto later blocks of the same disk begins at its end, so that it may overlap.
//!
//! A copy holds one piece in memory, which counts for the client's share.

use super::{
    replies::{Outcome, cut},
    state::{Asked, CopyResult, CopyRun, Copying, Iscsi, Step, TokenResult, TokenRun, ZEROS},
    tokens::TokenData,
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
    Described, Sense,
    command::Class,
    copy::{self, CopyList, CopyState, copies},
    status,
    token::{self, BlockRange, PopulateList, Token, TokenState, WriteList},
};
use diskwright_store::{ExtentKind, Operation, all_zero};
use ring::rand::{SecureRandom, SystemRandom};
use std::{io, ops::Range, sync::Arc};

/// Bytes of one copy by a token at most. Initiators wait 4 s for it, and ask for the rest again.
pub(super) const COPY_BY_TOKEN_BYTES: u64 = 256 << 20;

/// Bytes that a token stands for at most.
pub(super) const TOKEN_BYTES_MAX: u64 = 1 << 40;

/// Copies of which the results are kept.
const RESULTS_MAX: usize = 32;

/// Length of a segment at most: 65,535 blocks of 4 KiB.
const SEGMENT_BYTES_MAX: u32 = 65535 << 12;

impl Core<Iscsi> {
    /// EXTENDED COPY: its list is here.
    pub(super) fn start_copy(&mut self, conn: &mut Connection<Iscsi>, asked: &ClientRequest<Asked>, list: &[u8]) {
        match CopyList::decode(list).and_then(|list| Ok((list.id, self.runs_of(&list)?))) {
            Err(sense) => self.finish(conn, asked, Outcome::Failed(sense)),
            Ok((id, runs)) => self.begin_copy(conn, asked, (id, None), runs),
        }
    }

    /// POPULATE TOKEN: its list is here.
    pub(super) fn populate_token(
        &mut self,
        conn: &mut Connection<Iscsi>,
        asked: &ClientRequest<Asked>,
        list_id: u32,
        list: &[u8],
    ) {
        let done = self.make_token(asked, list);
        let outcome = match done {
            Ok((token, blocks)) => {
                let (action, state) = (copies::POPULATE_TOKEN, TokenState::Done);
                keep_token_result(conn, TokenResult { list_id, action, state, blocks, token: Some(token) });
                Outcome::Good
            }
            Err(outcome) => outcome,
        };
        self.finish(conn, asked, outcome);
    }

    /// Makes a token. Returns it with the number of its blocks.
    fn make_token(&self, asked: &ClientRequest<Asked>, list: &[u8]) -> Result<(Token, u64), Outcome> {
        let list = PopulateList::decode(list).map_err(Outcome::Failed)?;
        let export = self.exports.here(asked.export as usize).ok_or(Outcome::Failed(Sense::NO_UNIT))?;
        let claims = self.claims(asked.export as usize).ok_or(Outcome::Failed(Sense::NO_UNIT))?;
        let disk = self.describe(export);
        let ranges = ranges_of(&disk, &list.ranges).map_err(Outcome::Failed)?;
        let blocks = list.ranges.iter().map(|(_, blocks)| blocks).sum::<u64>();
        let len_bytes = blocks.saturating_mul(disk.block_bytes.into());
        if len_bytes > TOKEN_BYTES_MAX {
            return Err(Outcome::Failed(Sense::INVALID_PARAMETER));
        }
        let mut id = [0; 32];
        SystemRandom::new().fill(&mut id).map_err(|_| Outcome::Failed(Sense::INTERNAL))?;
        // Data that are being written are neither the old nor the new ones.
        let watch = claims.watch(ranges.clone()).ok_or(Outcome::Status(status::BUSY))?;
        let device = Arc::downgrade(&export.device);
        let data = TokenData { device, ranges, block_bytes: disk.block_bytes, watch };
        self.shared.tokens.add(id, data, list.timeout_s);
        Ok((Token::Data { id, len_bytes }, blocks))
    }

    /// WRITE USING TOKEN: its list is here.
    pub(super) fn write_using_token(
        &mut self,
        conn: &mut Connection<Iscsi>,
        asked: &ClientRequest<Asked>,
        list_id: u32,
        list: &[u8],
    ) {
        match self.token_runs_of(asked, list_id, list) {
            Err(sense) => {
                let (action, state) = (copies::WRITE_USING_TOKEN, TokenState::Failed(sense));
                keep_token_result(conn, TokenResult { list_id, action, state, blocks: 0, token: None });
                self.finish(conn, asked, Outcome::Failed(sense));
            }
            Ok((runs, token)) => self.begin_copy(conn, asked, (None, Some(token)), runs),
        }
    }

    /// What a token is written to, up to [`COPY_BY_TOKEN_BYTES`].
    fn token_runs_of(
        &self,
        asked: &ClientRequest<Asked>,
        list_id: u32,
        list: &[u8],
    ) -> Result<(Vec<CopyRun>, TokenRun), Sense> {
        let list = WriteList::decode(list)?;
        let export = self.exports.here(asked.export as usize).ok_or(Sense::NO_UNIT)?;
        let disk = self.describe(export);
        let mut at_bytes = list.offset_blocks.checked_mul(disk.block_bytes.into()).ok_or(Sense::INVALID_PARAMETER)?;
        let data = match &list.token {
            Token::Zeros => None,
            Token::Data { id, .. } => Some(self.shared.tokens.find(id)?),
        };
        if data.as_ref().is_some_and(|data| data.block_bytes != disk.block_bytes) {
            return Err(Sense::INVALID_PARAMETER);
        }
        let mut left_bytes = COPY_BY_TOKEN_BYTES;
        let (mut runs, mut is_part) = (Vec::new(), false);
        for range in ranges_of(&disk, &list.ranges)? {
            let len_bytes = (range.end - range.start).min(left_bytes);
            is_part |= len_bytes < range.end - range.start;
            left_bytes -= len_bytes;
            if len_bytes == 0 {
                continue;
            }
            let Some(data) = &data else {
                runs.push(CopyRun {
                    source: ZEROS,
                    destination: asked.export,
                    from_bytes: 0,
                    to_bytes: range.start,
                    len_bytes,
                });
                continue;
            };
            let end_bytes = at_bytes.checked_add(range.end - range.start).ok_or(Sense::INVALID_PARAMETER)?;
            if end_bytes > data.len_bytes() {
                return Err(Sense::INVALID_PARAMETER);
            }
            let of = |index: &usize| {
                let device = self.exports.here(*index).map(|export| Arc::downgrade(&export.device));
                device.is_some_and(|device| device.ptr_eq(&data.device))
            };
            let source = (0..self.exports.indexes()).find(of).ok_or(Sense::TOKEN_REVOKED)?;
            let mut to_bytes = range.start;
            for from in data.within(at_bytes..at_bytes + len_bytes) {
                let len_bytes = from.end - from.start;
                let (source, destination) = (source as u32, asked.export);
                runs.push(CopyRun { source, destination, from_bytes: from.start, to_bytes, len_bytes });
                to_bytes += len_bytes;
            }
            at_bytes = end_bytes;
        }
        if let (Token::Data { id, .. }, true) = (&list.token, list.deletes) {
            self.shared.tokens.remove(id);
        }
        let watch = data.map(|data| data.watch);
        Ok((runs, TokenRun { list_id, watch, is_part, block_bytes: disk.block_bytes }))
    }

    /// Begins to copy runs: for EXTENDED COPY with its identifier, or by a token.
    fn begin_copy(
        &mut self,
        conn: &mut Connection<Iscsi>,
        asked: &ClientRequest<Asked>,
        (id, token): (Option<u8>, Option<TokenRun>),
        runs: Vec<CopyRun>,
    ) {
        match self.count_copy(conn, &runs) {
            Err(outcome) => self.finish(conn, asked, outcome),
            Ok(counted) => {
                let (next, done_bytes, copied_bytes, is_read) = (0, 0, 0, false);
                let copying = Copying { id, next, done_bytes, copied_bytes, runs, is_read, token, counted };
                keep_result(conn, &copying, CopyState::Copying, None);
                self.copy_next(conn, asked, Box::new(copying));
            }
        }
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
        let mut exports: Vec<u32> =
            runs.iter().flat_map(|run| [run.source, run.destination]).filter(|&export| export != ZEROS).collect();
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
            keep_result(conn, &copying, CopyState::Done, None);
            return self.finish(conn, asked, Outcome::Good);
        };
        let units = &mut conn.session.units;
        let may_read = run.source == ZEROS || units.allows(run.source as usize, Class::Reads);
        let may = may_read && units.allows(run.destination as usize, Class::Writes);
        if !may {
            keep_result(conn, &copying, CopyState::Failed, None);
            return self.finish(conn, asked, Outcome::Status(status::RESERVATION_CONFLICT));
        }
        let (offset_bytes, len_bytes) = run.piece(copying.done_bytes);
        copying.is_read = run.source == ZEROS;
        let at = |export: u32, first_bytes: u64| ClientRequest {
            export,
            offset_bytes: first_bytes + offset_bytes,
            len_bytes,
            ..*asked
        };
        if let Some(task) = conn.session.tasks.get_mut(asked.own.slot) {
            task.step = Step::Copy(copying);
            if run.source == ZEROS {
                return self.clear(conn, &at(run.destination, run.to_bytes), Operation::WriteZeroes, false);
            }
            self.read(conn, &at(run.source, run.from_bytes));
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
        // The read is of what the token stands for if no write had begun when it ended.
        if copying.token.as_ref().and_then(|token| token.watch.as_ref()).is_some_and(|watch| watch.has_changed()) {
            contents.into_bufs().for_each(|buf| self.pool.give(buf));
            keep_result(conn, &copying, CopyState::Failed, Some(Sense::TOKEN_REVOKED));
            return self.finish(conn, asked, Outcome::Failed(Sense::TOKEN_REVOKED));
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
            // What takes no space in the source takes none in the destination.
            let is_hole = self.is_hole(run.source as usize, run.from_bytes + offset_bytes, len_bytes);
            let operation = if is_hole { Operation::Discard } else { Operation::WriteZeroes };
            self.clear(conn, &writing, operation, false);
        } else {
            self.write_kept(conn, &writing, contents, 0);
        }
    }

    /// Whether a disk has no data of its own in a range.
    fn is_hole(&self, export: usize, offset_bytes: u64, len_bytes: u64) -> bool {
        let Some(export) = self.exports.here(export) else { return false };
        let mut extents = Vec::new();
        let found = export.device.extents(offset_bytes, len_bytes, &mut extents);
        found.is_ok() && !extents.iter().any(|extent| matches!(extent.kind, ExtentKind::Data | ExtentKind::Damaged))
    }

    /// A read or write of a copy has failed.
    pub(super) fn copy_failed(
        &mut self,
        conn: &mut Connection<Iscsi>,
        asked: &ClientRequest<Asked>,
        copying: &Copying,
        error: &io::Error,
    ) {
        let sense = Sense::of_error(error, copying.is_read);
        keep_result(conn, copying, CopyState::Failed, Some(sense));
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

/// RECEIVE ROD TOKEN INFORMATION.
pub(super) fn token_information(conn: &Connection<Iscsi>, list_id: u32, room_bytes: u32) -> Outcome {
    match conn.session.token_results.iter().find(|one| one.list_id == list_id) {
        Some(found) => cut(token::information(found.action, found.state, found.blocks, found.token), room_bytes),
        None => Outcome::Failed(Sense::INVALID_FIELD),
    }
}

/// Keeps how a copy stands. `why` is the sense data of one that has failed.
fn keep_result(conn: &mut Connection<Iscsi>, copying: &Copying, state: CopyState, why: Option<Sense>) {
    if let Some(token) = &copying.token {
        let state = match state {
            CopyState::Copying => TokenState::Working,
            CopyState::Done if token.is_part => TokenState::Part,
            CopyState::Done => TokenState::Done,
            CopyState::Failed => TokenState::Failed(why.unwrap_or(Sense::COPY_ABORTED)),
        };
        let blocks = copying.copied_bytes / u64::from(token.block_bytes.max(1));
        let (list_id, action) = (token.list_id, copies::WRITE_USING_TOKEN);
        keep_token_result(conn, TokenResult { list_id, action, state, blocks, token: None });
    }
    let Some(id) = copying.id else { return };
    let copies = &mut conn.session.copies;
    copies.retain(|one| one.id != id);
    if copies.len() >= RESULTS_MAX {
        copies.pop_front();
    }
    copies.push_back(CopyResult { id, state, segments: copying.next as u16, copied_bytes: copying.copied_bytes });
}

fn keep_token_result(conn: &mut Connection<Iscsi>, result: TokenResult) {
    let results = &mut conn.session.token_results;
    results.retain(|one| one.list_id != result.list_id);
    if results.len() >= RESULTS_MAX {
        results.pop_front();
    }
    results.push_back(result);
}

/// Blocks of a disk as bytes of it.
fn ranges_of(disk: &Described, blocks: &[BlockRange]) -> Result<Vec<Range<u64>>, Sense> {
    let block_bytes = u64::from(disk.block_bytes);
    let ranges = blocks.iter().map(|&(first, count)| {
        let end = first.checked_add(count).filter(|&end| end <= disk.blocks).ok_or(Sense::OUT_OF_RANGE)?;
        Ok(first * block_bytes..end * block_bytes)
    });
    ranges.collect()
}

fn is_zero(contents: &Contents, len_bytes: usize) -> bool {
    let mut left_bytes = len_bytes;
    contents.first.iter().chain(&contents.more).all(|buf| {
        let now_bytes = left_bytes.min(buf.len() - HEADER_ROOM_BYTES);
        left_bytes -= now_bytes;
        all_zero(&buf[HEADER_ROOM_BYTES..][..now_bytes])
    })
}
