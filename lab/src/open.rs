//! Opens the targets that a user names: images, raw files, block devices, exports of NBD servers,
//! namespaces of NVMe/TCP targets, and `null:`.
//!
//! `diskwright_image::probe` decides which format a file has: its name and contents must agree, or
//! the user gives the format. Images (all formats but raw) are opened as virtual disks with their
//! parents, and a raw disk in several files as one disk. A block device is always raw, because its
//! contents may look like an image by accident. An export is raw too, because its server has
//! already opened the image.

use crate::{
    LabError, Result, backing,
    progress::{Progress, Step},
};
use diskwright_disk::{Disk, OpenOptions, Opened, PartRole, Place, Remote, parts_of};
use diskwright_image::{Format, probe::probe};
use diskwright_load::{
    Close, NullDevice, OpenTarget,
    job::{Bytes, Caching},
};
use diskwright_stats::numbers::short_size;
use diskwright_store::{BlockDevice, CacheMode, Files, LockMode, RawDevice};
use std::{error::Error, path::Path, sync::Arc};

/// Size of a `null:` target without a size.
const NULL_BYTES: u64 = 1 << 40;

/// Access, cache mode and options with which a target is opened.
#[derive(Debug, Clone, Default)]
pub struct OpenHow {
    /// Whether the target is opened for writing as well.
    pub writable: bool,
    /// The requested cache mode. The target may get another one.
    pub cache: Caching,
    /// All other options of a disk: format, permitted parents, what may be written. Its fields
    /// `writable` and `cache` are ignored.
    pub disk: OpenOptions,
}

impl OpenHow {
    /// The options for `Disk::open`.
    fn options(&self) -> OpenOptions {
        OpenOptions { writable: self.writable, cache: self.cache.mode(), ..self.disk.clone() }
    }
}

/// The `Close` of a virtual disk.
pub(crate) fn closes(disk: Arc<Disk>) -> Arc<dyn Close> {
    Arc::new(Closer(disk))
}

/// Closes a virtual disk. A flush alone would leave its files open and its log unclean.
#[derive(Debug)]
struct Closer(Arc<Disk>);

impl Close for Closer {
    fn close(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(self.0.close()?)
    }
}

/// Whether `spec` is the URI of a disk of a server.
pub fn names_export(spec: &str) -> bool {
    Place::is_on_server(spec.as_ref())
}

/// Opens the target `spec`: a path, the URI of a disk of a server, or `null:`, optionally with a
/// size (`null:64G`; default 1T).
///
/// # Errors
/// [`LabError::Open`] and [`LabError::Disk`]; [`LabError::BadOptions`] for a `null:` that is too
/// small.
pub fn open(spec: &str, how: &OpenHow) -> Result<OpenTarget> {
    if let Some(size) = spec.strip_prefix("null:") {
        return open_null(spec, size, how.cache);
    }
    if names_export(spec) {
        return open_export(spec, how);
    }
    let path = Path::new(spec);
    let mut closes: Option<Arc<dyn Close>> = None;
    let (kind, mode, device): (String, CacheMode, Arc<dyn BlockDevice>) = match format_of(path, how)? {
        TargetKind::BlockDevice => {
            let device = RawDevice::open(path, how.writable, how.cache.mode())?;
            ("block device".into(), device.cache_mode(), Arc::new(device))
        }
        TargetKind::RawFile => {
            let device = RawDevice::open(path, how.writable, how.cache.mode())?;
            ("raw file".into(), device.cache_mode(), Arc::new(device))
        }
        TargetKind::Image(format) => {
            let opened = Disk::open(path, &how.options())?;
            let top = opened.layers()[0].image.info().disk_type;
            let mode = top_cache_mode(&opened);
            closes = Some(self::closes(Arc::clone(&opened)));
            let kind = match format {
                Format::Raw => "raw files".into(),
                _ => format!("{format} {top}").to_lowercase(),
            };
            (kind, mode, opened)
        }
    };
    Ok(OpenTarget {
        name: spec.to_owned(),
        kind,
        path: Some(path.to_owned()),
        device,
        closes,
        cache: how.cache.in_force(mode),
        behind: backing::of_device(path),
        contents: None,
    })
}

fn open_export(spec: &str, how: &OpenHow) -> Result<OpenTarget> {
    let opened = Opened::open(Path::new(spec), &how.options())?;
    let (kind, behind) = match &opened {
        Opened::Remote(Remote::Export(export)) => ("nbd export", Some(backing::of_export(export))),
        Opened::Remote(Remote::Namespace(namespace)) => ("nvme namespace", Some(backing::of_namespace(namespace))),
        Opened::Remote(Remote::Unit(unit)) => ("iscsi unit", Some(backing::of_unit(unit))),
        Opened::Disk(_) => ("nbd export", None),
    };
    Ok(OpenTarget {
        name: spec.to_owned(),
        kind: kind.into(),
        path: None,
        device: opened.shared(),
        closes: None,
        cache: how.cache,
        behind,
        contents: None,
    })
}

fn open_null(spec: &str, size: &str, cache: Caching) -> Result<OpenTarget> {
    let bad = |what: String| LabError::BadOptions {
        what,
        hint: format!("use null: or, for example, null:{}", short_size(NULL_BYTES)),
    };
    let size_bytes = match size {
        "" => NULL_BYTES,
        size => size.parse::<Bytes>().map_err(|error| bad(format!("{spec}: {error}")))?.0,
    };
    if size_bytes < 4096 {
        return Err(bad(format!("{spec}: a size of {size_bytes} bytes is below 4096")));
    }
    Ok(OpenTarget {
        name: spec.to_owned(),
        kind: "null".into(),
        path: None,
        device: Arc::new(NullDevice::new(size_bytes)),
        closes: None,
        cache,
        behind: None,
        contents: None,
    })
}

/// Flushes and closes all `targets`, also after a failure. The answer of `progress` is ignored.
///
/// # Errors
/// The first failure. The figures are valid, but written data may be lost.
pub fn close(targets: &[OpenTarget], progress: &mut dyn Progress) -> Result<()> {
    let mut outcome = Ok(());
    for (number, target) in targets.iter().enumerate() {
        if target.keeps_writes() {
            let (done, total) = (number as u64, targets.len() as u64);
            progress.step(Step { phase: "close", done, total, message: &target.name });
        }
        outcome = outcome.and(target.close().map_err(LabError::from));
    }
    outcome
}

enum TargetKind {
    BlockDevice,
    RawFile,
    /// Opened by `Disk`: a format other than raw, or a raw disk in several files.
    Image(Format),
}

/// The given format, or else the format found by probing the file.
fn format_of(path: &Path, how: &OpenHow) -> Result<TargetKind> {
    let options = diskwright_store::OpenOptions { lock: LockMode::None, ..diskwright_store::OpenOptions::default() };
    let store = Files::default().open(path, &options)?;
    if store.is_block_device() {
        return Ok(TargetKind::BlockDevice);
    }
    let format = match how.disk.format {
        Some(format) => format,
        None => probe(&*store, how.writable).map_err(diskwright_disk::DiskError::from)?.format,
    };
    if format == Format::Raw && parts_of(&Files::default(), path)? == PartRole::Alone {
        return Ok(TargetKind::RawFile);
    }
    Ok(TargetKind::Image(format))
}

/// The cache mode of the top layer. If any of several files uses the page cache, the mode is
/// [`CacheMode::PageCache`].
pub(crate) fn top_cache_mode(disk: &Disk) -> CacheMode {
    let layers = disk.layers();
    let stores = layers.first().map_or(&[][..], |layer| layer.image.stores());
    if !stores.is_empty() && stores.iter().all(|store| store.bypasses_page_cache()) {
        CacheMode::Direct
    } else {
        CacheMode::PageCache
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_disk::{CreateRequest, create};
    use diskwright_load::{
        Job,
        job::{Contents, Load, Span},
        record::End,
        run::{RunOptions, Unwatched, run},
    };
    use std::{collections::BTreeSet, fs, io, sync::Mutex};

    #[derive(Debug)]
    struct Closes {
        name: &'static str,
        fails: bool,
        closed: Arc<Mutex<Vec<&'static str>>>,
    }

    impl Close for Closes {
        fn close(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
            self.closed.lock().unwrap().push(self.name);
            if self.fails { Err(io::Error::other(format!("{} is broken", self.name)).into()) } else { Ok(()) }
        }
    }

    #[test]
    fn all_targets_are_closed_and_the_first_failure_is_reported() {
        let closed = Arc::new(Mutex::new(Vec::new()));
        let target = |name: &'static str, fails| OpenTarget {
            kind: "raw file".into(),
            closes: Some(Arc::new(Closes { name, fails, closed: Arc::clone(&closed) })),
            ..OpenTarget::new(name, NullDevice::new(1 << 20))
        };
        let targets = [target("a", false), target("b", true), target("c", true), target("d", false)];
        let mut reported = Vec::new();
        // The same if the user stops it.
        let error = close(&targets, &mut |step: Step<'_>| {
            reported.push(step.message.to_owned());
            false
        });
        assert_eq!(error.unwrap_err().to_string(), "b is broken");
        assert_eq!((closed.lock().unwrap().as_slice(), reported.len()), (["a", "b", "c", "d"].as_slice(), 4));
    }

    #[test]
    fn files_and_images_are_opened_for_what_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let raw = dir.path().join("disk.raw");
        fs::write(&raw, vec![7; 1 << 20]).unwrap();
        let image = dir.path().join("disk.vhdx");
        create(&image, &CreateRequest { size_bytes: Some(8 << 20), ..CreateRequest::default() }).unwrap();
        let how = OpenHow { writable: true, cache: Caching::Cached, ..OpenHow::default() };
        let targets = [&raw, &image].map(|path| open(path.to_str().unwrap(), &how).unwrap());
        assert_eq!(targets.each_ref().map(|target| target.kind.as_str()), ["raw file", "vhdx dynamic"]);
        let load = Load { read_percent: 50.0, working_set: Bytes(1 << 20), ..Load::default() };
        let mut job = Job::simple("test", load, Span::default(), Span::from_secs(1));
        job.phases[0].count = Some(500);
        job.contents = Contents::Zero;
        let found = run(&job, &targets, &RunOptions::default(), &Unwatched).unwrap();
        assert_eq!(found.head.end, End::Complete);
        assert_eq!(found.targets.iter().map(|target| target.size_bytes).collect::<Vec<_>>(), [1 << 20, 8 << 20]);
        assert!(found.targets[0].place.is_some() && found.phases[0].cpu.tsc_hz > 0.0);
        let blocks = fs::read(&raw).unwrap();
        let written: BTreeSet<bool> = blocks.chunks(4096).map(|block| block.iter().all(|byte| *byte == 0)).collect();
        assert_eq!(written.len(), 2, "some blocks were zeroed, others not");
    }

    #[test]
    fn null_has_the_size_that_it_is_given() {
        let size = |spec: &str| open(spec, &OpenHow::default()).map(|target| target.device.geometry().size_bytes);
        assert_eq!((size("null:").unwrap(), size("null:64G").unwrap()), (1 << 40, 64 << 30));
        for wrong in ["null:x", "null:12"] {
            assert!(matches!(size(wrong), Err(LabError::BadOptions { .. })), "{wrong}");
        }
        assert!(matches!(size("/nonexistent/disk"), Err(LabError::Open(_))));
    }
}
