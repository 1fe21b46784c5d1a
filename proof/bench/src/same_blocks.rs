//! The file of a disk, used as a raw file: the peer that lies in the same place on the device.
//!
//! ```text
//!   offset on the disk ──runs (from the disk's own map)──▶ offset in its file ──▶ RawDevice
//! ```
//!
//! Two files of the same file system can differ in speed by their place alone. On one cloud machine
//! random 4K writes by fio to plain files of 2 GiB had 43,000 to 155,000 IOPS, each file always the
//! same. A disk that is compared with a raw file somewhere else is then judged by its place. This
//! peer moves the same bytes of the same file, without the format: no table is looked up and no
//! sector bitmap is examined.
//!
//! Invariant: only payload is written. The runs cover what the map calls data of the disk's own
//! file, and nothing else. So the disk may stay open beside it, as long as the two are not used at
//! the same time.

use diskwright_format::space::sums::sums_of;
use diskwright_lab::{LabError, Result, targets::Target};
use diskwright_store::{
    BlockDevice, BlockQueue, Completion, Extent, ExtentKind, Geometry, Operation, PushError, QueueOptions, RawDevice,
    Request,
};
use std::{io, sync::Arc};

/// A range of the disk whose bytes lie in one piece of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    pub(crate) file_offset_bytes: u64,
}

/// See the module.
#[derive(Debug)]
struct SameBlocks {
    raw: Arc<RawDevice>,
    runs: Arc<[Run]>,
    geometry: Geometry,
    /// Of this much of each buffer the checksums of a pool are computed after a read; 0 for none.
    summed_bytes: usize,
}

/// The blocks of `target`, as a raw device. `None` for a raw file.
///
/// # Errors
/// [`LabError::File`] if the map cannot be read, or if not all of the disk is data in one file of
/// its top layer.
pub(crate) fn device_of(target: &Target) -> Result<Option<Arc<dyn BlockDevice>>> {
    let Some(disk) = target.disk() else { return Ok(None) };
    let failed = LabError::file("map", &target.path);
    let geometry = disk.geometry();
    let mut extents = Vec::new();
    let made = disk.extents(0, geometry.size_bytes, &mut extents).and_then(|()| {
        let (file, runs) = runs_of(&extents, geometry.size_bytes)?;
        let layers = disk.layers();
        let store = layers.first().and_then(|top| top.image.stores().get(usize::from(file)));
        let store = store.ok_or_else(|| io::Error::other("the map names a file that the disk does not have"))?;
        let raw = RawDevice::new(Arc::clone(store), true, geometry.logical_sector_bytes)?;
        Ok(SameBlocks { raw: Arc::new(raw), runs, geometry, summed_bytes: 0 })
    });
    Ok(Some(Arc::new(made.map_err(failed)?)))
}

/// Ranges of a file as a raw device. The runs cover all of its size. If `summed_bytes` is not 0, so
/// much of each buffer is summed up after a read, as a pool does it.
pub(crate) fn device_at(raw: &Arc<RawDevice>, run: Run, summed_bytes: usize) -> Arc<dyn BlockDevice> {
    let geometry = Geometry { size_bytes: run.len_bytes, ..raw.geometry() };
    Arc::new(SameBlocks { raw: Arc::clone(raw), runs: [run].into(), geometry, summed_bytes })
}

/// The file and the runs of a disk that has all of its data in one file of its top layer.
fn runs_of(extents: &[Extent], size_bytes: u64) -> io::Result<(u16, Arc<[Run]>)> {
    let file = extents.first().map_or(0, |first| first.file);
    let mut runs: Vec<Run> = Vec::new();
    let mut mapped_bytes = 0;
    for extent in extents {
        let own = extent.kind == ExtentKind::Data && extent.depth == 0 && extent.file == file;
        let Some(file_offset_bytes) = extent.file_offset_bytes.filter(|_| own) else {
            let what = format!("the disk has no data of its own in one file at offset {}", extent.offset_bytes);
            return Err(io::Error::other(what));
        };
        let Extent { offset_bytes, len_bytes, .. } = *extent;
        match runs.last_mut() {
            Some(last) if last.file_offset_bytes + last.len_bytes == file_offset_bytes => last.len_bytes += len_bytes,
            _ => runs.push(Run { offset_bytes, len_bytes, file_offset_bytes }),
        }
        mapped_bytes += len_bytes;
    }
    if mapped_bytes != size_bytes {
        return Err(io::Error::other(format!("the map covers {mapped_bytes} of {size_bytes} bytes")));
    }
    Ok((file, runs.into()))
}

/// Where a request for this range of the disk goes in the file. One that crosses the end of its run
/// is moved back into the run: what it moves is near the same place, and payload.
fn place(runs: &[Run], offset_bytes: u64, len_bytes: u64) -> u64 {
    let after = runs.partition_point(|run| run.offset_bytes <= offset_bytes);
    let run = runs[after.saturating_sub(1)];
    let within_bytes = (offset_bytes - run.offset_bytes).min(run.len_bytes.saturating_sub(len_bytes));
    run.file_offset_bytes + within_bytes
}

impl BlockDevice for SameBlocks {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        let (queue, runs) = (self.raw.open_queue(options)?, Arc::clone(&self.runs));
        Ok(Box::new(Placed { queue, runs, summed_bytes: self.summed_bytes }))
    }
}

#[derive(Debug)]
struct Placed {
    queue: Box<dyn BlockQueue>,
    runs: Arc<[Run]>,
    summed_bytes: usize,
}

impl BlockQueue for Placed {
    fn depth(&self) -> usize {
        self.queue.depth()
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    fn memory_alignment_bytes(&self) -> usize {
        self.queue.memory_alignment_bytes()
    }

    fn push(&mut self, mut request: Request) -> Result<(), Box<PushError>> {
        if request.operation != Operation::Flush {
            request.offset_bytes = place(&self.runs, request.offset_bytes, request.len_bytes);
        }
        self.queue.push(request)
    }

    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let before = out.len();
        self.queue.reap(at_least, out)?;
        if self.summed_bytes > 0 {
            for buf in out[before..].iter().filter_map(|ended| ended.buf.as_ref()) {
                std::hint::black_box(sums_of(&buf[..self.summed_bytes.min(buf.len())]).fold(0, |all, sum| all ^ sum));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_lab::targets::{Container, Preparation, make_filled, open_verified};
    use diskwright_load::data;
    use diskwright_store::{Blocking, CacheMode, EngineKind};

    #[test]
    fn the_blocks_hold_what_the_disk_holds_and_nothing_else_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let size_bytes = 9 << 20;
        let how = Preparation { size_bytes, seed: 5, cache: CacheMode::PageCache, engine: EngineKind::Auto };
        for container in Container::STUDIED.into_iter().chain(Container::FURTHER) {
            let path = make_filled(container, dir.path(), &how, &mut |_| Ok(())).unwrap();
            let target = open_verified(container, path, &how, &mut |_| Ok(())).unwrap();
            let Some(device) = device_of(&target).unwrap() else {
                assert_eq!(container, Container::Raw);
                continue;
            };
            let mut blocks = Blocking::open(&*device, EngineKind::Auto).unwrap();
            let (mut read, mut wanted) = (vec![0; size_bytes as usize], vec![0; size_bytes as usize]);
            // 64 KiB, so that no request crosses the end of a run.
            for (index, piece) in read.chunks_mut(64 << 10).enumerate() {
                blocks.read((index as u64) << 16, piece).unwrap();
            }
            data::fill(how.seed, 0, &mut wanted);
            assert!(read == wanted, "{container:?}");
            for index in 0..size_bytes >> 16 {
                blocks.write(index << 16, &[7; 64 << 10], false).unwrap();
            }
            drop(blocks);
            drop(device);
            target.close().unwrap();
            let path = dir.path().join(container.file_name());
            let again = Target::open(container, path, how.cache, how.engine).unwrap();
            let mut disk = Blocking::open(again.device(), EngineKind::Auto).unwrap();
            disk.read(0, &mut read).unwrap();
            assert!(read.iter().all(|&byte| byte == 7), "{container:?}");
        }
    }

    #[test]
    fn a_request_that_crosses_the_end_of_its_run_stays_in_it() {
        let run = |offset_bytes, len_bytes, file_offset_bytes| Run { offset_bytes, len_bytes, file_offset_bytes };
        let runs = [run(0, 100, 1000), run(100, 50, 5000)];
        let at = |offset, len| place(&runs, offset, len);
        assert_eq!((at(0, 10), at(90, 10), at(95, 10), at(100, 10), at(149, 1)), (1000, 1090, 1090, 5000, 5049));
    }
}
