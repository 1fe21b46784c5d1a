//! Requests under way: librbd reads and writes the memory of the requests, and says by an eventfd
//! that some have ended.
//!
//! ```text
//!   start ─▶ a slot with the loan ─▶ rbd_aio_read(…, memory of the loan, completion with the slot)
//!   drive ─▶ eventfd read ─▶ rbd_poll_io_events ─▶ slot ─▶ result ─▶ the loan completes
//! ```
//!
//! A loan stays in its slot until its request has ended, so its memory lives as long as librbd may
//! use it. If an engine gives up waiting, the memory is leaked, and the slot stays.
//!
//! Lock: `slots`, held for a look-up, never during a call that may wait.
//!
//! Every request ends: `rados_osd_op_timeout` is set (`cluster.rs`), so that a cluster that does
//! not answer is an error.

#![allow(unsafe_code, reason = "functions of a C library, which are given memory of requests")]

use crate::{
    cluster::error_of,
    functions::Handle,
    image::{Image, KEEPS_SPACE, length},
};
use diskwright_store::{Lane, LaneOp, Loan, Zeroing};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    ffi::c_int,
    fmt, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// `EVENT_TYPE_EVENTFD`.
const EVENTFD: c_int = 2;
/// Completions that are asked for at once.
const EVENTS: usize = 64;
/// What a request may take longer than the timeout of the cluster.
const GRACE: Duration = Duration::from_secs(10);

/// A request under way.
struct UnderWay {
    loan: Loan,
    /// It must be followed by a flush.
    is_durable: bool,
    is_read: bool,
}

#[derive(Default)]
struct Slots {
    used: Vec<Option<UnderWay>>,
    free: Vec<usize>,
}

/// Requests under way; see the module documentation.
pub(crate) struct RbdLane {
    image: Arc<Image>,
    event: OwnedFd,
    slots: Mutex<Slots>,
    timeout: Duration,
}

impl fmt::Debug for RbdLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RbdLane of {}", self.image.name)
    }
}

impl RbdLane {
    /// The lane of an image, which has no other one.
    pub(crate) fn new(image: Arc<Image>, timeout: Duration) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // SAFETY: the descriptor lives as long as the lane, and the lane as long as the store. The
        // image is closed when both have gone.
        let code = unsafe { (image.functions().rbd_set_image_notification)(image.handle, event.as_raw_fd(), EVENTFD) };
        if code < 0 {
            return Err(error_of(code));
        }
        Ok(Self { image, event, slots: Mutex::default(), timeout })
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, request: UnderWay) -> usize {
        let mut slots = self.slots();
        match slots.free.pop() {
            Some(slot) => {
                slots.used[slot] = Some(request);
                slot
            }
            None => {
                slots.used.push(Some(request));
                slots.used.len() - 1
            }
        }
    }

    fn take(&self, slot: usize) -> Option<UnderWay> {
        let mut slots = self.slots();
        let taken = slots.used.get_mut(slot)?.take();
        if taken.is_some() {
            slots.free.push(slot);
        }
        taken
    }

    /// Starts a request. The memory of a loan does not move while it is in its slot.
    fn begin(&self, op: LaneOp, mut loan: Loan) {
        let functions = self.image.functions();
        let (is_read, is_durable) = match op {
            LaneOp::Read { .. } => (true, false),
            LaneOp::Write { durable, .. } => (false, durable),
            LaneOp::Zero { .. } | LaneOp::Sync => (false, false),
        };
        let len = loan.len();
        let into: *mut u8 = if is_read { loan.bytes_mut().as_mut_ptr() } else { ptr::null_mut() };
        let from: *const u8 = if is_read { ptr::null() } else { loan.bytes().as_ptr() };
        let slot = self.put(UnderWay { loan, is_durable, is_read });
        let mut completion: Handle = ptr::null_mut();
        // SAFETY: the argument is a number, which the library only gives back; there is no
        // callback.
        let made = unsafe {
            (functions.rbd_aio_create_completion)(ptr::without_provenance_mut(slot), ptr::null(), &mut completion)
        };
        if made < 0 {
            return self.fail(slot, made);
        }
        let image = self.image.handle;
        // SAFETY: the loan in the slot keeps the memory, which nobody else touches, until the
        // completion was taken from the library in `drive`.
        let code = unsafe {
            match op {
                LaneOp::Read { offset_bytes } => {
                    (functions.rbd_aio_read)(image, offset_bytes, len, into.cast(), completion)
                }
                LaneOp::Write { offset_bytes, .. } => {
                    (functions.rbd_aio_write)(image, offset_bytes, len, from.cast(), completion)
                }
                LaneOp::Zero { offset_bytes, len_bytes, how } => {
                    let flags = if how == Zeroing::Keep { KEEPS_SPACE } else { 0 };
                    let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
                    (functions.rbd_aio_write_zeroes)(image, offset_bytes, len, completion, flags, 0)
                }
                LaneOp::Sync => (functions.rbd_aio_flush)(image, completion),
            }
        };
        if code < 0 {
            // SAFETY: a request that was not accepted does not complete.
            unsafe { (functions.rbd_aio_release)(completion) };
            self.fail(slot, code);
        }
    }

    fn fail(&self, slot: usize, code: c_int) {
        if let Some(UnderWay { loan, .. }) = self.take(slot) {
            loan.complete(Err(error_of(code)));
        }
    }

    /// A request has ended.
    fn ended(&self, completion: Handle) {
        let functions = self.image.functions();
        // SAFETY: a completion that the library has handed out once, and that is released once.
        let (code, slot) = unsafe {
            let code = (functions.rbd_aio_get_return_value)(completion);
            let slot = (functions.rbd_aio_get_arg)(completion).addr();
            (functions.rbd_aio_release)(completion);
            (code, slot)
        };
        let Some(UnderWay { loan, is_durable, is_read }) = self.take(slot) else { return };
        match length(code) {
            // The image was made smaller meanwhile.
            Ok(len) if is_read && len < loan.len() => loan.complete(Err(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) if is_durable => self.begin(LaneOp::Sync, loan),
            result => loan.complete(result.map(|_| ())),
        }
    }
}

impl Lane for RbdLane {
    fn start(&self, op: LaneOp, loan: Loan) {
        self.begin(op, loan);
    }

    fn drive(&self) {
        let mut count = [0; 8];
        // What is counted does not matter: all completions are taken.
        let _ = rustix::io::read(&self.event, &mut count);
        let mut completions: [Handle; EVENTS] = [ptr::null_mut(); EVENTS];
        loop {
            // SAFETY: there is room for as many as are asked for.
            let found = unsafe {
                (self.image.functions().rbd_poll_io_events)(
                    self.image.handle,
                    completions.as_mut_ptr(),
                    EVENTS as c_int,
                )
            };
            let found = usize::try_from(found).unwrap_or(0).min(EVENTS);
            completions[..found].iter().for_each(|completion| self.ended(*completion));
            if found < EVENTS {
                return;
            }
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn patience(&self) -> Duration {
        self.timeout + GRACE
    }
}
