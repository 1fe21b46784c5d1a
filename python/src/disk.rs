//! The class `Disk`.

use crate::{
    error::{Failure, for_keywords, refused},
    options::{cache_mode, reading},
    outcomes::TrackPoint,
    values::{Extent, Layer, layers_of},
    worker::{self, Requests},
};
use diskwright_lib::{Disk as LibraryDisk, Geometry, OpenOptions, Opened, ParentPolicy};
use pyo3::{prelude::*, pybacked::PyBackedBytes, types::PyBytes};
use std::{
    path::PathBuf,
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

/// Bytes whose extents are asked for at a time, so that a signal is noticed between two.
const MAP_WINDOW_BYTES: u64 = 64 << 30;

/// A virtual disk, open: a chain of images, or an NBD export.
///
/// The disk is closed by `close()`, or when it is garbage; only `close()` reports a failure.
#[pyclass(subclass, frozen, module = "diskwright._native")]
pub(crate) struct Disk {
    path: PathBuf,
    warnings: Vec<String>,
    /// The process that opened it: a child by fork() has no worker.
    process_id: u32,
    state: Mutex<State>,
}

enum State {
    Open(Open),
    /// The files are closed and unlocked. The sizes are the last ones.
    Closed(Geometry),
}

struct Open {
    opened: Opened,
    requests: Requests,
    thread: JoinHandle<()>,
}

impl Open {
    fn close(self) -> Result<(), Failure> {
        drop(self.requests);
        // The worker ends when the requests of other threads are done.
        let joined = self.thread.join();
        self.opened.close()?;
        joined.map_err(|_| refused("the thread of the disk panicked".into()))
    }
}

impl Disk {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn geometry(&self) -> Geometry {
        match &*self.state() {
            State::Open(open) => open.opened.device().geometry(),
            State::Closed(geometry) => *geometry,
        }
    }

    /// What is open, for this call: a close by another thread waits for the requests.
    ///
    /// # Errors
    /// Where the disk is closed, or was opened by the process of which this one is a fork.
    fn open(&self) -> Result<(Opened, Requests), Failure> {
        if process::id() != self.process_id {
            let path = self.path.display();
            return Err(refused(format!("{path}: this disk was opened before fork(); open it again in the child")));
        }
        match &*self.state() {
            State::Open(open) => Ok((open.opened.clone(), open.requests.clone())),
            State::Closed(_) => Err(refused(format!("{}: the disk is closed", self.path.display()))),
        }
    }

    fn requests(&self) -> Result<Requests, Failure> {
        self.open().map(|(_, requests)| requests)
    }

    /// The disk, for what an export cannot do.
    fn file_disk(&self, what: &str) -> Result<Arc<LibraryDisk>, Failure> {
        let (opened, _requests) = self.open()?;
        let disk = opened.disk().cloned();
        disk.ok_or_else(|| refused(format!("{}: only a disk in a file can {what}", self.path.display())))
    }

    fn take(&self) -> Option<Open> {
        let geometry = self.geometry();
        match std::mem::replace(&mut *self.state(), State::Closed(geometry)) {
            State::Open(open) => Some(open),
            State::Closed(_) => None,
        }
    }
}

#[pymethods]
impl Disk {
    #[new]
    #[pyo3(signature = (
        path, writable=false, format=None, *, direct=false, force_share=false, allow_parent_dirs=Vec::new(),
        allow_any_parent=false, allow_parent_write=false, ignore_parent_timestamp=false, detect_zeroes=false,
        map_memory=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "they are keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        writable: bool,
        format: Option<&str>,
        direct: bool,
        force_share: bool,
        allow_parent_dirs: Vec<PathBuf>,
        allow_any_parent: bool,
        allow_parent_write: bool,
        ignore_parent_timestamp: bool,
        detect_zeroes: bool,
        map_memory: Option<u64>,
    ) -> Result<Self, Failure> {
        let options = reading(format, force_share, allow_parent_dirs, allow_any_parent)?;
        let options = OpenOptions {
            writable,
            cache: cache_mode(direct),
            allow_parent_write,
            detect_zeroes,
            map_memory_bytes: map_memory,
            parents: ParentPolicy { ignore_timestamp: ignore_parent_timestamp, ..options.parents },
            ..options
        };
        py.detach(|| {
            let opened = Opened::open(&path, &options)?;
            let (requests, thread) = worker::start(opened.shared())?;
            let warnings = opened.warnings().iter().map(for_keywords).collect();
            let state = Mutex::new(State::Open(Open { opened, requests, thread }));
            Ok(Self { path, warnings, process_id: process::id(), state })
        })
    }

    /// The path or URI by which it was opened.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Size in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.geometry().size_bytes
    }

    /// Logical sector in bytes.
    #[getter]
    fn sector_size(&self) -> u32 {
        self.geometry().logical_sector_bytes
    }

    /// Whether it can be written.
    #[getter]
    fn writable(&self) -> bool {
        !self.geometry().read_only
    }

    /// What the user should know about how it was opened, a sentence each.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.warnings.clone()
    }

    /// Whether close() was called.
    #[getter]
    fn closed(&self) -> bool {
        matches!(*self.state(), State::Closed(_))
    }

    /// The images of the chain, the top first; none for an export.
    #[getter]
    fn layers(&self, py: Python<'_>) -> Result<Vec<Layer>, Failure> {
        py.detach(|| self.open().map(|(opened, _)| layers_of(&opened)))
    }

    /// Read `length` bytes at `offset`; fewer at the end of the disk.
    fn read<'py>(&self, py: Python<'py>, offset: u64, length: usize) -> Result<Bound<'py, PyBytes>, Failure> {
        let left_bytes = self.size().saturating_sub(offset);
        let len = usize::try_from(left_bytes).unwrap_or(usize::MAX).min(length);
        let bytes = py.detach(|| {
            let mut bytes = Vec::new();
            bytes
                .try_reserve_exact(len)
                .map_err(|_| refused(format!("there is no memory for {len} bytes; read less at a time")))?;
            Ok::<_, Failure>(self.requests()?.run(move |stream| {
                bytes.resize(len, 0);
                let read = stream.read_at(offset, &mut bytes)?;
                bytes.truncate(read);
                Ok(bytes)
            })?)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Write all of `data` at `offset`.
    fn write(&self, py: Python<'_>, offset: u64, data: PyBackedBytes) -> Result<(), Failure> {
        py.detach(|| Ok(self.requests()?.run(move |stream| stream.write_at(offset, &data))?))
    }

    /// Make all writes that have returned durable.
    fn flush(&self, py: Python<'_>) -> Result<(), Failure> {
        py.detach(|| Ok(self.requests()?.run(std::io::Write::flush)?))
    }

    /// Make a range read as zeros, and give its space back.
    fn discard(&self, py: Python<'_>, offset: u64, length: u64) -> Result<(), Failure> {
        py.detach(|| Ok(self.requests()?.run(move |stream| stream.discard(offset, length))?))
    }

    /// Make the disk larger.
    fn grow(&self, py: Python<'_>, size: u64) -> Result<(), Failure> {
        py.detach(|| Ok(self.file_disk("grow")?.grow(size)?))
    }

    /// Track from now on which ranges change, since a point of this name.
    fn start_tracking(&self, py: Python<'_>, name: &str) -> Result<(), Failure> {
        py.detach(|| Ok(self.file_disk("be tracked")?.start_tracking(name)?))
    }

    /// End a point.
    fn stop_tracking(&self, py: Python<'_>, name: &str) -> Result<(), Failure> {
        py.detach(|| Ok(self.file_disk("be tracked")?.stop_tracking(name)?))
    }

    /// The points, the oldest first.
    fn track_points(&self, py: Python<'_>) -> Result<Vec<TrackPoint>, Failure> {
        let points = py.detach(|| Ok::<_, Failure>(self.file_disk("be tracked")?.points()?))?;
        Ok(points.into_iter().map(TrackPoint::from).collect())
    }

    /// The ranges that have changed since a point, as pairs of start and length.
    fn changed_since(&self, py: Python<'_>, name: &str) -> Result<Vec<(u64, u64)>, Failure> {
        let changed = py.detach(|| Ok::<_, Failure>(self.file_disk("be tracked")?.changed_since(name)?))?;
        Ok(changed.ranges().map(|range| (range.start, range.end - range.start)).collect())
    }

    /// What each range holds, in order, without gaps.
    #[pyo3(signature = (offset=0, length=None))]
    fn map(&self, py: Python<'_>, offset: u64, length: Option<u64>) -> Result<Vec<Extent>, Failure> {
        let size_bytes = self.size();
        let end_bytes = offset.saturating_add(length.unwrap_or(size_bytes)).min(size_bytes);
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < end_bytes {
            py.check_signals().map_err(Failure::Python)?;
            let len_bytes = MAP_WINDOW_BYTES.min(end_bytes - at);
            let mut found = Vec::new();
            py.detach(|| {
                let (opened, _requests) = self.open()?;
                Ok::<_, Failure>(opened.device().extents(at, len_bytes, &mut found)?)
            })?;
            for extent in found.into_iter().map(Extent::from) {
                match extents.last_mut() {
                    Some(last) if last.continues_in(&extent) => last.length += extent.length,
                    _ => extents.push(extent),
                }
            }
            at += len_bytes;
        }
        Ok(extents)
    }

    /// Flush and close. A disk that is closed stays closed.
    fn close(&self, py: Python<'_>) -> Result<(), Failure> {
        py.detach(|| {
            if self.closed() {
                return Ok(());
            }
            self.requests()?;
            self.take().map_or(Ok(()), Open::close)
        })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let Some(open) = self.take() else { return };
        if process::id() == self.process_id {
            // Nobody could be told.
            let _ = open.close();
        } else {
            // The worker is not in this process, and what is open belongs to the parent.
            std::mem::forget(open);
        }
    }
}
