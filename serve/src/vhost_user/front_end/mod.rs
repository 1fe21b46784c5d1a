//! A front-end of the device, for tests and benchmarks: a virtual machine without a machine.
//!
//! ```text
//!   FrontEnd ─ messages by the crate `vhost` ─▶ the server
//!      │ memfd: a guest's memory
//!      └─ FrontQueue (one for each virtqueue): BlockQueue ─▶ ring in that memory ─▶ kick, call
//! ```
//!
//! The messages are those of rust-vmm's own front-end, so that both sides were not written by one
//! hand. The rings are driven here (`queue.rs`), as a block queue, so that whatever uses a disk can
//! use one behind the server. A test that lies writes the ring itself ([`Layout`]).

mod layout;
mod options;
mod queue;

pub use layout::{Layout, RawRing};
pub use options::FrontOptions;
pub use queue::FrontQueue;

use options::{GUEST_BASE, USER_BASE};

use super::{inflight::Inflight, wire::InflightInfo};
use diskwright_store::{BlockDevice, BlockQueue, FileRange, Geometry, MappedMemory, QueueOptions};
use rustix::fs::MemfdFlags;
use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend,
        message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures},
    },
};
use virtio_bindings::virtio_blk as blk;
use vmm_sys_util::eventfd::EventFd;

/// `VIRTIO_F_RING_PACKED`.
const PACKED_RINGS: u64 = 1 << 34;
/// `VHOST_F_LOG_ALL`.
const DIRTY_LOG: u64 = 1 << 26;

/// The memory that records requests in flight, which outlives the server.
struct KeptInflight {
    info: VhostUserInflight,
    file: File,
}

/// A connected front-end. It is a block device with as many queues as [`FrontOptions::queues`].
pub struct FrontEnd {
    control: Mutex<Frontend>,
    options: FrontOptions,
    layout: Layout,
    memory: Arc<MappedMemory>,
    memfd: OwnedFd,
    kicks: Vec<EventFd>,
    calls: Vec<EventFd>,
    features: u64,
    next_queue: AtomicUsize,
    inflight: Option<KeptInflight>,
    /// Our end of the channel for messages of the back-end.
    back_channel: UnixStream,
}

impl std::fmt::Debug for FrontEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FrontEnd({} queues)", self.options.queues)
    }
}

fn failed(error: vhost::Error) -> io::Error {
    io::Error::other(error)
}

impl FrontEnd {
    /// Connects, and starts all rings.
    ///
    /// # Errors
    /// The server refused, or speaks another protocol.
    pub fn connect(socket: &Path, options: FrontOptions) -> io::Result<Self> {
        let options = FrontOptions {
            queues: options.queues.max(1),
            depth: options.depth.max(1),
            payload_bytes: options.payload_bytes.max(1 << 16),
            ..options
        };
        let layout = Layout::new(&options);
        let memfd = rustix::fs::memfd_create("front-end", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let len_bytes = layout.total_bytes() as u64;
        rustix::fs::ftruncate(&memfd, len_bytes)?;
        let memory = MappedMemory::of_memfd(memfd.as_fd(), FileRange { offset_bytes: 0, len_bytes }, true)?;
        let events = || (0..options.queues).map(|_| EventFd::new(libc_nonblock())).collect::<io::Result<Vec<_>>>();
        let (back_channel, theirs) = UnixStream::pair()?;
        let mut front = Self {
            control: Mutex::new(connect(socket, options.queues)?),
            options,
            layout,
            memory,
            memfd,
            kicks: events()?,
            calls: events()?,
            features: 0,
            next_queue: AtomicUsize::new(0),
            inflight: None,
            back_channel,
        };
        front.negotiate(&theirs)?;
        front.start()?;
        Ok(front)
    }

    fn control(&self) -> MutexGuard<'_, Frontend> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn negotiate(&mut self, channel: &UnixStream) -> io::Result<()> {
        let mut control = self.control();
        control.set_owner().map_err(failed)?;
        // Other back-ends offer packed rings and logs of dirty memory, which are not known here.
        let mut features = control.get_features().map_err(failed)? & !(PACKED_RINGS | DIRTY_LOG);
        if self.options.without_flush {
            features &= !(1 << blk::VIRTIO_BLK_F_FLUSH | 1 << blk::VIRTIO_BLK_F_CONFIG_WCE);
        }
        if self.options.without_event_index {
            features &= !(1 << virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX);
        }
        let offered = control.get_protocol_features().map_err(failed)?;
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE;
        control.set_protocol_features(offered & wanted).map_err(failed)?;
        control.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        control.set_features(features).map_err(failed)?;
        if offered.contains(VhostUserProtocolFeatures::BACKEND_REQ) {
            control.set_backend_request_fd(channel).map_err(failed)?;
        }
        drop(control);
        self.features = features;
        Ok(())
    }

    fn start(&mut self) -> io::Result<()> {
        if self.options.records_in_flight {
            let mut control = self.control();
            let kept = match &self.inflight {
                Some(kept) => {
                    control.set_inflight_fd(&kept.info, kept.file.as_raw_fd()).map_err(failed)?;
                    None
                }
                None => {
                    let (queues, size) = (self.options.queues as u16, self.layout.ring_size());
                    let wanted = VhostUserInflight { num_queues: queues, queue_size: size, ..Default::default() };
                    let (info, file) = control.get_inflight_fd(&wanted).map_err(failed)?;
                    control.set_inflight_fd(&info, file.as_raw_fd()).map_err(failed)?;
                    Some(KeptInflight { info, file })
                }
            };
            drop(control);
            self.inflight = self.inflight.take().or(kept);
        }
        let control = self.control();
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST_BASE,
            memory_size: self.layout.total_bytes() as u64,
            userspace_addr: USER_BASE,
            mmap_offset: 0,
            mmap_handle: self.memfd.as_raw_fd(),
        };
        control.set_mem_table(&[region]).map_err(failed)?;
        drop(control);
        (0..self.options.queues).try_for_each(|index| self.start_ring(index))
    }

    /// Starts a ring where its used index says.
    ///
    /// # Errors
    /// The server refused.
    pub fn start_ring(&self, index: usize) -> io::Result<()> {
        let ring = self.layout.ring(index);
        let base = self.memory.load_u16(ring.used + 2)?;
        let user = |at: usize| USER_BASE + at as u64;
        let size = self.layout.ring_size();
        let addresses = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: 0,
            desc_table_addr: user(ring.descriptors),
            used_ring_addr: user(ring.used),
            avail_ring_addr: user(ring.available),
            log_addr: None,
        };
        let mut control = self.control();
        control.set_vring_num(index, size).map_err(failed)?;
        control.set_vring_base(index, base).map_err(failed)?;
        control.set_vring_addr(index, &addresses).map_err(failed)?;
        control.set_vring_call(index, &self.calls[index]).map_err(failed)?;
        control.set_vring_kick(index, &self.kicks[index]).map_err(failed)?;
        control.set_vring_enable(index, true).map_err(failed)
    }

    /// Connects again after the server has gone, with the same memory, rings and requests in
    /// flight. Kicks all rings.
    ///
    /// # Errors
    /// As [`FrontEnd::connect`].
    pub fn reconnect(&mut self, socket: &Path) -> io::Result<()> {
        let (back_channel, theirs) = UnixStream::pair()?;
        *self.control() = connect(socket, self.options.queues)?;
        self.back_channel = back_channel;
        self.negotiate(&theirs)?;
        self.start()?;
        self.kicks.iter().try_for_each(|kick| kick.write(1))
    }

    /// Records that requests are in flight, as a server that was killed leaves them.
    ///
    /// # Errors
    /// The front-end has no such memory ([`FrontOptions::records_in_flight`]).
    pub fn mark_in_flight(&self, index: usize, heads: &[u16]) -> io::Result<()> {
        let size = self.layout.ring_size();
        let kept = self.inflight.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let info = InflightInfo {
            len_bytes: kept.info.mmap_size,
            offset_bytes: kept.info.mmap_offset,
            queues: kept.info.num_queues,
            queue_size: kept.info.queue_size,
        };
        let mut queue = Inflight::of(info, kept.file.as_fd())?.queue(index, size).ok_or(io::ErrorKind::NotFound)?;
        queue.recover(self.memory.load_u16(self.layout.ring(index).used + 2)?)?;
        heads.iter().try_for_each(|&head| queue.begin(head))
    }

    /// Stops a ring and returns the index at which it would go on. Requests in flight have
    /// completed.
    ///
    /// # Errors
    /// The server refused.
    pub fn stop_ring(&self, index: usize) -> io::Result<u16> {
        let base = self.control().get_vring_base(index).map_err(failed)?;
        u16::try_from(base).map_err(io::Error::other)
    }

    /// Sends RESET_DEVICE: all rings stop.
    ///
    /// # Errors
    /// The server refused.
    pub fn reset(&self) -> io::Result<()> {
        self.control().reset_device().map_err(failed)
    }

    /// A range of the configuration space.
    ///
    /// # Errors
    /// The server refused.
    pub fn config(&self, offset_bytes: u32, len_bytes: u32) -> io::Result<Vec<u8>> {
        let blank = vec![0; len_bytes as usize];
        let flags = VhostUserConfigFlags::empty();
        let (_, bytes) = self.control().get_config(offset_bytes, len_bytes, flags, &blank).map_err(failed)?;
        Ok(bytes)
    }

    /// Writes the configuration space.
    ///
    /// # Errors
    /// The server refused.
    pub fn set_config(&self, offset_bytes: u32, bytes: &[u8]) -> io::Result<()> {
        self.control().set_config(offset_bytes, VhostUserConfigFlags::WRITABLE, bytes).map_err(failed)
    }

    /// The features that both sides have agreed to.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Where everything lies in the guest's memory.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The guest's memory.
    pub fn memory(&self) -> &Arc<MappedMemory> {
        &self.memory
    }

    /// Our end of the channel for messages of the server.
    pub fn back_channel(&self) -> &UnixStream {
        &self.back_channel
    }

    /// Wakes the worker of a ring.
    ///
    /// # Errors
    /// The eventfd refused.
    pub fn kick(&self, index: usize) -> io::Result<()> {
        self.kicks[index].write(1)
    }

    /// A queue on one ring. Only one queue may use a ring.
    ///
    /// # Errors
    /// There is no such ring.
    pub fn queue(&self, index: usize) -> io::Result<FrontQueue> {
        let (Some(kick), Some(call)) = (self.kicks.get(index), self.calls.get(index)) else {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no virtqueue {index}")));
        };
        let events = (kick.try_clone()?, call.try_clone()?);
        let features = super::config::ring_features(self.features);
        FrontQueue::new(
            Arc::clone(&self.memory),
            self.layout.clone(),
            index,
            self.options,
            features,
            events,
            self.geometry(),
        )
    }
}

fn connect(socket: &Path, queues: usize) -> io::Result<Frontend> {
    let stream = UnixStream::connect(socket)?;
    // Nothing takes a server longer, so a test ends.
    stream.set_read_timeout(Some(std::time::Duration::from_secs(60)))?;
    Ok(Frontend::from_stream(stream, queues as u64))
}

/// `EFD_NONBLOCK`.
fn libc_nonblock() -> i32 {
    rustix::event::EventfdFlags::NONBLOCK.bits() as i32
}

impl BlockDevice for FrontEnd {
    fn geometry(&self) -> Geometry {
        // In one piece from the start: qemu-storage-daemon ignores the offset.
        let config = self.config(0, 28).unwrap_or_default();
        let word = |at: usize| {
            let bytes = config.get(at..at + 4).unwrap_or_default();
            u32::from_le_bytes(bytes.try_into().unwrap_or_default())
        };
        let sectors = u64::from(word(0)) | u64::from(word(4)) << 32;
        let logical_sector_bytes = word(20).max(512);
        Geometry {
            size_bytes: sectors * 512,
            logical_sector_bytes,
            physical_sector_bytes: logical_sector_bytes << (word(24) & 0xf),
            read_only: self.features & 1 << blk::VIRTIO_BLK_F_RO != 0,
        }
    }

    /// Opens a queue on the next ring, and again on the first one behind the last. No other queue
    /// may use the ring.
    fn open_queue(&self, _options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        let index = self.next_queue.fetch_add(1, Ordering::Relaxed) % self.options.queues;
        Ok(Box::new(self.queue(index)?))
    }
}
