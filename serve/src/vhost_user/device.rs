//! The device as its front-end sees it: what each message of the control socket does.
//!
//! A ring runs while it is *ready*: it has memory, addresses and a descriptor for kicks, and is
//! enabled. A message that changes one of these stops the ring, which waits for its requests in
//! flight, and starts it again where it stopped.
//!
//! Rings and descriptors belong to the connection. When it ends, all rings are stopped, and the
//! next front-end begins anew.

use super::{
    channel, config,
    inflight::Inflight,
    memory::GuestMemory,
    risk::Former,
    session::DeviceFacts,
    vring::{RING_SIZE_MAX, RingAddresses, RingError, Vring, check_size},
    wire::{self, InflightInfo, Message, protocol},
    worker::{StartRing, ToWorker},
};
use crate::{inbox::Inbox, panic_guard::catch_panic};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use rustix::fs::{FileType, OFlags};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, mpsc},
};

/// Why a message cannot be followed. The connection ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    #[error("there is no queue {ring}: the disk is served with {count}")]
    NoRing { ring: u32, count: usize },
    #[error("features {found:#x} were not offered")]
    Features { found: u64 },
    #[error("the guest's memory cannot be used: {source}")]
    Memory { source: io::Error },
    #[error("a queue cannot be served: {0}")]
    Ring(#[from] RingError),
    #[error("queue {ring} begins at {base}, which is not an index of a ring")]
    Base { ring: u32, base: u32 },
    #[error("the descriptor for the {what} of queue {ring} is not an eventfd")]
    NoEventfd { what: &'static str, ring: u32 },
    #[error("the memory for requests in flight cannot be used: {source}")]
    Inflight { source: io::Error },
    #[error("the memory for requests in flight has no place for queue {ring} of {size}")]
    InflightQueue { ring: usize, size: u16 },
    #[error("{found} queues of {size} are more than the device has")]
    InflightCount { found: u16, size: u16 },
    #[error("the configuration at {offset_bytes} cannot be written")]
    Config { offset_bytes: u32 },
    #[error("the disk could not be flushed before its cache was switched off: {source}")]
    Flush { source: io::Error },
    #[error("queue {ring} has failed, and did not stop in order")]
    QueueFailed { ring: usize },
    #[error("a descriptor of the front-end cannot be used: {source}")]
    Descriptor { source: io::Error },
}

/// A reply to a message.
#[derive(Debug)]
pub(crate) enum Reply {
    /// None, unless the front-end asked for an acknowledgement.
    None,
    Number(u64),
    Body(Vec<u8>),
    BodyWith(Vec<u8>, OwnedFd),
}

#[derive(Debug, Default)]
struct Ring {
    size: Option<u16>,
    addresses: Option<RingAddresses>,
    base: u16,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    /// Told when the ring is damaged.
    error: Option<OwnedFd>,
    enabled: bool,
    running: bool,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Device {
    disk: Arc<dyn BlockDevice>,
    facts: DeviceFacts,
    workers: Vec<Arc<Inbox<ToWorker>>>,
    rings: Vec<Ring>,
    memory: Arc<GuestMemory>,
    features: u64,
    protocol_features: u64,
    inflight: Option<Inflight>,
    /// What that memory said when the front-end gave it to this server.
    former: Former,
    /// For messages of ours.
    backend_channel: Option<OwnedFd>,
}

impl Device {
    /// A device for a new connection. There is one ring for each worker.
    pub(crate) fn new(disk: Arc<dyn BlockDevice>, facts: DeviceFacts, workers: Vec<Arc<Inbox<ToWorker>>>) -> Self {
        facts.cache.negotiated(0);
        facts.risk.set_failed(false);
        Self {
            disk,
            facts,
            rings: workers.iter().map(|_| Ring::default()).collect(),
            workers,
            memory: Arc::default(),
            features: 0,
            protocol_features: 0,
            inflight: None,
            former: Former::Unknown,
            backend_channel: None,
        }
    }

    /// Whether the front-end may ask for an acknowledgement of any message.
    pub(crate) fn acknowledges(&self) -> bool {
        self.protocol_features & protocol::REPLY_ACK != 0
    }

    /// Follows a message.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub(crate) fn follow(&mut self, message: Message) -> Result<Reply, DeviceError> {
        match message {
            Message::GetFeatures => return Ok(Reply::Number(config::features(&self.disk.geometry()))),
            Message::SetFeatures(features) => self.set_features(features)?,
            Message::SetOwner => {}
            Message::ResetOwner => self.reset()?,
            Message::SetMemory(regions) => {
                let regions = regions.iter().map(|(info, fd)| (*info, fd.as_fd()));
                let memory = GuestMemory::map(regions).map_err(|source| DeviceError::Memory { source })?;
                let running = self.stop_all()?;
                self.memory = Arc::new(memory);
                running.into_iter().try_for_each(|ring| self.start_if_ready(ring))?;
            }
            Message::SetRingSize { ring, size } => {
                let size = check_size(size)?;
                self.change(ring, |ring| ring.size = Some(size))?;
            }
            Message::SetRingAddresses { ring, addresses } => {
                self.change(ring, |ring| ring.addresses = Some(addresses))?;
            }
            Message::SetRingBase { ring, base } => {
                let base = u16::try_from(base).map_err(|_| DeviceError::Base { ring, base })?;
                self.change(ring, |ring| ring.base = base)?;
            }
            Message::GetRingBase { ring } => {
                let index = self.index(ring)?;
                self.stop(index)?;
                // A stopped ring is started again by new descriptors.
                self.rings[index].kick = None;
                self.rings[index].call = None;
                return Ok(Reply::Body(wire::ring_state(ring, self.rings[index].base)));
            }
            Message::SetKick { ring, fd } => {
                let fd = event_of(fd, "kicks", ring)?;
                self.change(ring, |ring| ring.kick = Some(fd))?;
            }
            Message::SetCall { ring, fd } => self.set_call(ring, fd)?,
            Message::SetError { ring, fd } => {
                let index = self.index(ring)?;
                self.rings[index].error = fd.map(|fd| event_of(fd, "errors", ring)).transpose()?;
            }
            Message::GetProtocolFeatures => return Ok(Reply::Number(OFFERED)),
            Message::SetProtocolFeatures(found) if found & !OFFERED != 0 => {
                return Err(DeviceError::Features { found: found & !OFFERED });
            }
            Message::SetProtocolFeatures(found) => self.protocol_features = found,
            Message::GetQueueCount => return Ok(Reply::Number(self.rings.len() as u64)),
            Message::EnableRing { ring, on } => self.change(ring, |ring| ring.enabled = on)?,
            Message::SetBackendChannel(socket) => self.backend_channel = Some(socket),
            Message::GetConfig(range) => {
                let space = config::space(&self.disk.geometry(), self.rings.len() as u16, &self.facts.cache);
                return Ok(Reply::Body(wire::config(range, &space[range.range()])));
            }
            Message::SetConfig { range, bytes } => {
                let known = config::set_writeback(range.offset_bytes, &bytes);
                let writeback = known.filter(|_| config::may_switch_cache(self.features));
                self.set_writeback(writeback.ok_or(DeviceError::Config { offset_bytes: range.offset_bytes })?)?;
            }
            Message::GetInflight(wanted) => return self.get_inflight(wanted),
            Message::SetInflight(info, fd) => {
                let known = Inflight::of(info, fd.as_fd()).map_err(|source| DeviceError::Inflight { source })?;
                let unreadable = |source| DeviceError::Inflight { source };
                let former = known.record().map_or(Ok(Former::Unknown), |record| record.former(&self.facts.risk));
                let running = self.stop_all()?;
                self.former = former.map_err(unreadable)?;
                self.inflight = Some(known);
                running.into_iter().try_for_each(|ring| self.start_if_ready(ring))?;
            }
            Message::ResetDevice => self.reset()?,
        }
        Ok(Reply::None)
    }

    fn index(&self, ring: u32) -> Result<usize, DeviceError> {
        let count = self.rings.len();
        usize::try_from(ring).ok().filter(|&index| index < count).ok_or(DeviceError::NoRing { ring, count })
    }

    fn set_features(&mut self, features: u64) -> Result<(), DeviceError> {
        let offered = config::features(&self.disk.geometry());
        if features & !offered != 0 {
            return Err(DeviceError::Features { found: features & !offered });
        }
        self.features = features;
        self.facts.cache.negotiated(features);
        // The device may be a new one for its guest. Each ring that starts decides that.
        self.facts.risk.set_failed(false);
        if features & config::PROTOCOL_FEATURES == 0 {
            // Then there is no message that enables a ring.
            for index in 0..self.rings.len() {
                self.rings[index].enabled = true;
                self.start_if_ready(index)?;
            }
        }
        Ok(())
    }

    fn set_writeback(&mut self, writeback: bool) -> Result<(), DeviceError> {
        if writeback {
            self.facts.cache.set_write_through(false);
            return Ok(());
        }
        // What was written before must be durable too, and no write that began before may complete
        // after the flush.
        let running = self.stop_all()?;
        self.facts.cache.set_write_through(true);
        self.flush().map_err(|source| DeviceError::Flush { source })?;
        running.into_iter().try_for_each(|ring| self.start_if_ready(ring))
    }

    /// Flushes the disk, and records that nothing is at risk.
    fn flush(&self) -> io::Result<()> {
        catch_panic(|| Blocking::open(self.disk.as_ref(), EngineKind::Auto)?.flush())?;
        let record = self.inflight.as_ref().and_then(Inflight::record);
        record.map_or(Ok(()), |record| record.note(&self.facts.risk, true))
    }

    fn set_call(&mut self, ring: u32, fd: Option<OwnedFd>) -> Result<(), DeviceError> {
        let index = self.index(ring)?;
        let fd = fd.map(|fd| event_of(fd, "signals", ring)).transpose()?;
        if self.rings[index].running {
            let copy = fd.as_ref().map(copy_of).transpose()?;
            self.workers[index].put(ToWorker::SetCall(copy));
        }
        self.rings[index].call = fd;
        Ok(())
    }

    fn get_inflight(&mut self, wanted: InflightInfo) -> Result<Reply, DeviceError> {
        let InflightInfo { queues, queue_size, .. } = wanted;
        if usize::from(queues) > self.rings.len() || queue_size > RING_SIZE_MAX {
            return Err(DeviceError::InflightCount { found: queues, size: queue_size });
        }
        let created = Inflight::create(queues.max(1), queue_size.max(1));
        let (inflight, fd) = created.map_err(|source| DeviceError::Inflight { source })?;
        let body = wire::inflight(inflight.info());
        (self.inflight, self.former) = (Some(inflight), Former::Unknown);
        Ok(Reply::BodyWith(body, fd))
    }

    /// Changes a ring while it is stopped.
    fn change(&mut self, ring: u32, change: impl FnOnce(&mut Ring)) -> Result<(), DeviceError> {
        let index = self.index(ring)?;
        self.stop(index)?;
        change(&mut self.rings[index]);
        self.start_if_ready(index)
    }

    fn start_if_ready(&mut self, index: usize) -> Result<(), DeviceError> {
        let Ring { size: Some(size), addresses: Some(addresses), base, kick: Some(kick), call, enabled: true, .. } =
            &self.rings[index]
        else {
            return Ok(());
        };
        if self.memory.is_empty() || self.rings[index].running {
            return Ok(());
        }
        let features = config::ring_features(self.features);
        let ring = Vring::new(&self.memory, *addresses, (*size).into(), *base, features)?;
        self.ask_what_was_lost(index, *base, ring.next_used())?;
        let inflight = match &self.inflight {
            Some(inflight) => {
                let missing = DeviceError::InflightQueue { ring: index, size: *size };
                Some(inflight.queue(index, *size).ok_or(missing)?)
            }
            None => None,
        };
        let (kick, call) = (copy_of(kick)?, call.as_ref().map(copy_of).transpose()?);
        let start = StartRing { ring, memory: Arc::clone(&self.memory), inflight, kick, call };
        self.workers[index].put(ToWorker::Start(Box::new(start)));
        self.rings[index].running = true;
        Ok(())
    }

    /// Lets the device fail if requests of this guest were lost with a former server. Otherwise the
    /// record is this server's from now on.
    fn ask_what_was_lost(&self, index: usize, next: u16, used: u16) -> Result<(), DeviceError> {
        let risk = &self.facts.risk;
        let record = self.inflight.as_ref().and_then(Inflight::record);
        let is_lost = risk.is_lost(self.former, index, next, used);
        if is_lost && !risk.has_failed() {
            tracing::error!(
                disk = %self.facts.name,
                "the server that served this machine before has ended, and writes that the machine takes for done were lost, or may be: every request fails until the machine is reset"
            );
        }
        if is_lost {
            risk.set_failed(true);
        }
        let noted = record.map_or(Ok(()), |record| match is_lost {
            true => record.set_lost(),
            false if risk.has_failed() => Ok(()),
            false => record.claim(risk, self.former),
        });
        noted.map_err(|source| DeviceError::Inflight { source })
    }

    /// Stops a ring, after its requests in flight have completed.
    fn stop(&mut self, index: usize) -> Result<(), DeviceError> {
        if !std::mem::take(&mut self.rings[index].running) {
            return Ok(());
        }
        let (tell, told) = mpsc::sync_channel(1);
        self.workers[index].put(ToWorker::Stop(tell));
        self.stopped(index, told.recv().map_err(|_| DeviceError::QueueFailed { ring: index })?);
        Ok(())
    }

    fn stopped(&mut self, index: usize, next: u16) {
        self.rings[index].base = next;
        self.facts.risk.stopped(index, next);
    }

    /// Stops all rings, and returns those that ran.
    fn stop_all(&mut self) -> Result<Vec<usize>, DeviceError> {
        let running: Vec<usize> = (0..self.rings.len()).filter(|&index| self.rings[index].running).collect();
        // All at once, so that they wait for their requests together.
        let mut waits = Vec::new();
        for &index in &running {
            let (tell, told) = mpsc::sync_channel(1);
            self.workers[index].put(ToWorker::Stop(tell));
            waits.push((index, told));
        }
        let mut outcome = Ok(());
        for (index, told) in waits {
            self.rings[index].running = false;
            match told.recv() {
                Ok(next) => self.stopped(index, next),
                Err(_) => outcome = Err(DeviceError::QueueFailed { ring: index }),
            }
        }
        outcome.map(|()| running)
    }

    /// Stops all rings and forgets them.
    fn reset(&mut self) -> Result<(), DeviceError> {
        let stopped = self.stop_all();
        self.leave_nothing_at_risk();
        self.rings.iter_mut().for_each(|ring| *ring = Ring::default());
        (self.inflight, self.former) = (None, Former::Unknown);
        self.facts.cache.negotiated(0);
        self.features = 0;
        stopped.map(|_| ())
    }

    /// Flushes if the record says that requests are at risk. So a front-end that comes back finds
    /// nothing lost, also by another server.
    fn leave_nothing_at_risk(&self) {
        let record = self.inflight.as_ref().and_then(Inflight::record);
        let at_risk =
            !self.facts.risk.has_failed() && record.is_some_and(|record| record.says_at_risk().unwrap_or(false));
        if at_risk && let Err(error) = self.flush() {
            tracing::error!(disk = %self.facts.name, %error, "the disk could not be flushed when its machine had gone");
        }
    }

    /// Ends the device when its connection has ended.
    ///
    /// # Errors
    /// [`DeviceError::QueueFailed`].
    pub(crate) fn end(&mut self) -> Result<(), DeviceError> {
        self.reset()
    }

    /// Tells the front-end that a ring is damaged.
    pub(crate) fn signal_error(&self, ring: usize) {
        if let Some(error) = self.rings.get(ring).and_then(|ring| ring.error.as_ref()) {
            let _ = rustix::io::write(error, &1u64.to_ne_bytes());
        }
    }

    /// Tells the front-end that the configuration space has changed. Returns whether it could be
    /// told.
    pub(crate) fn tell_of_change(&self) -> bool {
        let Some(channel) = &self.backend_channel else { return false };
        match channel::send(channel.as_fd(), &wire::config_change(), None) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "the front-end cannot be told of the new size of its disk");
                false
            }
        }
    }
}

const OFFERED: u64 = protocol::MQ
    | protocol::REPLY_ACK
    | protocol::BACKEND_REQ
    | protocol::CONFIG
    | protocol::INFLIGHT_SHMFD
    | protocol::RESET_DEVICE;

fn copy_of(fd: &OwnedFd) -> Result<OwnedFd, DeviceError> {
    fd.try_clone().map_err(|source| DeviceError::Descriptor { source })
}

/// Checks that a descriptor is an eventfd, or behaves as one: a file or a socket could end a read
/// at once, for ever. Made non-blocking, so that no write to it waits.
fn event_of(fd: OwnedFd, what: &'static str, ring: u32) -> Result<OwnedFd, DeviceError> {
    let unusable = |errno: rustix::io::Errno| DeviceError::Descriptor { source: errno.into() };
    let mode = rustix::fs::fstat(&fd).map_err(unusable)?.st_mode;
    // Anonymous inodes have no type.
    if FileType::from_raw_mode(mode) != FileType::Unknown {
        return Err(DeviceError::NoEventfd { what, ring });
    }
    let flags = rustix::fs::fcntl_getfl(&fd).map_err(unusable)?;
    rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(unusable)?;
    Ok(fd)
}
