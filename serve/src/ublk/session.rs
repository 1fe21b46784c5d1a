//! One ublk device: requests of the kernel become requests of the disk's queue, and their
//! completions become answers.
//!
//! The session does no I/O with the kernel. The loop around it (`pump`) passes it the requests with
//! their buffers and commits its answers.
//!
//! Invariants: every request that was taken gets exactly one answer, with its buffer. A tag has at
//! most one request, so the kernel's tag is also the tag of the disk's request.

use super::risk::Risk;
use crate::fuse::errno_of;
use diskwright_store::{BlockQueue, Completion, IoBuf, Operation, Request, ublk::UblkOperation};
use rustix::io::Errno;
use std::{collections::VecDeque, io, sync::Arc};

/// The result of a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) tag: u16,
    /// Bytes moved, or the error.
    pub(crate) result: Result<u32, Errno>,
    pub(crate) buf: IoBuf,
}

/// State of a request while the disk carries it out.
#[derive(Debug)]
enum RequestState {
    /// A read or write: the queue has the buffer.
    Transfer { operation: Operation, len_bytes: u32 },
    /// Any other request: the buffer stays here.
    Other { operation: Operation, buf: IoBuf },
}

#[derive(Debug)]
pub(crate) struct Session {
    queue: Box<dyn BlockQueue>,
    /// Indexed by tag.
    held: Vec<Option<RequestState>>,
    in_flight: usize,
    completions: Vec<Completion>,
    answers: VecDeque<Answer>,
    /// Told of each change and flush before its answer.
    risk: Option<Arc<Risk>>,
}

impl Session {
    /// `queue` must have at least the given depth, which is the number of tags.
    pub(crate) fn new(queue: Box<dyn BlockQueue>, depth: u16, risk: Option<Arc<Risk>>) -> Self {
        let held = (0..depth).map(|_| None).collect();
        Self { queue, held, in_flight: 0, completions: Vec::new(), answers: VecDeque::new(), risk }
    }

    /// Requests that the disk is carrying out.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(crate) fn has_answer(&self) -> bool {
        !self.answers.is_empty()
    }

    /// The oldest answer that is ready.
    pub(crate) fn next_answer(&mut self) -> Option<Answer> {
        self.answers.pop_front()
    }

    /// Takes a request with its buffer. `None` is an operation that is not known here; it is
    /// refused.
    pub(crate) fn take(&mut self, tag: u16, buf: IoBuf, asked: Option<UblkOperation>) {
        let Some(UblkOperation { operation, offset_bytes, len_bytes, fua }) = asked else {
            return self.answers.push_back(Answer { tag, result: Err(Errno::OPNOTSUPP), buf });
        };
        let is_transfer = matches!(operation, Operation::Read | Operation::Write);
        if is_transfer && len_bytes > buf.len() as u64 {
            return self.answers.push_back(Answer { tag, result: Err(Errno::INVAL), buf });
        }
        let mut request = Request { operation, offset_bytes, len_bytes, fua, ..Request::flush(tag.into()) };
        let held = if is_transfer {
            request.buf = Some(buf);
            RequestState::Transfer { operation, len_bytes: len_bytes as u32 }
        } else {
            RequestState::Other { operation, buf }
        };
        self.held[usize::from(tag)] = Some(held);
        self.in_flight += 1;
        if let Err(refused) = self.queue.push(request) {
            let Request { tag, buf, .. } = refused.request;
            self.ended(Completion { tag, buf, segments: None, result: Err(refused.reason) });
        }
    }

    /// Submits the requests taken, and turns completions into answers. Waits for `at_least`
    /// completions.
    pub(crate) fn reap(&mut self, at_least: usize) -> io::Result<()> {
        let mut completions = std::mem::take(&mut self.completions);
        let reaped = self.queue.reap(at_least, &mut completions);
        for completion in completions.drain(..) {
            self.ended(completion);
        }
        self.completions = completions;
        reaped
    }

    fn ended(&mut self, completion: Completion) {
        let Completion { tag, buf, result, .. } = completion;
        let tag = tag as u16;
        let (operation, moved_bytes, buf) = match (self.held[usize::from(tag)].take(), buf) {
            (Some(RequestState::Transfer { operation, len_bytes }), Some(buf)) => (operation, len_bytes, buf),
            (Some(RequestState::Other { operation, buf }), _) => (operation, 0, buf),
            (Some(RequestState::Transfer { .. }), None) => {
                unreachable!("the queue returns the buffer of every request")
            }
            (None, _) => unreachable!("the queue completes a request once"),
        };
        self.in_flight -= 1;
        let told = |()| match (&self.risk, operation) {
            (None, _) | (_, Operation::Read) => Ok(()),
            (Some(risk), Operation::Flush) => risk.flushed(),
            (Some(risk), _) => risk.changed(),
        };
        let result = result.and_then(told).map(|()| moved_bytes).map_err(|error| errno_of(&error));
        self.answers.push_back(Answer { tag, result, buf });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::{BlockDevice, EngineKind, MemoryStore, QueueOptions, RawDevice};
    use proptest::prelude::*;

    const SIZE: u64 = 64 << 10;
    const TRANSFER: usize = 16 << 10;

    fn session(writable: bool) -> Session {
        let store = Arc::new(MemoryStore::with_bytes("memory", vec![0; SIZE as usize]));
        let device = RawDevice::new(store, writable, 512).unwrap();
        let options = QueueOptions { depth: 8, engine: EngineKind::Sync, ..QueueOptions::default() };
        Session::new(device.open_queue(&options).unwrap(), 8, None)
    }

    fn operation(operation: Operation, offset_bytes: u64, len_bytes: u64) -> Option<UblkOperation> {
        Some(UblkOperation { operation, offset_bytes, len_bytes, fua: false })
    }

    /// Runs one request and returns its answer.
    fn asked(session: &mut Session, buf: IoBuf, asked: Option<UblkOperation>) -> Answer {
        session.take(3, buf, asked);
        session.reap(session.in_flight()).unwrap();
        assert_eq!((session.in_flight(), session.answers.len()), (0, 1));
        let answer = session.next_answer().unwrap();
        assert_eq!(answer.tag, 3);
        answer
    }

    #[test]
    fn refused_requests_are_answered_with_their_buffer() {
        let mut writable = session(true);
        let mut refused = |wanted| asked(&mut writable, IoBuf::new(TRANSFER), wanted).result;
        assert_eq!(refused(None), Err(Errno::OPNOTSUPP));
        assert_eq!(refused(operation(Operation::Read, 0, 32 << 10)), Err(Errno::INVAL), "more than the buffer holds");
        assert_eq!(refused(operation(Operation::Read, SIZE, 512)), Err(Errno::INVAL), "beyond the end");
        assert_eq!(refused(operation(Operation::Discard, 512, u64::MAX - 511)), Err(Errno::INVAL));
        assert_eq!(refused(operation(Operation::Flush, 0, 0)), Ok(0));
        let answer = asked(&mut session(false), IoBuf::new(TRANSFER), operation(Operation::Write, 0, 512));
        assert_eq!(answer.result, Err(Errno::ROFS));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn a_ublk_disk_behaves_like_memory(
            steps in prop::collection::vec((0u8..5, 0u64..SIZE / 512, 1u64..=32, any::<u8>()), 1..60)
        ) {
            let mut session = session(true);
            let mut model = vec![0u8; SIZE as usize];
            for (kind, first, count, byte) in steps {
                let count = count.min(SIZE / 512 - first);
                let (start, len) = ((first * 512) as usize, (count * 512) as usize);
                let mut buf = IoBuf::new(TRANSFER);
                let wanted = [
                    Operation::Read,
                    Operation::Write,
                    Operation::WriteZeroes,
                    Operation::Discard,
                    Operation::Flush,
                ][usize::from(kind)];
                match wanted {
                    Operation::Write => {
                        buf[..len].fill(byte);
                        model[start..start + len].fill(byte);
                    }
                    Operation::WriteZeroes | Operation::Discard => model[start..start + len].fill(0),
                    _ => {}
                }
                let answer = asked(&mut session, buf, operation(wanted, start as u64, len as u64));
                let moves = matches!(wanted, Operation::Read | Operation::Write);
                prop_assert_eq!(answer.result, Ok(if moves { len as u32 } else { 0 }));
                if wanted == Operation::Read {
                    prop_assert!(answer.buf[..len] == model[start..start + len]);
                }
            }
        }
    }
}
