//! The process that serves one attached disk: it has the disk open, makes it a ublk device or
//! mounts it as a FUSE file, and moves its bytes until the device is stopped or the file unmounted.
//!
//! What it has to say it says on its standard output, a line of JSON each ([`ServerSays`]), to the
//! supervisor that started it: first that the disk is there (or why not), then each new size that
//! the disk gets, at the end that it is closed (or what was lost). Stopping and unmounting are how
//! it is told to end. It does nothing else, so nothing else can take it down with it, and when it
//! dies all the same, the supervisor sees that its output has ended.

use crate::{
    attach::error::AttachError,
    fuse::{self, DISK_NAME, FuseError, MountOptions, Shape, View},
    ublk,
};
use diskwright_disk::Disk;
use diskwright_store::{BlockDevice, EngineKind, resize::SizeWatcher};
use serde::{Deserialize, Serialize};
use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, mpsc::channel},
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

/// Where the server is to show the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum At {
    /// As a FUSE file, at this mount point.
    Mount(PathBuf),
    /// As a ublk device, with this mark.
    Ublk(u64),
}

/// Where the server has the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shown {
    /// As a file.
    File(PathBuf),
    /// As the ublk device of this number, which can be started.
    Ublk(u32),
}

/// A line from the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServerSays {
    /// The disk is there.
    Ready {
        /// As what.
        shown: Shown,
        /// Size in bytes.
        size: u64,
        /// Logical sector in bytes.
        sector_size: u32,
        /// Nobody can write.
        read_only: bool,
        /// What the user should know, a sentence each.
        warnings: Vec<String>,
    },
    /// It could not be opened or mounted.
    Failed {
        /// Why, as a sentence.
        error: String,
        /// It is the machine that lacks something, and not the disk.
        #[serde(default)]
        machine: bool,
    },
    /// The disk has another size.
    Resized {
        /// Size in bytes.
        size: u64,
    },
    /// It was unmounted, or its device stopped: nobody can ask for anything any more, and it is
    /// being closed.
    Closing,
    /// It was unmounted, or its device stopped, and closed. With an error, what was written and not
    /// flushed may be lost.
    Closed {
        /// What went wrong.
        error: Option<String>,
    },
}

impl ServerSays {
    /// Writes the line. That nobody listens any more is for nobody to hear.
    pub fn say(&self, out: &mut dyn Write) {
        if let Ok(mut line) = serde_json::to_vec(self) {
            line.push(b'\n');
            let _ = out.write_all(&line).and_then(|()| out.flush());
        }
    }
}

/// Seconds since 1970.
pub(crate) fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Shows `disk` at a place, serves it until it is taken from there, and closes it. Everything it
/// has to say goes to `out`.
///
/// # Errors
/// What it has said already.
pub fn serve_disk(
    disk: Arc<Disk>,
    at: &At,
    engine: EngineKind,
    out: &mut (dyn Write + Send),
) -> Result<(), AttachError> {
    // Memory that the kernel frees by writing to this disk must not be waited for here. Without the
    // right to ask for that it is a risk that every user-space disk has.
    let _ = rustix::process::configure_io_flusher_behavior(true);
    let out = Mutex::new(out);
    let say = |says: ServerSays| says.say(&mut **out.lock().unwrap_or_else(PoisonError::into_inner));
    let (tell, told) = channel();
    let watcher: Arc<SizeWatcher> = Arc::new(move |size| {
        let _ = tell.send(size);
    });
    disk.watch_size(&watcher);
    thread::scope(|scope| {
        scope.spawn(|| told.into_iter().for_each(|size| say(ServerSays::Resized { size })));
        let result = serve_and_close(&disk, at, engine, &say);
        // With it goes the sender of the channel, and the thread ends.
        drop(watcher);
        result
    })
}

fn serve_and_close(disk: &Arc<Disk>, at: &At, engine: EngineKind, say: &dyn Fn(ServerSays)) -> Result<(), AttachError> {
    let mut is_ready = false;
    let served = match at {
        At::Mount(point) => serve_file(disk, point, engine, &mut |says| {
            is_ready = true;
            say(says);
        }),
        At::Ublk(mark) => {
            let device: Arc<dyn BlockDevice> = disk.clone();
            let served = ublk::serve(device, *mark, engine, |number| {
                is_ready = true;
                say(ready(disk, Shown::Ublk(number)));
            });
            served.map_err(AttachError::Ublk)
        }
    };
    if let Err(error) = &served
        && !is_ready
    {
        let machine = matches!(error, AttachError::Fuse(FuseError::NoDevice { .. } | FuseError::Mount { .. }));
        say(ServerSays::Failed { error: error.to_string(), machine });
        return served;
    }
    say(ServerSays::Closing);
    let closed = disk.close().map_err(|error| AttachError::Server(error.to_string()));
    let result = served.and(closed);
    say(ServerSays::Closed { error: result.as_ref().err().map(ToString::to_string) });
    result
}

fn ready(disk: &Disk, shown: Shown) -> ServerSays {
    let geometry = disk.geometry();
    ServerSays::Ready {
        shown,
        size: geometry.size_bytes,
        sector_size: geometry.logical_sector_bytes,
        read_only: geometry.read_only,
        warnings: disk.warnings().to_vec(),
    }
}

fn serve_file(
    disk: &Arc<Disk>,
    point: &Path,
    engine: EngineKind,
    say: &mut dyn FnMut(ServerSays),
) -> Result<(), AttachError> {
    let geometry = disk.geometry();
    let shape = fuse::shape_of(point)?;
    let fd = fuse::mount(point, &MountOptions { shape, read_only: geometry.read_only })?;
    let fuse_file = match shape {
        Shape::File => point.to_owned(),
        Shape::Directory => point.join(DISK_NAME),
    };
    say(ready(disk, Shown::File(fuse_file)));
    let view = View {
        shape,
        size_bytes: geometry.size_bytes,
        unit_bytes: geometry.physical_sector_bytes.max(4096),
        read_only: geometry.read_only,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        time_seconds: now_seconds(),
    };
    let device: Arc<dyn BlockDevice> = disk.clone();
    Ok(fuse::serve(fd, device, view, engine)?)
}
