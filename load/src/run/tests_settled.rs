//! Tests of whole runs with verified contents, or with a wait for the steady state.

use super::{tests::*, *};
use crate::{
    job::{Blocks, Bytes, Contents, Load, Rate, Span},
    warning::Warning,
};
use diskwright_store::{
    BlockDevice, BlockQueue, Completion, Extent, Geometry, MemoryStore, Operation, PushError, QueueOptions, RawDevice,
    Request,
};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// A fault of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The write completes and is not carried out.
    Lost,
    /// The write goes to the next block.
    Misdirected,
    /// Only the first half is written.
    Torn,
}

/// A disk in memory with a fault in write number 500 and every fiftieth after it. A single fault
/// might be overwritten before it is read.
#[derive(Debug)]
struct Faulty {
    inner: RawDevice,
    fault: Fault,
    writes: Arc<AtomicUsize>,
}

impl Faulty {
    fn new(fault: Fault) -> Self {
        let store = MemoryStore::with_bytes("memory", vec![0; SIZE as usize]);
        Self { inner: RawDevice::new(Arc::new(store), true, 512).unwrap(), fault, writes: Arc::default() }
    }
}

impl BlockDevice for Faulty {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        let inner = self.inner.open_queue(options)?;
        Ok(Box::new(FaultyQueue { inner, fault: self.fault, writes: Arc::clone(&self.writes) }))
    }

    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
        self.inner.extents(offset_bytes, len_bytes, out)
    }
}

#[derive(Debug)]
struct FaultyQueue {
    inner: Box<dyn BlockQueue>,
    fault: Fault,
    writes: Arc<AtomicUsize>,
}

impl BlockQueue for FaultyQueue {
    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn push(&mut self, mut request: Request) -> Result<(), Box<PushError>> {
        let is_write = request.operation == Operation::Write;
        let number = if is_write { self.writes.fetch_add(1, Ordering::Relaxed) } else { 0 };
        if number >= 500 && number.is_multiple_of(50) {
            match self.fault {
                Fault::None => {}
                Fault::Lost => request.operation = Operation::Flush,
                Fault::Misdirected => request.offset_bytes = (request.offset_bytes + 4096) % SIZE,
                Fault::Torn => request.len_bytes /= 2,
            }
        }
        self.inner.push(request)
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        self.inner.reap(at_least, out)
    }
}

fn verified(fault: Fault) -> Run {
    let load =
        Load { threads: 2, queue_depth: 4, read_percent: 50.0, working_set: Bytes(32 * 4096), ..Load::default() };
    let mut job = counted(load, 5000);
    job.contents = Contents::Verified;
    go(&job, &[target("disk", Faulty::new(fault))])
}

#[test]
fn a_disk_without_faults_passes_with_all_requests() {
    let found = verified(Fault::None);
    assert_eq!(found.head.end, End::Complete);
    assert_eq!(found.phases[0].total().both.ios, 10_000);
}

#[test]
fn each_fault_of_a_write_is_found_and_named() {
    let said = |fault| match verified(fault).head.end {
        End::Failed { first, .. } => first,
        end => panic!("{fault:?}: {end:?}"),
    };
    let lost = said(Fault::Lost);
    assert!(lost.contains("wrong data at offset") && lost.contains("stale"), "{lost}");
    let misdirected = said(Fault::Misdirected);
    // The fault is misdirected or stale, depending on which of the two blocks is read first.
    assert!(misdirected.contains("misdirected") || misdirected.contains("stale"), "{misdirected}");
    let torn = said(Fault::Torn);
    // While the next write of the block is in flight, the half that was not written is found as
    // stale.
    assert!(torn.contains("torn") || torn.contains("foreign") || torn.contains("stale"), "{torn}");
}

#[test]
fn generations_are_kept_from_phase_to_phase() {
    let write = Load { read_percent: 0.0, random_percent: 0.0, working_set: Bytes(64 * 4096), ..Load::default() };
    let mut job = counted(write.clone(), 64);
    job.contents = Contents::Verified;
    let mut read = job.phases[0].clone();
    read.name = "read".into();
    // Other sizes than those of the writes, in the same units.
    read.loads = vec![Load { read_percent: 100.0, block: Blocks::One(Bytes(16 << 10)), ..write }];
    job.phases.push(read);
    assert_eq!(go(&job, &[target("disk", Faulty::new(Fault::None))]).head.end, End::Complete);
    let device = Faulty::new(Fault::Lost);
    device.writes.store(500 - 40, Ordering::Relaxed);
    let End::Failed { first, .. } = go(&job, &[target("disk", device)]).head.end else { panic!("it was not found") };
    assert!(first.contains("the read of 16384 bytes") && first.contains("offset 163840"), "{first}");
}

#[test]
fn prepared_contents_are_checked() {
    let store = Arc::new(MemoryStore::with_bytes("memory", vec![0; SIZE as usize]));
    let mut job = counted(Load { random_percent: 0.0, ..Load::default() }, 256);
    job.contents = Contents::Verified;
    let mut bytes = vec![0; SIZE as usize];
    fill_verified(job.seed, 0, &mut bytes);
    bytes[5 * 4096 + 100] ^= 1;
    diskwright_store::Store::write_at(&*store, &bytes, 0).unwrap();
    let device = RawDevice::new(store, true, 512).unwrap();
    let End::Failed { first, .. } = go(&job, &[target("disk", device)]).head.end else { panic!("it was not found") };
    assert!(first.contains("damaged") && first.contains("offset 20480"), "{first}");
}

#[test]
fn the_window_opens_when_the_steady_state_is_reached() {
    let load = Load { queue_depth: 4, rate: Some(Rate::Iops { per_thread: 5000.0 }), ..Load::default() };
    let mut job = timed(load, 0, 100);
    job.phases[0].steady_within = Some(Span::from_millis(1500));
    job.phases[0].cool_down = Span::from_millis(20);
    let found = go(&job, &[target("x", simulated::Simulated::new(SIZE))]);
    let phase = &found.phases[0];
    let steady = phase.steady.as_ref().expect("the phase waits for the steady state");
    assert_eq!(phase.window_ns, 100_000_000);
    assert_eq!(steady.round_ns, 70_000_000, "a twentieth of the time, in whole intervals");
    let opened_after_ns = steady.reached_ns.unwrap_or(1_500_000_000);
    assert!(phase.window_start_ns >= opened_after_ns, "{} {steady:?}", phase.window_start_ns);
    let inside: u64 = phase
        .series
        .iter()
        .filter(|point| (phase.window_start_ns..phase.window_start_ns + phase.window_ns).contains(&point.start_ns))
        .map(|point| point.read_ios)
        .sum();
    assert_eq!(phase.total().both.ios, inside);
    let doubted = found.head.warnings.iter().any(|warning| matches!(warning, Warning::NotSteady { .. }));
    assert_eq!(doubted, steady.reached_ns.is_none() || steady.left_ns.is_some());
}
