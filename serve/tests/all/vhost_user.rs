//! The vhost-user device: a disk behind it is a model of bytes, whatever the queues, features and
//! memory, and it stops, crashes and grows as it promises.

use crate::common::{memory, raw_file};
use diskwright_serve::{
    ThreadError,
    net::{Address, Listener},
    vhost_user::{
        VhostUserError, VhostUserOptions, VhostUserServer,
        front_end::{FrontEnd, FrontOptions},
    },
};
use diskwright_store::{
    Alarm, BlockDevice, BlockQueue, CacheMode, Completion, Geometry, IoBuf, Operation, PushError, QueueOptions,
    Request,
    resize::{SizeWatcher, SizeWatchers},
};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{
    io::{self, Read},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tempfile::TempDir;

pub struct Served {
    pub server: VhostUserServer,
    pub socket: PathBuf,
    pub dir: TempDir,
}

/// `None` after a line that says that there is no io_uring.
pub fn serve(disk: &Arc<dyn BlockDevice>, queues: u16) -> Option<Served> {
    let dir = tempfile::tempdir().unwrap();
    serve_in(disk, queues, dir)
}

pub fn serve_in(disk: &Arc<dyn BlockDevice>, queues: u16, dir: TempDir) -> Option<Served> {
    let socket = dir.path().join("vhost.sock");
    let listener = Listener::bind(&Address::Unix(socket.clone())).unwrap();
    let options = VhostUserOptions {
        name: "a disk with a long name".into(),
        queues,
        is_ephemeral: false,
        reservations: Arc::default(),
    };
    match VhostUserServer::start(Arc::clone(disk), listener, options) {
        Ok(server) => Some(Served { server, socket, dir }),
        Err(VhostUserError::Thread(ThreadError::Ring { source })) => {
            eprintln!("skipped: no io_uring: {source}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Waits for all requests of a queue.
pub fn finish(queue: &mut dyn BlockQueue) -> Vec<Completion> {
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done).unwrap();
    }
    done
}

fn one(queue: &mut dyn BlockQueue, request: Request) -> io::Result<Option<IoBuf>> {
    queue.push(request).map_err(|refused| refused.reason)?;
    let done = finish(queue).pop().unwrap();
    done.result.map(|()| done.buf)
}

fn filled(len: usize, byte: u8) -> IoBuf {
    let mut buf = IoBuf::new(len);
    buf.fill(byte);
    buf
}

/// Random requests on all queues against bytes in memory. Each queue has a part of its own.
fn against_model(disk: &Arc<dyn BlockDevice>, options: FrontOptions, seed: u64) {
    let Some(served) = serve(disk, options.queues as u16) else { return };
    let front = FrontEnd::connect(&served.socket, options).unwrap();
    let size = front.geometry().size_bytes as usize;
    assert_eq!(front.geometry(), disk.geometry());
    let part = size / options.queues / 4096 * 4096;
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut queues: Vec<_> = (0..options.queues).map(|index| front.queue(index).unwrap()).collect();
    let mut model = vec![0u8; size];
    // The whole model is what the disk shows.
    let queue = &mut queues[0];
    for at in (0..size).step_by(65536) {
        let read = one(queue, Request::read(at as u64, 65536, IoBuf::new(65536), 0)).unwrap().unwrap();
        model[at..at + 65536].copy_from_slice(&read[..65536]);
    }
    for round in 0..60 {
        for (index, queue) in queues.iter_mut().enumerate() {
            // Requests in flight at once do not overlap: each has a slice of the part.
            let slice = part / options.depth / 512 * 512;
            let mut expected = Vec::new();
            for number in 0..options.depth {
                let len = (1 + rng.next_u64() as usize % 64) * 512;
                let len = len.min(slice);
                let at = index * part + number * slice + (rng.next_u64() as usize % ((slice - len) / 512 + 1)) * 512;
                let range = at..at + len;
                let (offset, tag) = (at as u64, number as u64);
                let request = match rng.next_u64() % 8 {
                    0..3 => {
                        expected.push((tag, model[range.clone()].to_vec()));
                        Request::read(offset, len, IoBuf::new(len), tag)
                    }
                    3..6 => {
                        let byte = (round + number) as u8 | 1;
                        model[range].fill(byte);
                        Request { fua: rng.next_u64() % 4 == 0, ..Request::write(offset, len, filled(len, byte), tag) }
                    }
                    6 => {
                        model[range].fill(0);
                        Request::write_zeroes(offset, len as u64, tag)
                    }
                    _ => {
                        model[range].fill(0);
                        Request::discard(offset, len as u64, tag)
                    }
                };
                queue.push(request).unwrap();
            }
            for done in finish(queue) {
                done.result.unwrap();
                if let Some((_, bytes)) = expected.iter().find(|(tag, _)| *tag == done.tag) {
                    assert!(done.buf.unwrap()[..bytes.len()] == bytes[..], "round {round}, request {}", done.tag);
                }
            }
            one(queue, Request::flush(0)).unwrap();
        }
    }
    // What one queue has written, another one reads.
    let queue = queues.last_mut().unwrap();
    for at in (0..size).step_by(65536) {
        let read = one(queue, Request::read(at as u64, 65536, IoBuf::new(65536), 0)).unwrap().unwrap();
        assert!(read[..65536] == model[at..at + 65536], "at {at}");
    }
    let totals = served.server.metrics().totals();
    assert!(totals.commands[1].requests > 0 && totals.commands[2].requests >= 60);
    drop(queues);
    drop(front);
    served.server.stop().unwrap();
}

#[test]
fn a_disk_in_memory_behind_the_device_is_a_model_of_bytes() {
    let disk = memory(8 << 20, true);
    let options = FrontOptions { queues: 3, depth: 16, ..FrontOptions::default() };
    against_model(&disk, options, 1);
    against_model(&disk, FrontOptions { indirect: true, ..options }, 2);
    against_model(&disk, FrontOptions { without_event_index: true, queues: 1, ..options }, 3);
}

#[test]
fn payloads_in_a_guests_memory_reach_a_file_by_o_direct_whatever_their_alignment() {
    let dir = tempfile::tempdir().unwrap();
    let disk = raw_file(&dir.path().join("disk.raw"), 8 << 20, CacheMode::Direct);
    for payload_offset in [0, 512, 8, 3] {
        let options = FrontOptions { queues: 2, depth: 8, payload_offset, ..FrontOptions::default() };
        against_model(&disk, options, 4 + payload_offset as u64);
    }
}

#[test]
fn aligned_payloads_are_not_copied_and_unaligned_ones_are() {
    let dir = tempfile::tempdir().unwrap();
    let disk = raw_file(&dir.path().join("disk.raw"), 1 << 20, CacheMode::Direct);
    let alignment = disk.open_queue(&QueueOptions::default()).unwrap().memory_alignment_bytes();
    for (payload_offset, copied) in [(0, 0), (3, 8192)] {
        let Some(served) = serve(&disk, 1) else { return };
        let options = FrontOptions { payload_offset, ..FrontOptions::default() };
        let front = FrontEnd::connect(&served.socket, options).unwrap();
        let mut queue = front.queue(0).unwrap();
        one(&mut queue, Request::write(0, 4096, filled(4096, 7), 0)).unwrap();
        let read = one(&mut queue, Request::read(0, 4096, IoBuf::new(4096), 0)).unwrap().unwrap();
        assert!(read[..4096].iter().all(|&byte| byte == 7));
        let copied = if alignment == 1 { 0 } else { copied };
        assert_eq!(served.server.metrics().totals().copied_bytes, copied, "at {payload_offset}");
    }
}

#[test]
fn a_read_only_disk_and_wrong_requests_are_refused_and_the_next_ones_served() {
    let disk = memory(1 << 20, false);
    let Some(served) = serve(&disk, 1) else { return };
    let front = FrontEnd::connect(&served.socket, FrontOptions::default()).unwrap();
    assert!(front.geometry().read_only, "F_RO");
    let mut queue = front.queue(0).unwrap();
    let refused = queue.push(Request::write(0, 512, IoBuf::new(512), 0)).unwrap_err();
    assert_eq!(refused.reason.kind(), io::ErrorKind::ReadOnlyFilesystem);
    one(&mut queue, Request::read(0, 512, IoBuf::new(512), 0)).unwrap();
    assert!(front.set_config(32, &[0]).is_err(), "the cache of a read-only disk cannot be switched");
    assert_eq!(front.config(32, 1).unwrap_or(vec![1]), [1]);
}

/// Holds requests until it is let go, and records FUA.
#[derive(Debug)]
pub(crate) struct Slow {
    below: Arc<dyn BlockDevice>,
    pub(crate) held: Arc<AtomicBool>,
    pub(crate) durable: Arc<Mutex<Vec<bool>>>,
    size_bytes: AtomicU64,
    watchers: SizeWatchers,
}

impl Slow {
    pub(crate) fn over(below: Arc<dyn BlockDevice>) -> Arc<Self> {
        let size_bytes = AtomicU64::new(below.geometry().size_bytes);
        Arc::new(Self {
            below,
            held: Arc::default(),
            durable: Arc::default(),
            size_bytes,
            watchers: SizeWatchers::default(),
        })
    }
}

impl BlockDevice for Slow {
    fn geometry(&self) -> Geometry {
        Geometry { size_bytes: self.size_bytes.load(Ordering::SeqCst), ..self.below.geometry() }
    }
    fn watch_size(&self, watcher: &Arc<SizeWatcher>) {
        self.watchers.add(watcher);
    }
    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        let below = self.below.open_queue(options)?;
        let (held, durable) = (Arc::clone(&self.held), Arc::clone(&self.durable));
        let alarm = options.ring.map(Alarm::new);
        Ok(Box::new(SlowQueue { below, held, durable, waiting: Vec::new(), alarm }))
    }
}

#[derive(Debug)]
struct SlowQueue {
    below: Box<dyn BlockQueue>,
    held: Arc<AtomicBool>,
    durable: Arc<Mutex<Vec<bool>>>,
    waiting: Vec<Request>,
    /// Has the queue reaped again.
    alarm: Option<Alarm>,
}

impl BlockQueue for SlowQueue {
    fn depth(&self) -> usize {
        self.below.depth()
    }
    fn in_flight(&self) -> usize {
        self.below.in_flight() + self.waiting.len()
    }
    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        if request.operation != Operation::Read {
            self.durable.lock().unwrap().push(request.fua);
        }
        self.waiting.push(request);
        Ok(())
    }
    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        self.alarm.iter_mut().for_each(Alarm::take);
        if self.held.load(Ordering::SeqCst) {
            self.alarm.iter_mut().for_each(|alarm| alarm.set(Duration::from_millis(1)));
        } else {
            for request in self.waiting.drain(..) {
                self.below.push(request).map_err(|refused| refused.reason)?;
            }
        }
        self.below.reap(at_least.min(self.below.in_flight()), out)
    }
}

#[test]
fn without_flushes_or_in_write_through_each_write_is_durable() {
    let disk = Slow::over(memory(1 << 20, true));
    let as_device: Arc<dyn BlockDevice> = disk.clone();
    let Some(served) = serve(&as_device, 1) else { return };
    let writes = |front: &FrontEnd| {
        disk.durable.lock().unwrap().clear();
        let mut queue = front.queue(0).unwrap();
        one(&mut queue, Request::write(0, 512, IoBuf::new(512), 0)).unwrap();
        one(&mut queue, Request::discard(4096, 4096, 0)).unwrap();
        one(&mut queue, Request::write_zeroes(4096, 4096, 0)).unwrap();
        disk.durable.lock().unwrap().clone()
    };
    let front = FrontEnd::connect(&served.socket, FrontOptions::default()).unwrap();
    assert_eq!(writes(&front), [false; 3], "a guest that flushes");
    front.set_config(32, &[0]).unwrap();
    assert_eq!(front.config(32, 1).unwrap(), [0]);
    assert_eq!(writes(&front), [true; 3], "the cache was switched off");
    front.set_config(32, &[1]).unwrap();
    assert_eq!(writes(&front), [false; 3]);
    drop(front);
    let options = FrontOptions { without_flush: true, ..FrontOptions::default() };
    let front = FrontEnd::connect(&served.socket, options).unwrap();
    assert_eq!(writes(&front), [true; 3], "a guest that never flushes");
}

#[test]
fn a_write_in_flight_when_the_cache_is_switched_off_is_flushed_before_it_completes() {
    let disk = Slow::over(memory(1 << 20, true));
    let as_device: Arc<dyn BlockDevice> = disk.clone();
    let Some(served) = serve(&as_device, 1) else { return };
    let front = FrontEnd::connect(&served.socket, FrontOptions { depth: 4, ..FrontOptions::default() }).unwrap();
    let mut queue = front.queue(0).unwrap();
    disk.held.store(true, Ordering::SeqCst);
    queue.push(Request::write(0, 4096, filled(4096, 9), 0)).unwrap();
    queue.reap(0, &mut Vec::new()).unwrap();
    let start = std::time::Instant::now();
    while disk.durable.lock().unwrap().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(20), "the write does not reach the disk");
        std::thread::sleep(Duration::from_millis(2));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(disk.durable.lock().unwrap().len(), 1, "the flush waits for the write");
            disk.held.store(false, Ordering::SeqCst);
            front.kick(0).unwrap();
        });
        front.set_config(32, &[0]).unwrap();
    });
    assert!(finish(&mut queue).iter().all(|done| done.result.is_ok()));
    assert_eq!(*disk.durable.lock().unwrap(), [false, false], "the write, and a flush");
    one(&mut queue, Request::write(0, 4096, filled(4096, 9), 0)).unwrap();
    assert_eq!(disk.durable.lock().unwrap()[2..], [true]);
}

#[test]
fn a_stop_waits_for_requests_in_flight_and_the_ring_goes_on_where_it_stopped() {
    let disk = Slow::over(memory(1 << 20, true));
    let as_device: Arc<dyn BlockDevice> = disk.clone();
    let Some(served) = serve(&as_device, 2) else { return };
    let options = FrontOptions { queues: 2, depth: 8, ..FrontOptions::default() };
    let front = FrontEnd::connect(&served.socket, options).unwrap();
    let mut queue = front.queue(1).unwrap();
    disk.held.store(true, Ordering::SeqCst);
    for tag in 0..8 {
        queue.push(Request::write(tag * 4096, 4096, filled(4096, 9), tag)).unwrap();
    }
    queue.reap(0, &mut Vec::new()).unwrap();
    let start = std::time::Instant::now();
    while disk.durable.lock().unwrap().len() < 8 {
        assert!(start.elapsed() < Duration::from_secs(20), "the requests do not reach the disk");
        std::thread::sleep(Duration::from_millis(2));
    }
    let held = Arc::clone(&disk.held);
    let letting_go = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        held.store(false, Ordering::SeqCst);
    });
    // The worker sleeps in its ring, so something must wake it after the disk was let go.
    let waking = {
        let held = Arc::clone(&disk.held);
        move |front: &FrontEnd| {
            while held.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            front.kick(1).unwrap();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| waking(&front));
        assert_eq!(front.stop_ring(1).unwrap(), 8, "all were taken, and all have completed");
    });
    letting_go.join().unwrap();
    assert!(finish(&mut queue).iter().all(|done| done.result.is_ok()));
    front.start_ring(1).unwrap();
    let read = one(&mut queue, Request::read(7 * 4096, 4096, IoBuf::new(4096), 0)).unwrap().unwrap();
    assert!(read[..4096].iter().all(|&byte| byte == 9));
    front.reset().unwrap();
    served.server.stop().unwrap();
}

#[test]
fn a_front_end_that_connects_to_the_next_server_gets_its_requests_in_flight_done() {
    let disk = memory(1 << 20, true);
    let Some(served) = serve(&disk, 2) else { return };
    let options = FrontOptions { queues: 2, depth: 8, records_in_flight: true, ..FrontOptions::default() };
    let mut front = FrontEnd::connect(&served.socket, options).unwrap();
    let mut queues = [front.queue(0).unwrap(), front.queue(1).unwrap()];
    // Completed ones first, so that the indexes are not those of the beginning.
    for queue in &mut queues {
        one(queue, Request::write(0, 4096, filled(4096, 1), 0)).unwrap();
    }
    let Served { server, dir, .. } = served;
    server.stop().unwrap();
    for (number, queue) in (0u64..).zip(&mut queues) {
        for tag in 0..6 {
            let at = (number * 6 + tag) * 4096;
            queue.push(Request::write(at, 4096, filled(4096, 0x40 + tag as u8), tag)).unwrap();
        }
        queue.reap(0, &mut Vec::new()).unwrap();
    }
    // As a server leaves them that has taken four requests of a queue and was killed.
    for (index, queue) in queues.iter().enumerate() {
        front.mark_in_flight(index, &queue.heads_in_flight()[..4]).unwrap();
    }
    let Some(next) = serve_in(&disk, 2, dir) else { return };
    front.reconnect(&next.socket).unwrap();
    for (number, queue) in (0u64..).zip(&mut queues) {
        let done = finish(queue);
        assert!(done.len() == 6 && done.iter().all(|done| done.result.is_ok()));
        for tag in 0..6 {
            let at = (number * 6 + tag) * 4096;
            let read = one(queue, Request::read(at, 4096, IoBuf::new(4096), 0)).unwrap().unwrap();
            assert!(read[..4096].iter().all(|&byte| byte == 0x40 + tag as u8), "request {tag} of queue {number}");
        }
    }
    next.server.stop().unwrap();
}

#[test]
fn a_front_end_is_told_of_a_new_size() {
    let disk = Slow::over(memory(1 << 20, true));
    let as_device: Arc<dyn BlockDevice> = disk.clone();
    let Some(served) = serve(&as_device, 1) else { return };
    let front = FrontEnd::connect(&served.socket, FrontOptions::default()).unwrap();
    assert_eq!(front.config(0, 8).unwrap(), (2048u64).to_le_bytes());
    disk.size_bytes.store(2 << 20, Ordering::SeqCst);
    disk.watchers.notify(2 << 20);
    front.back_channel().set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut message = [0; 12];
    front.back_channel().read_exact(&mut message).unwrap();
    assert_eq!(message[..4], 2u32.to_ne_bytes(), "VHOST_USER_BACKEND_CONFIG_CHANGE_MSG");
    assert_eq!(front.config(0, 8).unwrap(), (4096u64).to_le_bytes());
}

#[test]
fn one_front_end_after_another_and_a_socket_that_goes_with_its_server() {
    let disk = memory(1 << 20, true);
    let Some(served) = serve(&disk, 2) else { return };
    for round in 0..3u8 {
        let options = FrontOptions { queues: 1 + usize::from(round % 2), ..FrontOptions::default() };
        let front = FrontEnd::connect(&served.socket, options).unwrap();
        let mut queue = front.queue(0).unwrap();
        one(&mut queue, Request::write(0, 512, filled(512, round), 0)).unwrap();
        let read = one(&mut queue, Request::read(0, 512, IoBuf::new(512), 0)).unwrap().unwrap();
        assert!(read[..512].iter().all(|&byte| byte == round));
    }
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&served.socket).unwrap());
    assert_eq!(mode & 0o777, 0o600);
    served.server.stop().unwrap();
    assert!(!served.socket.exists());
}

#[test]
fn tcp_and_wrong_numbers_of_queues_are_refused_by_name() {
    let disk = memory(1 << 20, true);
    let start = |address: &Address, queues| {
        let listener = Listener::bind(address).unwrap();
        let options = VhostUserOptions { name: "a".into(), queues, is_ephemeral: false, reservations: Arc::default() };
        VhostUserServer::start(Arc::clone(&disk), listener, options).unwrap_err()
    };
    let error = start(&Address::Tcp("127.0.0.1".into(), 0), 1).to_string();
    assert!(error.contains("unix socket"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let unix = Address::Unix(dir.path().join("s"));
    for queues in [0, 65] {
        assert!(matches!(start(&unix, queues), VhostUserError::Queues { .. }));
    }
}
