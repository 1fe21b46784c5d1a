//! The receive window: bytes that were received and not yet decoded. Payloads may be written to the
//! disk directly from it.
//!
//! ```text
//!   receive ─▶ | header | payload | header | payload | head..|   own: used by the connection only
//!                           │ share ─▶ a segment of a write       shared: read by writes in flight
//!   next receive ─▶ renew ─▶ a new buffer that begins with the undecoded rest;
//!                            the old buffer is retired until its writes have ended
//! ```
//!
//! A payload of at least [`IN_PLACE_BYTES_MIN`], or the received part of one of at least
//! [`FRONT_BYTES_MIN`], is written from the window if at least half a window was received into the
//! buffer. All other payloads are copied into buffers of their own. There are two reasons not to
//! share every payload:
//!
//! - Sharing costs a segment list, a reference count and a check of the window, which is more than
//!   copying less than a page.
//! - A shared window must be replaced before the next receive. One write of 4 KiB would then hold
//!   132 KiB instead of 8, and a client that sends its writes one by one would reach its share with
//!   an eighth of the requests. From half a window on, at most about twice the payload is held.
//!
//! TLS yields less than half a window at once, so its payloads are always copied.
//!
//! Invariant: nothing is received into a shared window. The bytes of a retired window that are not
//! payload count for the client's share.

use super::pool::Pool;
use diskwright_store::IoBuf;
use std::{mem, ops::Range, sync::Arc};

/// Size of a window. The largest option fits, or thirty writes of 4 KiB.
const WINDOW_BYTES: usize = 128 << 10;

/// The shortest complete payload that is written from the window.
const IN_PLACE_BYTES_MIN: usize = 4096;

/// The shortest incomplete payload that is written from the window. At the cut the disk must gather
/// one unit from two segments, and it has one or two more parts to write.
const FRONT_BYTES_MIN: usize = 16 << 10;

/// Who uses the window's buffer.
#[derive(Debug, Default)]
enum Holder {
    /// The kernel has the buffer, or it was given up.
    #[default]
    Lent,
    Own(IoBuf),
    Shared(Arc<IoBuf>),
}

/// A window from which writes are still in flight.
#[derive(Debug)]
pub(crate) struct Retired {
    pub(crate) window: Arc<IoBuf>,
    /// Bytes of the window that are not payload. The payload counts with its write.
    pub(crate) other_bytes: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Window {
    holder: Holder,
    start: usize,
    end: usize,
    /// Bytes received into this buffer since it was last empty.
    received_bytes: usize,
    /// Payload bytes of a shared window that were handed out.
    shared_bytes: usize,
}

impl Window {
    pub(crate) fn new(pool: &mut Pool) -> Self {
        Self { holder: Holder::Own(pool.take(WINDOW_BYTES)), ..Self::default() }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.holder {
            Holder::Lent => &[],
            Holder::Own(buf) => &buf[self.start..self.end],
            Holder::Shared(buf) => &buf[self.start..self.end],
        }
    }

    pub(crate) fn consume(&mut self, bytes: usize) {
        self.start = (self.start + bytes).min(self.end);
    }

    /// Hands out the received part of the next `payload_bytes` for a write, and consumes it. `None`
    /// if the payload or the window is too small to be worth it.
    pub(crate) fn share(&mut self, payload_bytes: usize) -> Option<(Arc<IoBuf>, Range<usize>)> {
        let bytes = (self.end - self.start).min(payload_bytes);
        if bytes < if bytes < payload_bytes { FRONT_BYTES_MIN } else { IN_PLACE_BYTES_MIN } {
            return None;
        }
        let range = self.start..self.start + bytes;
        let window = match mem::take(&mut self.holder) {
            Holder::Own(buf) if self.received_bytes >= WINDOW_BYTES / 2 => Arc::new(buf),
            Holder::Shared(window) => window,
            other => {
                self.holder = other;
                return None;
            }
        };
        self.holder = Holder::Shared(Arc::clone(&window));
        self.shared_bytes += bytes;
        self.start = range.end;
        Some((window, range))
    }

    /// Prepares the window for a receive: moves the undecoded rest to the front of a buffer that is
    /// not shared. Returns the old window if writes still use it.
    pub(crate) fn renew(&mut self, pool: &mut Pool) -> Option<Retired> {
        let left = self.start..self.end;
        (self.start, self.end, self.received_bytes) = (0, left.len(), left.len());
        let other_bytes = mem::take(&mut self.shared_bytes);
        let shared = match &mut self.holder {
            Holder::Lent => return None,
            Holder::Own(buf) => {
                if left.start > 0 {
                    buf.copy_within(left, 0);
                }
                return None;
            }
            Holder::Shared(shared) => shared,
        };
        if let Some(buf) = Arc::get_mut(shared) {
            buf.copy_within(left, 0);
            if let Holder::Shared(shared) = mem::take(&mut self.holder) {
                self.holder = Arc::try_unwrap(shared).map_or(Holder::Lent, Holder::Own);
            }
            return None;
        }
        let mut buf = pool.take(WINDOW_BYTES);
        buf[..left.len()].copy_from_slice(&shared[left]);
        let window = Arc::clone(shared);
        self.holder = Holder::Own(buf);
        let other_bytes = window.len().saturating_sub(other_bytes);
        Some(Retired { window, other_bytes })
    }

    /// The free room after the received bytes. Empty unless the window was renewed.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        match &mut self.holder {
            Holder::Own(buf) => &mut buf[self.end..],
            Holder::Lent | Holder::Shared(_) => &mut [],
        }
    }

    /// Lends the buffer for a receive into the room. `None` unless the window was renewed.
    pub(crate) fn lend(&mut self) -> Option<(IoBuf, Range<usize>)> {
        match mem::take(&mut self.holder) {
            Holder::Own(buf) => {
                let room = self.end..buf.len();
                Some((buf, room))
            }
            other => {
                self.holder = other;
                None
            }
        }
    }

    /// Whether the kernel has the buffer, or it was given up.
    pub(crate) fn is_lent(&self) -> bool {
        matches!(self.holder, Holder::Lent)
    }

    /// Takes the buffer back after a receive.
    pub(crate) fn give(&mut self, buf: IoBuf) {
        self.holder = Holder::Own(buf);
    }

    /// Records that `bytes` were received into the room.
    pub(crate) fn fill(&mut self, bytes: usize) {
        self.end += bytes;
        self.received_bytes += bytes;
    }

    /// Gives the buffer back to the pool, or to the caller if writes still use it.
    pub(crate) fn release(&mut self, pool: &mut Pool) -> Option<Retired> {
        (self.start, self.end) = (0, 0);
        let other_bytes = mem::take(&mut self.shared_bytes);
        match mem::take(&mut self.holder) {
            Holder::Lent => None,
            Holder::Own(buf) => {
                pool.give(buf);
                None
            }
            Holder::Shared(window) => match Arc::try_unwrap(window) {
                Ok(buf) => {
                    pool.give(buf);
                    None
                }
                Err(window) => {
                    let other_bytes = window.len().saturating_sub(other_bytes);
                    Some(Retired { window, other_bytes })
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(pool: &mut Pool, bytes: usize) -> Window {
        let mut window = Window::new(pool);
        assert!(window.renew(pool).is_none());
        let (mut buf, room) = window.lend().unwrap();
        buf[room.start..room.start + bytes].iter_mut().zip(0_u32..).for_each(|(byte, n)| *byte = (n % 251) as u8);
        window.give(buf);
        window.fill(bytes);
        window
    }

    #[test]
    fn a_half_full_window_is_shared_and_then_replaced() {
        let mut pool = Pool::new();
        let mut window = filled(&mut pool, 100_000);
        window.consume(28);
        let (shared, range) = window.share(60_000).unwrap();
        assert_eq!((range.clone(), window.bytes().len()), (28..60_028, 39_972));
        assert!(window.share(4095).is_none(), "too short");
        assert!(window.room().is_empty() && window.lend().is_none(), "a receive would overwrite a payload in flight");
        window.consume(39_960);
        let rest = window.bytes().to_vec();
        let retired = window.renew(&mut pool).unwrap();
        assert_eq!(retired.other_bytes, shared.len() - 60_000);
        assert_eq!((window.bytes(), rest.len()), (&rest[..], 12));
        assert_eq!(window.lend().unwrap().1.start, 12);
        assert!(shared[range].iter().zip(28_u32..).all(|(&byte, n)| byte == (n % 251) as u8));
    }

    #[test]
    fn a_window_whose_writes_have_ended_is_reused() {
        let mut pool = Pool::new();
        let mut window = filled(&mut pool, 100_000);
        let address = window.bytes().as_ptr();
        drop(window.share(99_999).unwrap());
        assert!(window.share(20_000).is_none(), "the remaining part is one byte");
        assert!(window.renew(&mut pool).is_none());
        assert_eq!((window.bytes(), window.bytes().as_ptr()), (&[(99_999 % 251) as u8][..], address));
        assert!(window.release(&mut pool).is_none());
        assert_eq!(pool.take(WINDOW_BYTES).as_ptr(), address, "the buffer went back to the pool");
    }

    #[test]
    fn a_window_less_than_half_full_is_not_shared() {
        let mut pool = Pool::new();
        let mut window = filled(&mut pool, 60_000);
        assert!(window.share(60_000).is_none() && window.bytes().len() == 60_000);
        assert!(window.renew(&mut pool).is_none());
        window.fill(10_000);
        assert_eq!(window.share(80_000).unwrap().1, 0..70_000, "an incomplete payload");
        assert_eq!(window.release(&mut pool).map(|retired| retired.other_bytes), None, "no write uses it");
    }
}
