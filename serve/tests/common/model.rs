//! Requests of all kinds against a disk behind a socket, and a model of what it must hold.

use diskwright_store::{
    BlockDevice, BlockQueue, Blocking, Completion, EngineKind, IoBuf, QueueOptions, Request, Segments,
};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::io;

pub const DISK_BYTES: usize = 16 << 20;

pub fn reap_all(queue: &mut dyn BlockQueue) -> Vec<Completion> {
    let mut out = Vec::new();
    while queue.in_flight() > 0 {
        queue.reap(1, &mut out).unwrap();
    }
    out
}

/// Rounds of requests at places that do not overlap, all in flight at once, and then what the disk
/// holds, which was empty.
pub fn contents_match_a_model(device: &dyn BlockDevice, seed: u64) {
    assert_eq!(device.geometry().size_bytes, DISK_BYTES as u64);
    let mut queue = device.open_queue(&QueueOptions { depth: 200, ..QueueOptions::default() }).unwrap();
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut model = vec![0_u8; DISK_BYTES];
    for round in 0..12_u64 {
        let mut at = 0;
        let mut expected = Vec::new();
        while at < DISK_BYTES {
            let most = if random.next_u32().is_multiple_of(8) { 6000 } else { 40 };
            let len = ((random.next_u64() % most + 1) as usize * 512).min(DISK_BYTES - at);
            let range = at..at + len;
            let (offset, tag) = (at as u64, expected.len() as u64);
            let mut request = match random.next_u32() % 8 {
                0..3 => {
                    let mut buf = IoBuf::new(len + 4096);
                    buf[4096..].iter_mut().zip(0_u64..).for_each(|(byte, n)| *byte = (n * 7 + round + offset) as u8);
                    model[range.clone()].copy_from_slice(&buf[4096..]);
                    Request { buf_offset_bytes: 4096, ..Request::write(offset, len, buf, tag) }
                }
                3 => {
                    let mut segments = Box::new(Segments::default());
                    for (index, part) in model[range.clone()].chunks_mut(3 * 512).enumerate().take(64) {
                        part.fill(index as u8 ^ round as u8);
                        let mut buf = IoBuf::new(part.len() + 512);
                        buf[512..].copy_from_slice(part);
                        segments.push(buf, 512..512 + part.len()).unwrap();
                    }
                    Request::write_segments(offset, segments, tag)
                }
                4 => {
                    model[range.clone()].fill(0);
                    Request::write_zeroes(offset, len as u64, tag)
                }
                5 => {
                    model[range.clone()].fill(0);
                    Request::discard(offset, len as u64, tag)
                }
                6 => {
                    let mut segments = Box::new(Segments::default());
                    for part in model[range.clone()].chunks(1024).take(64) {
                        segments.push(IoBuf::new(part.len() + 512), 512..512 + part.len()).unwrap();
                    }
                    Request::read_segments(offset, segments, tag)
                }
                _ => Request::read(offset, len, IoBuf::new(len), tag),
            };
            request.fua = random.next_u32().is_multiple_of(4);
            let range = at..at + request.len_bytes as usize;
            at += len;
            expected.push(range);
            if let Err(refused) = queue.push(request) {
                assert_eq!(refused.reason.kind(), io::ErrorKind::WouldBlock);
                panic!("the depth is larger than what is pushed");
            }
            if queue.in_flight() == queue.depth() {
                check(reap_all(&mut *queue), &expected, &model);
            }
        }
        queue.push(Request::flush(u64::MAX)).unwrap();
        check(reap_all(&mut *queue), &expected, &model);
    }
    let mut found = vec![0; DISK_BYTES];
    Blocking::open(device, EngineKind::Auto).unwrap().read(0, &mut found).unwrap();
    assert!(found == model, "seed {seed}");
}

fn check(completions: Vec<Completion>, expected: &[std::ops::Range<usize>], model: &[u8]) {
    for Completion { tag, buf, segments, result } in completions {
        result.unwrap();
        let Some(range) = expected.get(tag as usize) else { continue };
        match (buf, segments) {
            (Some(buf), _) if buf.len() == range.len() => assert!(buf[..] == model[range.clone()], "{range:?}"),
            (None, Some(segments)) => {
                let mut bytes = vec![0; segments.len()];
                segments.copy_out(0, &mut bytes).unwrap();
                assert!(bytes == model[range.clone()], "{range:?}");
            }
            _ => {}
        }
    }
}
