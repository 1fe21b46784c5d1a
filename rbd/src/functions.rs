//! The functions of librados and librbd that are used, loaded at run time.
//!
//! The libraries are loaded once and stay loaded: their threads outlive any connection. The types
//! are those of `rados/librados.h` and `rbd/librbd.h` of Ceph 15 and later; the ABI of both has
//! been stable since long before (`librados.so.2`, `librbd.so.1`).

#![allow(unsafe_code, reason = "functions of a C library")]

use libloading::Library;
use std::{
    ffi::{c_char, c_int, c_void},
    sync::OnceLock,
};

/// A pointer of the libraries, which nobody looks into.
pub(crate) type Handle = *mut c_void;

/// What `rbd_diff_iterate2` calls for each extent: offset, length, whether it exists, the argument.
pub(crate) type DiffCallback = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// `rbd_snap_info_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct SnapInfo {
    pub(crate) id: u64,
    pub(crate) size: u64,
    pub(crate) name: *const c_char,
}

macro_rules! functions {
    ($($library:ident { $($name:ident($($argument:ty),*) -> $result:ty;)* })*) => {
        /// The functions, by their names in C.
        pub(crate) struct Functions {
            $($(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $result,)*)*
        }

        impl Functions {
            fn load() -> Result<Self, String> {
                let said = |error: libloading::Error| error.to_string();
                $(
                    // SAFETY: the initialisers of Ceph's libraries have no conditions.
                    let $library = unsafe { Library::new(file_name(stringify!($library))) }.map_err(said)?;
                    // Never unloaded: its threads run until the process ends.
                    let $library: &'static Library = Box::leak(Box::new($library));
                )*
                Ok(Self {
                    $($(
                        // SAFETY: the type is the one in the header of the library.
                        $name: *unsafe { $library.get(concat!(stringify!($name), "\0").as_bytes()) }.map_err(said)?,
                    )*)*
                })
            }
        }
    };
}

fn file_name(library: &str) -> &'static str {
    match library {
        "rados" => "librados.so.2",
        _ => "librbd.so.1",
    }
}

functions! {
    rados {
        rados_create2(*mut Handle, *const c_char, *const c_char, u64) -> c_int;
        rados_conf_read_file(Handle, *const c_char) -> c_int;
        rados_conf_parse_env(Handle, *const c_char) -> c_int;
        rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
        rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
        rados_connect(Handle) -> c_int;
        rados_wait_for_latest_osdmap(Handle) -> c_int;
        rados_shutdown(Handle) -> ();
        rados_cluster_fsid(Handle, *mut c_char, usize) -> c_int;
        rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
        rados_ioctx_set_namespace(Handle, *const c_char) -> ();
        rados_ioctx_destroy(Handle) -> ();
    }
    rbd {
        rbd_create(Handle, *const c_char, u64, *mut c_int) -> c_int;
        rbd_remove(Handle, *const c_char) -> c_int;
        rbd_rename(Handle, *const c_char, *const c_char) -> c_int;
        rbd_list(Handle, *mut c_char, *mut usize) -> c_int;
        rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_close(Handle) -> c_int;
        rbd_get_size(Handle, *mut u64) -> c_int;
        rbd_get_features(Handle, *mut u64) -> c_int;
        rbd_get_id(Handle, *mut c_char, usize) -> c_int;
        rbd_resize(Handle, u64) -> c_int;
        rbd_read(Handle, u64, usize, *mut c_char) -> isize;
        rbd_write(Handle, u64, usize, *const c_char) -> isize;
        rbd_write_zeroes(Handle, u64, usize, c_int, c_int) -> isize;
        rbd_flush(Handle) -> c_int;
        rbd_diff_iterate2(Handle, *const c_char, u64, u64, u8, u8, DiffCallback, *mut c_void) -> c_int;
        rbd_snap_list(Handle, *mut SnapInfo, *mut c_int) -> c_int;
        rbd_snap_list_end(*mut SnapInfo) -> ();
        rbd_lock_acquire(Handle, c_int) -> c_int;
        rbd_is_exclusive_lock_owner(Handle, *mut c_int) -> c_int;
        rbd_set_image_notification(Handle, c_int, c_int) -> c_int;
        rbd_poll_io_events(Handle, *mut Handle, c_int) -> c_int;
        rbd_aio_create_completion(*mut c_void, *const c_void, *mut Handle) -> c_int;
        rbd_aio_read(Handle, u64, usize, *mut c_char, Handle) -> c_int;
        rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
        rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
        rbd_aio_flush(Handle, Handle) -> c_int;
        rbd_aio_get_return_value(Handle) -> isize;
        rbd_aio_get_arg(Handle) -> *mut c_void;
        rbd_aio_release(Handle) -> ();
    }
}

static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();

/// The functions.
///
/// # Errors
/// What the loader says if there are none.
pub(crate) fn functions() -> Result<&'static Functions, String> {
    FUNCTIONS.get_or_init(Functions::load).as_ref().map_err(Clone::clone)
}
