//! An open image of a cluster as a store: requests of engines go by the lane, everything else
//! waits.

use crate::{
    error::{RbdError, Result},
    image::{Image, KEEPS_SPACE},
    lane::RbdLane,
    uri::RbdUri,
};
use diskwright_store::{AtRisk, DataFile, FileRange, Lane, Store, StoreSnapshot, Zeroing};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// How much of an image is asked for data at once.
const WINDOW_BYTES: u64 = 4 << 30;

/// An open image; see the module documentation.
#[derive(Debug)]
pub struct RbdStore {
    name: PathBuf,
    image: Arc<Image>,
    lane: Arc<RbdLane>,
    identity: (u64, u64),
    snapshot: Option<String>,
    writable: bool,
    /// Completed writes may be in the memory of this process.
    is_cached: bool,
}

/// Two numbers that tell an image from all others, as device and inode do.
pub(crate) fn numbers(fsid: &str, id: &str, snapshot: Option<&str>) -> (u64, u64) {
    let hash = |parts: &[&str]| {
        let mut hasher = DefaultHasher::new();
        parts.hash(&mut hasher);
        hasher.finish()
    };
    (hash(&[fsid]), hash(&[id, snapshot.unwrap_or_default()]))
}

impl RbdStore {
    /// Opens an image.
    ///
    /// # Errors
    /// See [`RbdError`].
    pub fn open(uri: &RbdUri, writable: bool) -> Result<Self> {
        let failed = |doing| move |source| RbdError::Image { name: uri.to_string(), doing, source };
        let image = Arc::new(Image::open(uri, writable)?);
        let id = image.id().map_err(failed("identify"))?;
        let cluster = &image.pool.cluster;
        let identity = numbers(&cluster.fsid, &id, uri.snapshot.as_deref());
        let is_cached = writable && cluster.setting("rbd_cache").is_none_or(|setting| setting != "false");
        let lane = RbdLane::new(Arc::clone(&image), uri.connection.timeout).map_err(failed("watch the requests of"))?;
        let (name, snapshot) = (uri.to_string().into(), uri.snapshot.clone());
        Ok(Self { name, image, lane: Arc::new(lane), identity, snapshot, writable, is_cached })
    }

    fn check_end(&self, offset_bytes: u64, len: usize) -> io::Result<u64> {
        offset_bytes.checked_add(len as u64).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    fn check_writable(&self) -> io::Result<()> {
        if self.writable { Ok(()) } else { Err(io::ErrorKind::ReadOnlyFilesystem.into()) }
    }
}

impl Store for RbdStore {
    fn name(&self) -> &Path {
        &self.name
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.image.size_bytes()
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let end_bytes = self.check_end(offset_bytes, buf.len())?;
        if buf.is_empty() {
            return Ok(());
        }
        if end_bytes > self.image.size_bytes()? || self.image.read(buf, offset_bytes)? < buf.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.check_writable()?;
        let end_bytes = self.check_end(offset_bytes, buf.len())?;
        if end_bytes > self.image.size_bytes()? {
            self.image.resize(end_bytes)?;
        }
        if buf.is_empty() { Ok(()) } else { self.image.write(buf, offset_bytes).map(|_| ()) }
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.check_writable()?;
        self.image.resize(len_bytes)
    }

    fn allocate(&self, range: FileRange) -> io::Result<()> {
        self.check_writable()?;
        let end_bytes = range.offset_bytes.checked_add(range.len_bytes).ok_or(io::ErrorKind::InvalidInput)?;
        // A cluster has no space that is promised.
        if end_bytes > self.image.size_bytes()? { self.image.resize(end_bytes) } else { Ok(()) }
    }

    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.check_writable()?;
        let flags = if how == Zeroing::Keep { KEEPS_SPACE } else { 0 };
        if range.len_bytes == 0 { Ok(()) } else { self.image.write_zeroes(range, flags) }
    }

    fn sync_data(&self) -> io::Result<()> {
        self.image.flush()
    }

    fn data_file(&self) -> Option<DataFile<'_>> {
        None
    }

    fn lane(&self) -> Option<Arc<dyn Lane>> {
        Some(Arc::clone(&self.lane) as Arc<dyn Lane>)
    }

    fn at_risk(&self) -> AtRisk {
        if self.is_cached { AtRisk::Now } else { AtRisk::Never }
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<FileRange>> {
        let size_bytes = self.image.size_bytes()?;
        let mut start = offset_bytes;
        while start < size_bytes {
            let len_bytes = WINDOW_BYTES.min(size_bytes - start);
            if let Some(found) = self.image.data_in(FileRange { offset_bytes: start, len_bytes })?.first() {
                return Ok(Some(*found));
            }
            start += len_bytes;
        }
        Ok(None)
    }

    fn snapshots(&self) -> io::Result<Vec<StoreSnapshot>> {
        self.image.snapshots()
    }

    /// By the cluster's own records, if `other` is a snapshot of this image that is older than what
    /// is open here.
    fn changed_since(&self, other: &dyn Store, range: FileRange) -> io::Result<Option<Vec<FileRange>>> {
        let Some(snapshot) = RbdUri::parse(other.name()).ok().and_then(|uri| uri.snapshot) else { return Ok(None) };
        let numbers = numbers(&self.image.pool.cluster.fsid, &self.image.id()?, Some(&snapshot));
        if other.identity() != Some(numbers) {
            return Ok(None);
        }
        let known = self.image.snapshots()?;
        let number = |name: &str| known.iter().find(|known| known.name == name).map(|known| known.id);
        let open = self.snapshot.as_deref().map_or(Some(u64::MAX), number);
        if number(&snapshot).zip(open).is_none_or(|(other, open)| other >= open) {
            return Ok(None);
        }
        // What lies behind the end of this one is not in its records.
        let end_bytes = self.image.size_bytes()?.clamp(range.offset_bytes, range.offset_bytes + range.len_bytes);
        let within = FileRange { len_bytes: end_bytes - range.offset_bytes, ..range };
        let mut changed = match within.len_bytes {
            0 => Vec::new(),
            _ => self.image.changed_in(within, &snapshot)?,
        };
        if within.len_bytes < range.len_bytes {
            changed.push(FileRange { offset_bytes: end_bytes, len_bytes: range.len_bytes - within.len_bytes });
        }
        Ok(Some(changed))
    }

    fn identity(&self) -> Option<(u64, u64)> {
        Some(self.identity)
    }

    /// Whether the exclusive lock is held. An image without that feature has none.
    fn is_locked(&self) -> bool {
        !self.writable || self.image.is_locked && self.image.has_lock()
    }
}
