//! Would the judge notice? Disks with a defect each, which occurs seldom.

use super::PLAN;
use diskwright_proving::linear::{Plan, round};
use diskwright_store::{
    BlockDevice, BlockQueue, Completion, EngineKind, Geometry, MemoryStore, Operation, PushError, QueueOptions,
    RawDevice, Request,
};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// A defect of a disk, which occurs in one of 41 requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Defect {
    /// No defect.
    None,
    /// A write is acknowledged, and carried out some requests later.
    LateWrite,
    /// A write is acknowledged and never carried out.
    LostWrite,
    /// A write covers one sector more than it should.
    LongWrite,
    /// Zeroes stop one sector early.
    ShortZeroes,
    /// A read returns the data of the queue's last read.
    StaleRead,
    /// A read returns the data of the previous sector.
    WrongPlace,
    /// A write is carried out twice, the second time after it was acknowledged, so it may overwrite
    /// newer data.
    Echo,
}

/// A disk with a defect.
#[derive(Debug)]
struct FaultyDisk {
    below: RawDevice,
    defect: Defect,
    requests: Arc<AtomicU64>,
}

#[derive(Debug)]
struct FaultyQueue {
    below: Box<dyn BlockQueue>,
    defect: Defect,
    requests: Arc<AtomicU64>,
    size_bytes: u64,
    pushes: u64,
    /// Writes to be carried out later: at which push, offset, bytes.
    owed: Vec<(u64, u64, Vec<u8>)>,
    /// Completions of requests that were not passed on.
    invented: Vec<Completion>,
    last_read: Vec<u8>,
    /// Tags of reads that will return stale data.
    stale: Vec<u64>,
}

impl BlockDevice for FaultyDisk {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        Ok(Box::new(FaultyQueue {
            below: self.below.open_queue(options)?,
            defect: self.defect,
            requests: Arc::clone(&self.requests),
            size_bytes: self.geometry().size_bytes,
            pushes: 0,
            owed: Vec::new(),
            invented: Vec::new(),
            last_read: Vec::new(),
            stale: Vec::new(),
        }))
    }
}

impl FaultyQueue {
    /// Carries out an additional write.
    fn write_now(&mut self, offset_bytes: u64, bytes: &[u8]) {
        let mut buf = diskwright_store::IoBuf::new(bytes.len());
        buf.copy_from_slice(bytes);
        self.below.push(Request::write(offset_bytes, bytes.len(), buf, u64::MAX)).unwrap();
        let mut done = Vec::new();
        while !done.iter().any(|completion: &Completion| completion.tag == u64::MAX) {
            self.below.reap(1, &mut done).unwrap();
        }
        done.retain(|completion| completion.tag != u64::MAX);
        self.invented.append(&mut done);
    }
}

impl BlockQueue for FaultyQueue {
    fn depth(&self) -> usize {
        self.below.depth()
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight() + self.invented.len()
    }

    fn push(&mut self, mut request: Request) -> Result<(), Box<PushError>> {
        self.pushes += 1;
        if self.owed.first().is_some_and(|(due, ..)| *due == self.pushes) {
            let (_, offset_bytes, bytes) = self.owed.remove(0);
            self.write_now(offset_bytes, &bytes);
        }
        // After this many pushes the completion has been returned, as not so many can be in flight.
        let due = self.pushes + PLAN.depth as u64 + 4;
        let is_due = self.requests.fetch_add(1, Ordering::Relaxed) % 41 == 40;
        let bytes = |request: &Request| request.buf.as_ref().unwrap()[..request.len_bytes as usize].to_vec();
        let invent = |request: Request| Completion {
            tag: request.tag,
            buf: request.buf,
            segments: request.segments,
            result: Ok(()),
        };
        match (request.operation, if is_due { self.defect } else { Defect::None }) {
            (Operation::Write, Defect::LateWrite) => {
                self.owed.push((due, request.offset_bytes, bytes(&request)));
                self.invented.push(invent(request));
                return Ok(());
            }
            (Operation::Write, Defect::LostWrite) => {
                self.invented.push(invent(request));
                return Ok(());
            }
            (Operation::Write, Defect::Echo) => self.owed.push((due, request.offset_bytes, bytes(&request))),
            (Operation::Write, Defect::LongWrite) if request.offset_bytes + request.len_bytes < self.size_bytes => {
                let mut longer = bytes(&request);
                longer.resize(longer.len() + 512, 0x77);
                self.write_now(request.offset_bytes, &longer);
            }
            (Operation::WriteZeroes | Operation::Discard, Defect::ShortZeroes) if request.len_bytes > 512 => {
                request.len_bytes -= 512;
            }
            (Operation::Read, Defect::StaleRead) => self.stale.push(request.tag),
            (Operation::Read, Defect::WrongPlace) if request.offset_bytes > 0 => request.offset_bytes -= 512,
            _ => {}
        }
        self.below.push(request)
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let from = out.len();
        out.append(&mut self.invented);
        let missing = at_least.saturating_sub(out.len() - from);
        self.below.reap(missing, out)?;
        for completion in &mut out[from..] {
            let Some(buf) = &mut completion.buf else { continue };
            if self.stale.contains(&completion.tag) {
                let len = buf.len().min(self.last_read.len());
                buf[..len].copy_from_slice(&self.last_read[..len]);
            }
            self.last_read = buf.to_vec();
        }
        Ok(())
    }
}

#[test]
fn every_defect_is_detected() {
    let defects = [
        Defect::LateWrite,
        Defect::LostWrite,
        Defect::LongWrite,
        Defect::ShortZeroes,
        Defect::StaleRead,
        Defect::WrongPlace,
        Defect::Echo,
    ];
    let try_one = |defect: Defect, seed: u64| {
        let store = Arc::new(MemoryStore::with_bytes("memory", vec![0; 256 << 10]));
        let below = RawDevice::new(store, true, 512).unwrap();
        let device = FaultyDisk { below, defect, requests: Arc::default() };
        let plan = Plan { steps: 200, engine: EngineKind::Sync, seed, ..PLAN };
        round(&device, &plan, &mut vec![0; 256 << 10])
    };
    for seed in 1..=8 {
        assert_eq!(try_one(Defect::None, seed).map(|tally| tally.requests > 500), Ok(true));
    }
    for defect in defects {
        let caught = (1..=16).find_map(|seed| Some((seed, try_one(defect, seed).err()?)));
        let (seed, how) = caught.unwrap_or_else(|| panic!("{defect:?} was not detected"));
        println!("soak: caught: {defect:?} (seed {seed}): {how}");
    }
}
