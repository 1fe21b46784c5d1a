//! Payload: the bytes of a write on their way from the window or the socket into a request.
//!
//! ```text
//!   announced by the protocol ─▶ continue_payload ─┬─ in the window ─▶ a segment, without a copy
//!                                                  └─ a buffer ◀─ copied, or received into it
//!   all announced bytes are there ─▶ Protocol::payload_ended ─▶ write
//! ```
//!
//! The part of a payload that was received together with its header is written from the receive
//! window, if the queue takes memory at any address and the window is full enough (see `window`).

use super::{
    connection::{Connection, Incoming, Input, payload_range},
    core::{Core, Protocol},
    flights::Contents,
    pool::{HEADER_ROOM_BYTES, PIECE_BYTES},
};
use diskwright_store::{BlockQueue, Request, Segments};
use std::io;

impl<P: Protocol> Core<P> {
    /// Takes the payload bytes in the window. Returns whether the next bytes are a header.
    pub(crate) fn take_payload(&mut self, conn: &mut Connection<P>) -> bool {
        loop {
            match &mut conn.input {
                Input::Header => return true,
                Input::Skip(left) => {
                    let now = (conn.window.bytes().len() as u64).min(*left);
                    *left -= now;
                    let is_over = *left == 0;
                    conn.window.consume(now as usize);
                    if !is_over {
                        return false;
                    }
                    conn.input = Input::Header;
                }
                Input::Payload(incoming) => {
                    let Some(buf) = &mut incoming.buf else { return false };
                    let there = conn.window.bytes();
                    let room_bytes = incoming.piece_bytes - incoming.filled_bytes;
                    let now = there.len().min(room_bytes).min(incoming.announced_bytes);
                    let range = payload_range(incoming.filled_bytes, incoming.filled_bytes + now);
                    buf[range].copy_from_slice(&there[..now]);
                    if let Some(digest) = &mut incoming.digest {
                        *digest = crc32c::crc32c_append(*digest, &there[..now]);
                    }
                    incoming.filled_bytes += now;
                    incoming.announced_bytes -= now;
                    self.metrics.copied_bytes.add(now as u64);
                    conn.window.consume(now);
                    if incoming.filled_bytes < incoming.piece_bytes && incoming.announced_bytes > 0 {
                        return false;
                    }
                    self.part_ended(conn);
                }
            }
        }
    }

    /// The buffer for the payload is full, or all announced bytes were received.
    fn part_ended(&mut self, conn: &mut Connection<P>) {
        let Input::Payload(mut incoming) = std::mem::replace(&mut conn.input, Input::Header) else { return };
        // One receive may have filled both buffers.
        while incoming.filled_bytes == incoming.piece_bytes
            && !incoming.is_single()
            && let Some(buf) = incoming.buf.take()
        {
            let range = payload_range(0, incoming.piece_bytes);
            if let Err(error) = self.segments_of(&mut incoming).push(buf, range) {
                return self.fail_payload(conn, incoming, error);
            }
            (incoming.buf, incoming.filled_bytes, incoming.piece_bytes) = incoming.next.take().unwrap_or_default();
        }
        self.continue_payload(conn, incoming);
    }

    fn segments_of<'i>(&mut self, incoming: &'i mut Incoming<P::Asked>) -> &'i mut Segments {
        incoming.segments.get_or_insert_with(|| self.spare_lists.pop().unwrap_or_default())
    }

    /// Goes on with a payload of which bytes were announced. Takes those in the window without a
    /// copy if `Window::share` allows it, and takes a buffer for the bytes to come.
    pub(crate) fn continue_payload(&mut self, conn: &mut Connection<P>, mut incoming: Incoming<P::Asked>) {
        if incoming.buf.is_none() && incoming.announced_bytes > 0 {
            let takes_any_address = self.queues[incoming.asked.export as usize]
                .as_ref()
                .is_some_and(|queue| queue.memory_alignment_bytes() == 1);
            let wanted_bytes = incoming.left_bytes.min(incoming.announced_bytes);
            if takes_any_address
                && incoming.may_share
                && let Some((window, range)) = conn.window.share(wanted_bytes)
            {
                incoming.left_bytes -= range.len();
                incoming.announced_bytes -= range.len();
                if let Some(digest) = &mut incoming.digest {
                    *digest = crc32c::crc32c_append(*digest, &window[range.clone()]);
                }
                if let Err(error) = self.segments_of(&mut incoming).push(window, range) {
                    return self.fail_payload(conn, incoming, error);
                }
            }
            if incoming.announced_bytes > 0 {
                incoming.piece_bytes = incoming.left_bytes.min(PIECE_BYTES);
                incoming.left_bytes -= incoming.piece_bytes;
                (incoming.buf, incoming.filled_bytes) = (Some(self.pool.take(incoming.piece_bytes)), 0);
            }
        }
        if incoming.announced_bytes > 0 {
            conn.input = Input::Payload(incoming);
        } else {
            P::payload_ended(self, conn, incoming);
        }
    }

    /// Writes a payload that is complete.
    pub(crate) fn write(&mut self, conn: &mut Connection<P>, incoming: Incoming<P::Asked>) {
        let Incoming { asked, fua, buf, piece_bytes, segments, .. } = incoming;
        let request = match (buf, segments) {
            (_, Some(segments)) => Request::write_segments(asked.offset_bytes, segments, 0),
            (Some(buf), None) => {
                let write = Request::write(asked.offset_bytes, piece_bytes, buf, 0);
                Request { buf_offset_bytes: HEADER_ROOM_BYTES, ..write }
            }
            (None, None) => {
                let error = io::Error::new(io::ErrorKind::InvalidInput, "the write has no payload");
                return self.answer(conn, &asked, Err(error), Contents::default());
            }
        };
        self.launch_single(conn, &asked, Request { fua, ..request });
    }

    /// Answers a write whose segments could not be put together with an error, and skips the rest
    /// of its announced payload.
    fn fail_payload(&mut self, conn: &mut Connection<P>, mut incoming: Incoming<P::Asked>, error: io::Error) {
        if incoming.announced_bytes > 0 {
            conn.input = Input::Skip(incoming.announced_bytes as u64);
        }
        incoming.next.take().and_then(|(buf, ..)| buf).into_iter().for_each(|buf| self.pool.give(buf));
        let contents = self.contents(incoming.buf, incoming.segments);
        self.answer(conn, &incoming.asked, Err(error), contents);
    }
}
