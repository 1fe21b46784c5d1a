//! An open image: the calls of librbd that are safe to make, on memory that lives as long as they
//! need it. Calls that block are for threads that may wait.
//!
//! The cluster removes no image that is open. A file is removed while it is open, and then goes
//! when it is closed; merges rely on that. So an image that this process has open is removed at its
//! last close here ([`remove`]). If the process dies before, the image stays.
//!
//! Lock: `OPEN`, held for look-ups only.

#![allow(unsafe_code, reason = "functions of a C library")]

use crate::{
    cluster::{Pool, c_string, error_of},
    error::{RbdError, Result},
    functions::{Functions, Handle, SnapInfo},
    uri::RbdUri,
};
use diskwright_store::{FileRange, StoreSnapshot};
use std::{
    collections::HashMap,
    ffi::{CStr, c_int, c_void},
    fmt, io, ptr,
    sync::{
        Arc, LazyLock, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
const EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
const LOCK_MODE: c_int = 0;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
pub(crate) const KEEPS_SPACE: c_int = 1;

/// What the opens of one image in this process share: whether it is to be removed.
type Doom = Arc<AtomicBool>;

/// The images that are open, by cluster, pool, namespace and name.
static OPEN: LazyLock<Mutex<HashMap<[String; 4], Weak<AtomicBool>>>> = LazyLock::new(Mutex::default);

fn key(pool: &Pool, uri: &RbdUri) -> [String; 4] {
    let RbdUri { pool: name, namespace, image, .. } = uri.clone();
    [pool.cluster.fsid.clone(), name, namespace.unwrap_or_default(), image]
}

fn doom_of(key: [String; 4]) -> Doom {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.retain(|_, doom| doom.strong_count() > 0);
    if let Some(doom) = open.get(&key).and_then(Weak::upgrade) {
        return doom;
    }
    let doom = Doom::default();
    open.insert(key, Arc::downgrade(&doom));
    doom
}

/// Removes an image: now, or at its last close if this process has it open.
///
/// # Errors
/// The cluster's error, if another client has it open, for example.
pub(crate) fn remove(pool: &Pool, uri: &RbdUri) -> io::Result<()> {
    // Taken before, so that an image that is closed meanwhile is not missed.
    let doom = doom_of(key(pool, uri));
    match pool.remove(&uri.image) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Arc::strong_count(&doom) > 1 => {
            doom.store(true, Ordering::Release);
            Ok(())
        }
        result => result,
    }
}

/// An open image; see the module documentation.
pub(crate) struct Image {
    pub(crate) name: String,
    pub(crate) pool: Arc<Pool>,
    pub(crate) handle: Handle,
    /// The exclusive lock is held.
    pub(crate) is_locked: bool,
    /// Its name in the pool.
    image: String,
    doom: Doom,
}

// SAFETY: an `rbd_image_t` may be used by all threads at once (rbd/librbd.h).
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Image {}", self.name)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: the lane holds the image while requests are under way, so none is. It flushes,
        // and gives the lock back.
        let code = unsafe { (self.functions().rbd_close)(self.handle) };
        if code < 0 {
            tracing::warn!("{}: it was not closed cleanly: {}", self.name, error_of(code));
        }
        if self.doom.load(Ordering::Acquire)
            && Arc::strong_count(&self.doom) == 1
            && let Err(error) = self.pool.remove(&self.image)
        {
            tracing::warn!("{}: it could not be removed: {error}; `rbd rm` removes it", self.name);
        }
    }
}

fn done(code: c_int) -> io::Result<()> {
    if code < 0 { Err(error_of(code)) } else { Ok(()) }
}

/// The result of a call that returns a length.
pub(crate) fn length(code: isize) -> io::Result<usize> {
    usize::try_from(code).map_err(|_| error_of(c_int::try_from(code).unwrap_or(-5)))
}

impl Image {
    /// Opens an image. For writing it takes the exclusive lock, if the image has that feature.
    ///
    /// # Errors
    /// [`RbdError::Missing`], [`RbdError::Locked`], [`RbdError::Snapshot`], [`RbdError::Image`]; as
    /// [`Pool::of`].
    pub(crate) fn open(uri: &RbdUri, writable: bool) -> Result<Self> {
        if writable && uri.snapshot.is_some() {
            return Err(RbdError::Snapshot { name: uri.to_string() });
        }
        let pool = Pool::of(uri)?;
        let functions = pool.cluster.functions;
        let open = if writable { functions.rbd_open } else { functions.rbd_open_read_only };
        let (name, snapshot) = (c_string(&uri.image), uri.snapshot.as_deref().map(c_string));
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |snapshot| snapshot.as_ptr());
        let mut handle = ptr::null_mut();
        // SAFETY: a pool; names that end with NUL; `handle` is written before the call returns 0.
        let opened = done(unsafe { open(pool.handle, name.as_ptr(), &mut handle, snapshot) });
        opened.map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => RbdError::Missing { name: uri.to_string(), what: "image or snapshot" },
            _ => RbdError::Image { name: uri.to_string(), doing: "open", source },
        })?;
        let doom = doom_of(key(&pool, uri));
        let (name, image) = (uri.to_string(), uri.image.clone());
        let mut image = Self { name, pool, handle, is_locked: false, image, doom };
        if writable {
            image.lock()?;
        }
        Ok(image)
    }

    pub(crate) fn functions(&self) -> &'static Functions {
        self.pool.cluster.functions
    }

    fn lock(&mut self) -> Result<()> {
        let failed = |name: &str, source| RbdError::Image { name: name.into(), doing: "lock", source };
        let mut features = 0;
        // SAFETY: an open image.
        done(unsafe { (self.functions().rbd_get_features)(self.handle, &mut features) })
            .map_err(|source| failed(&self.name, source))?;
        if features & EXCLUSIVE_LOCK == 0 {
            return Ok(());
        }
        // SAFETY: an open image.
        let locked = done(unsafe { (self.functions().rbd_lock_acquire)(self.handle, LOCK_MODE) });
        match locked.map_err(|error| error.raw_os_error()) {
            Ok(()) => self.is_locked = true,
            // EROFS, EBUSY, EAGAIN: another client has it and keeps it.
            Err(Some(30 | 16 | 11)) => return Err(RbdError::Locked { name: self.name.clone() }),
            Err(code) => return Err(failed(&self.name, io::Error::from_raw_os_error(code.unwrap_or(5)))),
        }
        Ok(())
    }

    /// Whether the exclusive lock is still held, if it was taken.
    pub(crate) fn has_lock(&self) -> bool {
        let mut is_owner = 0;
        // SAFETY: an open image.
        let code = unsafe { (self.functions().rbd_is_exclusive_lock_owner)(self.handle, &mut is_owner) };
        !self.is_locked || code == 0 && is_owner != 0
    }

    pub(crate) fn size_bytes(&self) -> io::Result<u64> {
        let mut size_bytes = 0;
        // SAFETY: an open image.
        done(unsafe { (self.functions().rbd_get_size)(self.handle, &mut size_bytes) })?;
        Ok(size_bytes)
    }

    pub(crate) fn resize(&self, size_bytes: u64) -> io::Result<()> {
        // SAFETY: an open image.
        done(unsafe { (self.functions().rbd_resize)(self.handle, size_bytes) })
    }

    /// The id by which the cluster knows the image, whatever its name.
    pub(crate) fn id(&self) -> io::Result<String> {
        let mut id = [0_u8; 128];
        // SAFETY: the length of the buffer is given.
        done(unsafe { (self.functions().rbd_get_id)(self.handle, id.as_mut_ptr().cast(), id.len()) })?;
        Ok(CStr::from_bytes_until_nul(&id).map(|id| id.to_string_lossy().into_owned()).unwrap_or_default())
    }

    /// Reads at an offset; the range lies within the image.
    pub(crate) fn read(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        // SAFETY: the call returns when the buffer was filled.
        length(unsafe { (self.functions().rbd_read)(self.handle, offset_bytes, buf.len(), buf.as_mut_ptr().cast()) })
    }

    /// Writes at an offset; the range lies within the image.
    pub(crate) fn write(&self, buf: &[u8], offset_bytes: u64) -> io::Result<usize> {
        // SAFETY: the call returns when the buffer was read.
        length(unsafe { (self.functions().rbd_write)(self.handle, offset_bytes, buf.len(), buf.as_ptr().cast()) })
    }

    pub(crate) fn write_zeroes(&self, range: FileRange, flags: c_int) -> io::Result<()> {
        let len = usize::try_from(range.len_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: an open image.
        length(unsafe { (self.functions().rbd_write_zeroes)(self.handle, range.offset_bytes, len, flags, 0) })
            .map(|_| ())
    }

    pub(crate) fn flush(&self) -> io::Result<()> {
        // SAFETY: an open image.
        done(unsafe { (self.functions().rbd_flush)(self.handle) })
    }

    /// The parts of a range that may hold data, by the cluster's own records: ascending, and not
    /// touching. Whole objects where the image has an object map.
    pub(crate) fn data_in(&self, range: FileRange) -> io::Result<Vec<FileRange>> {
        self.iterate(range, None)
    }

    /// The parts of a range that were written or discarded since a snapshot, in the same order.
    pub(crate) fn changed_in(&self, range: FileRange, snapshot: &str) -> io::Result<Vec<FileRange>> {
        self.iterate(range, Some(&c_string(snapshot)))
    }

    fn iterate(&self, range: FileRange, since: Option<&CStr>) -> io::Result<Vec<FileRange>> {
        struct Found {
            ranges: Vec<FileRange>,
            /// Ranges that do not exist any more count too.
            takes_all: bool,
        }
        unsafe extern "C" fn note(offset_bytes: u64, len: usize, exists: c_int, found: *mut c_void) -> c_int {
            // SAFETY: the argument of the call below, which nobody else uses meanwhile.
            let found = unsafe { &mut *found.cast::<Found>() };
            if exists != 0 || found.takes_all {
                match found.ranges.last_mut().filter(|last| last.offset_bytes + last.len_bytes == offset_bytes) {
                    Some(last) => last.len_bytes += len as u64,
                    None => found.ranges.push(FileRange { offset_bytes, len_bytes: len as u64 }),
                }
            }
            0
        }
        let mut found = Found { ranges: Vec::new(), takes_all: since.is_some() };
        // Data are looked for by whole objects, which needs no request where there is an object
        // map. Changes are wanted exactly.
        let whole_objects = u8::from(since.is_none());
        // SAFETY: `note` gets `found`, which outlives the call; the name, if any, ends with NUL.
        done(unsafe {
            (self.functions().rbd_diff_iterate2)(
                self.handle,
                since.map_or(ptr::null(), CStr::as_ptr),
                range.offset_bytes,
                range.len_bytes,
                1,
                whole_objects,
                note,
                ptr::from_mut(&mut found).cast(),
            )
        })?;
        Ok(found.ranges)
    }

    /// The snapshots of the image.
    pub(crate) fn snapshots(&self) -> io::Result<Vec<StoreSnapshot>> {
        let mut room: c_int = 16;
        loop {
            let empty = SnapInfo { id: 0, size: 0, name: ptr::null() };
            let mut infos = vec![empty; room as usize + 1];
            // SAFETY: there is room for as many as are said, and one that ends the list.
            let count = unsafe { (self.functions().rbd_snap_list)(self.handle, infos.as_mut_ptr(), &mut room) };
            if count == -rustix::io::Errno::RANGE.raw_os_error() {
                continue;
            }
            done(count)?;
            let found = infos.iter().take(count as usize).map(|info| {
                // SAFETY: the library has written the name, which lives until the list is given
                // back.
                let name = unsafe { CStr::from_ptr(info.name) }.to_string_lossy().into_owned();
                StoreSnapshot { id: info.id, name, size_bytes: info.size }
            });
            let found = found.collect();
            // SAFETY: the list of the call above.
            unsafe { (self.functions().rbd_snap_list_end)(infos.as_mut_ptr()) };
            return Ok(found);
        }
    }
}
