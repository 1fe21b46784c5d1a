//! The replies that a connection has to send.
//!
//! Replies gather here during a turn and are sent together at its end. Headers without payload are
//! packed into one small buffer. The payload of a read stays in the buffers it was read into, with
//! its header directly before it. One send is in flight at a time. Replies that wait or are being
//! sent still count for the client's share, so a client that does not read its replies cannot use
//! more than its share.

use super::pool::{HEADER_ROOM_BYTES, Pool};
use diskwright_store::{IoBuf, Piece};

/// A number of requests, and the bytes of their payloads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) requests: u32,
    pub(crate) bytes: usize,
}

impl Share {
    pub(crate) fn of(bytes: usize) -> Self {
        Self { requests: 1, bytes }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
    }

    pub(crate) fn sub(&mut self, other: Self) {
        self.requests -= other.requests;
        self.bytes -= other.bytes;
    }
}

#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pieces: Vec<Piece>,
    /// Packed headers, and their length in bytes. They are sent last.
    small: Option<(IoBuf, usize)>,
    /// Share of the replies that wait.
    waiting: Share,
    /// Share of the replies that are being sent.
    sending: Option<Share>,
    /// An empty list for reuse.
    spare: Vec<Piece>,
}

impl Outbox {
    /// Appends a copy of `bytes`.
    pub(crate) fn put(&mut self, bytes: &[u8], pool: &mut Pool) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (buf, len) = self.small.get_or_insert_with(|| (pool.take(0), 0));
            let now = rest.len().min(buf.len() - *len);
            buf[*len..*len + now].copy_from_slice(&rest[..now]);
            *len += now;
            rest = &rest[now..];
            if *len == buf.len() {
                self.seal();
            }
        }
    }

    /// Ends the packed buffer, so that it is sent before what follows.
    pub(crate) fn seal(&mut self) {
        if let Some((buf, len)) = self.small.take() {
            self.pieces.push((buf, 0..len));
        }
    }

    /// Appends a reply with payload. `header` is written directly before the `payload_bytes` of the
    /// first buffer.
    pub(crate) fn put_contents(&mut self, header: &[u8], mut buf: IoBuf, payload_bytes: usize) {
        let start = HEADER_ROOM_BYTES - header.len();
        buf[start..HEADER_ROOM_BYTES].copy_from_slice(header);
        self.pieces.push((buf, start..HEADER_ROOM_BYTES + payload_bytes));
    }

    /// Appends the next buffer of a reply with payload.
    pub(crate) fn put_more(&mut self, buf: IoBuf, payload_bytes: usize) {
        self.pieces.push((buf, HEADER_ROOM_BYTES..HEADER_ROOM_BYTES + payload_bytes));
    }

    /// Counts one appended reply.
    pub(crate) fn count(&mut self, share: Share) {
        self.waiting.add(share);
    }

    /// Share of the replies that wait or are being sent.
    pub(crate) fn unsent(&self) -> Share {
        let mut unsent = self.waiting;
        unsent.add(self.sending.unwrap_or_default());
        unsent
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.small.is_none()
    }

    pub(crate) fn is_sending(&self) -> bool {
        self.sending.is_some()
    }

    /// Takes all pieces to send them. They count as being sent until [`Outbox::sent`].
    pub(crate) fn take(&mut self) -> Vec<Piece> {
        self.seal();
        self.sending = Some(std::mem::take(&mut self.waiting));
        std::mem::replace(&mut self.pieces, std::mem::take(&mut self.spare))
    }

    /// The send has ended: gives the buffers back to the pool and returns the share of the replies.
    pub(crate) fn sent(&mut self, buf: Option<IoBuf>, mut pieces: Vec<Piece>, pool: &mut Pool) -> Share {
        buf.into_iter().chain(pieces.drain(..).map(|(buf, _)| buf)).for_each(|buf| pool.give(buf));
        self.keep(pieces);
        self.sending.take().unwrap_or_default()
    }

    /// Keeps an empty list for reuse.
    pub(crate) fn keep(&mut self, list: Vec<Piece>) {
        if list.capacity() > self.spare.capacity() {
            self.spare = list;
        }
    }

    /// Drops all waiting replies and returns their share.
    pub(crate) fn clear(&mut self, pool: &mut Pool) -> Share {
        self.seal();
        self.pieces.drain(..).for_each(|(buf, _)| pool.give(buf));
        std::mem::take(&mut self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(pieces: &[Piece]) -> Vec<u8> {
        pieces.iter().flat_map(|(buf, range)| buf[range.clone()].to_vec()).collect()
    }

    #[test]
    fn replies_are_complete_and_counted() {
        let mut pool = Pool::new();
        let mut outbox = Outbox::default();
        assert!(outbox.is_empty());
        outbox.put(b"greeting", &mut pool);
        outbox.seal();
        let mut buf = pool.take(4096);
        buf[HEADER_ROOM_BYTES..].fill(7);
        outbox.put(b"done", &mut pool);
        outbox.count(Share::of(10));
        outbox.put_contents(b"head", buf, 100);
        outbox.count(Share::of(100));
        outbox.put(b"also", &mut pool);
        let pieces = outbox.take();
        let expected = [&b"greetinghead"[..], &[7; 100], b"donealso"].concat();
        assert_eq!(bytes_of(&pieces), expected);
        assert!(outbox.is_empty() && outbox.is_sending());
        assert_eq!(outbox.sent(None, pieces, &mut pool), Share { requests: 2, bytes: 110 });
        assert!(!outbox.is_sending());
    }

    #[test]
    fn many_copied_bytes_stay_in_order() {
        let mut pool = Pool::new();
        let mut outbox = Outbox::default();
        let bytes: Vec<u8> = (0..100_000u32).map(|n| (n % 251) as u8).collect();
        bytes.chunks(777).for_each(|chunk| outbox.put(chunk, &mut pool));
        assert_eq!(bytes_of(&outbox.take()), bytes);
        outbox.put(b"x", &mut pool);
        outbox.count(Share::of(3));
        assert_eq!(outbox.clear(&mut pool), Share::of(3));
        assert!(outbox.is_empty());
    }
}
