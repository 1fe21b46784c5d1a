//! Scatter-gather payloads: split into parts, and copied where the memory belongs to another
//! process.
//!
//! ```text
//!   transfer_segments ─▶ Segments::cut ─┬─▶ Direct: a part on the segment's own memory
//!                                       └─▶ Gather: copied into a buffer that the slot keeps
//!   carry_out_off_ring ─▶ bounce: the part gets a bounce buffer ─▶ run, or lend
//!                       ─▶ bounce_back: data that was read are copied to their place
//! ```
//!
//! The ring reads and writes memory of another process by address. Blocking calls and lanes need
//! references, so they work on a bounce buffer.
//!
//! Invariant: a part that is not in the ring and whose memory is accessed names no memory of
//! another process.

#![allow(unsafe_code)]

use super::{Engine, TargetId, overlapping_parts};
use crate::{
    IoBuf,
    buffer::Span,
    buffer::{Cursor, Cut, copy_from_foreign, copy_to_foreign},
    part::{Action, Part},
    slots::Bounce,
};
use std::{io, ops::Range, sync::Arc};

/// Allocates a bounce buffer of a part's length, so it is never larger than the request's own
/// memory.
fn bounce_buf(len_bytes: usize) -> IoBuf {
    IoBuf::new(len_bytes.max(1))
}

impl Engine {
    /// Adds parts for `range` of a scatter-gather payload.
    #[cold]
    #[inline(never)]
    pub(super) fn transfer_segments(
        &mut self,
        slot: u32,
        target: TargetId,
        action: Action,
        file_offset_bytes: u64,
        range: Range<usize>,
    ) {
        let fills = action == Action::Read;
        let (mut at, mut cursor) = (range.start, Cursor::default());
        if range.start > range.end {
            return self.beyond(slot, &range);
        }
        while at < range.end {
            let holder = self.slots.get(slot);
            let Some(segments) = holder.segments() else { return self.beyond(slot, &range) };
            let Some(cut) = segments.cut(&mut cursor, at, range.end, fills) else { return self.beyond(slot, &range) };
            let (memory, registered, is_foreign) = match cut {
                Cut::Direct { span, buf } => {
                    (span, buf.is_some_and(|buf| self.link.has_registered(buf)), buf.is_none())
                }
                Cut::Gather { len_bytes } => {
                    // At the same offset within a page as in the payload, so that O_DIRECT accepts
                    // the copy where it would accept the payload.
                    let lead = at % crate::buffer::BUFFER_ALIGNMENT_BYTES;
                    let mut buf = bounce_buf(lead + len_bytes);
                    if let Err(error) = segments.copy_out(at, &mut buf[lead..]) {
                        return holder.fail(error);
                    }
                    let memory = Span::of(&buf).slice(lead..lead + len_bytes).unwrap_or(Span::EMPTY);
                    holder.keep(&Arc::new(buf));
                    (memory, false, false)
                }
            };
            let mut part =
                Part::new(slot, target.0, action, file_offset_bytes + (at - range.start) as u64, memory, registered);
            part.is_foreign = is_foreign;
            at += memory.len_bytes;
            self.start(part);
        }
    }

    /// Fills `range` of a scatter-gather payload with `bytes`, or with zeros.
    #[cold]
    pub(super) fn fill_segments(&mut self, slot: u32, range: Range<usize>, bytes: Option<&[u8]>) {
        let (mut at, mut cursor) = (range.start, Cursor::default());
        while at < range.end {
            let holder = self.slots.get(slot);
            let cut = holder.segments().and_then(|segments| segments.cut(&mut cursor, at, range.end, true));
            let Some(Cut::Direct { span, .. }) = cut else { return self.beyond(slot, &range) };
            if holder.clashes(span, true) {
                return holder.fail(overlapping_parts());
            }
            let done = at - range.start;
            // SAFETY: the memory is the slot's own, as in `fill_zeros`, or another process's. The
            // latter is alive and writable, as `cut` checks for memory that is filled, and no
            // reference to it exists.
            match bytes {
                Some(bytes) => unsafe { span.copy_from(&bytes[done..done + span.len_bytes]) },
                None => unsafe { span.fill_zeros() },
            }
            at += span.len_bytes;
        }
    }

    fn beyond(&mut self, slot: u32, range: &Range<usize>) {
        let holder = self.slots.get(slot);
        let held_bytes = holder.segments().map_or(holder.memory.len_bytes, crate::Segments::len);
        let what = format!("bytes {range:?} are beyond a buffer of {held_bytes} bytes, or the memory is not writable");
        holder.fail(io::Error::new(io::ErrorKind::InvalidInput, what));
    }

    /// Replaces memory of another process by a bounce buffer.
    pub(super) fn bounce(&mut self, index: u32) {
        let part = &mut self.parts[index as usize];
        let memory = part.memory();
        part.is_foreign = false;
        if memory.len_bytes == 0 {
            return;
        }
        let mut buf = bounce_buf(memory.len_bytes);
        part.address = Span::of(&buf).address;
        let holder = self.slots.get(part.slot);
        if part.fills() {
            holder.keep_bounce(Bounce { buf, into: memory });
        } else {
            // SAFETY: the slot's segments keep the mapping, and `cut` returned a range within it.
            unsafe { copy_from_foreign(memory.address, &mut buf) };
            holder.keep(&Arc::new(buf));
        }
    }

    /// After a read into a bounce buffer, copies the data to the memory they were read for.
    pub(super) fn bounce_back(&mut self, index: u32, result: &io::Result<()>) {
        let part = &self.parts[index as usize];
        if !part.fills() {
            return;
        }
        let memory = part.memory();
        let Some(Bounce { buf, into }) = self.slots.get(part.slot).take_bounce(memory) else { return };
        let part = &mut self.parts[index as usize];
        (part.address, part.is_foreign) = (into.address, true);
        if result.is_ok() {
            // SAFETY: as in `bounce`; `cut` has checked that memory to read into is writable.
            unsafe { copy_to_foreign(&buf[..into.len_bytes], into.address) };
        }
    }
}
