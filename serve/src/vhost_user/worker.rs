//! A worker: one thread, one ring of the kernel, one virtqueue, and its queue of the disk.
//!
//! ```text
//!   turn:  wait (one io_uring_enter) ─▶ kick, messages ─▶ requests ─▶ the disk's queue
//!                                   └▶ completions ─▶ used entries ─▶ one signal
//! ```
//!
//! While a worker has something to do it looks at the virtqueue in each turn and needs no kicks.
//! Before it sleeps it asks for one, and looks again.
//!
//! A signal is a write to an eventfd of the front-end, by a system call of its own. On the ring its
//! completion would end the sleep that follows it.

use super::{
    inflight::QueueInflight,
    memory::GuestMemory,
    session::{DeviceFacts, Session},
    vring::{RingError, Vring},
};
use crate::{
    inbox::Inbox,
    metrics::WorkerMetrics,
    panic_guard::{PanicGuard, catch_panic},
    reservations::ClaimedQueue,
    reserve::Reserve,
    turn::Pace,
};
use diskwright_store::{BlockDevice, IoBuf, QueueOptions, SharedRing, StreamEnd, StreamId, Streams};
use rustix::io::Errno;
use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering, mpsc},
    time::Instant,
};

/// Requests that are answered in a normal turn, with one signal.
const ANSWERS: usize = 6;

const WAKEUP: u64 = 0;
const KICK: u64 = 1;

/// A ring to be served.
#[derive(Debug)]
pub(crate) struct StartRing {
    pub(crate) ring: Vring,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) inflight: Option<QueueInflight>,
    pub(crate) kick: OwnedFd,
    pub(crate) call: Option<OwnedFd>,
}

/// A message to a worker.
#[derive(Debug)]
pub(crate) enum ToWorker {
    /// Serve this ring.
    Start(Box<StartRing>),
    /// Wait for the requests in flight and stop. The answer is the next entry to be taken.
    Stop(mpsc::SyncSender<u16>),
    /// Signal here from now on.
    SetCall(Option<OwnedFd>),
    /// End the thread.
    Exit,
}

/// A message to the front thread.
#[derive(Debug)]
pub(crate) enum ToFront {
    /// A ring is damaged: end the connection.
    Broken {
        ring: usize,
        reason: String,
    },
    /// The size of the disk has changed.
    Resized,
    Stop,
}

#[derive(Debug)]
struct Running {
    session: Session,
    kick: StreamId,
    call: Option<OwnedFd>,
    stopped: Option<mpsc::SyncSender<u16>>,
}

#[derive(Debug)]
pub(crate) struct Worker {
    /// Dropped first, so that I/O in flight ends.
    running: Option<Running>,
    streams: Streams,
    ring: SharedRing,
    inbox: Arc<Inbox<ToWorker>>,
    wakeup: StreamId,
    index: usize,
    device: Arc<dyn BlockDevice>,
    facts: DeviceFacts,
    front: Arc<Inbox<ToFront>>,
    metrics: Arc<WorkerMetrics>,
    started: Instant,
    ends: Vec<StreamEnd>,
    pace: Pace,
    exits: bool,
}

impl Worker {
    /// Must be called on the thread that will run the worker.
    ///
    /// # Errors
    /// io_uring is not available, or there are no descriptors left.
    pub(crate) fn new(
        index: usize,
        device: Arc<dyn BlockDevice>,
        facts: DeviceFacts,
        front: Arc<Inbox<ToFront>>,
        inbox: Arc<Inbox<ToWorker>>,
        metrics: Arc<WorkerMetrics>,
    ) -> io::Result<Self> {
        let ring = SharedRing::new(256, None)?;
        let mut streams = Streams::new(&ring);
        let wakeup = streams.add(inbox.wakeup()?)?;
        streams.receive(wakeup, IoBuf::new(8), 0..8, false, WAKEUP);
        Ok(Self {
            running: None,
            streams,
            ring,
            inbox,
            wakeup,
            index,
            device,
            facts,
            front,
            metrics,
            started: Instant::now(),
            ends: Vec::new(),
            pace: Pace::answering(ANSWERS),
            exits: false,
        })
    }

    /// Serves until it is told to exit.
    ///
    /// # Errors
    /// The ring failed.
    pub(crate) fn run(mut self) -> io::Result<()> {
        while !self.exits || self.running.is_some() {
            let mut ends = std::mem::take(&mut self.ends);
            self.streams.reap(&mut ends);
            if ends.is_empty() {
                let has_more = self.has_more();
                self.pace.end_turn(&self.ring, has_more)?;
                self.streams.reap(&mut ends);
            }
            for end in ends.drain(..) {
                self.ended(end);
            }
            self.ends = ends;
            self.work();
            self.metrics.enters.set(self.ring.enters());
        }
        Ok(())
    }

    /// Whether there is something to do without an event. Otherwise the guest is asked for kicks.
    fn has_more(&mut self) -> bool {
        let Some(running) = &mut self.running else { return false };
        if running.session.has_answers() {
            return true;
        }
        match running.session.ask_for_kicks() {
            Ok(has_more) => has_more,
            Err(error) => {
                self.broke(&error);
                true
            }
        }
    }

    fn work(&mut self) {
        let now_ns = self.started.elapsed().as_nanos() as u64;
        let answers = self.pace.answers();
        let Some(running) = &mut self.running else { return };
        match running.session.turn(answers, now_ns) {
            Ok(false) => {}
            Ok(true) => {
                if let Some(call) = &running.call {
                    signal(call);
                }
            }
            Err(error) => self.broke(&error),
        }
        if let Some(running) = self
            .running
            .take_if(|running| (running.stopped.is_some() || self.exits) && running.session.in_flight() == 0)
        {
            self.streams.close(running.kick);
            let next = running.session.next_available();
            // Closes the disk's queue before the front-end goes on.
            drop(running.session);
            if let Some(stopped) = running.stopped {
                // The front thread has ended if nobody receives it.
                let _ = stopped.send(next);
            }
        }
    }

    /// Stops taking requests of a ring that is damaged, and tells the front, which ends the
    /// connection.
    fn broke(&mut self, error: &RingError) {
        match &mut self.running {
            Some(running) if !running.session.is_broken() => {
                running.session.break_off();
                self.front.put(ToFront::Broken { ring: self.index, reason: error.to_string() });
            }
            // The disk's queue fails again and again, so nothing tells when its requests have
            // ended. Its drop waits for them.
            Some(_) => {
                if let Some(running) = self.running.take() {
                    self.streams.close(running.kick);
                }
            }
            None => {}
        }
    }

    fn ended(&mut self, end: StreamEnd) {
        match end.tag {
            WAKEUP => {
                self.metrics.wakeups.add(1);
                for message in self.inbox.take() {
                    self.told(message);
                }
                if let Some(buf) = end.buf {
                    self.streams.receive(self.wakeup, buf, 0..8, false, WAKEUP);
                }
            }
            _ => {
                let Some(running) = &self.running else { return };
                match (end.result, end.buf) {
                    (Ok(1..), Some(buf)) => self.streams.receive(running.kick, buf, 0..8, false, KICK),
                    // The kick of a ring that was stopped.
                    (Err(error), _) if Errno::from_io_error(&error) == Some(Errno::CANCELED) => {}
                    (result, _) => {
                        let what = result.map_or_else(|error| error.to_string(), |_| "it has ended".into());
                        let reason = format!("the kicks of the queue cannot be received: {what}");
                        self.front.put(ToFront::Broken { ring: self.index, reason });
                    }
                }
            }
        }
    }

    fn told(&mut self, message: ToWorker) {
        match message {
            ToWorker::Start(start) => {
                if let Err(error) = self.start(*start) {
                    let reason = format!("the queue cannot be served: {error}");
                    self.front.put(ToFront::Broken { ring: self.index, reason });
                }
            }
            ToWorker::Stop(stopped) => match &mut self.running {
                Some(running) => {
                    running.session.stop();
                    running.stopped = Some(stopped);
                }
                None => drop(stopped),
            },
            ToWorker::SetCall(call) => {
                if let Some(running) = &mut self.running {
                    running.call = call;
                    // The guest may have missed a signal to the former descriptor.
                    running.call.iter().for_each(signal);
                }
            }
            ToWorker::Exit => {
                self.exits = true;
                if let Some(running) = &mut self.running {
                    running.session.stop();
                }
            }
        }
    }

    fn start(&mut self, start: StartRing) -> io::Result<()> {
        let StartRing { ring, memory, inflight, kick, call } = start;
        let options = QueueOptions { depth: ring.size().into(), ring: Some(&self.ring), ..QueueOptions::default() };
        let queue = catch_panic(|| self.device.open_queue(&options))?;
        let held = Arc::clone(&self.metrics.held);
        let queue = Box::new(Reserve::over(Box::new(PanicGuard::over(queue)), &self.ring, held));
        let claims = Arc::clone(self.facts.reservations.claims());
        let queue = Box::new(ClaimedQueue::over(queue, claims, Some(&self.ring), true));
        let metrics = Arc::clone(&self.metrics);
        let session =
            Session::new(queue, ring, memory, self.facts.clone(), inflight, metrics).map_err(io::Error::other)?;
        let kick = self.streams.add(kick)?;
        self.streams.receive(kick, IoBuf::new(8), 0..8, false, KICK);
        self.metrics.connections.store(1, Ordering::Relaxed);
        self.running = Some(Running { session, kick, call, stopped: None });
        Ok(())
    }
}

/// Wakes the guest.
fn signal(call: &OwnedFd) {
    // The write fails only if the counter is full, and then a signal is waiting already.
    let _ = rustix::io::write(call, &1u64.to_ne_bytes());
}
