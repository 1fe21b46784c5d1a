//! A connection to a cluster, and pools on it. The images of a process with the same settings share
//! one connection, which ends with the last of them.
//!
//! The configuration is read in the order of Ceph's tools: the file (`conf=` of the name,
//! `CEPH_CONF`, or the default places), then `CEPH_ARGS`, then the timeouts of the name. The user
//! is `id=` of the name, or `--id`, `--user`, `-n`, `--name` in `CEPH_ARGS`, or `admin`.

#![allow(unsafe_code, reason = "functions of a C library")]

use crate::{
    error::{RbdError, Result},
    functions::{Functions, Handle, functions},
    uri::{Connection, RbdUri},
};
use std::{
    collections::HashMap,
    env,
    ffi::{CString, c_int},
    fmt, io, ptr,
    sync::{Arc, LazyLock, Mutex, PoisonError, Weak},
};

/// How long a connection may take, in seconds.
const CONNECT_SECONDS: &str = "10";

/// The error of a function of the libraries, which return `-errno`.
pub(crate) fn error_of(code: c_int) -> io::Error {
    io::Error::from_raw_os_error(code.checked_neg().unwrap_or(0))
}

/// A string for the libraries. Names were checked for NUL when they were parsed.
pub(crate) fn c_string(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

/// A connection; see the module documentation.
pub(crate) struct Cluster {
    pub(crate) functions: &'static Functions,
    handle: Handle,
    /// Tells the cluster from all others.
    pub(crate) fsid: String,
}

// SAFETY: a `rados_t` may be used by all threads at once (rados/librados.h).
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cluster {}", self.fsid)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: `handle` is a cluster, and pools and images hold it by an `Arc`, so none is left.
        unsafe { (self.functions.rados_shutdown)(self.handle) };
    }
}

type Known = HashMap<Connection, Weak<Cluster>>;
static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

/// The user that `CEPH_ARGS` names.
fn user_of_arguments(arguments: &str) -> Option<String> {
    let mut words = arguments.split_whitespace();
    while let Some(word) = words.next() {
        let (key, value) = word.split_once('=').map_or((word, None), |(key, value)| (key, Some(value)));
        let is_name = matches!(key, "-n" | "--name");
        if is_name || matches!(key, "--id" | "--user" | "-i") {
            let value = value.or_else(|| words.next())?;
            return Some(if is_name { value.strip_prefix("client.")?.to_owned() } else { value.to_owned() });
        }
    }
    None
}

impl Cluster {
    /// The connection of an image's name.
    ///
    /// # Errors
    /// [`RbdError::NoLibrary`], [`RbdError::Cluster`].
    pub(crate) fn of(uri: &RbdUri) -> Result<Arc<Self>> {
        // Held while it connects: two connections of one name would be one too many.
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cluster) = known.get(&uri.connection).and_then(Weak::upgrade) {
            return Ok(cluster);
        }
        let cluster = Arc::new(Self::connect(uri)?);
        known.retain(|_, cluster| cluster.strong_count() > 0);
        known.insert(uri.connection.clone(), Arc::downgrade(&cluster));
        Ok(cluster)
    }

    fn connect(uri: &RbdUri) -> Result<Self> {
        let functions = functions().map_err(|why| RbdError::NoLibrary { name: uri.to_string(), why })?;
        let failed = |doing, code: c_int| match code {
            0.. => Ok(()),
            code => Err(RbdError::Cluster { name: uri.to_string(), doing, source: error_of(code) }),
        };
        let arguments = env::var("CEPH_ARGS").unwrap_or_default();
        let user = uri.connection.user.clone().or_else(|| user_of_arguments(&arguments));
        let user = c_string(&format!("client.{}", user.as_deref().unwrap_or("admin")));
        let mut handle: Handle = ptr::null_mut();
        // The library makes standard error non-blocking if it is a pipe. Standard output is often
        // the same pipe, and what is printed would be lost whenever its reader is slow.
        let flags = rustix::fs::fcntl_getfl(io::stderr());
        // SAFETY: the strings end with NUL, and `handle` is written before the call returns 0.
        let made = unsafe { (functions.rados_create2)(&mut handle, c"ceph".as_ptr(), user.as_ptr(), 0) };
        if let Ok(flags) = flags {
            // An error leaves it as the library has made it.
            let _ = rustix::fs::fcntl_setfl(io::stderr(), flags);
        }
        failed("make a client of the cluster", made)?;
        // From here on the handle is given back, whatever happens.
        let mut cluster = Self { functions, handle, fsid: String::new() };
        let conf = uri.connection.conf.as_deref().map(c_string);
        // SAFETY: a cluster that is not connected; a null path means the default places.
        let read = unsafe {
            (functions.rados_conf_read_file)(handle, conf.as_ref().map_or(ptr::null(), |conf| conf.as_ptr()))
        };
        // Without a file the monitors may be named by CEPH_ARGS.
        if conf.is_some() || read != -rustix::io::Errno::NOENT.raw_os_error() {
            failed("read the configuration", read)?;
        }
        // SAFETY: as above; a null name means CEPH_ARGS.
        failed("understand CEPH_ARGS", unsafe { (functions.rados_conf_parse_env)(handle, ptr::null()) })?;
        let seconds = uri.connection.timeout.as_secs().to_string();
        for (option, value) in [
            ("client_mount_timeout", CONNECT_SECONDS),
            ("rados_mon_op_timeout", &seconds),
            ("rados_osd_op_timeout", &seconds),
        ] {
            let (option, value) = (c_string(option), c_string(value));
            // SAFETY: as above.
            failed("set a timeout of the client", unsafe {
                (functions.rados_conf_set)(handle, option.as_ptr(), value.as_ptr())
            })?;
        }
        // SAFETY: a configured cluster.
        failed("connect to the cluster", unsafe { (functions.rados_connect)(handle) })?;
        // The id of the cluster is in the monitors' map, which may come after the connection. Until
        // then it is zeros.
        // SAFETY: a connected cluster.
        failed("get the maps of the cluster", unsafe { (functions.rados_wait_for_latest_osdmap)(handle) })?;
        let mut fsid = [0_u8; 64];
        // SAFETY: the length of the buffer is given.
        let len = unsafe { (functions.rados_cluster_fsid)(handle, fsid.as_mut_ptr().cast(), fsid.len()) };
        failed("get the id of the cluster", len)?;
        cluster.fsid = String::from_utf8_lossy(fsid.get(..len as usize).unwrap_or_default()).into_owned();
        Ok(cluster)
    }

    /// A setting of the client.
    pub(crate) fn setting(&self, option: &str) -> Option<String> {
        let option = c_string(option);
        let mut value = [0_u8; 256];
        // SAFETY: the length of the buffer is given; the value ends with NUL.
        let code = unsafe {
            (self.functions.rados_conf_get)(self.handle, option.as_ptr(), value.as_mut_ptr().cast(), value.len())
        };
        let text = std::ffi::CStr::from_bytes_until_nul(&value).ok()?;
        (code == 0).then(|| text.to_string_lossy().into_owned())
    }
}

/// A pool, perhaps with a namespace.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) handle: Handle,
}

// SAFETY: an `rados_ioctx_t` may be used by all threads, as long as nobody changes its settings;
// only `open` does.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: images hold the pool by an `Arc`, so none uses it any more.
        unsafe { (self.cluster.functions.rados_ioctx_destroy)(self.handle) };
    }
}

impl Pool {
    /// The pool of an image's name.
    ///
    /// # Errors
    /// [`RbdError::Missing`]; as [`Cluster::of`].
    pub(crate) fn of(uri: &RbdUri) -> Result<Arc<Self>> {
        let cluster = Cluster::of(uri)?;
        let (name, mut handle) = (c_string(&uri.pool), ptr::null_mut());
        // SAFETY: a connected cluster; `handle` is written before the call returns 0.
        let code = unsafe { (cluster.functions.rados_ioctx_create)(cluster.handle, name.as_ptr(), &mut handle) };
        if code < 0 {
            let source = error_of(code);
            return Err(match source.kind() {
                io::ErrorKind::NotFound => RbdError::Missing { name: uri.to_string(), what: "pool" },
                _ => RbdError::Cluster { name: uri.to_string(), doing: "open the pool", source },
            });
        }
        let pool = Self { cluster, handle };
        if let Some(namespace) = &uri.namespace {
            let namespace = c_string(namespace);
            // SAFETY: a pool that nobody else has yet.
            unsafe { (pool.cluster.functions.rados_ioctx_set_namespace)(pool.handle, namespace.as_ptr()) };
        }
        Ok(Arc::new(pool))
    }

    /// Names of the images.
    pub(crate) fn images(&self) -> io::Result<Vec<String>> {
        let mut names = vec![0_u8; 64 << 10];
        loop {
            let mut len = names.len();
            // SAFETY: `len` is the length of the buffer, and is written with what is needed.
            let code = unsafe { (self.cluster.functions.rbd_list)(self.handle, names.as_mut_ptr().cast(), &mut len) };
            if code >= 0 {
                let found = names.get(..code as usize).unwrap_or_default().split(|byte| *byte == 0);
                let found = found.filter(|name| !name.is_empty());
                return Ok(found.map(|name| String::from_utf8_lossy(name).into_owned()).collect());
            }
            let is_short = code == -rustix::io::Errno::RANGE.raw_os_error();
            if !is_short || len <= names.len() {
                return Err(error_of(code));
            }
            names.resize(len, 0);
        }
    }

    /// Makes an empty image.
    pub(crate) fn create(&self, image: &str) -> io::Result<()> {
        let (name, mut order) = (c_string(image), 0);
        // SAFETY: an order of 0 means the default, and is written.
        self.result(unsafe { (self.cluster.functions.rbd_create)(self.handle, name.as_ptr(), 0, &mut order) })
    }

    /// Removes an image.
    pub(crate) fn remove(&self, image: &str) -> io::Result<()> {
        let name = c_string(image);
        // SAFETY: a name that ends with NUL.
        self.result(unsafe { (self.cluster.functions.rbd_remove)(self.handle, name.as_ptr()) })
    }

    /// Renames an image. One of the new name is not replaced.
    pub(crate) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let (from, to) = (c_string(from), c_string(to));
        // SAFETY: names that end with NUL.
        self.result(unsafe { (self.cluster.functions.rbd_rename)(self.handle, from.as_ptr(), to.as_ptr()) })
    }

    fn result(&self, code: c_int) -> io::Result<()> {
        if code < 0 { Err(error_of(code)) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_of_ceph_args_is_found() {
        for (arguments, user) in [
            ("", None),
            ("--id lab", Some("lab")),
            ("--conf /x --id=lab", Some("lab")),
            ("-n client.lab", Some("lab")),
            ("--name=client.lab --user other", Some("lab")),
            ("--id", None),
            ("--name osd.1", None),
            ("--keyring /x", None),
        ] {
            assert_eq!(user_of_arguments(arguments).as_deref(), user, "{arguments}");
        }
    }
}
