//! Adds a ublk device, serves it until the kernel says that it was stopped, and deletes it.
//!
//! ```text
//!   add ─▶ describe ─▶ /dev/ublkcN ─▶ fetch for every tag ─▶ ready ─▶ loop
//!     ─▶ all tags have ended with ENODEV ─▶ delete
//!
//!   the supervisor, after "ready": start ... stop
//! ```
//!
//! One turn of the loop is one `io_uring_enter`. It submits the disk's I/O and the commits of some
//! of the requests that have ended (`turn` explains why not of all), and waits for either.

use crate::{
    attach::wait_until,
    turn::Pace,
    ublk::{
        control,
        error::UblkError,
        session::{Answer, Session},
    },
};
use diskwright_store::{
    BlockDevice, EngineKind, QueueOptions, SharedRing, Slab,
    resize::SizeWatcher,
    ublk::{UblkControl, UblkDevice, UblkEnd, UblkQueue},
};
use rustix::io::Errno;
use std::{path::Path, sync::Arc, time::Duration};

/// Requests in flight. Each has a buffer of `TRANSFER_BYTES`, so a device uses 32 MiB of memory.
const DEPTH: u16 = 128;
const TRANSFER_BYTES: u32 = 256 << 10;

/// How long the device node of a new device may take to appear.
const NODE_PATIENCE: Duration = Duration::from_secs(5);

/// Makes `device` a ublk device with this mark, and serves it until it is stopped. `ready` is
/// called with the device number once the device can be started.
///
/// # Errors
/// See [`UblkError`]. The device is then deleted. If the kernel cannot delete it while this process
/// lives, it stays, without a server.
pub fn serve(
    device: Arc<dyn BlockDevice>,
    mark: u64,
    engine: EngineKind,
    ready: impl FnOnce(u32),
) -> Result<(), UblkError> {
    let mut control = control()?;
    let add = UblkDevice { queue_depth: DEPTH, transfer_bytes: TRANSFER_BYTES, mark };
    let number = control.add(&add).map_err(|source| UblkError::Device { doing: "add", source })?;
    let served = serve_added(device, &mut control, number, engine, ready);
    // A fetch in flight keeps the device open until this process ends, and a deletion would wait
    // for that.
    let is_open = matches!(served, Err(UblkError::Fetch { .. } | UblkError::Queue(_)));
    if is_open {
        return served;
    }
    let deleted = control.delete(number).map_err(|source| UblkError::Device { doing: "delete", source });
    served.and(deleted)
}

fn serve_added(
    device: Arc<dyn BlockDevice>,
    control: &mut UblkControl,
    number: u32,
    engine: EngineKind,
    ready: impl FnOnce(u32),
) -> Result<(), UblkError> {
    let refused = |doing| move |source| UblkError::Device { doing, source };
    control.describe(number, &device.geometry(), TRANSFER_BYTES).map_err(refused("describe"))?;
    let node = format!("/dev/ublkc{number}");
    if !wait_until(NODE_PATIENCE, || Path::new(&node).exists()) {
        return Err(UblkError::NoNode { path: node.into() });
    }
    let slab = Slab::new(usize::from(DEPTH), TRANSFER_BYTES as usize);
    // Room for each disk request and for its commit.
    let ring = SharedRing::new(2 * usize::from(DEPTH), Some(&slab)).map_err(refused("serve"))?;
    let mut kernel = UblkQueue::open(&ring, control, number, &node).map_err(refused("open"))?;
    let depth = kernel.depth();
    let options = QueueOptions { depth: depth.into(), engine, slab: Some(&slab), ring: Some(&ring) };
    let queue = device.open_queue(&options).map_err(refused("serve"))?;
    let session = Session::new(queue, depth);
    for (tag, buf) in (0..depth).zip(slab.take_all()) {
        kernel.fetch(tag, buf);
    }
    ring.go_on().map_err(UblkError::Queue)?;
    let watcher = follow_size(number);
    device.watch_size(&watcher);
    ready(number);
    // Without a ring, the disk's requests make progress only in a reap that waits.
    let waits_for_disk = engine == EngineKind::Sync;
    Pump { kernel, session, live: depth }.run(&ring, waits_for_disk)
}

/// Tells the kernel each new size of the disk. This runs on the thread that changes the size,
/// because the driver may need the queue's thread meanwhile.
fn follow_size(number: u32) -> Arc<SizeWatcher> {
    Arc::new(move |size_bytes| {
        let updated = control()
            .map_err(|error| error.to_string())
            .and_then(|mut control| control.update_size(number, size_bytes).map_err(|error| error.to_string()));
        if let Err(error) = updated {
            tracing::warn!(
                "the disk now has {size_bytes} bytes, but /dev/ublkb{number} keeps its old size until the disk is attached again: {error}"
            );
        }
    })
}

struct Pump {
    kernel: UblkQueue,
    session: Session,
    /// Tags that still have a fetch or a request.
    live: u16,
}

impl Pump {
    fn run(mut self, ring: &SharedRing, waits_for_disk: bool) -> Result<(), UblkError> {
        let (mut ends, mut pace) = (Vec::new(), Pace::default());
        // A tag whose answer waits is still live.
        while self.live > 0 {
            pace.end_turn(ring, self.session.has_answer()).map_err(UblkError::Queue)?;
            self.kernel.reap(&mut ends);
            for end in ends.drain(..) {
                self.taken(end)?;
            }
            let at_least = if waits_for_disk { self.session.in_flight() } else { 0 };
            self.session.reap(at_least).map_err(UblkError::Queue)?;
            for _ in 0..pace.answers() {
                let Some(Answer { tag, result, buf }) = self.session.next_answer() else { break };
                self.kernel.commit(tag, result, buf);
            }
        }
        Ok(())
    }

    fn taken(&mut self, UblkEnd { tag, buf, request }: UblkEnd) -> Result<(), UblkError> {
        match request {
            Ok(asked) => self.session.take(tag, buf, asked),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NODEV) => self.live -= 1,
            Err(source) => return Err(UblkError::Fetch { source }),
        }
        Ok(())
    }
}
