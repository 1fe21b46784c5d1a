use super::*;
use crate::{EngineKind, IoBuf, MemoryStore, RateLimits, RawDevice, SharedRing};
use std::time::Instant;

fn device(limits: RateLimits) -> (LimitedDevice, Arc<RateLimiter>) {
    let inner = RawDevice::new(Arc::new(MemoryStore::with_bytes("m", vec![7; 1 << 20])), true, 512).unwrap();
    let limiter = Arc::new(RateLimiter::new(limits));
    (LimitedDevice::new(Arc::new(inner), Arc::clone(&limiter)), limiter)
}

fn thousand_iops() -> RateLimits {
    RateLimits { iops: 1000, iops_burst: 1, ..RateLimits::default() }
}

fn read(tag: u64) -> Request {
    Request::read(tag * 512, 512, IoBuf::new(512), tag)
}

#[test]
fn requests_end_no_faster_than_the_limit_and_in_order() {
    let (device, limiter) = device(thousand_iops());
    let options = QueueOptions { engine: EngineKind::Sync, ..QueueOptions::default() };
    let mut queue = device.open_queue(&options).unwrap();
    let began = Instant::now();
    (0..20).for_each(|tag| queue.push(read(tag)).unwrap());
    assert_eq!(queue.in_flight(), 20);
    let mut out = Vec::new();
    queue.reap(5, &mut out).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(4), "{:?}", began.elapsed());
    queue.reap(20, &mut out).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(19), "{:?}", began.elapsed());
    assert_eq!(out.iter().map(|done| done.tag).collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
    assert!(
        out.iter().all(|done| done.result.is_ok() && done.buf.as_deref().is_some_and(|buf| buf[..512] == [7; 512]))
    );
    assert!((1..=19).contains(&limiter.delayed()), "{}", limiter.delayed());
}

#[test]
fn two_queues_share_the_limit() {
    let (device, _) = device(thousand_iops());
    let options = QueueOptions { engine: EngineKind::Sync, ..QueueOptions::default() };
    let mut queues = [(); 2].map(|()| device.open_queue(&options).unwrap());
    let began = Instant::now();
    let mut out = Vec::new();
    (0..10).for_each(|tag| queues.iter_mut().for_each(|queue| queue.push(read(tag)).unwrap()));
    queues.iter_mut().for_each(|queue| queue.reap(10, &mut out).unwrap());
    assert!(out.len() == 20 && began.elapsed() >= Duration::from_millis(19), "{:?}", began.elapsed());
}

#[test]
fn a_flush_passes_held_requests_and_refused_requests_cost_nothing() {
    let (device, limiter) = device(RateLimits { iops: 1, iops_burst: 1, ..RateLimits::default() });
    let options = QueueOptions { engine: EngineKind::Sync, depth: 4, ..QueueOptions::default() };
    let mut queue = device.open_queue(&options).unwrap();
    for wrong in [Request::read(1 << 20, 512, IoBuf::new(512), 0), Request::read(1, 512, IoBuf::new(512), 0)] {
        assert_eq!(queue.push(wrong).unwrap_err().reason.kind(), io::ErrorKind::InvalidInput);
    }
    (1..=3).for_each(|tag| queue.push(read(tag)).unwrap());
    queue.push(Request::flush(9)).unwrap();
    assert_eq!(queue.push(read(4)).unwrap_err().reason.kind(), io::ErrorKind::WouldBlock);
    let mut out = Vec::new();
    queue.reap(2, &mut out).unwrap();
    let mut tags: Vec<u64> = out.iter().map(|done| done.tag).collect();
    tags.sort_unstable();
    assert_eq!((tags, queue.in_flight(), limiter.delayed()), (vec![1, 9], 2, 2));
}

#[test]
fn a_shared_ring_is_woken_when_a_held_request_may_start() {
    let Ok(ring) = SharedRing::new(8, None) else { return println!("skipped: no io_uring here") };
    let (device, limiter) = device(thousand_iops());
    let mut queue = device.open_queue(&QueueOptions { ring: Some(&ring), ..QueueOptions::default() }).unwrap();
    let began = Instant::now();
    (0..5).for_each(|tag| queue.push(read(tag)).unwrap());
    let mut out = Vec::new();
    queue.reap(0, &mut out).unwrap();
    while out.len() < 5 {
        ring.wait().unwrap();
        queue.reap(0, &mut out).unwrap();
    }
    assert!(began.elapsed() >= Duration::from_millis(4), "{:?}", began.elapsed());
    // Held requests are dropped with their queue, also while its alarm is set.
    limiter.set(RateLimits { iops: 1, iops_burst: 1, ..RateLimits::default() });
    (0..3).for_each(|tag| queue.push(read(tag)).unwrap());
    drop(queue);
    assert_eq!(ring.users(), 0);
}
