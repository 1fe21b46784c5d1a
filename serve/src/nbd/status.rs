//! Replies to block status requests: the extents of a device in the protocol's metadata contexts.
//!
//! The extents are found in windows that grow while they contain few extents (`walk`). As the
//! protocol allows, a reply is shorter than the request once it has enough descriptors or its time
//! is up. So a hostile image, a very fragmented one or a huge hole costs a request no more than
//! that.

use super::handshake::{ALLOCATION_ID, Contexts, DEPTH_ID, PointContext};
use crate::walk::Walk;
use diskwright_nbd::wire::{AllocationFlags, Answering, ChunkFlags, Descriptor};
use diskwright_store::{BlockDevice, Extent, ExtentKind, TrackedPoint};
use std::{
    io,
    time::{Duration, Instant},
};

/// Time after which a reply ends with what was found, because the worker has other clients.
pub(crate) const PATIENCE: Duration = Duration::from_millis(2);

/// Number of descriptors for each context after which a reply ends.
const DESCRIPTORS_ENOUGH: usize = 4096;

/// A request for block status.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StatusRequest {
    pub(crate) answering: Answering,
    pub(crate) offset_bytes: u64,
    /// More than 0; the range lies on the device.
    pub(crate) len_bytes: u64,
    /// Whether the client wants a single descriptor for each context (REQ_ONE).
    pub(crate) only_one: bool,
}

/// Appends the reply to `out`.
///
/// # Errors
/// The error of the device; nothing was appended then.
pub(crate) fn answer(
    device: &dyn BlockDevice,
    contexts: &Contexts,
    request: &StatusRequest,
    patience: Duration,
    out: &mut Vec<u8>,
) -> io::Result<()> {
    let began = Instant::now();
    let (mut allocation, mut depth) = (Runs::default(), Runs::default());
    let mut walk = Walk::over(device, request.offset_bytes..request.offset_bytes + request.len_bytes);
    let walks = contexts.allocation || contexts.depth;
    while let Some(extents) = if walks { walk.next_window()? } else { None } {
        for extent in extents {
            allocation.add(extent.len_bytes, allocation_of(extent));
            depth.add(extent.len_bytes, depth_of(extent));
        }
        let enough = |runs: &Runs| runs.0.len() >= if request.only_one { 2 } else { DESCRIPTORS_ENOUGH };
        let all = (!contexts.allocation || enough(&allocation)) && (!contexts.depth || enough(&depth));
        if all || began.elapsed() > patience {
            break;
        }
    }
    let sent = [(contexts.allocation, ALLOCATION_ID, allocation), (contexts.depth, DEPTH_ID, depth)];
    let mut sent: Vec<(u32, Runs)> =
        sent.into_iter().filter(|(wanted, ..)| *wanted).map(|(_, id, runs)| (id, runs)).collect();
    for PointContext { id, point } in &*contexts.points {
        sent.push((*id, changed_since(device, point, request)?));
    }
    if sent.iter().any(|(_, runs)| runs.0.is_empty()) {
        return Err(io::Error::other("the disk returned no extents for the range"));
    }
    for (index, (id, runs)) in sent.iter().enumerate() {
        let flags = if index + 1 == sent.len() { ChunkFlags::DONE } else { ChunkFlags::empty() };
        let count = runs.0.len().min(if request.only_one { 1 } else { DESCRIPTORS_ENOUGH });
        request.answering.block_status(flags, *id, &runs.0[..count], out);
    }
    Ok(())
}

/// Which parts of the range have changed since a point: status 1, as that of QEMU's bitmaps.
fn changed_since(device: &dyn BlockDevice, point: &TrackedPoint, request: &StatusRequest) -> io::Result<Runs> {
    let end_bytes = request.offset_bytes + request.len_bytes;
    let enough = if request.only_one { 1 } else { DESCRIPTORS_ENOUGH / 2 };
    let mut parts = Vec::new();
    device.changed_since(point, request.offset_bytes..end_bytes, enough, &mut parts)?;
    let (mut runs, mut at) = (Runs::default(), request.offset_bytes);
    for part in &parts {
        runs.add(part.start - at, 0);
        runs.add(part.end - part.start, 1);
        at = part.end;
    }
    if parts.len() < enough {
        runs.add(end_bytes - at, 0);
    }
    Ok(runs)
}

/// Descriptors; neighbours with the same status are merged.
#[derive(Debug, Default)]
struct Runs(Vec<Descriptor>);

impl Runs {
    fn add(&mut self, len_bytes: u64, status: u64) {
        match self.0.last_mut() {
            Some(last) if last.status == status => last.len_bytes += len_bytes,
            _ if len_bytes == 0 => {}
            _ => self.0.push(Descriptor { len_bytes, status }),
        }
    }
}

fn allocation_of(extent: &Extent) -> u64 {
    match extent.kind {
        ExtentKind::Data | ExtentKind::Damaged => 0,
        ExtentKind::Zero | ExtentKind::Unallocated => u64::from((AllocationFlags::HOLE | AllocationFlags::ZERO).bits()),
    }
}

/// `qemu:allocation-depth`: 0 if no layer has the range, 1 for the top layer, 2 for its parent, and
/// so on.
fn depth_of(extent: &Extent) -> u64 {
    match extent.kind {
        ExtentKind::Unallocated => 0,
        _ => u64::from(extent.depth) + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_nbd::wire::{Chunk, Decoded, Framing, ReplyHeader};
    use diskwright_store::{BlockQueue, Geometry, QueueOptions};

    /// A disk of the given size on which each second MiB is a hole: a zero extent below 8 MiB,
    /// unallocated above.
    #[derive(Debug)]
    struct Striped(u64);

    impl BlockDevice for Striped {
        fn geometry(&self) -> Geometry {
            Geometry { size_bytes: self.0, logical_sector_bytes: 512, physical_sector_bytes: 4096, read_only: true }
        }
        fn open_queue(&self, _: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
            let mut at = offset_bytes;
            while at < offset_bytes + len_bytes {
                let stripe = at >> 20;
                let stop = ((stripe + 1) << 20).min(offset_bytes + len_bytes);
                let kind = match stripe {
                    _ if stripe.is_multiple_of(2) => ExtentKind::Data,
                    ..8 => ExtentKind::Zero,
                    _ => ExtentKind::Unallocated,
                };
                out.push(Extent {
                    offset_bytes: at,
                    len_bytes: stop - at,
                    kind,
                    depth: 1,
                    file: 0,
                    file_offset_bytes: None,
                });
                at = stop;
            }
            Ok(())
        }
    }

    type SentExtents = Vec<(u32, Vec<(u64, u64)>)>;

    fn ask(
        size: u64,
        framing: Framing,
        contexts: Contexts,
        offset_bytes: u64,
        len_bytes: u64,
        only_one: bool,
    ) -> SentExtents {
        let mut out = Vec::new();
        let answering = Answering { framing, cookie: 7, offset_bytes };
        let request = StatusRequest { answering, offset_bytes, len_bytes, only_one };
        answer(&Striped(size), &contexts, &request, Duration::MAX, &mut out).unwrap();
        told(&out, framing)
    }

    fn told(out: &[u8], framing: Framing) -> SentExtents {
        let mut told = Vec::new();
        let mut rest = out;
        let mut done = false;
        while !rest.is_empty() {
            let Decoded::Value(header, used) = ReplyHeader::decode(rest, framing).unwrap() else { panic!("cut") };
            let ReplyHeader::Chunk { flags, kind, cookie: 7, payload_bytes, .. } = header else { panic!("{header:?}") };
            assert!(!done, "no chunk follows the last one");
            done = flags.contains(ChunkFlags::DONE);
            let end = used + payload_bytes as usize;
            let Chunk::BlockStatus(status) = Chunk::parse(kind, &rest[used..end]).unwrap() else { panic!("{kind:?}") };
            told.push((status.context_id, status.descriptors.map(|run| (run.len_bytes, run.status)).collect()));
            rest = &rest[end..];
        }
        assert!(done);
        told
    }

    #[test]
    fn a_reply_ends_when_its_time_is_up() {
        let request = StatusRequest {
            answering: Answering { framing: Framing::Extended, cookie: 7, offset_bytes: 0 },
            offset_bytes: 0,
            len_bytes: 64 << 40,
            only_one: false,
        };
        let mut out = Vec::new();
        answer(&Striped(64 << 40), &both(), &request, Duration::ZERO, &mut out).unwrap();
        let told = told(&out, Framing::Extended);
        assert_eq!(told, [(ALLOCATION_ID, vec![(MIB, 0)]), (DEPTH_ID, vec![(MIB, 2)])]);
    }

    fn both() -> Contexts {
        Contexts { allocation: true, depth: true, ..Contexts::default() }
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn both_contexts_describe_the_range_in_both_framings() {
        for framing in [Framing::Structured, Framing::Extended] {
            let told = ask(16 * MIB, framing, both(), MIB / 2, 2 * MIB, false);
            assert_eq!(told[0], (ALLOCATION_ID, vec![(MIB / 2, 0), (MIB, 3), (MIB / 2, 0)]));
            // A zero extent belongs to the layer, so the whole range has one depth.
            assert_eq!(told[1], (DEPTH_ID, vec![(2 * MIB, 2)]));
            let told = ask(16 * MIB, framing, both(), 8 * MIB, 2 * MIB, false);
            assert_eq!(told[1], (DEPTH_ID, vec![(MIB, 2), (MIB, 0)]));
            let one = ask(16 * MIB, framing, both(), 8 * MIB, 8 * MIB, true);
            assert_eq!(one, [(ALLOCATION_ID, vec![(MIB, 0)]), (DEPTH_ID, vec![(MIB, 2)])]);
        }
    }

    #[test]
    fn the_reply_for_a_fragmented_disk_is_bounded() {
        let contexts = Contexts { allocation: true, ..Contexts::default() };
        let told = ask(64 << 30, Framing::Extended, contexts, 0, 64 << 30, false);
        assert_eq!((told.len(), told[0].1.len()), (1, DESCRIPTORS_ENOUGH));
        let told = ask(64 << 30, Framing::Extended, Contexts { depth: true, ..Contexts::default() }, 0, 7 * MIB, false);
        assert_eq!(told, [(DEPTH_ID, vec![(7 * MIB, 2)])]);
    }
}
