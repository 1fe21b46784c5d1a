//! Compacting disks with real file systems: how long it takes, and how small the file becomes.
//!
//! ```text
//!   empty VHDX ─▶ attached ─▶ mkfs, mount ─▶ files that fill most of it ─▶ most of them deleted
//!             ─▶ detached ─▶ compact, timed ─▶ length of the file against the smallest possible
//! ```
//!
//! The files that stay are spread evenly over all files, so nearly all their blocks have to move.
//! The smallest possible file has only the blocks of which the file system uses a part.
//!
//! The time of the one call that shortens the file is told apart: it is the file system's own, and
//! long where that discards what it frees.

use crate::serve::attach::attach;
use diskwright_disk::{
    CompactOptions, Disk, DiskError, OpenOptions, check_image, compact, layout,
    volume::{ReadAt, free_ranges},
};
use diskwright_image::{BlockState, Severity};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome, SEED},
    peer,
    progress::{Progress, report},
    scratch::settle,
    targets::{Container, create_empty},
};
use diskwright_load::{clock, data};
use diskwright_stats::numbers::{bytes, duration};
use diskwright_store::{
    self as store, BlockDevice, Blocking, DataFile, EngineKind, FileSystem, Files, Geometry, Lane, LocalFiles, Store,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use std::{
    cell::RefCell,
    fs, io,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

const TIME_BAR: Bar = Bar::AtMost(10e9);
const LENGTH_BAR: Bar = Bar::AtMost(1.03);
/// Length of a file inside. Longer than a block, so that few blocks hold parts of two.
const FILE_BYTES: u64 = 8 << 20;

/// A file system: name, the program that makes it with its options, and how it is mounted.
struct Kind {
    name: &'static str,
    mkfs: (&'static str, &'static str),
    options: &'static [&'static str],
    mount: (&'static str, &'static str),
    mount_options: &'static [&'static str],
}

const KINDS: [Kind; 3] = [
    Kind {
        name: "ext4",
        mkfs: ("mkfs.ext4", "e2fsprogs"),
        options: &["-q", "-F"],
        mount: ("mount", "mount"),
        mount_options: &[],
    },
    Kind {
        name: "NTFS",
        mkfs: ("mkfs.ntfs", "ntfs-3g"),
        options: &["-Q", "-q", "-F"],
        mount: ("ntfs-3g", "ntfs-3g"),
        // Without it FUSE passes on 4 KiB at a time.
        mount_options: &["-o", "big_writes"],
    },
    Kind {
        name: "XFS",
        mkfs: ("mkfs.xfs", "xfsprogs"),
        options: &["-q", "-f"],
        mount: ("mount", "mount"),
        mount_options: &[],
    },
];

/// Sizes of the disk, of what is written to it, and of what stays.
#[derive(Clone, Copy)]
struct Sizes {
    disk_bytes: u64,
    written_bytes: u64,
    kept_bytes: u64,
}

pub(crate) fn ext4(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    measure(context, &KINDS[0], progress)
}

pub(crate) fn ntfs(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    measure(context, &KINDS[1], progress)
}

pub(crate) fn xfs(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    measure(context, &KINDS[2], progress)
}

fn measure(context: &Context<'_>, kind: &Kind, progress: &mut dyn Progress) -> Result<RowOutcome> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(RowOutcome::skipped(kind.name, "mounting a file system needs root"));
    }
    if let Some((program, package)) =
        [kind.mkfs, kind.mount].into_iter().find(|(program, _)| peer::find(program).is_none())
    {
        return Ok(RowOutcome::skipped(kind.name, peer::missing(program, package)));
    }
    let full = Sizes { disk_bytes: 64 << 30, written_bytes: 40 << 30, kept_bytes: 5 << 30 };
    let small = Sizes { disk_bytes: 8 << 30, written_bytes: 5 << 30, kept_bytes: 640 << 20 };
    let sizes = context.pick(small, full);
    if let Err(error) = context.scratch.need("a disk that is filled", sizes.written_bytes + (2 << 30)) {
        return Ok(RowOutcome::skipped(kind.name, error.to_string()));
    }
    let mut found = RowOutcome::default();
    report(progress, "compact", 0, 1, kind.name)?;
    one(context, kind, sizes, &mut found)?;
    found.notes.push(format!(
        "a disk of {}; {} written in files of {}, and all but {} deleted again",
        bytes(sizes.disk_bytes),
        bytes(sizes.written_bytes),
        bytes(FILE_BYTES),
        bytes(sizes.kept_bytes)
    ));
    Ok(found)
}

fn one(context: &Context<'_>, kind: &Kind, sizes: Sizes, found: &mut RowOutcome) -> Result<()> {
    let dir = context.scratch.folder(kind.name)?;
    let path = create_empty(Container::VhdxDynamic, &dir, sizes.disk_bytes)?;
    let device = attach(&path, &dir)?;
    let filled = fill(kind, device.path(), &dir, sizes);
    device.stop()?;
    filled?;
    settle(&dir)?;
    let smallest_bytes = smallest(&path)?;
    let failed = LabError::file("compact", &path);
    let cutting = Cutting::default();
    let options = CompactOptions {
        open: OpenOptions {
            engine: context.options.engine,
            files: Files::new(Arc::new(cutting.clone())),
            ..OpenOptions::default()
        },
        ..CompactOptions::default()
    };
    let (done, took_ns, _) = clock::timed(|| compact(&path, &options, &mut |_, _| true));
    let done = done.map_err(|error| failed(io::Error::other(error)))?;
    let (_, checked) = check_image(&path, &OpenOptions::default())
        .map_err(|error| LabError::file("check", &path)(io::Error::other(error)))?;
    if checked.worst() >= Some(Severity::Leak) {
        found.checks.push(Check::broken(kind.name, format!("check finds {:?} in it", checked.findings.first())));
    }
    let ratio = done.new_file_bytes as f64 / smallest_bytes as f64;
    found.checks.push(Check::absolute(format!("{}: time", kind.name), "ns", &[took_ns as f64], TIME_BAR));
    found.checks.push(Check::absolute(
        format!("{}: length against the smallest possible", kind.name),
        "ratio",
        &[ratio],
        LENGTH_BAR,
    ));
    found.notes.push(format!(
        "{}: {} to {} (smallest possible: {}), {} moved; {} of the time the file system cut the file",
        kind.name,
        bytes(done.old_file_bytes),
        bytes(done.new_file_bytes),
        bytes(smallest_bytes),
        bytes(done.moved_bytes),
        duration(cutting.time_ns.load(Ordering::Relaxed) as f64)
    ));
    fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))
}

/// Makes the file system on the device, writes files and deletes most of them.
fn fill(kind: &Kind, device: &Path, dir: &Path, sizes: Sizes) -> Result<()> {
    let tool = |name: &str| peer::find(name).unwrap_or_else(|| PathBuf::from(name));
    let (device, point) = (device.to_string_lossy().into_owned(), dir.join("mnt"));
    peer::run(&tool(kind.mkfs.0), &[kind.options, &[&*device]].concat(), None)?;
    fs::create_dir(&point).map_err(LabError::file("create", &point))?;
    let point_text = point.to_string_lossy().into_owned();
    let words = [kind.mount_options, &[&*device, &*point_text]].concat();
    peer::run(&tool(kind.mount.0), &words, None)?;
    let written = write_and_delete(&point, sizes);
    let mut unmounted = Ok(());
    // A FUSE file system may be busy for a moment.
    for _ in 0..50 {
        unmounted = peer::run(&tool("umount"), &[&*point_text], None).map(drop);
        if unmounted.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    written.map_err(LabError::file("fill", &point))?;
    unmounted
}

fn write_and_delete(point: &Path, sizes: Sizes) -> io::Result<()> {
    let (files, kept) = (sizes.written_bytes / FILE_BYTES, sizes.kept_bytes / FILE_BYTES);
    let name = |index: u64| point.join(format!("file{index}"));
    let mut contents = vec![0; FILE_BYTES as usize];
    for index in 0..files {
        data::fill(SEED, index * FILE_BYTES, &mut contents);
        fs::write(name(index), &contents)?;
    }
    nix::unistd::sync();
    for index in (0..files).filter(|index| index * kept / files == (index + 1) * kept / files) {
        fs::remove_file(name(index))?;
    }
    nix::unistd::sync();
    Ok(())
}

/// The machine's files. Measures how long they take to be made shorter or longer.
#[derive(Debug, Clone, Default)]
struct Cutting {
    time_ns: Arc<AtomicU64>,
}

impl ForwardingFileSystem for Cutting {
    fn open(&self, path: &Path, options: &store::OpenOptions) -> Result<Arc<dyn Store>, store::OpenError> {
        let inner = LocalFiles.open(path, options)?;
        Ok(Arc::new(CuttingStore { inner, time_ns: Arc::clone(&self.time_ns) }))
    }
}

#[derive(Debug)]
struct CuttingStore {
    inner: Arc<dyn Store>,
    time_ns: Arc<AtomicU64>,
}

impl ForwardingStore for CuttingStore {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        let (done, took_ns, _) = clock::timed(|| self.inner.set_len(len_bytes));
        self.time_ns.fetch_add(took_ns, Ordering::Relaxed);
        done
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        self.inner.data_file()
    }

    fn lane(&self) -> Option<Arc<dyn Lane>> {
        self.inner.lane()
    }

    fn never_blocks(&self) -> bool {
        self.inner.never_blocks()
    }
}

/// The bytes of a disk, for the readers of file systems.
struct Bytes {
    geometry: Geometry,
    io: RefCell<Blocking>,
}

impl ReadAt for Bytes {
    fn size_bytes(&self) -> u64 {
        self.geometry.size_bytes
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        let start = offset_bytes - offset_bytes % 512;
        let end = (offset_bytes + buf.len() as u64).next_multiple_of(512);
        let mut whole = vec![0; (end - start) as usize];
        self.io.borrow_mut().read(start, &mut whole)?;
        buf.copy_from_slice(&whole[(offset_bytes - start) as usize..][..buf.len()]);
        Ok(())
    }
}

/// Length of the file if it had only the blocks of which the file system uses a part.
fn smallest(path: &Path) -> Result<u64> {
    let disk = Disk::open(path, &OpenOptions::default())?;
    let failed = || LabError::file("read", path);
    let io = Blocking::open(&*disk, EngineKind::Auto).map_err(failed())?;
    let reader = Bytes { geometry: disk.geometry(), io: RefCell::new(io) };
    let layers = disk.layers();
    let image = &layers[0].image;
    let block_bytes = image.info().block_bytes;
    let mut states = vec![BlockState::Absent; image.size_bytes().div_ceil(block_bytes) as usize];
    image.block_states(0, &mut states).map_err(DiskError::from)?;
    let mut is_needed: Vec<bool> = states.iter().map(|state| *state != BlockState::Absent).collect();
    for volume in layout(&*disk, EngineKind::Auto).map_err(failed())?.volumes {
        let freed = free_ranges(&reader, &volume, &mut |range| {
            let whole = range.start.div_ceil(block_bytes)..range.end / block_bytes;
            whole.for_each(|block| is_needed[block as usize] = false);
            ControlFlow::Continue(())
        });
        freed.map_err(|reason| failed()(io::Error::other(reason.to_string())))?;
    }
    let needed = is_needed.iter().filter(|is_needed| **is_needed).count() as u64;
    Ok(image.packed_len_bytes(needed).map_err(DiskError::from)?.unwrap_or(0))
}
