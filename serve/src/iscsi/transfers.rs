//! Commands that the disk works on, in one step or several.
//!
//! ```text
//!   Read, Write, SynchronizeCache, Unmap, Verify without data    one request of the core
//!   Verify with data                                             read, compare
//!   CompareAndWrite, OrWrite                                     read, compare or change, write
//!   WriteAndVerify                                               write, read, compare
//!   WriteSame                                                    clear, or write again and again
//!   ExtendedCopy                                                 see copies.rs
//! ```
//!
//! A command of several steps is one request for the client: it is counted once, when it ends.

use super::{
    replies::Outcome,
    state::{Asked, Iscsi, Step},
};
use crate::net::{
    connection::{Connection, Incoming, payload_range},
    core::Core,
    flights::{ClientRequest, Contents, Steps},
    pool::{HEADER_ROOM_BYTES, PIECE_BYTES},
};
use diskwright_iscsi::scsi::{Command, Sense, command::Check, mode, persistent::ChangeList, status, unmap};
use diskwright_store::{IoBuf, Operation, Request, Segments};
use std::{io, ops::Range, sync::Arc};

/// Length of the buffer of a pattern, and bytes that one step of a WRITE SAME writes with it.
const PATTERN_BYTES: usize = 256 << 10;
const PATTERN_STEP_BYTES: u64 = 8 << 20;

/// Buffers of one read at most.
const PIECES_MAX: usize = 256;

impl Core<Iscsi> {
    /// Carries out a command that has no data to come.
    pub(super) fn carry_out(&mut self, conn: &mut Connection<Iscsi>, asked: &ClientRequest<Asked>, command: &Command) {
        let is_empty = asked.len_bytes == 0;
        match *command {
            Command::SynchronizeCache { .. } => self.launch_single(conn, asked, Request::flush(0)),
            Command::Read { .. } if !is_empty => {
                let agreed = conn.session.agreed;
                let geometry = self.exports.get(asked.export as usize).device.geometry();
                let sector_bytes = geometry.logical_sector_bytes as usize;
                let most_bytes = agreed.segment_bytes.min(agreed.burst_bytes as usize).min(PIECE_BYTES);
                let mut piece_bytes = most_bytes / sector_bytes * sector_bytes;
                if piece_bytes == 0 || asked.len_bytes > (PIECES_MAX * piece_bytes) as u64 {
                    // The data are copied.
                    piece_bytes = PIECE_BYTES;
                }
                if let Some(task) = conn.session.tasks.get_mut(asked.own.slot) {
                    task.piece_bytes = piece_bytes;
                }
                self.read_in_pieces(conn, asked, piece_bytes);
            }
            Command::Verify { check: Check::Readable, .. } if !is_empty => self.read(conn, asked),
            Command::WriteSame { unmaps, .. } if !is_empty => {
                let operation = if unmaps { Operation::Discard } else { Operation::WriteZeroes };
                self.clear(conn, asked, operation, false);
            }
            _ => self.finish(conn, asked, Outcome::Good),
        }
    }

    /// All data of a command have been received.
    pub(super) fn payload_received(&mut self, conn: &mut Connection<Iscsi>, incoming: Incoming<Asked>) {
        let asked = incoming.asked;
        let Some(Ok(command)) = conn.session.tasks.get(asked.own.slot).map(|task| task.command) else {
            incoming.into_bufs().for_each(|buf| self.pool.give(buf));
            return self.finish(conn, &asked, Outcome::Failed(Sense::INTERNAL));
        };
        let payload_bytes = incoming.payload_bytes;
        let is_partial = payload_bytes as u64 != asked.len_bytes;
        if matches!(command, Command::Write { .. }) && !is_partial {
            return self.write(conn, incoming);
        }
        let mut bufs = incoming.into_bufs();
        let contents = Contents { first: bufs.next(), more: bufs.collect() };
        let Some(buf) = &contents.first else {
            return self.finish(conn, &asked, Outcome::Failed(Sense::INTERNAL));
        };
        // Parameter lists and single blocks lie in one buffer.
        let data = &buf[payload_range(0, payload_bytes.min(PIECE_BYTES))];
        match command {
            Command::Write { .. } | Command::WriteAndVerify { .. } if is_partial => {
                self.find(conn, &asked, contents, Step::Partial(payload_bytes));
            }
            Command::WriteAndVerify { .. } => self.write_kept(conn, &asked, contents, 0),
            Command::Verify { .. } => self.find(conn, &asked, contents, Step::Found(None)),
            Command::CompareAndWrite { .. } | Command::OrWrite { .. } => {
                let range = asked.offset_bytes..asked.offset_bytes + asked.len_bytes;
                let claims = self.claims(asked.export as usize);
                match claims.and_then(|claims| claims.claim(range)) {
                    Some(claim) => self.find(conn, &asked, contents, Step::Found(Some(claim))),
                    None => {
                        contents.into_bufs().for_each(|buf| self.pool.give(buf));
                        self.finish(conn, &asked, Outcome::Status(status::BUSY));
                    }
                }
            }
            Command::WriteSame { unmaps, .. } => {
                let pattern = data.to_vec();
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                self.write_same(conn, &asked, &pattern, unmaps);
            }
            Command::Unmap { .. } => {
                let ranges = self.ranges_of(&asked, data);
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                match ranges {
                    Ok(ranges) => {
                        let len_bytes = ranges.iter().map(|range| range.end - range.start).sum();
                        let asked = ClientRequest { len_bytes, ..asked };
                        let steps = Steps { operation: Operation::Discard, ranges, fua: false };
                        self.clear_ranges(conn, &asked, steps);
                    }
                    Err(sense) => self.finish(conn, &asked, Outcome::Failed(sense)),
                }
            }
            Command::PersistentOut { action, scope, kind, .. } => {
                let list = ChangeList::decode(data);
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                match list {
                    Ok(list) => self.change_reservations(conn, &asked, action, (scope, kind), &list),
                    Err(sense) => self.finish(conn, &asked, Outcome::Failed(sense)),
                }
            }
            Command::ExtendedCopy { .. } => {
                let list = data.to_vec();
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                self.start_copy(conn, &asked, &list);
            }
            Command::PopulateToken { list_id, .. } => {
                let list = data.to_vec();
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                self.populate_token(conn, &asked, list_id, &list);
            }
            Command::WriteUsingToken { list_id, .. } => {
                let list = data.to_vec();
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                self.write_using_token(conn, &asked, list_id, &list);
            }
            Command::ModeSelect { is_long, .. } => {
                let export = self.exports.here(asked.export as usize);
                let selected =
                    export.map_or(Err(Sense::NO_UNIT), |export| mode::select(&self.describe(export), data, is_long));
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                let outcome = selected.map_or_else(Outcome::Failed, |()| Outcome::Good);
                self.finish(conn, &asked, outcome);
            }
            _ => {
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                self.finish(conn, &asked, Outcome::Failed(Sense::INVALID_OPCODE));
            }
        }
    }

    /// The ranges of UNMAP, last one first.
    fn ranges_of(&self, asked: &ClientRequest<Asked>, list: &[u8]) -> Result<Vec<Range<u64>>, Sense> {
        let export = self.exports.here(asked.export as usize).ok_or(Sense::NO_UNIT)?;
        let geometry = export.device.geometry();
        let block_bytes = u64::from(geometry.logical_sector_bytes);
        let all_blocks = geometry.size_bytes / block_bytes;
        let mut ranges = Vec::new();
        for blocks in unmap::ranges(list)?.into_iter().rev() {
            let end = blocks.first.checked_add(blocks.count).filter(|&end| end <= all_blocks);
            let end = end.ok_or(Sense::OUT_OF_RANGE)?;
            if blocks.count > 0 {
                ranges.push(blocks.first * block_bytes..end * block_bytes);
            }
        }
        Ok(ranges)
    }

    /// Keeps the payload of a command, and reads what is on the disk.
    fn find(&mut self, conn: &mut Connection<Iscsi>, asked: &ClientRequest<Asked>, payload: Contents, step: Step) {
        if let Some(task) = conn.session.tasks.get_mut(asked.own.slot) {
            (task.kept, task.step) = (payload, step);
        }
        if asked.len_bytes == 0 {
            return self.finish(conn, asked, Outcome::Good);
        }
        self.read(conn, asked);
    }

    /// Writes a payload that lies in one buffer from `from_bytes` on.
    pub(super) fn write_kept(
        &mut self,
        conn: &mut Connection<Iscsi>,
        asked: &ClientRequest<Asked>,
        payload: Contents,
        from_bytes: usize,
    ) {
        let Contents { first: Some(buf), more } = payload else {
            return self.finish(conn, asked, Outcome::Failed(Sense::INTERNAL));
        };
        let task = conn.session.tasks.get(asked.own.slot);
        let claim = task.and_then(|task| task.step.claim().cloned());
        let fua = match task.map(|task| task.command) {
            Some(Ok(Command::CompareAndWrite { fua, .. } | Command::OrWrite { fua, .. })) => fua,
            Some(Ok(Command::ExtendedCopy { .. } | Command::WriteUsingToken { .. })) => false,
            // What is verified is what the medium has.
            _ => true,
        };
        if more.is_empty() {
            let write = Request::write(asked.offset_bytes, asked.len_bytes as usize, buf, 0);
            let request = Request { buf_offset_bytes: HEADER_ROOM_BYTES + from_bytes, fua, ..write };
            return self.launch_claimed(conn, asked, request, claim);
        }
        let mut segments = Box::<Segments>::default();
        let mut left_bytes = asked.len_bytes as usize;
        for buf in std::iter::once(buf).chain(more) {
            let now_bytes = left_bytes.min(PIECE_BYTES);
            left_bytes -= now_bytes;
            if let Err(error) = segments.push(buf, payload_range(0, now_bytes)) {
                let contents = self.contents(None, Some(segments));
                return self.answer(conn, asked, Err(error), contents);
            }
        }
        let request = Request { fua, ..Request::write_segments(asked.offset_bytes, segments, 0) };
        self.launch_claimed(conn, asked, request, claim);
    }

    fn write_same(&mut self, conn: &mut Connection<Iscsi>, asked: &ClientRequest<Asked>, block: &[u8], unmaps: bool) {
        if asked.len_bytes == 0 {
            return self.finish(conn, asked, Outcome::Good);
        }
        if block.iter().all(|&byte| byte == 0) {
            let operation = if unmaps { Operation::Discard } else { Operation::WriteZeroes };
            return self.clear(conn, asked, operation, false);
        }
        let mut pattern = IoBuf::new(PATTERN_BYTES);
        pattern.chunks_exact_mut(block.len()).for_each(|chunk| chunk.copy_from_slice(block));
        let range = asked.offset_bytes..asked.offset_bytes + asked.len_bytes;
        self.write_pattern(conn, asked, Arc::new(pattern), range);
    }

    /// Writes the next part of a pattern.
    fn write_pattern(
        &mut self,
        conn: &mut Connection<Iscsi>,
        asked: &ClientRequest<Asked>,
        pattern: Arc<IoBuf>,
        left: Range<u64>,
    ) {
        let step = left.start..left.end.min(left.start + PATTERN_STEP_BYTES);
        let mut segments = Box::<Segments>::default();
        let mut left_bytes = (step.end - step.start) as usize;
        while left_bytes > 0 {
            let now_bytes = left_bytes.min(PATTERN_BYTES);
            if let Err(error) = segments.push(Arc::clone(&pattern), 0..now_bytes) {
                return self.answer(conn, asked, Err(error), Contents::default());
            }
            left_bytes -= now_bytes;
        }
        if let Some(task) = conn.session.tasks.get_mut(asked.own.slot) {
            task.step = Step::Pattern(pattern, step.end..left.end);
        }
        self.launch_single(conn, asked, Request::write_segments(step.start, segments, 0));
    }

    /// A request of the disk has ended: the next step of the command, or its answer.
    pub(super) fn step_ended_of(
        &mut self,
        conn: &mut Connection<Iscsi>,
        asked: &ClientRequest<Asked>,
        result: io::Result<()>,
        contents: Contents,
    ) {
        let Some(task) = conn.session.tasks.get_mut(asked.own.slot) else {
            return contents.into_bufs().for_each(|buf| self.pool.give(buf));
        };
        let step = std::mem::replace(&mut task.step, Step::Only);
        let command = task.command;
        if let Err(error) = result {
            contents.into_bufs().for_each(|buf| self.pool.give(buf));
            if let Step::Copy(copying) = &step {
                return self.copy_failed(conn, asked, copying, &error);
            }
            let sense = self.sense_of(conn, asked, &error, matches!(step, Step::Found(_)));
            return self.finish(conn, asked, Outcome::Failed(sense));
        }
        match (command, step) {
            (Ok(Command::Read { .. }), _) => self.finish(conn, asked, Outcome::Read(contents)),
            (Ok(Command::Verify { check, .. }), Step::Found(_)) => {
                self.compare(conn, asked, contents, check == Check::EachEqual);
            }
            (Ok(Command::CompareAndWrite { .. } | Command::OrWrite { .. }), Step::Found(Some(claim))) => {
                let changes = matches!(command, Ok(Command::OrWrite { .. }));
                let kept = std::mem::take(&mut task.kept);
                if changes {
                    let mut payload = kept;
                    overlay(&mut payload, &contents, asked.len_bytes as usize, |byte, found| *byte |= found);
                    contents.into_bufs().for_each(|buf| self.pool.give(buf));
                    task.step = Step::Changed(claim);
                    self.write_kept(conn, asked, payload, 0);
                } else if let Some(at) =
                    difference(&contents, &kept, asked.len_bytes as usize, asked.len_bytes as usize)
                {
                    task.kept = kept;
                    contents.into_bufs().for_each(|buf| self.pool.give(buf));
                    self.finish(conn, asked, Outcome::Failed(miscompare(at)));
                } else {
                    contents.into_bufs().for_each(|buf| self.pool.give(buf));
                    task.step = Step::Changed(claim);
                    self.write_kept(conn, asked, kept, asked.len_bytes as usize);
                }
            }
            (_, Step::Partial(payload_bytes)) => {
                let mut found = contents;
                let kept = std::mem::take(&mut task.kept);
                overlay(&mut found, &kept, payload_bytes, |byte, new| *byte = new);
                kept.into_bufs().for_each(|buf| self.pool.give(buf));
                self.write_kept(conn, asked, found, 0);
            }
            (Ok(Command::WriteAndVerify { .. }), Step::Only) => self.find(conn, asked, contents, Step::Found(None)),
            (Ok(Command::WriteAndVerify { .. }), Step::Found(_)) => self.compare(conn, asked, contents, false),
            (_, Step::Copy(copying)) => self.copy_step(conn, asked, copying, contents),
            (_, Step::Pattern(pattern, left)) if !left.is_empty() => {
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                self.write_pattern(conn, asked, pattern, left);
            }
            _ => {
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                self.finish(conn, asked, Outcome::Good);
            }
        }
    }

    /// Compares what was read with the payload, or each block of it with the one block of it.
    fn compare(&mut self, conn: &mut Connection<Iscsi>, asked: &ClientRequest<Asked>, found: Contents, each: bool) {
        let Some(task) = conn.session.tasks.get(asked.own.slot) else { return };
        let unit_bytes = if each { task.has_bytes } else { asked.len_bytes } as usize;
        let differs = difference(&found, &task.kept, asked.len_bytes as usize, unit_bytes);
        found.into_bufs().for_each(|buf| self.pool.give(buf));
        let outcome = differs.map_or(Outcome::Good, |at| Outcome::Failed(miscompare(at)));
        self.finish(conn, asked, outcome);
    }

    fn sense_of(
        &self,
        conn: &Connection<Iscsi>,
        asked: &ClientRequest<Asked>,
        error: &io::Error,
        reads: bool,
    ) -> Sense {
        let command = conn.session.tasks.get(asked.own.slot).map(|task| task.command);
        let writes = !reads && matches!(command, Some(Ok(command)) if command.writes());
        let sense = Sense::of_error(error, writes);
        let export = self.exports.here(asked.export as usize).map_or("", |export| export.name.as_str());
        let (kind, offset_bytes, len_bytes) = (asked.kind, asked.offset_bytes, asked.len_bytes);
        if sense.is_refusal() {
            tracing::debug!(%export, peer = %conn.peer, ?kind, offset_bytes, len_bytes, %error, "a command was refused");
        } else {
            tracing::warn!(%export, peer = %conn.peer, ?kind, offset_bytes, len_bytes, %error, "a command failed");
        }
        sense
    }
}

fn miscompare(at: usize) -> Sense {
    Sense { information: Some(at as u32), ..Sense::MISCOMPARE }
}

/// The buffers of `len_bytes`, each with up to [`PIECE_BYTES`].
fn pieces(contents: &Contents, len_bytes: usize) -> impl Iterator<Item = &[u8]> + Clone {
    let bufs = contents.first.iter().chain(&contents.more);
    bufs.zip((0..len_bytes).step_by(PIECE_BYTES))
        .map(move |(buf, from_bytes)| &buf[payload_range(0, PIECE_BYTES.min(len_bytes - from_bytes))])
}

/// Where `len_bytes` that were found differ first from the payload, which has `unit_bytes` that
/// repeat.
fn difference(found: &Contents, payload: &Contents, len_bytes: usize, unit_bytes: usize) -> Option<usize> {
    let repeats = unit_bytes < len_bytes;
    let mut units = pieces(payload, unit_bytes).cycle();
    for (number, found) in pieces(found, len_bytes).enumerate() {
        let unit = units.next()?;
        let chunk_bytes = if repeats { unit_bytes } else { found.len() };
        for (chunk, from_bytes) in found.chunks(chunk_bytes.max(1)).zip((0..).step_by(chunk_bytes.max(1))) {
            if let Some(at) = chunk.iter().zip(unit).position(|(one, other)| one != other) {
                return Some(number * PIECE_BYTES + from_bytes + at);
            }
        }
    }
    None
}

/// Changes the first `len_bytes` of `target` by those of `source`.
fn overlay(target: &mut Contents, source: &Contents, len_bytes: usize, change: impl Fn(&mut u8, u8)) {
    let bufs = target.first.iter_mut().chain(&mut target.more);
    for (buf, source) in bufs.zip(pieces(source, len_bytes)) {
        buf[payload_range(0, source.len())].iter_mut().zip(source).for_each(|(byte, &new)| change(byte, new));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(bytes: &[u8]) -> Contents {
        let mut bufs = bytes.chunks(PIECE_BYTES).map(|chunk| {
            let mut buf = IoBuf::new(HEADER_ROOM_BYTES + chunk.len());
            buf[HEADER_ROOM_BYTES..][..chunk.len()].copy_from_slice(chunk);
            buf
        });
        Contents { first: bufs.next(), more: bufs.collect() }
    }

    #[test]
    fn the_first_difference_is_found_in_any_buffer() {
        let mut bytes: Vec<u8> = (0..PIECE_BYTES + 1024).map(|at| (at / 512 % 251) as u8).collect();
        let wanted = contents(&bytes);
        assert_eq!(difference(&contents(&bytes), &wanted, bytes.len(), bytes.len()), None);
        for at in [PIECE_BYTES + 1023, PIECE_BYTES, PIECE_BYTES - 1, 7, 0] {
            bytes[at] ^= 1;
            assert_eq!(difference(&contents(&bytes), &wanted, bytes.len(), bytes.len()), Some(at));
        }
    }

    #[test]
    fn one_block_is_compared_with_each() {
        let block: Vec<u8> = (0..512).map(|at| at as u8).collect();
        let mut bytes = block.repeat((PIECE_BYTES + 2048) / 512);
        assert_eq!(difference(&contents(&bytes), &contents(&block), bytes.len(), 512), None);
        for at in [PIECE_BYTES + 1500, 1024, 511] {
            bytes[at] ^= 1;
            assert_eq!(difference(&contents(&bytes), &contents(&block), bytes.len(), 512), Some(at));
        }
    }

    #[test]
    fn bytes_are_changed_up_to_a_length() {
        let mut target = contents(&[1, 2, 4, 8]);
        overlay(&mut target, &contents(&[16; 4]), 3, |byte, new| *byte |= new);
        assert_eq!(pieces(&target, 4).collect::<Vec<_>>().concat(), [17, 18, 20, 8]);
    }
}
