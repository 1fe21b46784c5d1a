//! Adds a ublk device, serves it until the kernel says that it was stopped, and deletes it. Each
//! queue has a thread with a ring and a queue of the disk.
//!
//! ```text
//!   add ─▶ describe ─▶ /dev/ublkcN ─▶ fetch for every tag ─▶ ready ─▶ loop
//!     ─▶ all tags have ended with ENODEV ─▶ delete
//!
//!   the supervisor, after "ready": start ... stop
//!
//!   another server after a crash: /dev/ublkcN ─▶ fetch for every tag ─▶ ready ─▶ loop
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
        find::FoundDevice,
        risk::Risk,
        session::{Answer, Session},
    },
};
use diskwright_store::{
    BlockDevice, EngineKind, QueueOptions, SharedRing, Slab,
    resize::SizeWatcher,
    ublk::{UblkDevice, UblkEnd, UblkNode, UblkQueue},
};
use rustix::io::Errno;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

/// Queues of a device: one for each processor, but no more than this.
const QUEUES_MAX: usize = 4;
/// Requests in flight, on each of several queues half as many. Each has a buffer of
/// `TRANSFER_BYTES`, so a queue uses 16 or 32 MiB of memory.
const DEPTH: u16 = 128;
const TRANSFER_BYTES: u32 = 256 << 10;

/// Requests that are answered in a normal turn.
const ANSWERS: usize = 4;

/// How long the device node of a new device may take to appear.
const NODE_PATIENCE: Duration = Duration::from_secs(5);

/// Which device a server serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UblkPlace {
    /// The device's mark.
    pub mark: u64,
    /// Whether the device exists, because its former server has died.
    pub exists: bool,
    /// File for the state of the disk, see `risk.rs`. `None`: the device ends with its server.
    pub risk: Option<PathBuf>,
}

/// Makes `disk` a ublk device, or takes over one whose server has died, and serves it until it is
/// stopped. `ready` is called with the device number once the device can be started, or its
/// recovery ended.
///
/// # Errors See [`UblkError`]. The device is deleted only if no queue was opened; otherwise it
/// stays, without a server.
pub fn serve(
    disk: Arc<dyn BlockDevice>,
    place: &UblkPlace,
    engine: EngineKind,
    ready: impl FnOnce(u32),
) -> Result<(), UblkError> {
    let mut control = control()?;
    let failed = |doing| move |source| UblkError::Device { doing, source };
    let risk = place.risk.as_deref().map(|path| Risk::new(Arc::clone(&disk), path)).transpose();
    let risk = risk.map_err(failed("record the state of"))?;
    let mark = place.mark;
    let number = if place.exists {
        let gone = || std::io::Error::from(Errno::NODEV);
        let found = FoundDevice::by_mark(&mut control, mark)?.ok_or_else(gone);
        found.map_err(failed("take over"))?.number
    } else {
        let outlives_server = risk.is_some();
        let queues = thread::available_parallelism().map_or(1, usize::from).min(QUEUES_MAX) as u16;
        let queue_depth = if queues == 1 { DEPTH } else { DEPTH / 2 };
        let add = UblkDevice { queues, queue_depth, transfer_bytes: TRANSFER_BYTES, mark, outlives_server };
        let number = control.add(&add).map_err(failed("add"))?;
        let described = control.describe(number, &disk.geometry(), TRANSFER_BYTES);
        if let Err(source) = described {
            let _ = control.delete(number);
            return Err(UblkError::Device { doing: "describe", source });
        }
        number
    };
    let node = format!("/dev/ublkc{number}");
    let opened = match wait_until(NODE_PATIENCE, || Path::new(&node).exists()) {
        true => UblkNode::open(&node).map_err(failed("open")),
        false => Err(UblkError::NoNode { path: node.into() }),
    };
    let served = opened.and_then(|node| {
        // The driver may have changed what was asked for.
        let device = control.facts(number).map_err(failed("query"))?.device;
        serve_added(&Served { disk, risk: risk.map(Arc::new), device, node, engine }, number, ready)
    });
    // A fetch in flight keeps the device open until this process ends, and a deletion would wait
    // for that. The supervisor deletes the device then.
    let was_opened = !matches!(served, Err(UblkError::NoNode { .. }));
    if served.is_err() && (was_opened || place.exists) {
        return served;
    }
    let deleted = control.delete(number).map_err(|source| UblkError::Device { doing: "delete", source });
    served.and(deleted)
}

/// What all queues of a device share.
#[derive(Clone)]
struct Served {
    disk: Arc<dyn BlockDevice>,
    risk: Option<Arc<Risk>>,
    device: UblkDevice,
    node: UblkNode,
    engine: EngineKind,
}

fn serve_added(served: &Served, number: u32, ready: impl FnOnce(u32)) -> Result<(), UblkError> {
    let (tell, told) = mpsc::channel();
    for index in 0..served.device.queues {
        let (served, tell) = (served.clone(), tell.clone());
        let started = thread::Builder::new().name(format!("ublk-{index}")).spawn(move || {
            let ended = serve_queue(&served, index, &tell);
            // Nobody listens after the first error.
            let _ = tell.send(QueueNews::Ended(ended));
        });
        started.map_err(|source| UblkError::Device { doing: "serve", source })?;
    }
    drop(tell);
    let (mut fetching, mut ended) = (0, 0);
    let mut ready = Some(ready);
    let watcher = follow_size(number);
    // The first error ends the process, and with it the other queues.
    for news in told {
        match news {
            QueueNews::Fetching => fetching += 1,
            QueueNews::Ended(result) => {
                result?;
                ended += 1;
            }
        }
        if fetching == served.device.queues
            && let Some(ready) = ready.take()
        {
            served.disk.watch_size(&watcher);
            ready(number);
        }
    }
    if ended < served.device.queues {
        return Err(UblkError::Queue(std::io::Error::other("the thread of a queue has panicked")));
    }
    Ok(())
}

/// What the thread of a queue tells.
enum QueueNews {
    /// Every tag has its fetch.
    Fetching,
    /// Every tag has ended, or the queue has failed.
    Ended(Result<(), UblkError>),
}

fn serve_queue(served: &Served, index: u16, tell: &mpsc::Sender<QueueNews>) -> Result<(), UblkError> {
    let refused = |doing| move |source| UblkError::Device { doing, source };
    let depth = served.device.queue_depth;
    let slab = Slab::new(usize::from(depth), TRANSFER_BYTES as usize);
    // Room for each disk request and for its commit.
    let ring = SharedRing::new(2 * usize::from(depth), Some(&slab)).map_err(refused("serve"))?;
    let mut kernel = UblkQueue::open(&ring, &served.node, &served.device, index).map_err(refused("open"))?;
    let options = QueueOptions { depth: depth.into(), engine: served.engine, slab: Some(&slab), ring: Some(&ring) };
    let queue = served.disk.open_queue(&options).map_err(refused("serve"))?;
    let session = Session::new(queue, depth, served.risk.clone());
    for (tag, buf) in (0..depth).zip(slab.take_all()) {
        kernel.fetch(tag, buf);
    }
    ring.go_on().map_err(UblkError::Queue)?;
    // The main thread listens until the queues have ended.
    let _ = tell.send(QueueNews::Fetching);
    // Without a ring, the disk's requests make progress only in a reap that waits.
    let waits_for_disk = served.engine == EngineKind::Sync;
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
        let (mut ends, mut pace) = (Vec::new(), Pace::answering(ANSWERS));
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
