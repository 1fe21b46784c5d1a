//! From one disk to another: copying what is there, sharing what can be shared, skipping what is zero.
//!
//! ```text
//!   window of the source ─▶ extents ─┬─ zero, unallocated ─▶ nothing (the new image reads as zeros)
//!                                    ├─ data ─▶ reflink whole blocks, where both files can
//!                                    └─ data ─▶ read ─▶ all zero? skip : write
//! ```
//!
//! Two workers take windows in turn, each with a queue to both disks and several requests in flight, so that reading,
//! writing and looking for zeros overlap. With `verify`, the new file is opened anew and compared with the source.
//!
//! The copy grows under a name of its own (`DEST.partial`) and gets its real one, durably, when it is whole and durable: what is
//! found under the real name after a power cut or a `kill -9` is never half a copy that looks like a disk. If anything
//! fails, or the user stops it, the file is removed again.

use crate::{
    CompareOutcome, CreateRequest, Disk, DiskError, OpenOptions, Progress, Result, compare,
    create::{create_as, format_for},
    open::file_error,
};
use diskwright_image::Format;
use diskwright_store::{
    BlockDevice, BlockQueue, CacheMode, Completion, EngineKind, Extent, ExtentKind, IoBuf, QueueOptions, Request, Slab,
};
use nix::errno::Errno;
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

/// Bytes that a worker takes at a time; the extents are asked for as many.
const WINDOW_BYTES: u64 = 64 << 20;
/// Bytes of one read and one write.
const CHUNK_BYTES: u64 = 1 << 20;
/// Buffers of each worker.
const BUFFERS: usize = 8;
/// Workers: one reads while the other writes.
const WORKERS: usize = 2;
/// How often the caller is told how far it is.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// How to convert.
#[derive(Debug, Clone, Default)]
pub struct ConvertOptions {
    /// How to open the source; its engine serves for the destination too, its cache mode for nothing.
    pub source: OpenOptions,
    /// Page cache or O_DIRECT for both, or `None` for what is fastest: O_DIRECT, but a source that the page cache holds is read
    /// from there.
    pub cache: Option<CacheMode>,
    /// What to make of it; the size is the source's.
    pub dest: CreateRequest,
    /// Read back and compare.
    pub verify: bool,
    /// Never share extents, always copy.
    pub no_reflink: bool,
}

/// What a conversion did.
#[derive(Debug, Clone, Copy, Default)]
pub struct ConvertOutcome {
    /// Virtual size.
    pub size_bytes: u64,
    /// Bytes read and written.
    pub copied_bytes: u64,
    /// Bytes shared by reflink.
    pub cloned_bytes: u64,
    /// Bytes skipped because they read as zeros.
    pub zero_bytes: u64,
    /// Bytes read back and found the same.
    pub verified_bytes: u64,
}

/// What the workers share.
struct Job<'a> {
    source: &'a Disk,
    dest: &'a Disk,
    engine: EngineKind,
    size_bytes: u64,
    next_window: AtomicU64,
    reflink: AtomicBool,
    can_reflink: OnceLock<bool>,
    stop: AtomicBool,
    copied_bytes: AtomicU64,
    cloned_bytes: AtomicU64,
    zero_bytes: AtomicU64,
    failure: Mutex<Option<io::Error>>,
}

/// Copies a disk into a new image. `progress` is told bytes of the virtual disk; verification counts them once more.
///
/// # Errors
/// Whatever opening, creating, reading or writing meets; [`DiskError::VerifyFailed`]; [`DiskError::Stopped`]. Nothing is left
/// behind, except after a failed verification the copy under its partial name, as evidence.
pub fn convert(
    source: impl AsRef<Path>,
    dest: impl AsRef<Path>,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<ConvertOutcome> {
    let (source_path, dest_path) = (source.as_ref(), dest.as_ref());
    if let Some(parent) = &options.dest.parent {
        // What is zero in the source is not written, and the parent's bytes would show there.
        return Err(DiskError::BadOptions {
            what: format!(
                "cannot convert into a child of {}: a conversion makes a disk that stands alone",
                parent.display()
            ),
            hint: "leave the parent out".into(),
        });
    }
    let source = open_source(source_path, options)?;
    let geometry = source.geometry();
    let format = format_for(dest_path, options.dest.format)?;
    // Only VHDX can tell its guest of sectors other than 512.
    let inherited = (format == Format::Vhdx).then_some(geometry);
    let mut request = options.dest.clone();
    request.size_bytes = Some(request.size_bytes.unwrap_or(geometry.size_bytes).max(geometry.size_bytes));
    request.logical_sector_bytes = request.logical_sector_bytes.or(inherited.map(|from| from.logical_sector_bytes));
    request.physical_sector_bytes = request.physical_sector_bytes.or(inherited.map(|from| from.physical_sector_bytes));
    request.format = Some(format);
    let files = &request.files;
    let exists = || file_error("open it", dest_path, Errno::EEXIST.into());
    if files.facts(dest_path).is_ok() {
        return Err(exists());
    }
    let partial = partial_path(dest_path);
    create_as(dest_path, &partial, &request).map_err(|error| explain_partial(error, &partial))?;
    // The first error is the one to tell; the file is ours, made a moment ago.
    let discard = |_: &DiskError| drop(files.remove(&partial));
    let mut outcome = copy(&source, &partial, format, options, progress).inspect_err(discard)?;
    if options.verify {
        let compared = Disk::open(&partial, &OpenOptions { format: Some(format), ..dest_options(options) })
            .and_then(|written| compare(&*source, &*written, options.source.engine, progress));
        match compared.inspect_err(discard)? {
            CompareOutcome::Same => outcome.verified_bytes = geometry.size_bytes,
            CompareOutcome::Different { offset_bytes } => {
                return Err(DiskError::VerifyFailed {
                    dest: partial,
                    source_path: source_path.to_owned(),
                    offset_bytes,
                });
            }
        }
    }
    files
        .rename(&partial, dest_path, false)
        .map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => exists(),
            _ => file_error("give the finished copy its name", dest_path, source),
        })
        .inspect_err(discard)?;
    files
        .sync_directory_of(dest_path)
        .map_err(|source| file_error("make the new file's folder durable", dest_path, source))
        .inspect_err(|_| drop(files.remove(dest_path)))?;
    Ok(outcome)
}

/// Under which name a copy grows.
fn partial_path(dest: &Path) -> PathBuf {
    let mut name = dest.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    dest.with_file_name(name)
}

fn explain_partial(error: DiskError, partial: &Path) -> DiskError {
    match error {
        DiskError::File { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => DiskError::BadOptions {
            what: format!(
                "{} is there: another conversion to this name is under way, or one was cut short",
                partial.display()
            ),
            hint: "if none is under way, remove that file and try again".into(),
        },
        other => other,
    }
}

/// Opens the source, through the page cache if that holds most of it.
fn open_source(path: &Path, options: &ConvertOptions) -> Result<Arc<Disk>> {
    let open = |cache| Disk::open(path, &OpenOptions { writable: false, cache, ..options.source.clone() });
    let source = open(options.cache.unwrap_or(CacheMode::Direct))?;
    let (mut held_bytes, mut all_bytes) = (0.0, 0.0);
    for layer in source.layers() {
        let store = layer.image.store();
        let allocated_bytes = store.allocated_bytes().unwrap_or(0) as f64;
        all_bytes += allocated_bytes;
        held_bytes += allocated_bytes * store.cached_share();
    }
    if options.cache.is_none() && held_bytes > all_bytes / 2.0 { open(CacheMode::PageCache) } else { Ok(source) }
}

fn dest_options(options: &ConvertOptions) -> OpenOptions {
    let cache = options.cache.unwrap_or(CacheMode::Direct);
    let files = options.dest.files.clone();
    OpenOptions { cache, engine: options.source.engine, files, ..OpenOptions::default() }
}

fn copy(
    source: &Disk,
    dest_path: &Path,
    format: Format,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<ConvertOutcome> {
    let dest = Disk::open(dest_path, &OpenOptions { writable: true, format: Some(format), ..dest_options(options) })?;
    let size_bytes = source.geometry().size_bytes;
    let job = Job {
        source,
        dest: &dest,
        engine: options.source.engine,
        size_bytes,
        next_window: AtomicU64::new(0),
        reflink: AtomicBool::new(!options.no_reflink),
        can_reflink: OnceLock::new(),
        stop: AtomicBool::new(false),
        copied_bytes: AtomicU64::new(0),
        cloned_bytes: AtomicU64::new(0),
        zero_bytes: AtomicU64::new(0),
        failure: Mutex::new(None),
    };
    let mut stopped = false;
    thread::scope(|scope| {
        let (done, all_done) = mpsc::channel::<()>();
        for _ in 0..WORKERS {
            let (job, done) = (&job, done.clone());
            scope.spawn(move || {
                let _done = done;
                if let Err(error) = work(job) {
                    job.stop.store(true, Ordering::Relaxed);
                    job.failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(error);
                }
            });
        }
        drop(done);
        // The channel never carries anything; it closes when the last worker is done.
        while all_done.recv_timeout(TELL_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
            if !progress(job.done_bytes(), size_bytes) {
                stopped = true;
                job.stop.store(true, Ordering::Relaxed);
            }
        }
    });
    if stopped {
        return Err(DiskError::Stopped);
    }
    let failure = job.failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
    if let Some(source) = failure {
        return Err(file_error("copy into the new image", dest_path, source));
    }
    dest.close()?;
    progress(size_bytes, size_bytes);
    Ok(ConvertOutcome {
        size_bytes,
        copied_bytes: job.copied_bytes.into_inner(),
        cloned_bytes: job.cloned_bytes.into_inner(),
        zero_bytes: job.zero_bytes.into_inner(),
        verified_bytes: 0,
    })
}

impl Job<'_> {
    fn done_bytes(&self) -> u64 {
        [&self.copied_bytes, &self.cloned_bytes, &self.zero_bytes]
            .iter()
            .map(|bytes| bytes.load(Ordering::Relaxed))
            .sum()
    }

    fn count(counter: &AtomicU64, bytes: u64) {
        counter.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// One worker: takes windows until there are none.
fn work(job: &Job<'_>) -> io::Result<()> {
    let slab = Slab::new(BUFFERS, CHUNK_BYTES as usize);
    let queue_options = QueueOptions { depth: BUFFERS, engine: job.engine, slab: Some(&slab), ring: None };
    let mut pipe = Pipe {
        source: job.source.open_queue(&queue_options)?,
        dest: job.dest.open_queue(&queue_options)?,
        free: slab.take_all(),
        done: Vec::new(),
    };
    let mut extents: Vec<Extent> = Vec::new();
    // The destination's sectors may be larger than what the source's extents go by. Windows are multiples of both.
    let sector_bytes = u64::from(job.dest.geometry().logical_sector_bytes);
    let mut copied_to = 0;
    loop {
        let start = job.next_window.fetch_add(WINDOW_BYTES, Ordering::Relaxed);
        if start >= job.size_bytes || job.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        let len = WINDOW_BYTES.min(job.size_bytes - start);
        extents.clear();
        job.source.extents(start, len, &mut extents)?;
        for extent in &extents {
            if extent.kind == ExtentKind::Data {
                let mut rest = share(job, extent)?;
                for (start, stop) in &mut rest {
                    *start = (*start - *start % sector_bytes).max(copied_to);
                    *stop = stop.next_multiple_of(sector_bytes).min(job.size_bytes).max(*start);
                    copied_to = *stop;
                }
                pipe.copy(job, &rest)?;
            } else {
                Job::count(&job.zero_bytes, extent.len_bytes);
            }
        }
    }
}

/// Shares what can be shared of an extent, and tells what is left to copy. Whether the file systems can is found out
/// with one block; a later refusal (another layer on another file system) ends all tries too.
fn share(job: &Job<'_>, extent: &Extent) -> io::Result<Vec<(u64, u64)>> {
    let end = extent.offset_bytes + extent.len_bytes;
    let everything = vec![(extent.offset_bytes, end)];
    let Some(file_offset_bytes) = extent.file_offset_bytes.filter(|_| job.reflink.load(Ordering::Relaxed)) else {
        return Ok(everything);
    };
    let store = job.source.layers()[extent.depth as usize].image.store();
    let clone = |len_bytes| job.dest.clone_from(store.as_ref(), file_offset_bytes, extent.offset_bytes, len_bytes);
    let block_bytes = job.dest.layers()[0].image.info().block_bytes;
    let first_block_end = (extent.offset_bytes.next_multiple_of(block_bytes) + block_bytes).min(end);
    let can = *job.can_reflink.get_or_init(|| clone(first_block_end - extent.offset_bytes).is_ok());
    if !can {
        job.reflink.store(false, Ordering::Relaxed);
        return Ok(everything);
    }
    match clone(extent.len_bytes) {
        Ok((from, to)) if from < to => {
            Job::count(&job.cloned_bytes, to - from);
            let rest = [(extent.offset_bytes, from), (to, end)];
            Ok(rest.into_iter().filter(|(start, end)| start < end).collect())
        }
        Ok(_) => Ok(everything),
        Err(error) if error.kind() == io::ErrorKind::StorageFull => Err(error),
        Err(_) => {
            job.reflink.store(false, Ordering::Relaxed);
            Ok(everything)
        }
    }
}

/// A reader and a writer with buffers going round.
struct Pipe {
    source: Box<dyn BlockQueue>,
    dest: Box<dyn BlockQueue>,
    free: Vec<IoBuf>,
    done: Vec<Completion>,
}

impl Pipe {
    fn copy(&mut self, job: &Job<'_>, ranges: &[(u64, u64)]) -> io::Result<()> {
        for &(start, end) in ranges {
            let mut at = start;
            loop {
                while at < end
                    && !job.stop.load(Ordering::Relaxed)
                    && let Some(buf) = self.free.pop()
                {
                    // Chunks end at multiples of their size, so that a payload block is not cut more than needed.
                    let stop = ((at / CHUNK_BYTES + 1) * CHUNK_BYTES).min(end);
                    let len = stop - at;
                    let request = Request::read(at, len as usize, buf, read_tag(at, len));
                    self.source.push(request).map_err(|error| error.reason)?;
                    at = stop;
                }
                if self.free.len() == BUFFERS {
                    break;
                }
                self.turn(job)?;
            }
        }
        Ok(())
    }

    /// Takes what has been read and written, waiting for something if there is nothing.
    fn turn(&mut self, job: &Job<'_>) -> io::Result<()> {
        let (reading, writing) = (self.source.in_flight(), self.dest.in_flight());
        if writing > 0 {
            // Waiting for a write while reads are under way would leave the writer idle afterwards; so only when nothing is read.
            let wait = usize::from(reading == 0);
            self.dest.reap(wait, &mut self.done)?;
            for completion in self.done.drain(..) {
                completion.result?;
                Job::count(&job.copied_bytes, completion.tag);
                self.free.extend(completion.buf);
            }
        }
        if reading > 0 {
            self.source.reap(1, &mut self.done)?;
            for completion in std::mem::take(&mut self.done) {
                completion.result?;
                let Some(mut buf) = completion.buf else { continue };
                let (offset_bytes, len) = range_of(completion.tag);
                if is_zero(&buf[..len as usize]) {
                    Job::count(&job.zero_bytes, len);
                    self.free.push(buf);
                } else {
                    // Where the source ends within a sector of a larger destination, zeros follow.
                    let padded = len.next_multiple_of(u64::from(job.dest.geometry().logical_sector_bytes)) as usize;
                    buf[len as usize..padded].fill(0);
                    self.dest.push(Request::write(offset_bytes, padded, buf, len)).map_err(|error| error.reason)?;
                }
            }
        }
        Ok(())
    }
}

/// A read carries its range in its tag, in sectors; a length is at most 2,048 of them, so 12 bits hold it.
fn read_tag(offset_bytes: u64, len_bytes: u64) -> u64 {
    ((offset_bytes / 512) << 12) | (len_bytes / 512)
}

fn range_of(tag: u64) -> (u64, u64) {
    ((tag >> 12) * 512, (tag & 0xfff) * 512)
}

fn is_zero(bytes: &[u8]) -> bool {
    // Zero at the front, and every byte like the one before it: a memcmp, which is as fast as memory.
    bytes.is_empty() || bytes[0] == 0 && bytes[..bytes.len() - 1] == bytes[1..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_told_from_almost_zeros() {
        assert!(is_zero(&[]));
        assert!(is_zero(&[0; 4096]));
        let mut bytes = [0; 4096];
        bytes[4095] = 1;
        assert!(!is_zero(&bytes));
        assert!(!is_zero(&[1; 512]));
    }
}
